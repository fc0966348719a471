"""Rate limiting (token bucket): a wrapper that limits the bytes and operations per second of a tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tierstate.manifest.chunk import Buffer, spans
from tierstate.manifest.errors import TierError
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier, Traits
from tierstate.tiers.latch import Latch
from tierstate.tiers.trace import span
from tierstate.tiers.units import rough_size

from .base import Wrapping, WrappingWriter

BURST = 0.25
"""Seconds of the rate that an idle bucket saves up (the burst), and that one turn takes at most."""


class TokenBucket:
    """A token bucket: gives out ``rate`` tokens per second, in the order of the requests.

    Turns are given out in advance, each with the time to wait for it, so that no caller polls. In any time ``t`` turns
    for at most ``rate * (t + BURST)`` tokens plus one turn begin. Thread-safe.

    Args:
        rate: tokens per second.
        clock: returns seconds, from any starting point.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock() - BURST

    def turn(self, tokens: float) -> float:
        """Take a turn for ``tokens`` tokens; returns the seconds until it begins."""
        with self._lock:
            now = self._clock()
            start = max(self._next, now - BURST)
            self._next = start + tokens / self.rate
            return max(0.0, start - now)


class Limited(Wrapping):
    """Another tier with a rate limit, which all its threads share.

    Bytes written and bytes read count alike. Threads take turns of a quarter of a second's worth of bytes, in order of
    arrival, so that a short object need not wait until a long one ends. Appends and reads are forwarded in pieces of
    ``part_size * parallelism`` bytes or of one turn, whichever is more; a ``put`` is forwarded whole. Each call of the
    tier or of a writer is one operation, and so is each piece.

    Args:
        inner: the tier.
        bandwidth: bytes per second; None for no limit.
        operations: calls per second; None for no limit.
    """

    def __init__(self, inner: Tier, *, bandwidth: float | None = None, operations: float | None = None) -> None:
        super().__init__(inner)
        self._bytes = TokenBucket(bandwidth) if bandwidth else None
        self._calls = TokenBucket(operations) if operations else None
        self._closed = Latch()

    @property
    def traits(self) -> Traits:
        """Those of the inner tier, with the limited bandwidth."""
        traits = self.inner.traits
        told = [f"{rough_size(self._bytes.rate)}/s"] if self._bytes else []
        told += [f"{self._calls.rate:g} operations/s"] if self._calls else []
        if self._bytes:
            traits = replace(traits, bandwidth=min(self._bytes.rate, traits.bandwidth or self._bytes.rate))
        return replace(traits, notes=(*traits.notes, f"limited to {' and '.join(told)}")) if told else traits

    def put(self, key: str, data: Buffer) -> None:
        self.pace(data.numel())
        self.inner.put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        for batch in batches(ranges, self.piece):
            self.pace(sum(out.numel() for _, out in batch))
            self.inner.read(key, batch)

    def list(self, prefix: str) -> Iterator[str]:
        self.pace()
        return self.inner.list(prefix)

    def size(self, key: str) -> int:
        self.pace()
        return self.inner.size(key)

    def delete(self, key: str) -> None:
        self.pace()
        self.inner.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def age(self, key: str) -> float | None:
        self.pace()
        return self.inner.age(key)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        self.pace()
        return LimitedWriter(self, self.inner.writer(key, size_hint))

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    @property
    def piece(self) -> int:
        """Bytes of a piece."""
        traits = self.inner.traits
        return max(traits.part_size * traits.parallelism, self._turn)

    @property
    def _turn(self) -> int:
        return max(1, int(self._bytes.rate * BURST)) if self._bytes else 0

    def pace(self, nbytes: int = 0) -> None:
        """Wait until a call that moves ``nbytes`` bytes may begin.

        Raises:
            TierError: the tier was closed meanwhile.
        """
        if self._calls:
            self._wait(self._calls.turn(1))
        while self._bytes and nbytes:
            turn = min(nbytes, self._turn)
            self._wait(self._bytes.turn(turn))
            nbytes -= turn

    def _wait(self, seconds: float) -> None:
        if not seconds:
            return
        with span("wait for the limit", tier=self.name):
            over = self._closed.wait(seconds)
        if over:
            raise TierError(f"{self.name}: was closed while a call waited for its turn", tier=self.name)


class LimitedWriter(WrappingWriter):
    """Another writer, under the rate limit of its tier."""

    def __init__(self, tier: Limited, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier = tier

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        pieces = spans(buffer.numel(), self._tier.piece) or [(0, 0)]
        lease = _Shared(release, len(pieces)) if release else None
        for number, (start, nbytes) in enumerate(pieces):
            try:
                self._tier.pace(nbytes)
            except BaseException as error:
                self.give_up(error)
                if lease:
                    lease.give_back(len(pieces) - number)
                raise
            try:
                self.inner.append(buffer[start : start + nbytes], lease.release if lease else None)
            except BaseException:
                if lease:
                    lease.give_back(len(pieces) - number - 1)
                raise

    def close(self) -> None:
        self.check()
        try:
            self._tier.pace()
        except BaseException as error:
            self.give_up(error)
            raise
        self.inner.close()


class _Shared:
    """The lease of a buffer that is split into pieces: released with the last piece."""

    def __init__(self, release: Release, pieces: int) -> None:
        self._release, self._left = release, pieces
        self._lock = threading.Lock()

    def release(self) -> None:
        self.give_back(1)

    def give_back(self, pieces: int) -> None:
        with self._lock:
            self._left -= pieces
            last = pieces > 0 and not self._left
        if last:
            self._release()


def batches(ranges: Sequence[Range], size: int) -> Iterator[list[Range]]:
    """The ranges, split and grouped into lists of at most ``size`` bytes each; at least one list."""
    batch: list[Range] = []
    room = size
    for offset, out in ranges:
        for start, nbytes in spans(out.numel(), size) or [(0, 0)]:
            if nbytes > room:
                yield batch
                batch, room = [], size
            batch.append(Range(offset + start, out[start : start + nbytes]))
            room -= nbytes
    yield batch
