"""NumPy columns: the array type, and arithmetic of ragged arrays (rows of different length in one flat column)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FormatError

Array = NDArray[Any]


BLOCK = 1 << 20
"""Rows that are worked on at once where a table may have tens of millions: temporary columns stay small."""


def check_rising(ends: Array, what: str) -> Array:
    """Check that cumulative ends do not decrease; returns them.

    Raises:
        FormatError: an end is smaller than the one before.
    """
    if len(ends) and bool(np.any(ends[1:] < ends[:-1])):
        raise FormatError(f"{what} has cumulative ends that fall")
    return ends


def starts_of(ends: Array) -> Array:
    """The start of each row, from the ends: 0, then the end of the row before."""
    return np.concatenate([np.zeros(1, ends.dtype), ends[:-1]]) if len(ends) else ends


def expand_runs(starts: Array, lengths: Array) -> Array:
    """The indices of all rows, concatenated: ``starts[i] : starts[i] + lengths[i]`` for each i."""
    lengths = lengths.astype("i8", copy=False)
    if bool((lengths == 1).all()):
        return starts.astype("i8")
    ends = np.cumsum(lengths)
    found: Array = np.repeat(starts.astype("i8", copy=False) - starts_of(ends), lengths)
    found += np.arange(len(found))  # in place, since there may be tens of millions
    return found


def digest_array(digests: list[bytes]) -> Array:
    """Digests of 16 bytes as ``(n, 2)`` of uint64."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def digest_list(digests: Array) -> list[bytes]:
    """Each of ``(n, 2)`` digests as 16 bytes."""
    data = digests.tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]
