"""A batch: some captured chunks that lie in one slab."""

from __future__ import annotations

from typing import NamedTuple

from tierstate.manifest.index import Array

from .arena import Slab


class Batch(NamedTuple):
    """A slab's chunks, in the order in which they lie there; what lies between and behind them, to the block's end, is
    zeros.

    Attributes:
        slab: where they lie.
        rows: ``(n,)`` of int64: the row of each in the version's chunk table.
        at: ``(n,)`` of int64: where each starts in the slab.
        nbytes: ``(n,)`` of int64: bytes of each.
        digests: ``(n, 2)`` of uint64.
    """

    slab: Slab
    rows: Array
    at: Array
    nbytes: Array
    digests: Array
