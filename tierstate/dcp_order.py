"""The order of a merged version's leaves: as the state has them, whichever rank gave which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tierstate.manifest.index import Array
from tierstate.manifest.leaf import Leaf, Path, Spec, encode_path
from tierstate.manifest.version import Shards, Version

_GAP = -1

_PARTS = {"dict", "odict", "list", "tensor"}
"""Kinds of items because of which DCP saves a list item by item."""


def arranged(version: Version, reference: Sequence[Path]) -> tuple[Version, Array]:
    """The version with its leaves in the order of the state: each container before what it holds, items of lists by
    their index.

    Args:
        version: merged of the parts of ranks, of which each has but some of the leaves.
        reference: paths in the state's order; what is not among them comes after.

    Returns:
        The version, and for each old row its new one.
    """
    leaves, old = _leaves(version, reference)
    number = np.full(len(version.leaves), -1)
    there = old != _GAP
    number[old[there]] = np.flatnonzero(there)
    leaf = number[version.shard_leaf.astype("i8")]
    order = np.argsort(leaf, kind="stable")
    ends = version.chunk_end.astype("i8")
    counts = np.diff(ends, prepend=0)
    # Where the chunks of each shard begin now, and where they began.
    starts = np.zeros(len(order), "i8")
    starts[order] = np.cumsum(counts[order]) - counts[order]
    rows = np.arange(len(version.digests)) + np.repeat(starts - (ends - counts), counts)
    digests = np.empty_like(version.digests)
    digests[rows] = version.digests
    shards = Shards(leaf[order].astype("<u4"), version.shard_rank[order], version.boxes[order])
    return Version.build(version.head, leaves, shards, digests), rows


def _leaves(version: Version, reference: Sequence[Path]) -> tuple[list[Leaf], Array]:
    """The leaves in order, and which each was; _GAP for what fills a list."""
    children = _children(version, _places(reference))
    found: list[tuple[Leaf, int]] = []
    root = version.leaf_index[encode_path(())]
    stack = [(version.leaves[root], root)]
    while stack:
        leaf, at = stack.pop()
        found.append((leaf, at))
        if at != _GAP:
            stack += reversed(list(_filled(version, leaf, children.get(at, []))))
    return [leaf for leaf, _ in found], np.array([at for _, at in found], "i8")


def _places(reference: Sequence[Path]) -> dict[str, int]:
    """Where each path, and each container of one, comes first."""
    place: dict[str, int] = {}
    for path in reference:
        for depth in range(1, len(path) + 1):
            place.setdefault(encode_path(path[:depth]), len(place))
    return place


def _children(version: Version, place: Mapping[str, int]) -> dict[int, list[int]]:
    """What each container holds, in order."""
    children: dict[int, list[int]] = {}
    for i, leaf in enumerate(version.leaves):
        if leaf.path:
            children.setdefault(version.leaf_index[encode_path(leaf.path[:-1])], []).append(i)
    texts = list(version.leaf_index)
    for parent, found in children.items():
        if version.leaves[parent].spec.kind in ("list", "tuple"):
            found.sort(key=lambda i: version.leaves[i].path[-1])
        else:
            found.sort(key=lambda i: (place.get(texts[i], len(place)), i))
    return children


def _filled(version: Version, parent: Leaf, found: Sequence[int]) -> Iterator[tuple[Leaf, int]]:
    """A container's children; empty dicts, of which DCP tells nothing, where items of a list must be missing."""
    at, cause = 0, parent.spec.kind != "list"
    for i in found:
        key: Any = version.leaves[i].path[-1]
        while parent.spec.kind == "list" and at < key:
            yield Leaf((*parent.path, at), Spec("dict")), _GAP
            at, cause = at + 1, True
        yield version.leaves[i], i
        at, cause = at + 1, cause or version.leaves[i].spec.kind in _PARTS
    if found and not cause:
        # A list of plain values would have been one value: it was parted because of a dict at its end.
        yield Leaf((*parent.path, at), Spec("dict")), _GAP
