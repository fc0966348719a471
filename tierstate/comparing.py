"""Comparing: two versions element by element, reading only what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import Buffer, to_bytes
from tierstate.manifest.diff import LeafDiff, diff
from tierstate.manifest.digest import DIGEST_SIZE
from tierstate.manifest.leaf import TIED, Leaf, encode_path
from tierstate.manifest.version import Version
from tierstate.providers.compare import nothing_matches
from tierstate.providers.encoding import decode
from tierstate.providers.structure import grow, select
from tierstate.providers.values import ValueProvider
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Fetch

from .differences import Tally
from .filling import WORKERS
from .progress import Progress, nobody

BATCH = 64 << 20
"""Bytes of the older version that are held at once, or one chunk where that is more."""

MAX_VALUE = 4096
"""Bytes of an encoded plain value that is shown."""

_SHOWN = 60


class _Piece(NamedTuple):
    """The same bytes of a leaf in both versions: row and offset in its chunk, there and here."""

    leaf: int
    then: int
    then_at: int
    now: int
    now_at: int
    nbytes: int


def chosen(version: Version, only: Sequence[str] | None) -> set[str]:
    """Encoded paths of the leaves that the globs choose, those in chosen containers too; all where there are none."""
    if only is None:
        return set(version.leaf_index)
    return {encode_path(version.leaves[i].path) for i in select(grow(version.leaves)[0], only)}


def compare(
    old: Entry,
    new: Entry,
    arena: Arena,
    *,
    values: bool = False,
    only: Sequence[str] | None = None,
    progress: Progress = nobody,
) -> list[LeafDiff]:
    """What changed from one version to another, leaf by leaf.

    Args:
        values: also by how much: chunks whose digests differ are read in both, verified, and compared by element.
        only: globs of leaf paths.
        progress: called with the raw bytes read since the last call.

    Raises:
        StateMismatch: no leaf of either matches ``only``.
        Damaged: with ``values``, a chunk is whole in no tier.
    """
    wanted = chosen(old.version, only) | chosen(new.version, only)
    if only is not None and not wanted:
        every = {encode_path(leaf.path): leaf for leaf in (*old.version.leaves, *new.version.leaves)}
        raise nothing_matches(list(every.values()), only)
    found = [leaf for leaf in diff(old.version, new.version) if encode_path(leaf.path) in wanted]
    return _Comparison(old, new, arena, progress).told(found) if values else found


class _Comparison:
    """Reads two versions side by side."""

    def __init__(self, old: Entry, new: Entry, arena: Arena, progress: Progress) -> None:
        self._old, self._new, self._progress = old.version, new.version, progress
        self._then = Fetch(old.version, old.holdings, arena, workers=WORKERS)
        self._now = Fetch(new.version, new.holdings, arena, workers=WORKERS)
        self._gone = _gone(old), _gone(new)
        self._why = new.thinned or old.thinned or "it is in no tier that answers"
        self._tallies: dict[int, Tally] = {}

    def told(self, found: list[LeafDiff]) -> list[LeafDiff]:
        """The leaves with what their values say."""
        pairs = {n: self._pair(d) for n, d in enumerate(found) if d.change == "changed"}
        notes = {n: self._note(i, j) for n, (j, i) in pairs.items()}
        plain = [n for n, (_, i) in pairs.items() if self._new.leaves[i].spec.kind == ValueProvider.kind]
        numeric = {n: pairs[n] for n in pairs if n not in plain and not notes[n]}
        self._tallies = {i: Tally(self._new.leaves[i].spec) for _, i in numeric.values()}
        self._run(numeric.values())
        texts = self._texts([pairs[n] for n in plain if not notes[n]])
        told = list(found)
        for n, (_, i) in pairs.items():
            numbers = self._tallies[i].numbers() if n in numeric else None
            told[n] = replace(found[n], numbers=numbers, values=texts.get(i), note=notes[n])
        return told

    def _pair(self, leaf: LeafDiff) -> tuple[int, int]:
        path = encode_path(leaf.path)
        return self._old.leaf_index[path], self._new.leaf_index[path]

    def _note(self, i: int, j: int) -> str:
        """Why a leaf is not compared; empty where it is."""
        one, other = self._old.leaves[j].spec, self._new.leaves[i].spec
        if j in self._gone[0] or i in self._gone[1]:
            return f"not compared: {self._why}"
        if one.kind != other.kind or TIED in (one.kind, other.kind):
            return f"{_what(self._old.leaves[j])} -> {_what(self._new.leaves[i])}"
        if one.kind == ValueProvider.kind:
            return f"longer than {MAX_VALUE} bytes" if max(one.nbytes, other.nbytes) > MAX_VALUE else ""
        if (one.dtype, one.shape, one.itemsize) != (other.dtype, other.shape, other.itemsize):
            return f"{_what(self._old.leaves[j])} -> {_what(self._new.leaves[i])}"
        if [self._old.boxes[s] for s in _shards(self._old, j)] != [self._new.boxes[s] for s in _shards(self._new, i)]:
            return "cut into other shards"
        return ""

    def _run(self, pairs: Iterable[tuple[int, int]]) -> None:
        batch: list[_Piece] = []
        held = 0
        for piece in self._pieces(pairs):
            nbytes = int(self._old.chunk_nbytes[piece.then])
            if batch and held + nbytes > BATCH:
                self._compare(batch)
                batch, held = [], 0
            batch.append(piece)
            held += nbytes
        if batch:
            self._compare(batch)

    def _pieces(self, pairs: Iterable[tuple[int, int]]) -> Iterator[_Piece]:
        """The bytes to compare, cut at the chunks of both versions; not those that the digests say are the same."""
        told = self._old.head.digest == self._new.head.digest
        then, now = self._old.digests.tobytes(), self._new.digests.tobytes()
        for j, i in pairs:
            for one, other in zip(_shards(self._old, j), _shards(self._new, i), strict=True):
                for piece in _cut(i, self._old, one, self._new, other):
                    whole = piece.nbytes == self._old.chunk_nbytes[piece.then] == self._new.chunk_nbytes[piece.now]
                    a, b = DIGEST_SIZE * piece.then, DIGEST_SIZE * piece.now
                    if not (told and whole and then[a : a + DIGEST_SIZE] == now[b : b + DIGEST_SIZE]):
                        yield piece

    def _compare(self, batch: Sequence[_Piece]) -> None:
        """Hold the older version's chunks, and compare each of the newer one as it comes."""
        held: dict[int, Buffer] = {}
        pieces: dict[int, list[_Piece]] = {}
        for piece in batch:
            pieces.setdefault(piece.now, []).append(piece)

        def hold(row: int, raw: Buffer, _slab: object) -> None:
            held[row] = raw.clone()
            self._progress(raw.numel())

        def take(row: int, raw: Buffer, _slab: object) -> None:
            for p in pieces[row]:
                before = held[p.then][p.then_at : p.then_at + p.nbytes]
                self._tallies[p.leaf].add(before, raw[p.now_at : p.now_at + p.nbytes])
            self._progress(raw.numel())

        self._then.run(sorted({piece.then for piece in batch}), hold)
        self._now.run(sorted(pieces), take)

    def _texts(self, pairs: Sequence[tuple[int, int]]) -> dict[int, tuple[str, str]]:
        """Plain values as they were and as they are, by the newer version's leaf."""
        before = self._read(self._old, self._then, [j for j, _ in pairs])
        after = self._read(self._new, self._now, [i for _, i in pairs])
        return {i: (before[j], after[i]) for j, i in pairs}

    def _read(self, version: Version, fetch: Fetch, leaves: Sequence[int]) -> dict[int, str]:
        found = {i: bytearray(version.leaves[i].spec.nbytes) for i in leaves}

        def take(row: int, raw: Buffer, _slab: object) -> None:
            start = int(version.chunk_start[row])
            found[int(version.chunk_leaf[row])][start : start + raw.numel()] = to_bytes(raw)
            self._progress(raw.numel())

        fetch.run(version.rows_of(leaves).tolist(), take)
        return {i: _short(decode(bytes(data))) for i, data in found.items()}


def _gone(entry: Entry) -> set[int]:
    """Leaves of which a part is in no tier."""
    absent = entry.absent(np.arange(len(entry.version.digests)))
    return set(entry.version.chunk_leaf[absent].tolist())


def _shards(version: Version, leaf: int) -> range:
    """Numbers of a leaf's shards."""
    first, end = np.searchsorted(version.shard_leaf, [leaf, leaf + 1]).tolist()
    return range(first, end)


def _first(version: Version, shard: int) -> int:
    """Row of a shard's first chunk."""
    return int(version.chunk_end[shard - 1]) if shard else 0


def _cut(leaf: int, old: Version, one: int, new: Version, other: int) -> Iterator[_Piece]:
    """A shard's bytes, cut wherever either version has it cut into chunks."""
    first, first_now = _first(old, one), _first(new, other)
    at, end = 0, int(old.shard_nbytes[one])
    while at < end:
        (i, then_at), (k, now_at) = divmod(at, old.head.chunk), divmod(at, new.head.chunk)
        nbytes = min(old.head.chunk - then_at, new.head.chunk - now_at, end - at)
        yield _Piece(leaf, first + i, then_at, first_now + k, now_at, nbytes)
        at += nbytes


def _what(leaf: Leaf) -> str:
    spec = leaf.spec
    if not spec.has_bytes or spec.kind == ValueProvider.kind:
        return spec.kind
    return f"{spec.kind} {spec.dtype} {'x'.join(map(str, spec.shape)) or 'scalar'}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
