"""Offers: what ranks want of a version and what they reach, and the rows that are alike in that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tierstate.manifest.columns import Array

from .base import Traits
from .rowsets import NONE

PROCESS, HOST, SITE, SLOW = range(4)
"""From where a rank reaches a row: its own memory, its host, the site, and a tier of the site that is slow."""

WANTED = 4

LINK = 1e9
"""Bytes per second that a host is taken to get through the network: those of a link of 10 Gbit/s."""


def is_slow(traits: Traits, ranks: int) -> bool:
    """Whether passing chunks from host to host is cheaper than to read them from this tier on each host.

    Reading on each of H hosts takes each ``nbytes / (ranks * bandwidth)`` seconds; once in the team takes the H-th part
    of that, and then each host gets ``nbytes`` by its link. A tier of which nobody knows the bandwidth is not slow.

    Args:
        traits: of the tier.
        ranks: how many of a host read from it.
    """
    return traits.shared == "site" and traits.bandwidth is not None and traits.bandwidth * ranks < LINK


def kind_of(traits: Traits, ranks: int) -> int:
    """From where a rank reaches what is in a tier; ``ranks`` of its host read from it."""
    if traits.shared == "site":
        return SLOW if is_slow(traits, ranks) else SITE
    return HOST if traits.shared == "host" else PROCESS


class Offer(NamedTuple):
    """What one rank says of a version's rows, as runs.

    Attributes:
        wants: those that it wants.
        reach: by `PROCESS`, `HOST`, `SITE`, `SLOW`, those that it reaches there; a row may be in many.
    """

    wants: Array = NONE
    reach: tuple[Array, Array, Array, Array] = (NONE, NONE, NONE, NONE)


class RowClass(NamedTuple):
    """Rows, the ranks that want them, and those that reach them by kind."""

    rows: Array
    wanting: list[int]
    reach: tuple[frozenset[int], ...]


def classes(offers: Sequence[Offer]) -> Iterator[RowClass]:
    """Rows by the ranks that want and reach them; those that nobody wants are left out."""
    kinds, ranks, runs = _sets(offers)
    of = np.repeat(np.arange(len(runs)), [len(r) for r in runs])
    bounds = np.concatenate([NONE, *runs])
    # Each set has a random number; a row's is the sum of those of its sets, so that equal ones are in the same sets. It
    # changes only where some run starts or ends.
    points, at = np.unique(bounds, return_inverse=True)
    key, marks = np.zeros(len(points), "u8"), _scatter(of)
    np.add.at(key, at.reshape(bounds.shape)[:, 0], marks)
    np.subtract.at(key, at.reshape(bounds.shape)[:, 1], marks)
    _, first, inverse = np.unique(np.cumsum(key, dtype="u8")[:-1], return_index=True, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse, minlength=len(first)))[:-1])
    first = points[first]
    for number, members in enumerate(_members(first, of, bounds)):
        wanting = sorted(r for s in members if kinds[s] == WANTED for r in ranks[s])
        if wanting:
            reach = tuple(_union([ranks[s] for s in members if kinds[s] == kind]) for kind in range(WANTED))
            yield RowClass(_spread(points[parts[number]], points[parts[number] + 1]), wanting, reach)


def _spread(starts: Array, stops: Array) -> Array:
    """The rows of some runs."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    found: Array = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return found


def _sets(offers: Sequence[Offer]) -> tuple[list[int], list[frozenset[int]], list[Array]]:
    """The different sets of rows: of which kind, whose, and which; ranks that say the same share one."""
    found: dict[tuple[int, bytes], tuple[set[int], Array]] = {}
    for rank, (wants, reach) in enumerate(offers):
        for kind, runs in enumerate((*reach, wants)):
            if len(runs):
                found.setdefault((kind, runs.tobytes()), (set(), runs))[0].add(rank)
    kinds = [kind for kind, _ in found]
    return kinds, [frozenset(ranks) for ranks, _ in found.values()], [runs for _, runs in found.values()]


def _scatter(numbers: Array) -> Array:
    """Well-mixed 64-bit numbers, the same everywhere (Steele, Lea and Flood's SplitMix64)."""
    z = (numbers.astype("u8") + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def _members(first: Array, of: Array, bounds: Array) -> Iterator[list[int]]:
    """For each class, given a row of it, the sets that it is in."""
    order = np.argsort(first)
    low, high = (np.searchsorted(first[order], bounds[:, i]) for i in (0, 1))
    counts = high - low
    starts = np.repeat(low - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) if len(counts) else counts
    classes = order[starts + np.arange(len(starts))]
    sets = np.repeat(of, counts)
    by_class = np.lexsort((sets, classes))
    ends = np.cumsum(np.bincount(classes, minlength=len(first)))
    return (part.tolist() for part in np.split(sets[by_class], ends[:-1]))


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)
