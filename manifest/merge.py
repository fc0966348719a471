"""Many ranks' parts of one version as the whole version, or a clear error; never a smaller one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .box import Box
from .errors import StateMismatch
from .leaf import Leaf
from .version import ShardRow, Version

Array = NDArray[Any]


class Merged(NamedTuple):
    """A whole version, and for each part which row of the whole each of its chunks became (-1: another rank's copy)."""

    version: Version
    rows: tuple[Array, ...]


class _Shard(NamedTuple):
    leaf: int
    box: Box
    rank: int
    part: int
    shard: int


def merge(parts: Sequence[Version]) -> Merged:
    """Merge the parts of all ranks. A part is a version with the shards of one rank.

    Leaves are united by path, in order of first appearance from the lowest rank on. Of shards with the same box, as
    replicated leaves have, the lowest rank's is kept; so is the lowest rank's metadata. The order in which the parts
    are given does not matter.

    Raises:
        StateMismatch: parts disagree on a leaf or on the version's head, shards overlap, or something is missing.
    """
    _check_heads(parts)
    order = sorted(range(len(parts)), key=lambda p: _rank_and_id(parts[p]))
    ordered = [parts[p] for p in order]
    leaves, places = _unite(ordered)
    shards = _distinct(ordered, places)
    digests, rows = _gather(ordered, shards)
    ranks = {rank for part in parts for rank in part.shard_rank.tolist()}
    # A rank that holds nothing but copies may have given a part without shards: it took part all the same.
    head = dataclasses.replace(ordered[0].head, world=max(len(parts), len(ranks)))
    version = Version.build(head, leaves, [ShardRow(s.leaf, s.rank, s.box) for s in shards], digests)
    check_whole(version)
    return Merged(version, tuple(rows[place] for place in np.argsort(order)))


def _rank_and_id(part: Version) -> tuple[int, str]:
    """What parts are ordered by; those without a shard, and so without a rank, come last."""
    return int(part.shard_rank.min()) if len(part.shard_rank) else 1 << 32, part.id


def check_whole(version: Version) -> None:
    """Every leaf's shards cover it exactly.

    Raises:
        StateMismatch: parts of leaves are missing, or there twice; the message lists them.
    """
    covered: dict[int, list[Box]] = {}
    for leaf, box in zip(version.shard_leaf.tolist(), version.boxes, strict=True):
        covered.setdefault(leaf, []).append(box)
    wrong = [
        f"{leaf.name}: {problem}"
        for i, leaf in enumerate(version.leaves)
        if leaf.spec.has_bytes and (problem := _coverage(leaf, covered.get(i, [])))
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise StateMismatch("the version is not whole:\n  " + "\n  ".join(wrong[:20]) + more)


def _coverage(leaf: Leaf, boxes: list[Box]) -> str:
    whole = Box.whole(leaf.spec.shape).volume
    have = sum(b.volume for b in boxes)
    if have < whole:
        return f"{have} of {whole} elements are there"
    solid = [b for b in boxes if b.volume]
    if have > whole or (len(solid) > 1 and _overlap(solid)):
        return "shards overlap"
    return ""


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes meet; sorted along the first axis, so that only near ones are compared."""
    ordered = sorted(boxes)
    lo = np.array([b.offset for b in ordered])
    hi = lo + np.array([b.shape for b in ordered])
    for i in range(len(ordered) - 1):
        near = int(np.searchsorted(lo[:, 0], hi[i, 0])) if lo.shape[1] else len(ordered)
        rest = slice(i + 1, near)
        if bool(np.any(np.all((lo[rest] < hi[i]) & (hi[rest] > lo[i]), axis=1))):
            return True
    return False


def _check_heads(parts: Sequence[Version]) -> None:
    if not parts:
        raise StateMismatch("no rank gave a part")
    heads = [dataclasses.replace(p.head, world=1, metadata={}) for p in parts]
    for head in heads[1:]:
        if head != heads[0]:
            raise StateMismatch(f"ranks saved different versions: {heads[0]} and {head}")


def _unite(parts: Sequence[Version]) -> tuple[list[Leaf], list[list[int]]]:
    """All leaves in order of first appearance, and for each part where its leaves went."""
    at: dict[str, int] = {}
    leaves: list[Leaf] = []
    places = []
    for part in parts:
        place = []
        for path, leaf in zip(part.leaf_index, part.leaves, strict=True):
            index = at.setdefault(path, len(leaves))
            if index == len(leaves):
                leaves.append(leaf)
            elif leaves[index].spec != leaf.spec:
                raise StateMismatch(f"ranks disagree on {leaf.name}: {leaves[index].spec} and {leaf.spec}")
            place.append(index)
        places.append(place)
    return leaves, places


def _distinct(parts: Sequence[Version], places: list[list[int]]) -> list[_Shard]:
    """All shards by leaf, box and rank, each box once."""
    every = sorted(
        _Shard(places[p][leaf], box, rank, p, s)
        for p, part in enumerate(parts)
        for s, (leaf, rank, box) in enumerate(
            zip(part.shard_leaf.tolist(), part.shard_rank.tolist(), part.boxes, strict=True)
        )
    )
    return [s for i, s in enumerate(every) if i == 0 or (s.leaf, s.box) != (every[i - 1].leaf, every[i - 1].box)]


def _gather(parts: Sequence[Version], shards: list[_Shard]) -> tuple[Array, tuple[Array, ...]]:
    rows = tuple(np.full(len(p.digests), -1, "i8") for p in parts)
    digests, at = [np.zeros((0, 2), "<u8")], 0
    for s in shards:
        part = parts[s.part]
        end = int(part.chunk_end[s.shard])
        start = int(part.chunk_end[s.shard - 1]) if s.shard else 0
        digests.append(part.digests[start:end])
        rows[s.part][start:end] = np.arange(at, at + end - start)
        at += end - start
    return np.concatenate(digests), rows
