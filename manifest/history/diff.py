"""Diff: what changed between two versions, leaf by leaf, by the digests of chunks alone (no chunk is read)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Boxes
from tierstate.manifest.digest import DigestIndex
from tierstate.manifest.format.leaf import CONTAINERS, Leaf
from tierstate.manifest.format.leaf_path import Path, encode_path, format_path
from tierstate.manifest.format.version import Version

Change = Literal["added", "removed", "changed", "same"]


def rows_in_earlier(version: Version, leaves: Sequence[Leaf], rows: Array) -> Array:
    """For each chunk of a new version its row in an earlier version; -1 where the leaf has another path or spec there,
    or another number of chunks.

    Args:
        version: the earlier version.
        leaves: the leaves of the new version.
        rows: ``(chunks,)``: the leaf of each chunk of the new version, ascending.
    """
    index = _leaf_numbers(version, leaves)
    chunks = np.bincount(rows, minlength=len(leaves))
    chunks_then = np.bincount(version.chunk_leaf, minlength=len(version.leaves))
    same = (index >= 0) & (chunks > 0) & (chunks_then[index] == chunks)
    move = (np.cumsum(chunks_then) - chunks_then)[index] - (np.cumsum(chunks) - chunks)
    found: Array = np.where(same[rows], np.arange(len(rows)) + move[rows], -1)
    return found


def _leaf_numbers(version: Version, leaves: Sequence[Leaf]) -> Array:
    """``(leaves,)``: the index of each leaf in the earlier version, if path and spec are equal; otherwise -1."""
    if version.leaves is leaves:
        return np.arange(len(leaves))
    found = [version.leaf_index.get(encode_path(leaf.path), -1) for leaf in leaves]
    pairs = zip(found, leaves, strict=True)
    return np.array([i if i >= 0 and version.leaves[i].spec == leaf.spec else -1 for i, leaf in pairs], "i8")


@dataclass(frozen=True, slots=True)
class ElementDiff:
    """How the elements of a leaf differ in two versions.

    Attributes:
        elements: number of elements of the leaf; number of bytes if its dtype is not numeric.
        changed: number of elements whose bytes differ; 0.0 and -0.0 differ, and so do NaNs with different payloads.
        largest: the largest absolute difference (modulus for complex numbers) between elements that are finite in both
            versions; an exact int for integers; None if the dtype is not numeric.
        rms: root mean square of the difference over all elements; where one is not finite the difference counts as 0.
        nan, inf: how many of the changed elements are NaN, or infinite, in the older and in the newer version.
    """

    elements: int
    changed: int
    largest: int | float | None = None
    rms: float | None = None
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """One leaf in two versions.

    Attributes:
        path: the leaf's path.
        change: ``changed`` also if only shape, dtype or attributes differ, or if the two versions cut the leaf into
            different shards or chunks: digests alone cannot show that such leaves are equal.
        nbytes: bytes of the leaf in the newer version (in the older one where it was removed).
        changed_nbytes: bytes of its chunks that the older version does not have at the same position of the leaf, or,
            if it is cut differently, anywhere in the leaf.
        numbers: how its elements differ, if requested and if both versions have the same dtype and shape.
        values: the old and the new plain value as Python prints them, if requested and short.
        note: why a changed leaf has no ``numbers`` although they were requested.
    """

    path: Path
    change: Change
    nbytes: int
    changed_nbytes: int
    numbers: ElementDiff | None = None
    values: tuple[str, str] | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)


def diff_versions(old: Version, new: Version) -> list[LeafDiff]:
    """Leaf by leaf, in the order of the newer version, removed leaves last. Containers are left out."""
    before, after = _values(old), _values(new)
    pairs = [(before.pop(path, None), i) for path, i in after.items()]
    found = []
    for (j, i), (alike, fresh) in zip(pairs, _compare(old, new, pairs), strict=True):
        leaf = new.leaves[i]
        same = j is not None and alike and not fresh and old.leaves[j].spec == leaf.spec
        change: Change = "added" if j is None else "same" if same else "changed"
        found.append(LeafDiff(leaf.path, change, leaf.spec.nbytes, fresh))
    gone = [old.leaves[j] for j in before.values()]
    return found + [LeafDiff(leaf.path, "removed", leaf.spec.nbytes, 0) for leaf in gone]


def _values(version: Version) -> dict[str, int]:
    """Encoded path -> index of every leaf that is not a container."""
    return {path: i for path, i in version.leaf_index.items() if version.leaves[i].spec.kind not in CONTAINERS}


def _compare(old: Version, new: Version, pairs: list[tuple[int | None, int]]) -> Iterable[tuple[bool, int]]:
    """For each pair of leaves: whether both have the same shards and chunks, and how many bytes are new."""
    if aligned(old, new):
        fresh = np.flatnonzero(np.any(old.digests != new.digests, axis=1))
        counts = np.bincount(new.chunk_leaf[fresh], new.chunk_nbytes[fresh], len(new.leaves))
        return ((True, int(counts[i])) for _, i in pairs)
    then, now = _LeafRows(old), _LeafRows(new)
    return (_compare_leaf(then, j, now, i) for j, i in pairs)


def aligned(old: Version, new: Version) -> bool:
    """Whether row i of both chunk tables is the same part of the same leaf: then one comparison covers all leaves."""
    return (
        old.head.chunk == new.head.chunk
        and old.head.digest == new.head.digest
        and old.catalog.paths == new.catalog.paths
        and np.array_equal(old.shard_leaf, new.shard_leaf)
        and np.array_equal(old.shard_nbytes, new.shard_nbytes)
        and old.boxes == new.boxes
    )


class _LeafRows:
    """The shards and chunks of a version, leaf by leaf."""

    def __init__(self, version: Version) -> None:
        shards = np.searchsorted(version.shard_leaf, np.arange(len(version.leaves) + 1))
        chunks = np.append(np.zeros(1, "i8"), version.chunk_end.astype("i8"))[shards]
        self.digest, self._boxes = version.head.digest, version.boxes
        self._digests, self._nbytes = version.digests, version.chunk_nbytes
        self._shards, self._chunks = shards.tolist(), chunks.tolist()

    def boxes(self, leaf: int) -> Boxes:
        """The boxes of a leaf's shards."""
        return self._boxes[self._shards[leaf] : self._shards[leaf + 1]]

    def chunks(self, leaf: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Digests and lengths of a leaf's chunks."""
        rows = slice(self._chunks[leaf], self._chunks[leaf + 1])
        return self._digests[rows], self._nbytes[rows]


def _compare_leaf(old: _LeafRows, j: int | None, new: _LeafRows, i: int) -> tuple[bool, int]:
    digests, nbytes = new.chunks(i)
    if j is None:
        return False, int(nbytes.sum())
    had, lengths = old.chunks(j)
    if not len(had) and not len(digests):
        return True, 0
    if old.digest != new.digest:
        return False, int(nbytes.sum())
    alike = old.boxes(j) == new.boxes(i) and np.array_equal(lengths, nbytes)
    fresh = np.any(had != digests, axis=1) if alike else DigestIndex(had).find(digests) < 0
    return alike, int(nbytes[fresh].sum())
