"""Parts: what one rank gives to a version on one tier, as bytes, and cut out of a whole record."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import columns as col
from .catalog import Catalog
from .digest import checksum
from .errors import FormatError
from .head import Head, refuse_unknown
from .layout import Draft, Layout
from .record import Record, frame, unframe
from .version import Shards, Version, decode_boxes

Array = col.Array
WHAT = "part"

MAX_PIECE = 64 << 20
"""Longest piece of a part's leaves, in bytes before they are compressed."""

_PER_PIECE = 32
"""Leaves per piece, on average."""
_REMEMBERED = 1 << 16


def part_of(record: Record, rank: int) -> Record:
    """The shards of one rank, cut out of a whole record, with all of its leaves."""
    version = record.version
    mine = version.shard_rank == rank
    shards = Shards(version.shard_leaf[mine], version.shard_rank[mine], version.boxes[np.flatnonzero(mine)])
    rows = np.flatnonzero(mine[version.chunk_shard])
    part = Version.build(version.head, version.catalog, shards, version.digests[rows])
    draft = Draft(len(rows))
    layout, here = record.layout, np.flatnonzero(record.layout.present[rows])
    draft.put_like(here, layout, rows[here])
    return Record(
        part, draft.build(dict(zip(layout.objects, layout.object_sizes.tolist(), strict=True))), record.commit
    )


def encode_part(record: Record) -> bytes:
    """A part as bytes: framed as a record is, in one table, and its leaves in pieces that other ranks have too.

    Raises:
        FormatError: it could not be read back.
    """
    version = record.version
    record.layout.check(version)
    pieces = _pieces(version.catalog)
    head, places = record.layout.tables
    table = col.encode(
        {**version.head.encode(), **head, "commit": _checked(record.commit)},
        {
            "piece.end": np.cumsum([len(p) for p in pieces], dtype="<u8"),
            "shard.leaf": version.shard_leaf,
            "shard.rank": version.shard_rank,
            "shard.box": version.boxes.joined(),
            "chunk.digest": version.digests.reshape(-1),
            **places,
        },
    )
    return frame({"part": table, "pieces": b"".join(pieces)})


def _checked(commit: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(commit.get("id"), str):
        raise FormatError(f"{WHAT} has a commit without an id")
    return dict(commit)


class PartReader:
    """Reads the parts of many ranks, and each piece of their leaves once."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, Catalog] = {}
        self._catalogs: dict[bytes, Catalog] = {}

    def decode(self, data: bytes | memoryview) -> Record:
        """A part from its bytes.

        Raises:
            FormatError: foreign, truncated or changed bytes, or a format this program does not know.
        """
        sections = unframe(memoryview(data))
        if missing := {"part", "pieces"} - set(sections):
            raise FormatError(f"{WHAT} has no section {', '.join(sorted(missing))}")
        head, columns = col.decode(sections["part"], WHAT)
        refuse_unknown(head, WHAT)
        catalog = self._catalog(sections["pieces"], col.column(columns, "piece.end", "<u8", WHAT))
        leaf = col.column(columns, "shard.leaf", "<u4", WHAT)
        rank = col.column(columns, "shard.rank", "<u4", WHAT, len(leaf))
        digests = col.column(columns, "chunk.digest", "<u8", WHAT)
        if len(digests) % 2:
            raise FormatError(f"{WHAT}: half a digest is left over")
        shards = Shards(leaf, rank, decode_boxes(columns, catalog, leaf))
        version = Version.build(Head.decode(head, WHAT), catalog, shards, digests)
        return Record(version, Layout.of(head, columns, version), _checked(col.field(head, "commit", dict, WHAT)))

    def _catalog(self, pieces: memoryview, ends: Array) -> Catalog:
        name = checksum(pieces) + checksum(ends.tobytes())
        found = self._catalogs.get(name)
        if found is None:
            if (int(col.ends_of(ends, WHAT)[-1]) if len(ends) else 0) != len(pieces):
                raise FormatError(f"{WHAT}: its pieces do not add up")
            starts = col.starts_of(ends).tolist()
            found = Catalog.join([self._piece(bytes(pieces[a:b])) for a, b in zip(starts, ends.tolist(), strict=True)])
            _remember(self._catalogs, name, found)
        return found

    def _piece(self, data: bytes) -> Catalog:
        found = self._pieces.get(data)
        if found is None:
            found = _decode_piece(data)
            _remember(self._pieces, data, found)
        return found


def _remember(known: dict[bytes, Catalog], name: bytes, found: Catalog) -> None:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[name] = found


def _decode_piece(data: bytes) -> Catalog:
    try:
        unpacked = zlib.decompressobj()
        table = unpacked.decompress(data, MAX_PIECE)
    except zlib.error as error:
        raise FormatError(f"{WHAT}: a piece of its leaves cannot be read") from error
    if not unpacked.eof or unpacked.unused_data:
        raise FormatError(f"{WHAT}: a piece of its leaves is cut off, or longer than {MAX_PIECE} bytes")
    return Catalog.decode(*col.decode(memoryview(table), WHAT))


def _pieces(catalog: Catalog) -> Sequence[bytes]:
    """The leaves as pieces, which are made once and then kept beside them."""
    kept: dict[str, Any] = catalog.__dict__
    if "encoded" not in kept:
        kept["encoded"] = tuple(_encode_piece(piece) for piece in _cut(catalog))
    found: tuple[bytes, ...] = kept["encoded"]
    return found


def _cut(catalog: Catalog) -> list[Catalog]:
    """The catalog in pieces that end where a path's checksum says so, not by number: where one rank has a leaf more
    than the others have, all pieces but one are the same."""
    ends = [i + 1 for i, path in enumerate(catalog.paths) if checksum(path.encode())[0] % _PER_PIECE == 0]
    starts, ends = [0, *ends], [*ends, len(catalog.leaves)]
    return [Catalog.of(catalog.leaves[a:b]) for a, b in zip(starts, ends, strict=True) if b > a]


def _encode_piece(piece: Catalog) -> bytes:
    names, columns = piece.tables
    table = col.encode(names, columns)
    if len(table) > MAX_PIECE:
        raise FormatError(
            f"leaves from {piece.leaves[0].name} on take {len(table)} bytes; at most {MAX_PIECE} are read"
        )
    return zlib.compress(table)
