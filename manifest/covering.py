"""Covering: whether shards hold each element of wanted boxes once, without looking at any element."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from .columns import Array
from .corners import Corners
from .errors import FormatError
from .meeting import Meetings, Want, stored_boxes
from .version import Version

PRIME = (1 << 31) - 1
"""Weights are counted modulo this, so that products of two fit 64 bits."""

TRIES = 2
"""Weighings, each of which lets a wrong covering pass once in PRIME times."""

LISTED = 5


def check_covered(version: Version, wants: Sequence[Want], met: Meetings) -> None:
    """Raises FormatError where the shards of a version, which may come from anybody, lack elements of wanted boxes or
    hold some of them more than once.
    """
    wrong = uncovered(version, wants, met)
    if not len(wrong):
        return
    head = version.head
    names = list(dict.fromkeys(version.leaves[wants[w].leaf].name for w in wrong.tolist()))
    more = f", and {len(names) - LISTED} more leaves" if len(names) > LISTED else ""
    raise FormatError(
        f"version {head.seq} (step {head.step}) of run {head.run!r} does not hold every element once of "
        f"{', '.join(names[:LISTED])}{more}: shards are missing, or overlap"
    )


def uncovered(version: Version, wants: Sequence[Want], met: Meetings) -> Array:
    """Numbers of the wanted boxes of which shards do not hold each element exactly once.

    Every index of every axis gets a random weight, and an element the product of those of its indices. The weight of a
    box is then the product of one sum per axis, and shards cover a box if and only if their parts of it weigh together
    what it weighs: where an element is missing or there twice, that would be chance (the lemma of Schwartz and Zippel).
    So all boxes are checked in one pass over the pairs, however they are cut.
    """
    pairs = np.bincount(met.want, minlength=len(wants))
    alone = met.same & (pairs[met.want] == 1)
    ndim = np.fromiter((len(want.box.shape) for want in wants), "i8", len(wants))
    open_ = np.fromiter((0 not in want.box.shape for want in wants), bool, len(wants))
    open_[met.want[alone]] = False
    found = [
        _wrong(version, wants, met, np.flatnonzero(open_ & (ndim == n)), n) for n in np.unique(ndim[open_]).tolist()
    ]
    return np.sort(np.concatenate([np.zeros(0, "i8"), *found]))


def _wrong(version: Version, wants: Sequence[Want], met: Meetings, chosen: Array, ndim: int) -> Array:
    """Those of the chosen wanted boxes, of so many axes, that are not covered."""
    place = np.full(len(wants), -1)
    place[chosen] = np.arange(len(chosen))
    mine = np.flatnonzero(place[met.want] >= 0)
    at = place[met.want[mine]]
    wanted = Corners.of([wants[w].box for w in chosen.tolist()], ndim)
    parts = stored_boxes(version, met.shard[mine], ndim).common(wanted.pick(at))
    wrong = np.zeros(len(chosen), bool)
    for _ in range(TRIES):
        keys = np.array([secrets.randbits(63) for _ in range(ndim)], "u8")
        total = np.zeros(len(chosen), "i8")
        np.add.at(total, at, _weights(parts, keys))
        wrong |= total % PRIME != _weights(wanted, keys)
    return chosen[wrong]


def _weights(boxes: Corners, keys: Array) -> Array:
    """The weight of each box."""
    # The sum of the weights of indices is the difference of what lies before the ends, which is as random itself.
    along = (_scrambled(boxes.high, keys) - _scrambled(boxes.low, keys)) % PRIME
    weight = np.ones(len(along), "i8")
    for axis in range(along.shape[1]):
        weight = weight * along[:, axis] % PRIME
    return weight


def _scrambled(index: Array, keys: Array) -> Array:
    """Numbers below PRIME that nobody foresees who does not know the keys: SplitMix64 of them and the indices."""
    x = index.astype("u8") * np.uint64(0x9E3779B97F4A7C15) + keys
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift)) ^ keys) * np.uint64(factor)
    found: Array = ((x ^ (x >> np.uint64(31))) % np.uint64(PRIME)).astype("i8")
    return found
