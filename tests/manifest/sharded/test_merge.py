"""Merging: the parts of all ranks are the whole state, or an error says what is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.manifest_parts import HEAD, Held, World, chunks, digests_of, part, parts_of, worlds
from support.manifest_strategies import cuts

from tierstate.manifest.boxes import Box
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format import version as version_format
from tierstate.manifest.format.layout import LayoutBuilder
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.statistics import ChunkStatistics
from tierstate.manifest.format.version import ShardRow, Version
from tierstate.manifest.reshard import coverage
from tierstate.manifest.reshard.coverage import check_complete
from tierstate.manifest.sharded import merge
from tierstate.manifest.sharded.merge import MergePlan, merge_parts, rows_in_merged
from tierstate.manifest.sharded.part import PartReader, encode_part
from tierstate.manifest.sharded.state_order import in_state_order, state_order


@given(worlds())
def test_parts_become_the_whole(world):
    parts = parts_of(world)
    version, rows, _ = merge_parts(parts)
    check_complete(version)
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
    version, rows, _ = merge_parts(parts)
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


@given(worlds())
def test_a_part_finds_its_place_in_the_whole(world):
    parts = parts_of(world)
    version, rows, _ = merge_parts(parts)
    read = Version.decode(memoryview(version.data))
    for part_, became in zip(parts, rows, strict=True):
        assert rows_in_merged(version, part_).tolist() == rows_in_merged(read, part_).tolist() == became.tolist()


@given(worlds(), st.data())
def test_a_part_that_does_not_belong_is_refused(world, data):
    solid = [s for s in world.shards if s.box.volume]
    assume(solid)
    held = data.draw(st.sampled_from(solid))
    rank, name = min(held.ranks), world.leaves[held.leaf].name
    version = merge_parts(parts_of(world)).version
    right = part(world, rank)
    other = right.digests.copy()
    row = next(k for k, chunk in enumerate(chunks(right)) if chunk[:2] == (name, held.box))
    other[row, 0] ^= np.uint64(1)
    with pytest.raises(StateMismatch, match="other bytes") as caught:
        rows_in_merged(version, dataclasses.replace(right, digests=other))
    assert f"rank {rank} " in str(caught.value)
    assert f"{name} has" in str(caught.value)
    foreign = Version.build(HEAD, [Leaf(("else",), Spec("tensor"))], [], np.zeros((0, 2), "u8"))
    with pytest.raises(StateMismatch, match="else is no leaf of it"):
        rows_in_merged(version, foreign)


def test_a_box_that_is_cut_otherwise_in_the_whole_is_refused():
    leaf = Leaf(("a",), Spec("tensor", shape=(4,)))
    halves = Version.build(
        HEAD, [leaf], [ShardRow(0, r, Box((2 * r,), (2,))) for r in range(2)], np.zeros((2, 2), "u8")
    )
    whole = Version.build(HEAD, [leaf], [ShardRow(0, 0, Box.whole((4,)))], np.zeros((1, 2), "u8"))
    with pytest.raises(StateMismatch, match=r"rank 0 .*shape=\(4,\)\) of a is no shard of it"):
        rows_in_merged(merge_parts([halves]).version, whole)


@given(worlds(), st.data())
def test_copies_that_differ_are_refused(world, data):
    shared = [s for s in world.shards if s.box.volume and len(s.ranks) > 1]
    assume(shared)
    held = data.draw(st.sampled_from(shared))
    leaf = world.leaves[held.leaf]
    kind = data.draw(st.sampled_from(["tensor", "value"]))
    leaves = [x._replace(spec=dataclasses.replace(x.spec, kind=kind)) if x is leaf else x for x in world.leaves]
    parts = [part(world, r, leaves) for r in range(world.size)]
    odd = data.draw(st.sampled_from(sorted(held.ranks)))
    other = parts[odd].digests.copy()
    row = [k for k, chunk in enumerate(chunks(parts[odd])) if chunk[:2] == (leaf.name, held.box)][-1]
    other[row, 1] ^= np.uint64(1)
    parts[odd] = dataclasses.replace(parts[odd], digests=other)
    with pytest.raises(StateMismatch, match="different values") as caught:
        merge_parts(parts)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"  {leaf.name}: ranks ")
    assert str(odd) in line
    assert ("ts.PerRank" in line) == (kind == "value")


@given(worlds())
def test_merging_the_whole_changes_nothing(world):
    version = merge_parts(parts_of(world)).version
    again, rows, _ = merge_parts([Version.decode(memoryview(version.data))])
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
            merge_parts(parts_of(rest))
        have = leaf.spec.nbytes // leaf.spec.itemsize - lost.box.volume
        assert f"{leaf.name}: {have} of " in str(caught.value)
    else:  # nobody so much as names the leaf: one rank does, as a rank does that holds none of it
        whole = part(rest, 0)
        named = Version.build(HEAD, [*whole.leaves, leaf], _rows(whole), whole.digests)
        with pytest.raises(StateMismatch, match="not whole"):
            merge_parts([named, *parts_of(rest)[1:]])


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
        merge_parts(parts_of(doubled))


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
        check_complete(version)


@given(worlds(), st.data())
def test_a_leaf_on_which_ranks_disagree_is_named(world, data):
    i = data.draw(st.integers(0, len(world.leaves) - 1))
    leaf = world.leaves[i]
    other = leaf._replace(spec=dataclasses.replace(leaf.spec, dtype="int32"))
    changed = [*world.leaves[:i], other, *world.leaves[i + 1 :]]
    holders = [r for r in range(world.size) if any(x.name == leaf.name for x in part(world, r).leaves)]
    assume(len(holders) > 1)
    odd = data.draw(st.sampled_from(holders))
    parts = [part(world, r, changed if r == odd else None) for r in range(world.size)]
    with pytest.raises(StateMismatch, match="ranks disagree on") as caught:
        merge_parts(parts)
    assert f"on {leaf.name}: rank" in str(caught.value)
    # Whichever is taken for the odd one: both sides are named.
    assert f"rank {odd} " in str(caught.value)


@pytest.mark.parametrize("change", [{"seq": 2}, {"step": 11}, {"run": "other"}, {"chunk": 32}, {"digest": "blake3"}])
def test_heads_that_differ_are_refused(change):
    world = World(1, [Leaf((), Spec("dict"))], [])
    odd = part(world, 0, head=dataclasses.replace(HEAD, **change))
    with pytest.raises(StateMismatch, match=f"different versions: rank 1 has {next(iter(change))} ") as caught:
        merge_parts([part(world, 0), odd])
    assert str(next(iter(change.values()))) in str(caught.value)
    with pytest.raises(StateMismatch, match="is none of a version of"):
        rows_in_merged(part(world, 0), odd)


def test_the_head_is_that_of_the_lowest_rank_but_for_its_parent():
    world = World(2, [Leaf(("a",), Spec("tensor", shape=(4,)))], [Held(0, Box((0,), (4,)), frozenset({1}))])
    heads = [dataclasses.replace(HEAD, time=float(r), world=9, parent=f"p{r}", metadata={"r": r}) for r in range(2)]
    parts = [part(world, r, head=heads[r]) for r in range(2)]
    assert merge_parts(parts, parent="x").version.head == dataclasses.replace(heads[0], world=2, parent="x")


def test_what_is_missing_is_listed_with_a_limit():
    leaves = [Leaf((f"w{i}",), Spec("tensor", shape=(4,))) for i in range(25)]
    with pytest.raises(StateMismatch) as caught:
        check_complete(Version.build(HEAD, leaves, [], np.zeros((0, 2), "u8")))
    lines = str(caught.value).splitlines()
    assert lines[1] == "  w0: 0 of 4 elements are there"
    assert lines[-1] == "  and 5 more"
    assert len(lines) == 22


def test_leaves_without_elements_need_no_shard():
    leaves = [Leaf(("a",), Spec("tensor", shape=(0, 3))), Leaf(("b",), Spec("tied", shape=(3,)))]
    check_complete(Version.build(HEAD, leaves, [], np.zeros((0, 2), "u8")))


def test_keys_equal_to_python_are_not_united():
    parts = [
        Version.build(HEAD, [Leaf((key,), Spec("dict"))], [], np.zeros((0, 2), "u8")) for key in (1, True, 1.0, "1")
    ]
    assert sorted(leaf.name for leaf in merge_parts(parts).version.leaves) == ['"1"', "(1.0)", "1", "True"]


def read_again(parts, pieces):
    """The parts as a coordinator reads those of each save, with other digests and another head."""
    reader = PartReader(pieces)
    found = []
    for one in parts:
        rows = len(one.digests)
        layout = LayoutBuilder(rows)
        layout.put_run(np.arange(rows), "packs/run/x", 4096 * np.arange(rows), one.chunk_nbytes, "raw")
        built = layout.build({"packs/run/x": 4096 * rows + 4096})
        found.append(reader.decode(encode_part(Record(one, built, {"id": "x"}))).version)
    return found


def with_other_digests(one, rank, seed):
    """A part of a later save; copies of a chunk are equal on all ranks."""
    names = [checksum(f"{seed} {chunk}".encode()) for chunk in chunks(one)]
    digests = np.frombuffer(b"".join(names), "u8").reshape(-1, 2)
    return one.again(dataclasses.replace(one.head, seq=2, step=20, time=rank + 1.0), digests)


@given(worlds(), st.integers(0, 2**32), st.booleans(), st.data())
def test_a_later_save_of_the_same_shards_is_merged_as_the_first_one(world, seed, sort, data):
    pieces = {}
    paths = data.draw(st.permutations([leaf.path for leaf in world.leaves]))
    sort = sort and ("d", 0) not in paths  # whose container these worlds do not have

    def merged(parts):
        found = merge_parts(parts, parent="p")
        return in_state_order(found, state_order(paths)) if sort else found

    parts = parts_of(world)
    first = read_again(parts, pieces)
    plan = MergePlan(first, merged(first))
    later = [with_other_digests(one, rank, seed) for rank, one in enumerate(read_again(parts, pieces))]
    found, right = plan.again(later, "p"), merged(later)
    assert found.version.data == right.version.data
    assert found.version.id == right.version.id
    assert [rows.tolist() for rows in found.rows] == [rows.tolist() for rows in right.rows]
    every = [chunk for one in later for chunk in chunks(one)]
    for number, one in enumerate(later):
        copied = [every.count(chunk) > 1 for chunk in chunks(one)]
        if any(copied):
            digests = one.digests.copy()
            digests[copied] += 1
            torn = [*later[:number], one.again(one.head, digests), *later[number + 1 :]]
            assert plan.again(torn) is None, "copies differ"


def told(version):
    """A version with statistics that tell which chunk they are of."""
    names = [int.from_bytes(checksum(repr(chunk).encode())[:3]) for chunk in chunks(version)]
    counts, numbers = np.array(names, "<u4"), np.array(names, "<f8")
    return version.again(version.head, version.digests, ChunkStatistics(counts, counts, numbers, numbers, numbers))


@given(worlds())
def test_statistics_stay_with_their_chunks(world):
    pieces = {}
    parts = [told(one) for one in read_again(parts_of(world), pieces)]
    merged = merge_parts(parts)
    later = [told(one) for one in read_again(parts_of(world), pieces)]
    for version in (merged.version, MergePlan(parts, merged).again(later).version):
        for found, right in zip(version.statistics, told(version).statistics, strict=True):
            assert found.tolist() == right.tolist()


@given(worlds(), worlds(), st.sampled_from(["other", "chunk", "reversed", "moved", "same"]), st.data())
def test_what_a_plan_merges_is_what_is_merged_without_it(world, other, how, data):
    pieces = {}
    first = read_again(parts_of(world), pieces)
    plan = MergePlan(first, merge_parts(first))
    head = dataclasses.replace(HEAD, chunk=32) if how == "chunk" else HEAD
    if how == "other":
        world = other
    if how == "moved":
        ranks = st.frozensets(st.integers(0, world.size - 1), min_size=1)
        world = world._replace(shards=[s._replace(ranks=data.draw(ranks)) for s in world.shards])
    parts = [part(world, rank, head=head) for rank in range(world.size)]
    later = read_again(parts[::-1] if how == "reversed" else parts, pieces)
    found, right = plan.again(later), merge_parts(later)
    if how == "same":
        assert found is not None
    if found is not None:
        assert found.version.data == right.version.data
        assert [rows.tolist() for rows in found.rows] == [rows.tolist() for rows in right.rows]


def test_the_parts_of_a_later_save_must_be_of_one_version():
    leaves = [Leaf((), Spec("dict")), Leaf(("a",), Spec("tensor", shape=(2,)))]
    two = World(2, leaves, [Held(1, Box((i,), (1,)), frozenset([i])) for i in range(2)])
    pieces = {}
    first = read_again(parts_of(two), pieces)
    plan = MergePlan(first, merge_parts(first))
    parts = [part(two, rank, head=dataclasses.replace(HEAD, step=10 + rank)) for rank in range(2)]
    with pytest.raises(StateMismatch, match="ranks saved different versions"):
        plan.again(read_again(parts, pieces))
    assert plan.again(read_again(parts_of(two), {})) is None, "the leaves were not read by the same readers"


def test_many_shards_side_by_side():
    leaf = Leaf(("a",), Spec("tensor", shape=(40, 50)))
    rows = [ShardRow(0, 0, Box((i, j), (1, 1))) for i in range(40) for j in range(50)]
    check_complete(Version.build(HEAD, [leaf], rows, np.zeros((2000, 2), "u8")))
    doubled = [*rows[:-1], rows[0]]
    with pytest.raises(StateMismatch, match="shards overlap"):
        check_complete(Version.build(HEAD, [leaf], doubled, np.zeros((2000, 2), "u8")))


@given(worlds())
def test_many_rows_are_worked_on_in_blocks_of_whole_leaves(world):
    parts = parts_of(world)
    right = merge_parts(parts)
    with pytest.MonkeyPatch.context() as patch:
        for module in (merge, version_format, coverage):
            patch.setattr(module, "BLOCK", 2)
        found = merge_parts(parts)
        assert Version.decode(memoryview(right.version.data)).id == found.version.id
    assert found.version.data == right.version.data
    assert [rows.tolist() for rows in found.rows] == [rows.tolist() for rows in right.rows]


@given(worlds(), st.data())
def test_what_is_wrong_in_a_later_block_is_found(world, data):
    parts = parts_of(world)
    solid = [s for s in world.shards if s.box.volume]
    assume(solid)
    gone = data.draw(st.sampled_from(solid))
    less = world._replace(shards=[s for s in world.shards if s is not gone])
    assume(any(s.leaf == gone.leaf for s in less.shards))
    with pytest.MonkeyPatch.context() as patch:
        for module in (merge, version_format, coverage):
            patch.setattr(module, "BLOCK", 2)
        merge_parts(parts)
        with pytest.raises(StateMismatch, match="not whole"):
            merge_parts(parts_of(less))
