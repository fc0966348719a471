"""What changed between two versions, by digests alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .boxes import Boxes
from .index import DigestIndex
from .leaf import CONTAINERS, Path, format_path
from .version import Version

Change = Literal["added", "removed", "changed", "same"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """How the elements of a leaf differ in two versions.

    Attributes:
        elements: how many the leaf has; bytes where its type is none of numbers.
        changed: those of them whose bytes differ, as those of 0.0 and -0.0 do, and of NaNs with other payloads.
        largest: the largest absolute difference, of complex numbers the largest modulus, between elements that are
            finite in both versions; an exact int for integers; None where the type is none of numbers.
        rms: root of the mean over all elements of the squared difference, which counts as 0 where one is not finite.
        nan, inf: how many of the changed elements were NaN, or infinite, in the older version, and are in the newer.
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
        change: ``changed`` also where only shape, dtype or attributes differ, or where the two versions cut the leaf
            into different shards or chunks: digests alone cannot tell that such leaves are equal.
        nbytes: bytes of the leaf in the newer version (in the older one where it was removed).
        changed_nbytes: bytes of its chunks that the older version does not have at the same place of the leaf, or,
            where it is cut differently, nowhere in the leaf.
        numbers: how its elements differ, where that was asked for and both versions have the same dtype and shape.
        values: a plain value as it was and as it is, as Python writes it, where that was asked for and it is short.
        note: why there are no numbers of a changed leaf though they were asked for.
    """

    path: Path
    change: Change
    nbytes: int
    changed_nbytes: int
    numbers: Numbers | None = None
    values: tuple[str, str] | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)


def diff(old: Version, new: Version) -> list[LeafDiff]:
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
    """Encoded path and index of every leaf that is no container."""
    return {path: i for path, i in version.leaf_index.items() if version.leaves[i].spec.kind not in CONTAINERS}


def _compare(old: Version, new: Version, pairs: list[tuple[int | None, int]]) -> Iterable[tuple[bool, int]]:
    """Per pair of leaves: whether both are cut alike, and how many bytes the older one does not have."""
    if _aligned(old, new):
        fresh = np.flatnonzero(np.any(old.digests != new.digests, axis=1))
        counts = np.bincount(new.chunk_leaf[fresh], new.chunk_nbytes[fresh], len(new.leaves))
        return ((True, int(counts[i])) for _, i in pairs)
    then, now = _Tables(old), _Tables(new)
    return (_compare_leaf(then, j, now, i) for j, i in pairs)


def _aligned(old: Version, new: Version) -> bool:
    """Whether row i of both chunk tables is the same part of the same leaf: then one comparison does for all."""
    return (
        old.head.chunk == new.head.chunk
        and old.head.digest == new.head.digest
        and list(old.leaf_index) == list(new.leaf_index)
        and np.array_equal(old.shard_leaf, new.shard_leaf)
        and np.array_equal(old.shard_nbytes, new.shard_nbytes)
        and old.boxes == new.boxes
    )


class _Tables:
    """A version's tables, leaf by leaf."""

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


def _compare_leaf(old: _Tables, j: int | None, new: _Tables, i: int) -> tuple[bool, int]:
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
