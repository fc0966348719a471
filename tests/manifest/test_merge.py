"""Merging: the parts of all ranks are the whole state, or an error says what is wrong."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from manifest_strategies import chunk_count, cuts

from tierstate.manifest.box import Box
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.head import Head
from tierstate.manifest.leaf import Leaf, Spec
from tierstate.manifest.merge import check_whole, merge
from tierstate.manifest.version import ShardRow, Version

HEAD = Head("run", 1, 10, 0.0, chunk=16)


class Held(NamedTuple):
    """A shard, and the ranks that hold it."""

    leaf: int
    box: Box
    ranks: frozenset[int]


class World(NamedTuple):
    """A global state and who holds which part of it."""

    size: int
    leaves: list[Leaf]
    shards: list[Held]


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    values = [Spec("tensor", "float32", draw(st.sampled_from([1, 4, 16])), draw(shapes)) for _ in range(3)]
    paths = draw(st.permutations([("a",), ("d",), ("d", 0), (True,), (1,), (float("nan"),)]))
    leaves = [Leaf((), Spec("dict"))] + [Leaf(p, s) for p, s in zip(paths, [*values, Spec("dict")], strict=False)]
    shards = []
    for i, leaf in enumerate(leaves):
        if leaf.spec.has_bytes:
            for box in draw(cuts(leaf.spec.shape)):
                ranks = draw(st.frozensets(st.integers(0, size - 1), min_size=1))
                shards.append(Held(i, box, ranks))
    return World(size, leaves, shards)


def digests_of(leaf, box):
    """Different digests for each chunk of each box of each leaf, the same on every rank."""
    count = chunk_count(leaf, box, HEAD.chunk)
    names = [checksum(repr((leaf, box, k)).encode()) for k in range(count)]
    return np.frombuffer(b"".join(names), "u8").reshape(-1, 2)


def part(world, rank, leaves=None, head=HEAD):
    """What one rank gives: the leaves it holds, in the state's order, and its shards, in any."""
    leaves = world.leaves if leaves is None else leaves
    mine = [s for s in world.shards if rank in s.ranks]
    held = {s.leaf for s in mine}
    order = [i for i, leaf in enumerate(leaves) if i in held or not leaf.spec.has_bytes]
    mine.sort(key=lambda s: s.leaf)
    rows = [ShardRow(order.index(s.leaf), rank, s.box) for s in mine]
    digests = [np.zeros((0, 2), "u8"), *(digests_of(leaves[s.leaf], s.box) for s in mine)]
    return Version.build(head, [leaves[i] for i in order], rows, np.concatenate(digests))


def parts_of(world):
    return [part(world, rank) for rank in range(world.size)]


def chunks(version):
    """Per row: path, box and number of the chunk within its shard."""
    starts = version.chunk_start // version.head.chunk
    rows = zip(version.chunk_leaf.tolist(), version.chunk_shard.tolist(), starts.tolist(), strict=True)
    return [(version.leaves[leaf].name, version.boxes[shard], k) for leaf, shard, k in rows]


@given(worlds())
def test_parts_become_the_whole(world):
    parts = parts_of(world)
    version, rows = merge(parts)
    check_whole(version)
    by_name = {leaf.name: leaf.spec for leaf in version.leaves}
    assert by_name == {leaf.name: leaf.spec for leaf in world.leaves}
    assert len(version.leaves) == len(world.leaves)
    assert version.head == dataclasses.replace(HEAD, world=world.size)
    expected = {
        (world.leaves[s.leaf].name, s.box, k): digest.tolist()
        for s in world.shards
        for k, digest in enumerate(digests_of(world.leaves[s.leaf], s.box))
    }
    assert dict(zip(chunks(version), version.digests.tolist(), strict=True)) == expected
    assert len(version.digests) == len(expected)
    assert version.nbytes == sum(leaf.spec.nbytes for leaf in world.leaves)
    assert [len(r) for r in rows] == [len(p.digests) for p in parts]


@given(worlds())
def test_every_row_of_the_whole_comes_from_the_lowest_rank_that_has_it(world):
    parts = parts_of(world)
    version, rows = merge(parts)
    where = {chunk: row for row, chunk in enumerate(chunks(version))}
    lowest = {(world.leaves[s.leaf].name, s.box): min(s.ranks) for s in world.shards}
    for rank, (given_part, became) in enumerate(zip(parts, rows, strict=True)):
        for chunk, row in zip(chunks(given_part), became.tolist(), strict=True):
            assert row == (where[chunk] if lowest[chunk[:2]] == rank else -1)
    kept = [row for became in rows for row in became.tolist() if row >= 0]
    assert sorted(kept) == list(range(len(version.digests)))
    assert version.shard_rank.tolist() == [
        lowest[version.leaves[leaf].name, box]
        for leaf, box in zip(version.shard_leaf.tolist(), version.boxes, strict=True)
    ]


@given(worlds(), st.data())
def test_the_order_of_parts_does_not_matter(world, data):
    parts = [part(world, r, head=dataclasses.replace(HEAD, metadata={"rank": r})) for r in range(world.size)]
    version, rows = merge(parts)
    order = data.draw(st.permutations(range(world.size)))
    turned = merge([parts[i] for i in order])
    assert turned.version.data == version.data
    assert [r.tolist() for r in turned.rows] == [rows[i].tolist() for i in order]
    if all(len(p.shard_rank) for p in parts):
        assert version.head.metadata == {"rank": 0}


@given(worlds())
def test_merging_the_whole_changes_nothing(world):
    version, _ = merge(parts_of(world))
    again, rows = merge([Version.decode(memoryview(version.data))])
    assert [leaf.name for leaf in again.leaves] == [leaf.name for leaf in version.leaves]
    assert np.array_equal(again.digests, version.digests)
    assert rows[0].tolist() == list(range(len(version.digests)))


@given(worlds(), st.data())
def test_a_missing_shard_is_named(world, data):
    solid = [s for s in world.shards if s.box.volume]
    assume(solid)
    lost = data.draw(st.sampled_from(solid))
    rest = world._replace(shards=[s for s in world.shards if s is not lost])
    leaf = world.leaves[lost.leaf]
    held = any(s.leaf == lost.leaf for s in rest.shards)
    if held:
        with pytest.raises(StateMismatch, match="not whole") as caught:
            merge(parts_of(rest))
        have = leaf.spec.nbytes // leaf.spec.itemsize - lost.box.volume
        assert f"{leaf.name}: {have} of " in str(caught.value)
    else:  # nobody so much as names the leaf: one rank does, as a rank does that holds none of it
        whole = part(rest, 0)
        named = Version.build(HEAD, [*whole.leaves, leaf], _rows(whole), whole.digests)
        with pytest.raises(StateMismatch, match="not whole"):
            merge([named, *parts_of(rest)[1:]])


def _rows(version):
    columns = (version.shard_leaf.tolist(), version.shard_rank.tolist(), version.boxes)
    return [ShardRow(*row) for row in zip(*columns, strict=True)]


@given(worlds(), st.data())
def test_overlapping_shards_are_refused(world, data):
    solid = [s for s in world.shards if s.box.volume]
    assume(solid)
    victim = data.draw(st.sampled_from(solid))
    shape = world.leaves[victim.leaf].spec.shape
    inside = [b for b in data.draw(cuts(shape)) if b.volume and b.intersect(victim.box)]
    extra = data.draw(st.sampled_from(inside))
    assume(extra not in [s.box for s in world.shards if s.leaf == victim.leaf])
    doubled = world._replace(shards=[*world.shards, Held(victim.leaf, extra, frozenset({0}))])
    with pytest.raises(StateMismatch, match="shards overlap"):
        merge(parts_of(doubled))


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4,), [Box((0,), (3,)), Box((2,), (1,))]),
        ((2, 2), [Box((0, 0), (2, 1)), Box((0, 0), (1, 2))]),
        ((2, 4), [Box((0, 0), (2, 2)), Box((0, 1), (2, 2))]),
        ((4, 2), [Box((0, 0), (4, 1)), Box((1, 0), (2, 1)), Box((0, 1), (2, 1))]),
    ],
)
def test_overlaps_that_leave_a_hole_of_their_own_size(shape, boxes):
    """As many elements as are right, and yet not the right ones."""
    leaf = Leaf(("a",), Spec("tensor", shape=shape))
    assert sum(b.volume for b in boxes) == leaf.spec.nbytes
    version = Version.build(HEAD, [leaf], [ShardRow(0, 0, b) for b in boxes], np.zeros((len(boxes), 2), "u8"))
    with pytest.raises(StateMismatch, match="a: shards overlap"):
        check_whole(version)


@given(worlds(), st.data())
def test_a_leaf_on_which_ranks_disagree_is_named(world, data):
    i = data.draw(st.integers(0, len(world.leaves) - 1))
    leaf = world.leaves[i]
    other = dataclasses.replace(leaf, spec=dataclasses.replace(leaf.spec, dtype="int32"))
    changed = [*world.leaves[:i], other, *world.leaves[i + 1 :]]
    holders = [r for r in range(world.size) if any(x.name == leaf.name for x in part(world, r).leaves)]
    assume(len(holders) > 1)
    odd = data.draw(st.sampled_from(holders))
    parts = [part(world, r, changed if r == odd else None) for r in range(world.size)]
    with pytest.raises(StateMismatch, match="ranks disagree on"):
        merge(parts)


@pytest.mark.parametrize(
    "change", [{"seq": 2}, {"step": 11}, {"run": "other"}, {"parent": "x"}, {"chunk": 32}, {"digest": "blake3"}]
)
def test_heads_that_differ_are_refused(change):
    world = World(1, [Leaf((), Spec("dict"))], [])
    with pytest.raises(StateMismatch, match="different versions"):
        merge([part(world, 0), part(world, 0, head=dataclasses.replace(HEAD, **change))])


def test_no_part_at_all_is_refused():
    with pytest.raises(StateMismatch, match="no rank"):
        merge([])


def test_what_is_missing_is_listed_with_a_limit():
    leaves = [Leaf((f"w{i}",), Spec("tensor", shape=(4,))) for i in range(25)]
    with pytest.raises(StateMismatch) as caught:
        check_whole(Version.build(HEAD, leaves, [], np.zeros((0, 2), "u8")))
    lines = str(caught.value).splitlines()
    assert lines[1] == "  w0: 0 of 4 elements are there"
    assert lines[-1] == "  and 5 more"
    assert len(lines) == 22


def test_leaves_without_elements_need_no_shard():
    leaves = [Leaf(("a",), Spec("tensor", shape=(0, 3))), Leaf(("b",), Spec("tied", shape=(3,)))]
    check_whole(Version.build(HEAD, leaves, [], np.zeros((0, 2), "u8")))


def test_keys_equal_to_python_are_not_united():
    parts = [
        Version.build(HEAD, [Leaf((key,), Spec("dict"))], [], np.zeros((0, 2), "u8")) for key in (1, True, 1.0, "1")
    ]
    assert sorted(leaf.name for leaf in merge(parts).version.leaves) == ['"1"', "(1.0)", "1", "True"]


def test_many_shards_side_by_side():
    leaf = Leaf(("a",), Spec("tensor", shape=(40, 50)))
    rows = [ShardRow(0, 0, Box((i, j), (1, 1))) for i in range(40) for j in range(50)]
    check_whole(Version.build(HEAD, [leaf], rows, np.zeros((2000, 2), "u8")))
    doubled = [*rows[:-1], rows[0]]
    with pytest.raises(StateMismatch, match="shards overlap"):
        check_whole(Version.build(HEAD, [leaf], doubled, np.zeros((2000, 2), "u8")))
