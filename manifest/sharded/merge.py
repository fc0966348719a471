"""Merges the parts of all ranks into the whole version before the commit; a version with missing shards is refused.

Leaves are united by path, replicated shards are kept once, and their copies must have equal digests. `merge_parts`
checks that the shards of every leaf cover it exactly. `join_layouts` merges the parts' layouts of one tier by the row
of each chunk in the whole version (`MergeResult.rows`); `rows_in_merged` finds these rows for a part again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.arrays import BLOCK, Array, expand_runs, starts_of
from tierstate.manifest.boxes import Boxes
from tierstate.manifest.digest import checksum_of
from tierstate.manifest.errors import FormatError, StateMismatch, format_ranks
from tierstate.manifest.format.layout import Layout, LayoutBuilder
from tierstate.manifest.format.leaf import METADATA, STRIDES, TIED, Leaf, LeafTable, Spec
from tierstate.manifest.format.statistics import joined_statistics
from tierstate.manifest.format.version import Head, Shards, Version
from tierstate.manifest.reshard.coverage import check_complete

from .ownership import ONE_OWNER

_SAME = ("run", "seq", "step", "chunk", "digest")
"""Fields of the head that must be equal in all parts of one version."""


_TOLD = 20
"""Most leaves that an error message names."""


def join_layouts(version: Version, parts: Sequence[tuple[Array, Layout]]) -> Layout:
    """The layout of a whole version, from the layouts of the parts; rows that no part has are `ABSENT`.

    Args:
        parts: for each part its rows in the whole version, from `merge_parts` or `rows_in_merged` (-1: another rank's
            copy was kept, so that this part's place is not used), and its layout.

    Raises:
        FormatError: rows and layout of a part have different lengths, or two parts give a pack different lengths.
    """
    draft = LayoutBuilder(len(version.digests))
    sizes: dict[str, int] = {}
    for rows, layout in parts:
        if len(rows) != len(layout.object) or (len(rows) and int(rows.max()) >= len(version.digests)):
            raise FormatError(f"a part of {len(rows)} rows has a layout of {len(layout.object)}, or is another's")
        here = np.flatnonzero((rows >= 0) & layout.present)
        draft.put_like(rows[here], layout, here)
        for key, size in layout.pack_sizes.items():
            if sizes.setdefault(key, size) != size:
                raise FormatError(f"{key} is {sizes[key]} bytes long by one rank's part and {size} by another's")
    return draft.build(sizes)


class UnitedLeaves(NamedTuple):
    """The union of leaf tables in order of first appearance, and for each table its leaves' indices in the union."""

    catalog: LeafTable
    places: list[Array]


def unite_leaves(catalogs: Sequence[LeafTable]) -> UnitedLeaves:
    """The union of the leaf tables, one of each rank. Pieces that tables share are processed once.

    Raises:
        StateMismatch: ranks disagree on a leaf.
    """
    union = _UnionBuilder()
    places = [union.place(catalog, rank) for rank, catalog in enumerate(catalogs)]
    first = catalogs[0]
    # Usually no rank has a leaf that the first does not have; then the first table is reused with its columns.
    same = len(union.leaves) == len(first.leaves) and not union.united
    return UnitedLeaves(first if same else LeafTable.of(union.leaves), places)


class _UnionBuilder:
    """Builds the union of leaf tables.

    Attributes:
        leaves: the leaves so far.
        united: whether one of them has metadata of several ranks.
    """

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.united = False
        self._at: dict[str, int] = {}
        self._first_rank: list[int] = []
        self._seen: dict[int, Array] = {}

    def place(self, catalog: LeafTable, rank: int) -> Array:
        """Add the leaves of a table; returns their indices in the union."""
        found = self._seen.get(id(catalog))
        if found is None:
            if catalog.joined:
                found = np.concatenate([self.place(piece, rank) for piece in catalog.joined])
            else:
                found = self._add(catalog, rank)
            self._seen[id(catalog)] = found
        return found

    def _add(self, catalog: LeafTable, rank: int) -> Array:
        numbers = []
        for path, leaf in zip(catalog.paths, catalog.leaves, strict=True):
            number = self._at.setdefault(path, len(self.leaves))
            if number == len(self.leaves):
                self.leaves.append(leaf)
                self._first_rank.append(rank)
            elif self.leaves[number] is not leaf and not self._unite(number, leaf):
                raise StateMismatch(
                    f"ranks disagree on {leaf.name}: "
                    f"{format_ranks([self._first_rank[number]])} {self.leaves[number].spec}, "
                    f"{format_ranks([rank])} {leaf.spec}"
                )
            numbers.append(number)
        return np.array(numbers, "i8")

    def _unite(self, number: int, leaf: Leaf) -> bool:
        """Whether a leaf is the one in the union, to which its metadata is added."""
        known = self.leaves[number]
        if not same_leaf(known, leaf):
            return False
        mine, theirs = _metadata(known), _metadata(leaf)
        if mine != theirs:
            attrs = {**known.spec.attrs, METADATA: {**mine, **theirs}}
            self.leaves[number] = Leaf(known.path, dataclasses.replace(known.spec, attrs=attrs))
            self.united = True
        return True


def same_leaf(one: Leaf, other: Leaf) -> bool:
    """Whether two ranks have the same leaf. The metadata of their state dicts may be about different submodules, and
    the strides of a tensor are each rank's own.
    """
    if one.spec == other.spec:
        return True
    mine, theirs = _metadata(one), _metadata(other)
    return _bare(one) == _bare(other) and all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())


def _metadata(leaf: Leaf) -> Mapping[str, Any]:
    found = leaf.spec.attrs.get(METADATA)
    return found if isinstance(found, dict) else {}


def _bare(leaf: Leaf) -> Spec:
    own = {METADATA} if leaf.spec.kind == TIED else {METADATA, STRIDES}
    return dataclasses.replace(leaf.spec, attrs={k: v for k, v in leaf.spec.attrs.items() if k not in own})


def rows_in_merged(version: Version, part: Version) -> Array:
    """For each chunk of a part its row in the merged version; -1 if another rank's copy was kept.

    Raises:
        StateMismatch: the part does not belong to the version.
    """
    for name, mine, right in zip(_SAME, _identity(part.head), _identity(version.head), strict=True):
        if mine != right:
            raise StateMismatch(f"a part of {name} {mine!r} is none of a version of {name} {right!r}")
    leaf = _leaves(version, part)[part.shard_leaf]
    there = _find(version, leaf, part.boxes)
    if (lost := np.flatnonzero(there < 0)).size:
        name = part.leaves[int(part.shard_leaf[lost[0]])].name
        raise _mismatch(part, f"{part.boxes[int(lost[0])]} of {name} is no shard of it")
    counts = np.diff(part.chunk_end.astype("i8"), prepend=0)
    rows = expand_runs(starts_of(version.chunk_end)[there], counts)
    other = np.any(version.digests[rows] != part.digests, axis=1)
    if other.any():
        name = part.leaves[int(part.chunk_leaf[int(np.argmax(other))])].name
        raise _mismatch(part, f"{name} has other bytes in it")
    kept = version.shard_rank[there] == part.shard_rank
    rows[~np.repeat(kept, counts)] = -1
    return rows


def _mismatch(part: Version, why: str) -> StateMismatch:
    ranks = format_ranks(np.unique(part.shard_rank).tolist())
    return StateMismatch(f"the part of {ranks} does not belong to the version of step {part.head.step}: {why}")


def _leaves(version: Version, part: Version) -> Array:
    """``(leaves,)``: for each leaf of the part its index in the whole version."""
    if version.catalog is part.catalog:
        return np.arange(len(part.leaves))
    index, found = version.leaf_index, []
    for path, leaf in zip(part.catalog.paths, part.leaves, strict=True):
        number = index.get(path, -1)
        if number < 0 or (version.leaves[number] is not leaf and not same_leaf(version.leaves[number], leaf)):
            raise _mismatch(part, f"{leaf.name} is {'another leaf' if number >= 0 else 'no leaf'} of it")
        found.append(number)
    return np.array(found, "i8")


def _find(version: Version, leaf: Array, boxes: Boxes) -> Array:
    """``(shards,)``: for each leaf and box the index of that shard in the version; -1 if there is none.

    The version may have a million shards and the part a few, so the part's shards are sorted, by a hash of leaf and
    box, and those of the version are looked up among them.
    """
    seed = np.frombuffer(os.urandom(16), "u8")
    theirs, mine = version.boxes.hashes(version.shard_leaf, seed), boxes.hashes(leaf, seed)
    order = np.argsort(mine)
    ordered = np.append(mine[order], mine[:1])  # one more row, so that each index from searchsorted is valid
    spot = np.searchsorted(ordered[:-1], theirs)
    near = np.flatnonzero(ordered[spot] == theirs) if len(mine) else np.zeros(0, "i8")
    shard = order[np.minimum(spot[near], len(mine) - 1)]
    same = (version.shard_leaf[near] == leaf[shard]) & version.boxes[near].equal(boxes[shard])
    found = np.full(len(leaf), -1, "i8")
    found[shard[same]] = near[same]
    return found


class MergeResult(NamedTuple):
    """A whole version, and what its parts became in it.

    Attributes:
        version: the whole version.
        rows: for each part the rows of its chunks in the version (-1: another rank's copy was kept).
        copies: ``(2, copies)``: for each chunk of which another rank's copy was kept its index in the chunks of all
            parts, one part after the other, and that of the other copy. Both were compared.
    """

    version: Version
    rows: tuple[Array, ...]
    copies: Array


class _AllShards(NamedTuple):
    """The shards of all parts, concatenated, with leaf indices of the whole version.

    Attributes:
        shards: leaf, rank and box of each shard.
        start, chunks: ``(shards,)``: index of the shard's first digest, and number of its chunks.
        digests: ``(chunks, 2)``: the digests of all parts.
    """

    shards: Shards
    start: Array
    chunks: Array
    digests: Array


def merge_parts(parts: Sequence[Version], *, parent: str = "") -> MergeResult:
    """Merge the parts of all ranks, in the order of the ranks. A part is a version with the shards of one rank.

    Leaves are united by path, in order of first appearance. Of shards with the same box (replicated leaves) the lowest
    rank's is kept; all copies must have the same digests. Metadata and time are those of the lowest rank.

    Args:
        parent: id of the previous version of the run.

    Raises:
        StateMismatch: parts disagree on a leaf or on the version's head, copies differ, shards overlap, or elements
            are missing; the message names leaves and ranks.
    """
    _check_heads(parts)
    union = unite_leaves([p.catalog for p in parts])
    every = _concat(parts, union)
    kept, twin = _distinct(every)
    copies = _checked_copies(every, twin, union.catalog)
    chunks = expand_runs(every.start[kept], every.chunks[kept])
    rows = np.full(len(every.digests), -1, "i8")
    rows[chunks] = np.arange(len(chunks))
    statistics = joined_statistics([p.statistics for p in parts])
    head = dataclasses.replace(parts[0].head, world=len(parts), parent=parent)
    shards = Shards(every.shards.leaf[kept], every.shards.rank[kept], every.shards.boxes[kept])
    digests, known = every.digests[chunks], statistics and statistics.rows(chunks)
    del every, kept, twin, chunks, statistics  # there may be tens of millions of rows
    version = Version.build(head, union.catalog, shards, digests, known)
    check_complete(version)
    ends = np.cumsum([len(p.digests) for p in parts])
    return MergeResult(version, tuple(np.split(rows, ends[:-1])), copies)


class MergePlan:
    """How the parts of one save became a version, for later saves whose parts have the same leaves and shards.

    From save to save mostly only digests change; to sort and to check millions of shards again takes ten times as long
    as to put the digests in order.
    """

    def __init__(self, parts: Sequence[Version], merged: MergeResult) -> None:
        """Args: the parts, and what `merge_parts` made of them; the leaves may have been sorted since."""
        self._merged = merged
        self._pieces = [part.catalog.pieces for part in parts]  # which `PartReader` has once for all parts
        self._shapes = [_shape_of(part) for part in parts]
        rows = np.concatenate(merged.rows)
        kept = np.flatnonzero(rows >= 0)
        self._source = np.empty_like(kept)
        self._source[rows[kept]] = kept

    def again(self, parts: Sequence[Version], parent: str = "") -> MergeResult | None:
        """As `merge_parts`, with the leaves in the order of the plan; None if the parts have other leaves or shards, or
        copies differ.

        Raises:
            StateMismatch: the parts are not of one version.
        """
        if len(parts) != len(self._shapes) or not all(
            len(mine) == len(theirs) and all(map(is_, mine, theirs))
            for mine, theirs in zip(self._pieces, (part.catalog.pieces for part in parts), strict=True)
        ):
            return None
        if any(_shape_of(part) != shape for part, shape in zip(parts, self._shapes, strict=True)):
            return None
        _check_heads(parts)
        before, rows, copies = self._merged
        every = np.concatenate([part.digests for part in parts])
        if not np.array_equal(every[copies[0]], every[copies[1]]):
            return None
        statistics = joined_statistics([part.statistics for part in parts])
        head = dataclasses.replace(parts[0].head, world=len(parts), parent=parent)
        version = before.again(head, every[self._source], statistics and statistics.rows(self._source))
        return MergeResult(version, rows, copies)


def _shape_of(part: Version) -> bytes:
    """A checksum of the shards of a part, and of the length of its chunks."""
    boxes = part.boxes
    numbers = (part.shard_leaf, part.shard_rank, boxes.ndim, boxes.offset, boxes.shape)
    sizes = np.array([part.head.chunk, *map(len, numbers)], "<i8")
    return checksum_of(column.tobytes() for column in (sizes, *numbers))


def _check_heads(parts: Sequence[Version]) -> None:
    first = _identity(parts[0].head)
    for rank, part in enumerate(parts):
        if _identity(part.head) != first:
            told = ", ".join(
                f"{name} {theirs!r} where {mine!r} is right"
                for name, mine, theirs in zip(_SAME, first, _identity(part.head), strict=True)
                if mine != theirs
            )
            raise StateMismatch(f"ranks saved different versions: {format_ranks([rank])} has {told}")


def _identity(head: Head) -> tuple[object, ...]:
    return tuple(getattr(head, name) for name in _SAME)


def _concat(parts: Sequence[Version], union: UnitedLeaves) -> _AllShards:
    counts = [len(p.shard_leaf) for p in parts]
    leaves = [place[p.shard_leaf] for p, place in zip(parts, union.places, strict=True)]
    chunks = [len(p.digests) for p in parts]
    ends = np.concatenate([p.chunk_end for p in parts]).astype("i8")
    starts = np.concatenate([starts_of(p.chunk_end) for p in parts]).astype("i8")
    return _AllShards(
        Shards(
            np.concatenate(leaves).astype("<u4"),
            np.concatenate([p.shard_rank for p in parts]),
            Boxes.concat([p.boxes for p in parts]),
        ),
        starts + np.repeat(starts_of(np.cumsum(chunks)), counts),
        ends - starts,
        np.concatenate([p.digests for p in parts]),
    )


def _distinct(every: _AllShards) -> tuple[Array, Array]:
    """Removes duplicates: the indices of the first shard of each leaf and box, ordered by leaf and box; and for each
    shard the index of the one that is kept instead of it."""
    leaf = every.shards.leaf
    # Columns of 16 bits are sorted in a time that is linear. (NumPy's documentation of `sort`: radix sort.)
    by_leaf = np.argsort(leaf.astype("u2") if len(leaf) and int(leaf.max()) < 1 << 16 else leaf, kind="stable")
    twin, kept = np.arange(len(leaf)), [np.zeros(0, "i8")]
    for rows in _whole_leaves(by_leaf, leaf):
        mine = _distinct_of(every.shards, rows, twin)
        # All boxes of one leaf have the same number of axes, so that they are sorted now.
        kept.append(mine[np.argsort(leaf[mine], kind="stable")])
    return np.concatenate(kept), twin


def _whole_leaves(by_leaf: Array, leaf: Array) -> Iterator[Array]:
    """The shards, ordered by leaf, in blocks of whole leaves: sorted block by block, they take less memory and time."""
    start, ordered = 0, leaf[by_leaf]
    while start < len(by_leaf):
        last = ordered[min(start + BLOCK, len(by_leaf)) - 1]
        stop = int(np.searchsorted(ordered, last, side="right"))  # all shards of that leaf
        yield by_leaf[start:stop]
        start = stop


def _distinct_of(shards: Shards, these: Array, twin: Array) -> Array:
    """Of these shards the first one of each leaf and box, ordered by number of axes, leaf and box. Notes in ``twin``
    for each shard the one that is kept instead of it."""
    leaf, kept = shards.leaf[these], [np.zeros(0, "i8")]
    for rows, offset, shape in shards.boxes[these].groups():
        keys = [*shape.T[::-1], *offset.T[::-1], leaf[rows]]
        order = np.lexsort(keys)  # stable, so that the lower rank comes first
        fresh = np.ones(len(rows), bool)
        fresh[1:] = False
        for key in keys:
            fresh[1:] |= key[order][1:] != key[order][:-1]
        mine = these[rows[order]]
        twin[mine] = mine[fresh][np.cumsum(fresh) - 1]
        kept.append(mine[fresh])
    return np.concatenate(kept)


def _checked_copies(every: _AllShards, twin: Array, catalog: LeafTable) -> Array:
    """``(2, copies)``: each chunk of which another is kept, and that one. Raises StateMismatch if they differ."""
    copies = np.flatnonzero(twin != np.arange(len(twin)))
    kept, counts = twin[copies], every.chunks[copies]
    mine = expand_runs(every.start[copies], counts)
    theirs = expand_runs(every.start[kept], counts)
    differ = np.any(every.digests[mine] != every.digests[theirs], axis=1)
    if not differ.any():
        return np.stack([mine, theirs])
    wrong = np.unique(np.repeat(np.arange(len(copies)), counts)[differ])
    leaves = every.shards.leaf[copies[wrong]]
    names = np.unique(leaves).tolist()
    told = []
    for leaf in names[:_TOLD]:
        pairs = wrong[leaves == leaf]
        ranks = every.shards.rank[np.concatenate([kept[pairs], copies[pairs]])]
        found = catalog.leaves[leaf]
        told.append(f"\n  {found.name}: {format_ranks(np.unique(ranks).tolist())}{_remedy(found.spec.kind)}")
    more = f"\n  and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    raise StateMismatch(f"ranks have different values for the same leaves:{''.join(told)}{more}")


def _remedy(kind: str) -> str:
    if kind in ONE_OWNER:
        return ""
    return "; a value that each rank has its own of is wrapped as ts.PerRank(value)"
