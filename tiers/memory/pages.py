"""Pages of host memory: mapped in huge pages, private or shared with an agent, and faulted in before they are used."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.libc import libc

log = logging.getLogger("tierstate")


_THP = Path("/sys/kernel/mm/transparent_hugepage")


_FIXED = 0x10
"""MAP_FIXED: map exactly at the given address, in place of the existing mapping."""


_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, Linux 4.14: a forked child has the address range, but zeroed."""


_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14: fault pages in without touching their content."""


PAGE = 4096
"""Bytes of a memory page, and of the blocks of direct I/O."""


HUGE = 2 << 20
"""Bytes of a huge page."""


def map_pages(nbytes: int) -> Buffer:
    """New zeroed private memory, unmapped when its last view is deleted. Nothing is faulted in yet.

    Memory of 2 MiB or more starts at a huge page. In a forked child the range is mapped but empty, so that
    copy-on-write never affects a transfer in flight. The child must have the range: without it (``MADV_DONTFORK``) it
    could map other memory at these addresses, and would unmap that when it deletes the inherited object.
    """
    memory, offset = _map(nbytes)
    _advise(memory, mmap.MADV_HUGEPAGE if nbytes >= HUGE else None, _WIPE_ON_FORK)
    return _view(memory, nbytes, offset)


def _map(nbytes: int) -> tuple[mmap.mmap, int]:
    """Private memory for ``nbytes`` bytes, and the aligned offset at which they start."""
    align = HUGE if nbytes >= HUGE else PAGE
    memory = mmap.mmap(-1, nbytes + align - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % align


def _view(memory: mmap.mmap, nbytes: int, offset: int) -> Buffer:
    # A view from the mapping itself, so that each slab is a storage of its own.
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


def map_shared(descriptor: int, offset: int, nbytes: int) -> Buffer:
    """A part of a file in memory, mapped into this process, and unmapped when its last view is deleted.

    Args:
        descriptor: the file; it may be closed afterwards.
        offset: where the part begins, on a page.
        nbytes: bytes of the part, whole pages.

    Raises:
        OSError: it could not be mapped.
    """
    memory, start = _map(nbytes)
    buffer = _view(memory, nbytes, start)
    # Over pages of a Python mmap, which unmaps them; a Python mmap of the file itself needs one descriptor each.
    flags = mmap.MAP_SHARED | _FIXED
    address, protection = buffer.data_ptr(), mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap()(address, ctypes.c_size_t(nbytes), protection, flags, descriptor, ctypes.c_int64(offset)) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"a slab of {nbytes} bytes could not be mapped: {os.strerror(number)}")
    _advise(memory, mmap.MADV_HUGEPAGE if nbytes >= HUGE else None)
    return buffer


class SharedPages:
    """A file in memory (memfd), mapped slab by slab: a process that receives the descriptor can map it too.

    One descriptor for all slabs, since a process may have few; each slab has its offset in the file. The descriptor is
    closed by `close`, or when this object is deleted; slabs stay mapped until their last view is deleted.

    Args:
        slab_size: bytes of one slab, whole pages.

    Attributes:
        descriptor: the file; -1 once closed.
    """

    def __init__(self, slab_size: int) -> None:
        self._slab_size = slab_size
        align = HUGE if slab_size >= HUGE else mmap.ALLOCATIONGRANULARITY
        self._stride = -(-slab_size // align) * align
        self._lock = threading.Lock()
        self._slots = 0
        self._holes: list[int] = []
        self.descriptor = os.memfd_create("tierstate-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Who maps it must not be killed (SIGBUS) because somebody else made it shorter.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._closing.atexit = False

    def map(self) -> tuple[Buffer, int]:
        """The memory of one more slab, zeroed, and its offset in the file. Nothing is faulted in yet."""
        with self._lock:
            offset = self._holes.pop() if self._holes else self._grow()
        return map_shared(self.descriptor, offset, self._slab_size), offset

    def _grow(self) -> int:
        offset, self._slots = self._slots * self._stride, self._slots + 1
        os.ftruncate(self.descriptor, self._slots * self._stride)
        return offset

    def give_back(self, buffer: Buffer, offset: int) -> None:
        """Return a slab's memory to the system now, although the file stays open; its data is lost."""
        if libc().madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(self._slab_size), mmap.MADV_REMOVE) != 0:
            log.warning("a slab could not be given back: %s", os.strerror(ctypes.get_errno()))
            return
        with self._lock:
            self._holes.append(offset)

    def close(self) -> None:
        """Close the descriptor. Mapped slabs stay mapped."""
        self._closing()
        self.descriptor = -1


def _advise(memory: mmap.mmap, *advice: int | None) -> None:
    for one in advice:
        if one is not None:
            try:
                memory.madvise(one)
            except OSError as error:
                log.debug("memory advice %d is not taken: %s", one, error)


def is_shared(slab_size: int) -> bool:
    """Whether slabs of this size use shared memory: not if they would lose huge pages, which matter more."""
    return slab_size < HUGE or shares_huge_pages()


@lru_cache(maxsize=1)
def shares_huge_pages() -> bool:
    """Whether the system gives huge pages to shared memory that asks for them."""
    try:
        return any(word in (_THP / "shmem_enabled").read_text() for word in ("[always]", "[advise]", "[within_size]"))
    except OSError:
        return False


def fault_in(buffer: Buffer) -> None:
    """Prefault the buffer: every page gets its memory now. Other threads run meanwhile."""
    if not populate(buffer.data_ptr(), buffer.numel()):
        buffer.fill_(0)


def populate(address: int, nbytes: int) -> bool:
    """Prefault pages and keep their content. Returns whether the kernel supports that. ``address`` is page-aligned."""
    end = address + nbytes
    while address < end:
        # One huge page at a time: no thread can start, or map memory, while the kernel is in this call, and a new page
        # of a virtual machine may take a millisecond.
        step = min(end, (address // HUGE + 1) * HUGE) - address
        # Called by ctypes and not by mmap, which would hold the GIL during the call.
        if libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(step), _POPULATE_WRITE) != 0:
            return False
        address += step
    return True


@lru_cache(maxsize=1)
def _mmap() -> Callable[..., int | None]:
    call = libc().mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return call
