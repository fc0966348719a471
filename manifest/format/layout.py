"""Layouts: where a version's chunks are in one tier (pack, offset, stored length, codec), and the bases of deltas.

Each tier has its own layout of a version. A chunk may be stored as a *delta*: its XOR with a base chunk of an earlier
version, which is in the same tier and is never a delta itself. `LayoutBuilder` collects places while packs are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import FormatError

from . import table as col
from .version import Version, check_features

RAW = "raw"


DELTA = "delta"
"""Codec of a chunk that is stored as a difference from a base; also the feature that such a layout requires."""


NO_BASE = 0xFFFFFFFF
"""Base index of a chunk without a base."""


BASE_DTYPE = np.dtype(
    [("object", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("codec", "<u1"), ("digest", "<u8", (2,)),
     ("uses", "<u2"), ("spent", "<u8")]
)  # fmt: skip
"""Dtype of a row of the base table; object and codec are indices into the lists of the layout."""


WHAT = "layout"


ABSENT = 0xFFFFFFFF
"""Object index of a chunk that this tier does not have: the policy's rules do not place its leaf here."""


MAX_PACK_BYTES = 1 << 60


MAX_CODEC = 0xFF


PART = "part"
"""Label in the key of an object that is one rank's part of a version: tables for the rank that commits, and no chunks.
"""


_PART_KEY = re.compile(rf".*/[0-9]{{12}}-[0-9]+-{PART}-[^/]*")


_OBJECT = re.compile(r"packs/[A-Za-z0-9][A-Za-z0-9._\-]{0,99}/[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")


class DeltaBase(NamedTuple):
    """The base of a delta: a chunk in the same tier, of the same raw length, and not a delta itself.

    Attributes:
        object, offset, stored, codec: its place and codec, as in `ChunkPlace`.
        digest: the digest of its raw bytes.
        uses: number of consecutive versions, up to this one, with a delta against it.
        spent: stored bytes of the base and of those deltas; they decide when a new base is written. 0: not known.
    """

    object: str
    offset: int
    stored: int
    codec: str
    digest: bytes
    uses: int = 1
    spent: int = 0


@dataclass(frozen=True, eq=False)
class BaseTable:
    """The delta bases of a layout, as columns.

    Attributes:
        row: ``(chunks,)`` of uint32: index of each chunk's base, or `NO_BASE`.
        table: ``(bases,)`` of `BASE_DTYPE`.
    """

    row: Array
    table: Array

    @property
    def based(self) -> Array:
        """``(chunks,)`` of bool: which chunks have a base."""
        found: Array = self.row != NO_BASE
        return found

    def entry(self, row: int) -> tuple[int, int, int, int, bytes, int, int] | None:
        """The fields of a chunk's `DeltaBase`, but object and codec as indices; None if it has no base."""
        if (number := int(self.row[row])) == NO_BASE:
            return None
        index, offset, stored, codec, digest, uses, spent = self.table[number].tolist()
        return index, offset, stored, codec, np.asarray(digest, "<u8").tobytes(), uses, spent

    def columns(self) -> col.Columns:
        """As columns of the layout's table."""
        entries = {f"base.{name}": self.table[name].reshape(-1) for name in BASE_DTYPE.names or ()}
        return {"row.base": self.row, **entries}

    @classmethod
    def decode(cls, columns: col.Columns, rows: int, what: str) -> BaseTable:
        """The bases from a layout's columns. Only the types and lengths of the columns are checked.

        Raises:
            FormatError: a column is absent, of another type or of another length.
        """
        count = len(col.column(columns, "base.object", "<u4", what))
        table = np.zeros(count, BASE_DTYPE)
        for name in BASE_DTYPE.names or ():
            dtype, shape = BASE_DTYPE[name].base.str.replace("|", "<"), table[name].shape
            table[name] = col.column(columns, f"base.{name}", dtype, what, table[name].size).reshape(shape)
        return cls(col.column(columns, "row.base", "<u4", what, rows), table)

    def check(self, sizes: Array, codecs: Sequence[str], nbytes: Array, what: str) -> None:
        """Raises FormatError unless all bases are inside listed packs and have the raw length of their chunks.

        Args:
            sizes: ``(objects,)``: lengths of the packs.
            codecs: the codecs of the layout.
            nbytes: ``(chunks,)``: raw lengths of the chunks.
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


class BaseTableBuilder:
    """Collects the delta bases of a layout that is being built.

    Args:
        rows: number of chunks of the version.

    Attributes:
        row: as in `BaseTable`; the table may still have bases that no chunk uses.
    """

    def __init__(self, rows: int) -> None:
        self.row = np.full(rows, NO_BASE, "<u4")
        self._tables: list[Array] = []
        self._listed = 0

    def clear(self, rows: Array | int) -> None:
        """Remove the bases of these chunks."""
        self.row[rows] = NO_BASE

    def put(self, row: int, base: DeltaBase, index: int, codec: int) -> None:
        """Set the base of a chunk, with the indices of its object and codec in the layout."""
        digest = np.frombuffer(base.digest, "<u8")
        entry = (index, base.offset, base.stored, codec, digest, base.uses, base.spent)
        self.row[row] = self._list(np.array([entry], BASE_DTYPE))

    def put_like(self, rows: Array, bases: BaseTable | None, there: Array, objects: Array, codecs: Array) -> None:
        """Copy the bases of the rows ``there`` of another layout to these chunks.

        Args:
            objects, codecs: index in the other layout -> index here.
        """
        self.clear(rows)
        if bases is not None and (based := bases.based[there]).any():
            used, which = np.unique(bases.row[there[based]], return_inverse=True)
            table = bases.table[used]
            table["object"], table["codec"] = objects[table["object"]], codecs[table["codec"]]
            self.row[rows[based]] = self._list(table) + which

    def _list(self, table: Array) -> int:
        """Append rows of bases; returns the index of the first."""
        self._tables.append(table)
        self._listed += len(table)
        return self._listed - len(table)

    def build(self) -> BaseTable | None:
        """The table with only the bases that a chunk uses; None if there are none."""
        based = self.row != NO_BASE
        if not based.any():
            return None
        numbers, inverse = np.unique(self.row[based], return_inverse=True)
        row = self.row.copy()
        row[based] = inverse
        return BaseTable(row, np.concatenate(self._tables)[numbers])


def stored_as(codec: str, codecs: Sequence[str]) -> Array:
    """``(codecs,)`` of bool: which of the codecs has this name."""
    return np.array([name == codec for name in codecs], bool)


def ends_behind(offset: Array, stored: Array, sizes: Array) -> bool:
    """Whether any of these byte ranges ends after the end of its pack, of length ``sizes``."""
    length = stored.astype("<u8")
    return bool(np.any(length > sizes)) or bool(np.any(offset > sizes - np.minimum(length, sizes)))


class ChunkPlace(NamedTuple):
    """Where one chunk is: the object's key, the offset and stored length in bytes, the codec, and the base if it is a
    delta."""

    object: str
    offset: int
    stored: int
    codec: str
    base: DeltaBase | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of a version's chunks, as columns with the rows of its chunk table.

    Attributes:
        objects: keys of the packs that contain chunks or bases of chunks.
        object_sizes: ``(objects,)`` of uint64: length of each pack, so that a truncated one is recognised by its size.
        codecs: names of the codecs used.
        object, offset, stored, codec: ``(chunks,)``: index of the pack (or `ABSENT`), offset in it, stored length,
            index of the codec.
        bases: the bases of the deltas; None if no chunk is a delta.
    """

    objects: tuple[str, ...]
    object_sizes: Array
    codecs: tuple[str, ...]
    object: Array
    offset: Array
    stored: Array
    codec: Array
    bases: BaseTable | None = None

    @classmethod
    def build(cls, places: Sequence[ChunkPlace | None], sizes: Mapping[str, int]) -> Layout:
        """A layout from one place per chunk (None: absent) and the length of every object named."""
        draft = LayoutBuilder(len(places))
        for row, place in enumerate(places):
            if place is not None:
                draft.put(row, place)
        return draft.build(sizes)

    @cached_property
    def present(self) -> Array:
        """``(chunks,)`` of bool: which chunks this tier has."""
        found: Array = self.object != ABSENT
        return found

    @property
    def pack_sizes(self) -> dict[str, int]:
        """The length of each pack by its key, in the order of `objects`."""
        return dict(zip(self.objects, self.object_sizes.tolist(), strict=True))

    @property
    def stored_nbytes(self) -> int:
        """Stored bytes of the chunks in this tier and of their bases; a place that several chunks share counts once."""
        rows = np.flatnonzero(self.present)
        objects, offset, stored = self.object[rows], self.offset[rows], self.stored[rows]
        if self.bases is not None:
            table = self.bases.table
            objects, offset = np.append(objects, table["object"]), np.append(offset, table["offset"])
            stored = np.append(stored, table["stored"])
        order = np.lexsort((offset, objects))
        if not len(order):
            return 0
        objects, offset, stored = objects[order], offset[order], stored[order]
        fresh = (objects[1:] != objects[:-1]) | (offset[1:] != offset[:-1])
        return int(stored[0]) + int(stored[1:][fresh].sum(dtype="i8"))

    @cached_property
    def base_object(self) -> Array:
        """``(chunks,)``: index of the pack with each chunk's base; `ABSENT` for chunks without a base."""
        found = np.full(len(self.object), ABSENT, "<u4")
        if self.bases is not None:
            based = self.bases.based
            found[based] = self.bases.table["object"][self.bases.row[based]]
        return found

    def place(self, row: int) -> ChunkPlace | None:
        """The place of the chunk of this row, or None if the tier does not have it."""
        index = int(self.object[row])
        if index == ABSENT:
            return None
        where = self.objects[index], int(self.offset[row]), int(self.stored[row]), self.codecs[self.codec[row]]
        return ChunkPlace(*where, self.base(row))

    def base(self, row: int) -> DeltaBase | None:
        """The delta base of the chunk of this row, or None."""
        entry = None if self.bases is None else self.bases.entry(row)
        if entry is None:
            return None
        index, offset, stored, codec, digest, uses, spent = entry
        return DeltaBase(self.objects[index], offset, stored, self.codecs[codec], digest, uses, spent)

    def size_of(self, key: str) -> int:
        """Length in bytes of a pack that this layout names."""
        return int(self.object_sizes[self.objects.index(key)])

    @property
    def tables(self) -> tuple[dict[str, Any], col.Columns]:
        """Head and columns of the layout section."""
        return {"codecs": list(self.codecs), "requires": [] if self.bases is None else [DELTA]}, {
            **col.text_columns(list(self.objects), "object.key"),
            "object.size": self.object_sizes,
            "row.object": self.object,
            "row.offset": self.offset,
            "row.stored": self.stored,
            "row.codec": self.codec,
            **({} if self.bases is None else self.bases.columns()),
        }

    def encode(self) -> bytes:
        """The layout section."""
        return col.encode_table(*self.tables)

    @classmethod
    def decode(cls, data: memoryview, version: Version) -> Layout:
        """The layout of ``version`` from its section.

        Raises:
            FormatError: the bytes are not a layout, have another number of chunks, or point outside their packs.
        """
        return cls.of(*col.decode_table(data, WHAT), version)

    @classmethod
    def of(cls, head: Mapping[str, Any], columns: col.Columns, version: Version) -> Layout:
        """The layout of ``version`` from head and columns; raises as `decode`."""
        check_features(head, WHAT)
        objects = col.column_texts(columns, "object.key", WHAT)
        rows = len(version.digests)
        layout = cls(
            tuple(objects),
            col.column(columns, "object.size", "<u8", WHAT, len(objects)),
            tuple(col.string_list(head, "codecs", WHAT)),
            col.column(columns, "row.object", "<u4", WHAT, rows),
            col.column(columns, "row.offset", "<u8", WHAT, rows),
            col.column(columns, "row.stored", "<u4", WHAT, rows),
            col.column(columns, "row.codec", "<u1", WHAT, rows),
            BaseTable.decode(columns, rows, WHAT) if DELTA in col.string_list(head, "requires", WHAT) else None,
        )
        layout.check(version)
        return layout

    def check(self, version: Version) -> None:
        """Raises FormatError unless there is one row per chunk of ``version``, each inside a pack that is listed."""
        if not len(self.object) == len(self.offset) == len(self.stored) == len(self.codec) == len(version.digests):
            raise FormatError(f"{WHAT} has {len(self.object)} rows for {len(version.digests)} chunks")
        self._check_objects()
        self._check_rows(version)
        self._check_bases(version)

    def _check_rows(self, version: Version) -> None:
        rows = np.flatnonzero(self.present)
        if not len(rows):
            return
        if int(self.object[rows].max()) >= len(self.objects) or int(self.codec[rows].max()) >= len(self.codecs):
            raise FormatError(f"{WHAT}: a row names an object or a codec that is not listed")
        if ends_behind(self.offset[rows], self.stored[rows], self.object_sizes[self.object[rows]]):
            raise FormatError(f"{WHAT}: a chunk ends behind its pack")
        raw = stored_as(RAW, self.codecs)[self.codec[rows]]
        if bool(np.any(self.stored[rows].astype("i8")[raw] != version.chunk_nbytes[rows][raw])):
            raise FormatError(f"{WHAT}: a raw chunk is stored with a length that is not its own")

    def _check_bases(self, version: Version) -> None:
        based = np.zeros(len(self.object), bool) if self.bases is None else self.bases.based
        delta = self.present.copy()
        delta[delta] = stored_as(DELTA, self.codecs)[self.codec[delta]]
        if not np.array_equal(based, delta):
            raise FormatError(f"{WHAT}: a delta has no base, or what is no delta has one")
        if self.bases is not None:
            self.bases.check(self.object_sizes, self.codecs, version.chunk_nbytes, WHAT)

    def _check_objects(self) -> None:
        if len(self.objects) and int(self.object_sizes.max()) > MAX_PACK_BYTES:
            raise FormatError(f"{WHAT}: a pack of {int(self.object_sizes.max())} bytes is longer than any can be")
        if len(set(self.objects)) != len(self.objects):
            raise FormatError(f"{WHAT} lists a pack twice")
        for key in self.objects:
            if not is_pack_key(key):
                raise FormatError(f"{WHAT} names {key[:80]!r}, which is no pack")


class LayoutBuilder:
    """Collects the places of chunks, in any order, and builds a layout of them.

    Args:
        rows: how many chunks the version has.
    """

    def __init__(self, rows: int) -> None:
        self._objects: dict[str, int] = {}
        self._codecs: dict[str, int] = {}
        self._object = np.full(rows, ABSENT, "<u4")
        self._offset, self._stored = np.zeros(rows, "<u8"), np.zeros(rows, "<u4")
        self._codec = np.zeros(rows, "<u1")
        self._bases = BaseTableBuilder(rows)

    def put(self, row: int, place: ChunkPlace) -> None:
        """Set the place of one chunk."""
        self.put_run(row, place.object, place.offset, place.stored, place.codec)
        if (base := place.base) is not None:
            self._bases.put(row, base, self._number(base.object), self._codec_number(base.codec))

    def _number(self, key: str) -> int:
        return self._objects.setdefault(key, len(self._objects))

    def _codec_number(self, codec: str) -> int:
        number = self._codecs.setdefault(codec, len(self._codecs))
        if number > MAX_CODEC:
            raise FormatError(f"{WHAT}: {number + 1} codecs; at most {MAX_CODEC + 1} have room")
        return number

    def put_run(self, rows: Array | int, key: str, offset: Array | int, stored: Array | int, codec: str) -> None:
        """Set the places of chunks in one object with one codec; none of them is a delta."""
        self._object[rows] = self._number(key)
        self._offset[rows], self._stored[rows] = offset, stored
        self._codec[rows] = self._codec_number(codec)
        self._bases.clear(rows)

    def put_like(self, rows: Array, layout: Layout, there: Array) -> None:
        """Copy the places of the rows ``there`` of another layout of the same tier, with their bases, to these rows."""
        objects = np.array([self._number(key) for key in layout.objects], "<u4")
        codecs = np.array([self._codec_number(name) for name in layout.codecs], "<u1")
        self._object[rows] = objects[layout.object[there]]
        self._offset[rows], self._stored[rows] = layout.offset[there], layout.stored[there]
        self._codec[rows] = codecs[layout.codec[there]]
        self._bases.put_like(rows, layout.bases, there, objects, codecs)

    def put_twins(self, rows: Array, of: Array) -> None:
        """Copy to these rows the places of the rows ``of``, whose chunks have the same digests."""
        for column in (self._object, self._offset, self._stored, self._codec, self._bases.row):
            column[rows] = column[of]

    def objects(self) -> list[str]:
        """Keys of the objects that have chunks or bases of chunks so far."""
        keys = list(self._objects)
        return [keys[i] for i in self._used(self._bases.build()).tolist()]

    def _used(self, bases: BaseTable | None) -> Array:
        """Indices of the objects that are used, ascending."""
        numbers = self._object[self._object != ABSENT]
        return np.unique(numbers if bases is None else np.append(numbers, bases.table["object"]))

    def build(self, sizes: Mapping[str, int]) -> Layout:
        """The layout, with the length of every object; unused objects are left out."""
        keys, used, bases = list(self._objects), self._object != ABSENT, self._bases.build()
        numbers = self._used(bases)
        found = self._object.copy()
        found[used] = np.searchsorted(numbers, found[used])
        if bases is not None:
            bases.table["object"] = np.searchsorted(numbers, bases.table["object"])
        named = [keys[i] for i in numbers.tolist()]
        lengths = np.array([sizes[key] for key in named], "<u8")
        codecs = tuple(self._codecs)
        return Layout(tuple(named), lengths, codecs, found, self._offset, self._stored, self._codec, bases)


def is_pack_key(key: str) -> bool:
    """Whether a key is the key of a pack."""
    return _OBJECT.fullmatch(key) is not None


def holds_chunks(key: str) -> bool:
    """Whether the object under a key is a pack of chunks, which their digests protect. A rank's part of a version has a
    pack's key, and tables in it."""
    return is_pack_key(key) and _PART_KEY.fullmatch(key) is None
