"""Versions: what a state was at one step, as leaves, shards and chunk digests, and never where.

A version is immutable, the same bytes in every tier, and named by the digest of those bytes. Tables are NumPy columns:
a leaf has consecutive shards, a shard consecutive chunks, and chunk lengths follow from the shard's box, so that a
million chunks are sixteen million bytes and no Python objects.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from . import columns as col
from .box import Box
from .digest import checksum
from .errors import FormatError
from .head import Head, refuse_unknown
from .leaf import Leaf, Spec, decode_paths, encode_path

Array = col.Array
WHAT = "version"
MAX_SHARD = 1 << 56
MAX_ITEMSIZE = 0xFFFF
MAX_NDIM = 0xFF


class ShardRow(NamedTuple):
    """One shard before it becomes a row: the leaf's index, the rank that holds it, its box."""

    leaf: int
    rank: int
    box: Box


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
    boxes: tuple[Box, ...]
    chunk_end: Array
    digests: Array

    @classmethod
    def build(cls, head: Head, leaves: Sequence[Leaf], shards: Sequence[ShardRow], digests: Array) -> Version:
        """A version from rows; shards are given by rising leaf, digests in the order of shards and their chunks.

        Raises:
            FormatError: the rows do not fit together, or have no room in the tables.
        """
        head.check(WHAT)
        nbytes = [s.box.volume * leaves[s.leaf].spec.itemsize for s in shards]
        ends = np.cumsum([-(-n // head.chunk) for n in nbytes], dtype="<u8")
        version = cls(
            head,
            tuple(leaves),
            np.array([s.leaf for s in shards], "<u4"),
            np.array([s.rank for s in shards], "<u4"),
            tuple(s.box for s in shards),
            ends,
            np.ascontiguousarray(digests, "<u8").reshape(-1, 2),
        )
        version._check()
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

    def _check_leaves(self) -> None:
        if len(self.leaf_index) != len(self.leaves):
            raise FormatError(
                f"{WHAT}: {len(self.leaves) - len(self.leaf_index)} leaves have a path that another leaf has too"
            )
        for leaf in self.leaves:
            if leaf.spec.itemsize > MAX_ITEMSIZE or len(leaf.spec.shape) > MAX_NDIM:
                raise FormatError(
                    f"{WHAT}: leaf {leaf.name} has elements of more than {MAX_ITEMSIZE} bytes, or too many axes"
                )

    def _check(self) -> None:
        """The tables fit together; raises FormatError where they do not."""
        self._check_leaves()
        count, shards = len(self.leaves), len(self.boxes)
        if shards and (int(self.shard_leaf.max()) >= count or bool(np.any(np.diff(self.shard_leaf.astype("i8")) < 0))):
            raise FormatError(f"{WHAT}: shards are not in the order of {count} leaves")
        for leaf, box in zip(self.shard_leaf.tolist(), self.boxes, strict=True):
            spec = self.leaves[leaf].spec
            if not spec.has_bytes or not box.within(spec.shape) or box.volume * spec.itemsize > MAX_SHARD:
                raise FormatError(f"{WHAT}: leaf {self.leaves[leaf].name} of shape {spec.shape} has no part {box}")
        counts = -(-self.shard_nbytes // self.head.chunk)
        if not np.array_equal(np.cumsum(counts), self.chunk_end.astype("i8")):
            raise FormatError(f"{WHAT}: shards and chunks do not add up")
        if len(self.digests) != (int(self.chunk_end[-1]) if shards else 0):
            raise FormatError(f"{WHAT}: {len(self.digests)} digests for {int(counts.sum())} chunks")

    @cached_property
    def leaf_index(self) -> Mapping[str, int]:
        """Encoded path of each leaf (see `encode_path`) to its index, in the order of the leaves."""
        return {encode_path(leaf.path): i for i, leaf in enumerate(self.leaves)}

    @cached_property
    def shard_nbytes(self) -> Array:
        """``(shards,)`` of int64: bytes of each shard."""
        sizes = [
            b.volume * self.leaves[i].spec.itemsize for i, b in zip(self.shard_leaf.tolist(), self.boxes, strict=True)
        ]
        return np.array(sizes, "i8")

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
        return _tables(self)

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
        version._check()
        version.__dict__["data"] = section
        return version


def _encode(version: Version) -> bytes:
    names, columns = version.tables
    head = {**version.head.encode(), **names, "requires": []}
    return col.encode(head, {**columns, "chunk.digest": version.digests.reshape(-1)})


def _tables(version: Version) -> tuple[dict[str, list[str]], col.Columns]:
    specs = [leaf.spec for leaf in version.leaves]
    kinds, dtypes = sorted({s.kind for s in specs}), sorted({s.dtype for s in specs})
    attrs = [json.dumps(dict(s.attrs), sort_keys=True, separators=(",", ":")) if s.attrs else "" for s in specs]
    boxes = [n for b in version.boxes for part in b for n in part]
    return {"kinds": kinds, "dtypes": dtypes}, {
        **col.pool(list(version.leaf_index), "leaf.path"),
        "leaf.kind": np.array([kinds.index(s.kind) for s in specs], "<u2"),
        "leaf.dtype": np.array([dtypes.index(s.dtype) for s in specs], "<u2"),
        "leaf.itemsize": np.array([s.itemsize for s in specs], "<u2"),
        "leaf.ndim": np.array([len(s.shape) for s in specs], "<u1"),
        "leaf.shape": np.array([n for s in specs for n in s.shape], "<i8"),
        **col.pool(attrs, "leaf.attrs"),
        "shard.leaf": version.shard_leaf,
        "shard.rank": version.shard_rank,
        "shard.box": np.array(boxes, "<i8"),
        "shard.chunk": version.chunk_end,
    }


def _decode(data: memoryview) -> Version:
    head, columns = col.decode(data, WHAT)
    refuse_unknown(head, WHAT)
    leaves = _decode_leaves(head, columns)
    count = len(col.column(columns, "shard.leaf", "<u4", WHAT))
    shard_leaf = columns["shard.leaf"]
    digests = col.column(columns, "chunk.digest", "<u8", WHAT)
    if len(digests) % 2 or (count and int(shard_leaf.max()) >= len(leaves)):
        raise FormatError(f"{WHAT}: a shard names no leaf, or half a digest is left over")
    return Version(
        Head.decode(head),
        leaves,
        shard_leaf,
        col.column(columns, "shard.rank", "<u4", WHAT, count),
        _decode_boxes(columns, [len(leaves[i].spec.shape) for i in shard_leaf.tolist()]),
        col.ends_of(col.column(columns, "shard.chunk", "<u8", WHAT, count), WHAT),
        digests.reshape(-1, 2),
    )


def _decode_leaves(head: Mapping[str, Any], columns: col.Columns) -> tuple[Leaf, ...]:
    kinds, dtypes = col.names(head, "kinds", WHAT), col.names(head, "dtypes", WHAT)
    paths = col.texts(columns, "leaf.path", WHAT)
    count = len(paths)
    attrs = col.texts(columns, "leaf.attrs", WHAT, count)
    kind = _indices(columns, "leaf.kind", count, len(kinds))
    dtype = _indices(columns, "leaf.dtype", count, len(dtypes))
    itemsize = col.column(columns, "leaf.itemsize", "<u2", WHAT, count).tolist()
    shapes = _split(columns, "leaf.shape", col.column(columns, "leaf.ndim", "<u1", WHAT, count).tolist())
    return tuple(
        Leaf(p, Spec(kinds[k], dtypes[d], i, s, _decode_attrs(a)))
        for p, k, d, i, s, a in zip(decode_paths(paths), kind, dtype, itemsize, shapes, attrs, strict=True)
    )


def _decode_attrs(text: str) -> Mapping[str, Any]:
    try:
        attrs = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{WHAT}: attributes {text[:60]!r} are not JSON") from error
    if not isinstance(attrs, dict):
        raise FormatError(f"{WHAT}: attributes {text[:60]!r} are not an object")
    return attrs


def _decode_boxes(columns: col.Columns, ndims: list[int]) -> tuple[Box, ...]:
    flat = _split(columns, "shard.box", [2 * n for n in ndims])
    return tuple(Box(f[:n], f[n:]) for f, n in zip(flat, ndims, strict=True))


def _split(columns: col.Columns, name: str, lengths: list[int]) -> list[tuple[int, ...]]:
    values = col.column(columns, name, "<i8", WHAT, sum(lengths)).tolist()
    if values and min(values) < 0:
        raise FormatError(f"{WHAT}: {name} has a negative number")
    found, at = [], 0
    for length in lengths:
        found.append(tuple(values[at : at + length]))
        at += length
    return found


def _indices(columns: col.Columns, name: str, count: int, limit: int) -> list[int]:
    found = col.column(columns, name, "<u2", WHAT, count)
    if count and int(found.max()) >= limit:
        raise FormatError(f"{WHAT}: {name} points behind its list")
    return list(map(int, found.tolist()))
