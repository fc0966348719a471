"""The plug-ins for ``torch.distributed.checkpoint``: saves, loads and staging through a policy's tiers."""

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

from tierstate.manifest.errors import PolicyError, StateMismatch, TierstateError
from tierstate.manifest.head import Head
from tierstate.manifest.log import check_run
from tierstate.tiers.placement import may_pickle
from tierstate.tiers.policy import Policy

from .collecting import uncollected
from .dcp_commit import commit
from .dcp_engine import Engine, close, engine_of
from .dcp_leaves import paths_of, plan_of
from .dcp_reading import Load, chosen
from .dcp_staging import TierStager
from .dcp_step import means_step, step_of
from .dcp_writing import Part, checked, due, write
from .planning import checked_metadata, checked_step

__all__ = ["TierReader", "TierStager", "TierWriter", "close"]

log = logging.getLogger("tierstate")


class _Hosts(NamedTuple):
    """What writers say of themselves in plans. Nothing of a single save: DCP may give it to later ones too."""

    names: tuple[str, ...]


def _policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """A policy, by itself, its text or its path: a text has more than one line."""
    if isinstance(policy, Policy):
        return policy
    return Policy.parse(policy) if isinstance(policy, str) and "\n" in policy else Policy.load(policy)


class TierWriter(StorageWriter):
    """Saves through the tiers of a policy: ``dcp.save(state, storage_writer=TierWriter(policy, "run"),
    checkpoint_id=100)``.

    Each rank writes its items into packs; the coordinator joins what all have written to one version, whose record it
    creates. Versions are the same as a `Checkpointer` makes. It can be pickled; tiers are opened by the process that
    writes, when it first does.

    Args:
        policy: a `Policy`, the text of one, or the path of its file.
        run: name of the run.
        step: of saves without a ``checkpoint_id``; by default the one after the newest.
        metadata: JSON values to find with the version.
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
        self._metadata = checked_metadata(metadata)
        self._said: int | None = None
        self._rank = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """A save begins; its step is what the id says (see `dcp_step.step_of`)."""
        self._said = None if checkpoint_id is None else step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Who saves what, for planners and logs."""
        return StorageMeta(f"{self._run}/{'' if self._said is None else self._said}", save_id=str(uuid.uuid4()))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Told by DCP who this is.

        Raises:
            TierstateError: ranks are to save without speaking to each other.
        """
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        if kwargs.get("use_collectives") is False and many and torch.distributed.get_world_size() > 1:
            raise TierstateError("a version needs the parts of all ranks: save with use_collectives=True")
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, and on which host it is."""
        return dataclasses.replace(plan, storage_data=_Hosts((socket.gethostname(),)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, and on which hosts they are.

        Raises:
            PolicyError: the durable tier is one that not all ranks see.
        """
        told = [plan.storage_data for plan in plans]
        names = tuple(sorted({name for hosts in told if isinstance(hosts, _Hosts) for name in hosts.names}))
        self._check_durable(len(plans), len(names))
        return [dataclasses.replace(plan, storage_data=_Hosts(names)) for plan in plans]

    def _check_durable(self, ranks: int, hosts: int) -> None:
        durable = self._engine.shelf(self._policy.durable)
        shared = durable.tier.traits.shared
        if shared == "process" or (shared == "host" and hosts > 1):
            raise PolicyError(
                f"`durable: {durable.name}` is seen by the {'ranks of one host' if shared == 'host' else 'process'} "
                f"alone, and {ranks} ranks on {hosts} hosts save through DCP; name a tier that all of them see"
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        Raises:
            CaptureError: a value cannot be saved; the message names its key and remedy.
            TierstateError: the durable tier did not take it.
        """
        engine, said = self._engine, self._said
        self._said = None  # DCP does not call `reset` for a save without an id
        with engine.turn:
            now, hosts = time.time(), plan.storage_data.names if isinstance(plan.storage_data, _Hosts) else ("",)
            where = due(engine, self._step if said is None else said, now, len(hosts))
            with uncollected():
                found, listed = plan_of(plan, planner, may_pickle(self._policy))
            chunk, digest = self._policy.chunk, self._policy.digest
            head = Head(self._run, where.seq, where.step, now, chunk=chunk, digest=digest)
            shares = write(engine, found, head, self._rank, where.shelves)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex("tierstate"), found.total, Part(shares, listed))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator's part: join what all ranks have written, and create the record.

        Raises: as `dcp_commit.commit`.
        """
        order = paths_of(metadata.planner_data, list(metadata.planner_data or metadata.state_dict_metadata))
        engine = self._engine
        with engine.turn, uncollected():
            version = commit(engine, checked(results), order, self._metadata)
        log.info("saved step %d of run %s through DCP as version %d", version.head.step, self._run, version.head.seq)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the id says a step."""
        return means_step(checkpoint_id)

    @property
    def _engine(self) -> Engine:
        return engine_of(self._policy, self._run)


class TierReader(StorageReader):
    """Loads what `TierWriter` or a `Checkpointer` saved: ``dcp.load(state, storage_reader=TierReader(policy, "run"))``.

    Every chunk that a rank's part of the state meets is read once, from the nearest tier that has it, and verified.

    Args:
        policy: a `Policy`, the text of one, or the path of its file.
        run: name of the run.
        step, version, tag: which version, by its step, the beginning of its id, or a name that it was given; a
            ``checkpoint_id`` comes before them. By default the newest whole one.
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
        self._load: Load | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """A load begins, of the step that the id says."""
        self._said = None if checkpoint_id is None else step_of(checkpoint_id)
        self._load = None

    # The name of the rest matters: a method with `kwargs` would be asked again, for metadata of a single rank.
    def read_metadata(self, *args: Any, **rest: Any) -> Metadata:
        """What DCP plans a load by, made from the version's record.

        Raises:
            NotFound: there is no such version.
            Damaged: it, or a value in it, is whole in no tier.
        """
        engine = engine_of(self._policy, self._run)
        with uncollected():
            if self._said is not None:
                entry = chosen(engine, self._said, None, None)
            else:
                tag = engine.tagged(self._tag)
                entry = chosen(engine, self._step, self._version, tag)
            self._load = Load(engine, entry, may_pickle(self._policy))
        return self._load.sight.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing more: all is known from the metadata on."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, and which version it is of."""
        return dataclasses.replace(plan, storage_data=self._loading.sight.version.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, if all are of one version.

        Raises:
            StateMismatch: ranks found different versions.
        """
        found = {str(plan.storage_data): rank for rank, plan in reversed(list(enumerate(plans)))}
        if len(found) > 1:
            told = ", ".join(f"rank {rank}: {version[:12]}" for version, rank in sorted(found.items(), key=_by_rank))
            raise StateMismatch(f"ranks found different versions of run {self._run!r} ({told}); name a step")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank's plan asks for.

        Raises: as `dcp_reading.Load.serve`.
        """
        load, self._load, self._said = self._loading, None, None
        load.serve(plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _loading(self) -> Load:
        if self._load is None:
            raise TierstateError("DCP reads the metadata first, and that has failed, or was not done")
        return self._load

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the id says a step."""
        return means_step(checkpoint_id)


def _by_rank(item: tuple[str, int]) -> int:
    return item[1]
