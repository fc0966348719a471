"""Read plans: each chunk once, from the first tier that has it, in runs that are worth a request."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.layout import Layout, Place
from tierstate.tiers.fetch import Holding, read_plan
from tierstate.tiers.shelf import Shelf

GAP = 4096


@st.composite
def layouts(draw: st.DrawFn, rows: int) -> Layout:
    """A tier's layout: chunks back to back, with gaps, shared, in several packs, or absent."""
    places: list[Place | None] = []
    ends = {name: 0 for name in ("packs/run/a", "packs/run/b")}
    for _ in range(rows):
        known = [p for p in places if p is not None]
        kind = draw(st.sampled_from(["new", "new", "new", "absent", "shared"]))
        if kind == "absent":
            places.append(None)
        elif kind == "shared" and known:
            places.append(draw(st.sampled_from(known)))
        else:
            name = draw(st.sampled_from(sorted(ends)))
            start = ends[name] + draw(st.sampled_from([0, 0, 0, 100, GAP, GAP + 1]))
            stored = draw(st.sampled_from([1, 100, 5000, 40_000]))
            ends[name] = start + stored
            places.append(Place(name, start, stored, "raw"))
    return Layout.build(draw(st.permutations(places)), ends)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Layout], int]:
    count = draw(st.integers(0, 12))
    found = draw(st.lists(layouts(count), min_size=1, max_size=3))
    rows = draw(st.lists(st.integers(0, count - 1), unique=True)) if count else []
    return rows, found, draw(st.sampled_from([1, 4096, 50_000, 1 << 20]))


@given(cases())
def test_a_plan_reads_each_row_once_from_the_first_tier_that_has_it(case: tuple[list[int], list[Layout], int]) -> None:
    rows, found, limit = case
    holdings = [Holding(cast(Shelf, None), layout) for layout in found]
    reads, lost = read_plan(rows, holdings, limit)
    planned = [row for read in reads for _, at in read.rows for row in at]
    assert sorted(planned + lost) == sorted(rows)
    first = {row: next((i for i, layout in enumerate(found) if layout.present[row]), None) for row in rows}
    assert sorted(lost) == sorted(row for row, holding in first.items() if holding is None)
    for read in reads:
        layout = found[read.holding]
        assert {place.object for place, _ in read.rows} == {read.rows[0][0].object}
        for place, at in read.rows:
            assert all(layout.place(row) == place and first[row] == read.holding for row in at)
            assert read.start <= place.offset
            assert place.offset + place.stored <= read.stop
        offsets = [place.offset for place, _ in read.rows]
        assert offsets == sorted(offsets)
        assert read.start == offsets[0]
        assert read.stop == max(place.offset + place.stored for place, _ in read.rows)
        assert read.stop - read.start <= limit or len(read.rows) == 1, "merged only within the limit"


@given(cases())
def test_neighbours_are_read_together(case: tuple[list[int], list[Layout], int]) -> None:
    rows, found, _ = case
    holdings = [Holding(cast(Shelf, None), layout) for layout in found]
    reads, _ = read_plan(rows, holdings, 1 << 30)
    for one, two in pairwise(reads):
        if one.holding == two.holding and one.rows[0][0].object == two.rows[0][0].object:
            assert two.start - one.stop > GAP, "what lies close together is one request"
