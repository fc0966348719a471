"""Layouts: where a version's chunks lie in one tier."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from . import columns as col
from .bases import DELTA, RAW, Base, Bases, BasesDraft, ends_behind, stored_as
from .errors import FormatError
from .head import refuse_unknown
from .version import Version

__all__ = ["ABSENT", "DELTA", "RAW", "Base", "Draft", "Layout", "Place", "is_pack"]

Array = col.Array
WHAT = "layout"
ABSENT = 0xFFFFFFFF
"""Object index of a chunk that this tier does not have: its rules send the leaf elsewhere."""

MAX_OBJECT = 1 << 60
MAX_CODEC = 0xFF
_OBJECT = re.compile(r"packs/[A-Za-z0-9][A-Za-z0-9._\-]{0,99}/[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")


class Place(NamedTuple):
    """Where one chunk lies: the object's key, the offset and stored length in it, how it is encoded, and the base of a
    delta."""

    object: str
    offset: int
    stored: int
    codec: str
    base: Base | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows aligned with a version's chunk table.

    Attributes:
        objects: keys of the packs in which chunks lie, or bases of chunks.
        object_sizes: ``(objects,)`` of uint64: whole length of each pack, so that a truncated one is known at a glance.
        codecs: names of the codecs used.
        object, offset, stored, codec: ``(chunks,)``: index of the pack (or ABSENT), offset in it, stored length, index
            of the codec.
        bases: what deltas are made against; None where no chunk is a delta.
    """

    objects: tuple[str, ...]
    object_sizes: Array
    codecs: tuple[str, ...]
    object: Array
    offset: Array
    stored: Array
    codec: Array
    bases: Bases | None = None

    @classmethod
    def build(cls, places: Sequence[Place | None], sizes: Mapping[str, int]) -> Layout:
        """A layout from one place per chunk (None: absent) and the length of every object named."""
        draft = Draft(len(places))
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
    def stored_nbytes(self) -> int:
        """Stored bytes of the chunks that are here and of the bases that they need, each place counted once however
        many chunks share it."""
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
        """``(chunks,)``: index of the pack in which each chunk's base lies; ABSENT for those that have none."""
        found = np.full(len(self.object), ABSENT, "<u4")
        if self.bases is not None:
            based = self.bases.based
            found[based] = self.bases.table["object"][self.bases.row[based]]
        return found

    def place(self, row: int) -> Place | None:
        """Where the chunk of this row lies, or None."""
        index = int(self.object[row])
        if index == ABSENT:
            return None
        where = self.objects[index], int(self.offset[row]), int(self.stored[row]), self.codecs[self.codec[row]]
        return Place(*where, self.base(row))

    def base(self, row: int) -> Base | None:
        """What the chunk of this row is a delta against, or None."""
        entry = None if self.bases is None else self.bases.entry(row)
        if entry is None:
            return None
        index, offset, stored, codec, digest, uses, spent = entry
        return Base(self.objects[index], offset, stored, self.codecs[codec], digest, uses, spent)

    def size_of(self, key: str) -> int:
        """Whole length of a pack that this layout names."""
        return int(self.object_sizes[self.objects.index(key)])

    @property
    def tables(self) -> tuple[dict[str, Any], col.Columns]:
        """Head and columns of the layout section."""
        return {"codecs": list(self.codecs), "requires": [] if self.bases is None else [DELTA]}, {
            **col.pool(list(self.objects), "object.key"),
            "object.size": self.object_sizes,
            "row.object": self.object,
            "row.offset": self.offset,
            "row.stored": self.stored,
            "row.codec": self.codec,
            **({} if self.bases is None else self.bases.columns()),
        }

    def encode(self) -> bytes:
        """The layout section."""
        return col.encode(*self.tables)

    @classmethod
    def decode(cls, data: memoryview, version: Version) -> Layout:
        """The layout of ``version`` from its section.

        Raises:
            FormatError: the bytes are no layout, belong to another number of chunks, or point outside their packs.
        """
        return cls.of(*col.decode(data, WHAT), version)

    @classmethod
    def of(cls, head: Mapping[str, Any], columns: col.Columns, version: Version) -> Layout:
        """The layout of ``version`` from head and columns, as `decode` checks them."""
        refuse_unknown(head, WHAT)
        objects = col.texts(columns, "object.key", WHAT)
        rows = len(version.digests)
        layout = cls(
            tuple(objects),
            col.column(columns, "object.size", "<u8", WHAT, len(objects)),
            tuple(col.names(head, "codecs", WHAT)),
            col.column(columns, "row.object", "<u4", WHAT, rows),
            col.column(columns, "row.offset", "<u8", WHAT, rows),
            col.column(columns, "row.stored", "<u4", WHAT, rows),
            col.column(columns, "row.codec", "<u1", WHAT, rows),
            Bases.decode(columns, rows, WHAT) if DELTA in col.names(head, "requires", WHAT) else None,
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
        if len(self.objects) and int(self.object_sizes.max()) > MAX_OBJECT:
            raise FormatError(f"{WHAT}: a pack of {int(self.object_sizes.max())} bytes is longer than any can be")
        if len(set(self.objects)) != len(self.objects):
            raise FormatError(f"{WHAT} lists a pack twice")
        for key in self.objects:
            if not is_pack(key):
                raise FormatError(f"{WHAT} names {key[:80]!r}, which is no pack")


class Draft:
    """A layout being drawn: chunks get their places in any order.

    Args:
        rows: how many chunks the version has.
    """

    def __init__(self, rows: int) -> None:
        self._objects: dict[str, int] = {}
        self._codecs: dict[str, int] = {}
        self._object = np.full(rows, ABSENT, "<u4")
        self._offset, self._stored = np.zeros(rows, "<u8"), np.zeros(rows, "<u4")
        self._codec = np.zeros(rows, "<u1")
        self._bases = BasesDraft(rows)

    def put(self, row: int, place: Place) -> None:
        """Say where one chunk lies."""
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
        """Say where some chunks lie, all in one object and encoded alike; none of them a delta."""
        self._object[rows] = self._number(key)
        self._offset[rows], self._stored[rows] = offset, stored
        self._codec[rows] = self._codec_number(codec)
        self._bases.clear(rows)

    def put_like(self, rows: Array, layout: Layout, there: Array) -> None:
        """Give chunks the places that other rows have in another layout of the same tier, bases included."""
        objects = np.array([self._number(key) for key in layout.objects], "<u4")
        codecs = np.array([self._codec_number(name) for name in layout.codecs], "<u1")
        self._object[rows] = objects[layout.object[there]]
        self._offset[rows], self._stored[rows] = layout.offset[there], layout.stored[there]
        self._codec[rows] = codecs[layout.codec[there]]
        self._bases.put_like(rows, layout.bases, there, objects, codecs)

    def put_twins(self, rows: Array, of: Array) -> None:
        """Give chunks the places that others have which are the same."""
        for column in (self._object, self._offset, self._stored, self._codec, self._bases.row):
            column[rows] = column[of]

    def objects(self) -> list[str]:
        """Keys of the objects in which chunks, or bases of chunks, lie by now."""
        keys = list(self._objects)
        return [keys[i] for i in self._used(self._bases.build()).tolist()]

    def _used(self, bases: Bases | None) -> Array:
        """Numbers of the objects that are needed, rising."""
        numbers = self._object[self._object != ABSENT]
        return np.unique(numbers if bases is None else np.append(numbers, bases.table["object"]))

    def build(self, sizes: Mapping[str, int]) -> Layout:
        """The layout, with the length of every object; objects in which nothing lies that is needed are left out."""
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


def is_pack(key: str) -> bool:
    """Whether a key is the key of a pack."""
    return _OBJECT.fullmatch(key) is not None
