"""Parts: as bytes and back, joined to a whole record, cut out of it again; and no bytes do harm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_parts import parts_of, worlds
from support.manifest_strategies import Table, layouts, place, records, small_record, small_version, strict

from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import Leaf, LeafTable, Spec
from tierstate.manifest.format.record import Record, decode_sections, encode_sections
from tierstate.manifest.format.version import Version
from tierstate.manifest.sharded.merge import join_layouts, merge_parts
from tierstate.manifest.sharded.part import PartReader, encode_part, part_of


def places(layout):
    return [layout.place(row) for row in range(len(layout.object))]


@st.composite
def parts_with_layouts(draw):
    """Parts of a world, each with a layout in packs of its own."""
    found = []
    for rank, version in enumerate(parts_of(draw(worlds()))):
        layout = draw(layouts(version))
        own = tuple(key.replace("packs/run/", f"packs/run/{rank}-") for key in layout.objects)
        found.append(Record(version, dataclasses.replace(layout, objects=own), {"id": f"x{rank}"}))
    return found


@given(records())
def test_a_part_comes_back(record):
    reader = PartReader()
    for found in (reader.decode(encode_part(record)), reader.decode(memoryview(encode_part(record)))):
        assert found.version.data == dataclasses.replace(record.version).data
        assert found.layout.encode() == record.layout.encode()
        assert found.commit == record.commit


@given(parts_with_layouts())
def test_parts_are_joined_and_cut_out_again(parts):
    version, rows, _ = merge_parts([p.version for p in parts])
    layout = join_layouts(version, [(r, p.layout) for r, p in zip(rows, parts, strict=True)])
    record = Record.decode(memoryview(Record(version, layout, {"id": "x"}).encode()))
    found = places(record.layout)
    for part, became in zip(parts, rows, strict=True):
        for at, row in zip(places(part.layout), became.tolist(), strict=True):
            assert row < 0 or found[row] == at
    for rank, (part, became) in enumerate(zip(parts, rows, strict=True)):
        mine = part_of(record, rank)
        kept = [i for i, row in enumerate(became.tolist()) if row >= 0]
        # The order of a part's shards is its own, that of the whole's by box.
        order = sorted(kept, key=lambda i: became[i])
        assert places(mine.layout) == [part.layout.place(i) for i in order]
        assert mine.version.digests.tolist() == part.version.digests[order].tolist()
        assert set(mine.version.shard_rank.tolist()) <= {rank}
        assert Record.decode(memoryview(mine.encode())).version.id == mine.version.id


@given(parts_with_layouts())
def test_the_parts_of_a_whole_are_the_whole(parts):
    version, rows, _ = merge_parts([p.version for p in parts])
    record = Record(
        version, join_layouts(version, [(r, p.layout) for r, p in zip(rows, parts, strict=True)]), {"id": "x"}
    )
    again = [part_of(record, rank) for rank in range(len(parts))]
    same, back, _ = merge_parts([p.version for p in again])
    assert same.data == version.data
    layout = join_layouts(same, [(r, p.layout) for r, p in zip(back, again, strict=True)])
    assert places(layout) == places(record.layout)


@pytest.mark.slow
@given(parts_with_layouts(), st.data())
def test_rows_that_nobody_has_are_absent(parts, data):
    version, rows, _ = merge_parts([p.version for p in parts])
    some = data.draw(st.sets(st.integers(0, len(parts) - 1)))
    layout = join_layouts(version, [(rows[i], parts[i].layout) for i in sorted(some)])
    layout.check(version)
    there = {row for i in some for row in rows[i][parts[i].layout.present].tolist() if row >= 0}
    assert np.flatnonzero(layout.present).tolist() == sorted(there)


def test_what_does_not_fit_is_not_joined():
    version = small_version()
    here = Layout.build([place(), None, None], {place().object: 40})
    longer = dataclasses.replace(here, object_sizes=here.object_sizes + 1)
    rows = np.arange(3)
    with pytest.raises(FormatError, match="40 bytes long by one rank's part and 41"):
        join_layouts(version, [(rows, here), (rows, longer)])
    for wrong in (np.arange(2), rows + 1):
        with pytest.raises(FormatError, match="a layout of 3, or is another's"):
            join_layouts(version, [(wrong, here)])
    many = [Layout.build([place(0, 9, f"c{i}"), None, None], {place().object: 40}) for i in range(257)]
    join_layouts(version, [(rows, layout) for layout in many[:256]])
    with pytest.raises(FormatError, match="257 codecs"):
        join_layouts(version, [(rows, layout) for layout in many])


@pytest.mark.slow
@given(st.lists(parts_with_layouts(), min_size=1, max_size=2))
def test_one_reader_reads_the_parts_of_all(worlds_):
    reader = PartReader()
    for parts in worlds_:
        read = [reader.decode(encode_part(p)) for p in parts]
        assert (
            merge_parts([p.version for p in read]).version.data == merge_parts([p.version for p in parts]).version.data
        )


@pytest.mark.slow
def test_leaves_that_ranks_share_are_read_once():
    common = [Leaf(("w", i), Spec("tensor", shape=(4,))) for i in range(500)]
    layout = Layout.build([], {})
    digests = np.zeros((0, 2), "u8")
    reader, read, pieces = PartReader(), [], []
    for rank in range(20):
        own = Leaf(("own", rank), Spec("tensor", shape=(4,)))
        for leaves in (common, [*common[:250], own, *common[250:]]):
            version = Version.build(small_version().head, leaves, [], digests)
            read.append(reader.decode(encode_part(Record(version, layout, {"id": "x"}))).version)
            assert [strict(leaf.path) for leaf in read[-1].leaves] == [strict(leaf.path) for leaf in leaves]
    assert len({id(v.leaves) for v in read[::2]}) == 1
    pieces = [{id(p) for p in v.catalog.joined} for v in read]
    assert len(pieces[0]) > 5
    assert all(len(found - pieces[0]) <= 2 for found in pieces)
    assert len({id(leaf) for v in read for leaf in v.leaves}) < 500 + 20 * 200


def sections(record):
    return {name: bytes(data) for name, data in decode_sections(memoryview(encode_part(record))).items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"piece.end": [10]}, "do not add up"),
        ({"piece.end": [10, 5]}, "ends that fall"),
        ({"piece.end": []}, "do not add up"),
        ({"shard.leaf": [1]}, "names no leaf"),
        ({"shard.leaf": [0, 0]}, "rows where 2 are right"),
        ({"shard.box": [-1, 40]}, "negative number"),
        ({"shard.box": [1, 40]}, "has no part"),
        ({"shard.box": [40]}, "rows where 2 are right"),
        ({"chunk.digest": [1, 2, 3]}, "half a digest"),
        ({"chunk.digest": [1, 2]}, "1 digests for 3 chunks"),
        ({"row.object": [0, 1, 0]}, "not listed"),
        ({"row.stored": [16, 16, 41]}, "ends behind its pack"),
        ({"row.codec": [0, 0]}, "rows where 3 are right"),
    ],
)
def test_a_part_is_checked(changes, words):
    found = sections(small_record())
    table = Table(found["part"])
    for column, numbers in changes.items():
        table.columns[column] = np.array(numbers, table.columns[column].dtype)
        next(item for item in table.listed if item[0] == column)[2] = len(numbers)
    with pytest.raises(FormatError, match=words):
        PartReader().decode(encode_sections(found | {"part": table.encode()}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"commit": {}}, "without an id"),
        ({"commit": []}, "no valid field 'commit'"),
        ({"seq": -1}, "part has seq"),
        ({"requires": ["holograms"]}, "part requires holograms"),
        ({"codecs": []}, "not listed"),
    ],
)
def test_the_head_of_a_part_is_checked(changes, words):
    found = sections(small_record())
    table = Table(found["part"])
    table.head.update(changes)
    with pytest.raises(FormatError, match=words):
        PartReader().decode(encode_sections(found | {"part": table.encode()}))
    with pytest.raises(FormatError, match="without an id"):
        encode_part(dataclasses.replace(small_record(), commit={"id": 1}))


def with_piece(data):
    """A part whose leaves are this piece."""
    found = sections(small_record())
    table = Table(found["part"])
    table.columns["piece.end"] = np.array([len(data)], "<u8")
    return encode_sections(found | {"part": table.encode(), "pieces": data})


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (b"", "cut off"),
        (b"none", "cannot be read"),
        (zlib.compress(b"no table at all"), "version|part"),
        (zlib.compress(bytes(8))[:-1], "cut off"),
        (zlib.compress(bytes(8)) + b"more", "cut off, or longer"),
    ],
)
def test_a_piece_is_checked(piece, words):
    with pytest.raises(FormatError, match=words):
        PartReader().decode(with_piece(piece))


@pytest.mark.slow
def test_a_piece_that_grows_without_end_takes_no_memory(monkeypatch):
    monkeypatch.setattr("tierstate.manifest.sharded.part.MAX_PIECE_BYTES", 1 << 20)
    data = with_piece(zlib.compress(bytes(64 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="longer than 1048576"):
            PartReader().decode(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    wide = Leaf(("a",), Spec("tensor", shape=(40,), attrs={"x": "y" * (1 << 20)}))
    record = small_record()
    record = dataclasses.replace(record, version=dataclasses.replace(record.version, leaves=(wide,)))
    with pytest.raises(FormatError, match="at most 1048576 are read"):
        encode_part(record)


@pytest.mark.parametrize("name", ["pieces", "part"])
def test_a_missing_section_is_named(name):
    found = sections(small_record())
    del found[name]
    with pytest.raises(FormatError, match=f"part has no section {name}"):
        PartReader().decode(encode_sections(found))
    with pytest.raises(FormatError, match="record has no section commit, layout, version"):
        Record.decode(memoryview(encode_part(small_record())))
    with pytest.raises(FormatError, match="part has no section part, pieces"):
        PartReader().decode(small_record().encode())


@pytest.mark.slow
@given(
    records(),
    st.sampled_from(["pieces", "part"]),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=9), st.integers(0, 9)), min_size=1, max_size=3),
)
def test_changed_bytes_are_read_or_refused(record, name, how):
    """With checksums that are right: what lies behind them is looked at."""
    found = sections(record)
    data = bytearray(found[name])
    for at, new, old in how:
        at %= len(data) + 1
        data[at : at + old] = new
    whole = encode_sections(found | {name: bytes(data)})
    tracemalloc.start()
    try:
        with contextlib.suppress(FormatError):
            read = PartReader().decode(whole)
            assert len(read.version.chunk_nbytes) == len(places(read.layout))
            assert json.dumps(dict(read.commit))
        assert tracemalloc.get_traced_memory()[1] < (8 << 20) + 40 * len(whole)
    finally:
        tracemalloc.stop()
    with pytest.raises(FormatError):
        PartReader().decode(whole[:-20])


def test_the_same_part_gives_the_same_bytes():
    assert encode_part(small_record()) == encode_part(small_record())
    leaves = small_version().leaves
    assert LeafTable.of(leaves).digest == LeafTable.concat([LeafTable.of(leaves), LeafTable.of([])]).digest
