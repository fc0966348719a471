"""Statistics of chunks: NaN, infinities, range and squares of their elements, as optional columns of a version.

A row belongs to a chunk, because a chunk that did not change keeps its row and is not read again. Programs that do not
know these columns pass them on and ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import FormatError

from . import table as col

_COLUMNS = (("nan", "<u4"), ("infinite", "<u4"), ("low", "<u8"), ("high", "<u8"), ("squares", "<u8"))
"""Columns of a version: ``statistics.`` and this name, with the stored dtype. Floats are stored as their bits."""


class ChunkStatistics(NamedTuple):
    """What is known of the elements of each chunk: ``(chunks,)`` each. NaN in a column means: not known, or no number.

    Attributes:
        nan, infinite: how many elements are NaN, and how many are infinite.
        low, high: the smallest and the largest finite element.
        squares: the sum of the squares of the finite elements.
    """

    nan: Array
    infinite: Array
    low: Array
    high: Array
    squares: Array

    @classmethod
    def unknown(cls, chunks: int) -> ChunkStatistics:
        """Rows of chunks of which nothing is known."""
        counts = (np.zeros(chunks, "<u4") for _ in range(2))
        return cls(*counts, *(np.full(chunks, np.nan) for _ in range(3)))

    def rows(self, rows: Array) -> ChunkStatistics:
        """The statistics of these chunks."""
        return ChunkStatistics(*(column[rows] for column in self))

    def put(self, rows: Array, found: ChunkStatistics) -> None:
        """Fill in these rows."""
        for column, values in zip(self, found, strict=True):
            column[rows] = values

    def encode(self) -> col.Columns:
        """Columns of a version."""
        return {
            f"statistics.{name}": np.ascontiguousarray(column, "<f8" if dtype == "<u8" else dtype).view(dtype)
            for (name, dtype), column in zip(_COLUMNS, self, strict=True)
        }

    @classmethod
    def decode(cls, columns: col.Columns, chunks: int, what: str) -> ChunkStatistics | None:
        """The statistics of a version with so many chunks; None if it has none.

        Raises:
            FormatError: a column is absent, or of another type or length.
        """
        if "statistics.nan" not in columns:
            return None
        found = (col.column(columns, f"statistics.{name}", dtype, what, chunks) for name, dtype in _COLUMNS)
        return cls(*(c.view("<f8") if c.dtype.itemsize == 8 else c for c in found))

    @classmethod
    def of_blobs(cls, blobs: Sequence[bytes | bytearray], chunks: int) -> ChunkStatistics | None:
        """The inverse of `encode`, from the bytes of its columns in their order.

        Raises:
            FormatError: a column is absent, or of another length.
        """
        if len(blobs) != len(_COLUMNS) or any(
            len(b) != chunks * np.dtype(d).itemsize for b, (_, d) in zip(blobs, _COLUMNS, strict=True)
        ):
            raise FormatError("statistics that do not fit their chunks")
        columns = {f"statistics.{n}": np.frombuffer(b, d) for b, (n, d) in zip(blobs, _COLUMNS, strict=True)}
        return cls.decode(columns, chunks, "statistics")


def joined_statistics(parts: Sequence[ChunkStatistics | None]) -> ChunkStatistics | None:
    """The rows of several parts, one after the other; None if a part has none."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    return ChunkStatistics(*(np.concatenate(columns) for columns in zip(*known, strict=True)))
