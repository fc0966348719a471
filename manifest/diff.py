"""What changed between two versions, by digests alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .index import DigestIndex
from .leaf import CONTAINERS, Path, format_path
from .version import Version

Change = Literal["added", "removed", "changed", "same"]


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """One leaf in two versions.

    Attributes:
        path: the leaf's path.
        change: ``changed`` also where only shape, dtype or attributes differ.
        nbytes: bytes of the leaf in the newer version (in the older one where it was removed).
        changed_nbytes: bytes of its chunks whose digests the older version does not have for it.
    """

    path: Path
    change: Change
    nbytes: int
    changed_nbytes: int

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)


def diff(old: Version, new: Version) -> list[LeafDiff]:
    """Leaf by leaf, in the order of the newer version, removed leaves last. Containers are left out."""
    before = {leaf.path: i for i, leaf in enumerate(old.leaves)}
    fresh = _fresh_bytes(old, new)
    found = []
    for i, leaf in enumerate(new.leaves):
        j = before.pop(leaf.path, None)
        if _is_value(leaf.spec.kind):
            same = j is not None and old.leaves[j].spec == leaf.spec and not fresh[i]
            change: Change = "added" if j is None else "same" if same else "changed"
            found.append(LeafDiff(leaf.path, change, leaf.spec.nbytes, int(fresh[i])))
    gone = [old.leaves[j] for j in before.values() if _is_value(old.leaves[j].spec.kind)]
    return found + [LeafDiff(leaf.path, "removed", leaf.spec.nbytes, 0) for leaf in gone]


def _is_value(kind: str) -> bool:
    return kind not in CONTAINERS


def _fresh_bytes(old: Version, new: Version) -> NDArray[Any]:
    """Per leaf of ``new``: bytes of chunks that the older version does not have at the same place, or anywhere."""
    rows = np.arange(len(new.digests))
    aligned = _aligned(old, new)
    if aligned:
        fresh = rows[np.any(old.digests != new.digests, axis=1)]
    else:
        fresh = rows[DigestIndex(old.digests).find(new.digests) < 0]
    weights = new.chunk_nbytes[fresh]
    return np.bincount(new.chunk_leaf[fresh], weights=weights, minlength=len(new.leaves)).astype("i8")


def _aligned(old: Version, new: Version) -> bool:
    """Whether row i of both chunk tables is the same part of the same leaf."""
    return (
        len(old.digests) == len(new.digests)
        and old.head.chunk == new.head.chunk
        and old.head.digest == new.head.digest
        and _paths(old.leaves) == _paths(new.leaves)
        and np.array_equal(old.shard_leaf, new.shard_leaf)
        and old.boxes == new.boxes
    )


def _paths(leaves: Sequence[Any]) -> list[Path]:
    return [leaf.path for leaf in leaves]
