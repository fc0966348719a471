"""Sharing out: each box that several ranks hold has one owner among them, and the bytes are even."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import Table as Bytes

from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import FormatError, StateMismatch
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.manifest.sharded.ownership import Ownership, SaveCandidates, assign_owners

rows = st.lists(
    st.tuples(st.sampled_from([("a",), ("a", 0), ("a", True), ("b",)]), st.integers(0, 2)),
    max_size=6,
    unique_by=lambda row: (encode_path(row[0]), row[1]),
)
"""What a rank holds: path and offset of a box."""


def nbytes(row):
    """The same on every rank: sizes that differ by path."""
    return 10 ** len(row[0]) + row[1]


def table(held):
    boxes = [Box((offset, 0), (1, 3)) for _, offset in held]
    return SaveCandidates([path for path, _ in held], boxes, np.array([nbytes(row) for row in held]))


def names(held):
    """The rows, with keys that are equal to Python told apart."""
    return [(encode_path(path), offset) for path, offset in held]


@given(st.lists(rows, min_size=1, max_size=5), st.data())
def test_each_box_has_one_owner_among_its_holders(worlds, data):
    tables = [table(held) for held in worlds]
    sharing = Ownership.decode(assign_owners(tables).encode())
    owners = {}
    for rank, held in enumerate(worlds):
        for row, owner in zip(names(held), sharing.owners_of(rank, tables[rank]).tolist(), strict=True):
            assert row in names(worlds[owner])
            owners.setdefault(row, set()).add(owner)
    assert all(len(ranks) == 1 for ranks in owners.values())
    # The order of rows does not matter, nor whether a rank hears only what is for it.
    orders = [data.draw(st.permutations(held)) for held in worlds]
    turned = [table(order) for order in orders]
    again = assign_owners([SaveCandidates.decode(t.encode()) for t in turned])
    for rank, (held, order) in enumerate(zip(worlds, orders, strict=True)):
        heard = Ownership.decode(again.of([rank]).encode()).owners_of(rank, turned[rank]).tolist()
        mine = sharing.owners_of(rank, tables[rank]).tolist()
        assert dict(zip(names(order), heard, strict=True)) == dict(zip(names(held), mine, strict=True))


@given(st.integers(1, 6), st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_bytes_of_replicas_are_even(ranks, sizes):
    """No rank has more than its share and the largest box; so it is with any order of largest first."""
    paths = [("w", i) for i in range(len(sizes))]
    one = SaveCandidates(paths, [Box.whole((n,)) for n in sizes], np.array(sizes))
    sharing = assign_owners([one] * ranks)
    loads = [int(one.nbytes[sharing.owners_of(rank, one) == rank].sum()) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= math.ceil(sum(sizes) / ranks) + max(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@given(st.lists(st.tuples(rows, st.integers(1, 4)), min_size=1, max_size=4))
def test_each_box_goes_to_who_has_the_fewest_bytes_largest_first(held):
    """Also where ranks hold the same, and where boxes are in the tables of some of them only."""
    worlds = [world for world, replicas in held for _ in range(replicas)]
    tables = [table(world) for world in worlds]
    sharing = assign_owners(tables)
    boxes = {}
    for rank, world in enumerate(worlds):
        for row, key in zip(world, tables[rank].keys.tolist(), strict=True):
            boxes.setdefault((tuple(key), nbytes(row)), []).append(rank)
    load, owners = [0] * len(worlds), {}
    for (key, size), ranks in sorted(boxes.items(), key=lambda box: (len(box[1]) > 1, -box[0][1], box[0][0])):
        owners[key] = min(ranks, key=lambda rank: load[rank])
        load[owners[key]] += size
    for mine in tables:
        assert sharing.owners[mine.digest].tolist() == [owners[tuple(key)] for key in mine.keys.tolist()]


def test_what_a_rank_alone_holds_counts():
    shared, own = Box.whole((8,)), Box.whole((100,))
    tables = [
        SaveCandidates([("a",), ("own",)], [shared, own], np.array([8, 100])),
        SaveCandidates([("a",)], [shared], np.array([8])),
    ]
    sharing = assign_owners(tables)
    assert sharing.owners_of(0, tables[0]).tolist() == [1, 0]
    assert sharing.owners_of(1, tables[1]).tolist() == [1]


def test_many_replicas_are_told_little():
    """Groups of eight that hold the same: each hears of its own table."""
    groups = [
        SaveCandidates([("w", i) for i in range(50)], [Box((g, 0), (1, 4))] * 50, np.full(50, 4)) for g in range(20)
    ]
    sharing = assign_owners([groups[r // 8] for r in range(160)])
    saved = [int((sharing.owners_of(r, groups[r // 8]) == r).sum()) for r in range(160)]
    assert (min(saved), max(saved), sum(saved)) == (6, 7, 1000)
    assert len(sharing.of([17]).encode()) < 1000


def test_another_table_is_refused():
    one, other = table([(("a",), 0)]), table([(("b",), 0)])
    sharing = assign_owners([one])
    for rank, given_ in ((0, other), (1, one)):
        with pytest.raises(StateMismatch, match=f"rank {rank} holds is not what was shared out"):
            sharing.owners_of(rank, given_)
    with pytest.raises(ValueError, match="1 paths, 0 boxes"):
        SaveCandidates([("a",)], [], np.zeros(1))
    assert assign_owners([]).encode() == Ownership({}, {}).encode()


@pytest.mark.parametrize(
    ("what", "column", "numbers", "words"),
    [
        (SaveCandidates, "nbytes", [-1], "fewer than no bytes"),
        (SaveCandidates, "key", [1], "rows where 2 are right"),
        (Ownership, "rank.table", [1], "not listed"),
        (Ownership, "table.end", [2], "rows where 2 are right"),
        (Ownership, "table.digest", [2], "rows where 2 are right"),
        (Ownership, "rank.table", [0, 0], "rows where 1 are right"),
    ],
)
def test_bytes_are_checked(what, column, numbers, words):
    one = table([(("a",), 0)])
    found = Bytes(one.encode() if what is SaveCandidates else assign_owners([one]).encode())
    found.columns[column] = np.array(numbers, found.columns[column].dtype)
    next(item for item in found.listed if item[0] == column)[2] = len(numbers)
    with pytest.raises(FormatError, match=words):
        what.decode(found.encode())


@given(st.binary(max_size=100))
def test_other_bytes_are_refused(data):
    for what in (SaveCandidates, Ownership):
        with pytest.raises(FormatError, match="sharing"):
            what.decode(data)
