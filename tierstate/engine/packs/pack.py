"""Packs: objects that hold many encoded chunks, with a footer that lists them; how they are written and read.

::

    chunk | chunk | ... | footer: a table | u32 length of the table | xxh3-128 of the table | magic (8 bytes)

Small chunks follow each other without a gap. Chunks of 1 MiB and more start at a multiple of 4 KiB, so that they can be
read with direct I/O into aligned memory. The footer has one row per chunk, so that the layout of a lost record can be
rebuilt from the packs (`PackScan`) and a verification can compare it with the record (`footer_mismatches`).

Packs that are files of another format (`formats`) have no footer: their own headers say where each leaf is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from tierstate.manifest.arrays import Array, digest_array
from tierstate.manifest.chunk import Buffer, as_buffer, view
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, MediaError, NotFound, TierError, TierstateError, Unauthentic
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import DELTA, ChunkPlace, DeltaBase, Layout, holds_chunks
from tierstate.manifest.format.version import Version, check_features
from tierstate.manifest.history.leases import pinned_runs
from tierstate.manifest.history.log import check_run
from tierstate.tiers.base import ObjectWriter, Release, Tier, layer_of, read_range
from tierstate.tiers.concurrency import results_ahead
from tierstate.tiers.wrappers.seal import Sealed

from .keys import PackKey, has_footer, is_mend, pack_prefix, seq_of
from .slab_layout import BIG, BLOCK

MAGIC = b"\x89TSP\r\n\x1a\n"


MAX_PACK = 4 << 30
"""Most bytes of chunks in a pack; a single chunk that is longer has a pack of its own. A save writes as few packs as
this allows: file systems are fastest with one large file per rank."""


MAX_FOOTER = 256 << 20


FOOTER_AHEAD = 16 << 10
"""Bytes at the end of a pack that are read at once: a footer of some 400 chunks."""


T = TypeVar("T")


_TRAILER = 4 + 16 + 8


_ZEROS = as_buffer(bytearray(BLOCK))


class FooterRow(NamedTuple):
    """A footer's row: the chunk's digest and raw length, and where and how it is stored.

    Attributes:
        digest, nbytes: the chunk's digest and raw length.
        place: where it is stored; a place read from a footer has no delta base.
        base: digest of its delta base; empty if it is not a delta.
    """

    digest: bytes
    nbytes: int
    place: ChunkPlace
    base: bytes = b""


class FooterRows(NamedTuple):
    """Footer rows of chunks with the same codec: columns of one length, as in `FooterRow`; ``bases`` are digests."""

    digests: Array
    nbytes: Array
    offset: Array
    stored: Array
    codec: str
    bases: Array | None = None

    @classmethod
    def of_one(cls, row: FooterRow) -> FooterRows:
        """A single row."""
        place = row.place
        nbytes, offset, stored = (np.array([n], "i8") for n in (row.nbytes, place.offset, place.stored))
        bases = digest_array([row.base]) if row.base else None
        return cls(digest_array([row.digest]), nbytes, offset, stored, place.codec, bases)


class PackWriter:
    """Writes the packs of one save to one tier; opens each pack when it is needed.

    Args:
        tier: the tier to write to.
        run, seq, rank: parts of their keys.
        label: label in their keys; empty: the pack's number within the save.
    """

    def __init__(self, tier: Tier, run: str, seq: int, rank: int = 0, label: str = "") -> None:
        self._tier, self._run, self._seq, self._rank, self._label = tier, run, seq, rank, label
        self._object: ObjectWriter | None = None
        self._key, self._at = "", 0
        self._rows: list[FooterRows] = []
        self.sizes: dict[str, int] = {}
        self.stored = 0

    def add(
        self,
        data: Buffer,
        digest: bytes,
        nbytes: int,
        codec: str,
        release: Release | None = None,
        base: DeltaBase | None = None,
    ) -> ChunkPlace:
        """Append one encoded chunk; ``release`` is called when ``data`` is no longer needed, also on an error."""
        at = self._append(data, release)
        place = ChunkPlace(self._key, at, len(data), codec, base)
        self._rows.append(FooterRows.of_one(FooterRow(digest, nbytes, place, b"" if base is None else base.digest)))
        return place

    def add_run(self, data: Buffer, rows: FooterRows, release: Release | None = None) -> tuple[str, int]:
        """Append raw chunks that are contiguous in ``data``, in one piece.

        Args:
            rows: the chunks, with offsets from the beginning of ``data``.
            release: as for `add`.

        Returns:
            The pack's key, and the offset of ``data`` in the pack.
        """
        at = self._append(data, release)
        self._rows.append(rows._replace(offset=rows.offset + at))
        return self._key, at

    def _append(self, data: Buffer, release: Release | None) -> int:
        """Append bytes to the open pack; returns their offset."""
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
        """The open pack, padded to the alignment of a chunk of that length; a new pack if it is full."""
        if self._object is not None and self._at + nbytes + BLOCK > MAX_PACK:
            self._finish()
        if self._object is None:
            self._key = str(PackKey.new(self._run, self._seq, self._rank, self._label or len(self.sizes)))
            self._object, self._at = self._tier.writer(self._key), 0
        if nbytes >= BIG and (gap := -self._at % BLOCK):
            self._object.append(_ZEROS[:gap])
            self._at += gap
        return self._object

    def close(self, *versions: bytes) -> dict[str, int]:
        """Make all packs visible and durable; their lengths by key.

        Args:
            versions: encoded versions, copies of which go into the last pack: `rebuild` reads them if all records
                are lost.
        """
        if self._object is not None:
            self._finish(*versions)
        return self.sizes

    def _finish(self, *versions: bytes) -> None:
        assert self._object is not None
        if (seals := layer_of(self._tier, Sealed)) is not None:
            versions = tuple(seals.seal(_copy_name(self._key), version) for version in versions)
        footer = as_buffer(b"".join(versions) + encode_footer(self._rows, self._at, versions))
        self._object.append(footer)
        # Clear `_object` only after close(): after an error, abort() still needs it.
        self._object.close()
        self.sizes[self._key] = self._at + len(footer)
        self._object, self._rows = None, []

    def abort(self) -> None:
        """Abort the open pack and delete the closed ones."""
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


def encode_footer(rows: Sequence[FooterRows], at: int = 0, versions: Sequence[bytes] = ()) -> bytes:
    """The footer of a pack with these chunks, and with copies of versions from offset ``at`` on."""
    copies: list[list[object]] = [
        [at + sum(map(len, versions[:i])), len(v), checksum(v).hex()] for i, v in enumerate(versions)
    ]
    said: dict[str, list[object]] = {"version": copies[-1]} if copies else {}
    said |= {"versions": list(copies[:-1])} if copies[1:] else {}
    codecs = sorted({r.codec for r in rows})

    def column(name: str, dtype: str) -> Array:
        return np.concatenate([getattr(r, name) for r in rows] or [np.zeros(0)]).astype(dtype)

    deltas = any(r.bases is not None for r in rows)
    table = col.encode_table(
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


def _bases(rows: Sequence[FooterRows]) -> Array:
    """Digests of the delta bases; zeros for chunks without a base."""
    return np.concatenate([np.zeros_like(r.digests) if r.bases is None else r.bases for r in rows]).reshape(-1)


def read_footer(tier: Tier, key: str) -> list[FooterRow]:
    """The rows of a pack's footer.

    Raises:
        FormatError: the object is not a pack, or its footer is damaged.
        TierError: the tier could not be read.
    """
    table, end = _footer(tier, key)
    return list(_rows(table, key, end))


def version_sections(tier: Tier, key: str) -> list[memoryview]:
    """The encoded copies of versions in a pack.

    Raises: as `read_footer`.
    """
    table, end = _footer(tier, key)
    head = col.decode_table(table, f"footer of {key}")[0]
    more = head.get("versions", [])
    copies = [*(more if isinstance(more, list) else [more]), *([head["version"]] if head.get("version") else [])]
    sections = [_section(tier, key, copy, end) for copy in copies]
    if (seals := layer_of(tier, Sealed)) is not None:
        return [seals.unseal(_copy_name(key), section) for section in sections]
    return sections


def _copy_name(key: str) -> str:
    """The name under which the copies of versions in a pack are sealed, where a tier's objects are: no object's key."""
    return f"{key}#version"


def _section(tier: Tier, key: str, copy: object, end: int) -> memoryview:
    sound = isinstance(copy, list) and len(copy) == 3 and all(type(n) is int and 0 <= n <= end for n in copy[:2])
    if not isinstance(copy, list) or not sound or copy[0] + copy[1] > end:
        raise FormatError(f"{tier.name}: {key}: its footer names a version outside the pack")
    section = view(read_range(tier, key, copy[0], copy[1])).toreadonly()
    if checksum(section).hex() != copy[2]:
        raise FormatError(f"{tier.name}: {key}: its copy of the version is not what was written")
    return section


def _footer(tier: Tier, key: str) -> tuple[memoryview, int]:
    """A pack's footer, with its checksum verified, and its offset in the pack."""
    size = tier.size(key)
    if size < _TRAILER:
        raise FormatError(f"{tier.name}: {key}: {size} bytes are no pack")
    end = bytes(view(_end(tier, key, size)))
    trailer = end[-_TRAILER:]
    length = int.from_bytes(trailer[:4], "little")
    if trailer[20:] != MAGIC or length > min(size - _TRAILER, MAX_FOOTER):
        raise FormatError(f"{tier.name}: {key}: does not end like a pack")
    if length + _TRAILER <= len(end):
        table = memoryview(end[-_TRAILER - length : -_TRAILER])
    else:
        table = view(read_range(tier, key, size - _TRAILER - length, length)).toreadonly()
    if checksum(table) != trailer[4:20]:
        raise FormatError(f"{tier.name}: {key}: its footer is not what was written")
    return table, size - _TRAILER - length


def _end(tier: Tier, key: str, size: int) -> Buffer:
    """The end of a pack, most often with all of its footer: a second request takes as long, where the tier is far."""
    try:
        return read_range(tier, key, max(0, size - FOOTER_AHEAD), min(size, FOOTER_AHEAD))
    except MediaError:  # of a chunk before the footer
        return read_range(tier, key, size - _TRAILER, _TRAILER)


def _rows(table: memoryview, key: str, end: int) -> Iterator[FooterRow]:
    what = f"footer of {key}"
    head, columns = col.decode_table(table, what)
    check_features(head, what)
    codecs = [str(c) for c in col.json_field(head, "codecs", list, what)]
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
        yield FooterRow(digests[i].tobytes(), n, ChunkPlace(key, offset[i], stored[i], codecs[codec[i]]), base)


def footer_mismatches(tier: Tier, version: Version, layout: Layout, rows: Array) -> Iterator[str]:
    """Messages about rows for which footer and layout differ; packs that do not exist are skipped."""
    digests, nbytes = version.digests.tobytes(), version.chunk_nbytes
    for number in np.unique(layout.object[rows]).tolist():
        key = layout.objects[number]
        if not has_footer(key):
            continue
        try:
            said = {r.place.offset: (r.digest, r.nbytes, r.place.stored, r.place.codec) for r in read_footer(tier, key)}
        except FormatError as error:
            yield str(error)
            continue
        except TierstateError:
            continue  # reported where the length was checked
        here = rows[layout.object[rows] == number]
        for row in here.tolist():
            place = layout.place(row)
            assert place is not None
            right = (digests[16 * row : 16 * row + 16], int(nbytes[row]), place.stored, place.codec)
            if said.get(place.offset) != right:
                leaf = version.leaves[int(version.chunk_leaf[row])].name
                yield f"{key}: its footer has another chunk at byte {place.offset} than the record, which has {leaf}"
                break


class PackScan:
    """Reads the footers of a run's packs, and of the runs that it was forked from: all chunks by digest.

    Args:
        tier: the tier to read.
        run: the run.
        related: other runs whose packs are read; None: those that it was forked from, as the pins in the tier say.
        go_on: list packs that cannot be asked now as ``away`` instead of raising.
        usable: says of the key of a pack whether `place` may return places in it.

    Attributes:
        runs: the runs whose packs were read; the run itself is the last one.
        packs: how many packs were read.
        sizes: lengths of packs by key.
        seqs: numbers of the run's versions for which packs were written, or of which packs have a copy.
        unread: packs whose footer, or whose copy of a version, cannot be read, and why.
        foreign: packs whose copies of versions are sealed with a key that the policy does not have, and why. That says
            nothing against their chunks, which newer records may name.
        rows: all rows of all footers.
        away: packs that cannot be asked now, and why.
    """

    def __init__(
        self,
        tier: Tier,
        run: str,
        related: Sequence[str] | None = None,
        *,
        go_on: bool = False,
        usable: Callable[[str], bool] = lambda _key: True,
    ) -> None:
        self._tier, self._go_on, self._usable = tier, go_on, usable
        self.away: dict[str, str] = {}
        sources = related_runs([pinned_runs(tier)], check_run(run)) if related is None else related
        self.runs = [*reversed(sources), run]
        self.packs = 0
        self.rows: list[FooterRow] = []
        self.sizes: dict[str, int] = {}
        self.seqs: set[int] = set()
        self.unread: dict[str, str] = {}
        self.foreign: dict[str, str] = {}
        self._places: dict[bytes, tuple[int, ChunkPlace]] = {}
        based: list[FooterRow] = []
        keys = list(self._keys(run))
        for key, found in zip(keys, results_ahead(self._footer_of, keys), strict=True):
            based += self._add(key, *found) if found is not None else []
        self.unread = {key: self.unread[key] for key in keys if key in self.unread}
        for row in based:
            # A delta is of use only if its base is found too.
            place = self._on_base(row)
            if place is not None:
                self._places.setdefault(row.digest, (row.nbytes, place))

    def place(self, digest: bytes, nbytes: int) -> ChunkPlace | None:
        """The place of a chunk of that digest and raw length; None if no pack has it."""
        found = self._places.get(digest)
        return found[1] if found is not None and found[0] == nbytes else None

    def versions(self, run: str) -> Iterator[Version]:
        """The versions of a run of which its packs have a copy."""
        keys = [key for key in self.sizes if key.startswith(pack_prefix(run))]
        for found in results_ahead(lambda key: self._asked(key, partial(self._copies, key)), keys):
            here = [version for version in found or () if version.head.run == run]
            self.seqs.update(version.head.seq for version in here)
            yield from (version for version in here if not _may_be_part(version))

    def _keys(self, run: str) -> Iterator[str]:
        """Packs of the related runs, then of the run; repair packs last."""
        for name in self.runs:
            keys = filter(holds_chunks, self._tier.list(pack_prefix(name)))
            for key in sorted(keys, key=lambda key: (is_mend(key), key)):
                if name == run and not is_mend(key) and (seq := seq_of(key)) is not None:
                    self.seqs.add(seq)
                yield key

    def _footer_of(self, key: str) -> tuple[list[FooterRow], int] | None:
        """The rows of a pack's footer, and the pack's length; None if they cannot be read, which is noted."""
        if not has_footer(key):
            self.unread[key] = "a file of another kind has no list of its chunks"
            return None

        def read() -> tuple[list[FooterRow], int]:
            table, end = _footer(self._tier, key)
            return list(_rows(table, key, end)), end + len(table) + _TRAILER

        return self._asked(key, read)

    def _add(self, key: str, rows: list[FooterRow], size: int) -> list[FooterRow]:
        """Add the chunks of a pack; returns its deltas, which need a base."""
        self.packs += 1
        self.sizes[key] = size
        self.rows += rows
        if not self._usable(key):
            return []
        self._places |= {row.digest: (row.nbytes, row.place) for row in rows if not row.base}
        return [row for row in rows if row.base]

    def _copies(self, key: str) -> list[Version]:
        try:
            return [Version.decode(section) for section in version_sections(self._tier, key)]
        except Unauthentic as error:
            if not error.key_id:
                raise
            self.foreign[key] = str(error)
            return []

    def _asked(self, key: str, read: Callable[[], T]) -> T | None:
        """Read something of a pack; None if it cannot be read, which is noted.

        It is read twice before it is called damaged, since bytes may be damaged on the way.
        """
        try:
            try:
                return read()
            except FormatError:
                return read()
        except (FormatError, NotFound, MediaError) as error:
            self.unread[key] = str(error)
        except TierError as error:
            if not self._go_on:
                raise
            self.away[key] = str(error)
        return None

    def _on_base(self, row: FooterRow) -> ChunkPlace | None:
        """The place of a delta, if its base is found too and is not a delta; else None."""
        known = self._places.get(row.base)
        if known is None or known[0] != row.nbytes or known[1].base is not None:
            return None
        place = known[1]
        return row.place._replace(base=DeltaBase(place.object, place.offset, place.stored, place.codec, row.base))


def related_runs(pins: Sequence[Mapping[str, set[str]]], run: str, *, forks: bool = False) -> list[str]:
    """The runs that a run was forked from, directly or indirectly, nearest first.

    Args:
        pins: of each tier, for each fork the runs whose versions it pins (`pinned_runs`).
        forks: also its forks, and all runs that are so related to it.
    """
    found = [run]
    for one in found:
        more = {source for these in pins for source in these.get(one, ())}
        more |= {by for these in pins for by, of in these.items() if forks and one in of}
        found += sorted(more - set(found))
    return found[1:]


def _may_be_part(version: Version) -> bool:
    """Whether it may be one rank's part of a version of several ranks, whose packs have only copies of the parts."""
    return version.head.world > 1 and len(set(version.shard_rank.tolist())) < 2
