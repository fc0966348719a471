"""The arena: the host memory through which all saves and restores pass, in page-aligned slabs under one budget."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import CaptureError, TierstateError

from .pages import PAGE, SharedPages, current_device, fault_in, is_shared, map_pages, pin, unpin

log = logging.getLogger("tierstate")

LAST = 1
"""Slabs that captures leave free."""


class Slab:
    """One slab on loan. It goes back to the arena when as many `release` calls have come as there are leases.

    Attributes:
        buffer: the slab's memory, page-aligned.
        offset: where it lies in the file that is the arena's `shared` memory; None where the memory is private.
        pinned: whether CUDA knows of it; None as long as that was not tried.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.offset: int | None = None
        if arena.shared is None:
            self.buffer = map_pages(arena.slab_size)
        else:
            self.buffer, self.offset = arena.shared.map()
        self.leases = 0
        self.kept = False
        self.ready = False
        self.pinned: bool | None = None

    def prepare(self) -> None:
        """Fault the memory in, and pin it where CUDA is."""
        if not self.ready:
            fault_in(self.buffer)
            self.ready = True
        self.pin()

    def pin(self) -> None:
        """Pin the memory, once this process uses CUDA. Tried once: it takes milliseconds."""
        if self.pinned is None:
            self.pinned = pin(self.buffer, self._arena.device)

    def discard(self) -> None:
        """Undo the pinning, and let go of the memory: it goes with its last view."""
        if not self._arena.is_ours():
            return
        if self.pinned:
            unpin(self.buffer, self._arena.device)
        self.pinned = None
        if self._arena.shared is not None and self.offset is not None:
            self._arena.shared.give_back(self.buffer, self.offset)
        self.buffer = empty_buffer(0)

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
    Memory is mapped when first needed, and kept for the next save until the arena is closed.

    Args:
        size: bytes that may be in flight at once.
        slab_size: bytes of one slab; rounded up to whole pages.

    Attributes:
        shared: the file in memory in which the slabs lie, by which another process can map them; None where they are
            private.
        device: the CUDA device of the thread that made the arena or last called `prepare`; None without CUDA.

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
        self.shared = SharedPages(self.slab_size) if is_shared(self.slab_size) else None
        self.device = current_device()
        self.changed = threading.Condition()
        self.closed = False
        self.in_flight = 0
        self.kept = 0
        self.peak = 0
        self._pid = os.getpid()
        self._free: list[Slab] = []
        self._out: dict[int, Slab] = {}
        self._preparing: threading.Thread | None = None

    def is_ours(self) -> bool:
        """Whether this process made the arena, and did not inherit it in a fork."""
        return os.getpid() == self._pid

    def lacks(self, nbytes: int) -> bool:
        """Whether a capture of so many bytes would have to wait; one longer than the arena waits for all of it."""
        with self.changed:
            slots = self.slots - LAST
            return max(0, slots - self.in_flight) * self.slab_size < min(nbytes, slots * self.slab_size)

    def acquire(self, stop: Callable[[], bool] = lambda: False, *, last: bool = False) -> Slab:
        """A slab with one lease, as soon as the budget has room; pinned, where this process uses CUDA.

        Args:
            stop: asked while waiting.
            last: take the last free slab too. Captures leave it to those who read back: the slabs of a capture may
                wait behind a cascade in some tier's lane, and if that cascade had to wait for one of them, both would
                wait forever.

        Raises:
            CaptureError: ``stop`` returned true while waiting.
            TierstateError: the arena is closed.
        """
        with self.changed:
            while self._is_full(last):
                if stop():
                    raise CaptureError("gave up waiting for room in the arena: the save was cancelled")
                self.changed.wait(0.1)
            slab = self._take()
        return self._pinned(slab)

    def try_acquire(self) -> Slab | None:
        """A slab with one lease, if a capture would get one without waiting.

        Raises:
            TierstateError: the arena is closed.
        """
        with self.changed:
            if self._is_full(last=False):
                return None
            slab = self._take()
        return self._pinned(slab)

    def _is_full(self, last: bool) -> bool:
        if self.closed:
            raise TierstateError("this arena is closed, as its Checkpointer is; make a new Checkpointer")
        return self.in_flight >= self.slots - (0 if last else LAST)

    def _take(self) -> Slab:
        slab = self._free.pop() if self._free else Slab(self)
        slab.leases = 1
        self._out[_address(slab.buffer)] = slab
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight + self.kept)
        return slab

    @staticmethod
    def _pinned(slab: Slab) -> Slab:
        # Outside the lock: it takes milliseconds, and others want slabs meanwhile.
        try:
            slab.pin()
        except BaseException:
            slab.release()
            raise
        return slab

    def prepare(self, nbytes: int) -> None:
        """Have memory for so many bytes faulted in, by a thread of its own, as far as the budget goes.

        The first touch of memory costs more than all that is done with it afterwards. Called from the thread that
        saves: its CUDA device is the one whose context slabs are pinned in.
        """
        self.device = current_device()
        with self.changed:
            wanted = min(self.slots, -(-nbytes // self.slab_size))
            if self.closed or self._preparing is not None or self.in_flight + len(self._free) >= wanted:
                return
            thread = threading.Thread(target=self._prepare, args=(wanted,), name="tierstate-arena", daemon=True)
            # Under the lock, so that `close` finds no thread that it could not wait for.
            self._preparing = thread
            try:
                thread.start()
            except RuntimeError:
                self._preparing = None
                raise

    def _prepare(self, wanted: int) -> None:
        try:
            while self._add_prepared(wanted):
                pass
        except Exception as error:
            log.warning("memory could not be prepared, so that saves wait for it: %r", error)
        finally:
            with self.changed:
                self._preparing = None

    def _add_prepared(self, wanted: int) -> bool:
        """One more free slab, if there are not so many yet, counting those that whoever could not wait has made."""
        with self.changed:
            if self.closed or self.in_flight + len(self._free) >= wanted:
                return False
        slab = Slab(self)
        slab.prepare()
        with self.changed:
            useful = not self.closed and self.in_flight + len(self._free) < wanted
            if useful:
                self._free.append(slab)
        if not useful:
            slab.discard()
        return useful

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
            wanted = not self.closed and self.in_flight + len(self._free) < self.slots
            if wanted:
                self._free.append(slab)
            self.changed.notify_all()
        if not wanted:
            slab.discard()

    def close(self) -> None:
        """Give all free memory back to the system; what is still on loan follows when its last lease ends.

        Whoever waits for a slab gets an error, and no thread is left. A forked child's call does nothing: memory and
        threads are its parent's.
        """
        if not self.is_ours():
            return
        with self.changed:
            self.closed = True
            free, self._free = self._free, []
            preparing = self._preparing
            self.changed.notify_all()
        if preparing is not None:
            preparing.join()
        while free:
            free.pop().discard()
        if self.shared is not None:
            self.shared.close()

    def wake(self) -> None:
        """Let waiting acquirers look at their ``stop`` again."""
        with self.changed:
            self.changed.notify_all()


def _address(buffer: Buffer) -> int:
    return buffer.untyped_storage().data_ptr()
