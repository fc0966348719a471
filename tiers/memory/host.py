"""Tiers in this process's host memory: the host tier without copies, and the memory tier with copies.

`InMemoryTier` holds objects as lists of buffers in a dict and frees an object after its last reader. `Host` keeps the
captured slabs themselves (by their leases) until the object is deleted. `Memory` copies; it is for tests and for data
that need not survive the process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists, NotFound, TierError
from tierstate.tiers.base import AtomicWriter, KeepingArena, Range, Release, Tier, Traits, check_key, check_ranges
from tierstate.tiers.capacity import CapacityCounter
from tierstate.tiers.units import Size

from .arena import current_device


class HeldBuffer(NamedTuple):
    """A buffer of an object, and the function that frees it, called once.

    Attributes:
        leased: whether ``free`` releases the lease of the caller's buffer.
    """

    buffer: Buffer
    free: Callable[[], None]
    leased: bool


class InMemoryObject:
    """The buffers of one object, and how many threads are reading them now."""

    def __init__(self, pieces: Sequence[HeldBuffer]) -> None:
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
        """Fill ``out`` from ``offset``; the range must be within the object."""
        for done, part in self.parts(offset, out.numel()):
            # Tensor.copy_ releases the GIL; assigning to a memoryview does not. From a device it is only queued.
            out[done : done + part.numel()].copy_(part, non_blocking=True)

    def parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, Buffer]]:
        """The buffers that a range of the object lies in, each with the place in the range where it begins."""
        i, done = bisect_right(self.starts, offset) - 1, 0
        while done < nbytes:
            buffer = self.pieces[i].buffer
            at = offset + done - self.starts[i]
            n = min(buffer.numel() - at, nbytes - done)
            yield done, buffer[at : at + n]
            i, done = i + 1, done + n

    def whole(self, offset: int, nbytes: int) -> Buffer | None:
        """A range where it lies, if that is within the object and in one buffer; else None."""
        i = bisect_right(self.starts, offset) - 1
        if not 0 <= i < len(self.pieces):
            return None
        at = offset - self.starts[i]
        found = self.pieces[i].buffer[at : at + nbytes]
        return found if found.numel() == nbytes else None

    def free(self) -> None:
        """Free every buffer."""
        for piece in self.pieces:
            piece.free()


class InMemoryTier(Tier):
    """Objects in a dict under a lock; subclasses define how a buffer is held.

    Args:
        capacity: bytes it may hold; None for as many as there is memory.
    """

    persistent: ClassVar[bool] = False

    def __init__(self, capacity: int | None = None) -> None:
        self._gauge = CapacityCounter(capacity)
        self._lock = threading.Lock()
        self._objects: dict[str, InMemoryObject] = {}
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
    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> HeldBuffer:
        """Hold the buffer's bytes, by lease or as a copy.

        Raises:
            TierFull: there is no room; the lease is not kept.
        """

    def _hold_copy(self, key: str, buffer: Buffer) -> HeldBuffer:
        nbytes = buffer.numel()
        self._gauge.take(nbytes, self.name, key)
        try:
            copy = self._copied(buffer)
        except BaseException:
            self._gauge.give_back(nbytes)
            raise
        return HeldBuffer(copy, lambda: self._gauge.give_back(nbytes), leased=False)

    def _copied(self, buffer: Buffer) -> Buffer:
        """Copy a host buffer into the tier's kind of memory."""
        return buffer.clone()

    def put(self, key: str, data: Buffer) -> None:
        with self.writer(key) as writer:
            writer.append(data)

    def writer(self, key: str, size_hint: int | None = None) -> InMemoryWriter:
        check_key(key)
        with self._lock:
            self._must_be_free(key)
        return InMemoryWriter(self, key)

    def _must_be_free(self, key: str) -> None:
        if self._closed:
            raise TierError(f"{self.name}: {key}: the tier is closed", tier=self.name, key=key)
        if key in self._objects:
            raise AlreadyExists(f"{self.name}: {key}: exists already, nothing was changed", tier=self.name, key=key)

    def _add_object(self, key: str, held: InMemoryObject) -> None:
        with self._lock:
            self._must_be_free(key)
            self._objects[key] = held

    def _find(self, key: str) -> InMemoryObject:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFound(f"{self.name}: {key}: there is no such object", tier=self.name, key=key) from None

    @contextmanager
    def reading(self, key: str) -> Iterator[InMemoryObject]:
        """Look up an object, and prevent that it is freed within the block."""
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
        with self.reading(key) as held:
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

    def _retire(self, held: InMemoryObject) -> None:
        """Free an object that is no longer in the dict: now, or after its last reader."""
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


class InMemoryWriter(AtomicWriter):
    """Collects buffers, and adds the object to the tier when closed."""

    def __init__(self, tier: InMemoryTier, key: str) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._pieces: list[HeldBuffer] = []

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        if not buffer.numel():
            return False
        piece = self._tier._hold(self._key, buffer, release)
        self._pieces.append(piece)
        return piece.leased

    def _publish(self) -> None:
        self._tier._add_object(self._key, InMemoryObject(self._pieces))

    def _discard(self) -> None:
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.free()


@dataclass(slots=True)
class _Pin:
    nbytes: int
    pieces: int


class Host(InMemoryTier):
    """Keeps leases on the appended buffers until the object is deleted or the tier is closed.

    Data without a lease (``put``, or ``append`` without ``release``) is copied, and so is a buffer of less than half of
    its slab: a short buffer must not keep a whole slab in memory. An object's memory is freed when it is deleted and
    no thread reads it. If this process uses CUDA, all memory is pinned: slabs by the arena, copies by torch.

    Args:
        capacity: bytes it may hold, as in ``8GiB``; a kept slab counts whole. Without it, no limit.
        arena: the engine's arena; None if buffers come from elsewhere.

    Attributes:
        copies_short: whether a buffer of less than half of its slab is copied; if not, its slab is kept.
    """

    def __init__(self, *, capacity: Size | None = None, arena: KeepingArena | None = None) -> None:
        super().__init__(capacity)
        self._pinned_traits = replace(self._traits, notes=("memory is pinned",))
        self._arena = arena
        self.copies_short = True
        self._pins: dict[int, _Pin] = {}
        self._pinning = threading.Lock()

    @property
    def traits(self) -> Traits:
        return self._traits if current_device() is None else self._pinned_traits

    def _copied(self, buffer: Buffer) -> Buffer:
        # Copies are short, so it costs little that torch rounds pinned memory up to powers of two.
        pin = current_device() is not None
        return torch.empty(len(buffer), dtype=torch.uint8, device="cpu", pin_memory=pin).copy_(buffer)

    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> HeldBuffer:
        short = self.copies_short and 2 * buffer.numel() < self._slab_size(buffer)
        if release is None or short:
            return self._hold_copy(key, buffer)
        slab = self._pin(key, buffer)
        nbytes = buffer.numel()

        def free() -> None:
            self._unpin(slab, nbytes)
            release()

        return HeldBuffer(buffer, free, leased=True)

    def _slab_size(self, buffer: Buffer) -> int:
        return buffer.untyped_storage().nbytes() if self._arena is None else self._arena.slab_size

    def _pin(self, key: str, buffer: Buffer) -> int | None:
        """Count the memory that keeping this buffer needs; the slab's address, or None if it is not of the arena."""
        address, nbytes = buffer.untyped_storage().data_ptr(), buffer.numel()
        with self._pinning:
            pin = self._pins.get(address)
            # Count the minimum first: a full tier must not take slabs out of the arena's budget.
            least = 0 if pin else nbytes
            self._gauge.take(least, self.name, key)
            pinned = 0 if self._arena is None else self._arena.keep(buffer)
            if pin is None and not pinned:
                return None
            try:
                self._gauge.take(pinned - least, self.name, key)
            except BaseException:
                self._gauge.give_back(least)
                raise
            pin = self._pins.setdefault(address, _Pin(0, 0))
            pin.nbytes, pin.pieces = pin.nbytes + pinned, pin.pieces + 1
            return address

    def _unpin(self, slab: int | None, nbytes: int) -> None:
        if slab is None:
            self._gauge.give_back(nbytes)
            return
        with self._pinning:
            pin = self._pins[slab]
            pin.pieces -= 1
            if not pin.pieces:
                del self._pins[slab]
                self._gauge.give_back(pin.nbytes)


class Memory(InMemoryTier):
    """Keeps copies in memory, which are lost when the process ends.

    Args:
        capacity: bytes it may hold, as in ``1GiB``; without it, as many as there is memory.
    """

    def __init__(self, *, capacity: Size | None = None) -> None:
        super().__init__(capacity)

    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> HeldBuffer:
        return self._hold_copy(key, buffer)
