"""Packing: which chunks share a slab, and where in it each one lies. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tierstate.manifest.index import Array

BLOCK = 4096
"""What direct I/O is aligned to."""

BIG = 1 << 20
"""Bytes from which on a chunk starts at a block, in slabs and in packs."""

GRAIN = 16
"""Smaller chunks start at multiples of this, so that every element type can be viewed in place."""


class Slabful(NamedTuple):
    """What goes into one slab, in order of place.

    Attributes:
        source: ``(n,)``: the source of each chunk.
        start: ``(n,)``: its first byte in the source.
        nbytes: ``(n,)``: its length.
        at: ``(n,)``: where it starts in the slab.
    """

    source: Array
    start: Array
    nbytes: Array
    at: Array

    def without(self, gone: Array) -> Slabful:
        """Those that are left when some, ``(n,)`` of bool, are gone, moved together."""
        source, start, nbytes = self.source[~gone], self.start[~gone], self.nbytes[~gone]
        lengths = rounded(nbytes)
        return Slabful(source, start, nbytes, np.cumsum(lengths) - lengths)


def rounded(nbytes: Array) -> Array:
    """What chunks of these lengths take of a slab."""
    grain = np.where(nbytes >= BIG, BLOCK, GRAIN)
    found: Array = -(-nbytes // grain) * grain
    return found


def pack(sources: Array, nbytes: Array, chunk: int, slab: int) -> Iterator[Slabful]:
    """Distribute sources over slabs, in their order, small chunks first and apart from big ones.

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
    for which in (np.flatnonzero(length < BIG), np.flatnonzero(length >= BIG)):
        taken = rounded(length[which])
        ends = np.cumsum(taken)
        first, base = 0, 0
        while first < len(which):
            stop = int(np.searchsorted(ends, base + slab, "right"))
            rows = which[first:stop]
            at = ends[first:stop] - taken[first:stop] - base
            yield Slabful(sources[owner[rows]], start[rows], length[rows], at)
            first, base = stop, int(ends[stop - 1])
