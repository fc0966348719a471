"""Statistics of leaves: count of NaN and infinities, range and norm of each leaf of a version, and how much it changed.

They are sums over the chunks of a leaf (`tierstate.manifest.format.statistics`), over all of its shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.format.globs import matches_any
from tierstate.manifest.format.version import Version

from .diff import aligned


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """What is known of the elements of a leaf, over all of its shards.

    Attributes:
        count: elements.
        nan, infinite: how many of them are NaN, and how many are infinite.
        min, max: the smallest and the largest finite element; None if there is none, or elements have no order.
        norm: square root of the sum of the squares of the finite elements; None for integers.
    """

    count: int
    nan: int = 0
    infinite: int = 0
    min: float | None = None
    max: float | None = None
    norm: float | None = None

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not self.nan and not self.infinite

    @property
    def rms(self) -> float | None:
        """Root of the mean square of the finite elements."""
        some = self.count - self.nan - self.infinite
        return None if self.norm is None or some <= 0 else self.norm / some**0.5


class LeafColumns(NamedTuple):
    """Statistics of leaves as columns: ``(leaves,)`` each, as in `ChunkStatistics`; ``elements``: how many."""

    elements: Array
    nan: Array
    infinite: Array
    low: Array
    high: Array
    squares: Array


def leaf_nbytes(version: Version) -> Array:
    """``(leaves,)``: bytes of each leaf's chunks; 0 for leaves without any."""
    found: Array = np.bincount(version.chunk_leaf, version.chunk_nbytes, len(version.leaves)).astype("i8")
    return found


def leaf_columns(version: Version) -> LeafColumns | None:
    """The statistics of each leaf of a version; None if the version has none."""
    chunks = version.statistics
    if chunks is None:
        return None
    leaves, of = len(version.leaves), version.chunk_leaf.astype("i8")
    low, high = np.full(leaves, np.nan), np.full(leaves, np.nan)
    np.fmin.at(low, of, chunks.low)
    np.fmax.at(high, of, chunks.high)
    itemsize = np.maximum(version.catalog.itemsize, 1)
    return LeafColumns(
        leaf_nbytes(version) // itemsize,
        np.bincount(of, chunks.nan, leaves).astype("i8"),
        np.bincount(of, chunks.infinite, leaves).astype("i8"),
        low,
        high,
        np.bincount(of, chunks.squares, leaves),
    )


def leaf_statistics(version: Version, only: Sequence[str] = ()) -> Mapping[str, LeafStatistics]:
    """The statistics of a version's leaves by their paths, of those whose elements are numbers.

    Args:
        only: globs of paths; by default all leaves.
    """
    columns = leaf_columns(version)
    if columns is None:
        return {}
    known = (columns.low == columns.low) | (columns.nan + columns.infinite > 0)
    known |= (columns.squares == columns.squares) & (columns.elements > 0)
    return {
        version.leaves[i].name: _leaf(columns, i)
        for i in np.flatnonzero(known).tolist()
        if not only or matches_any(only, version.leaves[i].path)
    }


def _leaf(columns: LeafColumns, i: int) -> LeafStatistics:
    low, high, squares = (float(column[i]) for column in (columns.low, columns.high, columns.squares))
    return LeafStatistics(
        int(columns.elements[i]),
        int(columns.nan[i]),
        int(columns.infinite[i]),
        low if low == low else None,
        high if high == high else None,
        squares**0.5 if squares >= 0 else None,
    )


def changed_share(version: Version, before: Version) -> Array | None:
    """``(leaves,)``: which share of each leaf's bytes is in chunks that are not as in the version before; None if the
    two do not have the same leaves and shards, or other chunks or digests. NaN for leaves without bytes."""
    if not aligned(before, version):
        return None
    leaves, of = len(version.leaves), version.chunk_leaf.astype("i8")
    changed = np.any(version.digests != before.digests, axis=1)
    with np.errstate(invalid="ignore"):
        found: Array = np.bincount(of, version.chunk_nbytes * changed, leaves) / leaf_nbytes(version)
    return found
