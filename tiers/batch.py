"""A batch: some captured chunks that lie in one slab."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierstate.manifest.digest import DIGEST_SIZE
from tierstate.manifest.index import Array

from .arena import Slab
from .packing import BIG, BLOCK


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


def names(digests: Array) -> list[bytes]:
    """Each of ``(n, 2)`` digests as bytes."""
    data = digests.tobytes()
    return [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]


def breaks(batch: Batch, which: Array) -> Array:
    """Where a run of chunks ends that can be written in one piece: the next one lies apart; or is the first big one,
    and the run so far does not begin at a block."""
    big = batch.nbytes[which] >= BIG
    gap = batch.at[which[1:]] - (batch.at[which[:-1]] + batch.nbytes[which[:-1]])
    apart = (np.diff(which) != 1) | (gap >= BLOCK)
    first = np.maximum.accumulate(np.where(np.append(True, apart), np.arange(len(which)), 0))[: len(apart)]
    shifted = (np.diff(big.astype("i8")) > 0) & (batch.at[which[first]] % BLOCK != 0)
    found: Array = np.flatnonzero(apart | shifted) + 1
    return found
