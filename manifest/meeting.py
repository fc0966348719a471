"""Meetings: which stored chunks hold elements of which wanted boxes, in columns and without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .box import Box
from .columns import Array, starts_of
from .corners import Corners
from .version import Version

AT_ONCE = 1 << 18
"""Pairs, or chunks, that are looked at together, so that the memory for it stays small."""


class Want(NamedTuple):
    """A box that is wanted of a leaf."""

    leaf: int
    box: Box


@dataclass(frozen=True, eq=False, slots=True)
class Meetings:
    """Pairs of a stored shard and a wanted box that have elements in common, and the chunks that hold these.

    Attributes:
        shard, want: ``(pairs,)``: numbers of the shard and of the wanted box.
        same: ``(pairs,)`` of bool: both are the same box.
        straight: ``(pairs,)`` of bool: the common elements are one run of bytes in both.
        source, target: ``(pairs,)`` of int64: byte of the first common element in the shard, and in the wanted box.
        nbytes: ``(pairs,)`` of int64: bytes of the common elements.
        row, pair: ``(meetings,)``: a chunk, rising, and the pair for which it is wanted.
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
        """The chunks that are wanted, each once, rising."""
        first = np.ones(len(self.row), bool)
        first[1:] = self.row[1:] != self.row[:-1]  # np.unique would sort or hash what is in order
        found: Array = self.row[first]
        return found


def wanted_rows(version: Version, wants: Mapping[int, Sequence[Box]]) -> Array:
    """The chunks that hold at least one wanted element, rising.

    Args:
        wants: index of a leaf -> boxes of it, each inside the leaf's shape.
    """
    return meet(version, [Want(leaf, box) for leaf, boxes in wants.items() for box in boxes]).rows


def meet(version: Version, wants: Sequence[Want]) -> Meetings:
    """Find what of a version is wanted.

    Args:
        wants: boxes inside their leaves' shapes; they may overlap.
    """
    leaf = np.fromiter((want.leaf for want in wants), "i8", len(wants))
    of_leaf = np.zeros(len(version.leaves), bool)
    of_leaf[leaf] = True
    shards = np.flatnonzero(of_leaf[version.shard_leaf]) if len(version.leaves) else leaf
    ndim = np.fromiter((len(x.spec.shape) for x in version.leaves), "i8", len(version.leaves))
    found = [
        met
        for n in np.unique(ndim[leaf]).tolist()
        for met in _alike(
            version, shards[ndim[version.shard_leaf[shards]] == n], wants, np.flatnonzero(ndim[leaf] == n)
        )
    ]
    pairs = [np.concatenate([_NONE, *columns]) for columns in zip(*(met.columns for met in found), strict=True)]
    shard, want, same, straight, source, target, nbytes = pairs or [_NONE] * 7
    sizes = np.cumsum([0, *(len(met.columns[0]) for met in found)])
    row = np.concatenate([_NONE, *(met.row for met in found)])
    pair = np.concatenate([_NONE, *(met.pair + at for met, at in zip(found, sizes.tolist(), strict=False))])
    order = np.argsort(row, kind="stable")
    return Meetings(shard, want, same > 0, straight > 0, source, target, nbytes, row[order], pair[order])


def stored_boxes(version: Version, shards: Array, ndim: int) -> Corners:
    """The boxes of some shards, all of leaves of so many axes."""
    for _, low, shape in version.boxes[shards].groups():
        return Corners(low, low + shape)  # of as many axes, and so one group in the order of the shards
    return Corners.of([], ndim)


_NONE = np.zeros(0, "i8")


class _Met(NamedTuple):
    """Meetings of boxes with as many axes: the columns of the pairs, then rows and their pairs."""

    columns: tuple[Array, ...]
    row: Array
    pair: Array


def _alike(version: Version, shards: Array, wants: Sequence[Want], chosen: Array) -> Iterator[_Met]:
    """The meetings of the shards and wanted boxes of leaves that have as many axes."""
    ndim = len(wants[int(chosen[0])].box.shape)
    stored = stored_boxes(version, shards, ndim)
    wanted = Corners.of([wants[w].box for w in chosen.tolist()], ndim)
    leaf = np.fromiter((wants[w].leaf for w in chosen.tolist()), "i8", len(chosen))
    first, end = (np.searchsorted(version.shard_leaf[shards], leaf, side) for side in ("left", "right"))
    for part in _portions(end - first):
        w = np.repeat(part, (end - first)[part])
        s = np.arange(len(w)) - np.repeat(starts_of(np.cumsum((end - first)[part])), (end - first)[part])
        s += np.repeat(first[part], (end - first)[part])
        common = stored.pick(s).common(wanted.pick(w))
        hit = common.solid
        s, w, common = s[hit], w[hit], common.pick(hit)
        yield _pairs(version, shards[s], chosen[w], stored.pick(s), wanted.pick(w), common)


def _portions(counts: Array) -> Iterator[Array]:
    """Consecutive indices, cut where the counts sum up to AT_ONCE."""
    number = (np.cumsum(counts) - 1) // AT_ONCE
    yield from np.split(np.arange(len(counts)), np.flatnonzero(np.diff(number)) + 1)


def _pairs(version: Version, shard: Array, want: Array, stored: Corners, wanted: Corners, common: Corners) -> _Met:
    size = _itemsizes(version)[version.shard_leaf[shard]]
    volume = common.shape.prod(axis=1)
    (source, behind), (target, behind_target) = common.ends(stored), common.ends(wanted)
    run = behind - source == volume
    straight = run & (behind_target - target == volume)
    columns = (shard, want, stored.equal(wanted), straight, source * size, target * size, volume * size)
    row, pair = _rows(version, shard, source * size, behind * size)
    doubtful = np.flatnonzero(~run[pair])
    if len(doubtful):
        keep = np.ones(len(row), bool)
        for at in range(0, len(doubtful), AT_ONCE):
            some = doubtful[at : at + AT_ONCE]
            keep[some] = _holds(version, row[some], size[pair[some]], *(x.pick(pair[some]) for x in (stored, common)))
        row, pair = row[keep], pair[keep]
    return _Met(columns, row, pair)


def _itemsizes(version: Version) -> Array:
    return np.fromiter((leaf.spec.itemsize for leaf in version.leaves), "i8", len(version.leaves))


def _rows(version: Version, shard: Array, start: Array, stop: Array) -> tuple[Array, Array]:
    """The chunks of shards that hold these bytes of them, and for which pair each."""
    chunk, first = version.head.chunk, starts_of(version.chunk_end).astype("i8")[shard]
    some = stop > start  # elements may have no bytes
    begin = first + start // chunk
    count = np.where(some, first + (stop - 1) // chunk + 1 - begin, 0)
    pair = np.repeat(np.arange(len(shard)), count)
    return np.arange(len(pair)) + (begin - (np.cumsum(count) - count))[pair], pair


def _holds(version: Version, row: Array, size: Array, stored: Corners, common: Corners) -> Array:
    """Whether each chunk holds an element of a box in its shard: whether the first of them from its beginning on lies
    before its end.
    """
    start = version.chunk_start[row]
    first, end = start // size, -(-(start + version.chunk_nbytes[row]) // size)
    steps, wanted = stored.steps, common.counted_from(stored)
    index = first[:, None] // steps % stored.shape
    low, high = index < wanted.low, index >= wanted.high
    # The first axis on which the chunk's first element is outside the box. If it is before it there, the box's first
    # index follows; if it is behind, the index of some axis before that one has to rise, if any can.
    axis = (low | high).argmax(axis=1)
    each = np.arange(len(row))
    before = np.arange(index.shape[1]) < axis[:, None]
    rises = before & (index + 1 < wanted.high)
    last = np.where(rises.any(axis=1), index.shape[1] - 1 - rises[:, ::-1].argmax(axis=1), -1)
    behind = high[each, axis]
    turn = np.where(behind, last, axis)
    found = np.where(np.arange(index.shape[1]) < turn[:, None], index, wanted.low)
    up = behind & (last >= 0)
    found[each[up], last[up]] = index[each[up], last[up]] + 1
    inside = ~(low | high).any(axis=1)
    there: Array = inside | ((~behind | up) & ((found * steps).sum(axis=1) < end))
    return there
