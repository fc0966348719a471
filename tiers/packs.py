"""Packs: objects of many encoded chunks, back to back, with a footer that says what they are.

::

    chunk | chunk | ... | footer: a table | u32 length of the table | xxh3-128 of the table | magic (8 bytes)

Small chunks follow each other without a gap; chunks of 1 MiB and more start at a multiple of 4 KiB, so that they can
be read directly into aligned memory. The footer has one row per chunk, from which layouts can be rebuilt.

Files of other kinds (`formats`) are packs without a footer: their own headers say what lies where.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tierstate.manifest import columns as col
from tierstate.manifest.bases import DELTA
from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, view
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.head import refuse_unknown
from tierstate.manifest.index import Array, as_array
from tierstate.manifest.layout import Base, Place

from .base import ObjectWriter, Range, Release, Tier
from .packing import BIG, BLOCK

MAGIC = b"\x89TSP\r\n\x1a\n"
MAX_PACK = 4 << 30
"""A save's bytes go into as few packs as this length allows: one large file per rank is what file systems like."""

MEND = "mend"
"""What stands in place of a pack's number when it holds chunks that were damaged elsewhere."""

MAX_FOOTER = 256 << 20
_TRAILER = 4 + 16 + 8
_ZEROS = as_buffer(bytearray(BLOCK))


def is_mend(key: str) -> bool:
    """Whether a pack holds chunks that were damaged elsewhere, by its name."""
    return key.rpartition("/")[2].split("-")[2:3] == [MEND]


class Row(NamedTuple):
    """A footer's row: the chunk's digest and raw length, and where and how it is stored.

    Attributes:
        digest, nbytes: the chunk's digest and raw length.
        place: where it lies; read from a footer, it says nothing of a base.
        base: digest of what it is a delta against; empty where it is none.
    """

    digest: bytes
    nbytes: int
    place: Place
    base: bytes = b""


class Rows(NamedTuple):
    """Rows of a footer whose chunks are encoded alike: columns of one length, as in `Row`; ``bases`` are digests."""

    digests: Array
    nbytes: Array
    offset: Array
    stored: Array
    codec: str
    bases: Array | None = None

    @classmethod
    def of_one(cls, row: Row) -> Rows:
        """A single row."""
        place = row.place
        nbytes, offset, stored = (np.array([n], "i8") for n in (row.nbytes, place.offset, place.stored))
        bases = as_array([row.base]) if row.base else None
        return cls(as_array([row.digest]), nbytes, offset, stored, place.codec, bases)


class PackWriter:
    """The packs of one save to one tier, opened as they are needed.

    Args:
        tier: where they go.
        run, seq, rank: what they are named after.
        label: what stands in place of the pack's number, if not its number.
    """

    def __init__(self, tier: Tier, run: str, seq: int, rank: int = 0, label: str = "") -> None:
        self._tier, self._run, self._label = tier, run, label
        self._stem = f"packs/{run}/{seq:012d}-{rank}"
        self._object: ObjectWriter | None = None
        self._key, self._at = "", 0
        self._rows: list[Rows] = []
        self.sizes: dict[str, int] = {}
        self.stored = 0

    def add(
        self,
        data: Buffer,
        digest: bytes,
        nbytes: int,
        codec: str,
        release: Release | None = None,
        base: Base | None = None,
    ) -> Place:
        """Append one encoded chunk; ``release`` is called when the tier needs ``data`` no longer, also on an error."""
        at = self._append(data, release)
        place = Place(self._key, at, len(data), codec, base)
        self._rows.append(Rows.of_one(Row(digest, nbytes, place, b"" if base is None else base.digest)))
        return place

    def add_run(self, data: Buffer, rows: Rows, release: Release | None = None) -> tuple[str, int]:
        """Append raw chunks that lie one after the other in ``data``, as they lie there, in one piece.

        Args:
            rows: the chunks, with offsets from the beginning of ``data``.
            release: as for `add`.

        Returns:
            The pack's key, and where in it ``data`` begins.
        """
        at = self._append(data, release)
        self._rows.append(rows._replace(offset=rows.offset + at))
        return self._key, at

    def _append(self, data: Buffer, release: Release | None) -> int:
        """Add bytes to the open pack; where in it they begin."""
        try:
            pack = self._room(len(data))
        except BaseException:
            if release is not None:
                release()
            raise
        at = self._at
        pack.append(data, release)
        self._at += len(data)
        self.stored += len(data)
        return at

    def _room(self, nbytes: int) -> ObjectWriter:
        """The open pack, at a place fit for a chunk of that length."""
        if self._object is not None and self._at + nbytes + BLOCK > MAX_PACK:
            self._finish()
        if self._object is None:
            label = self._label or str(len(self.sizes))
            self._key = f"{self._stem}-{label}-{uuid.uuid4().hex[:12]}"
            self._object, self._at = self._tier.writer(self._key), 0
        if nbytes >= BIG and (gap := -self._at % BLOCK):
            self._object.append(_ZEROS[:gap])
            self._at += gap
        return self._object

    def close(self, *versions: bytes) -> dict[str, int]:
        """Make all packs visible and durable; their lengths by key.

        Args:
            versions: versions' sections, copies of which go into the last pack: they are looked for where every
                record is lost.
        """
        if self._object is not None:
            self._finish(*versions)
        return self.sizes

    def _finish(self, *versions: bytes) -> None:
        assert self._object is not None
        footer = as_buffer(b"".join(versions) + encode_footer(self._rows, self._at, versions))
        self._object.append(footer)
        # Forget the writer only once it closed: after an error, abort() must still reach it.
        self._object.close()
        self.sizes[self._key] = self._at + len(footer)
        self._object, self._rows = None, []

    def abort(self) -> None:
        """Leave nothing: the open pack is aborted, closed ones are deleted."""
        keys, self.sizes = list(self.sizes), {}
        try:
            if self._object is not None:
                # Its close may have taken effect although the answer was lost.
                keys.append(self._key)
                self._object.abort()
        finally:
            self._object = None
            for key in keys:
                self._tier.delete(key)


def encode_footer(rows: Sequence[Rows], at: int = 0, versions: Sequence[bytes] = ()) -> bytes:
    """The footer of a pack that holds these chunks, and perhaps versions' sections from an offset on."""
    copies: list[list[object]] = [
        [at + sum(map(len, versions[:i])), len(v), checksum(v).hex()] for i, v in enumerate(versions)
    ]
    said: dict[str, list[object]] = {"version": copies[-1]} if copies else {}
    said |= {"versions": list(copies[:-1])} if copies[1:] else {}
    codecs = sorted({r.codec for r in rows})

    def column(name: str, dtype: str) -> Array:
        return np.concatenate([getattr(r, name) for r in rows] or [np.zeros(0)]).astype(dtype)

    deltas = any(r.bases is not None for r in rows)
    table = col.encode(
        {"codecs": codecs, "requires": [DELTA] if deltas else [], **said},
        {
            "chunk.digest": np.concatenate([r.digests for r in rows] or [np.zeros((0, 2), "<u8")]).reshape(-1),
            "chunk.nbytes": column("nbytes", "<u4"),
            "chunk.offset": column("offset", "<u8"),
            "chunk.stored": column("stored", "<u4"),
            "chunk.codec": np.repeat([codecs.index(r.codec) for r in rows], [len(r.nbytes) for r in rows]).astype(
                "<u1"
            ),
            **({"chunk.base": _bases(rows)} if deltas else {}),
        },
    )
    return table + len(table).to_bytes(4, "little") + checksum(table) + MAGIC


def _bases(rows: Sequence[Rows]) -> Array:
    """Digests of bases, zeros where there is none."""
    return np.concatenate([np.zeros_like(r.digests) if r.bases is None else r.bases for r in rows]).reshape(-1)


def read_footer(tier: Tier, key: str) -> list[Row]:
    """What a pack says it holds.

    Raises:
        FormatError: the object is no pack, or its footer is damaged.
        TierError: the tier could not be read.
    """
    table, end = _footer(tier, key)
    return list(_rows(table, key, end))


def version_sections(tier: Tier, key: str) -> list[memoryview]:
    """Copies of versions in a pack, as they were written.

    Raises: as `read_footer`.
    """
    table, end = _footer(tier, key)
    head = col.decode(table, f"footer of {key}")[0]
    more = head.get("versions", [])
    copies = [*(more if isinstance(more, list) else [more]), *([head["version"]] if head.get("version") else [])]
    return [_section(tier, key, copy, end) for copy in copies]


def _section(tier: Tier, key: str, copy: object, end: int) -> memoryview:
    sound = isinstance(copy, list) and len(copy) == 3 and all(type(n) is int and 0 <= n <= end for n in copy[:2])
    if not isinstance(copy, list) or not sound or copy[0] + copy[1] > end:
        raise FormatError(f"{tier.name}: {key}: its footer names a version outside the pack")
    section = view(_read(tier, key, copy[0], copy[1])).toreadonly()
    if checksum(section).hex() != copy[2]:
        raise FormatError(f"{tier.name}: {key}: its copy of the version is not what was written")
    return section


def _footer(tier: Tier, key: str) -> tuple[memoryview, int]:
    """A pack's footer, its checksum verified, and where in the pack it begins."""
    size = tier.size(key)
    if size < _TRAILER:
        raise FormatError(f"{tier.name}: {key}: {size} bytes are no pack")
    trailer = bytes(view(_read(tier, key, size - _TRAILER, _TRAILER)))
    length = int.from_bytes(trailer[:4], "little")
    if trailer[20:] != MAGIC or length > min(size - _TRAILER, MAX_FOOTER):
        raise FormatError(f"{tier.name}: {key}: does not end like a pack")
    table = view(_read(tier, key, size - _TRAILER - length, length)).toreadonly()
    if checksum(table) != trailer[4:20]:
        raise FormatError(f"{tier.name}: {key}: its footer is not what was written")
    return table, size - _TRAILER - length


def _read(tier: Tier, key: str, offset: int, nbytes: int) -> Buffer:
    out = empty_buffer(nbytes)
    tier.read(key, [Range(offset, out)])
    return out


def _rows(table: memoryview, key: str, end: int) -> Iterator[Row]:
    what = f"footer of {key}"
    head, columns = col.decode(table, what)
    refuse_unknown(head, what)
    codecs = [str(c) for c in col.field(head, "codecs", list, what)]
    nbytes = col.column(columns, "chunk.nbytes", "<u4", what)
    digests = col.column(columns, "chunk.digest", "<u8", what, 2 * len(nbytes)).reshape(-1, 2)
    bases = np.zeros_like(digests)
    if "chunk.base" in columns:
        bases = col.column(columns, "chunk.base", "<u8", what, 2 * len(nbytes)).reshape(-1, 2)
    offset = col.column(columns, "chunk.offset", "<u8", what, len(nbytes)).tolist()
    stored = col.column(columns, "chunk.stored", "<u4", what, len(nbytes)).tolist()
    codec = col.column(columns, "chunk.codec", "<u1", what, len(nbytes)).tolist()
    for i, n in enumerate(nbytes.tolist()):
        if codec[i] >= len(codecs) or offset[i] + stored[i] > end:
            raise FormatError(f"{what}: chunk {i} lies outside the pack, or has no codec")
        base = bases[i].tobytes() if codecs[codec[i]] == DELTA else b""
        yield Row(digests[i].tobytes(), n, Place(key, offset[i], stored[i], codecs[codec[i]]), base)
