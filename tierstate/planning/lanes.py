"""A tier in a simulation: the versions that it has, what waits for it, and how it looks from a moment, by which
stretches of time that repeat are found."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from tierstate.engine.placement import LastSave
from tierstate.engine.publish.backlog import Backlog, PendingVersion
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest.history.retention import RetentionPolicy

from .model import TierModel, TierOutcome

OFTEN = 100
"""Of more versions than this in a tier, retention decides only after each hundredth part of them."""


TICK = 2.0**-26
"""Seconds that all durations are multiples of. Sums of them are exact for four years, so that what happens again
happens after exactly the same time again."""


def ticks(seconds: float) -> float:
    """A duration as a whole number of ticks, in seconds."""
    return round(seconds / TICK) * TICK if math.isfinite(seconds) else seconds


DRIFT = 1e-7
"""By how much of a stretch of time its end may differ from its beginning, for a repetition: a tier that lags behind is
hardly ever at exactly the same place of a write again when a save comes. All that is counted is off by so much at most;
in four weeks that is a quarter of a second."""


def alike(one: Any, other: Any, drift: float) -> bool:
    """Whether two shapes of a tier are the same, but for times that differ by so many seconds at most."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(alike(a, b, drift) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= drift  # infinite ones are equal
    return bool(one == other)


class Moment(NamedTuple):
    """A moment of a job, or a length of time: the number of a save, a step, and seconds."""

    seq: int
    step: int
    time: float

    def since(self, other: Moment) -> Moment:
        """The time between two moments."""
        return Moment(self.seq - other.seq, self.step - other.step, self.time - other.time)

    def times(self, count: int) -> Moment:
        """So many of this length of time."""
        return Moment(self.seq * count, self.step * count, self.time * count)

    def after(self, other: Moment) -> Moment:
        """The moment that is so long after another."""
        return Moment(self.seq + other.seq, self.step + other.step, self.time + other.time)

    def moved(self, due: PendingVersion) -> PendingVersion:
        """The version that is so much later."""
        return due._replace(seq=due.seq + self.seq, step=due.step + self.step, time=due.time + self.time)


@dataclass(slots=True)
class Copy:
    """A version on its way to a tier (`tierstate.engine.publish.backlog.QueuedCopy`).

    Attributes:
        due: the version.
        lane: of the tier.
        direct: it is written from the arena, rather than copied from a faster tier.
        save_state: none: it has no real save.
    """

    due: PendingVersion
    lane: Lane
    direct: bool = False
    save_state: SaveState | None = None

    @property
    def at_hand(self) -> bool:
        return self.direct or self.lane.source(self.due.seq) is not None

    @property
    def too_early(self) -> bool:
        return False  # what lacks its source is begun, and waits there


class Queue(Backlog[Copy]):
    """A backlog of which all versions can be made later ones."""

    def copies(self) -> list[Copy]:
        """What waits, oldest first."""
        return self._ordered()

    def rename(self) -> None:
        """The versions of its copies have got other numbers."""
        self._waiting = {copy.due.seq: copy for copy in self._waiting.values()}
        self.owed = {copy.due.seq: copy for copy in self.owed.values()}


@dataclass(eq=False)
class Lane:
    """A tier, and what is on its way to it.

    Attributes:
        model: its speeds.
        keep: its retention.
        every: steps of its interval, if it is one of steps.
        backlog, direct: what waits: copies, and what is written from the arena.
        told: what is told of it.
        faster: the lanes that it may copy from, nearest to it first.
        has: versions by number: step and time.
        settled: how many versions it has besides, which nothing asks for any more and which stay for ever.
        running, began, ends: what is written, since when and until when; infinite while its source lacks it.
        idle_since: when it last had something to write; with a ``bandwidth``, when it has or will have done all that
            it counts.
        look: of `OFTEN` versions and more, how many there are when retention decides next.
        moves: how often a version was sent there, or has arrived.
    """

    model: TierModel
    keep: RetentionPolicy
    every: int | None
    backlog: Queue
    told: TierOutcome
    faster: Sequence[Lane]
    has: dict[int, PendingVersion] = field(default_factory=dict)
    settled: int = 0
    direct: deque[Copy] = field(default_factory=deque)
    running: Copy | None = None
    began: float = 0.0
    ends: float = math.inf
    idle_since: float = -math.inf
    look: int = 0
    moves: int = 0

    @property
    def name(self) -> str:
        return self.model.level.name

    @property
    def share(self) -> float:
        """Bytes of a version that go there."""
        return self.told.share

    @property
    def idle(self) -> bool:
        """Nothing is on its way there."""
        return self.running is None and not self.direct and not self.backlog.dues()

    def source(self, seq: int) -> Lane | None:
        """The nearest faster tier that has a version."""
        return next((lane for lane in self.faster if seq in lane.has), None)

    def wanted(self) -> set[int]:
        return {copy.due.seq for copy in self._copies()}

    def _copies(self) -> list[Copy]:
        return [*([self.running] if self.running else []), *self.direct, *self.backlog.copies()]

    def settle(self, forever: Callable[[int], bool]) -> None:
        """Only count the oldest versions that stay for ever, but for the newest of them.

        Args:
            forever: whether a version, by number, stays whatever comes later, and nothing waits for it.
        """
        order = sorted(self.has)
        for seq, later in pairwise(order):
            # The first version of a window of `keep: {every}` is needed to tell that later ones are not the first.
            if not (forever(seq) and forever(later)):
                break
            del self.has[seq]
            self.settled += 1

    def shape(self, at: Moment, last: LastSave | None) -> Any:
        """All that what happens there later depends on, seen from a moment: of two moments with equal shapes, the same
        follows. None if it is too much to compare.

        Args:
            last: step and time of the newest save that went there.
        """
        if len(self.has) > OFTEN:
            return None
        return (
            [Moment(due.seq, due.step, due.time).since(at) for due in self.has.values()],
            [(Moment(c.due.seq, c.due.step, c.due.time).since(at), c.direct) for c in self._copies()],
            self.running is None,
            (self.began - at.time, self.ends - at.time) if self.running else None,
            max(self.idle_since - at.time, -self.model.burst),
            last and (last[0] - at.step, last[1] - at.time),
            at.step % (self.every or 1),
            at.step % (self.keep.every or 1),
            not self.told.versions,
        )

    def move(self, by: Moment) -> None:
        """Make everything there so much later."""
        self.has = {due.seq: due for due in map(by.moved, self.has.values())}
        for copy in self._copies():
            copy.due = by.moved(copy.due)
        self.backlog.rename()
        self.began, self.ends, self.idle_since = self.began + by.time, self.ends + by.time, self.idle_since + by.time
