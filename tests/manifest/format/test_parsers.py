"""Parsers are total: whatever the bytes, they give a record or a FormatError, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.manifest_strategies import Table, json_values, records, sections_of

from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import table as col
from tierstate.manifest.format.record import RECORD_MAGIC, Record, encode_sections

LIMIT = 8 << 20
"""Bytes that reading some kilobytes may take at most, whatever they say of themselves."""

steady = settings(
    max_examples=max(80, settings().max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def outcome(data):
    """The record, fully used, or None where it was refused; every other error, or too much memory, fails the test."""
    record = None
    tracemalloc.start()
    try:
        with contextlib.suppress(FormatError):
            record = Record.decode(memoryview(data))
            use(record)
        assert tracemalloc.get_traced_memory()[1] < LIMIT + 40 * len(data)
    finally:
        tracemalloc.stop()
    return record


def use(record):
    """What is asked of any record that was accepted."""
    version, layout = record.version, record.layout
    rows = len(version.digests)
    assert len(version.chunk_nbytes) == len(version.chunk_leaf) == rows
    assert not rows or (version.chunk_nbytes.min() > 0 and version.chunk_nbytes.max() <= version.head.chunk)
    assert version.nbytes == int(version.chunk_nbytes.sum())
    assert [leaf.name.isprintable() for leaf in version.leaves].count(False) == 0
    for row in range(rows):
        place = layout.place(row)
        assert place is None or place.offset + place.stored <= layout.size_of(place.object)
        base = layout.base(row)
        assert (base is not None) == (place is not None and place.codec == "delta")
        assert base is None or (base.codec != "delta" and base.offset + base.stored <= layout.size_of(base.object))
    assert layout.stored_nbytes >= 0
    assert f"{version.head.seq:012d} {float(version.head.time)}"


def refused(data):
    with pytest.raises(FormatError) as caught:
        Record.decode(memoryview(data))
    assert len(str(caught.value)) < 1000


@given(st.binary(max_size=300))
@example(b"")
@example(RECORD_MAGIC)
@example(RECORD_MAGIC + bytes(100))
@steady
def test_arbitrary_bytes_are_refused(data):
    refused(data)
    refused(RECORD_MAGIC + data)


@pytest.mark.slow
@given(records())
@settings(steady, max_examples=5)
def test_every_truncation_is_refused(record):
    data = record.encode()
    for end in range(len(data)):
        refused(data[:end])
    refused(data + b"\0")


@given(records(), st.data())
@steady
def test_every_flipped_bit_is_noticed(record, data):
    changed = bytearray(record.encode())
    for bit in data.draw(st.sets(st.integers(0, 8 * len(changed) - 1), min_size=1, max_size=20)):
        changed[bit // 8] ^= 1 << bit % 8
        refused(changed)
        changed[bit // 8] ^= 1 << bit % 8
    assert outcome(changed)


@given(records(), records(), st.data())
@steady
def test_spliced_records_are_noticed(one, other, data):
    one, other = one.encode(), other.encode()
    cut = data.draw(st.integers(0, len(one)))
    spliced = one[:cut] + other[data.draw(st.integers(0, len(other))) :]
    if spliced not in (one, other):
        refused(spliced)


@pytest.mark.slow
@given(records(), st.sampled_from(["version", "layout", "commit"]), st.data())
@steady
def test_changed_sections_with_right_checksums(record, name, data):
    """Flips, cuts and insertions behind the checksums' back reach the inner parsers."""
    sections = sections_of(record)
    section = bytearray(sections[name])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(section)))
        section[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    outcome(encode_sections(sections | {name: bytes(section)}))


@pytest.mark.slow
@given(records(), st.data())
@steady
def test_sections_of_other_records(record, data):
    """A layout of another version, a version in the place of a layout."""
    other = sections_of(data.draw(records()))
    mixed = sections_of(record) | {data.draw(st.sampled_from(["version", "layout", "commit"])): other["version"]}
    outcome(encode_sections(mixed))
    outcome(encode_sections(sections_of(record) | {"layout": other["layout"]}))
    outcome(encode_sections(sections_of(record) | {"version": other["version"]}))


@given(st.dictionaries(st.text("abvl", max_size=16), st.binary(max_size=90), max_size=4), st.data())
@steady
def test_arbitrary_sections(sections, data):
    names = st.sampled_from(["version", "layout", "commit"])
    outcome(encode_sections(sections | data.draw(st.dictionaries(names, st.binary(max_size=90)))))


# Tables taken apart, changed in one place, and put together again with every checksum right.

bad_numbers = st.sampled_from([0, 1, -1, 2, 255, 2**31, 2**32 - 1, 2**47, 2**48, 2**62, 2**63 - 1, 2**64 - 1, 10**400])
bad_fields = st.one_of(
    bad_numbers,
    json_values,
    st.sampled_from([float("nan"), float("inf"), -0.5, True, "16", "", None, [], {}, [[]], ["x"], [1], {"a": 1}]),
    st.integers(1, 400).map(lambda n: json.loads("[" * n + "]" * n)),
)
bad_texts = st.one_of(
    st.sampled_from(
        ["", "[]", "[1]", "[1.5]", "[NaN]", "{}", "null", '[{"float":"0x1p9999"}]', "[" * 5000, '["a"]', "\0"]
    ),
    st.text(max_size=20),
)


def change_field(table, data):
    name = data.draw(st.sampled_from(sorted(table.head)))
    if data.draw(st.booleans()):
        table.head[name] = data.draw(bad_fields)
    else:
        del table.head[name]


def change_listing(table, data):
    item = data.draw(st.sampled_from(table.listed))
    part = data.draw(st.integers(0, 2))
    dtypes = st.sampled_from(["<u1", "<u2", "<u4", "<u8", "<i8", "<f8", "|O", "<U9", ">u4", ""])
    names = st.sampled_from([other[0] for other in table.listed])
    item[part] = data.draw([bad_fields | names, bad_fields | dtypes, bad_fields][part])


def change_listing_as_a_whole(table, data):
    table.listed = data.draw(
        st.one_of(
            st.just(table.listed * 2),
            st.just(table.listed[::-1]),
            st.just(table.listed[1:]),
            st.just([["x" * i, "<u1", 0] for i in range(100)]),
            bad_fields,
        )
    )


def change_number(table, data):
    filled = [name for name, column in table.columns.items() if len(column)]
    if not filled:
        return
    name = data.draw(st.sampled_from(filled))
    column = table.columns[name] = table.columns[name].copy()
    info = np.iinfo(column.dtype)
    near = st.sampled_from([info.min, info.max, 0, 1, 2, min(2**62, info.max), min(2**40, info.max)])
    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(near)


def change_length(table, data):
    name = data.draw(st.sampled_from(sorted(table.columns)))
    column = table.columns[name]
    table.columns[name] = np.resize(column, data.draw(st.integers(0, 2 * len(column) + 2)))
    if data.draw(st.booleans()):
        next(item for item in table.listed if item[0] == name)[2] = len(table.columns[name])


def change_texts(table, data):
    pools = [name.removesuffix(".end") for name in table.columns if name.endswith(".end")]
    name = data.draw(st.sampled_from(pools))
    count = len(table.columns[f"{name}.end"])
    table.columns |= col.text_columns(data.draw(st.lists(bad_texts, min_size=count, max_size=count)), name)
    for item in table.listed:
        item[2] = len(table.columns[item[0]])


CHANGES = [change_field, change_listing, change_listing_as_a_whole, change_number, change_length, change_texts]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@given(record=records(), name=st.sampled_from(["version", "layout"]), data=st.data())
@steady
def test_changed_tables_with_right_checksums(change, record, name, data):
    sections = sections_of(record)
    table = Table(sections[name])
    change(table, data)
    outcome(encode_sections(sections | {name: table.encode()}))


@given(record=records(), name=st.sampled_from(["version", "layout"]), data=st.data())
@steady
def test_tables_changed_many_times(record, name, data):
    sections = sections_of(record)
    table = Table(sections[name])
    for change in data.draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4)):
        with contextlib.suppress(TypeError, IndexError, KeyError, StopIteration, AttributeError):
            change(table, data)  # what an earlier change has left may have no such place any more
    outcome(encode_sections(sections | {name: table.encode()}))


@pytest.mark.slow
@given(records())
@settings(steady, max_examples=20)
def test_a_table_taken_apart_and_put_together_is_accepted(record):
    """Else the changes above would be refused for no reason of theirs."""
    sections = sections_of(record)
    whole = {name: Table(sections[name]).encode() for name in ("version", "layout")}
    assert outcome(encode_sections(sections | whole)) is not None


@pytest.mark.parametrize(
    "bomb", ["[" * 10**6, '{"a":' * 10**6, '{"columns":' * 10**5, "[" * 900 + "]" * 900, "9" * 5000]
)
@pytest.mark.parametrize("name", ["version", "layout", "commit"])
def test_json_bombs_are_refused(bomb, name):
    data = bomb.encode()
    section = data if name == "commit" else len(data).to_bytes(4, "little") + data
    assert outcome(encode_sections({"version": b"", "layout": b"", "commit": b'{"id":""}', name: section})) is None


@given(st.integers(300, 1100), st.sampled_from(["requires", "kinds", "dtypes", "columns", "metadata", "seq", "run"]))
@settings(steady, max_examples=100)
def test_nests_just_within_the_reach_of_the_json_parser(depth, field):
    head = {"requires": [], "columns": [], field: [0]}
    text = json.dumps(head).replace("[0]", "[" * depth + "]" * depth).encode()
    section = len(text).to_bytes(4, "little") + text
    assert outcome(encode_sections({"version": section, "layout": section, "commit": b'{"id":""}'})) is None
