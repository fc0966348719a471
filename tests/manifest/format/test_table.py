"""Tables: what goes in comes out, in place, and nothing else is taken for a table."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.manifest_strategies import json_objects

from tierstate.manifest.arrays import check_rising, starts_of
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import table as col

names = st.text(max_size=6)
arrays = hnp.arrays(st.sampled_from(["<u1", "<u2", "<u4", "<u8", "<i8", ">u4", ">i8"]), st.integers(0, 70))
tables = st.tuples(
    json_objects.map(lambda d: {k: v for k, v in d.items() if k != "columns"}), st.dictionaries(names, arrays)
)


@given(tables)
def test_a_table_comes_back(table):
    head, columns = table
    data = col.encode_table(head, columns)
    found_head, found = col.decode_table(memoryview(data), "table")
    assert found_head == head
    assert list(found) == list(columns)
    for name, column in columns.items():
        assert np.array_equal(found[name], column)
        assert found[name].dtype == column.dtype.newbyteorder("<")


@given(tables)
def test_the_same_content_gives_the_same_bytes(table):
    head, columns = table
    turned = dict(reversed(list(head.items())))
    assert col.encode_table(head, columns) == col.encode_table(turned, {n: c.copy() for n, c in columns.items()})


@given(st.dictionaries(names, arrays, max_size=3))
@settings(max_examples=20)
def test_every_truncation_is_a_format_error(columns):
    data = col.encode_table({}, columns)
    for end in range(len(data)):
        with pytest.raises(FormatError):
            col.decode_table(memoryview(data)[:end], "table")
    with pytest.raises(FormatError, match="1 bytes after its last column"):
        col.decode_table(memoryview(data + b"\0"), "table")


def test_columns_are_aligned_views_that_cannot_be_written():
    data = bytearray(col.encode_table({}, {"a": np.arange(3, dtype="<u2"), "b": np.arange(5, dtype="<u8")}))
    _, columns = col.decode_table(memoryview(data), "table")
    base = np.frombuffer(data, "u1").__array_interface__["data"][0]
    for column in columns.values():
        at = column.__array_interface__["data"][0] - base
        assert 0 < at < len(data)
        assert at % col.COLUMN_ALIGNMENT == 0
        assert not column.flags.writeable


@pytest.mark.parametrize("bad", [np.zeros(2, bool), np.zeros(2, "f8"), np.zeros((2, 2), "u8"), np.zeros(2, "i4")])
def test_other_types_of_columns_are_not_written(bad):
    with pytest.raises(TypeError, match="a column is one of"):
        col.encode_table({}, {"a": bad})


def raw_table(listed, blob=b""):
    text = json.dumps({"columns": listed}).encode()
    head = len(text).to_bytes(4, "little") + text
    return head + bytes(-len(head) % col.COLUMN_ALIGNMENT) + blob


def test_what_a_listing_may_say():
    assert list(col.decode_table(memoryview(raw_table([["a", "<u1", 0], ["b", "<u1", 1]], b"x")), "table")[1]) == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    "listed",
    [
        None, {}, "a", [["a", "<u1", 0], ["a", "<u1", 1]], [["a", "<u1", True]], [["a", "<u1", 1.0]],
        [["a", "<u1", -1]],
        [["a", "<u1", 1 << 48]], [["a", "<f8", 0]], [["a", "|O", 0]], [["a", ["<u1"], 0]], [[1, "<u1", 1]],
        [["a", "<u1"]],
        [["a", "<u1", 1, 1]], [{"a": 1}], [["x" * i, "<u1", 0] for i in range(65)],
    ],
)  # fmt: skip
def test_listings_that_are_refused(listed):
    with pytest.raises(FormatError, match="lists"):
        col.decode_table(memoryview(raw_table(listed, b"x")), "table")


def test_a_head_that_could_not_be_read_back_is_not_written(monkeypatch):
    monkeypatch.setattr(col, "MAX_TABLE_HEAD", 100)
    with pytest.raises(FormatError, match="too long"):
        col.encode_table({"a": "x" * 100}, {})


@given(st.lists(st.text(), max_size=8))
def test_texts_come_back(texts):
    columns = col.text_columns(texts, "t")
    assert col.column_texts(columns, "t", "table") == texts
    assert col.column_texts(columns, "t", "table", len(texts)) == texts
    with pytest.raises(FormatError, match="rows where"):
        col.column_texts(columns, "t", "table", len(texts) + 1)


@given(hnp.arrays("<u8", st.integers(0, 6), elements=st.integers(0, 9) | st.just(2**64 - 1)), st.binary(max_size=9))
def test_arbitrary_pools_are_texts_or_a_format_error(ends, data):
    columns = {"t.end": ends, "t.text": np.frombuffer(data, "<u1")}
    rising = all(a <= b for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False))
    try:
        found = col.column_texts(columns, "t", "table")
    except FormatError:
        assert not (rising and data.isascii() and len(data) == (ends.tolist() or [0])[-1])
    else:
        assert "".join(found).encode() == data
        assert len(found) == len(ends)


def test_a_column_is_asked_for_by_name_type_and_length():
    columns = {"a": np.zeros(3, "<u4")}
    assert col.column(columns, "a", "<u4", "table", 3) is columns["a"]
    for name, dtype, count in [("b", "<u4", 3), ("a", "<u8", 3), ("a", "<u4", 2)]:
        with pytest.raises(FormatError, match="table"):
            col.column(columns, name, dtype, "table", count)


def test_a_field_is_asked_for_by_type():
    assert col.json_field({"a": 1}, "a", int, "table") == 1
    assert col.json_field({"a": True}, "a", bool, "table") is True
    for head in [{}, {"a": True}, {"a": "1"}, {"a": None}, {"a": [["x"] * 99] * 99}]:
        with pytest.raises(FormatError, match="no valid field 'a'") as caught:
            col.json_field(head, "a", (int, float), "table")
        assert len(str(caught.value)) < 300
    assert col.string_list({"a": ["x"]}, "a", "table") == ["x"]
    with pytest.raises(FormatError, match="not a string"):
        col.string_list({"a": ["x", 1]}, "a", "table")


@given(hnp.arrays("<u8", st.integers(0, 6), elements=st.integers(0, 9)))
def test_starts_are_the_ends_before(ends):
    ends = np.sort(ends)
    lengths = (ends - starts_of(ends)).tolist()
    assert np.array_equal(np.cumsum(lengths, dtype="u8"), ends)
    assert np.array_equal(check_rising(ends, "table"), ends)


def test_ends_that_fall_are_refused():
    with pytest.raises(FormatError, match="fall"):
        check_rising(np.array([1, 3, 2], "<u8"), "table")
