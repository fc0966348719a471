"""Sorts the leaves of a version that was merged from many ranks into the order of the state.

Ranks that save different leaves have no common order of them. One rank knows that of the whole state, as a
`StateOrder`, by which `in_state_order` sorts the version when it has been merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.leaf_path import Path, encode_path
from tierstate.manifest.format.version import Shards, Version

from .merge import MergeResult

StateOrder: TypeAlias = tuple[str, ...]
"""Encoded paths of leaves and containers (`encode_path`), in the order of a state."""


_GAP = -1
"""Index of a leaf that was added to fill a list."""


_PARTS = {"dict", "odict", "list", "tensor"}
"""DCP splits a list into items if it has an item of one of these kinds."""


def state_order(paths: Sequence[Path]) -> StateOrder:
    """The order of a state whose leaves have these paths: each container comes before what is in it."""
    return tuple(dict.fromkeys(encode_path(path[:depth]) for path in paths for depth in range(1, len(path) + 1)))


def in_state_order(merged: MergeResult, order: StateOrder) -> MergeResult:
    """A merged version with its leaves in the order of the state: a container before its contents, list items by index.

    Args:
        merged: the version, merged from the parts of the ranks, each with some of the leaves.
        order: of the state; other leaves come last.

    Returns:
        The version, and for each part its rows in it.
    """
    version = merged.version
    leaves, old = ordered_leaves(version.leaves, version.leaf_index, order)
    leaf = new_numbers(old, len(version.leaves))[version.shard_leaf.astype("i8")]
    by_leaf = np.argsort(leaf, kind="stable")
    ends = version.chunk_end.astype("i8")
    counts = np.diff(ends, prepend=0)
    # The first row of each shard's chunks in the new order; `ends - counts` is that in the old order.
    starts = np.zeros(len(by_leaf), "i8")
    starts[by_leaf] = np.cumsum(counts[by_leaf]) - counts[by_leaf]
    moved = np.arange(len(version.digests)) + np.repeat(starts - (ends - counts), counts)
    digests = np.empty_like(version.digests)
    digests[moved] = version.digests
    shards = Shards(leaf[by_leaf].astype("<u4"), version.shard_rank[by_leaf], version.boxes[by_leaf])
    rows = tuple(np.where(there < 0, -1, moved[there]) if len(there) else there for there in merged.rows)
    statistics = version.statistics and version.statistics.rows(np.argsort(moved))
    return MergeResult(Version.build(version.head, leaves, shards, digests, statistics), rows, merged.copies)


def new_numbers(old: Array, count: int) -> Array:
    """``(count,)``: by old index of a leaf the new one; -1 for one that is not there any more.

    Args:
        old: for each leaf its old index, or a negative number; see `ordered_leaves`.
        count: of the old leaves.
    """
    found = np.full(count, -1)
    there = old != _GAP
    found[old[there]] = np.flatnonzero(there)
    return found


def ordered_leaves(leaves: Sequence[Leaf], index: Mapping[str, int], order: StateOrder) -> tuple[list[Leaf], Array]:
    """The leaves in the order of the state, and the old index of each; -1 for those that were added to fill a list.

    Args:
        leaves: the leaves, with all containers.
        index: the index of each leaf, by its encoded path.
        order: of the state. A container that is in it, and of whose items none is, has one key in DCP.
    """
    place, texts = {text: place for place, text in enumerate(order)}, list(index)
    children = _children(leaves, index, place)
    found: list[tuple[Leaf, int]] = []
    root = index[encode_path(())]
    stack = [(leaves[root], root, False)]
    while stack:
        leaf, at, whole = stack.pop()
        found.append((leaf, at))
        if at != _GAP:
            below = children.get(at, [])
            # One key for all of it: no item is missing.
            whole = whole or (texts[at] in place and not any(texts[i] in place for i in below))
            kids = [(leaves[i], i) for i in below] if whole else _filled(leaves, leaf, below)
            stack += reversed([(kid, i, whole) for kid, i in kids])
    return [leaf for leaf, _ in found], np.array([at for _, at in found], "i8")


def _children(leaves: Sequence[Leaf], index: Mapping[str, int], place: Mapping[str, int]) -> dict[int, list[int]]:
    """By index of a container, the indexes of its children, in order."""
    children: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.path:
            children.setdefault(index[encode_path(leaf.path[:-1])], []).append(i)
    texts = list(index)
    for parent, found in children.items():
        if leaves[parent].spec.kind in ("list", "tuple"):
            found.sort(key=lambda i: leaves[i].path[-1])
        else:
            found.sort(key=lambda i: (place.get(texts[i], len(place)), i))
    return children


def _filled(leaves: Sequence[Leaf], parent: Leaf, found: Sequence[int]) -> Iterator[tuple[Leaf, int]]:
    """A container's children, with an empty dict for each missing item of a list: DCP has no key for empty dicts."""
    at, cause = 0, parent.spec.kind != "list"
    for i in found:
        key: Any = leaves[i].path[-1]
        while parent.spec.kind == "list" and at < key:
            yield Leaf((*parent.path, at), Spec("dict")), _GAP
            at, cause = at + 1, True
        yield leaves[i], i
        at, cause = at + 1, cause or leaves[i].spec.kind in _PARTS
    if found and not cause:
        # DCP would not have split a list of plain values only: it must have had an empty dict at its end.
        yield Leaf((*parent.path, at), Spec("dict")), _GAP
