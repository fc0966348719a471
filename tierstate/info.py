"""What the face tells about versions and about the work done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tierstate.manifest.leaf import lossy_methods
from tierstate.manifest.summary import Summary
from tierstate.tiers.base import Tier
from tierstate.tiers.catalog import Entry
from tierstate.tiers.lane import Lane
from tierstate.tiers.measured import OperationStats, operations_of


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a run.

    Attributes:
        run, seq: the line and the place in it.
        step: the training step.
        id: 32 hexadecimal digits, the same in every tier.
        time: seconds since 1970 when it was saved.
        nbytes: raw bytes of the state.
        tiers: names of the tiers that have its record, nearest first.
        partial: those of them that hold only some of its leaves, as the policy's rules say.
        stored: bytes that its chunks take in each tier, shared ones and the bases of deltas included.
        tags: names given to it, as far as they were looked for: by `versions` and `info`.
        metadata: what the user gave at the save.
        parent: id of the version before it.
        late: names of the tiers that are to get it and have not got it yet.
        lossy: methods by which some of its leaves were saved with fewer bits, on request.
    """

    run: str
    seq: int
    step: int
    id: str
    time: float
    nbytes: int
    tiers: tuple[str, ...]
    partial: tuple[str, ...] = ()
    stored: Mapping[str, int] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    late: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()

    @classmethod
    def of(cls, entry: Entry) -> VersionInfo:
        """What a catalogue's entry says."""
        head = entry.version.head
        return cls(
            head.run,
            head.seq,
            head.step,
            entry.version.id,
            head.time,
            entry.version.nbytes,
            entry.tiers,
            tuple(h.shelf.name for h in entry.holdings if not h.layout.present.all()),
            {h.shelf.name: h.layout.stored_nbytes for h in entry.holdings},
            metadata=dict(head.metadata),
            parent=head.parent,
            lossy=lossy_methods(entry.version.leaves),
        )

    @classmethod
    def summed(
        cls, run: str, copies: Mapping[str, Summary], tags: tuple[str, ...], late: tuple[str, ...]
    ) -> VersionInfo:
        """What the summaries of a version's records say, by tier."""
        one = next(iter(copies.values()))
        return cls(
            run,
            one.seq,
            one.step,
            one.id,
            one.time,
            one.nbytes,
            tuple(copies),
            tuple(name for name, summary in copies.items() if not summary.whole),
            {name: summary.stored for name, summary in copies.items()},
            tags,
            dict(one.metadata),
            one.parent,
            late,
            one.lossy,
        )


@dataclass(frozen=True, slots=True)
class TierStats:
    """What one tier has done in this process.

    Attributes:
        raw: bytes of the states saved there.
        stored: bytes written for them; unchanged chunks were not written again, others may have been compressed.
        saves: saves committed there.
        failures: saves that did not arrive.
        lag: saves that are under way or waiting.
        seconds: from the call of ``save`` to the commit, of the newest saves.
        healthy: whether its last save went well.
        owed: saves that did not arrive, and are brought when the tier is back.
        brought: those that have been brought so far, here or since an earlier process; ``saves`` counts them too.
        skipped: saves that were left out there, since newer ones waited (``on_lag``).
        waiting: bytes of state that are yet to come there.
        behind: seconds since the oldest save was made that is not there yet; 0 where nothing is missing.
        speed: bytes of state per second at which saves were copied there lately; 0 before the first.
        expected: seconds until all is there, at that speed; None where the speed is not known.
        held: versions that stay there longer than ``keep`` says, by number, and why.
        operations: calls of the tier itself by operation, with how long they took; see `OperationStats`.
    """

    raw: int = 0
    stored: int = 0
    saves: int = 0
    failures: int = 0
    lag: int = 0
    seconds: tuple[float, ...] = ()
    healthy: bool = True
    owed: int = 0
    brought: int = 0
    skipped: int = 0
    waiting: int = 0
    behind: float = 0.0
    speed: float = 0.0
    expected: float | None = None
    held: Mapping[int, str] = field(default_factory=dict)
    operations: Mapping[str, OperationStats] = field(default_factory=dict)

    @classmethod
    def of(cls, lane: Lane | None) -> TierStats:
        """What a tier's lane has done; None: nothing yet."""
        if lane is None:
            return cls()
        done, coming, left = lane.tally, lane.outstanding(), lane.left
        return cls(
            done.raw,
            done.stored,
            done.saves,
            done.failures,
            lane.waiting,
            tuple(done.seconds),
            lane.healthy,
            owed=len(lane.owed()),
            brought=done.brought,
            skipped=done.skipped,
            waiting=left,
            behind=max(0.0, time.time() - coming[0].time) if coming else 0.0,
            speed=done.speed,
            expected=left / done.speed if done.speed else None,
            held=dict(lane.held),
        )

    def measured(self, tier: Tier) -> TierStats:
        """The same, with what the operations of the tier have done."""
        return replace(self, operations=operations_of(tier))


@dataclass(frozen=True, slots=True)
class Stats:
    """What a Checkpointer has done.

    Attributes:
        saves: calls of ``save``.
        skipped: those of them that were skipped because the arena was full.
        blocked: seconds that each of the newest calls kept the training waiting.
        waited: seconds that steps of guarded optimizers have waited for the capture to end.
        arena_peak: most bytes of the arena in use at once, kept ones included.
        tiers: by tier.
    """

    saves: int
    skipped: int
    blocked: tuple[float, ...]
    waited: float
    arena_peak: int
    tiers: Mapping[str, TierStats]
