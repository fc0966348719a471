"""Many ranks' parts of one version as the whole version, or a clear error; never a smaller one."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import columns as col
from .boxes import Boxes
from .catalog import Catalog
from .digest import checksum
from .errors import StateMismatch
from .head import Head
from .placing import placed
from .uniting import Union, names_of, unite
from .version import Shards, Version
from .whole import check_whole

__all__ = ["Merged", "check_whole", "merge", "placed"]

Array = col.Array

_SAME = ("run", "seq", "step", "chunk", "digest")
"""Fields of the head in which parts of one version agree."""

_TOLD = 20
"""Leaves that a message names at most."""

_TENSORS = frozenset({"tensor", "array", "storage", "cast", "quantized"})
"""Kinds of leaves of which every rank has the same or a part of its own; others may be wanted once per rank."""


class Merged(NamedTuple):
    """A whole version, and for each part which row of the whole each of its chunks became (-1: another rank's copy)."""

    version: Version
    rows: tuple[Array, ...]


class _Every(NamedTuple):
    """The shards of all parts, one part after another, with the whole version's leaves.

    Attributes:
        shards: their rows.
        start, chunks: ``(shards,)``: where its digests start, and how many they are.
        digests: ``(chunks, 2)``: of all parts.
    """

    shards: Shards
    start: Array
    chunks: Array
    digests: Array


def merge(parts: Sequence[Version], *, parent: str = "", ranks: Sequence[int] | None = None) -> Merged:
    """Merge the parts of all ranks. A part is a version with the shards of one rank.

    Leaves are united by path, in order of first appearance from the lowest rank on. Of shards with the same box, as
    replicated leaves have, the lowest rank's is kept; they have the same digests. Metadata and time are the lowest
    rank's too. The order in which the parts are given does not matter.

    Args:
        parent: id of the version before it in the line.
        ranks: whose part each is. Left out, a part is of the rank of its shards; those without one come last.

    Raises:
        StateMismatch: parts disagree on a leaf or on the version's head, copies differ, shards overlap, or something
            is missing; the message names leaves and ranks.
    """
    order, owners = _in_order(parts, ranks)
    ordered = [parts[p] for p in order]
    _check_heads(ordered, owners)
    union = unite([p.catalog for p in ordered], owners)
    every = _concat(ordered, union)
    kept, twin = _distinct(every)
    _check_copies(every, twin, union.catalog)
    rows, digests = _gather(every, kept)
    # A rank that holds nothing but copies may have given a part without shards: it took part all the same.
    world = max(len(parts), len(np.unique(every.shards.rank)))
    head = dataclasses.replace(ordered[0].head, world=world, parent=parent)
    shards = Shards(every.shards.leaf[kept], every.shards.rank[kept], every.shards.boxes[kept])
    version = Version.build(head, union.catalog, shards, digests)
    check_whole(version)
    ends = np.cumsum([len(p.digests) for p in ordered]).tolist()
    cut = [rows[end - len(p.digests) : end] for end, p in zip(ends, ordered, strict=True)]
    return Merged(version, tuple(cut[place] for place in np.argsort(order)))


def _in_order(parts: Sequence[Version], ranks: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """The numbers of the parts by rank, and those ranks; -1 where nobody says.

    Parts of one rank, and those of none, come in an order that follows from their content.
    """
    if not parts:
        raise StateMismatch("no rank gave a part")
    found = [int(p.shard_rank.min()) if len(p.shard_rank) else -1 for p in parts] if ranks is None else list(ranks)
    often = Counter(found)
    # Ranks rise, and those that nobody says come last.
    keys = [(r < 0, r, _content(p) if often[r] > 1 else b"") for r, p in zip(found, parts, strict=True)]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    return order, [found[p] for p in order]


def _content(part: Version) -> bytes:
    """What says which of two parts of one rank comes first, without the encoding of either."""
    numbers = (part.shard_leaf, part.shard_rank, part.boxes.offset, part.boxes.shape, part.digests)
    head = json.dumps(part.head.encode(), sort_keys=True).encode()
    return part.catalog.digest + checksum(head + b"".join(n.tobytes() for n in numbers))


def _check_heads(parts: Sequence[Version], owners: list[int]) -> None:
    first = _said(parts[0].head)
    for part, rank in zip(parts, owners, strict=True):
        if _said(part.head) != first:
            told = ", ".join(
                f"{name} {theirs!r} where {mine!r} is right"
                for name, mine, theirs in zip(_SAME, first, _said(part.head), strict=True)
                if mine != theirs
            )
            raise StateMismatch(f"ranks saved different versions: {names_of([rank])} has {told}")


def _said(head: Head) -> tuple[object, ...]:
    return head.run, head.seq, head.step, head.chunk, head.digest


def _concat(parts: Sequence[Version], union: Union) -> _Every:
    counts = [len(p.shard_leaf) for p in parts]
    leaves = [place[p.shard_leaf] for p, place in zip(parts, union.places, strict=True)]
    chunks = [len(p.digests) for p in parts]
    ends = np.concatenate([p.chunk_end for p in parts]).astype("i8")
    starts = np.concatenate([col.starts_of(p.chunk_end) for p in parts]).astype("i8")
    return _Every(
        Shards(
            np.concatenate(leaves).astype("<u4"),
            np.concatenate([p.shard_rank for p in parts]),
            Boxes.concat([p.boxes for p in parts]),
        ),
        starts + np.repeat(col.starts_of(np.cumsum(chunks)), counts),
        ends - starts,
        np.concatenate([p.digests for p in parts]),
    )


def _distinct(every: _Every) -> tuple[Array, Array]:
    """Of shards with the same box of the same leaf, the first: their numbers by leaf and box; and for each shard the
    number of the one that is kept."""
    leaf, rank, boxes = every.shards
    twin = np.arange(len(leaf))
    kept = [np.zeros(0, "i8")]
    for rows, offset, shape in boxes.groups():
        keys = [*shape.T[::-1], *offset.T[::-1], leaf[rows]]
        falls = bool(np.any(rank[rows][1:] < rank[rows][:-1]))
        order = np.lexsort([rank[rows], *keys] if falls else keys)  # stable: the lower rank first
        fresh = np.ones(len(rows), bool)
        fresh[1:] = False
        for key in keys:
            fresh[1:] |= key[order][1:] != key[order][:-1]
        mine = rows[order]
        twin[mine] = mine[fresh][np.cumsum(fresh) - 1]
        kept.append(mine[fresh])
    # Boxes of one leaf all have the same number of axes, and so are in order by now.
    every_kept = np.concatenate(kept)
    return every_kept[np.argsort(leaf[every_kept], kind="stable")], twin


def _check_copies(every: _Every, twin: Array, catalog: Catalog) -> None:
    """Raises StateMismatch where what several ranks hold of one box is not the same."""
    copies = np.flatnonzero(twin != np.arange(len(twin)))
    kept, counts = twin[copies], every.chunks[copies]
    mine = col.spread(every.start[copies], counts)
    theirs = col.spread(every.start[kept], counts)
    differ = np.any(every.digests[mine] != every.digests[theirs], axis=1)
    if not differ.any():
        return
    wrong = np.unique(np.repeat(np.arange(len(copies)), counts)[differ])
    leaves = every.shards.leaf[copies[wrong]]
    names = np.unique(leaves).tolist()
    told = []
    for leaf in names[:_TOLD]:
        pairs = wrong[leaves == leaf]
        ranks = every.shards.rank[np.concatenate([kept[pairs], copies[pairs]])]
        found = catalog.leaves[leaf]
        told.append(f"\n  {found.name}: {names_of(np.unique(ranks).tolist())}{_remedy(found.spec.kind)}")
    more = f"\n  and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    raise StateMismatch(f"ranks have different values for the same leaves:{''.join(told)}{more}")


def _remedy(kind: str) -> str:
    if kind in _TENSORS:
        return ""
    return "; a value that each rank has its own of is wrapped as ts.PerRank(value)"


def _gather(every: _Every, kept: Array) -> tuple[Array, Array]:
    """For each chunk of all parts its row in the whole, or -1; and the whole's digests."""
    chunks = col.spread(every.start[kept], every.chunks[kept])
    rows = np.full(len(every.digests), -1, "i8")
    rows[chunks] = np.arange(len(chunks))
    return rows, every.digests[chunks]
