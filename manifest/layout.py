"""Layouts: where a version's chunks lie in one tier."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from . import columns as col
from .errors import FormatError
from .head import refuse_unknown
from .version import Version

Array = col.Array
WHAT = "layout"
ABSENT = 0xFFFFFFFF
"""Object index of a chunk that this tier does not have: its rules send the leaf elsewhere."""

RAW = "raw"
MAX_OBJECT = 1 << 60
_OBJECT = re.compile(r"packs/[A-Za-z0-9][A-Za-z0-9._\-]{0,99}/[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")


class Place(NamedTuple):
    """Where one chunk lies: the object's key, the offset and stored length in it, and how it is encoded."""

    object: str
    offset: int
    stored: int
    codec: str


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows aligned with a version's chunk table.

    Attributes:
        objects: keys of the packs.
        object_sizes: ``(objects,)`` of uint64: whole length of each pack, so that a truncated one is known at a glance.
        codecs: names of the codecs used.
        object, offset, stored, codec: ``(chunks,)``: index of the pack (or ABSENT), offset in it, stored length, index
            of the codec.
    """

    objects: tuple[str, ...]
    object_sizes: Array
    codecs: tuple[str, ...]
    object: Array
    offset: Array
    stored: Array
    codec: Array

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
        """Stored bytes of the chunks that are here, each place counted once however many chunks share it."""
        rows = np.flatnonzero(self.present)
        order = rows[np.lexsort((self.offset[rows], self.object[rows]))]
        if not len(order):
            return 0
        objects, offsets = self.object[order], self.offset[order]
        fresh = (objects[1:] != objects[:-1]) | (offsets[1:] != offsets[:-1])
        return int(self.stored[order[0]]) + int(self.stored[order[1:][fresh]].sum(dtype="i8"))

    def place(self, row: int) -> Place | None:
        """Where the chunk of this row lies, or None."""
        index = int(self.object[row])
        if index == ABSENT:
            return None
        return Place(self.objects[index], int(self.offset[row]), int(self.stored[row]), self.codecs[self.codec[row]])

    def size_of(self, key: str) -> int:
        """Whole length of a pack that this layout names."""
        return int(self.object_sizes[self.objects.index(key)])

    def encode(self) -> bytes:
        """The layout section."""
        return col.encode(
            {"codecs": list(self.codecs), "requires": []},
            {
                **col.pool(list(self.objects), "object.key"),
                "object.size": self.object_sizes,
                "row.object": self.object,
                "row.offset": self.offset,
                "row.stored": self.stored,
                "row.codec": self.codec,
            },
        )

    @classmethod
    def decode(cls, data: memoryview, version: Version) -> Layout:
        """The layout of ``version`` from its section.

        Raises:
            FormatError: the bytes are no layout, belong to another number of chunks, or point outside their packs.
        """
        head, columns = col.decode(data, WHAT)
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
        )
        layout.check(version)
        return layout

    def check(self, version: Version) -> None:
        """Raises FormatError unless there is one row per chunk of ``version``, each inside a pack that is listed."""
        if not len(self.object) == len(self.offset) == len(self.stored) == len(self.codec) == len(version.digests):
            raise FormatError(f"{WHAT} has {len(self.object)} rows for {len(version.digests)} chunks")
        self._check_objects()
        rows = np.flatnonzero(self.present)
        if not len(rows):
            return
        if int(self.object[rows].max()) >= len(self.objects) or int(self.codec[rows].max()) >= len(self.codecs):
            raise FormatError(f"{WHAT}: a row names an object or a codec that is not listed")
        if int(self.object_sizes.max()) > MAX_OBJECT:
            raise FormatError(f"{WHAT}: a pack of {int(self.object_sizes.max())} bytes is longer than any can be")
        sizes, stored = self.object_sizes[self.object[rows]], self.stored[rows].astype("<u8")
        if bool(np.any(stored > sizes)) or bool(np.any(self.offset[rows] > sizes - stored)):
            raise FormatError(f"{WHAT}: a chunk ends behind its pack")
        raw = np.array([c == RAW for c in self.codecs])[self.codec[rows]]
        if bool(np.any(stored.astype("i8")[raw] != version.chunk_nbytes[rows][raw])):
            raise FormatError(f"{WHAT}: a raw chunk is stored with a length that is not its own")

    def _check_objects(self) -> None:
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

    def put(self, row: int, place: Place) -> None:
        """Say where one chunk lies."""
        self.put_run(row, place.object, place.offset, place.stored, place.codec)

    def put_run(self, rows: Array | int, key: str, offset: Array | int, stored: Array | int, codec: str) -> None:
        """Say where some chunks lie, all in one object and encoded alike."""
        self._object[rows] = self._objects.setdefault(key, len(self._objects))
        self._offset[rows], self._stored[rows] = offset, stored
        self._codec[rows] = self._codecs.setdefault(codec, len(self._codecs))

    def put_like(self, rows: Array, layout: Layout, there: Array) -> None:
        """Give chunks the places that other rows have in another layout of the same tier."""
        objects = [self._objects.setdefault(key, len(self._objects)) for key in layout.objects]
        codecs = [self._codecs.setdefault(name, len(self._codecs)) for name in layout.codecs]
        self._object[rows] = np.array(objects, "<u4")[layout.object[there]]
        self._offset[rows], self._stored[rows] = layout.offset[there], layout.stored[there]
        self._codec[rows] = np.array(codecs, "<u1")[layout.codec[there]]

    def put_twins(self, rows: Array, of: Array) -> None:
        """Give chunks the places that others have which are the same."""
        for column in (self._object, self._offset, self._stored, self._codec):
            column[rows] = column[of]

    def objects(self) -> list[str]:
        """Keys of the objects in which chunks lie by now."""
        keys = list(self._objects)
        return [keys[i] for i in np.unique(self._object[self._object != ABSENT]).tolist()]

    def build(self, sizes: Mapping[str, int]) -> Layout:
        """The layout, with the length of every object; objects in which no chunk lies are left out."""
        keys, used = list(self._objects), self._object != ABSENT
        numbers, inverse = np.unique(self._object[used], return_inverse=True)
        found = self._object.copy()
        found[used] = inverse
        named = [keys[i] for i in numbers.tolist()]
        lengths = np.array([sizes[key] for key in named], "<u8")
        return Layout(tuple(named), lengths, tuple(self._codecs), found, self._offset, self._stored, self._codec)


def is_pack(key: str) -> bool:
    """Whether a key is the key of a pack."""
    return _OBJECT.fullmatch(key) is not None
