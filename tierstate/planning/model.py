"""What the planner is told of a job and its tiers, and what a simulation finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tierstate.engine.cadence import Level
from tierstate.engine.placement import Mask
from tierstate.manifest.arrays import Array
from tierstate.manifest.format.leaf_path import Path


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, and on what.

    Attributes:
        leaves: for each group of leaves a path that rules can match, and its bytes, of the whole job.
        step: seconds of a training step without a save.
        save_every: training steps from one call of `save` to the next.
        hosts: of the job.
        processes: of each host; each has an arena.
        capture: bytes per second at which the whole job copies its state into arenas.
        slower: by which part a step is slower while a version is written.
        changed: which part of the state differs from one version of a tier to the next.
        restart: seconds from a failure until the restore begins.
    """

    leaves: tuple[tuple[Path, int], ...]
    step: float
    save_every: int = 1
    hosts: int = 1
    processes: int = 1
    capture: float = math.inf
    slower: float = 0.0
    changed: float = 1.0
    restart: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(nbytes for _, nbytes in self.leaves)


@dataclass(frozen=True, slots=True)
class TierModel:
    """A tier as numbers, for the whole job.

    Attributes:
        level: what it survives.
        write, read: bytes per second.
        fixed: seconds that each version takes besides its bytes.
        scarce: other tiers do not copy from it.
        burst: seconds of its rate that it saves up while it is idle (`tierstate.tiers.wrappers.limit`).
        peak: bytes per second while it uses that up.
    """

    level: Level
    write: float
    read: float
    fixed: float = 0.0
    scarce: bool = False
    burst: float = 0.0
    peak: float = math.inf

    def seconds(self, nbytes: float, rate: float, saved_up: float = 0.0) -> float:
        """Seconds to move so many bytes at ``write`` or ``read``.

        Args:
            saved_up: seconds of the rate that are saved up.
        """
        return max(nbytes / rate - saved_up, min(nbytes / self.peak, nbytes / rate))


def restore_seconds(
    sizes: Array, masks: Mapping[str, Mask], tiers: Iterable[TierModel], saved_up: Callable[[TierModel], float]
) -> float:
    """Seconds to read a state, each leaf from the nearest of these tiers that gets it.

    Args:
        sizes: ``(leaves,)``: bytes of each leaf.
        masks: by tier, ``(leaves,)`` of bool: the leaves that go there.
        tiers: nearest first.
        saved_up: of a tier, seconds of its rate that are saved up.
    """
    left, seconds = np.ones(len(sizes), bool), 0.0
    for tier in tiers:
        here = masks[tier.level.name] & left
        seconds += tier.seconds(float(sizes[here].sum()), tier.read, saved_up(tier))
        seconds += tier.fixed if here.any() else 0.0
        left &= ~here
    return seconds


class Failure(NamedTuple):
    """An end of the job that nobody has planned.

    Attributes:
        time: seconds since its beginning.
        host_lost: with all that lies on a host, rather than only the processes.
    """

    time: float
    host_lost: bool


class Arrival(NamedTuple):
    """A version that a tier has got; times in seconds since the beginning.

    Attributes:
        seq, step: of the version.
        saved: when `save` was called.
        began, arrived: when the tier began to write it, and had it.
    """

    seq: int
    step: int
    saved: float
    began: float
    arrived: float


class Recovery(NamedTuple):
    """What a failure has cost.

    Attributes:
        failure: the failure.
        tier: from which the job was restored; empty if it began again from nothing.
        step: at which it went on.
        lost: seconds since that version's save, which were for nothing.
        seconds: until the training went on.
    """

    failure: Failure
    tier: str
    step: int
    lost: float
    seconds: float


@dataclass
class TierOutcome:
    """What one tier has done.

    Attributes:
        share: bytes of a version that go there.
        arrivals: versions, as they came; of stretches that repeat, those of one.
        versions: how many came.
        delays: seconds from their saves until they were there, summed up.
        left_out: versions that it lagged too far behind for.
        nbytes: that were written.
        busy: seconds in which it wrote.
        kept: versions that it has in the end.
        held: the most versions that it had at once.
        waited: seconds for which saves waited for it (`max_lag`).
        interval: seconds that ``every: auto`` has chosen in the end; None if it has not.
        why: of that interval.
    """

    share: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    versions: int = 0
    delays: float = 0.0
    left_out: int = 0
    nbytes: float = 0.0
    busy: float = 0.0
    kept: int = 0
    held: int = 0
    waited: float = 0.0
    interval: float | None = None
    why: str = ""

    @property
    def spacing(self) -> float | None:
        """Mean seconds between the saves of two versions; None for fewer than two."""
        saved = [arrival.saved for arrival in self.arrivals]
        return (max(saved) - min(saved)) / (self.versions - 1) if self.versions > 1 else None

    @property
    def delay(self) -> float | None:
        """Mean seconds from a save until the tier has it; None for none."""
        return self.delays / self.versions if self.versions else None


@dataclass
class Outcome:
    """What a job has done.

    Attributes:
        steps: training steps that count in the end.
        seconds: from the beginning until the last of them ended, with its save.
        drained: when every tier had all that was due there.
        saves: calls of `save` that were due in some tier.
        skipped: saves that found no room (``on_full: skip``).
        blocked: seconds that each of the others blocked; of stretches that repeat, those of one.
        blocking: seconds that all of them blocked.
        room: seconds of them for which it waited for room in the arena.
        slowed: seconds that steps took longer because of writes.
        tiers: by name.
        recoveries: one for each failure.
        lost: for a failure without, and with the loss of a host: by how much, on average over time, the newest version
            that survives it is behind, in seconds.
        survived: those of both of which a whole version has once survived.
    """

    steps: int = 0
    seconds: float = 0.0
    drained: float = 0.0
    saves: int = 0
    skipped: int = 0
    blocked: list[float] = field(default_factory=list)
    blocking: float = 0.0
    room: float = 0.0
    slowed: float = 0.0
    tiers: dict[str, TierOutcome] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    lost: dict[bool, float] = field(default_factory=dict)
    survived: set[bool] = field(default_factory=set)
