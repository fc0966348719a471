"""The Checkpointers behind the DCP plug-ins: one for each policy and run, which writers and readers share."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from tierstate.checkpointer import Checkpointer, Save
from tierstate.engine.placement import may_pickle
from tierstate.engine.ranks.save.join import size_of
from tierstate.engine.ranks.team.team import Team
from tierstate.engine.store.catalog import RunCatalog
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.arguments import as_step
from tierstate.manifest.errors import RankFailed, TierstateError, Unreadable
from tierstate.manifest.history.tags import TaggedVersion, TagTarget
from tierstate.tiers.concurrency import run_concurrently
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .write import PlanMaker

log = logging.getLogger("tierstate")


class DcpEngine:
    """One run in the tiers of a policy, as DCP saves and loads it.

    Args:
        policy: the tiers and the rules.
        run: the run's name.
        group: the ranks that save together: a process group or a `Team`; None: this process alone.
        restored: the id of the version that this process has loaded, the parent of its first one; by default the
            newest in the durable tier.

    Attributes:
        saves: how many saves this process has made by it.
        team: the ranks that save together; None for this process alone.
        told: keys of the messages by which this rank has told the coordinator what it has done after a commit.
    """

    def __init__(self, policy: Policy, run: str, group: Any = None, restored: str = "") -> None:
        self.policy, self.run, self.group = policy, run, group
        self.checkpointer = Checkpointer(policy, run, group, preemption=False)
        self.saves, self.restored = 0, restored
        together, self._pipeline = self.checkpointer._together, self.checkpointer._pipeline
        self._pipeline.required = (policy.durable,)
        self._plans = PlanMaker(may_pickle(policy), None if together is None else together.team)
        self.team = None if together is None else together.team
        self.told: list[str] = []
        self._turn = threading.Lock()

    @property
    def parted(self) -> bool:
        """Whether not all ranks see the same objects in the durable tier, so that they load together."""
        shared = self.tier_run(self.policy.durable).tier.traits.shared
        return self.team is not None and len(self.team.ranks_sharing(shared)) < self.team.size

    def save(self, plan: SavePlan, planner: SavePlanner, step: int | None, metadata: Mapping[str, Any] | None) -> Save:
        """Save this rank's part of a state. Returns when it is captured.

        Args:
            plan: the rank's final DCP save plan.
            planner: DCP's planner.
            step: the step; None for one more than the last one's.
            metadata: the user's metadata.

        Raises:
            CaptureError: a value cannot be saved; the message names its key and a remedy.
            PeerFailed: another rank cannot save one of its values, so that there is no version.
            TierstateError: a tier fails, and is further behind than its ``max_lag``.
        """
        with self._turn:
            if not self.saves:
                self._pipeline.continue_from(self.restored or self._newest())
            self.saves += 1
            if step is None:
                newest = self._pipeline.newest_step()
                step = 0 if newest is None else newest + 1
            step = as_step(step)
            start = time.monotonic()
            save = self.checkpointer._save_planned(lambda seq: self._plans.plan(seq, plan, planner), step, metadata)
        # DCP tells of the failure of this save; in other tiers it is logged. So no later save tells of it again.
        save._save_state.told |= set(save.tiers)
        save.wait_captured()
        self.checkpointer._events.emit("saved", step=step, seq=save.seq, seconds=time.monotonic() - start)
        self._pipeline.keep_up(save._save_state)
        return save

    def tag(self, name: str, seq: int) -> None:
        """Give a tag to a version that was saved by this engine, by its number.

        The coordinator writes it to all its tiers, a rank of another host to those that the coordinator does not see.

        Raises:
            TierstateError: the version cannot be read, or the tag could be written to no tier.
        """
        found = next((one.id for one in reversed(self.checkpointer.versions()) if one.seq == seq and one.id), None)
        if found is None:
            raise Unreadable(f"version {seq} is saved, and did not get the tag {name!r}: it cannot be read back now")
        if self.team is None or self.team.coordinator:
            self.checkpointer.tag(name, version=found)
        elif mine := [one for one in self.checkpointer._tier_runs if one.tier.traits.shared == "host" and _lasts(one)]:
            Tags(mine).give(name, TagTarget(seq, found))

    def _newest(self) -> str:
        try:
            newest = self.tier_run(self.policy.durable).newest()
        except TierstateError as error:
            log.warning("%s: its log cannot be read, so the next version has no parent: %s", self.policy.durable, error)
            return ""
        return "" if newest is None else newest.version.id

    def loaded(self, version: str) -> None:
        """This process has loaded a version, given by its id: it is the parent of the next one."""
        self.restored = version
        self._pipeline.continue_from(version)

    @property
    def arena(self) -> Arena:
        """The memory that bytes pass through."""
        return self.checkpointer._arena

    def tier_run(self, tier: str) -> TierRun:
        """The run in the tier with this name."""
        return next(tier_run for tier_run in self.checkpointer._tier_runs if tier_run.name == tier)

    def catalog(self) -> RunCatalog:
        """The versions of the run in all tiers."""
        return self.checkpointer._catalog()

    def tagged(self, tag: str | None) -> TaggedVersion | None:
        """The version of a tag; None without a tag. Raises NotFound if no version has it."""
        return self.checkpointer._tagged(tag, None, None)

    def close(self) -> None:
        """Finish what is under way and what is owed, as `Checkpointer.close`; errors are only logged."""
        try:
            self.checkpointer.close()
        except TierstateError as error:
            log.error("run %s: closed with an error: %s", self.run, error)


_Name = tuple[int, str, bytes]


class _Engines:
    """The engines of one policy and run; loads use the last one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines: list[DcpEngine] = []


_OPEN: dict[_Name, _Engines] = {}


_LOCK = threading.Lock()


def engine_of(policy: Policy, run: str) -> DcpEngine:
    """The engine for loads by one rank: the one that saves this run in this process, or else one of its own.

    It is kept because a trainer may make a new writer for each save, and DCP's save process unpickles one for each.

    Raises:
        TierstateError: a tier could not be opened.
    """
    found = _engines(policy, run)
    with found.lock:
        return found.engines[-1] if found.engines else _open(found.engines, policy, run, None)


def loading_engine(policy: Policy, run: str, group: Any) -> DcpEngine:
    """The engine for a load by these ranks. Waits for all of them where one rank may not see all of the durable tier.

    Args:
        group: as for `DcpEngine`.

    Raises:
        TierstateError: a tier could not be opened.
        RankFailed: not all ranks came.
    """
    engine = engine_of(policy, run)
    shared = engine.tier_run(policy.durable).tier.traits.shared
    if size_of(group) == 1 or shared == "site" or (shared == "host" and _on_one_host()):
        return engine
    if _same_ranks(engine.group, group):
        return engine  # a group of its own, as for asynchronous saves: closing that would break them off
    try:
        return saving_engine(policy, run, group)
    except RankFailed as error:
        # In the message, as DCP tells nothing else.
        raise RankFailed(
            f"{error}; all ranks load together, as a rank may not see all of {policy.durable!r}: give TierReader the "
            "process_group of dcp.load, or alone=True where a rank loads by itself",
            error.ranks,
        ) from error


def saving_engine(policy: Policy, run: str, group: Any) -> DcpEngine:
    """The engine for saves by these ranks. Waits for all of them at the first save.

    One that these ranks do not use any more is closed: the one for loads before the first save, and those of other
    groups of ranks.

    Args:
        group: as for `DcpEngine`.

    Raises:
        TierstateError: a tier could not be opened.
        RankFailed: not all ranks came.
    """
    found = _engines(policy, run)
    with found.lock:
        for engine in found.engines:
            if engine.group is group:
                return engine
        return _open(found.engines, policy, run, group)


def saves_before(policy: Policy, run: str, group: Any) -> int:
    """How many saves these ranks have made by their engine; 0 without one. Each rank counts the same.

    Args:
        group: as for `DcpEngine`.
    """
    return next((engine.saves for engine in [*_engines(policy, run).engines] if engine.group is group), 0)


def _open(engines: list[DcpEngine], policy: Policy, run: str, group: Any) -> DcpEngine:
    restored = next((engine.restored for engine in reversed(engines) if engine.restored), "")
    for engine in [engine for engine in engines if group is not None and (engine.group or not engine.saves)]:
        engines.remove(engine)
        engine.close()
    engine = DcpEngine(policy, run, group, restored)
    # Loads use the last one: that of the ranks which save together, where there is one.
    engines.insert(0 if group is None else len(engines), engine)
    return engine


def _engines(policy: Policy, run: str) -> _Engines:
    with _LOCK:
        return _OPEN.setdefault((os.getpid(), run, pickle.dumps(policy)), _Engines())


def group_of(given: Any) -> Any:
    """The ranks of a writer: as given, or else the default process group; None where there is none."""
    if given is not None:
        return given
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if together else None


def _same_ranks(one: Any, other: Any) -> bool:
    """Whether two process groups have the same ranks, in the same order."""
    if one is other or one is None or isinstance(one, Team) or isinstance(other, Team):
        return one is other
    ranks_of = torch.distributed.get_process_group_ranks
    return ranks_of(one) == ranks_of(other)


def _on_one_host() -> bool:
    """Whether the launcher says that all ranks of the job are on this host."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return here is not None and here == os.environ.get("WORLD_SIZE") and "TIERSTATE_HOST" not in os.environ


def _lasts(tier_run: TierRun) -> bool:
    return tier_run.tier.traits.persistent


def close() -> None:
    """Finish all saves and copies of the DCP writers in this process, close the tiers and free the memory.

    The next save or load opens them again. At the end of the process each is closed by itself. Ranks that save together
    close together, before their process group is destroyed.
    """
    with _LOCK:
        mine = [engine for name in list(_OPEN) if name[0] == os.getpid() for engine in _OPEN.pop(name).engines]
    # Side by side: each waits for its tiers, and for other ranks.
    run_concurrently(DcpEngine.close, mine, len(mine), "tierstate-close")
