"""Bases: the chunks that deltas are made against, as a layout lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from . import columns as col
from .errors import FormatError

Array = col.Array

RAW = "raw"
DELTA = "delta"
"""Codec of a chunk that is stored as its difference from a base; also what a layout with such chunks requires."""

NONE = 0xFFFFFFFF
"""Index of the base of a chunk that has none."""

ENTRY = np.dtype(
    [("object", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("codec", "<u1"), ("digest", "<u8", (2,)),
     ("uses", "<u2"), ("spent", "<u8")]
)  # fmt: skip
"""A base as a row of numbers: those of its object and of its codec are the layout's."""


class Base(NamedTuple):
    """The chunk that a delta is a difference from. It lies in the same tier, is as long, and is no delta itself.

    Attributes:
        object, offset, stored, codec: where it lies and how it is encoded, as a place says it.
        digest: of its raw bytes.
        uses: how many versions in a row, up to this one, have had a delta against it.
        spent: stored bytes of it and of those deltas: what says when it is time for another. 0: not known.
    """

    object: str
    offset: int
    stored: int
    codec: str
    digest: bytes
    uses: int = 1
    spent: int = 0


@dataclass(frozen=True, eq=False)
class Bases:
    """The bases of a layout.

    Attributes:
        row: ``(chunks,)`` of uint32: index of each chunk's base, or NONE.
        table: ``(bases,)`` of ENTRY.
    """

    row: Array
    table: Array

    @property
    def based(self) -> Array:
        """``(chunks,)`` of bool: which chunks have a base."""
        found: Array = self.row != NONE
        return found

    def entry(self, row: int) -> tuple[int, int, int, int, bytes, int, int] | None:
        """A chunk's base as in `Base`, with numbers of object and codec; None where it has none."""
        if (number := int(self.row[row])) == NONE:
            return None
        index, offset, stored, codec, digest, uses, spent = self.table[number].tolist()
        return index, offset, stored, codec, np.asarray(digest, "<u8").tobytes(), uses, spent

    def columns(self) -> col.Columns:
        """As columns of the layout's table."""
        entries = {f"base.{name}": self.table[name].reshape(-1) for name in ENTRY.names or ()}
        return {"row.base": self.row, **entries}

    @classmethod
    def decode(cls, columns: col.Columns, rows: int, what: str) -> Bases:
        """The bases in a layout's columns, unchecked but for their lengths.

        Raises:
            FormatError: a column is absent, of another type or of another length.
        """
        count = len(col.column(columns, "base.object", "<u4", what))
        table = np.zeros(count, ENTRY)
        for name in ENTRY.names or ():
            dtype, shape = ENTRY[name].base.str.replace("|", "<"), table[name].shape
            table[name] = col.column(columns, f"base.{name}", dtype, what, table[name].size).reshape(shape)
        return cls(col.column(columns, "row.base", "<u4", what, rows), table)

    def check(self, sizes: Array, codecs: Sequence[str], nbytes: Array, what: str) -> None:
        """Raises FormatError unless all are in packs that are listed, and as long as what is made against them.

        Args:
            sizes: ``(objects,)``: lengths of the packs.
            codecs: the layout's.
            nbytes: ``(chunks,)``: raw lengths.
        """
        table = self.table
        rows = np.flatnonzero(self.based)
        if len(rows) and int(self.row[rows].max()) >= len(table):
            raise FormatError(f"{what}: a chunk names a base that is not listed")
        if bool(np.any(table["object"] >= len(sizes))) or bool(np.any(table["codec"] >= len(codecs))):
            raise FormatError(f"{what}: a base names an object or a codec that is not listed")
        if ends_behind(table["offset"], table["stored"], sizes[table["object"]]):
            raise FormatError(f"{what}: a base ends behind its pack")
        if bool(np.any(stored_as(DELTA, codecs)[table["codec"]])):
            raise FormatError(f"{what}: a base is a delta itself")
        mine = table[self.row[rows]]
        raw = stored_as(RAW, codecs)[mine["codec"]]
        if bool(np.any(mine["stored"][raw] != nbytes[rows][raw])):
            raise FormatError(f"{what}: a raw base is not as long as what is made against it")


class BasesDraft:
    """The bases of a layout being drawn.

    Args:
        rows: how many chunks the version has.

    Attributes:
        row: as in `Bases`, with bases that may not be needed any more.
    """

    def __init__(self, rows: int) -> None:
        self.row = np.full(rows, NONE, "<u4")
        self._tables: list[Array] = []
        self._listed = 0

    def clear(self, rows: Array | int) -> None:
        """These chunks have no base."""
        self.row[rows] = NONE

    def put(self, row: int, base: Base, index: int, codec: int) -> None:
        """Give a chunk a base, in the object of this index."""
        digest = np.frombuffer(base.digest, "<u8")
        entry = (index, base.offset, base.stored, codec, digest, base.uses, base.spent)
        self.row[row] = self._list(np.array([entry], ENTRY))

    def put_like(self, rows: Array, bases: Bases | None, there: Array, objects: Array, codecs: Array) -> None:
        """Give chunks the bases that other rows have in another layout.

        Args:
            objects, codecs: for each of that layout's numbers the one here.
        """
        self.clear(rows)
        if bases is not None and (based := bases.based[there]).any():
            used, which = np.unique(bases.row[there[based]], return_inverse=True)
            table = bases.table[used]
            table["object"], table["codec"] = objects[table["object"]], codecs[table["codec"]]
            self.row[rows[based]] = self._list(table) + which

    def _list(self, table: Array) -> int:
        """Take bases over; the index of the first."""
        self._tables.append(table)
        self._listed += len(table)
        return self._listed - len(table)

    def build(self) -> Bases | None:
        """Those that a chunk still has; None where there are none."""
        based = self.row != NONE
        if not based.any():
            return None
        numbers, inverse = np.unique(self.row[based], return_inverse=True)
        row = self.row.copy()
        row[based] = inverse
        return Bases(row, np.concatenate(self._tables)[numbers])


def stored_as(codec: str, codecs: Sequence[str]) -> Array:
    """``(codecs,)`` of bool: which of them is that one."""
    return np.array([name == codec for name in codecs], bool)


def ends_behind(offset: Array, stored: Array, sizes: Array) -> bool:
    """Whether any of these bytes lies behind the end of its pack, of length ``sizes``."""
    length = stored.astype("<u8")
    return bool(np.any(length > sizes)) or bool(np.any(offset > sizes - np.minimum(length, sizes)))
