"""Which tier has which leaves of a version, and in which codec; read from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tierstate.engine.store.catalog import Holding, VersionCopies
from tierstate.manifest.arrays import Array
from tierstate.manifest.format.leaf import CONTAINERS, STORAGE, Leaf
from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.tree.compare import no_match_error
from tierstate.providers.tree.structure import selected_paths

Share = Literal["all", "part", "none"]


@dataclass(frozen=True, slots=True)
class TierShare:
    """What one tier has of a leaf or of a group of leaves.

    Attributes:
        has: whether the tier has all of its bytes, a part, or none.
        codecs: how its chunks are encoded there.
        stored: stored bytes; each place counts once per leaf.
    """

    has: Share
    codecs: tuple[str, ...] = ()
    stored: int = 0


@dataclass(frozen=True, slots=True)
class LeafLocation:
    """One leaf of a version, or all leaves below a path.

    Attributes:
        path: its path, or the common first keys of the group.
        leaf: the leaf; None for a group.
        nbytes: raw bytes.
        tiers: the share of each tier that has the version; empty if the leaf has no bytes.
        leaves: number of leaves with values in the group; 1 for a leaf.
        shards: number of boxes in which it was saved; if more than one, by different ranks.
    """

    path: Path
    leaf: Leaf | None
    nbytes: int
    tiers: Mapping[str, TierShare] = field(default_factory=dict)
    leaves: int = 1
    shards: int = 1


def locate_leaves(entry: VersionCopies, only: Sequence[str] | None = None) -> list[LeafLocation]:
    """The leaves of a version, in the order of the state, with the containers, which no tier stores.

    Raises:
        StateMismatch: none matches ``only``.
    """
    wanted = selected_paths(entry.version, only)
    if only is not None and not wanted:
        raise no_match_error(entry.version.leaves, only)
    tables = {holding.tier_run.name: _held(entry, holding) for holding in entry.holdings}
    shards = np.bincount(entry.version.shard_leaf, minlength=len(entry.version.leaves)).tolist()
    found = []
    for path, i in entry.version.leaf_index.items():
        if path not in wanted:
            continue
        leaf = entry.version.leaves[i]
        nbytes = leaf.spec.nbytes
        tiers = {name: table[i] for name, table in tables.items()} if nbytes else {}
        found.append(LeafLocation(leaf.path, leaf, nbytes, tiers, int(leaf.spec.kind not in CONTAINERS), shards[i]))
    return found


def subtotals(leaves: Sequence[LeafLocation], depth: int) -> list[LeafLocation]:
    """Sums by the first keys of the paths, at most ``depth`` keys; each group comes after the groups that contain it.

    A key with dots counts as several keys, as in globs.
    """
    groups: dict[Path, list[LeafLocation]] = {}
    for one in leaves:
        if one.leaf is None or not one.leaves or one.leaf.spec.kind == STORAGE:
            continue
        keys = tuple(part for key in one.path for part in (key.split(".") if isinstance(key, str) else (key,)))
        for length in range(min(depth, len(keys)) + 1):
            groups.setdefault(keys[:length], []).append(one)
    return [_sum(path, members) for path, members in groups.items()]


def _sum(path: Path, members: Sequence[LeafLocation]) -> LeafLocation:
    names = dict.fromkeys(name for one in members for name in one.tiers)
    tiers = {name: _sum_held([one.tiers[name] for one in members if name in one.tiers]) for name in names}
    nbytes, shards = sum(one.nbytes for one in members), sum(one.shards for one in members)
    return LeafLocation(path, None, nbytes, tiers, len(members), shards)


def _sum_held(parts: Sequence[TierShare]) -> TierShare:
    shares = {part.has for part in parts}
    has: Share = next(iter(shares)) if len(shares) == 1 else "part"
    codecs = tuple(sorted({codec for part in parts for codec in part.codecs}))
    return TierShare(has, codecs, sum(part.stored for part in parts))


def _held(entry: VersionCopies, holding: Holding) -> list[TierShare]:
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
    return [TierShare(shares[i], tuple(sorted(codecs.get(i, ()))), stored[i]) for i in range(count)]


def _firsts(*columns: Array) -> Array:
    """Indices of the first of each set of equal rows."""
    _, first = np.unique(np.stack([c.astype("u8") for c in columns], axis=1), axis=0, return_index=True)
    return first
