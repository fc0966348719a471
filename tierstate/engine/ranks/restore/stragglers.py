"""Stragglers of a restore: when a rank that passes chunks on is late, so that those who wait read them themselves.

A rank that has read its own share knows how long that takes, and all have shares of about the same size. So it waits
for the others for a small multiple of that time, and reads what is still to come from a late one from the tier: a
hedged request. (Dean, Barroso: The Tail at Scale, Communications of the ACM, 2013.) The late rank is named, and told;
it then stops reading, and gets the rest from others in the next exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

SHORTEST, LONGEST = 1.0, 10 / 3
"""Seconds before which no rank is late, and after which one that passes nothing on is; as often as there are ranks on
the way, of which each may wait for the one before: three at most."""


MULTIPLE = 2.0
"""How much longer than this rank another one may take for as many bytes."""


class Passed(NamedTuple):
    """Bytes that a rank has passed on to this one so far, and those that are still to come from it."""

    arrived: int
    left: int


class ReadTime(NamedTuple):
    """How long this rank has read its own share, in seconds, and how many bytes that were."""

    seconds: float
    nbytes: int

    @property
    def patience(self) -> float:
        """Seconds for which another rank is waited for, whatever it has passed on."""
        return min(max(MULTIPLE * self.seconds, SHORTEST), LONGEST) if self.nbytes else LONGEST

    def here(self, nbytes: int) -> float:
        """Seconds that this rank would take to read so many bytes."""
        return nbytes * self.seconds / self.nbytes if self.nbytes else 0.0


def is_late(passed: Passed, waited: float, read: ReadTime, steps: int = 1) -> bool:
    """Whether what is still to come from a rank is better read here.

    A rank that passes on nothing is late after the time of patience. One that goes on, at the rate that it has had so
    far, is late if the rest takes so much longer than reading it here.

    Args:
        passed: what has come from it.
        waited: seconds since this rank has read its own share.
        read: of this rank.
        steps: over how many ranks the chunks come, which may be late one after the other.
    """
    patience = steps * read.patience
    if not passed.left or waited < patience:
        return False
    rest = passed.left * (read.seconds + waited)
    return rest > passed.arrived * (patience + MULTIPLE * read.here(passed.left))


class Gate:
    """Lets threads deliver until it is closed; `close` waits for those that do. What comes later is ignored."""

    def __init__(self) -> None:
        # Entered and left in C: an interrupt at the beginning of `Condition.__exit__` would leave it locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inside, self._closed = 0, False

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Whether the block may deliver."""
        with self._lock:
            may = not self._closed
            self._inside += may
        try:
            yield may
        finally:
            with self._lock:
                self._inside -= may
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and wait until none is inside."""
        with self._lock:
            self._closed = True
            while self._inside:
                self._changed.wait(1.0)


class Stops:
    """Counts for how long this process was stopped, as by SIGSTOP: no other rank was late then.

    Attributes:
        seconds: how long that was in all.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def looking(self, seconds: float) -> Iterator[None]:
        """The block waits for so many seconds at most; if it takes `SHORTEST` more, this process was stopped."""
        began = time.monotonic()
        yield
        more = time.monotonic() - began - seconds
        self.seconds += more if more > SHORTEST else 0.0


class StragglerWatch:
    """Watches the ranks that are to pass chunks on to this one, from when it has read its own share.

    Args:
        read: how long that took.
        steps: by rank, over how many ranks its chunks come.
        stops: of this process, which do not count.
        waited: seconds for which it has waited already.
    """

    def __init__(self, read: ReadTime, steps: dict[int, int], stops: Stops, waited: float = 0.0) -> None:
        self._read, self._steps, self._stops = read, steps, stops
        self._began = time.monotonic() - waited - stops.seconds

    @property
    def waited(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._began - self._stops.seconds

    def is_late(self, rank: int, passed: Passed) -> bool:
        """As the function."""
        return is_late(passed, self.waited, self._read, self._steps[rank])
