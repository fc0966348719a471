"""The read plan: which byte ranges of which object are read in one request, and where in memory they go.

Neighbouring chunks are merged into one read (I/O coalescing), aligned for direct I/O. Pure functions on NumPy columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.format.layout import Layout
from tierstate.tiers.base import IoAlignment

GAP = 4096
"""Two chunks with at most this many bytes between them are read together, with the gap."""


IN_PLACE = -1
"""In place of a position in the slab: the chunk is read directly to its destination."""


class Extent(NamedTuple):
    """A contiguous byte range of an object.

    Attributes:
        start, stop: the range in the object.
        at: position in the slab; IN_PLACE for the destination of ``row``.
        row: row of the first chunk in it.
    """

    start: int
    stop: int
    at: int
    row: int


class StoredChunk(NamedTuple):
    """The stored bytes of a chunk, and all rows with that content.

    Attributes:
        rows: the rows.
        stored: length in bytes.
        codec: index of the codec in the layout.
        at: position in the slab; IN_PLACE for the destination of the first row.
    """

    rows: list[int]
    stored: int
    codec: int
    at: int


@dataclass(frozen=True, eq=False, slots=True)
class ReadPlan:
    """The requests to one tier: each run is one request for ranges (extents) of one object.

    Attributes:
        layout: the layout of the version in the tier.
        in_place: whether the bytes are read directly to their destinations.
        row: ``(rows,)``, in the order of reading. A spot is one stored chunk, with all rows of that content.
        spot_row: ``(spots + 1,)``: index of each spot's first row.
        spot_at: ``(spots,)``: position in the slab.
        extent_spot: ``(extents + 1,)``: index of each extent's first spot.
        start, stop, at: ``(extents,)``: bytes in the object, position in the slab.
        run_extent: ``(runs + 1,)``: index of each run's first extent.
    """

    layout: Layout
    in_place: bool
    row: Array
    spot_row: Array
    spot_at: Array
    extent_spot: Array
    start: Array
    stop: Array
    at: Array
    run_extent: Array

    def __len__(self) -> int:
        return len(self.run_extent) - 1

    def order(self, run: int) -> tuple[int, int]:
        """The sort key of a run: index of the object, and offset of its first byte."""
        first = int(self.run_extent[run])
        return int(self.layout.object[self.row[self.spot_row[self.extent_spot[first]]]]), int(self.start[first])

    def key(self, run: int) -> str:
        """Key of the object that is read."""
        return self.layout.objects[self.order(run)[0]]

    def room(self, run: int) -> int:
        """Bytes of a slab that a run needs; 0 if it is read in place."""
        last = int(self.run_extent[run + 1]) - 1
        return 0 if self.in_place else int(self.at[last] + self.stop[last] - self.start[last])

    def extents(self, run: int) -> Iterator[Extent]:
        """The ranges of a run."""
        part = slice(int(self.run_extent[run]), int(self.run_extent[run + 1]))
        first = self.row[self.spot_row[self.extent_spot[part]]]
        columns = (self.start[part], self.stop[part], self.at[part], first)
        return map(Extent, *(column.tolist() for column in columns))

    def spots(self, run: int) -> Iterator[StoredChunk]:
        """The chunks of a run."""
        ends = self.extent_spot[self.run_extent[run : run + 2]]
        part = slice(int(ends[0]), int(ends[1]))
        first = self.spot_row[part]
        rows, offset = self.row[first[0] : self.spot_row[ends[1]]].tolist(), int(first[0])
        columns = (
            first - offset,
            self.spot_row[part.start + 1 : part.stop + 1] - offset,
            self.layout.stored[self.row[first]],
            self.layout.codec[self.row[first]],
            self.spot_at[part],
        )
        for begin, end, stored, codec, at in zip(*(column.tolist() for column in columns), strict=True):
            yield StoredChunk(rows[begin:end], stored, codec, at)


def plan_reads(
    layout: Layout, rows: Array, content: Array, direct: Array, grain: IoAlignment, limit: int, request: int
) -> list[ReadPlan]:
    """Plan the reading of rows from one tier.

    Chunks near each other are read together, and ranges are extended to the tier's alignment (but not beyond the end of
    the object), so that many small chunks are one direct I/O transfer. Ranges far from each other can still share a
    request and a slab. Rows of the same content at the same place are read once.

    Args:
        layout: the layout of the version in the tier, which has all these rows.
        rows: ``(n,)`` of int64.
        content: ``(n, k)``: rows with equal values have equal content (digest and length).
        direct: ``(n,)`` of bool: which rows can be read directly to their destination, without a slab.
        grain: the alignment of the tier's transfers.
        limit: bytes of a slab. A longer chunk gets a run of its own, which needs more memory than a slab.
        request: the most bytes of one run that needs no slab.

    Returns:
        at most two plans: one for the rows that are read in place, one for those that are read through slabs.
    """
    order = np.lexsort((~direct, *content.T, layout.offset[rows], layout.object[rows]))
    rows, content, direct = rows[order], content[order], direct[order]
    where = [layout.object[rows], layout.offset[rows], layout.stored[rows], layout.codec[rows], *content.T]
    first = np.flatnonzero(_changes(*where))
    place = rows[first]
    counts = np.diff(np.append(first, len(rows)))
    found = []
    for in_place in (True, False):
        which = np.flatnonzero(direct[first] == in_place)
        if len(which):
            chosen = rows[np.repeat(direct[first] == in_place, counts)]
            ends = np.concatenate([[0], np.cumsum(counts[which])])
            if in_place:
                found.append(_in_place(layout, place[which], chosen, ends, request))
            else:
                found.append(_through_slabs(layout, place[which], chosen, ends, grain, limit))
    return found


def _in_place(layout: Layout, place: Array, rows: Array, ends: Array, request: int) -> ReadPlan:
    start, stored = layout.offset[place].astype("i8"), layout.stored[place].astype("i8")
    total = np.cumsum(stored)
    runs = _cuts(total - stored, total, _changes(layout.object[place]), request)
    none = np.full(len(place), IN_PLACE)
    return ReadPlan(layout, True, rows, ends, none, np.arange(len(place) + 1), start, start + stored, none, runs)


def _through_slabs(layout: Layout, place: Array, rows: Array, ends: Array, grain: IoAlignment, limit: int) -> ReadPlan:
    index = layout.object[place]
    start = layout.offset[place].astype("i8")
    stop = start + layout.stored[place].astype("i8")
    low = start // grain.offset * grain.offset
    high = np.maximum(stop, np.minimum(_up(stop, grain.offset), layout.object_sizes[index].astype("i8")))
    apart = _changes(index)
    gap = start[1:] - stop[:-1]
    apart[1:] |= (gap < 0) | (gap > GAP)
    extents = _cuts(low, high, apart, limit)
    first, last = extents[:-1], extents[1:] - 1
    begin, end = low[first], high[last]
    padded = _up(end - begin, max(grain))
    total = np.cumsum(padded)
    runs = _cuts(total - padded, total, _changes(index[first]), limit)
    at = total - padded
    at -= np.repeat(at[runs[:-1]], np.diff(runs))
    spot_at = np.repeat(at - begin, np.diff(extents)) + start
    return ReadPlan(layout, False, rows, ends, spot_at, extents, begin, end, at, runs)


def _changes(*columns: Array) -> Array:
    """``(n,)`` of bool: true for the first row, and where any column differs from the row before."""
    changed = np.ones(len(columns[0]), bool)
    changed[1:] = False
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def _cuts(low: Array, high: Array, edge: Array, limit: int) -> Array:
    """Divide ranges into groups, as long as possible, that span at most ``limit`` bytes, or have one range.

    Args:
        low, high: ``(n,)``: begin and end of each range, both rising between edges.
        edge: ``(n,)`` of bool: where a group begins in any case.

    Returns:
        ``(groups + 1,)``: index of the first range of each group, and n.
    """
    cuts, edges = [], [*np.flatnonzero(edge).tolist(), len(low)]
    for begin, end in pairwise(edges):
        while begin < end:
            cuts.append(begin)
            begin += max(1, int(np.searchsorted(high[begin:end], low[begin] + limit, "right")))
    return np.array([*cuts, len(low)])


def _up(numbers: Array, grain: int) -> Array:
    rounded: Array = -(-numbers // grain) * grain
    return rounded
