"""A tier around a tier that counts what is asked of it, and how long the answers take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tierstate.manifest.chunk import Buffer

from .base import ObjectWriter, Range, Release, Tier
from .wrapping import Wrapping, WrappingWriter, layers

PER_OCTAVE = 4
"""Classes of durations per doubling, so that a percentile is off by a fifth at most."""

LEAST = 1e-6
"""Seconds up to which all durations are one class."""

CLASSES = 36 * PER_OCTAVE
"""Up to 19 hours."""


@dataclass(frozen=True, slots=True)
class OperationStats:
    """What one operation of a tier has done.

    Attributes:
        calls: how often it was asked for, failures among them.
        failures: calls that raised an error; that a key was taken or absent counts too.
        nbytes: bytes that were moved by calls that went well.
        seconds: time spent in all calls; those of several threads at once add up.
        median, p99: seconds that half, and 99 of 100, of the calls stayed below; up to a fifth too much.
        longest: seconds of the longest call.
    """

    calls: int = 0
    failures: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    median: float = 0.0
    p99: float = 0.0
    longest: float = 0.0


class Meter:
    """Counts the calls of one operation. Of fixed size, however many they are; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = self._nbytes = 0
        self._seconds = self._longest = 0.0
        self._classes = [0] * CLASSES

    def add(self, seconds: float, nbytes: int, *, failed: bool) -> None:
        """Count one call."""
        place = math.ceil(PER_OCTAVE * math.log2(max(seconds, LEAST) / LEAST))
        with self._lock:
            self._classes[min(place, CLASSES - 1)] += 1
            self._failures += failed
            self._nbytes += 0 if failed else nbytes
            self._seconds += seconds
            self._longest = max(self._longest, seconds)

    @property
    def stats(self) -> OperationStats:
        """What was counted so far."""
        with self._lock:
            calls = sum(self._classes)
            median, p99 = self._below(calls / 2), self._below(calls * 0.99)
            return OperationStats(calls, self._failures, self._nbytes, self._seconds, median, p99, self._longest)

    def _below(self, calls: float) -> float:
        """Seconds that so many calls stayed below."""
        counted = 0
        for place, count in enumerate(self._classes):
            counted += count
            if count and counted >= calls:
                return min(self._longest, LEAST * 2 ** (place / PER_OCTAVE))
        return 0.0


class Measured(Wrapping):
    """Another tier, with a meter for each operation: ``put``, ``read``, ``list``, ``size``, ``delete``, ``discard``,
    ``age``, and those of writers, ``open``, ``append`` and ``commit`` (their close).

    A listing is drawn out at once, so that its time is all of it.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        names = ("put", "read", "list", "size", "delete", "discard", "age", "open", "append", "commit")
        self._meters = {name: Meter() for name in names}

    @property
    def operations(self) -> Mapping[str, OperationStats]:
        """What each operation that was ever asked for has done."""
        found = {name: meter.stats for name, meter in self._meters.items()}
        return {name: stats for name, stats in found.items() if stats.calls}

    @contextmanager
    def metered(self, operation: str, nbytes: int = 0) -> Iterator[None]:
        """Count the block as one call that moves so many bytes."""
        start, failed = time.monotonic(), True
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
    """Another writer, whose calls its tier counts."""

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
    """What the operations of a tier have done, if it or a tier inside it is `Measured`; otherwise nothing."""
    return next((layer.operations for layer in layers(tier) if isinstance(layer, Measured)), {})
