"""Parts: one rank's shards of a version with their layout in one tier, as bytes that the ranks exchange for a commit.

Most ranks have the same leaves. So the leaf table of a part is cut into compressed pieces by content (content-defined
chunking), and `PartReader` decodes each distinct piece only once for all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tierstate.manifest.arrays import Array, check_rising, starts_of
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import Layout, LayoutBuilder
from tierstate.manifest.format.leaf import LeafTable
from tierstate.manifest.format.record import Record, decode_sections, encode_sections
from tierstate.manifest.format.statistics import ChunkStatistics
from tierstate.manifest.format.version import Head, Shards, Version, check_features, decode_boxes

WHAT = "part"


MAX_PIECE_BYTES = 64 << 20
"""Largest piece of a part's leaf table, in bytes before compression."""


_PER_PIECE = 32
"""Leaves per piece, on average."""


_REMEMBERED = 1 << 16


def part_of(record: Record, rank: int) -> Record:
    """The part of one rank, cut out of a whole record: its shards, with all leaves."""
    version = record.version
    mine = version.shard_rank == rank
    shards = Shards(version.shard_leaf[mine], version.shard_rank[mine], version.boxes[np.flatnonzero(mine)])
    rows = np.flatnonzero(mine[version.chunk_shard])
    statistics = version.statistics and version.statistics.rows(rows)
    part = Version.build(version.head, version.catalog, shards, version.digests[rows], statistics)
    draft = LayoutBuilder(len(rows))
    layout, here = record.layout, np.flatnonzero(record.layout.present[rows])
    draft.put_like(here, layout, rows[here])
    return Record(part, draft.build(layout.pack_sizes), record.commit)


def encode_part(record: Record) -> bytes:
    """A part as bytes: framed like a record, with the leaves in pieces that are equal to those of other ranks.

    Raises:
        FormatError: the part could not be decoded again.
    """
    version = record.version
    record.layout.check(version)
    pieces = _pieces(version.catalog)
    head, places = record.layout.tables
    table = col.encode_table(
        {**version.head.encode(), **head, "commit": _checked(record.commit)},
        {
            "piece.end": np.cumsum([len(p) for p in pieces], dtype="<u8"),
            "shard.leaf": version.shard_leaf,
            "shard.rank": version.shard_rank,
            "shard.box": version.boxes.to_numbers(),
            "chunk.digest": version.digests.reshape(-1),
            **(version.statistics.encode() if version.statistics is not None else {}),
            **places,
        },
    )
    return encode_sections({"part": table, "pieces": b"".join(pieces)})


def _checked(commit: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(commit.get("id"), str):
        raise FormatError(f"{WHAT} has a commit without an id")
    return dict(commit)


class PartReader:
    """Decodes the parts of many ranks, and each distinct piece of their leaf tables only once.

    Args:
        pieces: those that readers have decoded before, to which this one adds.
    """

    def __init__(self, pieces: dict[bytes, LeafTable] | None = None) -> None:
        self._pieces: dict[bytes, LeafTable] = {} if pieces is None else pieces
        self._catalogs: dict[bytes, LeafTable] = {}

    def decode(self, data: bytes | memoryview) -> Record:
        """A part from its bytes.

        Raises:
            FormatError: the bytes are not a part, are truncated or damaged, or have an unknown format number.
        """
        sections = decode_sections(memoryview(data))
        if missing := {"part", "pieces"} - set(sections):
            raise FormatError(f"{WHAT} has no section {', '.join(sorted(missing))}")
        head, columns = col.decode_table(sections["part"], WHAT)
        check_features(head, WHAT)
        catalog = self._catalog(sections["pieces"], col.column(columns, "piece.end", "<u8", WHAT))
        leaf = col.column(columns, "shard.leaf", "<u4", WHAT)
        rank = col.column(columns, "shard.rank", "<u4", WHAT, len(leaf))
        digests = col.column(columns, "chunk.digest", "<u8", WHAT)
        if len(digests) % 2:
            raise FormatError(f"{WHAT}: half a digest is left over")
        shards = Shards(leaf, rank, decode_boxes(columns, catalog, leaf))
        statistics = ChunkStatistics.decode(columns, len(digests) // 2, WHAT)
        version = Version.build(Head.decode(head, WHAT), catalog, shards, digests, statistics)
        layout = Layout.of(head, columns, version)
        for name in ("chunk_shard", "chunk_start", "chunk_nbytes"):
            version.__dict__.pop(name, None)  # the check of the layout made them: a quarter of what a part takes
        return Record(version, layout, _checked(col.json_field(head, "commit", dict, WHAT)))

    def _catalog(self, pieces: memoryview, ends: Array) -> LeafTable:
        name = checksum(pieces) + checksum(ends.tobytes())
        found = self._catalogs.get(name)
        if found is None:
            if (int(check_rising(ends, WHAT)[-1]) if len(ends) else 0) != len(pieces):
                raise FormatError(f"{WHAT}: its pieces do not add up")
            starts = starts_of(ends).tolist()
            found = LeafTable.concat(
                [self._piece(bytes(pieces[a:b])) for a, b in zip(starts, ends.tolist(), strict=True)]
            )
            _remember(self._catalogs, name, found)
        return found

    def _piece(self, data: bytes) -> LeafTable:
        found = self._pieces.get(data)
        if found is None:
            found = _decode_piece(data)
            _remember(self._pieces, data, found)
        return found


def _remember(known: dict[bytes, LeafTable], name: bytes, found: LeafTable) -> None:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[name] = found


def _decode_piece(data: bytes) -> LeafTable:
    try:
        unpacked = zlib.decompressobj()
        table = unpacked.decompress(data, MAX_PIECE_BYTES)
    except zlib.error as error:
        raise FormatError(f"{WHAT}: a piece of its leaves cannot be read") from error
    if not unpacked.eof or unpacked.unused_data:
        raise FormatError(f"{WHAT}: a piece of its leaves is cut off, or longer than {MAX_PIECE_BYTES} bytes")
    return LeafTable.decode(*col.decode_table(memoryview(table), WHAT))


def _pieces(catalog: LeafTable) -> Sequence[bytes]:
    """The encoded pieces of a leaf table, which are cached on the table."""
    kept: dict[str, Any] = catalog.__dict__
    if "encoded" not in kept:
        kept["encoded"] = tuple(_encode_piece(piece) for piece in _cut(catalog))
    found: tuple[bytes, ...] = kept["encoded"]
    return found


def _cut(catalog: LeafTable) -> list[LeafTable]:
    """The leaf table cut by content: the checksum of a path decides whether a piece ends there. So if one rank has one
    leaf more than the other ranks, all pieces but one are the same."""
    ends = [i + 1 for i, path in enumerate(catalog.paths) if checksum(path.encode())[0] % _PER_PIECE == 0]
    starts, ends = [0, *ends], [*ends, len(catalog.leaves)]
    return [LeafTable.of(catalog.leaves[a:b]) for a, b in zip(starts, ends, strict=True) if b > a]


def _encode_piece(piece: LeafTable) -> bytes:
    names, columns = piece.tables
    table = col.encode_table(names, columns)
    if len(table) > MAX_PIECE_BYTES:
        raise FormatError(
            f"leaves from {piece.leaves[0].name} on take {len(table)} bytes; at most {MAX_PIECE_BYTES} are read"
        )
    return zlib.compress(table)
