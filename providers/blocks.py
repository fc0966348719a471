"""Blocks: host memory for the tensors of a state that is built anew, in few large mappings instead of one each."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from tierstate.manifest.chunk import Buffer, empty_buffer

FIRST, BLOCK = 1 << 20, 128 << 20
"""Bytes of the first mapping and of the longest: a small state must not reserve what it does not need. A mapping is
unmapped when the last tensor in it is gone, so that a part of a state can be dropped."""

ALONE = 16 << 20
"""Tensors from this length on have a mapping of their own."""

HUGE = 2 << 20
PAGE = 4096
LINE = 64

BIG = 1 << 20
"""Tensors from this length on start at a page, so that files can be read straight into them."""


class Blocks:
    """Hands out memory, side by side in huge pages, each piece a storage of its own.

    Nothing is touched here: a page gets its memory when it is first written to. First touch is the larger part of what
    allocating costs, and is left to whoever fills the memory.

    Args:
        limit: bytes that may be handed out; by default, as many as this host has.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit
        self._taken = 0
        self._block: mmap.mmap | None = None
        self._at = self._end = 0

    def take(self, nbytes: int) -> Buffer:
        """Memory of so many bytes, zeroed.

        Raises:
            MemoryError: more is asked for, all in all, than the host has.
        """
        self._taken += nbytes
        if self._taken > self._limit:
            raise MemoryError(
                f"tensors to be built anew have {self._taken} bytes and more, this host has {self._limit}; "
                "load a part of them (only=...), or restore into a state that is there"
            )
        if not nbytes:
            return empty_buffer(0)
        size = min(BLOCK, max(FIRST, self._taken))
        if nbytes >= min(ALONE, size // 2):
            block, first, _ = _map(nbytes)
            return torch.frombuffer(block, dtype=torch.uint8, count=nbytes, offset=first)
        grain = PAGE if nbytes >= BIG else LINE
        at = -(-self._at // grain) * grain
        if self._block is None or at + nbytes > self._end:
            self._block, at, self._end = _map(size)
        self._at = at + nbytes
        return torch.frombuffer(self._block, dtype=torch.uint8, count=nbytes, offset=at)


def _map(nbytes: int) -> tuple[mmap.mmap, int, int]:
    """A private mapping, and where in it a huge page begins and so many bytes end."""
    align = HUGE if nbytes >= HUGE else PAGE
    block = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages: it works all the same
            block.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(block, dtype=torch.uint8, count=1).data_ptr() % align
    return block, first, first + nbytes
