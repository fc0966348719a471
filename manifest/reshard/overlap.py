"""Reshard, step 1: which stored shards and chunks overlap the boxes that a restore wants.

A state may be restored with another parallelism than it was saved with. So each wanted box of a leaf is intersected
with the stored shards of the leaf, and the chunks with the common elements are listed: these are the chunks to read.
`tierstate.engine.restore` reads them and scatters their elements. Pure functions over NumPy columns, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array, expand_runs, starts_of
from tierstate.manifest.boxes import Box, Boxes
from tierstate.manifest.format.version import Version

PAIRS_AT_ONCE = 1 << 18
"""Pairs of boxes, or chunks, that are computed in one batch; this limits the memory for intermediate columns."""

_NONE = np.zeros(0, "i8")


class WantedBox(NamedTuple):
    """A wanted part of a leaf: the leaf's index and a box inside its shape."""

    leaf: int
    box: Box


@dataclass(frozen=True, eq=False, slots=True)
class Overlaps:
    """Pairs of a stored shard and a wanted box that have elements in common, and the chunks that hold these.

    Attributes:
        shard, want: ``(pairs,)``: indices of the shard and of the wanted box.
        same: ``(pairs,)`` of bool: both are the same box.
        straight: ``(pairs,)`` of bool: the common elements are contiguous bytes in both.
        source, target: ``(pairs,)`` of int64: offset in bytes of the first common element in the shard, and in the
            wanted box.
        nbytes: ``(pairs,)`` of int64: bytes of the common elements.
        row, pair: ``(overlaps,)``: index of a chunk, ascending, and of the pair that needs it.
    """

    shard: Array
    want: Array
    same: Array
    straight: Array
    source: Array
    target: Array
    nbytes: Array
    row: Array
    pair: Array

    @property
    def rows(self) -> Array:
        """Indices of the wanted chunks, each once, ascending."""
        first = np.ones(len(self.row), bool)
        first[1:] = self.row[1:] != self.row[:-1]  # np.unique would sort or hash what is sorted already
        found: Array = self.row[first]
        return found


def find_overlaps(version: Version, wants: Sequence[WantedBox]) -> Overlaps:
    """The overlaps of the wanted boxes with the shards of a version.

    Args:
        wants: boxes inside their leaves' shapes; they may overlap each other.
    """
    leaf = np.fromiter((want.leaf for want in wants), "i8", len(wants))
    of_leaf = np.zeros(len(version.leaves), bool)
    of_leaf[leaf] = True
    shards = np.flatnonzero(of_leaf[version.shard_leaf]) if len(version.leaves) else leaf
    ndim = np.fromiter((len(x.spec.shape) for x in version.leaves), "i8", len(version.leaves))
    batches = [
        batch
        for n in np.unique(ndim[leaf]).tolist()
        for batch in _of_equal_ndim(
            version, shards[ndim[version.shard_leaf[shards]] == n], wants, np.flatnonzero(ndim[leaf] == n)
        )
    ]
    pairs = [np.concatenate([_NONE, *columns]) for columns in zip(*(b.columns for b in batches), strict=True)]
    shard, want, same, straight, source, target, nbytes = pairs or [_NONE] * 7
    sizes = np.cumsum([0, *(len(b.columns[0]) for b in batches)])
    row = np.concatenate([_NONE, *(b.row for b in batches)])
    pair = np.concatenate([_NONE, *(b.pair + at for b, at in zip(batches, sizes.tolist(), strict=False))])
    order = np.argsort(row, kind="stable")
    return Overlaps(shard, want, same > 0, straight > 0, source, target, nbytes, row[order], pair[order])


class _Batch(NamedTuple):
    """Some overlaps of boxes with the same number of axes: the columns of the pairs, then chunks and their pairs."""

    columns: tuple[Array, ...]
    row: Array
    pair: Array


def _of_equal_ndim(version: Version, shards: Array, wants: Sequence[WantedBox], chosen: Array) -> Iterator[_Batch]:
    """The overlaps of these shards with the chosen wanted boxes; all their leaves have the same number of axes."""
    stored, wanted = version.boxes[shards], Boxes.of(wants[w].box for w in chosen.tolist())
    leaf = np.fromiter((wants[w].leaf for w in chosen.tolist()), "i8", len(chosen))
    first, end = (np.searchsorted(version.shard_leaf[shards], leaf, side) for side in ("left", "right"))
    counts = end - first
    for part in _portions(counts):
        w, s = np.repeat(part, counts[part]), expand_runs(first[part], counts[part])
        common = stored[s].intersect(wanted[w])
        hit = common.solid
        s, w = s[hit], w[hit]
        yield _pairs(version, shards[s], chosen[w], stored[s], wanted[w], common[hit])


def _portions(counts: Array) -> Iterator[Array]:
    """Consecutive indices in batches whose counts sum up to `PAIRS_AT_ONCE`."""
    number = (np.cumsum(counts) - 1) // PAIRS_AT_ONCE
    yield from np.split(np.arange(len(counts)), np.flatnonzero(np.diff(number)) + 1)


def _pairs(version: Version, shard: Array, want: Array, stored: Boxes, wanted: Boxes, common: Boxes) -> _Batch:
    """The columns of pairs with common elements, and the chunks that hold these."""
    size = _itemsizes(version)[version.shard_leaf[shard]]
    (first, end), (first_wanted, end_wanted) = _flat_range(common, stored), _flat_range(common, wanted)
    volume = _table(common, common.shape).prod(axis=1)
    contiguous = end - first == volume
    straight = contiguous & (end_wanted - first_wanted == volume)
    columns = (shard, want, stored.equal(wanted), straight, first * size, first_wanted * size, volume * size)
    row, pair = _chunks(version, shard, first * size, end * size)
    doubtful = np.flatnonzero(~contiguous[pair])
    if len(doubtful):
        keep = np.ones(len(row), bool)
        for at in range(0, len(doubtful), PAIRS_AT_ONCE):
            some = doubtful[at : at + PAIRS_AT_ONCE]
            keep[some] = _holds(version, row[some], size[pair[some]], stored[pair[some]], common[pair[some]])
        row, pair = row[keep], pair[keep]
    return _Batch(columns, row, pair)


def _table(boxes: Boxes, column: Array) -> Array:
    """``(boxes, axes)``: a column of boxes with the same number of axes, as a matrix."""
    return column.reshape(len(boxes), boxes.axes or 0)


def _strides(boxes: Boxes) -> Array:
    """``(boxes, axes)``: elements from one index to the next of each axis, in row-major order."""
    shape = _table(boxes, boxes.shape)
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _flat_range(inner: Boxes, outer: Boxes) -> tuple[Array, Array]:
    """For each inner box the row-major indices in its outer box of its first element, and after its last element."""
    strides, offset = _strides(outer), _table(inner, inner.offset - outer.offset)
    last = offset + _table(inner, inner.shape) - 1
    return (offset * strides).sum(axis=1), (last * strides).sum(axis=1) + 1


def _itemsizes(version: Version) -> Array:
    return np.fromiter((leaf.spec.itemsize for leaf in version.leaves), "i8", len(version.leaves))


def _chunks(version: Version, shard: Array, start: Array, stop: Array) -> tuple[Array, Array]:
    """The chunks that hold the bytes ``start:stop`` of these shards, and the index of the pair of each."""
    chunk, first = version.head.chunk, starts_of(version.chunk_end).astype("i8")[shard]
    some = stop > start  # a dtype may have an itemsize of 0
    begin = first + start // chunk
    count = np.where(some, first + (stop - 1) // chunk + 1 - begin, 0)
    pair = np.repeat(np.arange(len(shard)), count)
    return np.arange(len(pair)) + (begin - (np.cumsum(count) - count))[pair], pair


def _holds(version: Version, row: Array, size: Array, stored: Boxes, common: Boxes) -> Array:
    """``(chunks,)`` of bool: whether each chunk holds an element of a box in its shard.

    It does if the first element of the box at or after the chunk's first element lies before the chunk's end.
    """
    start = version.chunk_start[row]
    first, end = start // size, -(-(start + version.chunk_nbytes[row]) // size)
    strides, lowest = _strides(stored), _table(common, common.offset - stored.offset)
    highest = lowest + _table(common, common.shape)
    index = first[:, None] // strides % _table(stored, stored.shape)
    low, high = index < lowest, index >= highest
    # The first axis on which the chunk's first element is outside the box. If it is before the box there, the box's
    # first index is next; if it is after the box, the index of some earlier axis must increase, if any can.
    axis = (low | high).argmax(axis=1)
    each = np.arange(len(row))
    before = np.arange(index.shape[1]) < axis[:, None]
    rises = before & (index + 1 < highest)
    last = np.where(rises.any(axis=1), index.shape[1] - 1 - rises[:, ::-1].argmax(axis=1), -1)
    behind = high[each, axis]
    turn = np.where(behind, last, axis)
    found = np.where(np.arange(index.shape[1]) < turn[:, None], index, lowest)
    up = behind & (last >= 0)
    found[each[up], last[up]] = index[each[up], last[up]] + 1
    inside = ~(low | high).any(axis=1)
    held: Array = inside | ((~behind | up) & ((found * strides).sum(axis=1) < end))
    return held
