"""The landing: where restored chunks go, straight into host memory wherever it can be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from tierstate.manifest.chunk import Buffer, Event
from tierstate.manifest.columns import Array
from tierstate.manifest.version import Version

from .pages import PAGE, populate

SHORT = 64 << 10
"""Bytes that are copied in less time than another thread takes to get the interpreter's lock and give it back."""

Load = Callable[[int, int, Buffer], "Event | None"]
"""Takes a leaf's index, an offset in it, and verified bytes; an event if they are needed until it has come."""


class Landing:
    """The destinations of a version's chunks.

    Args:
        version: whose chunks; each leaf is one shard.
        memories: index of a leaf -> its bytes in host memory; None where they have to be loaded.
        load: takes the chunks of leaves without memory.
        untouched: the memory is fresh, and its pages are better faulted in before they are read into.
    """

    def __init__(
        self, version: Version, memories: Mapping[int, Buffer | None], load: Load, *, untouched: bool = False
    ) -> None:
        self._leaf, self._start, self._nbytes = version.chunk_leaf, version.chunk_start, version.chunk_nbytes
        self._load, self._untouched = load, untouched
        self._memories = {
            leaf: memory
            for leaf, memory in memories.items()
            if memory is not None and memory.numel() == version.leaves[leaf].spec.nbytes
        }
        base = np.zeros(len(version.leaves), "i8")
        for leaf, memory in self._memories.items():
            base[leaf] = memory.data_ptr()
        first = base[self._leaf]
        self.address: Array = np.where(first > 0, first + self._start, 0)
        """``(chunks,)`` of int64: address of each chunk's destination; 0 where there is no memory for it."""

    def memory(self, row: int) -> Buffer:
        """The destination of a chunk that has an address, to be read into."""
        start = int(self._start[row])
        return self._memories[int(self._leaf[row])][start : start + int(self._nbytes[row])]

    def touch(self, row: int) -> None:
        """Have the memory of a chunk's destination faulted in, where it is fresh."""
        if self._untouched:
            address, nbytes = int(self.address[row]), int(self._nbytes[row])
            start = address // PAGE * PAGE
            # Where that cannot be done, reading into the pages does it, one by one.
            populate(start, address + nbytes - start)

    def give(self, row: int, raw: Buffer) -> Event | None:
        """Bring a chunk's verified bytes to their destination.

        Returns:
            What to wait for before ``raw`` may be used otherwise.
        """
        address, nbytes = int(self.address[row]), int(self._nbytes[row])
        if not address:
            return self._load(int(self._leaf[row]), int(self._start[row]), raw)
        if raw.numel() != nbytes:
            raise RuntimeError(f"chunk {row} has {nbytes} bytes, and {raw.numel()} were verified")
        copy(address, raw.data_ptr(), nbytes)
        return None


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses, at a tenth of what slicing and copying tensors costs."""
    # Other threads run meanwhile, unless it is over sooner than they would have begun.
    call = _move_shortly() if nbytes < SHORT else ctypes.memmove
    call(target, source, nbytes)


@lru_cache(maxsize=1)
def _move_shortly() -> Any:
    call = ctypes.PyDLL(None).memmove
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    return call
