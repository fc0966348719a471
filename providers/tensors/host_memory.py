"""An allocator of host memory for the new tensors of a load: a few large mappings instead of one per tensor.

Memory is mapped with huge pages if the kernel supports them, and first touched by the thread that fills it.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer

FIRST_MAPPING, MAX_MAPPING = 1 << 20, 128 << 20
"""Bytes of the first mapping and of the largest one: a small state must not reserve more than it needs. A mapping is
unmapped when its last tensor is freed, so that parts of a state can be freed."""


OWN_MAPPING = 16 << 20
"""Tensors of at least this many bytes get a mapping of their own."""


HUGE_PAGE_BYTES = 2 << 20


PAGE_BYTES = 4096


CACHE_LINE = 64


PAGE_ALIGNED_FROM = 1 << 20
"""Tensors of at least this many bytes start at a page boundary, so that direct I/O can read into them."""


class HostAllocator:
    """A bump allocator over large private mappings; each allocation is a storage of its own.

    No page is touched here: the kernel allocates a page at the first write. These page faults are most of the cost of
    an allocation, and so they are spread over the threads that fill the memory.

    Args:
        limit: most bytes that may be allocated in all; by default the memory of this host.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit
        self._taken = 0
        self._block: mmap.mmap | None = None
        self._at = self._end = 0

    def take(self, nbytes: int) -> Buffer:
        """A zeroed buffer of ``nbytes`` bytes.

        Raises:
            MemoryError: all allocations together exceed the limit.
        """
        self._taken += nbytes
        if self._taken > self._limit:
            raise MemoryError(
                f"tensors to be built anew have {self._taken} bytes and more, this host has {self._limit}; "
                "load a part of them (only=...), or restore into a state that is there"
            )
        if not nbytes:
            return empty_buffer(0)
        size = min(MAX_MAPPING, max(FIRST_MAPPING, self._taken))
        if nbytes >= min(OWN_MAPPING, size // 2):
            block, first, _ = _map(nbytes)
            return torch.frombuffer(block, dtype=torch.uint8, count=nbytes, offset=first)
        grain = PAGE_BYTES if nbytes >= PAGE_ALIGNED_FROM else CACHE_LINE
        at = -(-self._at // grain) * grain
        if self._block is None or at + nbytes > self._end:
            self._block, at, self._end = _map(size)
        self._at = at + nbytes
        return torch.frombuffer(self._block, dtype=torch.uint8, count=nbytes, offset=at)


def _map(nbytes: int) -> tuple[mmap.mmap, int, int]:
    """A private mapping, the offset of its first huge page, and the offset where ``nbytes`` bytes from there end."""
    align = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES
    block = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages works too
            block.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(block, dtype=torch.uint8, count=1).data_ptr() % align
    return block, first, first + nbytes
