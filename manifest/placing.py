"""Where the chunks of one rank's part became rows of the whole version."""

from __future__ import annotations

import os

import numpy as np

from . import columns as col
from .boxes import Boxes
from .errors import StateMismatch
from .uniting import names_of
from .version import Version

Array = col.Array


def placed(version: Version, part: Version) -> Array:
    """For each chunk of a part its row in the whole version; -1 where another rank's copy was kept.

    Raises:
        StateMismatch: the part does not belong to the version.
    """
    for name in ("run", "seq", "step", "chunk", "digest"):
        mine, right = getattr(part.head, name), getattr(version.head, name)
        if mine != right:
            raise StateMismatch(f"a part of {name} {mine!r} is none of a version of {name} {right!r}")
    leaf = _leaves(version, part)[part.shard_leaf]
    there = _find(version, leaf, part.boxes)
    if (lost := np.flatnonzero(there < 0)).size:
        told = part.leaves[int(part.shard_leaf[lost[0]])].name
        raise _foreign(part, f"{part.boxes[int(lost[0])]} of {told} is no shard of it")
    counts = np.diff(part.chunk_end.astype("i8"), prepend=0)
    rows = col.spread(col.starts_of(version.chunk_end)[there], counts)
    other = np.any(version.digests[rows] != part.digests, axis=1)
    if other.any():
        told = part.leaves[int(part.chunk_leaf[int(np.argmax(other))])].name
        raise _foreign(part, f"{told} has other bytes in it")
    kept = version.shard_rank[there] == part.shard_rank
    rows[~np.repeat(kept, counts)] = -1
    return rows


def _foreign(part: Version, why: str) -> StateMismatch:
    ranks = names_of(np.unique(part.shard_rank).tolist())
    return StateMismatch(f"the part of {ranks} does not belong to the version of step {part.head.step}: {why}")


def _leaves(version: Version, part: Version) -> Array:
    """``(leaves,)``: the number that each of the part's leaves has in the whole."""
    if version.catalog is part.catalog:
        return np.arange(len(part.leaves))
    index, found = version.leaf_index, []
    for path, leaf in zip(part.catalog.paths, part.leaves, strict=True):
        number = index.get(path, -1)
        if number < 0 or (version.leaves[number] is not leaf and version.leaves[number].spec != leaf.spec):
            raise _foreign(part, f"{leaf.name} is {'another leaf' if number >= 0 else 'no leaf'} of it")
        found.append(number)
    return np.array(found, "i8")


def _find(version: Version, leaf: Array, boxes: Boxes) -> Array:
    """``(shards,)``: the number of the version's shard that is each box of each leaf; -1 where there is none.

    The version's may be a million and the part's a few: theirs are sorted, by a mixture of leaf and box.
    """
    seed = np.frombuffer(os.urandom(16), "u8")
    theirs, mine = version.boxes.mixed(version.shard_leaf, seed), boxes.mixed(leaf, seed)
    order = np.argsort(mine)
    ordered = np.append(mine[order], mine[:1])  # one more, so that each spot is there
    spot = np.searchsorted(ordered[:-1], theirs)
    near = np.flatnonzero(ordered[spot] == theirs) if len(mine) else np.zeros(0, "i8")
    shard = order[np.minimum(spot[near], len(mine) - 1)]
    same = (version.shard_leaf[near] == leaf[shard]) & version.boxes[near].alike(boxes[shard])
    found = np.full(len(leaf), -1, "i8")
    found[shard[same]] = near[same]
    return found
