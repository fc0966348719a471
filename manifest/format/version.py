"""Versions: the manifest of a state at one step, as leaves, shards and chunk digests; never where the chunks are.

A version is immutable, the same bytes in every tier, and named by the digest of those bytes. Its tables are NumPy
columns: a leaf has consecutive shards, a shard has consecutive chunks, and chunk lengths follow from the shard's box.
So a million chunks take sixteen million bytes and no Python objects. `Head` has the fields beside the tables: run,
sequence number, step, time, parent, metadata.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.arrays import BLOCK, Array, check_rising, starts_of
from tierstate.manifest.boxes import MAX_ELEMENTS, Box, Boxes
from tierstate.manifest.chunk import CHUNK_GRAIN, MAX_CHUNK_SIZE
from tierstate.manifest.digest import ALGORITHMS, checksum
from tierstate.manifest.errors import FormatError

from . import table as col
from .leaf import Leaf, LeafTable
from .statistics import ChunkStatistics

MAX_SEQ = 10**12 - 1
"""Largest sequence number: what fits the twelve digits of a record's key."""


MAX_TIME = 2**53
"""Largest time of a save, in seconds since 1970."""


FEATURES: frozenset[str] = frozenset({"delta"})
"""Names of features that this program can read; a table that requires another feature is refused."""


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "run": str, "seq": int, "step": int, "time": (int, float), "parent": str,
    "chunk": int, "digest": str, "world": int, "metadata": dict,
}  # fmt: skip


_RANGES = (("seq", 0, MAX_SEQ), ("step", -(2**63), 2**63 - 1), ("time", 0, MAX_TIME), ("world", 1, 2**32))


WHAT = "version"


MAX_SHARD_BYTES = 1 << 56


@dataclass(frozen=True)
class Head:
    """The fields of a version beside its tables.

    Attributes:
        run, seq: its run, and its sequence number there, from 0 to `MAX_SEQ`.
        step: the user's training step.
        time: time of the save in seconds since 1970.
        parent: id of the version before it in the run, or empty.
        chunk: chunk length in bytes.
        digest: name of the digest algorithm.
        world: number of ranks that took part.
        metadata: the user's JSON values.
    """

    run: str
    seq: int
    step: int
    time: float
    parent: str = ""
    chunk: int = 16 << 20
    digest: str = "xxh3-128"
    world: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """The head as JSON types."""
        return {name: getattr(self, name) for name in _FIELDS} | {"metadata": dict(self.metadata)}

    @classmethod
    def decode(cls, head: Mapping[str, Any], what: str = "version") -> Head:
        """A head from JSON types.

        Raises:
            FormatError: a field is absent, of another type or out of its range.
        """
        found = cls(**{name: col.json_field(head, name, kind, what) for name, kind in _FIELDS.items()})
        found.check(what)
        col.check_depth(found.metadata, f"{what}: metadata")
        return found

    def check(self, what: str = "version") -> None:
        """Raises FormatError if a number is out of its range or the digest is not known."""
        if not 0 < self.chunk <= MAX_CHUNK_SIZE or self.chunk % CHUNK_GRAIN:
            raise FormatError(f"{what} has chunks of {self.chunk} bytes; right is a multiple of 16, at most 1 GiB")
        if self.digest not in ALGORITHMS:
            raise FormatError(f"{what} uses digest {self.digest!r:.40}; known are {', '.join(ALGORITHMS)}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:  # also where it is NaN
                raise FormatError(f"{what} has {name} {reprlib.repr(value)}; right is a number from {low} to {high}")


def check_features(head: Mapping[str, Any], what: str) -> None:
    """Raises FormatError if a table requires a feature that this program does not know."""
    unknown = set(col.string_list(head, "requires", what)) - FEATURES
    if unknown:
        names = ", ".join(sorted(unknown))
        raise FormatError(f"{what} requires {names}, which this program does not know: use a newer one")


class ShardRow(NamedTuple):
    """One shard before it becomes a row: the leaf's index, the rank that holds it, its box."""

    leaf: int
    rank: int
    box: Box


class Shards(NamedTuple):
    """Shards as columns: ``(shards,)`` each."""

    leaf: Array
    rank: Array
    boxes: Boxes

    @classmethod
    def of(cls, rows: Iterable[ShardRow]) -> Shards:
        """The columns of these rows.

        Raises:
            FormatError: a box is not valid.
        """
        given = list(rows)
        boxes = Boxes.of(s.box for s in given)
        return cls(np.array([s.leaf for s in given], "<u4"), np.array([s.rank for s in given], "<u4"), boxes)


@dataclass(frozen=True, eq=False)
class Version:
    """A head and three tables.

    Attributes:
        head: run, sequence number, step, metadata and so on.
        leaves: one per value and container of the state, in the state's own order.
        shard_leaf, shard_rank: ``(shards,)``: index of the leaf, ascending; the rank that saved the shard.
        boxes: for each shard its box in the leaf's global index space.
        chunk_end: ``(shards,)``: index after the shard's last chunk.
        digests: ``(chunks, 2)`` of uint64: each chunk's digest.
        statistics: what is known of each chunk's elements; None if the save made no statistics.
    """

    head: Head
    leaves: tuple[Leaf, ...]
    shard_leaf: Array
    shard_rank: Array
    boxes: Boxes
    chunk_end: Array
    digests: Array
    statistics: ChunkStatistics | None = None

    @classmethod
    def build(
        cls,
        head: Head,
        leaves: Sequence[Leaf] | LeafTable,
        shards: Sequence[ShardRow] | Shards,
        digests: Array,
        statistics: ChunkStatistics | None = None,
    ) -> Version:
        """A version from rows. Shards are in ascending order of leaves, digests in the order of shards and chunks.

        Raises:
            FormatError: the rows are inconsistent, or numbers do not fit the columns.
        """
        head.check(WHAT)
        catalog = leaves if isinstance(leaves, LeafTable) else LeafTable.of(leaves)
        table = shards if isinstance(shards, Shards) else Shards.of(shards)
        nbytes = _shard_nbytes(catalog, table.leaf, table.boxes)
        version = cls(
            head,
            catalog.leaves,
            table.leaf,
            table.rank,
            table.boxes,
            # They may be a part's, which is untrusted: of more chunks than 64 bits can count the ends would fall.
            check_rising(np.cumsum(-(-nbytes // head.chunk), dtype="<u8"), WHAT),
            np.ascontiguousarray(digests, "<u8").reshape(-1, 2),
            statistics,
        )
        version.__dict__.update(catalog=catalog, shard_nbytes=nbytes)
        version._check_digests()
        return version

    def again(self, head: Head, digests: Array, statistics: ChunkStatistics | None = None) -> Version:
        """A later version with the same leaves and shards, which are not checked again.

        Raises:
            FormatError: a number of the head is out of range, or the number of digests differs.
        """
        head.check(WHAT)
        if head.chunk != self.head.chunk or digests.shape != self.digests.shape:
            raise FormatError(
                f"{WHAT}: {len(digests)} digests of chunks of {head.chunk} bytes do not fit the one before"
            )
        digests = np.ascontiguousarray(digests, "<u8")
        version = dataclasses.replace(self, head=head, digests=digests, statistics=statistics)
        of_this_one = ("data", "id", *(f.name for f in dataclasses.fields(self)))
        # Of a copy, which is made at once: threads that publish this version may ask for another column meanwhile.
        known = self.__dict__.copy()
        version.__dict__.update({k: v for k, v in known.items() if k not in of_this_one})
        return version

    def _check_chunks(self) -> None:
        """Raises FormatError unless shards and chunks are consistent."""
        counts = -(-self.shard_nbytes // self.head.chunk)
        if not np.array_equal(np.cumsum(counts), self.chunk_end.astype("i8")):
            raise FormatError(f"{WHAT}: shards and chunks do not add up")
        self._check_digests()

    def _check_digests(self) -> None:
        count = int(self.chunk_end[-1]) if len(self.chunk_end) else 0
        if len(self.digests) != count:
            raise FormatError(f"{WHAT}: {len(self.digests)} digests for {count} chunks")

    @cached_property
    def catalog(self) -> LeafTable:
        """The leaves and their columns."""
        return LeafTable.of(self.leaves)

    @property
    def leaf_index(self) -> Mapping[str, int]:
        """Encoded path of each leaf (see `encode_path`) to its index, in the order of the leaves."""
        return self.catalog.index

    @cached_property
    def shard_nbytes(self) -> Array:
        """``(shards,)`` of int64: bytes of each shard.

        Raises:
            FormatError: a shard has no leaf, is outside of its leaf, or is too large.
        """
        return _shard_nbytes(self.catalog, self.shard_leaf, self.boxes)

    @cached_property
    def chunk_shard(self) -> Array:
        """``(chunks,)``: the shard of each chunk."""
        counts = np.diff(self.chunk_end.astype("i8"), prepend=0)
        shards: Array = np.repeat(np.arange(len(self.boxes)), counts)
        return shards

    @cached_property
    def chunk_start(self) -> Array:
        """``(chunks,)`` of int64: offset of each chunk within its shard, in bytes."""
        first = starts_of(self.chunk_end).astype("i8")
        starts: Array = (np.arange(len(self.digests)) - first[self.chunk_shard]) * self.head.chunk
        return starts

    @cached_property
    def chunk_nbytes(self) -> Array:
        """``(chunks,)`` of int64: bytes of each chunk."""
        left: Array = self.shard_nbytes[self.chunk_shard] - self.chunk_start
        return np.minimum(left, self.head.chunk)

    @cached_property
    def chunk_leaf(self) -> Array:
        """``(chunks,)``: the leaf of each chunk."""
        return self.shard_leaf[self.chunk_shard]

    @property
    def nbytes(self) -> int:
        """Raw bytes of all chunks."""
        return int(self.shard_nbytes.sum())

    def rows_of(self, leaves: Sequence[int]) -> Array:
        """Indices of the chunks of these leaves, ascending."""
        wanted = np.zeros(len(self.leaves), bool)
        wanted[list(leaves)] = True
        return np.flatnonzero(wanted[self.chunk_leaf])

    @cached_property
    def tables(self) -> tuple[dict[str, list[str]], col.Columns]:
        """Leaves and shards in their stored form: lists of names for the head, and columns."""
        names, columns = self.catalog.tables
        return names, {
            **columns,
            "shard.leaf": self.shard_leaf,
            "shard.rank": self.shard_rank,
            "shard.box": self.boxes.to_numbers(),
            "shard.chunk": self.chunk_end,
        }

    @cached_property
    def data(self) -> bytes:
        """The version section of a record: the same bytes in every tier, with unknown fields of later programs."""
        return _encode(self)

    @cached_property
    def id(self) -> str:
        """The version's id: 32 hexadecimal digits, the digest of its bytes."""
        return checksum(self.data).hex()

    @classmethod
    def decode(cls, data: memoryview) -> Version:
        """A version from its section.

        Raises:
            FormatError: the bytes are not a version, or it requires an unknown feature.
        """
        # A copy, because the buffer may be reused. Exactly the bytes that were read, because optional fields of a newer
        # program must be kept when the version is copied to another tier.
        section = bytes(data)
        version = _decode(memoryview(section))
        version._check_chunks()
        version.__dict__["data"] = section
        return version


def _encode(version: Version) -> bytes:
    names, columns = version.tables
    head = {**version.head.encode(), **names, "requires": []}
    more = version.statistics.encode() if version.statistics is not None else {}
    return col.encode_table(head, {**columns, "chunk.digest": version.digests.reshape(-1), **more})


def _decode(data: memoryview) -> Version:
    head, columns = col.decode_table(data, WHAT)
    check_features(head, WHAT)
    catalog = LeafTable.decode(head, columns)
    count = len(col.column(columns, "shard.leaf", "<u4", WHAT))
    digests = col.column(columns, "chunk.digest", "<u8", WHAT)
    if len(digests) % 2:
        raise FormatError(f"{WHAT}: half a digest is left over")
    version = Version(
        Head.decode(head),
        catalog.leaves,
        columns["shard.leaf"],
        col.column(columns, "shard.rank", "<u4", WHAT, count),
        decode_boxes(columns, catalog, columns["shard.leaf"]),
        check_rising(col.column(columns, "shard.chunk", "<u8", WHAT, count), WHAT),
        digests.reshape(-1, 2),
        ChunkStatistics.decode(columns, len(digests) // 2, WHAT),
    )
    version.__dict__["catalog"] = catalog
    return version


def decode_boxes(columns: col.Columns, catalog: LeafTable, leaf: Array) -> Boxes:
    """The boxes of these leaves' shards.

    Raises:
        FormatError: a leaf does not exist, or the column is absent or does not fit.
    """
    if len(leaf) and int(leaf.max()) >= len(catalog.leaves):
        raise FormatError(f"{WHAT}: a shard names no leaf")
    ndim = catalog.wholes.ndim[leaf]
    numbers = col.column(columns, "shard.box", "<i8", WHAT, 2 * int(ndim.sum()))
    if len(numbers) and int(numbers.min()) < 0:
        raise FormatError(f"{WHAT}: shard.box has a negative number")
    return Boxes.from_numbers(ndim, numbers)


def _shard_nbytes(catalog: LeafTable, leaf: Array, boxes: Boxes) -> Array:
    """``(shards,)`` of int64: bytes of each shard, after a check of its leaf and box."""
    if len(leaf) and (int(leaf.max()) >= len(catalog.leaves) or bool(np.any(leaf[1:] < leaf[:-1]))):
        raise FormatError(f"{WHAT}: shards are not in the order of {len(catalog.leaves)} leaves")
    blocks = [slice(at, at + BLOCK) for at in range(0, len(leaf), BLOCK)]
    found = [_block_nbytes(catalog, leaf[block], boxes[block]) for block in blocks]
    return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, "i8"), *found])


def _block_nbytes(catalog: LeafTable, leaf: Array, boxes: Boxes) -> Array:
    sound = catalog.has_bytes[leaf] & boxes.within(catalog.wholes[leaf])
    itemsize = catalog.itemsize[leaf]
    if sound.all():
        sound = boxes.volumes <= np.where(itemsize > 0, MAX_SHARD_BYTES // np.maximum(itemsize, 1), MAX_ELEMENTS)
    if not sound.all():
        wrong = int(np.argmin(sound))
        there = catalog.leaves[int(leaf[wrong])]
        raise FormatError(f"{WHAT}: leaf {there.name} of shape {there.spec.shape} has no part {boxes[wrong]}")
    nbytes: Array = boxes.volumes * itemsize
    return nbytes


def copy_stages(version: Version) -> Array:
    """``(leaves,)``: the stage in which a copy to a tier writes a leaf: 0 if one shard is the whole leaf, else -1."""
    shards = np.bincount(version.shard_leaf, minlength=len(version.leaves))
    found = np.where(shards == 1, 0, -1)
    for leaf, box in zip(version.shard_leaf.tolist(), version.boxes, strict=True):
        if box.shape != version.leaves[leaf].spec.shape:
            found[leaf] = -1
    return found
