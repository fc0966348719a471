"""The speed of a tier: how fast it takes what is written to it, told by the times when it had something to do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from tierstate.manifest.chunk import Buffer

from .base import ObjectWriter, Release, Tier
from .wrapping import Wrapping, WrappingWriter

KNOWN = 64 << 20
"""Bytes after which a speed is believed."""

REMEMBERED = 1 << 30
"""Bytes after which older ones count for half."""

LONG = 16 << 20
"""Bytes of an object from which on its closing counts: of a short one it says how long an answer takes, and no more."""

HINT = 1.0
"""Seconds for which what a tier says of itself counts."""


class Speed:
    """How many bytes per second a tier takes.

    A transfer goes from the call that begins it to its end, and while any is under way the tier is busy. A busy time
    counts when it is over. One that goes on is judged from the end of its first transfer on: how many were begun
    together, and are nearly there, then does not matter.

    Args:
        hint: bytes per second by the tier's own word; None where it has none.
        clock: seconds, from anywhere.

    Attributes:
        idled: set whenever the tier has nothing more to do.
    """

    def __init__(self, hint: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._bytes, self._seconds = (hint * HINT, HINT) if hint else (0.0, 0.0)
        self._hinted, self._taken = bool(hint), 0
        self._flying, self._spoilt = 0, False
        self._since = self._first = self._last = 0.0
        self._landed = self._after_first = 0
        self.idled = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._flying

    def begin(self) -> None:
        """One more transfer is under way."""
        with self._lock:
            if not self._flying:
                self._since, self._landed, self._after_first, self._spoilt = self._clock(), 0, 0, False
            self._flying += 1

    def end(self, nbytes: int) -> None:
        """A transfer is over, and has brought so many bytes."""
        with self._lock:
            self._last = self._clock()
            if self._landed:
                self._after_first += nbytes
            else:
                self._first = self._last
            self._landed += nbytes
            self._taken += nbytes
            self._over()

    def drop(self) -> None:
        """A transfer of which nobody can tell when it was over: the busy time that it was part of does not count."""
        with self._lock:
            self._spoilt = True
            self._over()

    def _over(self) -> None:
        self._flying -= 1
        if not self._flying:
            if not self._spoilt:
                self._count(self._landed, self._last - self._since)
            self._landed = 0
            self.idled.set()

    def _count(self, nbytes: int, seconds: float) -> None:
        self._bytes, self._seconds = self._bytes + nbytes, self._seconds + seconds
        if self._bytes > REMEMBERED:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None as long as nobody knows."""
        with self._lock:
            nbytes, seconds = self._bytes, self._seconds
            if self._landed and not self._spoilt:
                nbytes, seconds = nbytes + self._after_first, seconds + self._last - self._first
        if not self._hinted and (self._taken < KNOWN or not nbytes):
            return None
        return nbytes / seconds if seconds else math.inf


class Timed(Wrapping):
    """Another tier, what is written to whose objects is timed.

    Args:
        inner: the tier. It is not closed with this one.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.speed = Speed(inner.traits.bandwidth)
        self.keeps = False

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return TimedWriter(self, self.inner.writer(key, size_hint))

    def close(self) -> None:
        """Nothing: the tier inside belongs to somebody else."""


class TimedWriter(WrappingWriter):
    """Another writer, each of whose transfers is timed until the memory it came from is given back."""

    def __init__(self, tier: Timed, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier, self._length = tier, 0
        self._flights: set[_Flight] = set()

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        nbytes = buffer.numel()
        self._length += nbytes
        # A tier that keeps what it is given for as long as the object lives is done when it has taken it.
        flight = _Flight(self._tier.speed, nbytes, 2 if release is not None and not self._tier.keeps else 1)
        self._flights = {other for other in self._flights if other.left} | {flight}

        def landed() -> None:
            assert release is not None
            try:
                release()
            finally:
                flight.part()

        try:
            self.inner.append(buffer, landed if flight.left == 2 else release)
        finally:
            flight.part()

    def close(self) -> None:
        flight = _Flight(self._tier.speed, 0, 1) if self._length >= LONG else None
        try:
            super().close()
            self._tier.keeps = self._tier.keeps or any(other.left for other in self._flights)
        finally:
            self._forget()
            if flight is not None:
                flight.part()

    def abort(self) -> None:
        try:
            super().abort()
        finally:
            self._forget()

    def _forget(self) -> None:
        """Memory that was not given back by now is kept; when it was taken nobody knows."""
        for flight in self._flights:
            flight.drop()
        self._flights = set()


class _Flight:
    """One transfer, over when each of so many parties has said so."""

    def __init__(self, speed: Speed, nbytes: int, parties: int) -> None:
        self._speed, self._nbytes, self.left = speed, nbytes, parties
        self._lock = threading.Lock()
        speed.begin()

    def part(self) -> None:
        """One party less."""
        with self._lock:
            if not self.left:
                return
            self.left -= 1
            over = not self.left
        if over:
            self._speed.end(self._nbytes)

    def drop(self) -> None:
        """No party says anything any more."""
        with self._lock:
            over, self.left = self.left > 0, 0
        if over:
            self._speed.drop()
