"""Parts: what is appended to an object, cut and gathered into the parts of an upload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierstate.manifest.chunk import empty_buffer, view

from .base import Release

MIN = 5 << 20
"""S3 refuses shorter parts, but for the last one."""

PART = 16 << 20
"""Bytes of the parts that small pieces are gathered in, at first."""

LONG = 64 << 20
"""Bytes of a part at most, at first: longer buffers go as several."""

MAX_PARTS = 10_000
STEP = 2_000
"""After each so many parts the next ones are twice as long, so that ten thousand hold 1 TB and more."""


class Lease:
    """A buffer's release, owed to whoever appends it and to the parts it is in: called when the last is done with it.

    Args:
        release: what to call, once.

    Attributes:
        shared: whether any part has it.
    """

    def __init__(self, release: Release) -> None:
        self._release = release
        self._owed = 1
        self.shared = False
        self._lock = threading.Lock()

    def share(self) -> None:
        """One more part needs the buffer."""
        with self._lock:
            self._owed += 1
            self.shared = True

    def done(self) -> None:
        """One of those that needed it does no longer."""
        with self._lock:
            self._owed -= 1
            last = self._owed == 0
        if last:
            self._release()

    def disown(self) -> None:
        """Whoever appended releases the buffer himself."""
        self._release = _nothing


def _nothing() -> None:
    """What is left to do for nobody."""


@dataclass
class Part:
    """One part: pieces of memory that follow each other.

    Attributes:
        views: the pieces.
        after: called once when they are needed no longer.
    """

    views: list[memoryview] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(map(len, self.views))

    def done(self) -> None:
        """Give everything back. A second call does nothing."""
        after, self.after, self.views = self.after, [], []
        for call in after:
            call()


class Parts:
    """Makes parts: long buffers that are leased go as they are, all else is copied into memory of its own.

    So a buffer is held for only as long as its own part takes, and never waits for others to come: they may need the
    memory it stands in.

    Args:
        size_hint: the likely length of the whole in bytes.
    """

    def __init__(self, size_hint: int = 0) -> None:
        self._least = max(PART, -(-size_hint // (MAX_PARTS - 1000)))
        self._open = Part()
        self._room = memoryview(b"")
        self._filled = 0
        self.count = 0
        self._spare: list[memoryview] = []

    @property
    def size(self) -> int:
        """Bytes of the next part, if it is gathered."""
        return self._least << min(self.count // STEP, 8)

    def add(self, data: memoryview, lease: Lease | None) -> Iterator[Part]:
        """Take bytes; the parts that are full then, to be sent in this order before the next bytes are added."""
        if lease is not None and len(data) >= self.size // PART * MIN:
            yield from self._lent(data, lease)
            return
        while len(data):
            if self._filled == len(self._room):
                yield from self.rest()
                self._begin()
            count = min(len(data), len(self._room) - self._filled)
            _copy(self._room[self._filled : self._filled + count], data[:count])
            self._filled, data = self._filled + count, data[count:]

    def _lent(self, data: memoryview, lease: Lease) -> Iterator[Part]:
        longest = max(LONG, self.size)
        length = -(-len(data) // -(-len(data) // longest))
        for at in range(0, len(data), length):
            part = self._take()
            lease.share()
            part.views.append(data[at : at + length])
            part.after.append(lease.done)
            yield part

    def rest(self) -> Iterator[Part]:
        """What is gathered, if anything: the last part may be short."""
        if self._filled:
            yield self._take()

    def _take(self) -> Part:
        """The part under way, with what is gathered in it."""
        part, self._open = self._open, Part()
        if self._filled:
            part.views.append(self._room[: self._filled])
            room = self._room
            part.after.append(lambda: self._spare.append(room))
        self._room, self._filled = memoryview(b""), 0
        self.count += 1
        return part

    def _begin(self) -> None:
        while self._spare:
            room = self._spare.pop()
            if len(room) == self.size:
                self._room = room
                return
        self._room = view(empty_buffer(self.size))


def _copy(out: memoryview, data: memoryview) -> None:
    import numpy as np

    # NumPy lets other threads run meanwhile; assigning to a memoryview does not.
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))
