"""Whether a version is whole: every leaf's shards cover it, each element once."""

from __future__ import annotations

import os
from operator import ne

import numpy as np

from . import columns as col
from .box import Box
from .boxes import MANY, Boxes, mix
from .errors import StateMismatch
from .uniting import names_of
from .version import Version

Array = col.Array

_PRIME = np.uint64((1 << 31) - 1)  # so that a product of two residues has room in 64 bits
_TRIALS = 3
_TOLD = 20
"""Leaves that a message names at most."""

_SEARCHED = 4096
"""Shards of a leaf among which is looked for two that overlap, for the message."""


def check_whole(version: Version) -> None:
    """Every leaf's shards cover it exactly.

    Raises:
        StateMismatch: parts of leaves are missing, or there twice; the message lists them.
    """
    catalog = version.catalog
    bounds = np.searchsorted(version.shard_leaf, np.arange(len(catalog.leaves) + 1))
    need = np.where(catalog.has_bytes, catalog.wholes.volumes, 0)
    sums = np.concatenate([np.zeros(1, "i8"), np.cumsum(version.boxes.volumes)])
    have = sums[bounds[1:]] - sums[bounds[:-1]]
    # Where sums went round, as they only can where shards overlap, the measures differ.
    twice = _twice(version, bounds)
    rows = {
        leaf: slice(int(bounds[leaf]), int(bounds[leaf + 1]))
        for leaf in np.flatnonzero((have != need) | (need >= MANY) | twice).tolist()
    }
    wrong = [leaf for leaf, mine in rows.items() if twice[leaf] or ne(*_counted(version, leaf, mine))]
    if wrong:
        told = [f"\n  {catalog.leaves[leaf].name}: {_problem(version, leaf, rows[leaf])}" for leaf in wrong[:_TOLD]]
        more = f"\n  and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise StateMismatch(f"the version is not whole:{''.join(told)}{more}")


def _twice(version: Version, bounds: Array) -> Array:
    """``(leaves,)`` of bool: of which leaves the shards do not cover each element once.

    A set of boxes covers another box once exactly where their volumes add up to its volume however long each unit of
    each axis is said to be: the difference of the two sides is a polynomial in those lengths, with one term per
    element, and is zero only if each element is counted as often on both. So lengths are drawn by chance, and a wrong
    cover that adds up has less than ``axes / 2**31`` of a chance in each of three trials (Schwartz and Zippel). No
    box is compared with another, whatever their number and form.
    """
    catalog, boxes = version.catalog, version.boxes
    several = np.diff(bounds) > 1
    shards = np.flatnonzero(several[version.shard_leaf])
    found = np.zeros(len(catalog.leaves), bool)
    leaves = np.flatnonzero(several)
    if not len(shards):
        return found
    parts, wholes = boxes[shards], catalog.wholes[leaves]
    counts = np.diff(bounds)[leaves]
    for _ in range(_TRIALS):
        seed = np.frombuffer(os.urandom(16), "u8")
        sums = np.add.reduceat(_measures(parts, seed), col.starts_of(np.cumsum(counts))) % _PRIME
        found[leaves] |= sums != _measures(wholes, seed)
    return found


def _measures(boxes: Boxes, seed: Array) -> Array:
    """``(boxes,)``: the volume of each, below _PRIME, where the lengths of all units are what the seed makes them."""
    found = np.ones(len(boxes), "u8")
    for rows, offset, shape in boxes.groups():
        volume, ends = np.ones(len(rows), "u8"), offset + shape
        for axis in range(offset.shape[1]):
            # How far places on this axis lie from its start, by chance.
            stirred = mix(seed + np.uint64(axis), seed)
            low, high = (mix(at.astype("u8"), stirred) % _PRIME for at in (offset[:, axis], ends[:, axis]))
            volume = volume * ((high + _PRIME - low) % _PRIME) % _PRIME
        found[rows] = volume
    return found


def _counted(version: Version, leaf: int, rows: slice) -> tuple[int, int]:
    """How many elements the shards of a leaf have together, and how many it has itself: exactly."""
    boxes, need = version.boxes[rows], Box.whole(version.leaves[leaf].spec.shape).volume
    return sum(boxes.volumes.tolist()) if need < MANY else sum(box.volume for box in boxes), need


def _problem(version: Version, leaf: int, rows: slice) -> str:
    """What is wrong with the shards of a leaf that do not cover it."""
    boxes, ranks = version.boxes[rows], version.shard_rank[rows]
    have, need = _counted(version, leaf, rows)
    told = names_of(np.unique(ranks).tolist())
    if have < need:
        return f"{have} of {need} elements are there" + (f", of {told}" if have else "")
    solid = np.flatnonzero(boxes.volumes)
    pair = _meeting(boxes[solid[:_SEARCHED]])
    if pair is None:
        return f"shards overlap, of {told}"
    one, other = solid[list(pair)].tolist()
    return f"shards overlap: {boxes[one]} of rank {ranks[one]} and {boxes[other]} of rank {ranks[other]}"


def _meeting(boxes: Boxes) -> tuple[int, int] | None:
    """The first two of boxes with elements that have some in common."""
    for _, low, shape in boxes.groups():
        high = low + shape
        for i in range(len(low) - 1):
            meets = np.all((low[i + 1 :] < high[i]) & (high[i + 1 :] > low[i]), axis=1)
            if meets.any():
                return i, i + 1 + int(np.argmax(meets))
    return None
