"""Versions: written, read back, and the same bytes for the same content."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import HEAD, small_version, strict, versions

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import spans
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import MAX_SHARD_BYTES, Head, ShardRow, Version


def rows_of(version):
    return [
        ShardRow(leaf, rank, box)
        for leaf, rank, box in zip(version.shard_leaf.tolist(), version.shard_rank.tolist(), version.boxes, strict=True)
    ]


@given(versions())
def test_a_version_comes_back_whole(version):
    found = Version.decode(memoryview(version.data))
    assert found.head == version.head
    assert [strict(leaf.path) for leaf in found.leaves] == [strict(leaf.path) for leaf in version.leaves]
    assert [leaf.spec for leaf in found.leaves] == [leaf.spec for leaf in version.leaves]
    assert rows_of(found) == rows_of(version)
    for name in ("chunk_end", "digests", "chunk_shard", "chunk_start", "chunk_nbytes", "chunk_leaf", "shard_nbytes"):
        assert np.array_equal(getattr(found, name), getattr(version, name)), name
    assert (found.id, found.data) == (version.id, version.data)
    assert found.id == checksum(version.data).hex()


@given(versions())
def test_the_same_content_gives_the_same_bytes(version):
    read = Version.decode(memoryview(version.data))
    turned = dataclasses.replace(read.head, metadata=dict(reversed(list(read.head.metadata.items()))))
    again = Version.build(turned, read.leaves, rows_of(read), read.digests)
    assert again.data == version.data
    assert again.id == version.id


@given(versions(), st.integers(0, 100))
def test_other_content_gives_another_name(version, step):
    other = dataclasses.replace(version, head=dataclasses.replace(version.head, step=step))
    assert (other.id == version.id) == (step == version.head.step)
    if len(version.digests):
        digests = version.digests.copy()
        digests[-1, 1] ^= np.uint64(1)
        assert dataclasses.replace(version, digests=digests).id != version.id


@given(versions())
def test_chunks_are_the_cut_shards(version):
    expected = [
        (shard, start, length)
        for shard, (leaf, box) in enumerate(zip(version.shard_leaf.tolist(), version.boxes, strict=True))
        for start, length in spans(box.volume * version.leaves[leaf].spec.itemsize, version.head.chunk)
    ]
    columns = (version.chunk_shard, version.chunk_start, version.chunk_nbytes)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected
    assert version.nbytes == sum(length for _, _, length in expected)
    for i in range(len(version.leaves)):
        rows = [r for r, (s, _, _) in enumerate(expected) if version.shard_leaf[s] == i]
        assert version.rows_of([i]).tolist() == rows
    assert version.rows_of([]).tolist() == []


@given(versions())
def test_what_a_newer_program_added_survives(version):
    head, columns = col.decode_table(memoryview(version.data), "version")
    section = col.encode_table(head | {"later": [1, {"x": None}]}, columns | {"z.later": np.arange(3, dtype="<u2")})
    found = Version.decode(memoryview(section))
    assert found.data == section
    assert found.id == checksum(section).hex() != version.id
    assert list(found.leaf_index) == list(version.leaf_index)
    passed_on = Record(found, Layout.build([None] * len(found.digests), {}), {"id": "x"}).encode()
    assert Record.decode(memoryview(passed_on)).version.data == section


def test_a_version_does_not_change_with_the_buffer_it_was_read_from():
    version = small_version()
    buffer = bytearray(version.data)
    found = Version.decode(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert found.id == version.id
    assert np.array_equal(found.digests, version.digests)
    with pytest.raises(ValueError, match="read-only"):
        found.digests[0] = 0


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 0}, {"chunk": -16}, {"chunk": 24}, {"chunk": (1 << 30) + 16}, {"digest": "md5"},
        {"seq": -1}, {"seq": 10**12}, {"step": 2**63}, {"time": float("nan")}, {"time": float("inf")}, {"time": -1.0},
        {"time": 10**4000}, {"world": 0}, {"world": 2**33},
    ],
)  # fmt: skip
def test_a_head_out_of_range_is_neither_built_nor_read(change):
    head = dataclasses.replace(HEAD, **change)
    with pytest.raises(FormatError, match=next(iter(change))):
        small_version(head)
    with pytest.raises(FormatError, match=next(iter(change))):
        Head.decode(head.encode())


@pytest.mark.parametrize(
    ("leaves", "rows", "count"),
    [
        ([Leaf(("a",), Spec("tensor", shape=(40,)))] * 2, [], 0),  # one path twice
        ([Leaf(("a",), Spec("tensor", itemsize=65536, shape=(1,)))], [], 0),  # no room for the item size
        ([Leaf(("a",), Spec("tensor", shape=(1,) * 256))], [], 0),  # no room for the axes
        ([Leaf(("a",), Spec("dict", shape=(40,)))], [ShardRow(0, 0, Box.whole((40,)))], 3),  # a container with bytes
        ([Leaf(("a",), Spec("tied", shape=(40,)))], [ShardRow(0, 0, Box.whole((40,)))], 3),
        ([Leaf(("a",), Spec("tensor", shape=(40,)))], [ShardRow(0, 0, Box((1,), (40,)))], 3),  # a box outside
        ([Leaf(("a",), Spec("tensor", shape=(40,)))], [ShardRow(0, 0, Box((0, 0), (40, 1)))], 3),
        ([Leaf(("a",), Spec("tensor", shape=(40,)))], [ShardRow(0, 0, Box.whole((40,)))], 2),  # digests missing
        ([Leaf(("a",), Spec("tensor", shape=(40,)))], [ShardRow(0, 0, Box.whole((40,)))], 4),
        ([Leaf(("a",), Spec("tensor", shape=(2**57,)))], [ShardRow(0, 0, Box.whole((2**57,)))], 0),
        (
            [Leaf((k,), Spec("tensor", shape=(16,))) for k in "ab"],
            [ShardRow(1, 0, Box.whole((16,))), ShardRow(0, 0, Box.whole((16,)))],  # not in the order of leaves
            2,
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(leaves, rows, count):
    with pytest.raises(FormatError, match="version"):
        Version.build(HEAD, leaves, rows, np.zeros((count, 2), "u8"))


@pytest.mark.parametrize("shards", [1, 4095, 4096, 4097, 8192])
def test_more_chunks_than_64_bits_can_count_are_refused(shards):
    """4096 shards of as many bytes as one may have, in the shortest chunks, are 2**64: counted as none."""
    leaf = Leaf(("w",), Spec("tensor", itemsize=1, shape=(MAX_SHARD_BYTES,)))
    rows = [ShardRow(0, 0, Box.whole(leaf.spec.shape))] * shards
    with pytest.raises(FormatError, match=r"digests for|ends that fall"):
        Version.build(dataclasses.replace(HEAD, chunk=16), [leaf], rows, np.zeros((0, 2), "<u8"))


def test_keys_equal_to_python_are_leaves_of_their_own():
    leaves = [Leaf((k,), Spec("dict")) for k in (1, True, 1.0, "1")]
    found = Version.decode(memoryview(Version.build(HEAD, leaves, [], np.zeros((0, 2), "u8")).data))
    assert [type(leaf.path[0]) for leaf in found.leaves] == [int, bool, float, str]


def test_a_version_is_continued_while_another_thread_asks_for_its_columns():
    """A tier still publishes it, when the next save is made of it; what is found of its columns is kept on it."""
    version = small_version()
    columns = [name for name, found in vars(Version).items() if isinstance(found, functools.cached_property)]

    class Growing(dict):
        def items(self):
            for at, item in enumerate(super().items()):
                getattr(version, columns[at % len(columns)])
                yield item

    object.__setattr__(version, "__dict__", Growing(version.__dict__))
    again = version.again(dataclasses.replace(version.head, step=7), version.digests)
    assert again.head.step == 7
    assert again.catalog is version.catalog
