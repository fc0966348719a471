"""The host tier: the very buffers that were captured, kept in host memory without a copy."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tierstate.manifest.chunk import Buffer

from .base import Release, Traits
from .held import HeldTier, Piece
from .pages import current_device
from .units import Size


class KeepingArena(Protocol):
    """What the host tier needs of the engine's arena."""

    slab_size: int
    """Bytes of one slab: what keeping any part of it holds on to."""

    def keep(self, buffer: Buffer) -> int:
        """Take the slab that holds ``buffer`` out of the in-flight budget, until its last lease is released.

        Returns:
            Bytes that this newly pins; 0 where the slab is kept already or is not the arena's.
        """
        ...


@dataclass(slots=True)
class _Pin:
    nbytes: int
    pieces: int


class Host(HeldTier):
    """Keeps the leases of the buffers it is given until the object is deleted or the tier is closed.

    What comes without a lease (``put``, or ``append`` without ``release``) is copied, and so is a buffer of less than
    half of its slab: a small leaf must not hold on to a big slab. An object's memory is freed when it has been deleted
    and nobody is reading it. Where this process uses CUDA, all of it is pinned: slabs by the arena, copies by torch.

    Args:
        capacity: bytes it may hold, where a kept slab counts whole; None for as many as there is memory.
        arena: the engine's arena; None where buffers come from elsewhere.
    """

    def __init__(self, *, capacity: Size | None = None, arena: KeepingArena | None = None) -> None:
        super().__init__(capacity)
        self._arena = arena
        self._pins: dict[int, _Pin] = {}
        self._pinning = threading.Lock()

    @property
    def traits(self) -> Traits:
        return self._traits if current_device() is None else replace(self._traits, notes=("memory is pinned",))

    def _copied(self, buffer: Buffer) -> Buffer:
        # What is copied is short, so that it costs little that torch pins powers of two.
        return torch.empty(len(buffer), dtype=torch.uint8, pin_memory=current_device() is not None).copy_(buffer)

    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> Piece:
        if release is None or 2 * buffer.numel() < self._slab_size(buffer):
            return self._hold_copy(key, buffer)
        slab = self._pin(key, buffer)
        nbytes = buffer.numel()

        def free() -> None:
            self._unpin(slab, nbytes)
            release()

        return Piece(buffer, free, leased=True)

    def _slab_size(self, buffer: Buffer) -> int:
        return buffer.untyped_storage().nbytes() if self._arena is None else self._arena.slab_size

    def _pin(self, key: str, buffer: Buffer) -> int | None:
        """Count what keeping this buffer holds on to; the slab's address, or None for one that is not the arena's."""
        address, nbytes = buffer.untyped_storage().data_ptr(), buffer.numel()
        with self._pinning:
            pin = self._pins.get(address)
            # Asked first with the least it can be: a full tier must not take slabs out of the arena's budget.
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
