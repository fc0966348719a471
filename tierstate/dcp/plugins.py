"""The storage writer and the storage reader for ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tierstate.engine.placement import may_pickle
from tierstate.engine.ranks.save.join import size_of
from tierstate.engine.restore.restore import RestoreSpec
from tierstate.manifest.arguments import as_step
from tierstate.manifest.errors import PolicyError, StateMismatch, TierstateError
from tierstate.manifest.history.log import check_run
from tierstate.manifest.history.tags import check_tag
from tierstate.pause_gc import gc_paused
from tierstate.providers.tree.rename import Rename
from tierstate.providers.values.metadata import json_metadata
from tierstate.tiers.policy.policy import Policy

from .commitment import Commitment
from .engine import group_of, loading_engine, saves_before, saving_engine
from .read import VersionLoad, choose_version, read_alone
from .step import names_step, step_of
from .together import load_together
from .write import PeerFailed

log = logging.getLogger("tierstate")


class _Told(NamedTuple):
    """What a writer tells the coordinator in its DCP save plan. DCP may reuse a plan for later saves, with what was
    told then, also by a writer of another kind.

    Attributes:
        step: the step that this rank saves; None for the next one.
        before: how many saves these ranks have made before. What was told before an earlier one is passed over.
    """

    step: int | None
    before: int


def _policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """The policy of an object, of YAML text (more than one line), or of a file's path."""
    if isinstance(policy, Policy):
        return policy
    return Policy.parse(policy) if isinstance(policy, str) and "\n" in policy else Policy.load(policy)


class TierWriter(StorageWriter):
    """Saves through the tiers of a policy: ``dcp.save(state, storage_writer=TierWriter(policy, "run"),
    checkpoint_id=100)``.

    All writers of a policy and a run in one process share a `Checkpointer`, which writes each rank's items to the tiers
    as it does its own saves: ``dcp.save`` returns when the version is committed in the policy's ``durable`` tier, and
    copies to slower tiers go on in the background. The versions have the same format. A writer can be pickled; the
    process that saves opens the tiers at its first save.

    Args:
        policy: a `Policy`, the text of one, or the path of its file.
        run: name of the run.
        step: step of saves without a ``checkpoint_id``; by default one more than that of the last save, or of the
            newest version before the first.
        metadata: what is stored with the version, as JSON values (see `Checkpointer.save`).
        process_group: the ranks that save together, if DCP is given a group of some ranks; by default all ranks.
        tag: a tag that each saved version gets; the version before loses it.
        marker: whether a folder that is given as ``checkpoint_id`` gets a file ``.metadata`` once the version is
            committed, for tools that look for one, as torchtitan does. It is no metadata of DCP: the version is in the
            tiers.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        process_group: Any = None,
        tag: str | None = None,
        marker: bool = False,
    ) -> None:
        super().__init__()
        self._policy, self._run = _policy(policy), check_run(run)
        self._step = None if step is None else as_step(step)
        self._metadata = json_metadata(metadata)
        size_of(process_group)  # raises if it is none
        self._group = process_group
        self._tag, self._marker = None if tag is None else check_tag(tag), marker
        self._said: int | None = None
        self._where: Any = None
        self._told = _Told(None, 0)
        self._planned: int | None = None
        self._committed: Commitment | None = None
        self._failure: PeerFailed | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The process by which DCP saves has a default group of the same ranks.
        return {**vars(self), "_committed": None, "_failure": None, "_group": None}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called by DCP when a save begins; the step is read from the id (see `tierstate.dcp.step.step_of`)."""
        self._said = None if checkpoint_id is None else step_of(checkpoint_id)
        self._where = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """The run and the step, for planners and logs."""
        return StorageMeta(f"{self._run}/{'' if self._said is None else self._said}", save_id=str(uuid.uuid4()))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP before it plans.

        Raises:
            TierstateError: several ranks save without collectives.
        """
        if kwargs.get("use_collectives") is False and size_of(group_of(self._group)) > 1:
            raise TierstateError("a version needs the parts of all ranks: save with use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of this rank, with its step."""
        step = self._step if self._said is None else self._said
        self._told = _Told(step, saves_before(self._policy, self._run, group_of(self._group)))
        self._planned = None
        return dataclasses.replace(plan, storage_data=self._told)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, unchanged, after a check that the ranks save together. Called by DCP on the coordinator, which is
        each rank if it saves alone.

        Raises:
            PolicyError: DCP saves by other ranks than this writer.
            StateMismatch: ranks save different steps.
        """
        told = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Told)]
        size = size_of(group_of(self._group))
        if len(plans) not in (1, size):
            raise PolicyError(
                f"DCP saves by {len(plans)} ranks, and this writer by {size}: give TierWriter the same process_group"
            )
        # Of plans that DCP reuses nothing is told now: the commit compares the steps as well.
        if len(steps := {one.step for one in told if one.before == self._told.before}) > 1:
            given = ", ".join(sorted(map(str, steps)))
            raise StateMismatch(f"ranks save different steps: {given}; give all the same checkpoint_id")
        self._planned = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Capture this rank's part; it is written to the tiers meanwhile. Returns when the state may change.

        Raises:
            CaptureError: a value cannot be saved; the message names its key and a remedy.
            RankFailed: a rank does not answer.
            TierstateError: a tier fails, and is further behind than its ``max_lag``.
        """
        said, self._said = self._said, None  # DCP does not call `reset` for a save without an id
        where, self._where = self._where, None
        self._committed = self._failure = None
        group = group_of(self._group)
        # Not as the plan says, which may be of an earlier save. Only a coordinator can save alone, and it has planned.
        ranks = size_of(group) if self._planned is None else self._planned
        engine = saving_engine(self._policy, self._run, group if ranks > 1 else None)
        nbytes = 0
        try:
            save = engine.save(plan, planner, self._step if said is None else said, self._metadata)
            nbytes = save._save_state.nbytes
            folder = Path(os.fsdecode(where)) if self._marker and isinstance(where, (str, os.PathLike)) else None
            self._committed = Commitment(engine, save, self._tag, folder)
        except PeerFailed as error:
            self._failure = error  # DCP raises that rank's own error on all ranks
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex("tierstate"), nbytes, None)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP on the coordinator: wait until the version is committed in the durable tier.

        Raises:
            StateMismatch: the parts are not of one version, or do not cover the state.
            RankFailed: a rank could not write its part.
            TierstateError: the durable tier failed, so nothing is saved; or on some host the tag could not be given, or
                the marker not be written, of a version that is saved.
            OSError: the marker could not be written here; the version is saved.
        """
        if self._failure is not None:
            raise self._failure
        committed, self._committed = self._committed, None
        if committed is None:
            raise TierstateError("DCP writes the data first, and that was not done")
        committed.finish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the id names a step."""
        return names_step(checkpoint_id)


class TierReader(StorageReader):
    """Loads what `TierWriter` or a `Checkpointer` saved: ``dcp.load(state, storage_reader=TierReader(policy, "run"))``.

    Every chunk that a rank needs is read once, from the nearest tier that has it, and verified. Where not all ranks see
    the policy's ``durable`` tier, such as disks of several hosts, they load together: they agree on a version that they
    have whole between them, and pass its chunks on to each other. Else each rank reads by itself.

    Args:
        policy: a `Policy`, the text of one, or the path of its file.
        run: name of the run.
        step, version, tag: which version: its step, the beginning of its id, or a tag; a ``checkpoint_id`` takes
            precedence over them. By default the newest version that is complete.
        rename: other names for saved leaves, as in `Checkpointer.load`: `ts.unwrapped`, a mapping of patterns, a
            function, or a list of these. The same on all ranks.
        process_group: the ranks that load together, if DCP is given a group of some ranks; by default all ranks.
        alone: this rank reads by itself in any case, as it must where ``dcp.load`` is given ``no_dist=True``.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str,
        *,
        step: int | None = None,
        version: str | None = None,
        tag: str | None = None,
        rename: Rename | None = None,
        process_group: Any = None,
        alone: bool = False,
    ) -> None:
        super().__init__()
        if tag is not None and not (step is None and version is None):
            raise ValueError(f"tag {tag!r} names a version; give no step and no id beside it")
        self._policy, self._run = _policy(policy), check_run(run)
        self._step, self._version, self._tag = None if step is None else as_step(step), version, tag
        size_of(process_group)  # raises if it is none
        self._rename, self._group, self._alone = rename, process_group, alone
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
            Unreadable: a tier that may have the rest of the version cannot be asked now.
            StateMismatch: ``rename`` gives one name to several leaves, or the version is none that DCP can load.
            RankFailed: the ranks load together, and another one failed, or did not come.
        """
        step, version, tag = self._step, self._version, self._tag
        if self._said is not None:
            step, version, tag = self._said, None, None
        allowed, group = may_pickle(self._policy), None if self._alone else group_of(self._group)
        engine = loading_engine(self._policy, self._run, group)
        with gc_paused():
            if engine.parted and not self._alone:
                wanted = RestoreSpec(step, version, allow_pickle=allowed, rename=self._rename)
                self._load, found = load_together(engine, wanted, tag)
            else:
                entry = choose_version(engine, step, version, engine.tagged(tag))
                found = entry.version
                self._load = VersionLoad(found, allowed, read_alone(engine, entry), self._rename)
            engine.loaded(found.id)
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
