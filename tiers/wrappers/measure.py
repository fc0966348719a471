"""Measurements of a tier: counts and latencies per operation, and the write throughput.

`Measured` counts calls, failures, bytes and durations (with percentiles). `Timed` measures how many bytes per second a
tier writes while it is busy, for the adaptive choice of a codec.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier, layer_of
from tierstate.tiers.trace import span

from .base import Wrapping, WrappingWriter

PER_OCTAVE = 4
"""Histogram classes of durations per doubling, so that a percentile is wrong by at most a fifth."""


SHORTEST = 1e-6
"""All durations up to this many seconds are one class."""


DURATION_CLASSES = 36 * PER_OCTAVE
"""Number of classes: durations up to 19 hours."""


TRUSTED_AFTER = 64 << 20
"""Bytes after which a measured throughput is trusted."""


HALVED_AFTER = 1 << 30
"""After this many bytes, older measurements count half."""


TIMED_CLOSE_MIN = 16 << 20
"""The close of an object of at least this many bytes is timed: for a shorter one it is latency, not throughput."""


HINT_SECONDS = 1.0
"""Weight, in seconds of transfer, of the bandwidth that a tier claims in its traits."""


@dataclass(frozen=True, slots=True)
class OperationStats:
    """Statistics of one operation of a tier.

    Attributes:
        calls: number of calls, with failures.
        failures: calls that raised an error, also `AlreadyExists` and `NotFound`.
        nbytes: bytes that successful calls moved.
        seconds: total duration of all calls; simultaneous calls add up.
        median, p99: percentiles of the duration in seconds; at most a fifth too high.
        longest: seconds of the longest call.
    """

    calls: int = 0
    failures: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    median: float = 0.0
    p99: float = 0.0
    longest: float = 0.0


class OperationMeter:
    """Counts the calls of one operation. Uses constant memory; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = self._nbytes = 0
        self._seconds = self._longest = 0.0
        self._classes = [0] * DURATION_CLASSES

    def add(self, seconds: float, nbytes: int, *, failed: bool) -> None:
        """Count one call."""
        place = math.ceil(PER_OCTAVE * math.log2(max(seconds, SHORTEST) / SHORTEST))
        with self._lock:
            self._classes[min(place, DURATION_CLASSES - 1)] += 1
            self._failures += failed
            self._nbytes += 0 if failed else nbytes
            self._seconds += seconds
            self._longest = max(self._longest, seconds)

    @property
    def stats(self) -> OperationStats:
        """The statistics so far."""
        with self._lock:
            calls = sum(self._classes)
            median, p99 = self._below(calls / 2), self._below(calls * 0.99)
            return OperationStats(calls, self._failures, self._nbytes, self._seconds, median, p99, self._longest)

    def _below(self, calls: float) -> float:
        """The duration that ``calls`` calls did not exceed."""
        counted = 0
        for place, count in enumerate(self._classes):
            counted += count
            if count and counted >= calls:
                return min(self._longest, SHORTEST * 2 ** (place / PER_OCTAVE))
        return 0.0


class Measured(Wrapping):
    """Another tier, with a meter for each operation: ``put``, ``read``, ``list``, ``size``, ``delete``, ``discard``,
    ``age``, and those of writers, ``open``, ``append`` and ``commit`` (their close).

    A listing is read completely at once, so that its whole time is measured.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        names = ("put", "read", "list", "size", "delete", "discard", "age", "open", "append", "commit")
        self._meters = {name: OperationMeter() for name in names}

    @property
    def operations(self) -> Mapping[str, OperationStats]:
        """Statistics of each operation that was called."""
        found = {name: meter.stats for name, meter in self._meters.items()}
        return {name: stats for name, stats in found.items() if stats.calls}

    @contextmanager
    def metered(self, operation: str, nbytes: int = 0) -> Iterator[None]:
        """Count the block as one call that moves ``nbytes`` bytes."""
        start, failed = time.monotonic(), True
        with span(operation, tier=self.name, bytes=nbytes):
            try:
                yield
                failed = False
            finally:
                self._meters[operation].add(time.monotonic() - start, nbytes, failed=failed)

    def put(self, key: str, data: Buffer) -> None:
        with self.metered("put", data.numel()):
            self.inner.put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        with self.metered("read", sum(out.numel() for _, out in ranges)):
            self.inner.read(key, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        with self.metered("list"):
            return iter([*self.inner.list(prefix)])

    def size(self, key: str) -> int:
        with self.metered("size"):
            return self.inner.size(key)

    def delete(self, key: str) -> None:
        with self.metered("delete"):
            self.inner.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        with self.metered("discard"):
            self.inner.discard(keys)

    def age(self, key: str) -> float | None:
        with self.metered("age"):
            return self.inner.age(key)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        with self.metered("open"):
            return MeasuredWriter(self, self.inner.writer(key, size_hint))


class MeasuredWriter(WrappingWriter):
    """Another writer, whose calls are counted by its tier."""

    def __init__(self, tier: Measured, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier = tier

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        with self._tier.metered("append", buffer.numel()):
            self.inner.append(buffer, release)

    def close(self) -> None:
        with self._tier.metered("commit"):
            self.inner.close()


def operations_of(tier: Tier) -> Mapping[str, OperationStats]:
    """Statistics of a tier's operations, if it or a tier inside it is `Measured`; otherwise empty."""
    return {} if (found := layer_of(tier, Measured)) is None else found.operations


class Throughput:
    """Measures how many bytes per second a tier writes.

    The tier is busy while any transfer is in flight. A busy period counts when it is over. A period that goes on is
    measured from the end of its first transfer on, so that transfers that began together and are nearly done do not
    distort it.

    Args:
        hint: bytes per second that the tier claims in its traits; None if it claims none.
        clock: returns seconds, from any starting point.

    Attributes:
        idled: set whenever the last transfer in flight has ended.
    """

    def __init__(self, hint: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._bytes, self._seconds = (hint * HINT_SECONDS, HINT_SECONDS) if hint else (0.0, 0.0)
        self._hinted, self._taken = bool(hint), 0
        self._flying, self._spoilt = 0, False
        self._since = self._first = self._last = 0.0
        self._landed = self._after_first = 0
        self.idled = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether no transfer is in flight."""
        return not self._flying

    def begin(self) -> None:
        """Count the begin of a transfer."""
        with self._lock:
            if not self._flying:
                self._since, self._landed, self._after_first, self._spoilt = self._clock(), 0, 0, False
            self._flying += 1

    def end(self, nbytes: int) -> None:
        """Count the end of a transfer of ``nbytes`` bytes."""
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
        """Count the end of a transfer at an unknown time: its busy period is not measured."""
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
        if self._bytes > HALVED_AFTER:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None until enough was measured."""
        with self._lock:
            nbytes, seconds = self._bytes, self._seconds
            if self._landed and not self._spoilt:
                nbytes, seconds = nbytes + self._after_first, seconds + self._last - self._first
        if not self._hinted and (self._taken < TRUSTED_AFTER or not nbytes):
            return None
        return nbytes / seconds if seconds else math.inf


class Timed(Wrapping):
    """Another tier, whose writes are timed.

    Args:
        inner: the tier. It is not closed with this one.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.speed = Throughput(inner.traits.bandwidth)
        self.keeps = False

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return TimedWriter(self, self.inner.writer(key, size_hint))

    def close(self) -> None:
        """Does nothing: the tier inside is closed by its owner."""


class TimedWriter(WrappingWriter):
    """Another writer, each of whose transfers is timed until its buffer is released."""

    def __init__(self, tier: Timed, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier, self._length = tier, 0
        self._flights: set[_Flight] = set()

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        nbytes = buffer.numel()
        self._length += nbytes
        # A tier that keeps the buffers of an object has finished the transfer when the append returns.
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
        flight = _Flight(self._tier.speed, 0, 1) if self._length >= TIMED_CLOSE_MIN else None
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
        """Drop transfers whose buffer is not released yet: when their bytes were written is not known."""
        for flight in self._flights:
            flight.drop()
        self._flights = set()


class _Flight:
    """One transfer; it ends when `part` was called once per party: by the append, and by the release."""

    def __init__(self, speed: Throughput, nbytes: int, parties: int) -> None:
        self._speed, self._nbytes, self.left = speed, nbytes, parties
        self._lock = threading.Lock()
        speed.begin()

    def part(self) -> None:
        """End one party's share."""
        with self._lock:
            if not self.left:
                return
            self.left -= 1
            over = not self.left
        if over:
            self._speed.end(self._nbytes)

    def drop(self) -> None:
        """Drop the transfer: its end is not known."""
        with self._lock:
            over, self.left = self.left > 0, 0
        if over:
            self._speed.drop()
