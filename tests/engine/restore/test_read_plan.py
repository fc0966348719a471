"""Read plans: each row once, in runs that are worth a request, and every byte where the plan says."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.engine.restore.read_plan import GAP, IN_PLACE, ReadPlan, plan_reads
from tierstate.manifest.format.layout import ChunkPlace, Layout
from tierstate.tiers.base import IoAlignment

NAMES = ("packs/run/a", "packs/run/b")


class Case(NamedTuple):
    """What is to be read: rows of a layout, their content, which of them may be read in place."""

    layout: Layout
    rows: list[int]
    content: list[tuple[int, int]]
    direct: list[bool]
    grain: IoAlignment
    limit: int

    def plan(self, limit: int | None = None) -> list[ReadPlan]:
        return plan_reads(
            self.layout,
            np.array(self.rows, "i8"),
            np.array(self.content, "u8").reshape(-1, 2),
            np.array(self.direct, bool),
            self.grain,
            limit or self.limit,
            1 << 20,
        )


@st.composite
def layouts(draw: st.DrawFn, rows: int) -> Layout:
    """A tier's layout: chunks back to back, with gaps, shared, within others, in several packs."""
    places: list[ChunkPlace | None] = []
    ends = dict.fromkeys(NAMES, 0)
    for _ in range(rows):
        if places and draw(st.integers(0, 3)) == 0:
            place = draw(st.sampled_from(places))
            if place is not None and place.stored > 1 and draw(st.booleans()):
                start = draw(st.integers(1, place.stored - 1))
                stored = draw(st.integers(1, place.stored - start))
                place = place._replace(offset=place.offset + start, stored=stored)
            places.append(place)
            continue
        name = draw(st.sampled_from(NAMES))
        start = ends[name] + draw(st.sampled_from([0, 0, 0, 100, GAP, GAP + 1, 3 * GAP]))
        start = -(-start // GAP) * GAP if draw(st.booleans()) else start
        stored = draw(st.sampled_from([1, 100, 4096, 5000, 40_000]))
        ends[name] = start + stored
        places.append(ChunkPlace(name, start, stored, draw(st.sampled_from(["raw", "blosc"]))))
    tail = draw(st.sampled_from([0, 1, 5000]))
    return Layout.build(draw(st.permutations(places)), {name: end + tail for name, end in ends.items()})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(0, 14))
    layout = draw(layouts(count))
    rows = draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
    content = [(draw(st.sampled_from([7, 7, 7, 8])), int(layout.stored[row])) for row in rows]
    direct = [bool(layout.offset[row] % GAP == 0) and draw(st.booleans()) for row in rows]
    grain = draw(st.sampled_from([IoAlignment(), IoAlignment(512, 4), IoAlignment(4096, 512), IoAlignment(4096, 4096)]))
    return Case(layout, rows, content, direct, grain, draw(st.sampled_from([4096, 8192, 49_152, 1 << 20])))


@given(cases())
def test_each_row_is_read_once_with_others_of_its_content(case: Case) -> None:
    content = dict(zip(case.rows, case.content, strict=True))
    direct = dict(zip(case.rows, case.direct, strict=True))
    spots = [(reads, spot) for reads in case.plan() for run in range(len(reads)) for spot in reads.spots(run)]
    assert sorted(row for _, spot in spots for row in spot.rows) == sorted(case.rows)
    for reads, spot in spots:
        assert len({(case.layout.place(row), content[row]) for row in spot.rows}) == 1
        place = case.layout.place(spot.rows[0])
        assert place is not None
        assert (spot.stored, case.layout.codecs[spot.codec]) == (place.stored, place.codec)
        assert reads.in_place == (spot.at == IN_PLACE) == direct[spot.rows[0]]
        assert reads.in_place == any(direct[row] for row in spot.rows), "in place wherever one of them can be"
    kinds = [reads.in_place for reads in case.plan()]
    assert len(kinds) == len(set(kinds)), "one table for each way"
    groups = {(case.layout.place(row), content[row]) for row in case.rows}
    assert len(spots) == len(groups), "what is the same is read once"


WITHIN = Case(
    Layout.build([ChunkPlace(NAMES[0], 0, 40_000, "raw"), ChunkPlace(NAMES[0], 100, 200, "raw")], {NAMES[0]: 40_000}),
    [0, 1],
    [(7, 40_000), (7, 200)],
    [False, False],
    IoAlignment(),
    1 << 20,
)
"""A chunk that lies within another one."""


@given(cases())
@example(WITHIN)
def test_every_byte_is_where_the_plan_says(case: Case) -> None:
    sizes = case.layout.pack_sizes
    data = {name: np.random.default_rng(0).bytes(size) for name, size in sizes.items()}
    for reads in case.plan():
        for run in range(len(reads)):
            key, room = reads.key(run), reads.room(run)
            slab, extents = bytearray(room), list(reads.extents(run))
            for start, stop, at, _ in extents:
                assert 0 <= start < stop <= sizes[key]
                if not reads.in_place:
                    assert slab[at : at + stop - start] == bytes(stop - start), "no range lies over another"
                    slab[at : at + stop - start] = data[key][start:stop]
            spots = list(reads.spots(run))
            places = [case.layout.place(spot.rows[0]) for spot in spots]
            if reads.in_place:
                assert [(p.offset, p.offset + p.stored, e.row) for p, e in zip(places, extents, strict=True)] == [
                    (e.start, e.stop, s.rows[0]) for e, s in zip(extents, spots, strict=True)
                ]
                continue
            for spot, place in zip(spots, places, strict=True):
                assert place.object == key
                stored = slab[spot.at : spot.at + spot.stored]
                assert stored == data[key][place.offset : place.offset + place.stored]


@given(cases())
def test_ranges_have_the_grain_of_the_tier_and_fit_a_slab(case: Case) -> None:
    grain = case.grain
    for reads in case.plan():
        assert [reads.order(i) for i in range(len(reads))] == sorted(reads.order(i) for i in range(len(reads)))
        for run in range(len(reads)):
            extents = list(reads.extents(run))
            size = int(case.layout.object_sizes[reads.order(run)[0]])
            if reads.in_place:
                assert reads.room(run) == 0
                assert sum(e.stop - e.start for e in extents) <= 1 << 20 or len(extents) == 1
                continue
            for start, stop, at, _ in extents:
                assert start % grain.offset == 0
                assert at % grain.memory == 0
                assert stop % grain.offset == 0 or stop == size
            assert reads.room(run) <= case.limit or len(list(reads.spots(run))) == 1, "only a chunk that is longer"


@given(cases())
def test_neighbours_are_one_range_and_ranges_share_a_request(case: Case) -> None:
    for reads in case.plan(limit=1 << 30):
        if reads.in_place:
            continue
        keys = [reads.key(run) for run in range(len(reads))]
        assert len(keys) == len(set(keys)), "where there is room, an object is asked once"
        for run in range(len(reads)):
            ends = [(s, case.layout.place(s.rows[0])) for s in reads.spots(run)]
            starts = {e.at for e in reads.extents(run)}
            for (_, one), (spot, two) in pairwise(ends):
                gap = two.offset - one.offset - one.stored
                near = 0 <= gap <= GAP
                begins = any(spot.at - start < case.grain.offset and spot.at >= start for start in starts)
                assert near or begins, "what lies apart is a range of its own"
                assert not near or spot.at > 0


@pytest.mark.slow
def test_a_million_small_chunks_are_a_few_objects_of_python() -> None:
    count = 1_000_000
    layout = Layout(
        ("packs/run/a",),
        np.array([count * 100 + 28], "<u8"),
        ("raw",),
        np.zeros(count, "<u4"),
        np.arange(count, dtype="<u8") * 100,
        np.full(count, 100, "<u4"),
        np.zeros(count, "<u1"),
    )
    content = np.arange(2 * count, dtype="u8").reshape(-1, 2)
    (reads,) = plan_reads(
        layout, np.arange(count), content, np.zeros(count, bool), IoAlignment(4096, 512), 16 << 20, 16 << 20
    )
    assert len(reads) == 6
    assert sum(reads.room(run) for run in range(6)) < count * 100 + 12 * 4096
