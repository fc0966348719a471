"""Pages: host memory for slabs, page-aligned, huge where the system gives huge pages, pinned where CUDA is.

Direct I/O runs twice as fast from huge pages as from small ones (docs/benchmarks.md): the kernel pins and translates
each page of a transfer.
"""

from __future__ import annotations

import ctypes
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

log = logging.getLogger("tierstate")

PAGE = 4096
HUGE = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14: fault pages in without touching their content."""

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, Linux 4.14: a child has the range, but none of its pages."""

_FIXED = 0x10
"""MAP_FIXED: map there and nowhere else, instead of what is mapped there."""

_THP = Path("/sys/kernel/mm/transparent_hugepage")


def map_pages(nbytes: int) -> Buffer:
    """Fresh zeroed memory of this process, unmapped when its last view is gone. Nothing is faulted in yet.

    Memory of 2 MiB and more starts at a huge page. A forked child has the range, but empty, so that its copy-on-write
    never meets a transfer in flight. It must have the range: had it none (``MADV_DONTFORK``), it would put memory of
    its own there, and unmap that when it lets go of the object it inherited.
    """
    memory, offset = _map(nbytes)
    _advise(memory, mmap.MADV_HUGEPAGE if nbytes >= HUGE else None, _WIPE_ON_FORK)
    return _view(memory, nbytes, offset)


def _map(nbytes: int) -> tuple[mmap.mmap, int]:
    """Private memory with room for so many bytes from an aligned offset on."""
    align = HUGE if nbytes >= HUGE else PAGE
    memory = mmap.mmap(-1, nbytes + align - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % align


def _view(memory: mmap.mmap, nbytes: int, offset: int) -> Buffer:
    # A view from the mapping itself, so that each slab is a storage of its own.
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


class SharedPages:
    """A file in memory (memfd), mapped slab by slab: a process that is handed the descriptor can map it too.

    One descriptor for all slabs, since a process may have few; each slab has its offset in the file. The descriptor is
    closed by `close`, or when nobody holds this object any more; slabs stay mapped until their last view is gone.

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
        self.descriptor = os.memfd_create("tierstate-arena")
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._closing.atexit = False

    def map(self) -> tuple[Buffer, int]:
        """The memory of one more slab, zeroed, and its offset in the file. Nothing is faulted in yet."""
        with self._lock:
            offset = self._holes.pop() if self._holes else self._grow()
        memory, start = _map(self._slab_size)
        buffer = _view(memory, self._slab_size, start)
        # Over the pages that Python has mapped: it unmaps them, and a map of Python's own would take a descriptor each.
        flags = mmap.MAP_SHARED | _FIXED
        address, protection = buffer.data_ptr(), mmap.PROT_READ | mmap.PROT_WRITE
        size, at = ctypes.c_size_t(self._slab_size), ctypes.c_int64(offset)
        if _mmap()(address, size, protection, flags, self.descriptor, at) != address:
            number = ctypes.get_errno()
            raise OSError(number, f"a slab of {self._slab_size} bytes could not be mapped: {os.strerror(number)}")
        _advise(memory, mmap.MADV_HUGEPAGE if self._slab_size >= HUGE else None)
        return buffer, offset

    def _grow(self) -> int:
        offset, self._slots = self._slots * self._stride, self._slots + 1
        os.ftruncate(self.descriptor, self._slots * self._stride)
        return offset

    def give_back(self, buffer: Buffer, offset: int) -> None:
        """Give a slab's memory back to the system now, though others keep the file; nobody needs its bytes."""
        if libc().madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(self._slab_size), mmap.MADV_REMOVE) != 0:
            log.warning("a slab could not be given back: %s", os.strerror(ctypes.get_errno()))
            return
        with self._lock:
            self._holes.append(offset)

    def close(self) -> None:
        """Close the descriptor. What is mapped stays mapped."""
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
    """Whether slabs of so many bytes are shared: unless that costs them their huge pages, which are worth more."""
    return slab_size < HUGE or shares_huge_pages()


@lru_cache(maxsize=1)
def shares_huge_pages() -> bool:
    """Whether the system gives huge pages to shared memory that asks for them."""
    try:
        return any(word in (_THP / "shmem_enabled").read_text() for word in ("[always]", "[advise]", "[within_size]"))
    except OSError:
        return False


def fault_in(buffer: Buffer) -> None:
    """Give every page of the buffer its memory now. Other threads run meanwhile."""
    if not populate(buffer.data_ptr(), buffer.numel()):
        buffer.fill_(0)


def populate(address: int, nbytes: int) -> bool:
    """Give pages their memory now, their content kept; whether the kernel knows how. ``address`` is a page's."""
    # Called by ctypes and not by mmap, which would hold the interpreter's lock for as long as it takes.
    return bool(libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE) == 0)


def pin(buffer: Buffer, device: int | None = None) -> bool | None:
    """Register the buffer with CUDA, so that copies from devices run beside others.

    Args:
        device: in whose context. By default the calling thread's device, which is the first one in every new thread: a
            process that works on another would get a context, and lose its memory, on a device that is not its own.

    Returns:
        Whether it was done; None as long as this process does not use CUDA.
    """
    if not _uses_cuda():
        return None
    with torch.cuda.device(device):
        code = int(
            torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                buffer.data_ptr(), buffer.numel(), 0
            )
        )
    if code != 0:
        log.warning("a slab could not be pinned for CUDA (error %d): copies from devices will be slower", code)
    return code == 0


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_device() -> int | None:
    """The CUDA device that the calling thread works on; None as long as this process does not use CUDA."""
    return torch.cuda.current_device() if _uses_cuda() else None


def unpin(buffer: Buffer, device: int | None = None) -> None:
    """Undo `pin`, before the memory is unmapped."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def _mmap() -> Callable[..., int | None]:
    call = libc().mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return call


@lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """The C library; calls by way of it let other threads run."""
    return ctypes.CDLL(None, use_errno=True)
