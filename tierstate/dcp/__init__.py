"""Plug-ins for ``torch.distributed.checkpoint`` (DCP): a storage writer, a storage reader, and a stager."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tierstate.engine.placement import may_pickle
from tierstate.engine.save.plan import checked_step
from tierstate.manifest.errors import PolicyError, StateMismatch, TierstateError
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.log import check_run
from tierstate.pause_gc import gc_paused
from tierstate.providers.values.metadata import json_metadata
from tierstate.tiers.policy.policy import Policy

from .commit import commit_parts
from .engine import DcpEngine, close, engine_of
from .leaves import paths_of, plan_of
from .read import VersionLoad, choose_version
from .staging import TierStager
from .step import names_step, step_of
from .write import RankPart, rank_parts, save_targets, write_part

__all__ = ["TierReader", "TierStager", "TierWriter", "close"]

log = logging.getLogger("tierstate")


class _Hosts(NamedTuple):
    """Host names of the ranks, and how many ranks there are, sent in DCP's save plans. Nothing that changes, since DCP
    may reuse a plan for later saves."""

    names: tuple[str, ...] = ("",)
    ranks: int = 1


def _policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """The policy of an object, of YAML text (more than one line), or of a file's path."""
    if isinstance(policy, Policy):
        return policy
    return Policy.parse(policy) if isinstance(policy, str) and "\n" in policy else Policy.load(policy)


class TierWriter(StorageWriter):
    """Saves through the tiers of a policy: ``dcp.save(state, storage_writer=TierWriter(policy, "run"),
    checkpoint_id=100)``.

    Each rank writes its items into packs. The coordinator merges the parts of all ranks into one version and creates
    its record. The versions have the same format as those of a `Checkpointer`. A writer can be pickled; the process
    that saves opens the tiers at its first save.

    Args:
        policy: a `Policy`, the text of one, or the path of its file.
        run: name of the run.
        step: step of saves without a ``checkpoint_id``; by default one more than the newest version's.
        metadata: what is stored with the version, as JSON values (see `Checkpointer.save`).
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._policy, self._run = _policy(policy), check_run(run)
        self._step = None if step is None else checked_step(step)
        self._metadata = json_metadata(metadata)
        self._said: int | None = None
        self._rank = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called by DCP when a save begins; the step is read from the id (see `tierstate.dcp.step.step_of`)."""
        self._said = None if checkpoint_id is None else step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """The run and the step, for planners and logs."""
        return StorageMeta(f"{self._run}/{'' if self._said is None else self._said}", save_id=str(uuid.uuid4()))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP with this process's rank.

        Raises:
            TierstateError: several ranks save without collectives.
        """
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        if kwargs.get("use_collectives") is False and many and torch.distributed.get_world_size() > 1:
            raise TierstateError("a version needs the parts of all ranks: save with use_collectives=True")
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of this rank, with the name of its host."""
        return dataclasses.replace(plan, storage_data=_Hosts((socket.gethostname(),)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the names of all hosts.

        Raises:
            PolicyError: not all ranks see the same objects in the durable tier.
        """
        told = [plan.storage_data for plan in plans]
        names = tuple(sorted({name for hosts in told if isinstance(hosts, _Hosts) for name in hosts.names}))
        self._check_durable(len(plans), len(names))
        return [dataclasses.replace(plan, storage_data=_Hosts(names, len(plans))) for plan in plans]

    def _check_durable(self, ranks: int, hosts: int) -> None:
        durable = self._engine.tier_run(self._policy.durable)
        shared = durable.tier.traits.shared
        if shared == "process" or (shared == "host" and hosts > 1):
            raise PolicyError(
                f"`durable: {durable.name}` is seen by the {'ranks of one host' if shared == 'host' else 'process'} "
                f"alone, and {ranks} ranks on {hosts} hosts save through DCP; name a tier that all of them see"
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part to all tiers that are due; returns when it is written.

        Raises:
            CaptureError: a value cannot be saved; the message names its key and a remedy.
            TierstateError: the durable tier failed.
        """
        engine, said = self._engine, self._said
        self._said = None  # DCP does not call `reset` for a save without an id
        with engine.turn:
            now, hosts = time.time(), plan.storage_data if isinstance(plan.storage_data, _Hosts) else _Hosts()
            step = self._step if said is None else said
            where = save_targets(engine, step, now, len(hosts.names), alone=hosts.ranks == 1)
            with gc_paused():
                found, listed = plan_of(plan, planner, may_pickle(self._policy))
            chunk, digest = self._policy.chunk, self._policy.digest
            head = Head(self._run, where.seq, where.step, now, chunk=chunk, digest=digest)
            shares = write_part(engine, found, head, self._rank, where.tier_runs)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex("tierstate"), found.total, RankPart(shares, listed))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP on the coordinator: merge the parts of all ranks, and create the record.

        Raises: as `tierstate.dcp.commit.commit_parts`.
        """
        order = paths_of(metadata.planner_data, list(metadata.planner_data or metadata.state_dict_metadata))
        engine = self._engine
        with engine.turn, gc_paused():
            version = commit_parts(engine, rank_parts(results), order, self._metadata)
        log.info("saved step %d of run %s through DCP as version %d", version.head.step, self._run, version.head.seq)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the id names a step."""
        return names_step(checkpoint_id)

    @property
    def _engine(self) -> DcpEngine:
        return engine_of(self._policy, self._run)


class TierReader(StorageReader):
    """Loads what `TierWriter` or a `Checkpointer` saved: ``dcp.load(state, storage_reader=TierReader(policy, "run"))``.

    Every chunk that a rank needs is read once, from the nearest tier that has it, and verified.

    Args:
        policy: a `Policy`, the text of one, or the path of its file.
        run: name of the run.
        step, version, tag: which version: its step, the beginning of its id, or a tag; a ``checkpoint_id`` takes
            precedence over them. By default the newest version that is complete.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str,
        *,
        step: int | None = None,
        version: str | None = None,
        tag: str | None = None,
    ) -> None:
        super().__init__()
        if tag is not None and not (step is None and version is None):
            raise ValueError(f"tag {tag!r} names a version; give no step and no id beside it")
        self._policy, self._run = _policy(policy), check_run(run)
        self._step, self._version, self._tag = step, version, tag
        self._said: int | None = None
        self._load: VersionLoad | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called by DCP when a load begins; the step is read from the id."""
        self._said = None if checkpoint_id is None else step_of(checkpoint_id)
        self._load = None

    # DCP looks for a parameter named `kwargs`: it would call a method that has one again, for metadata of one rank.
    def read_metadata(self, *args: Any, **rest: Any) -> Metadata:
        """The metadata from which DCP plans the load, made from the version's record.

        Raises:
            NotFound: there is no such version.
            Damaged: no tier has all chunks of the version, or an intact copy of a value.
        """
        engine = engine_of(self._policy, self._run)
        with gc_paused():
            if self._said is not None:
                entry = choose_version(engine, self._said, None, None)
            else:
                tag = engine.tagged(self._tag)
                entry = choose_version(engine, self._step, self._version, tag)
            self._load = VersionLoad(engine, entry, may_pickle(self._policy))
        return self._load.view.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `read_metadata` has read all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of this rank, with the id of the version that it found."""
        return dataclasses.replace(plan, storage_data=self._loading.view.version.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged, after a check that all ranks read the same version.

        Raises:
            StateMismatch: ranks found different versions.
        """
        found = {str(plan.storage_data): rank for rank, plan in reversed(list(enumerate(plans)))}
        if len(found) > 1:
            told = ", ".join(f"rank {rank}: {version[:12]}" for version, rank in sorted(found.items(), key=_by_rank))
            raise StateMismatch(f"ranks found different versions of run {self._run!r} ({told}); name a step")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan into the state; returns when they are read.

        Raises: as `tierstate.dcp.read.VersionLoad.serve`.
        """
        load, self._load, self._said = self._loading, None, None
        load.serve(plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _loading(self) -> VersionLoad:
        if self._load is None:
            raise TierstateError("DCP reads the metadata first, and that has failed, or was not done")
        return self._load

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the id names a step."""
        return names_step(checkpoint_id)


def _by_rank(item: tuple[str, int]) -> int:
    return item[1]
