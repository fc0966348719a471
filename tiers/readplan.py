"""The read plan: which bytes of which object are read together, and where they land. Columns of NumPy, and pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tierstate.manifest.columns import Array
from tierstate.manifest.layout import Layout

GAP = 4096
"""Bytes between two chunks that are rather read with them than passed over."""

IN_PLACE = -1
"""Position of a chunk that is not read into a slab but to its destination."""


class Grain(NamedTuple):
    """What a tier asks of a transfer without an extra copy.

    Attributes:
        offset: what offsets in the object are multiples of.
        memory: what addresses are multiples of.
    """

    offset: int = 1
    memory: int = 1


class Extent(NamedTuple):
    """A range of the object that is read as one.

    Attributes:
        start, stop: its bytes in the object.
        at: where in the slab they go; IN_PLACE for the destination of ``row``.
        row: the first chunk in it.
    """

    start: int
    stop: int
    at: int
    row: int


class Spot(NamedTuple):
    """A chunk's stored bytes, and the rows whose content they are.

    Attributes:
        rows: the rows; what is read in place is read to the first one's destination.
        stored: length in bytes.
        codec: index of the codec in the layout.
        at: where in the slab; IN_PLACE for the destination of the first row.
    """

    rows: list[int]
    stored: int
    codec: int
    at: int


@dataclass(frozen=True, eq=False, slots=True)
class Reads:
    """Runs of extents of spots of rows; each run is one request for ranges of one object.

    Attributes:
        layout: of the tier that is read.
        in_place: whether these bytes go straight to their destinations.
        row: ``(rows,)``, in the order in which they are read.
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
        """What runs are sorted by: object, and the first byte in it."""
        first = int(self.run_extent[run])
        return int(self.layout.object[self.row[self.spot_row[self.extent_spot[first]]]]), int(self.start[first])

    def key(self, run: int) -> str:
        """Key of the object that is read."""
        return self.layout.objects[self.order(run)[0]]

    def room(self, run: int) -> int:
        """Bytes of slab that a run takes."""
        last = int(self.run_extent[run + 1]) - 1
        return 0 if self.in_place else int(self.at[last] + self.stop[last] - self.start[last])

    def extents(self, run: int) -> Iterator[Extent]:
        """The ranges of a run."""
        part = slice(int(self.run_extent[run]), int(self.run_extent[run + 1]))
        first = self.row[self.spot_row[self.extent_spot[part]]]
        columns = (self.start[part], self.stop[part], self.at[part], first)
        return map(Extent, *(column.tolist() for column in columns))

    def spots(self, run: int) -> Iterator[Spot]:
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
            yield Spot(rows[begin:end], stored, codec, at)


def plan_reads(
    layout: Layout, rows: Array, content: Array, direct: Array, grain: Grain, limit: int, request: int
) -> list[Reads]:
    """Plan the reading of rows from one tier.

    Chunks that are near each other are read together, and ranges are extended outward to the tier's grain (never
    beyond the object), so that many small chunks are one transfer past the page cache. Ranges that are not near each
    other still share a request and a slab. Rows of the same content at the same place are read once.

    Args:
        layout: where the tier has them; it has all of them.
        rows: ``(n,)`` of int64.
        content: ``(n, k)``: rows with equal numbers are of equal content.
        direct: ``(n,)`` of bool: which rows can be read to their destination without a slab.
        grain: what the tier's transfers are multiples of.
        limit: bytes of a slab. A longer chunk gets a run of its own, which takes more room than that.
        request: bytes of one run that needs no slab.
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


def _in_place(layout: Layout, place: Array, rows: Array, ends: Array, request: int) -> Reads:
    start, stored = layout.offset[place].astype("i8"), layout.stored[place].astype("i8")
    total = np.cumsum(stored)
    runs = _cuts(total - stored, total, _changes(layout.object[place]), request)
    none = np.full(len(place), IN_PLACE)
    return Reads(layout, True, rows, ends, none, np.arange(len(place) + 1), start, start + stored, none, runs)


def _through_slabs(layout: Layout, place: Array, rows: Array, ends: Array, grain: Grain, limit: int) -> Reads:
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
    return Reads(layout, False, rows, ends, spot_at, extents, begin, end, at, runs)


def _changes(*columns: Array) -> Array:
    """``(n,)`` of bool: where any column is another than in the row before; true in the first."""
    changed = np.ones(len(columns[0]), bool)
    changed[1:] = False
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def _cuts(low: Array, high: Array, edge: Array, limit: int) -> Array:
    """Where groups begin, and the end: as long as they may be, within ``limit`` from ``low`` to ``high``.

    Args:
        low, high: both rising between edges.
        edge: where a group begins in any case.
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
