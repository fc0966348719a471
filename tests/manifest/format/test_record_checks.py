"""One forgery for each check of a record, refused in that check's own words: all else about it is right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.manifest_strategies import Table, sections_of, small_record

from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import (
    MAX_SECTIONS,
    Record,
    Summary,
    decode_index,
    decode_sections,
    encode_index,
    encode_sections,
)
from tierstate.manifest.format.table import MAX_DEPTH
from tierstate.manifest.format.version import Head, Version
from tierstate.providers.values.metadata import json_metadata


def resealed(data):
    return bytes(data[:-16]) + checksum(bytes(data[:-16]))


@pytest.mark.parametrize(
    ("at", "number", "width", "words"),
    [
        (8, 0, 4, "format number 0"),
        (8, 2**32 - 1, 4, "format number 4294967295"),
        (12, 2**32 - 1, 4, "lists 4294967295 sections"),
        (12, MAX_SECTIONS + 1, 4, "lists 65 sections"),
        (12, 0, 4, "has no section commit, layout, version"),
        (16, 2**63, 8, "truncated or padded"),
        (16, 0, 8, "truncated or padded"),
        (40, 0, 8, "'version' lies outside"),
        (40, 2**64 - 1, 8, "'version' lies outside"),
        (48, 2**64 - 1, 8, "'version' lies outside"),
        (48, 0, 8, "'version' is not what was written"),
        (56, 0, 8, "'version' is not what was written"),
        (24 + 48, int.from_bytes(b"version", "little"), 8, "two sections"),
        (24, int.from_bytes(b"\xff", "little"), 8, "no section version"),
    ],
)
def test_the_frame_is_checked(at, number, width, words):
    more = {f"more{i}": b"" for i in range(MAX_SECTIONS - 3)}  # so that a count too high still lies in the record
    data = bytearray(encode_sections(sections_of(small_record()) | more))
    if words.startswith("two"):  # the same place and checksum too, so that nothing but the name is wrong
        data[24 + 48 + 16 : 24 + 96] = data[24 + 16 : 24 + 48]
    data[at : at + width] = number.to_bytes(width, "little")
    with pytest.raises(FormatError, match=words):
        Record.decode(memoryview(resealed(data)))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("version", {"shard.chunk": [2], "chunk.digest": [0, 1, 2, 3]}, "do not add up"),
        ("version", {"shard.chunk": [4], "chunk.digest": range(8)}, "do not add up"),
        ("version", {"chunk.digest": [0, 1, 2, 3]}, "2 digests for 3 chunks"),
        ("version", {"chunk.digest": [0, 1, 2, 3, 4]}, "half a digest"),
        ("version", {"shard.leaf": [1]}, "names no leaf"),
        ("version", {"leaf.shape": [-40]}, "negative number"),
        ("version", {"shard.box": [-1, 40]}, "negative number"),
        ("version", {"shard.box": [1, 40]}, "has no part"),
        ("version", {"leaf.kind": [1]}, "points behind its list"),
        ("version", {"leaf.ndim": [2]}, "rows where 2 are right"),
        ("version", {"shard.rank": [0, 0]}, "rows where 1 are right"),
        ("version", {"leaf.path.end": [3]}, "rows where 3 are right"),
        ("layout", {"row.object": [0, 1, 0]}, "not listed"),
        ("layout", {"row.codec": [0, 1, 0]}, "not listed"),
        ("layout", {"row.offset": [0, 16, 33]}, "ends behind its pack"),
        ("layout", {"row.stored": [16, 16, 41]}, "ends behind its pack"),
        ("layout", {"row.stored": [16, 15, 8]}, "a length that is not its own"),
        ("layout", {"row.codec": [0, 0]}, "rows where 3 are right"),
        ("layout", {"object.key.text": list(b"packs/run/../../etc"), "object.key.end": [19]}, "is no pack"),
    ],
)
def test_the_tables_are_checked(name, changes, words):
    sections = sections_of(small_record())
    table = Table(sections[name])
    for column, numbers in changes.items():
        table.columns[column] = np.array(list(numbers), table.columns[column].dtype)
        next(item for item in table.listed if item[0] == column)[2] = len(table.columns[column])
    with pytest.raises(FormatError, match=words):
        Record.decode(memoryview(encode_sections(sections | {name: table.encode()})))


def test_huge_shapes_take_no_memory():
    """A leaf and a shard of 2^62 x 2^62 elements in a table of a few hundred bytes."""
    head = Head("run", 0, 0, 0.0, chunk=16)
    leaf = Leaf(("a",), Spec("tensor", shape=(2**62, 2**62)))
    section = Table(Version.build(head, [leaf], [], np.zeros((0, 2), "u8")).data)
    huge = {"shard.leaf": [0], "shard.rank": [0], "shard.box": [0, 0, 2**62, 2**62], "shard.chunk": [0]}
    for name, numbers in huge.items():
        section.columns[name] = np.array(numbers, section.columns[name].dtype)
        next(item for item in section.listed if item[0] == name)[2] = len(numbers)
    with pytest.raises(FormatError, match="has no part"):
        Version.decode(memoryview(section.encode()))


def nested(depth):
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize("depth", [MAX_DEPTH, 9 * MAX_DEPTH])
def test_json_that_code_could_not_walk_through_is_refused(depth):
    """`json.loads` reads what `json.dumps`, with an indent, and `dataclasses.asdict` cannot follow."""
    record = small_record()
    index = encode_index("run", [Summary.of(record)])
    section = Table(bytes(decode_sections(memoryview(index))["index"]))
    more = json.loads(section.columns["more"].tobytes())
    more[0]["metadata"] = {"a": nested(depth)}
    section.columns["more"] = np.frombuffer(json.dumps(more).encode(), "<u1")
    section.listed = [[name, dtype, len(section.columns[name])] for name, dtype, _ in section.listed]
    with pytest.raises(FormatError, match=f"nested deeper than {MAX_DEPTH}"):
        decode_index(memoryview(encode_sections({"index": section.encode()})), "run")
    for name in ("commit", "version"):
        sections = sections_of(record)
        if name == "commit":
            sections[name] = json.dumps({"id": "x", "more": nested(depth)}).encode()
        else:
            table = Table(sections[name])
            table.head["metadata"] = {"a": nested(depth)}
            sections[name] = table.encode()
        with pytest.raises(FormatError, match=f"nested deeper than {MAX_DEPTH}"):
            Record.decode(memoryview(encode_sections(sections)))


def test_json_that_a_save_takes_is_read():
    head = Head("run", 1, 1, 0.0, metadata=json_metadata({"a": nested(50)}))
    assert Head.decode(head.encode()) == head
