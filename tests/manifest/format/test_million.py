"""A million chunks: right, in columns, and without a Python object for each."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from tierstate.manifest.boxes import Box, Boxes
from tierstate.manifest.digest import DigestIndex
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Shards, Version
from tierstate.manifest.history.diff import diff_versions
from tierstate.manifest.reshard.coverage import check_complete

pytestmark = pytest.mark.slow

COUNT, LEAVES, MIB = 1_000_000, 100, 1 << 20


@pytest.fixture(scope="module")
def version():
    each = 16 * COUNT // LEAVES - 8  # the last chunk of each leaf is half as long
    leaves = [Leaf(("layers", i), Spec("tensor", shape=(each,))) for i in range(LEAVES)]
    rows = [ShardRow(i, 0, Box.whole((each,))) for i in range(LEAVES)]
    digests = np.random.default_rng(0).integers(0, 2**63, (COUNT, 2), "u8")
    return Version.build(Head("run", 1, 1, 0.0, chunk=16), leaves, rows, digests)


@pytest.fixture(scope="module")
def layout(version):
    offsets = np.arange(COUNT, dtype="<u8") * 16
    return Layout(
        ("packs/run/1-0-0-x",), np.array([16 * COUNT], "<u8"), ("raw",),
        np.zeros(COUNT, "<u4"), offsets, version.chunk_nbytes.astype("<u4"), np.zeros(COUNT, "<u1"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(version, layout):
    return Record(version, layout, {"id": "x"}).encode()


@pytest.fixture
def timed(record_property, request):
    """Times a call and tells; times are for people, and no test depends on them."""

    def call(what, function):
        start = time.perf_counter()
        found = function()
        took = time.perf_counter() - start
        record_property(what, took)
        print(f"{request.node.name}: {what}: {took:.3f} s")
        return found

    return call


def test_a_record_of_a_million_rows(version, layout, data, timed):
    record = Record(version, layout, {"id": "x"})
    del version.__dict__["data"]
    assert timed("encode", record.encode) == data
    assert 33 * COUNT < len(data) < 33 * COUNT + 64 * 1024
    found = timed("decode", lambda: Record.decode(memoryview(data)))
    assert np.array_equal(found.version.digests, version.digests)
    assert found.version.id == version.id
    assert found.version.nbytes == 16 * COUNT - 8 * LEAVES == found.layout.stored_nbytes
    assert found.layout.place(COUNT - 1)[1:4] == (16 * (COUNT - 1), 8, "raw")


def test_reading_a_million_rows_makes_no_object_for_each(data):
    tracemalloc.start()
    try:
        record = Record.decode(memoryview(data))
        blocks = sum(s.count for s in tracemalloc.take_snapshot().statistics("filename"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(record.version.digests) == COUNT
    assert blocks < 20_000
    assert peak < 130 * MIB


def test_many_shards_make_no_object_for_each():
    """Of 2,000 ranks, each with a row of every leaf."""
    ranks = 2000
    leaves = [Leaf(("layers", i), Spec("tensor", shape=(ranks, 16))) for i in range(LEAVES)]
    count = ranks * LEAVES
    rank = np.tile(np.arange(ranks), LEAVES)
    offset, shape = np.zeros((count, 2), "<i8"), np.tile(np.array([1, 16], "<i8"), count)
    offset[:, 0] = rank
    boxes = Boxes(np.full(count, 2), offset.reshape(-1), shape)
    shards = Shards(np.repeat(np.arange(LEAVES), ranks).astype("<u4"), rank.astype("<u4"), boxes)
    built = Version.build(Head("run", 1, 1, 0.0, chunk=16), leaves, shards, np.zeros((count, 2), "u8"))
    data = built.data
    tracemalloc.start()
    try:
        found = Version.decode(memoryview(data))
        check_complete(found)
        blocks = sum(s.count for s in tracemalloc.take_snapshot().statistics("filename"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.boxes[count - 1] == Box((ranks - 1, 0), (1, 16))
    assert found.boxes == built.boxes
    assert blocks < 20_000
    assert peak < 6 * len(data)


def test_a_diff_of_a_million_rows(version, timed):
    digests = version.digests.copy()
    changed = np.arange(0, COUNT // 2, 1000)
    digests[changed, 1] ^= np.uint64(1)
    other = Version(version.head, version.leaves, version.shard_leaf, version.shard_rank, version.boxes,
                    version.chunk_end, digests)  # fmt: skip
    found = timed("aligned", lambda: diff_versions(version, other))
    assert [d.change for d in found] == ["changed"] * (LEAVES // 2) + ["same"] * (LEAVES // 2)
    assert sum(d.changed_nbytes for d in found) == 16 * len(changed)
    shorter = Version.build(
        version.head, version.leaves[1:], [ShardRow(i, 0, b) for i, b in enumerate(version.boxes[1:])],
        digests[COUNT // LEAVES :],
    )  # fmt: skip
    moved = timed("unaligned", lambda: diff_versions(version, shorter))
    assert moved[:-1] == found[1:]
    assert moved[-1].change == "removed"


def test_an_index_of_a_million_rows(version, timed):
    index = timed("build", lambda: DigestIndex(version.digests))
    assert np.array_equal(timed("find all", lambda: index.find(version.digests)), np.arange(COUNT))
    assert index.find(version.digests ^ np.uint64(2**63)).max() == -1
