"""The arena: a fixed budget of page-aligned host memory slabs, through which all saves and restores pass.

`Arena` leases `Slab`s by reference counting. If the arena is full, the next caller waits; the arena never grows.
Slabs are page-aligned (for direct I/O), use huge pages if the system has them, are in a memfd if another process must
map them, and are pinned (page-locked) once this process uses CUDA, in memory of the device's NUMA node.

Direct I/O is twice as fast from huge pages as from small ones (docs/benchmarks.md): the kernel pins and translates
each page of a transfer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.tiers.concurrency import start_thread, usable_cores
from tierstate.tiers.units import rough_size

from .cudart import uses_cuda
from .device_room import DeviceStaging
from .numa import NumaNode, node_of_device, running_on
from .pages import HUGE, PAGE, SharedPages, fault_in, is_shared, map_pages
from .pinning import Pinning

log = logging.getLogger("tierstate")


RESERVED_SLABS = 1
"""Slabs that captures leave free for reads (see `Arena.acquire`)."""


MOST_PREPARERS = 4
"""Threads that prepare memory at once, at most: with more, the kernel's own locks are the limit."""


def current_device() -> int | None:
    """The current CUDA device of the calling thread; None while this process does not use CUDA."""
    return torch.cuda.current_device() if uses_cuda() else None


class LeasedSlab(Protocol):
    """A slab as its users see it: of this process's arena, or handed over by another process.

    Attributes:
        buffer: the slab's memory, page-aligned.
    """

    buffer: Buffer

    def lease(self) -> None:
        """Add a lease."""

    def release(self) -> None:
        """End a lease; with the last one the memory may be used again."""


class Slab:
    """One block of the arena's memory, with a reference count: it returns to the arena with the last `release`.

    Attributes:
        buffer: the slab's memory, page-aligned.
        offset: offset in the file of the arena's `shared` memory; None if the memory is private.
        ready: whether each page of the memory has been touched.
        little: whether little of it is used, so that it is no memory that was prepared.
        pinned: whether it is pinned for CUDA; None while this process does not use CUDA.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.offset: int | None = None
        if arena.shared is None:
            self.buffer = map_pages(arena.slab_size)
        else:
            self.buffer, self.offset = arena.shared.map()
        if (node := arena.node) is not None:
            node.place(self.buffer)
        self.leases = 0
        self.kept = False
        self.little = False
        self.ready = False
        self.pinned: bool | None = None

    def prepare(self) -> None:
        """Prefault the memory, and pin it if this process uses CUDA."""
        if not self.ready:
            fault_in(self.buffer)
            self.ready = True
        self.pin()

    def pin(self) -> None:
        """Pin the memory, once this process uses CUDA. Tried once: it takes milliseconds."""
        if self.pinned is None:
            self.pinned = self._arena.pinning.add(self.buffer, self._arena.device)

    def discard(self) -> None:
        """Unpin the memory and drop it; it is unmapped when its last view is deleted."""
        if not self._arena.is_ours():
            return
        free = not self.pinned or self._arena.pinning.remove(self.buffer, self._arena.device)
        self.pinned = None
        if free and self._arena.shared is not None and self.offset is not None:
            self._arena.shared.give_back(self.buffer, self.offset)
        self.buffer = empty_buffer(0)

    def give_away(self) -> None:
        """Leave the memory, which is shared, to another process that has mapped it: it does not return to the arena."""
        self._arena._forget(self)
        self.discard()

    def lease(self) -> None:
        """Add a lease."""
        with self._arena.lock:
            self.leases += 1

    def release(self) -> None:
        """End a lease; the last one returns the slab to the arena."""
        self._arena._release(self)


class Arena:
    """Slabs of one size under one budget; if it is full, the next caller waits. It never grows.

    Slabs that a memory tier keeps (`keep`) leave the budget and count against that tier's capacity instead. Memory is
    mapped when first needed, and stays for the next save until the arena is closed, also that of versions that a memory
    tier has dropped.

    Args:
        size: bytes that may be in flight at once.
        slab_size: bytes of one slab; rounded up to whole pages.
        shared: slabs are in shared memory also where the system gives it no huge pages: another process needs them.

    Attributes:
        shared: the memfd of the slabs, by which another process can map them; None if they are private.
        device: the CUDA device of the thread that made the arena or last called `prepare`; None without CUDA.
        pinning: what of the memory is pinned.
        staging: memory of devices through which short chunks go on from slabs to tensors.

    Raises:
        ValueError: fewer than two slabs fit: one is needed for captures and one for reads.
    """

    def __init__(self, size: int, slab_size: int, *, shared: bool = False) -> None:
        self.slab_size = -(-slab_size // PAGE) * PAGE
        self.slots = size // self.slab_size
        if self.slots < 2:
            raise ValueError(
                f"an arena of {size} bytes holds {self.slots} slabs of {self.slab_size} bytes; "
                "it needs two at least: make `arena: size` at least twice `chunk`"
            )
        self.shared = SharedPages(self.slab_size) if shared or is_shared(self.slab_size) else None
        self.device = current_device()
        self.pinning = Pinning(f"an arena of {rough_size(self.slots * self.slab_size)}")
        self.staging = DeviceStaging()
        # Entered and left in C: an interrupt at the beginning of `Condition.__exit__` would leave it locked for ever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self.in_flight = 0
        self.little = 0  # of these, slabs of which little is used
        self.kept = 0
        self.peak = 0
        self.waited = 0.0
        self._pid = os.getpid()
        self._free: list[Slab] = []  # whose memory has been touched
        self._raw: list[Slab] = []  # the other free ones
        self._out: dict[int, Slab] = {}
        self._preparing: set[threading.Thread] = set()
        self._can_prepare = True  # until an attempt fails
        self._wanted = 0  # slabs in flight or free, up to which memory is being prepared
        self._preparers: list[threading.Thread] = []  # the last ones, until `close` has seen them end
        self._children: dict[int, Arena] = {}  # by process

    @property
    def node(self) -> NumaNode | None:
        """The NUMA node of the device, where slabs get their memory; None if there is one node, or it is not known."""
        return node_of_device(self.device)

    def is_ours(self) -> bool:
        """Whether this process made the arena, and did not inherit it in a fork."""
        return os.getpid() == self._pid

    def _in_child(self) -> Arena:
        """What a forked child uses in place of the arena that it inherited.

        Its parent may be writing from that memory by now, and sees what is written to it if it is shared. And the lock
        may be held by a thread that the child does not have.
        """
        pid = os.getpid()
        if (found := self._children.get(pid)) is None:
            # Of threads that come here together all get the one that is there first.
            found = self._children.setdefault(pid, Arena(self.slots * self.slab_size, self.slab_size))
        return found

    def lacks(self, nbytes: int) -> bool:
        """Whether a capture of ``nbytes`` bytes would have to wait; one longer than the arena needs all slabs free."""
        with self.lock:
            slots = self.slots - RESERVED_SLABS
            return max(0, slots - self.in_flight) * self.slab_size < min(nbytes, slots * self.slab_size)

    def has_ready(self, nbytes: Sequence[int]) -> bool:
        """Whether captures would get slabs for so many bytes each, all at once and without waiting for any memory."""
        much = self._many(nbytes)
        with self.lock:
            return much <= len(self._free) and len(nbytes) <= self.slots - RESERVED_SLABS - self.in_flight

    def _many(self, nbytes: Sequence[int]) -> int:
        """How many of the slabs for captures of so many bytes have to be touched memory."""
        return sum(not self._is_little(one) for one in nbytes)

    def _is_little(self, nbytes: int | None) -> bool:
        """Whether a capture of so many bytes (None: a whole slab) touches the memory for it itself: not in a process
        that uses CUDA, in which all of a slab is pinned, and so touched."""
        return nbytes is not None and nbytes <= HUGE and self.device is None

    def acquire(
        self, stop: Callable[[], bool] = lambda: False, *, nbytes: int | None = None, last: bool = False
    ) -> Slab:
        """Wait for a slab with one lease; pinned if this process uses CUDA.

        A capture gets memory that has been touched, since the first touch may cost more than the copy: a slab that is
        released, or one that background threads prepare, whichever comes first. A read gets untouched memory too.

        Args:
            stop: polled while waiting.
            nbytes: how much of it will be used; None: all. Memory for little is not waited for.
            last: take the last free slab too. Captures leave it free for reads, to avoid a deadlock: the slabs of a
                capture may wait in a tier's queue behind a cascade, which needs a slab to read into.

        Raises:
            CaptureError: ``stop`` returned true while waiting.
            TierstateError: the arena is closed.
        """
        if not self.is_ours():
            return self._in_child().acquire(stop, nbytes=nbytes, last=last)
        little = self._is_little(nbytes)
        with self.lock:
            while (full := self._is_full(last)) or (not (last or little) and self._comes_soon()):
                self._wait(stop, full and not last)
            slab = self._take(little)
        return self._pinned(slab)

    def _wait(self, stop: Callable[[], bool], counts: bool) -> None:
        """Wait for a change; ``counts``: for the budget, and not only for memory that is prepared."""
        if stop():
            raise CaptureError("gave up waiting for room in the arena: the save was cancelled")
        start = time.monotonic()
        self.changed.wait(0.1)
        if counts:
            self.waited += time.monotonic() - start

    def _comes_soon(self) -> bool:
        """Whether a capture should wait for memory that has been touched, and not touch new memory itself.

        Background threads prepare it meanwhile, and a fast disk may return a slab sooner than that.
        """
        if self._free:
            return False
        if not self._preparing and self._can_prepare:
            soon = max(-(-HUGE // self.slab_size), _preparers())  # one for each thread that there can be
            self._start_preparers(min(self.slots, self.in_flight - self.little + soon))
        return bool(self._preparing)

    def try_acquire(self) -> Slab | None:
        """A slab with one lease, if a capture would get one without waiting.

        Raises:
            TierstateError: the arena is closed.
        """
        if not self.is_ours():
            return self._in_child().try_acquire()
        with self.lock:
            if self._is_full(last=False) or self._comes_soon():
                return None
            slab = self._take()
        return self._pinned(slab)

    def _is_full(self, last: bool) -> bool:
        if self.closed:
            raise TierstateError("this arena is closed, as its Checkpointer is; make a new Checkpointer")
        return self.in_flight >= self.slots - (0 if last else RESERVED_SLABS)

    def _take(self, little: bool = False) -> Slab:
        # What needs little leaves touched memory to those that need all of a slab: they would have to wait for it.
        # The beginning of a slab that was used for little before has been touched.
        little = little and self.slab_size > HUGE
        # But memory beyond the budget is mapped for nobody.
        spare = bool(self._raw) or self.in_flight + len(self._free) < self.slots
        slab = self._free.pop() if self._free and not (little and spare) else self._untouched()
        slab.leases, slab.little = 1, little
        self.little += little
        self._out[_address(slab.buffer)] = slab
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight + self.kept)
        return slab

    def _untouched(self) -> Slab:
        return self._raw.pop() if self._raw else Slab(self)

    @staticmethod
    def _pinned(slab: Slab) -> Slab:
        # Outside the lock: it takes milliseconds, and other threads need slabs meanwhile.
        try:
            slab.pin()
        except BaseException:
            slab.release()
            raise
        return slab

    def prepare(self, nbytes: int) -> None:
        """Prefault memory for ``nbytes`` bytes in background threads, within the budget: one for each four cores.

        The first touch of memory costs more than all later work with it. Called from the thread that saves: slabs are
        pinned in the context of its CUDA device.
        """
        if not self.is_ours():
            return self._in_child().prepare(nbytes)
        self.device = current_device()
        with self.lock:
            self._can_prepare = True
        self._prepare_slabs(-(-nbytes // self.slab_size))

    def prepare_for(self, nbytes: Sequence[int]) -> None:
        """As `prepare`, for captures of so many bytes each, which take a slab each. Called from any thread."""
        self._prepare_slabs(self._many(nbytes))

    def _prepare_slabs(self, count: int) -> None:
        with self.lock:
            wanted = min(self.slots, count)
            if self._preparing:
                self._wanted = max(self._wanted, wanted)
            elif not self.closed and self._can_prepare:
                self._start_preparers(wanted)

    def _start_preparers(self, wanted: int) -> None:
        """Have memory prepared until so many slabs are in flight or free. Needs the lock.

        Where no thread can be started (`ulimit -u`), nothing is prepared: who needs memory touches it then.
        """
        lacking = self._lacking(wanted)
        if lacking <= 0:
            return
        self._preparers, self._wanted = [], wanted
        for _ in range(min(lacking, _preparers())):
            thread = threading.Thread(target=self._prepare, name="tierstate-arena", daemon=True)
            # Under the lock, so that `close` never misses a thread that it must wait for.
            self._preparers.append(thread)
            try:
                self._preparing.add(thread)
                start_thread(thread)
            except RuntimeError:
                self._preparing.discard(thread)
                self._preparers.pop()
                self._can_prepare = bool(self._preparers)
                break  # those that are there do all of it
            except BaseException:  # an interrupt: nobody may wait for a thread that perhaps never starts
                self._preparing.discard(thread)
                raise

    def _lacking(self, wanted: int) -> int:
        """How many slabs are to be prepared, so that so many are touched; in all there are no more than the budget."""
        touched = self.in_flight - self.little + len(self._free)
        return min(wanted - touched, self.slots - self.in_flight - len(self._free))

    def _prepare(self) -> None:
        try:
            with running_on(self.node):  # where memory is near that is zeroed here
                while self._add_prepared():
                    pass
        except Exception as error:
            self._can_prepare = False
            log.warning("memory could not be prepared, so that captures touch it themselves: %r", error)
        finally:
            with self.lock:
                self._preparing.discard(threading.current_thread())
                self.changed.notify_all()

    def _add_prepared(self) -> bool:
        """Add one free slab, unless there are enough. Returns whether it was added."""
        with self.lock:
            if self.closed or self._lacking(self._wanted) <= 0:
                return False
            slab = self._untouched()
        try:
            slab.prepare()
        except BaseException:
            slab.discard()
            raise
        with self.lock:
            useful = not self.closed and self._lacking(self._wanted) > 0
            surplus = [] if useful else [slab]
            if useful:
                self._free.append(slab)
                surplus = self._surplus()  # an untouched slab may have been given back meanwhile
                self.changed.notify_all()
        for slab in surplus:
            slab.discard()
        return useful

    def keep(self, buffer: Buffer) -> int:
        """Take the slab that holds this buffer out of the budget, for a tier that will hold it for long.

        Returns:
            Bytes that this keeps in addition: 0 if the slab is kept already or is not of this arena.
        """
        if not self.is_ours():
            return self._in_child().keep(buffer)
        with self.lock:
            slab = self._out.get(_address(buffer))
            if slab is None or slab.kept:
                return 0
            slab.kept = True
            self.kept += 1
            self._leave(slab)
            self.changed.notify_all()
            return self.slab_size

    def _release(self, slab: Slab) -> None:
        with self.lock:
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
                self._leave(slab)
            (self._free if slab.ready else self._raw).append(slab)
            surplus = self._surplus()
            self.changed.notify_all()
        for slab in surplus:
            slab.discard()

    def _surplus(self) -> list[Slab]:
        """Take out the free slabs that are too many, untouched ones first. Needs the lock."""
        room = 0 if self.closed else max(0, self._free_at_most() - self.in_flight)
        surplus, self._free = self._free[room:], self._free[:room]
        room -= len(self._free)
        surplus += self._raw[room:]
        del self._raw[room:]
        return surplus

    def _leave(self, slab: Slab) -> None:
        """A slab is in flight no more. Needs the lock."""
        self.in_flight -= 1
        self.little -= slab.little

    def _free_at_most(self) -> int:
        """The slabs that are in flight or free at most.

        A memory tier drops an old version for each new one: the new one gets the old one's memory, as touching new
        memory costs more than the copy. So beyond the budget as much is free as is kept at most, and no more in all
        than there was at some time.
        """
        return max(self.slots, min(self.kept, self.peak - self.kept))

    def _forget(self, slab: Slab) -> None:
        with self.lock:
            if self._out.pop(_address(slab.buffer), None) is None:
                return
            if slab.kept:
                self.kept -= 1
            else:
                self._leave(slab)
            slab.offset = None  # so that the memory is not given back to the system
            self.changed.notify_all()

    def close(self) -> None:
        """Return all free memory to the system; a slab that is in use follows when its last lease ends.

        A thread that waits for a slab gets an error, and the background threads end. In a forked child this leaves
        alone what the child has inherited: memory and threads belong to its parent.
        """
        if not self.is_ours():
            if (own := self._children.get(os.getpid())) is not None:
                own.close()
            return
        with self.lock:
            self.closed = True  # from here on no slab is added to the free ones
            preparers = self._preparers
            self.changed.notify_all()
        for preparer in preparers:
            if preparer.ident is not None:  # it has none if `prepare` was interrupted
                preparer.join()
        try:
            while (slab := self._unused()) is not None:
                slab.discard()
        finally:
            if self.shared is not None:
                self.shared.close()

    def _unused(self) -> Slab | None:
        with self.lock:
            return self._free.pop() if self._free else self._raw.pop() if self._raw else None

    def wake(self) -> None:
        """Wake waiting callers, so that they call their ``stop`` again."""
        with self.lock:
            self.changed.notify_all()


def _preparers() -> int:
    return max(1, min(MOST_PREPARERS, usable_cores() // 4))


def _address(buffer: Buffer) -> int:
    return buffer.untyped_storage().data_ptr()
