"""Objects held in this process's memory: what the memory tier and the host tier share."""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists, NotFound, TierError

from .base import Range, Release, Tier, Traits, check_key
from .gauge import Gauge
from .ranges import check_ranges
from .writing import StepWriter


class Piece(NamedTuple):
    """Some of an object's bytes, and what to call, once, when nobody needs them any more.

    Attributes:
        leased: whether ``free`` releases the lease under which the caller handed the buffer over.
    """

    buffer: Buffer
    free: Callable[[], None]
    leased: bool


class HeldObject:
    """The pieces of one object, and how many threads are copying out of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.starts: list[int] = []
        self.born = time.monotonic()
        self.nbytes = 0
        self.readers = 0
        self.gone = False
        for piece in pieces:
            self.starts.append(self.nbytes)
            self.nbytes += piece.buffer.numel()

    def copy(self, offset: int, out: Buffer) -> None:
        """Fill ``out`` from ``offset``; the range is known to lie within the object."""
        i, done = bisect_right(self.starts, offset) - 1, 0
        while done < out.numel():
            buffer = self.pieces[i].buffer
            at = offset + done - self.starts[i]
            n = min(buffer.numel() - at, out.numel() - done)
            # Tensor.copy_ lets other threads run; assigning to a memoryview does not. From a device it is only queued.
            out[done : done + n].copy_(buffer[at : at + n], non_blocking=True)
            i, done = i + 1, done + n

    def free(self) -> None:
        """Let go of every piece."""
        for piece in self.pieces:
            piece.free()


class HeldTier(Tier):
    """Objects in a dict under a lock; subclasses say how a buffer is held.

    Args:
        capacity: bytes it may hold; None for as many as there is memory.
    """

    persistent: ClassVar[bool] = False

    def __init__(self, capacity: int | None = None) -> None:
        self._gauge = Gauge(capacity)
        self._lock = threading.Lock()
        self._objects: dict[str, HeldObject] = {}
        self._closed = False
        self._traits = Traits(
            persistent=False,
            shared="process",
            failure_domain=f"process:{socket.gethostname()}:{os.getpid()}",
            capacity=capacity,
            conditional_create=True,
        )

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def used(self) -> int:
        """Bytes that count against the capacity now."""
        return self._gauge.used

    @abstractmethod
    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> Piece:
        """A piece with the buffer's bytes.

        Raises:
            TierFull: there is no room; the lease was not kept.
        """

    def _hold_copy(self, key: str, buffer: Buffer) -> Piece:
        nbytes = buffer.numel()
        self._gauge.take(nbytes, self.name, key)
        try:
            copy = self._copied(buffer)
        except BaseException:
            self._gauge.give_back(nbytes)
            raise
        return Piece(copy, lambda: self._gauge.give_back(nbytes), leased=False)

    def _copied(self, buffer: Buffer) -> Buffer:
        """The bytes of a host buffer, in memory of the tier's own kind."""
        return buffer.clone()

    def put(self, key: str, data: Buffer) -> None:
        with self.writer(key) as writer:
            writer.append(data)

    def writer(self, key: str, size_hint: int | None = None) -> HeldWriter:
        check_key(key)
        with self._lock:
            self._must_be_free(key)
        return HeldWriter(self, key)

    def _must_be_free(self, key: str) -> None:
        if self._closed:
            raise TierError(f"{self.name}: {key}: the tier is closed", tier=self.name, key=key)
        if key in self._objects:
            raise AlreadyExists(f"{self.name}: {key}: exists already, nothing was changed", tier=self.name, key=key)

    def _add_object(self, key: str, held: HeldObject) -> None:
        with self._lock:
            self._must_be_free(key)
            self._objects[key] = held

    def _find(self, key: str) -> HeldObject:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFound(f"{self.name}: {key}: there is no such object", tier=self.name, key=key) from None

    @contextmanager
    def _reading(self, key: str) -> Iterator[HeldObject]:
        """The object, which is not freed before the block is left."""
        with self._lock:
            held = self._find(key)
            held.readers += 1
        try:
            yield held
        finally:
            with self._lock:
                held.readers -= 1
                last = held.gone and not held.readers
            if last:
                held.free()

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        with self._reading(key) as held:
            check_ranges(f"{self.name}: {key}", held.nbytes, ranges)
            for offset, out in ranges:
                held.copy(offset, out)

    def list(self, prefix: str) -> Iterator[str]:
        with self._lock:
            return iter(sorted(key for key in self._objects if key.startswith(prefix)))

    def size(self, key: str) -> int:
        with self._lock:
            return self._find(key).nbytes

    def age(self, key: str) -> float | None:
        with self._lock:
            return time.monotonic() - self._find(key).born

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            held = self._objects.pop(key, None)
        if held is not None:
            self._retire(held)

    def _retire(self, held: HeldObject) -> None:
        """Free an object that nobody can find any more, now or after its last reader."""
        with self._lock:
            held.gone = True
            unread = not held.readers
        if unread:
            held.free()

    def room(self) -> int | None:
        return self._gauge.left

    def close(self) -> None:
        with self._lock:
            self._closed = True
            objects, self._objects = self._objects, {}
        for held in objects.values():
            self._retire(held)


class HeldWriter(StepWriter):
    """Collects pieces, and hands them to the tier when closed."""

    def __init__(self, tier: HeldTier, key: str) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._pieces: list[Piece] = []

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        if not buffer.numel():
            return False
        piece = self._tier._hold(self._key, buffer, release)
        self._pieces.append(piece)
        return piece.leased

    def _publish(self) -> None:
        self._tier._add_object(self._key, HeldObject(self._pieces))

    def _discard(self) -> None:
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.free()
