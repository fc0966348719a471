"""Meetings: exactly the chunks that hold wanted elements, and where their bytes belong."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import HEAD, cuts, random_digests

from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.reshard.coverage import check_covered, uncovered
from tierstate.manifest.reshard.overlap import WantedBox, find_overlaps

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    """Any box inside a shape, empty ones too."""
    low = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(low), tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, low, strict=True)))


@st.composite
def wanted(draw):
    """A whole version of a few leaves, and boxes of them."""
    leaves = [
        Leaf((i,), Spec("tensor", itemsize=draw(st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, 20])), shape=draw(shapes)))
        for i in range(draw(st.integers(0, 3)))
    ]
    rows = [ShardRow(i, 0, box) for i, leaf in enumerate(leaves) for box in draw(cuts(leaf.spec.shape))]
    head = Head("run", 1, 1, 0.0, chunk=draw(st.sampled_from([16, 32, 48])))
    count = sum(-(-math.prod(r.box.shape) * leaves[r.leaf].spec.itemsize // head.chunk) for r in rows)
    version = Version.build(head, leaves, rows, random_digests(count, 7))
    picks = st.integers(0, max(len(leaves) - 1, 0)).flatmap(
        lambda i: st.builds(WantedBox, st.just(i), boxes(leaves[i].spec.shape))
    )
    return version, draw(st.lists(picks, max_size=4)) if leaves else []


def bytes_of(box, within, size):
    """Byte numbers, in row-major order of one box, of the elements of another inside it."""
    numbers = np.arange(math.prod(within.shape)).reshape(within.shape)[box.slices(within.offset)].reshape(-1)
    return (numbers[:, None] * size + np.arange(size)).reshape(-1)


def by_hand(version, wants):
    """``(row, want)`` of every chunk that holds an element of a box, found element by element."""
    found = []
    for row in range(len(version.digests)):
        shard, start = int(version.chunk_shard[row]), int(version.chunk_start[row])
        leaf, box = int(version.shard_leaf[shard]), version.boxes[shard]
        for w, want in enumerate(wants):
            common = box.intersect(want.box) if want.leaf == leaf else None
            if common is not None:
                at = bytes_of(common, box, version.leaves[leaf].spec.itemsize)
                if ((at >= start) & (at < start + version.chunk_nbytes[row])).any():
                    found.append((row, w))
    return found


@given(wanted())
def test_exactly_the_chunks_that_hold_wanted_elements(drawn):
    version, wants = drawn
    met = find_overlaps(version, wants)
    expected = by_hand(version, wants)
    assert sorted(zip(met.row.tolist(), met.want[met.pair].tolist(), strict=True)) == expected
    assert (np.diff(met.row) >= 0).all()
    assert (met.shard[met.pair] == version.chunk_shard[met.row]).all()
    assert met.rows.tolist() == sorted({row for row, _ in expected})


@given(wanted())
def test_pairs_say_where_their_elements_lie(drawn):
    version, wants = drawn
    met = find_overlaps(version, wants)
    pairs = list(zip(met.shard.tolist(), met.want.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {
        (s, w)
        for s, box in enumerate(version.boxes)
        for w, want in enumerate(wants)
        if version.shard_leaf[s] == want.leaf and box.intersect(want.box)
    }
    for k, (s, w) in enumerate(pairs):
        size = version.leaves[wants[w].leaf].spec.itemsize
        common = version.boxes[s].intersect(wants[w].box)
        here, there = bytes_of(common, version.boxes[s], size), bytes_of(common, wants[w].box, size)
        assert met.nbytes[k] == len(here)
        assert met.same[k] == (version.boxes[s] == wants[w].box)
        if size:
            assert (met.source[k], met.target[k]) == (here[0], there[0])
            assert met.straight[k] == bool((np.diff(here) == 1).all() and (np.diff(there) == 1).all())


@pytest.mark.parametrize(
    ("shard", "want", "straight"),
    [
        (Box((0, 0), (4, 2)), Box((0, 0), (4, 4)), False),  # all of the shard, and half of each wanted row
        (Box((0, 0), (4, 4)), Box((0, 0), (4, 2)), False),
        (Box((0, 0), (2, 4)), Box((0, 0), (4, 4)), True),
        (Box((0, 0), (4, 4)), Box((1, 0), (2, 4)), True),
    ],
)
def test_bytes_are_in_one_piece_only_where_they_are_in_both_boxes(shard, want, straight):
    leaves = [Leaf(("w",), Spec("tensor", itemsize=4, shape=(4, 4)))]
    rows = -(-shard.volume * 4 // HEAD.chunk)
    version = Version.build(HEAD, leaves, [ShardRow(0, 0, shard)], random_digests(rows, 7))
    assert find_overlaps(version, [WantedBox(0, want)]).straight.tolist() == [straight]


@given(wanted(), st.data())
def test_a_covering_is_known_from_any_other(drawn, data):
    version, wants = drawn
    assert uncovered(version, wants, find_overlaps(version, wants)).tolist() == [], "a whole version covers everything"
    rows = [
        ShardRow(*row)
        for row in zip(version.shard_leaf.tolist(), version.shard_rank.tolist(), version.boxes, strict=True)
    ]
    for _ in range(data.draw(st.integers(1, 2))):
        rows = changed(rows, [leaf.spec.shape for leaf in version.leaves], data)
    count = sum(-(-math.prod(r.box.shape) * version.leaves[r.leaf].spec.itemsize // version.head.chunk) for r in rows)
    other = Version.build(version.head, version.leaves, sorted(rows, key=lambda r: r.leaf), random_digests(count, 7))
    wrong = [w for w, want in enumerate(wants) if (counts(other, want) != 1).any()]
    assert uncovered(other, wants, find_overlaps(other, wants)).tolist() == wrong
    if wrong:
        with pytest.raises(FormatError, match="shards are missing, or overlap"):
            check_covered(other, wants, find_overlaps(other, wants))


def changed(rows, shapes, data):
    """The shards, one lacking, twice there, or moved."""
    if not rows:
        return rows
    i = data.draw(st.integers(0, len(rows) - 1))
    kept, row = [*rows[:i], *rows[i + 1 :]], rows[i]
    extra = data.draw(st.sampled_from([[], [row, row], [row._replace(box=data.draw(boxes(shapes[row.leaf])))]]))
    return kept + extra


def counts(version, want):
    """How often each element of a wanted box is in a shard."""
    there = np.zeros(version.leaves[want.leaf].spec.shape, int)
    for leaf, box in zip(version.shard_leaf.tolist(), version.boxes, strict=True):
        if leaf == want.leaf:
            there[box.slices()] += 1
    return there[want.box.slices()]


def test_coverings_that_only_their_volume_speaks_for_are_refused():
    """As many elements as are right, and yet not the right ones, of which the sums of places are the same too."""
    shape = (4, 4)
    parts = [Box((0, 0), (2, 4)), Box((1, 0), (2, 2)), Box((2, 2), (2, 2))]
    leaf = Leaf(("a",), Spec("tensor", shape=shape))
    version = Version.build(HEAD, [leaf], [ShardRow(0, 0, b) for b in parts], np.zeros((3, 2), "u8"))
    wants = [WantedBox(0, Box.whole(shape))]
    assert sum(b.volume for b in parts) == 16
    with pytest.raises(FormatError, match="not hold every element once of a:"):
        check_covered(version, wants, find_overlaps(version, wants))


def test_huge_shapes_and_many_shards_take_no_time_and_no_memory():
    wide = Leaf(("wide",), Spec("tensor", shape=(1 << 62, 0, 1 << 62)))
    long = Leaf(("long",), Spec("tensor", itemsize=1, shape=(1 << 56,)))
    parts = [ShardRow(1, 0, Box((i << 16,), (1 << 16,))) for i in range(20_000)]
    head = Head("run", 1, 1, 0.0, chunk=1 << 10)
    version = Version.build(head, [wide, long], parts, np.zeros((64 * len(parts), 2), "u8"))
    wants = [WantedBox(0, Box.whole(wide.spec.shape)), WantedBox(1, Box.whole(long.spec.shape))]
    tracemalloc.start()
    try:
        met = find_overlaps(version, wants)
        assert uncovered(version, wants, met).tolist() == [1]
        assert len(met.rows) == 64 * len(parts)
        assert tracemalloc.get_traced_memory()[1] < 200 * len(met.rows)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_mesh_of_shards_is_covered_however_it_is_asked():
    """10,000 shards, a million chunks: only what is wanted is counted, and nothing per element is done."""
    n, side = 100, 160
    leaf = Leaf(("w",), Spec("tensor", "float32", 4, (n * side, n * side)))
    rows = [ShardRow(0, 0, Box((i * side, j * side), (side, side))) for i in range(n) for j in range(n)]
    version = Version.build(
        Head("run", 1, 1, 0.0, chunk=1 << 10), [leaf], rows, np.zeros((n * n * side * side * 4 >> 10, 2), "u8")
    )
    assert len(version.digests) == 1_000_000
    whole = Box.whole(leaf.spec.shape)
    assert len(find_overlaps(version, [WantedBox(0, whole)]).rows) == 1_000_000
    # Half a shard is cut off on every side; those on the left and right still have every chunk, of 1.6 rows, touched.
    inner = Box((80, 80), (n * side - 160, n * side - 160))
    wants = [WantedBox(0, inner)]
    met = find_overlaps(version, wants)
    assert uncovered(version, wants, met).tolist() == []
    assert len(met.rows) == 1_000_000 - 2 * n * 50
