"""Packing: which chunks share a slab, and where in it each one lies. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tierstate.manifest.index import Array

BLOCK = 4096
"""What direct I/O is aligned to."""

BIG = 1 << 20
"""Bytes from which on a chunk starts at a block, in slabs and in packs."""

GRAIN = 16
"""Smaller chunks start at multiples of this, so that every element type can be viewed in place."""


EVEN = 8
"""Leaves whose lengths are multiples of this, the longest element that files of other formats know, keep each other
aligned."""


class Slabful(NamedTuple):
    """What goes into one slab, in order of place.

    Attributes:
        source: ``(n,)``: the source of each chunk.
        start: ``(n,)``: its first byte in the source.
        nbytes: ``(n,)``: its length.
        taken: ``(n,)``: what it takes of the slab.
    """

    source: Array
    start: Array
    nbytes: Array
    taken: Array

    @property
    def at(self) -> Array:
        """``(n,)``: where each chunk starts in the slab."""
        found: Array = np.cumsum(self.taken) - self.taken
        return found

    def without(self, gone: Array) -> Slabful:
        """Those that are left when some, ``(n,)`` of bool, are gone, moved together."""
        return Slabful(*(column[~gone] for column in self))


def ranks(nbytes: Array) -> Array:
    """What leaves of these lengths are sorted by: small ones that leave no gap, big ones of whole blocks, big ones that
    keep elements aligned, and the rest, among which those of longer elements come first.

    So sorted, leaves can follow each other in a file without a gap, every element aligned, and nearly all bytes lie at
    the same place of a block in the file as in the slab.
    """
    big = nbytes >= BIG
    found: Array = np.select(
        [~big & (nbytes % GRAIN == 0), big & (nbytes % BLOCK == 0), big & (nbytes % EVEN == 0)], [0, 1, 2], 3
    )
    return found


def in_order(nbytes: Array, itemsize: Callable[[int], int]) -> Array:
    """The order in which leaves are captured, and lie in packs; see `ranks`.

    Args:
        nbytes: ``(n,)``: their lengths.
        itemsize: bytes per element of each.
    """
    rank = ranks(nbytes)
    width = np.zeros(len(rank), "i8")
    rest = np.flatnonzero(rank == 3)
    width[rest] = [itemsize(i) for i in rest.tolist()]
    order: Array = np.lexsort((-width, rank))
    return order


def pack(sources: Array, nbytes: Array, chunk: int, slab: int) -> Iterator[Slabful]:
    """Distribute sources over slabs, in their order. Big ones, if their chunks are, start at blocks; and none of them
    comes behind a small one in one slab.

    Args:
        sources: ``(n,)``: their numbers.
        nbytes: ``(n,)``: their lengths.
        chunk: bytes of a chunk, at most ``slab``.
        slab: bytes of a slab, whole blocks.
    """
    counts = -(-nbytes // chunk)
    owner = np.repeat(np.arange(len(sources)), counts)
    start = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * chunk
    length = np.minimum(chunk, nbytes[owner] - start)
    grain = np.where((nbytes[owner] >= BIG) & (chunk >= BIG), BLOCK, GRAIN)
    taken = -(-length // grain) * grain
    ends = np.cumsum(taken)
    fences = [*(np.flatnonzero(np.diff(grain) > 0) + 1).tolist(), len(owner)]
    first = 0
    while first < len(owner):
        fence = fences[bisect_right(fences, first)]
        stop = min(int(np.searchsorted(ends, ends[first] - taken[first] + slab, "right")), fence)
        part = slice(first, stop)
        yield Slabful(sources[owner[part]], start[part], length[part], taken[part])
        first = stop
