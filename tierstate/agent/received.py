"""The agent's side of a save: what a trainer hands over is published by the same queues as in the trainer's process.

`ReceivingPipeline` is a `SavePipeline` whose captures are made elsewhere: its jobs are fed with the slabs that arrive.
The first tier is the agent's memory, from which a process that is started again restores; it keeps the slabs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.publish import CascadeJob, DirectJob, UnchangedChunks
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.ranks.save.save import RankParts, SharedPipeline, StartState
from tierstate.engine.save.pipeline import SavePipeline
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.statistics import ChunkStatistics
from tierstate.manifest.format.version import Head, Version, copy_stages
from tierstate.tiers.memory.arena import Arena, LeasedSlab
from tierstate.tiers.policy.models import KeepKeys
from tierstate.tiers.policy.policy import Policy, TierPolicy

from .messages import encode_error

log = logging.getLogger("tierstate")


MEMORY = "(agent)"
"""Name of the agent's memory as a tier. No tier of a policy can have it."""


KEPT = 2
"""Versions of a run that the agent keeps in memory: the newest one, and the one that is being captured."""


LOOK_INTERVAL = 0.05
"""Seconds between two looks at what is still to be published."""


Report = Callable[[Mapping[str, Any]], None]
"""Sends an event to the trainer."""


def with_memory(policy: Policy, capacity: int) -> Policy:
    """The policy with the agent's memory as its first tier, to which every leaf goes."""
    tier = TierPolicy(
        name=MEMORY, type="host", persistent=False, keep=KeepKeys(last=KEPT), options={"capacity": capacity},
        seal=policy.seal,
    )  # fmt: skip
    rules = tuple(r if r.tiers is None else r.model_copy(update={"tiers": (MEMORY, *r.tiers)}) for r in policy.rules)
    return policy.model_copy(update={"tiers": (tier, *policy.tiers), "rules": rules})


def encode_keep(keep: KeepKeys) -> dict[str, Any]:
    """The retention of a tier as JSON values, from which `KeepKeys` is made again."""
    found = keep.model_dump(mode="json", exclude_none=True)
    return found | {"within": f"{keep.within!r}s"} if keep.within is not None else found


class StagedRows:
    """What the jobs of a save need to know before its bytes come (`PlannedRows`).

    Args:
        version: has the save's leaves and shards, and no digests yet.
        stages: ``(leaves,)``: the stage of the capture in which each leaf comes; None where that does not matter.
    """

    def __init__(self, version: Version, stages: Array | None) -> None:
        self._version, self._stages = version, stages

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The version's leaves."""
        return self._version.leaves

    def row_leaves(self, chunk: int) -> Array:
        """``(chunks,)``: the leaf of each chunk."""
        return self._version.chunk_leaf

    def stages(self) -> Array:
        """``(leaves,)``: the stage of each leaf; -1 for one that does not come whole."""
        return copy_stages(self._version) if self._stages is None else self._stages


class ReportedSave(SaveState):
    """A save in the agent, whose outcome in each tier is reported to the trainer."""

    def __init__(self, head: Head, nbytes: int, tiers: Sequence[str], report: Report) -> None:
        super().__init__(head, nbytes, tiers, {})
        self._report = report

    def committed(self, tier: str) -> None:
        super().committed(tier)
        found = {"seq": self.head.seq, "tier": tier, "seconds": self.seconds.get(tier, 0.0), "id": self.version}
        self._report({"kind": "committed", **found})

    def failed(self, tier: str, error: BaseException) -> None:
        super().failed(tier, error)
        self._report({"kind": "failed", "seq": self.head.seq, "tier": tier, "error": encode_error(error)})

    def leave_out(self, tier: str, why: str) -> None:
        super().leave_out(tier, why)
        self._report({"kind": "left_out", "seq": self.head.seq, "tier": tier, "why": why})


def slower_tiers(order: Sequence[str], sources: Collection[str]) -> set[str]:
    """The tiers that are slower than one of these sources: a version is copied to them, and never to faster ones.

    Args:
        order: of all tiers, fastest first.
    """
    return set(order[min(map(order.index, sources), default=len(order)) + 1 :])


class IncomingSave:
    """A save that is being handed over: feeds its jobs with what arrives.

    Args:
        save_state: its progress.
        structure: its leaves and shards.
        jobs: the jobs that write from slabs.
        order: the names of all tiers, fastest first.
        idle: whether the queues of all of them were idle.

    Attributes:
        hold: whether the slabs are held until `let_go`, though no job needs them: if this process dies or hangs, the
            trainer publishes what is in them.
    """

    def __init__(
        self, save_state: SaveState, structure: Version, jobs: Sequence[DirectJob], order: Sequence[str], *, idle: bool
    ) -> None:
        self.save_state, self._structure, self._jobs, self._idle = save_state, structure, jobs, idle
        self._order, self._untold, self._lasting = order, {*save_state.tiers} - {MEMORY}, set[str]()
        self.hold = False
        self._held: list[LeasedSlab] = []
        self._lock = threading.Lock()

    def needless(self, digests: Array) -> Array:
        """``(chunks,)`` of bool: which chunks need not be copied if these, ``(chunks, 2)``, are their digests."""
        if not self._idle or not self._jobs or digests.shape != self._structure.digests.shape:
            return np.zeros(len(digests), bool)
        found: Array = np.logical_and.reduce([job.needless(digests) for job in self._jobs])
        return found

    def slab(self, batch: SlabChunks) -> None:
        """A slab has been handed over, with one lease."""
        for job in self._jobs:
            batch.slab.lease()
            job.feed(batch)
        with self._lock:
            if self.hold:
                self._held.append(batch.slab)
                return
        batch.slab.release()

    def let_go(self) -> None:
        """The slabs are not held any more."""
        with self._lock:
            self.hold, held, self._held = False, self._held, []
        for slab in held:
            slab.release()

    def told(self, tier: str, *, lasting: bool) -> bool:
        """The trainer is told what became of the save in a tier.

        Args:
            lasting: whether it has arrived there, and the tier is persistent.

        Returns:
            Whether the slabs are needed no more: it can be copied to all tiers of which nothing has been told.
        """
        with self._lock:
            self._untold.discard(tier)
            if lasting:
                self._lasting.add(tier)
            return bool(self._lasting) and self._untold <= slower_tiers(self._order, self._lasting)

    def unchanged(self, rows: Array, digests: Array) -> None:
        """These chunks have not changed, and were not copied."""
        for job in self._jobs:
            job.feed(UnchangedChunks(rows, digests))

    def captured(self, parent: str, digests: Array, statistics: ChunkStatistics | None) -> Version:
        """All of it has been handed over. Returns the version."""
        version = self._structure.again(replace(self.save_state.head, parent=parent), digests, statistics)
        self._end(version, None)
        return version

    def lost(self, error: BaseException) -> None:
        """The rest of it will not come."""
        if not self.save_state.captured.done():
            self.save_state.lost = True
            self._end(error, error)

    def _end(self, outcome: Version | BaseException, error: BaseException | None) -> None:
        self.save_state.capture_ended(error)
        for job in self._jobs:
            job.feed(outcome)


class ReceivingPipeline(SavePipeline):
    """Publishes the saves of one trainer.

    Args:
        policy: with the agent's memory as its first tier (`with_memory`).
        tier_runs: the run in each tier.
        arena: the memory for copies from tier to tier.
        report: sends events to the trainer.
    """

    def __init__(self, policy: Policy, tier_runs: Sequence[TierRun], arena: Arena, report: Report) -> None:
        super().__init__(policy, tier_runs, arena)
        self._report = report

    def receive(
        self, head: Head, structure: Version, stages: Array | None, names: Sequence[str], nbytes: int
    ) -> IncomingSave:
        """Begin a save.

        Args:
            head: of the version.
            structure: its leaves and shards.
            stages: as for `StagedRows`.
            names: of the tiers that get it.
            nbytes: raw bytes of the state.
        """
        self._start(head.seq)
        routes = self._routes.of(structure.leaves)
        save_state = ReportedSave(head, nbytes, names, self._report)
        rows = StagedRows(structure, stages)
        jobs = self._jobs(save_state, rows, names, routes, rows.stages)
        self._saves.add(save_state)
        self._last |= dict.fromkeys(names, (head.step, head.time))
        self._note_sent(save_state)
        # A list and not a generator: every job must be put, also after the first queue that is not idle.
        idle = all([queue.put(job) or isinstance(job, CascadeJob) for queue, job in jobs])
        direct = [job for _, job in jobs if isinstance(job, DirectJob)]
        return IncomingSave(save_state, structure, direct, list(self._tier_runs), idle=idle)

    def stand_beside(self, others: Callable[[], Sequence[ReceivingPipeline]]) -> None:
        """Publish beside others of the same run: retention keeps what they need, and no version is copied twice.

        Args:
            others: returns those that publish versions of the run now, without this one.
        """
        self._cascade.others = lambda: [other._cascade for other in others()]

    def look_back(self, first: int | None) -> None:
        """Bring what slower tiers lack, before any save comes.

        Args:
            first: the number of the first save that will come; None if none will.
        """
        self._start(1 + max(map(self._highest, self._tier_runs.values())) if first is None else first)

    def brought(self, name: str, due: PendingVersion) -> None:
        super().brought(name, due)
        self._report({"kind": "brought", "tier": name, "seq": due.seq, "step": due.step, "time": due.time})

    def under_way(self) -> list[str]:
        """The saves that are not in all their tiers, and the versions that are owed, as texts."""
        owed = [f"step {due.step} to {name} (owed)" for name, queue in self.queues.items() for due in queue.owed()]
        return [*(text for text in self._saves.late() if not text.endswith(MEMORY)), *owed]

    def deliver(self, give_up: Callable[[], bool]) -> str:
        """Publish everything that was handed over, also what waits for a tier that fails; then end the threads.

        Args:
            give_up: called every `LOOK_INTERVAL` seconds; returns whether to stop before all has arrived.

        Returns:
            What did not arrive; empty if all did.
        """
        while any(not queue.looked or queue.outstanding() for queue in self.queues.values()) and not give_up():
            time.sleep(LOOK_INTERVAL)
        return self.close()


class SharedReceivingPipeline(ReceivingPipeline, SharedPipeline):
    """Publishes the saves of a trainer that is one of several ranks, together with the agents of the others.

    Args:
        parts: as for `SharedPipeline`; the team is that of the agents.
        report: sends events to the trainer.
    """

    def __init__(self, parts: RankParts, *, report: Report) -> None:
        SharedPipeline.__init__(self, parts, StartState(0, {}))  # the trainers have agreed on numbers and cadence
        self._report = report


def trainer_gone() -> CaptureError:
    """The error of a save whose trainer ended before all of it was handed over."""
    return CaptureError("the trainer ended before it had captured all of this save")
