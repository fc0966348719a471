"""Tables: the binary container of manifests, with a small JSON head and fixed-width columns (little-endian arrays).

Columns are read as views of the bytes, without parsing rows. Every length is checked before it is used, since the
bytes may be untrusted.

::

    u32 length of the head | head: ASCII JSON | padding | column 0 | padding | column 1 | ...

All integers are little-endian. The head's ``columns`` lists ``[name, dtype, count]`` in order; every column starts at
a multiple of 64 bytes, counted from the table's own start, and nothing follows the last one.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tierstate.manifest.arrays import Array, check_rising
from tierstate.manifest.errors import FormatError

Columns = dict[str, Array]


COLUMN_ALIGNMENT = 64


MAX_TABLE_HEAD = 64 << 20


MAX_COLUMNS = 64


MAX_DEPTH = 100
"""Objects and lists of JSON within each other, at most: twice what a save takes as metadata."""


_DTYPES = frozenset({"<u1", "<u2", "<u4", "<u8", "<i8"})


def encode_table(head: Mapping[str, Any], columns: Mapping[str, Array]) -> bytes:
    """A table as bytes; ``head`` holds JSON types only. The same content always gives the same bytes."""
    listed = [[name, _dtype(column), len(column)] for name, column in columns.items()]
    text = json.dumps({**head, "columns": listed}, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > MAX_TABLE_HEAD:
        raise FormatError(f"a table's head of {len(text)} bytes is too long; at most {MAX_TABLE_HEAD} are read back")
    pieces: list[bytes | memoryview] = [len(text).to_bytes(4, "little"), text]
    at = 4 + len(text)
    for column in columns.values():
        pieces += [bytes(-at % COLUMN_ALIGNMENT), np.ascontiguousarray(column, _dtype(column)).view(np.uint8).data]
        at += len(pieces[-2]) + len(pieces[-1])
    return b"".join(pieces)


def decode_table(data: memoryview, what: str) -> tuple[dict[str, Any], Columns]:
    """The head and the columns, as read-only views of ``data``.

    Args:
        what: the table's name in messages.

    Raises:
        FormatError: the bytes are not a table, or lengths do not add up.
    """
    data = data.toreadonly()
    head, end = _decode_head(data, what)
    columns: Columns = {}
    for item in _listed(head, what):
        name, dtype, count = item
        start = end + -end % COLUMN_ALIGNMENT
        end = start + count * np.dtype(dtype).itemsize
        if end > len(data):
            raise FormatError(f"{what} is truncated: column {name!r} ends at byte {end} of {len(data)}")
        columns[name] = np.frombuffer(data[start:end], dtype=dtype)
    if end != len(data):
        raise FormatError(f"{what} has {len(data) - end} bytes after its last column")
    return head, columns


def _decode_head(data: memoryview, what: str) -> tuple[dict[str, Any], int]:
    if len(data) < 4:
        raise FormatError(f"{what} is truncated: {len(data)} bytes")
    end = 4 + int.from_bytes(data[:4], "little")
    if end > len(data) or end > MAX_TABLE_HEAD + 4:
        raise FormatError(f"{what} is truncated: its head ends at byte {end} of {len(data)}")
    try:
        head = json.loads(bytes(data[4:end]).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} has a head that is not JSON") from error
    if not isinstance(head, dict):
        raise FormatError(f"{what} has a head that is not a JSON object")
    return head, end


def _listed(head: dict[str, Any], what: str) -> list[tuple[str, str, int]]:
    listed = head.pop("columns", None)
    if not isinstance(listed, list) or len(listed) > MAX_COLUMNS:
        raise FormatError(f"{what} lists no columns")
    found = [tuple(item) for item in listed if isinstance(item, list) and _is_column(item)]
    if len(found) != len(listed) or len({item[0] for item in found}) != len(listed):
        raise FormatError(f"{what} lists a column that is not [name, dtype, count]")
    return found


def _is_column(item: list[Any]) -> bool:
    return (
        len(item) == 3
        and isinstance(item[0], str)
        and isinstance(item[1], str)
        and item[1] in _DTYPES
        and type(item[2]) is int
        and 0 <= item[2] < 1 << 48
    )


def _dtype(column: Array) -> str:
    dtype = column.dtype.newbyteorder("<").str.replace("|", "<")
    if dtype not in _DTYPES or column.ndim != 1:
        raise TypeError(f"a column is one of {sorted(_DTYPES)} and flat, not {column.dtype} with {column.ndim} axes")
    return dtype


def json_field(head: Mapping[str, Any], name: str, kind: type | tuple[type, ...], what: str) -> Any:
    """The field of a head, which must have this JSON type.

    Raises:
        FormatError: it is absent or of another type.
    """
    value = head.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise FormatError(f"{what} has no valid field {name!r}: {reprlib.repr(value)}")
    return value


def check_depth(value: Any, what: str) -> None:
    """Check that JSON values are not nested so deeply that code which prints or copies them would end in a
    RecursionError: `json.loads` reads more of them than that code can walk through.

    Raises:
        FormatError: they are nested deeper than `MAX_DEPTH`.
    """
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise FormatError(f"{what} nested deeper than {MAX_DEPTH}")
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]


def string_list(head: Mapping[str, Any], name: str, what: str) -> list[str]:
    """The field of a head, which must be a list of strings.

    Raises:
        FormatError: it is absent or not a list of strings.
    """
    found: list[str] = json_field(head, name, list, what)
    for item in found:
        if not isinstance(item, str):
            raise FormatError(f"{what}: field {name!r} lists {reprlib.repr(item)}, which is not a string")
    return found


def column(columns: Columns, name: str, dtype: str, what: str, count: int | None = None) -> Array:
    """The column of this name, which must have this dtype and, if given, this length.

    Raises:
        FormatError: it is absent, of another type or of another length.
    """
    found = columns.get(name)
    if found is None or found.dtype.newbyteorder("<").str.replace("|", "<") != dtype:
        raise FormatError(f"{what} has no column {name!r} of type {dtype}")
    if count is not None and len(found) != count:
        raise FormatError(f"{what}: column {name!r} has {len(found)} rows where {count} are right")
    return found


def text_columns(texts: list[str], name: str) -> Columns:
    """Strings as two columns: their UTF-8 bytes, concatenated, and the end of each."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(e) for e in encoded], dtype="<u8") if encoded else np.zeros(0, "<u8")
    return {f"{name}.text": np.frombuffer(b"".join(encoded), dtype="<u1"), f"{name}.end": ends}


def column_texts(columns: Columns, name: str, what: str, count: int | None = None) -> list[str]:
    """The inverse of `text_columns`.

    Raises:
        FormatError: the ends decrease or do not fit the bytes, or the bytes are not UTF-8.
    """
    ends = check_rising(column(columns, f"{name}.end", "<u8", what, count), what)
    data = column(columns, f"{name}.text", "<u1", what, int(ends[-1]) if len(ends) else 0).tobytes()
    try:
        starts = [0, *ends[:-1].tolist()]
        return [data[a:b].decode() for a, b in zip(starts, ends.tolist(), strict=len(ends) > 0)]
    except UnicodeDecodeError as error:
        raise FormatError(f"{what}: {name} is not UTF-8") from error
