"""Locating: where the leaves of a version are, tier by tier, and how they are encoded there; from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tierstate.manifest.columns import Array
from tierstate.manifest.leaf import CONTAINERS, STORAGE, Leaf, Path
from tierstate.providers.compare import nothing_matches
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Holding

from .comparing import chosen

Share = Literal["all", "part", "none"]


@dataclass(frozen=True, slots=True)
class Held:
    """What one tier has of a leaf, or of some.

    Attributes:
        has: all of its bytes, a part, or none.
        codecs: how its chunks are encoded there.
        stored: bytes that they take, each place counted once for a leaf.
    """

    has: Share
    codecs: tuple[str, ...] = ()
    stored: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """One leaf of a version, or all below a path.

    Attributes:
        path: its path, or the keys that all of them have first.
        leaf: the leaf; None for a group.
        nbytes: raw bytes.
        tiers: what each tier that has the version has of it; empty where it has no bytes.
        leaves: how many leaves with values it stands for.
        shards: how many boxes it was saved in, by different ranks where it is more than one.
    """

    path: Path
    leaf: Leaf | None
    nbytes: int
    tiers: Mapping[str, Held] = field(default_factory=dict)
    leaves: int = 1
    shards: int = 1


def locate(entry: Entry, only: Sequence[str] | None = None) -> list[Located]:
    """The leaves of a version, in the state's order; containers too, of which no tier has anything.

    Raises:
        StateMismatch: none matches ``only``.
    """
    wanted = chosen(entry.version, only)
    if only is not None and not wanted:
        raise nothing_matches(entry.version.leaves, only)
    tables = {holding.shelf.name: _held(entry, holding) for holding in entry.holdings}
    shards = np.bincount(entry.version.shard_leaf, minlength=len(entry.version.leaves)).tolist()
    found = []
    for path, i in entry.version.leaf_index.items():
        if path not in wanted:
            continue
        leaf = entry.version.leaves[i]
        nbytes = leaf.spec.nbytes
        tiers = {name: table[i] for name, table in tables.items()} if nbytes else {}
        found.append(Located(leaf.path, leaf, nbytes, tiers, int(leaf.spec.kind not in CONTAINERS), shards[i]))
    return found


def subtotals(leaves: Sequence[Located], depth: int) -> list[Located]:
    """Sums by the first keys of the paths, at most so many; each group after those that hold it.

    A string with dots counts as the keys between them, as for globs.
    """
    groups: dict[Path, list[Located]] = {}
    for one in leaves:
        if one.leaf is None or not one.leaves or one.leaf.spec.kind == STORAGE:
            continue
        keys = tuple(part for key in one.path for part in (key.split(".") if isinstance(key, str) else (key,)))
        for length in range(min(depth, len(keys)) + 1):
            groups.setdefault(keys[:length], []).append(one)
    return [_sum(path, members) for path, members in groups.items()]


def _sum(path: Path, members: Sequence[Located]) -> Located:
    names = dict.fromkeys(name for one in members for name in one.tiers)
    tiers = {name: _sum_held([one.tiers[name] for one in members if name in one.tiers]) for name in names}
    nbytes, shards = sum(one.nbytes for one in members), sum(one.shards for one in members)
    return Located(path, None, nbytes, tiers, len(members), shards)


def _sum_held(parts: Sequence[Held]) -> Held:
    shares = {part.has for part in parts}
    has: Share = next(iter(shares)) if len(shares) == 1 else "part"
    codecs = tuple(sorted({codec for part in parts for codec in part.codecs}))
    return Held(has, codecs, sum(part.stored for part in parts))


def _held(entry: Entry, holding: Holding) -> list[Held]:
    """What a tier has of each leaf."""
    version, layout = entry.version, holding.layout
    count, leaf = len(version.leaves), version.chunk_leaf
    rows = np.flatnonzero(layout.present)
    chunks, here = np.bincount(leaf, minlength=count), np.bincount(leaf[rows], minlength=count)
    first = rows[_firsts(leaf[rows], layout.object[rows], layout.offset[rows])]
    stored = np.bincount(leaf[first], layout.stored[first], count).astype("i8").tolist()
    codecs: dict[int, list[str]] = {}
    pairs = np.unique(np.stack([leaf[rows], layout.codec[rows]]).astype("i8"), axis=1)
    for index, codec in pairs.T.tolist():
        codecs.setdefault(index, []).append(layout.codecs[codec])
    shares: list[Share] = ["all" if h == c else "part" if h else "none" for h, c in zip(here, chunks, strict=True)]
    return [Held(shares[i], tuple(sorted(codecs.get(i, ()))), stored[i]) for i in range(count)]


def _firsts(*columns: Array) -> Array:
    """Indices of the first of each set of equal rows."""
    _, first = np.unique(np.stack([c.astype("u8") for c in columns], axis=1), axis=0, return_index=True)
    return first
