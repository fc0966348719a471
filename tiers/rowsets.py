"""Row sets: which of a version's chunks a rank wants or has, as runs, in few bytes."""

from __future__ import annotations

import zlib

import numpy as np

from tierstate.manifest.columns import Array
from tierstate.manifest.errors import FormatError

NONE: Array = np.zeros((0, 2), "i8")
"""No rows."""


def runs_in(mask: Array) -> Array:
    """The runs of true ones.

    Returns:
        ``(runs, 2)`` of int64: where each run starts, and the row after its last; rising, none touching the next.
    """
    edges = np.flatnonzero(np.diff(mask.astype("i1"), prepend=0, append=0))
    return edges.astype("i8").reshape(-1, 2)


def mask_of(runs: Array, rows: int) -> Array:
    """``(rows,)`` of bool: the set of these runs."""
    change = np.zeros(rows + 1, "i1")
    change[runs[:, 0]], change[runs[:, 1]] = 1, -1
    found: Array = np.cumsum(change[:-1], dtype="i1").astype(bool)
    return found


def pack(runs: Array) -> bytes:
    """Runs as bytes: what `unpack` takes."""
    return zlib.compress(np.diff(runs.reshape(-1), prepend=0).astype("<u4").tobytes(), 1)


def unpack(data: bytes, rows: int) -> Array:
    """Runs from bytes that another rank gave.

    Args:
        rows: how many rows the version has.

    Raises:
        FormatError: they are no runs of that many rows.
    """
    most = 4 * (rows + 2)
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(data, most + 1)
    except zlib.error as error:
        raise FormatError(f"rows of another rank cannot be read: {error}") from error
    if len(raw) > most or len(raw) % 8 or not reader.eof:
        raise FormatError(f"rows of another rank are {len(raw)} bytes, which are no runs of {rows} rows")
    steps = np.frombuffer(raw, "<u4").astype("i8")
    ends = np.cumsum(steps)
    if len(steps) and (not steps[1:].all() or int(ends[-1]) > rows):
        raise FormatError(f"rows of another rank are no rising runs of {rows} rows")
    return ends.reshape(-1, 2)
