"""Slab layout: which chunks share a memory slab, and at which offset each one is. Pure functions on columns.

Leaves are sorted so that they follow each other without gaps and stay aligned, in slabs as in packs; so runs of chunks
can be written from a slab to a pack in one piece, with direct I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.tiers.memory.arena import LeasedSlab

BLOCK = 4096
"""Bytes to which direct I/O is aligned."""


BIG = 1 << 20
"""Chunks of this many bytes or more start at a block, in slabs and in packs."""


GRAIN = 16
"""Smaller chunks start at multiples of this, so that every element type can be viewed in place."""


MAX_ITEMSIZE = 8
"""Bytes of the longest element type in files of other formats. Leaves whose lengths are multiples of it keep each
other aligned."""


class SlabPlan(NamedTuple):
    """The chunks of one slab, in order of their offsets.

    Attributes:
        source: ``(n,)``: number of the source of each chunk.
        start: ``(n,)``: offset of its first byte in the source.
        nbytes: ``(n,)``: its length in bytes.
        taken: ``(n,)``: bytes that it takes in the slab, with padding.
    """

    source: Array
    start: Array
    nbytes: Array
    taken: Array

    @property
    def at(self) -> Array:
        """``(n,)``: offset of each chunk in the slab."""
        found: Array = np.cumsum(self.taken) - self.taken
        return found

    @property
    def end(self) -> int:
        """Bytes that the chunks take in the slab, with padding."""
        return int(self.taken.sum())

    def without(self, gone: Array) -> SlabPlan:
        """The plan without the chunks ``gone``, ``(n,)`` of bool; the remaining ones move together."""
        return SlabPlan(*(column[~gone] for column in self))


def alignment_classes(nbytes: Array) -> Array:
    """Sort key of leaves of these lengths: first small ones that leave no gap, then big ones of whole blocks, big ones
    that keep elements aligned, and last the rest, in which longer elements come first.

    In this order, leaves can follow each other in a file without a gap, every element is aligned, and nearly all bytes
    have the same offset within a block in the file as in the slab.
    """
    big = nbytes >= BIG
    found: Array = np.select(
        [~big & (nbytes % GRAIN == 0), big & (nbytes % BLOCK == 0), big & (nbytes % MAX_ITEMSIZE == 0)], [0, 1, 2], 3
    )
    return found


def capture_order(nbytes: Array, itemsize: Callable[[int], int]) -> Array:
    """The order in which leaves are captured and stored in packs; see `alignment_classes`.

    Args:
        nbytes: ``(n,)``: their lengths in bytes.
        itemsize: returns the bytes per element of a leaf, by index.
    """
    rank = alignment_classes(nbytes)
    width = np.zeros(len(rank), "i8")
    rest = np.flatnonzero(rank == 3)
    width[rest] = [itemsize(i) for i in rest.tolist()]
    order: Array = np.lexsort((-width, rank))
    return order


def fill_slabs(sources: Array, nbytes: Array, chunk: int, slab: int) -> Iterator[SlabPlan]:
    """Distribute sources over slabs, in their order. Sources with big chunks start at blocks, and none of them comes
    after a small one in the same slab.

    Args:
        sources: ``(n,)``: their numbers.
        nbytes: ``(n,)``: their lengths in bytes.
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
        yield SlabPlan(sources[owner[part]], start[part], length[part], taken[part])
        first = stop


class SlabChunks(NamedTuple):
    """A slab's chunks, in order of their offsets. The bytes between them, and after the last one to the end of its
    block, are zeros.

    Attributes:
        slab: the slab.
        rows: ``(n,)`` of int64: the row of each in the version's chunk table.
        at: ``(n,)`` of int64: offset of each in the slab.
        nbytes: ``(n,)`` of int64: bytes of each.
        digests: ``(n, 2)`` of uint64.
    """

    slab: LeasedSlab
    rows: Array
    at: Array
    nbytes: Array
    digests: Array


def run_ends(batch: SlabChunks, which: Array) -> Array:
    """Where each run of chunks ends that can be written in one piece: before a gap; or before the first big chunk, if
    the run does not begin at a block."""
    big = batch.nbytes[which] >= BIG
    gap = batch.at[which[1:]] - (batch.at[which[:-1]] + batch.nbytes[which[:-1]])
    apart = (np.diff(which) != 1) | (gap >= BLOCK)
    first = np.maximum.accumulate(np.where(np.append(True, apart), np.arange(len(which)), 0))[: len(apart)]
    shifted = (np.diff(big.astype("i8")) > 0) & (batch.at[which[first]] % BLOCK != 0)
    found: Array = np.flatnonzero(apart | shifted) + 1
    return found
