"""Versions: what a state was at one step, as leaves, shards and chunk digests, and never where.

A version is immutable, the same bytes in every tier, and named by the digest of those bytes. Tables are NumPy columns:
a leaf has consecutive shards, a shard consecutive chunks, and chunk lengths follow from the shard's box, so that a
million chunks are sixteen million bytes and no Python objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from . import columns as col
from .box import Box
from .boxes import MANY, Boxes
from .catalog import Catalog
from .digest import checksum
from .errors import FormatError
from .head import Head, refuse_unknown
from .leaf import Leaf

Array = col.Array
WHAT = "version"
MAX_SHARD = 1 << 56


class ShardRow(NamedTuple):
    """One shard before it becomes a row: the leaf's index, the rank that holds it, its box."""

    leaf: int
    rank: int
    box: Box


class Shards(NamedTuple):
    """Many such rows as columns: ``(shards,)`` each."""

    leaf: Array
    rank: Array
    boxes: Boxes

    @classmethod
    def of(cls, rows: Iterable[ShardRow]) -> Shards:
        """The columns of these rows.

        Raises:
            FormatError: a box is none.
        """
        given = list(rows)
        boxes = Boxes.of(s.box for s in given)
        return cls(np.array([s.leaf for s in given], "<u4"), np.array([s.rank for s in given], "<u4"), boxes)


@dataclass(frozen=True, eq=False)
class Version:
    """A head and three tables.

    Attributes:
        head: what the version says of itself.
        leaves: one per value and container of the state, in the state's own order.
        shard_leaf, shard_rank: ``(shards,)``: the leaf's index, rising; the rank that saved it.
        boxes: per shard, its place in the leaf's global index space.
        chunk_end: ``(shards,)``: index after the shard's last chunk.
        digests: ``(chunks, 2)`` of uint64: each chunk's digest.
    """

    head: Head
    leaves: tuple[Leaf, ...]
    shard_leaf: Array
    shard_rank: Array
    boxes: Boxes
    chunk_end: Array
    digests: Array

    @classmethod
    def build(
        cls, head: Head, leaves: Sequence[Leaf] | Catalog, shards: Sequence[ShardRow] | Shards, digests: Array
    ) -> Version:
        """A version from rows; shards are given by rising leaf, digests in the order of shards and their chunks.

        Raises:
            FormatError: the rows do not fit together, or have no room in the tables.
        """
        head.check(WHAT)
        catalog = leaves if isinstance(leaves, Catalog) else Catalog.of(leaves)
        table = shards if isinstance(shards, Shards) else Shards.of(shards)
        nbytes = _shard_nbytes(catalog, table.leaf, table.boxes)
        version = cls(
            head,
            catalog.leaves,
            table.leaf,
            table.rank,
            table.boxes,
            np.cumsum(-(-nbytes // head.chunk), dtype="<u8"),
            np.ascontiguousarray(digests, "<u8").reshape(-1, 2),
        )
        version.__dict__.update(catalog=catalog, shard_nbytes=nbytes)
        version._check_digests()
        return version

    def again(self, head: Head, digests: Array) -> Version:
        """A later version of the very same leaves and shards, of which nothing is looked at again.

        Raises:
            FormatError: the head has no room in the tables, or there are more or fewer digests.
        """
        head.check(WHAT)
        if head.chunk != self.head.chunk or digests.shape != self.digests.shape:
            raise FormatError(
                f"{WHAT}: {len(digests)} digests of chunks of {head.chunk} bytes do not fit the one before"
            )
        version = dataclasses.replace(self, head=head, digests=np.ascontiguousarray(digests, "<u8"))
        of_this_one = ("data", "id", *(f.name for f in dataclasses.fields(self)))
        version.__dict__.update({k: v for k, v in self.__dict__.items() if k not in of_this_one})
        return version

    def _check_chunks(self) -> None:
        """Raises FormatError unless shards and chunks fit together."""
        counts = -(-self.shard_nbytes // self.head.chunk)
        if not np.array_equal(np.cumsum(counts), self.chunk_end.astype("i8")):
            raise FormatError(f"{WHAT}: shards and chunks do not add up")
        self._check_digests()

    def _check_digests(self) -> None:
        count = int(self.chunk_end[-1]) if len(self.chunk_end) else 0
        if len(self.digests) != count:
            raise FormatError(f"{WHAT}: {len(self.digests)} digests for {count} chunks")

    @cached_property
    def catalog(self) -> Catalog:
        """The leaves and their columns."""
        return Catalog.of(self.leaves)

    @property
    def leaf_index(self) -> Mapping[str, int]:
        """Encoded path of each leaf (see `encode_path`) to its index, in the order of the leaves."""
        return self.catalog.index

    @cached_property
    def shard_nbytes(self) -> Array:
        """``(shards,)`` of int64: bytes of each shard.

        Raises:
            FormatError: a shard is of no leaf, lies outside of it or is larger than any can be.
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
        first = col.starts_of(self.chunk_end).astype("i8")
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
        """Indices of the chunks of these leaves, rising."""
        wanted = np.zeros(len(self.leaves), bool)
        wanted[list(leaves)] = True
        return np.flatnonzero(wanted[self.chunk_leaf])

    @cached_property
    def tables(self) -> tuple[dict[str, list[str]], col.Columns]:
        """What the version's bytes say of leaves and shards: lists of names for the head, and columns."""
        names, columns = self.catalog.tables
        return names, {
            **columns,
            "shard.leaf": self.shard_leaf,
            "shard.rank": self.shard_rank,
            "shard.box": self.boxes.joined(),
            "shard.chunk": self.chunk_end,
        }

    @cached_property
    def data(self) -> bytes:
        """The version section: the bytes that are the same in every tier, also those this program does not know."""
        return _encode(self)

    @cached_property
    def id(self) -> str:
        """The version's name: 32 hexadecimal digits, the digest of its bytes."""
        return checksum(self.data).hex()

    @classmethod
    def decode(cls, data: memoryview) -> Version:
        """A version from its section.

        Raises:
            FormatError: the bytes are no version, or one that requires what this program does not know.
        """
        # A copy, so that nobody who reuses the buffer changes what is immutable; and the very bytes that were read,
        # because a newer program's optional fields must survive on the way to the next tier.
        section = bytes(data)
        version = _decode(memoryview(section))
        version._check_chunks()
        version.__dict__["data"] = section
        return version


def _encode(version: Version) -> bytes:
    names, columns = version.tables
    head = {**version.head.encode(), **names, "requires": []}
    return col.encode(head, {**columns, "chunk.digest": version.digests.reshape(-1)})


def _decode(data: memoryview) -> Version:
    head, columns = col.decode(data, WHAT)
    refuse_unknown(head, WHAT)
    catalog = Catalog.decode(head, columns)
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
        col.ends_of(col.column(columns, "shard.chunk", "<u8", WHAT, count), WHAT),
        digests.reshape(-1, 2),
    )
    version.__dict__["catalog"] = catalog
    return version


def decode_boxes(columns: col.Columns, catalog: Catalog, leaf: Array) -> Boxes:
    """The boxes of these leaves' shards.

    Raises:
        FormatError: there is no such leaf, or the column is absent or does not fit.
    """
    if len(leaf) and int(leaf.max()) >= len(catalog.leaves):
        raise FormatError(f"{WHAT}: a shard names no leaf")
    ndim = catalog.wholes.ndim[leaf]
    numbers = col.column(columns, "shard.box", "<i8", WHAT, 2 * int(ndim.sum()))
    if len(numbers) and int(numbers.min()) < 0:
        raise FormatError(f"{WHAT}: shard.box has a negative number")
    return Boxes.split(ndim, numbers)


def _shard_nbytes(catalog: Catalog, leaf: Array, boxes: Boxes) -> Array:
    """``(shards,)`` of int64: bytes of each shard, after the check that it is one."""
    if len(leaf) and (int(leaf.max()) >= len(catalog.leaves) or bool(np.any(leaf[1:] < leaf[:-1]))):
        raise FormatError(f"{WHAT}: shards are not in the order of {len(catalog.leaves)} leaves")
    sound = catalog.has_bytes[leaf] & boxes.within(catalog.wholes[leaf])
    itemsize = catalog.itemsize[leaf]
    if sound.all():
        sound = boxes.volumes <= np.where(itemsize > 0, MAX_SHARD // np.maximum(itemsize, 1), MANY)
    if not sound.all():
        wrong = int(np.argmin(sound))
        told = catalog.leaves[int(leaf[wrong])]
        raise FormatError(f"{WHAT}: leaf {told.name} of shape {told.spec.shape} has no part {boxes[wrong]}")
    nbytes: Array = boxes.volumes * itemsize
    return nbytes
