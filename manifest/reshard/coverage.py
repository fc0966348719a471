"""Reshard, step 2: whether stored shards cover the wanted boxes, each element exactly once.

A leaf, or a wanted box of it, is *covered* if every element is in exactly one shard. `check_covered` runs before a
restore, since the record may be untrusted. `check_complete` runs before a version of many ranks is committed, so that a
version with a missing shard is never committed.

Both use a randomized test of polynomial identity instead of looking at elements (the lemma of Schwartz and Zippel).
Each unit of each axis gets a random length. The parts of a box cover it exactly once if and only if, for all such
lengths, their volumes add up to the volume of the box: the difference of the two sides is a polynomial in the lengths
with one term per element, and it is zero only if each element is counted as often on both sides. One trial accepts a
wrong cover with a probability of at most ``axes / 2**31``. No pair of boxes is compared, so the cost is linear.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import ne

import numpy as np

from tierstate.manifest.arrays import BLOCK, Array
from tierstate.manifest.boxes import MAX_ELEMENTS, Box, Boxes, splitmix64
from tierstate.manifest.errors import FormatError, StateMismatch, format_ranks
from tierstate.manifest.format.version import Version

from .overlap import Overlaps, WantedBox

_PRIME = np.uint64((1 << 31) - 1)  # so that a product of two residues fits 64 bits
_TRIALS = 3
_LISTED = 5  # leaves that a message of `check_covered` names
_LISTED_INCOMPLETE = 20  # leaves that a message of `check_complete` names
_SEARCHED = 4096  # shards of a leaf that are searched for two that overlap, for the message


def check_covered(version: Version, wants: Sequence[WantedBox], overlaps: Overlaps) -> None:
    """Check that the shards of a version hold each element of the wanted boxes exactly once.

    Raises:
        FormatError: elements are missing, or are in several shards; the message names the leaves.
    """
    wrong = uncovered(version, wants, overlaps)
    if not len(wrong):
        return
    head = version.head
    names = list(dict.fromkeys(version.leaves[wants[w].leaf].name for w in wrong.tolist()))
    more = f", and {len(names) - _LISTED} more leaves" if len(names) > _LISTED else ""
    raise FormatError(
        f"version {head.seq} (step {head.step}) of run {head.run!r} does not hold every element once of "
        f"{', '.join(names[:_LISTED])}{more}: shards are missing, or overlap"
    )


def uncovered(version: Version, wants: Sequence[WantedBox], overlaps: Overlaps) -> Array:
    """Indices, ascending, of the wanted boxes whose elements are not each in exactly one shard."""
    pairs = np.bincount(overlaps.want, minlength=len(wants))
    alone = overlaps.same & (pairs[overlaps.want] == 1)
    unsure = np.fromiter((0 not in want.box.shape for want in wants), bool, len(wants))
    unsure[overlaps.want[alone]] = False  # the box is equal to a shard
    chosen = np.flatnonzero(unsure)
    place = np.full(len(wants), -1)
    place[chosen] = np.arange(len(chosen))
    mine = np.flatnonzero(place[overlaps.want] >= 0)
    owner = place[overlaps.want[mine]]
    boxes = Boxes.of(wants[w].box for w in chosen.tolist())
    parts = version.boxes[overlaps.shard[mine]].intersect(boxes[owner])
    return chosen[_not_covered_once(parts, owner, boxes)]


def check_complete(version: Version) -> None:
    """Check that the shards of every leaf hold each of its elements exactly once.

    Raises:
        StateMismatch: parts of leaves are missing or occur twice; the message lists them.
    """
    catalog = version.catalog
    bounds = np.searchsorted(version.shard_leaf, np.arange(len(catalog.leaves) + 1))
    need = np.where(catalog.has_bytes, catalog.wholes.volumes, 0)
    sums = np.concatenate([np.zeros(1, "i8"), np.cumsum(version.boxes.volumes)])
    have = sums[bounds[1:]] - sums[bounds[:-1]]
    # A sum can overflow only if shards overlap; then the random weights differ.
    unequal = _several_do_not_cover(version, bounds)
    rows = {
        leaf: slice(int(bounds[leaf]), int(bounds[leaf + 1]))
        for leaf in np.flatnonzero((have != need) | (need >= MAX_ELEMENTS) | unequal).tolist()
    }
    wrong = [leaf for leaf, mine in rows.items() if unequal[leaf] or ne(*_counted(version, leaf, mine))]
    if wrong:
        lines = [
            f"\n  {catalog.leaves[leaf].name}: {_problem(version, leaf, rows[leaf])}"
            for leaf in wrong[:_LISTED_INCOMPLETE]
        ]
        more = f"\n  and {len(wrong) - len(lines)} more" if len(wrong) > len(lines) else ""
        raise StateMismatch(f"the version is not whole:{''.join(lines)}{more}")


def _several_do_not_cover(version: Version, bounds: Array) -> Array:
    """``(leaves,)`` of bool: the leaves with several shards that do not cover them exactly once."""
    several = np.diff(bounds) > 1
    leaves, shards = np.flatnonzero(several), np.flatnonzero(several[version.shard_leaf])
    owner = np.repeat(np.arange(len(leaves)), np.diff(bounds)[leaves])
    found = np.zeros(len(several), bool)
    boxes = version.boxes if len(shards) == len(version.boxes) else version.boxes[shards]
    found[leaves] = _not_covered_once(boxes, owner, version.catalog.wholes[leaves])
    return found


def _not_covered_once(parts: Boxes, owner: Array, boxes: Boxes) -> Array:
    """``(boxes,)`` of bool: the boxes that their parts do not cover exactly once; ``owner`` is each part's box."""
    found = np.zeros(len(boxes), bool)
    for _ in range(_TRIALS if len(boxes) else 0):
        seed = np.frombuffer(os.urandom(16), "u8")
        sums = np.zeros(len(boxes), "u8")
        for at in range(0, len(parts), BLOCK):
            block = slice(at, at + BLOCK)
            np.add.at(sums, owner[block], _weights(parts[block], seed))
        found |= sums % _PRIME != _weights(boxes, seed)
    return found


def _weights(boxes: Boxes, seed: Array) -> Array:
    """``(boxes,)``: the volume of each box modulo `_PRIME`, with the random lengths that the seed determines."""
    found = np.ones(len(boxes), "u8")
    for rows, offset, shape in boxes.groups():
        volume, ends = np.ones(len(rows), "u8"), offset + shape
        for axis in range(offset.shape[1]):
            # The distance of each index from the start of the axis is random itself: the sum of the lengths before it.
            key = splitmix64(seed + np.uint64(axis), seed)
            low, high = (splitmix64(at.astype("u8"), key) % _PRIME for at in (offset[:, axis], ends[:, axis]))
            volume = volume * ((high + _PRIME - low) % _PRIME) % _PRIME
        found[rows] = volume
    return found


def _counted(version: Version, leaf: int, rows: slice) -> tuple[int, int]:
    """The number of elements of all shards of a leaf, and of the leaf itself, as exact Python ints."""
    boxes, need = version.boxes[rows], Box.whole(version.leaves[leaf].spec.shape).volume
    return sum(boxes.volumes.tolist()) if need < MAX_ELEMENTS else sum(box.volume for box in boxes), need


def _problem(version: Version, leaf: int, rows: slice) -> str:
    """What is wrong with the shards of a leaf that do not cover it."""
    boxes, ranks = version.boxes[rows], version.shard_rank[rows]
    have, need = _counted(version, leaf, rows)
    names = format_ranks(np.unique(ranks).tolist())
    if have < need:
        return f"{have} of {need} elements are there" + (f", of {names}" if have else "")
    solid = np.flatnonzero(boxes.volumes)
    pair = _overlapping(boxes[solid[:_SEARCHED]])
    if pair is None:
        return f"shards overlap, of {names}"
    one, other = solid[list(pair)].tolist()
    return f"shards overlap: {boxes[one]} of rank {ranks[one]} and {boxes[other]} of rank {ranks[other]}"


def _overlapping(boxes: Boxes) -> tuple[int, int] | None:
    """The first two boxes that have elements in common; none of them is empty."""
    for _, low, shape in boxes.groups():
        high = low + shape
        for i in range(len(low) - 1):
            meets = np.all((low[i + 1 :] < high[i]) & (high[i + 1 :] > low[i]), axis=1)
            if meets.any():
                return i, i + 1 + int(np.argmax(meets))
    return None
