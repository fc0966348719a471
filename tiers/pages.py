"""Pages: host memory for slabs, page-aligned, huge where the system gives huge pages, pinned where CUDA is.

Direct I/O runs twice as fast from huge pages as from small ones (docs/benchmarks.md): the kernel pins and translates
each page of a transfer.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from functools import lru_cache
from pathlib import Path

import torch

from tierstate.manifest.chunk import Buffer

log = logging.getLogger("tierstate")

PAGE = 4096
HUGE = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14: fault pages in without touching their content."""

_THP = Path("/sys/kernel/mm/transparent_hugepage")


def map_pages(nbytes: int) -> Buffer:
    """Fresh zeroed memory, unmapped when its last view is gone. Nothing is faulted in yet.

    Memory of 2 MiB and more starts at a huge page. It is shared with child processes where the system gives huge pages
    to shared memory, and private otherwise, since huge pages are worth more than sharing; private memory is not
    inherited by a fork, so that a child's copy-on-write never meets a transfer in flight.
    """
    huge = nbytes >= HUGE
    shared = not huge or shares_huge_pages()
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, nbytes + (HUGE if huge else 0), flags=kind | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % (HUGE if huge else PAGE)
    _advise(memory, mmap.MADV_HUGEPAGE if huge else None, None if shared else mmap.MADV_DONTFORK)
    # A view from the mapping itself, so that each slab is a storage of its own.
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


def _advise(memory: mmap.mmap, *advice: int | None) -> None:
    for one in advice:
        if one is not None:
            try:
                memory.madvise(one)
            except OSError as error:
                log.debug("memory advice %d is not taken: %s", one, error)


@lru_cache(maxsize=1)
def shares_huge_pages() -> bool:
    """Whether the system gives huge pages to shared memory that asks for them."""
    try:
        return any(word in (_THP / "shmem_enabled").read_text() for word in ("[always]", "[advise]", "[within_size]"))
    except OSError:
        return False


def fault_in(buffer: Buffer) -> None:
    """Give every page of the buffer its memory now. Other threads run meanwhile."""
    address, nbytes = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel())
    # Called by ctypes and not by mmap, which would hold the interpreter's lock for as long as it takes.
    if libc().madvise(address, nbytes, _POPULATE_WRITE) != 0:
        buffer.fill_(0)


def pin(buffer: Buffer) -> bool:
    """Register the buffer with CUDA, so that copies from devices run beside others; whether it was done."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return False
    code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        log.warning("a slab could not be pinned for CUDA (error %d): copies from devices will be slower", int(code))
    return int(code) == 0


def unpin(buffer: Buffer) -> None:
    """Undo `pin`, before the memory is unmapped."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """The C library; calls by way of it let other threads run."""
    return ctypes.CDLL(None, use_errno=True)
