"""The backlog of one tier: the versions that are still to be copied to it, and the rules that decide about them.

The rules are pure functions: which versions a tier has missed, which failed saves stay pending, which are left out when
a tier lags (back-pressure), and which versions faster tiers must keep until slower ones have them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tierstate.engine.placement import Cadence, LastSave, is_due
from tierstate.manifest.format.version import Version
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.policy.models import AutoEvery

from .save_state import SaveState

MAX_WAITING = 64
"""The most versions that wait for one tier, whatever its ``on_lag`` is. If there are more, the oldest are left out."""


class PendingVersion(NamedTuple):
    """A version that is still to be written to a tier. A few numbers, so that a waiting copy holds no tables of chunks.

    Attributes:
        seq, step, time: its number in the run, the training step, and the time of the save in seconds since 1970.
        nbytes: raw bytes of the state.
        metadata: the metadata given to `save`; retention (`keep: best`) may need it.
    """

    seq: int
    step: int
    time: float
    nbytes: int = 0
    metadata: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, one: SaveState | Version) -> PendingVersion:
        """A save, or a version that another tier has, as one that is pending."""
        head = one.head
        return cls(head.seq, head.step, head.time, one.nbytes, head.metadata)


def missed_versions(every: Cadence, last: LastSave | None, there: Iterable[PendingVersion]) -> list[PendingVersion]:
    """The versions that a tier should have got since its newest version, out of those that other tiers have.

    Args:
        every: the interval of the tier's saves, from the policy.
        last: step and time of the tier's newest version; None if it has none.
        there: newer versions in other tiers, by rising number.
    """
    found = []
    for due in there:
        if is_due(every, due.step, last, due.time):
            found.append(due)
            last = due.step, due.time
    return found


def still_pending(every: Cadence, owed: Iterable[PendingVersion], arrived: PendingVersion) -> list[PendingVersion]:
    """The missing versions that are still needed after ``arrived`` was committed.

    An older missing version is no longer needed if ``arrived`` would not have been due after it (interval ``every``).
    """
    return [
        due
        for due in owed
        if due.seq != arrived.seq
        and (due.seq > arrived.seq or is_due(every, arrived.step, (due.step, due.time), arrived.time))
    ]


def becomes_pending(every: Cadence, owed: Iterable[PendingVersion], failed: PendingVersion) -> bool:
    """Whether a failed save must be copied later. Not if, by ``every``, it was not due after an older missing one."""
    if isinstance(every, AutoEvery):
        return True  # a bound says nothing of what is due between
    older = (due for due in owed if due.seq < failed.seq)
    return all(is_due(every, failed.step, (due.step, due.time), failed.time) for due in older)


def count_left_out(on_lag: str, waiting: Sequence[tuple[int, bool]], limit: int = MAX_WAITING) -> int:
    """How many of the versions that wait for a tier are left out, counted from the oldest.

    Args:
        on_lag: ``skip`` leaves out all versions older than the newest one that can be copied now.
        waiting: for each version its number, rising, and whether a faster tier has it already.
        limit: the most versions that may wait.
    """
    excess = max(0, len(waiting) - limit)
    ready = [i for i, (_, at_hand) in enumerate(waiting) if at_hand]
    return max(excess, ready[-1]) if on_lag == "skip" and ready else excess


def held_versions(
    wanted: Mapping[str, Collection[int]], there: Mapping[str, Collection[int]], *, each: bool = False
) -> dict[int, str]:
    """Versions that a tier must keep for slower tiers, by number, with the nearest tier that waits for each.

    Example: tiers A, B, C from fast to slow, and C waits for a version of A. A may drop it once B has it, since C can
    copy it from B. If B waits for it, A must keep it, even if C has it: B copies from faster tiers only. A tier for
    which the version was left out, or cannot be copied any more, does not wait.

    Args:
        wanted: for each slower persistent tier, nearest first, the numbers of the versions that it waits for.
        there: for each slower persistent tier, the numbers of the versions that it has.
        each: keep a version until every tier that waits has it, since the tiers get different parts of the state.
    """
    found: dict[int, str] = {}
    nearer: list[Collection[int]] = []
    for tier, seqs in wanted.items():
        for seq in seqs:
            if each or not any(seq in have for have in nearer):
                found.setdefault(seq, tier)
        nearer.append(there.get(tier, ()))
    return found


class QueuedCopy(Protocol):
    """What a `Backlog` needs to know of a waiting copy; implemented by `CascadeJob`."""

    due: PendingVersion
    save_state: SaveState | None

    @property
    def at_hand(self) -> bool:
        """Whether a faster tier has it already."""

    @property
    def too_early(self) -> bool:
        """Whether no faster tier has it yet, and one may still get it."""


C = TypeVar("C", bound=QueuedCopy)


class Backlog(Generic[C]):
    """The copies that wait for one tier. Not thread-safe: the `TierQueue` that uses it holds a lock.

    Args:
        every: the interval of the tier's saves, from the policy.
        on_lag: when several copies wait: ``skip`` leaves out the older ones, ``queue`` makes all of them.
        limit: the most copies that may wait.

    Attributes:
        owed: missing versions by number: they failed, or an earlier process did not write them.
        urgent: number of the version that goes before all others; None for the order of the numbers.
    """

    def __init__(self, every: Cadence = None, on_lag: str = "queue", limit: int = MAX_WAITING) -> None:
        self._every, self._on_lag, self._limit = every, on_lag, limit
        self._waiting: dict[int, C] = {}
        self.owed: dict[int, C] = {}
        self.urgent: int | None = None

    def put(self, copy: C) -> list[C]:
        """Add the copy of a save in progress. Returns the copies that are left out because of it."""
        self._waiting[copy.due.seq] = copy
        return self.trim()

    def owe(self, copy: C) -> bool:
        """Add a missing version, whose save failed or was left by an earlier process. Returns whether it is needed."""
        due = becomes_pending(self._every, (c.due for c in self.owed.values()), copy.due)
        if due:
            self.owed[copy.due.seq] = copy
        return due

    def trim(self) -> list[C]:
        """Remove the copies that are left out by now, and return them."""
        ordered = self._ordered()
        gone = ordered[: count_left_out(self._on_lag, [(c.due.seq, c.at_hand) for c in ordered], self._limit)]
        for copy in gone:
            self._remove(copy)
        return gone

    @property
    def first(self) -> int | None:
        """Number of the oldest save that waits; missing versions do not count. None if none waits."""
        return min(self._waiting, default=None)

    def take(self, missing: bool, but: Collection[int] = ()) -> C | None:
        """Remove and return the urgent copy, or else the oldest; None if there is none.

        Args:
            missing: whether missing versions may be taken too; false during the back-off after a failure.
            but: numbers of missing versions that are not taken; nor are those that are too early.
        """
        ready = [copy for seq, copy in self.owed.items() if seq not in but and not copy.too_early] if missing else []
        ready += self._waiting.values()
        if not ready:
            return None
        first = min(ready, key=lambda copy: (copy.due.seq != self.urgent, copy.due.seq))
        self._remove(first)
        return first

    @property
    def too_early(self) -> bool:
        """Whether a missing version has to wait until a faster tier has it."""
        return any(copy.too_early for copy in self.owed.values())

    def arrived(self, due: PendingVersion) -> None:
        """A version was committed to the tier: remove it, and older missing versions that are no longer needed."""
        left = {d.seq for d in still_pending(self._every, (c.due for c in self.owed.values()), due)}
        self.owed = {seq: copy for seq, copy in self.owed.items() if seq in left}

    def dues(self) -> list[PendingVersion]:
        """All waiting saves and all missing versions, oldest first."""
        return [copy.due for copy in self._ordered()]

    def __len__(self) -> int:
        """How many saves wait; missing versions do not count."""
        return len(self._waiting)

    def _ordered(self) -> list[C]:
        return sorted([*self.owed.values(), *self._waiting.values()], key=_number)

    def _remove(self, copy: C) -> None:
        self._waiting.pop(copy.due.seq, None)
        self.owed.pop(copy.due.seq, None)


def _number(copy: QueuedCopy) -> int:
    return copy.due.seq


TIER_BACKOFF = Backoff(first=1.0, longest=60.0, fixed=0.5)
"""Pauses of a tier that failed during saves."""


class RetryTimer:
    """Says when a tier that failed may be tried again. It never blocks: the owner calls `left`."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def failed(self) -> None:
        """Count one more failure: the pause that begins now is longer than the one before."""
        self._failures += 1
        self._until = time.monotonic() + TIER_BACKOFF.pause(self._failures)

    def succeeded(self) -> None:
        """End the pause, and reset to short pauses."""
        self._failures, self._until = 0, 0.0

    @property
    def left(self) -> float:
        """Seconds until the next attempt; 0 if it may be made now."""
        return max(0.0, self._until - time.monotonic())
