"""The arena: the host memory through which all saves and restores pass, in page-aligned slabs under one budget."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import CaptureError

from .pages import PAGE, fault_in, map_pages, pin, unpin

LAST = 1
"""Slabs that captures leave free."""


class Slab:
    """One slab on loan. It goes back to the arena when as many `release` calls have come as there are leases.

    Attributes:
        buffer: the slab's memory, page-aligned.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.buffer = map_pages(arena.slab_size)
        self.leases = 0
        self.kept = False
        self.ready = False
        self.pinned = False

    def prepare(self) -> None:
        """Fault the memory in, and pin it where CUDA is."""
        if not self.ready:
            fault_in(self.buffer)
            self.ready = True
        if not self.pinned:
            self.pinned = pin(self.buffer)

    def discard(self) -> None:
        """Undo the pinning; the memory goes with its last view."""
        if self.pinned:
            unpin(self.buffer)
            self.pinned = False

    def lease(self) -> None:
        """One more party needs the slab."""
        with self._arena.changed:
            self.leases += 1

    def release(self) -> None:
        """One party less needs it."""
        self._arena._release(self)


class Arena:
    """Slabs of one size under one budget; a full arena makes the next acquirer wait, and never grows.

    Slabs that a memory tier keeps (`keep`) leave the budget: from then on they count against that tier's capacity.
    Memory is mapped when first needed, and kept for the next save.

    Args:
        size: bytes that may be in flight at once.
        slab_size: bytes of one slab; rounded up to whole pages.

    Raises:
        ValueError: fewer than two slabs fit, one to copy out into and one to read back into.
    """

    def __init__(self, size: int, slab_size: int) -> None:
        self.slab_size = -(-slab_size // PAGE) * PAGE
        self.slots = size // self.slab_size
        if self.slots < 2:
            raise ValueError(
                f"an arena of {size} bytes holds {self.slots} slabs of {self.slab_size} bytes; "
                "it needs two at least: make `arena: size` at least twice `chunk`"
            )
        self.changed = threading.Condition()
        self.in_flight = 0
        self.kept = 0
        self.peak = 0
        self._free: list[Slab] = []
        self._out: dict[int, Slab] = {}
        self._preparing = False

    def lacks(self, nbytes: int) -> bool:
        """Whether a capture of so many bytes would have to wait; one longer than the arena waits for all of it."""
        with self.changed:
            slots = self.slots - LAST
            return max(0, slots - self.in_flight) * self.slab_size < min(nbytes, slots * self.slab_size)

    def acquire(self, stop: Callable[[], bool] = lambda: False, *, last: bool = False) -> Slab:
        """A slab with one lease, as soon as the budget has room.

        Args:
            stop: asked while waiting.
            last: take the last free slab too. Captures leave it to those who read back: the slabs of a capture may
                wait behind a cascade in some tier's lane, and if that cascade had to wait for one of them, both would
                wait forever.

        Raises:
            CaptureError: ``stop`` returned true while waiting.
        """
        with self.changed:
            while self.in_flight >= self.slots - (0 if last else LAST):
                if stop():
                    raise CaptureError("gave up waiting for room in the arena: the save was cancelled")
                self.changed.wait(0.1)
            return self._take()

    def try_acquire(self) -> Slab | None:
        """A slab with one lease, for a capture, if the budget has room for it now."""
        with self.changed:
            return self._take() if self.in_flight < self.slots - LAST else None

    def _take(self) -> Slab:
        with self.changed:
            slab = self._free.pop() if self._free else Slab(self)
            slab.leases = 1
            self._out[_address(slab.buffer)] = slab
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight + self.kept)
            return slab

    def prepare(self, nbytes: int) -> None:
        """Have memory for so many bytes faulted in, by a thread of its own, as far as the budget goes.

        The first touch of memory costs more than all that is done with it afterwards.
        """
        with self.changed:
            missing = min(self.slots, -(-nbytes // self.slab_size)) - self.in_flight - len(self._free)
            if self._preparing or missing <= 0:
                return
            self._preparing = True
        threading.Thread(target=self._prepare, args=(missing,), name="tierstate-arena", daemon=True).start()

    def _prepare(self, count: int) -> None:
        try:
            for _ in range(count):
                slab = Slab(self)
                slab.prepare()
                with self.changed:
                    if self.in_flight + len(self._free) >= self.slots:
                        slab.discard()
                        return
                    self._free.append(slab)
        finally:
            self._preparing = False

    def keep(self, buffer: Buffer) -> int:
        """Take the slab that holds this buffer out of the budget, for a tier that will hold it for long.

        Returns:
            Bytes that this newly pins: 0 where the slab is kept already or the buffer is not the arena's.
        """
        with self.changed:
            slab = self._out.get(_address(buffer))
            if slab is None or slab.kept:
                return 0
            slab.kept = True
            self.kept += 1
            self.in_flight -= 1
            self.changed.notify_all()
            return self.slab_size

    def _release(self, slab: Slab) -> None:
        with self.changed:
            slab.leases -= 1
            if slab.leases > 0:
                return
            if slab.leases < 0:
                raise RuntimeError("a slab was released more often than it was leased")
            del self._out[_address(slab.buffer)]
            if slab.kept:
                slab.kept = False
                self.kept -= 1
            else:
                self.in_flight -= 1
            slab.ready = True
            if self.in_flight + len(self._free) < self.slots:
                self._free.append(slab)
            else:
                slab.discard()
            self.changed.notify_all()

    def wake(self) -> None:
        """Let waiting acquirers look at their ``stop`` again."""
        with self.changed:
            self.changed.notify_all()


def _address(buffer: Buffer) -> int:
    return buffer.untyped_storage().data_ptr()
