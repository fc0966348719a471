"""Compare two versions leaf by leaf, and by value, for ``tierstate diff``; only chunks that differ are read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.restore.restore import READ_WORKERS
from tierstate.engine.store.catalog import VersionCopies
from tierstate.manifest.arguments import short_repr
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.digest import DIGEST_SIZE
from tierstate.manifest.format.globs import check_globs
from tierstate.manifest.format.leaf import TIED, Leaf, Spec
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.diff import ElementDiff, LeafDiff, diff_versions
from tierstate.providers.tree.compare import no_match_error
from tierstate.providers.tree.structure import selected_paths
from tierstate.providers.values.classes import stand_in_classes
from tierstate.providers.values.encoding import decode_value
from tierstate.providers.values.values import ValueProvider
from tierstate.tiers.memory.arena import Arena

_BLOCK = 1 << 16
"""Elements that are compared in one block, so that the temporary arrays stay in the CPU cache."""


_NATIVE = {
    **{f"int{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)},
    "bool": "|b1", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip


_BY_TORCH = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""Types that NumPy lacks; float32 can represent all their values."""


_ARRAYS = {"f": (2, 4, 8), "c": (8, 16), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "b": (1,)}


Values = Callable[[Array], Array]
"""Converts raw bytes to an array of numbers."""


COMPARE_BATCH = 64 << 20
"""Bytes of the older version that are held in memory at once, or one chunk if that is more."""


MAX_VALUE = 4096
"""A plain value is shown if it is encoded in at most this many bytes."""


_SHOWN = 60


def values_of(spec: Spec) -> Values | None:
    """How to convert a leaf's bytes to float64, complex128, or their own integer type; None if they are not numbers."""
    if spec.kind == "array":
        return _of_numpy(spec.dtype) if isinstance(spec.dtype, str) and "fields" not in spec.attrs else None
    if spec.kind != "tensor":
        return None
    if spec.dtype in _NATIVE:
        return _of_numpy(_NATIVE[spec.dtype])
    if spec.dtype == "complex32":
        return lambda raw: raw.view("<f2").astype("f8").view("c16")
    if spec.dtype in _BY_TORCH and hasattr(torch, spec.dtype):
        dtype = getattr(torch, spec.dtype)
        return lambda raw: torch.from_numpy(raw).view(dtype).to(torch.float32).numpy().astype("f8")
    return None


def _of_numpy(name: str) -> Values | None:
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    if dtype.itemsize not in _ARRAYS.get(dtype.kind, ()):
        return None
    wide: Any = {"f": "f8", "c": "c16"}.get(dtype.kind)
    if dtype.kind == "b":
        return lambda raw: (raw != 0).view("u1")  # any byte but 0 is true
    if wide is None:
        return lambda raw: raw.view(dtype).astype(dtype.newbyteorder("="))
    return lambda raw: raw.view(dtype).astype(wide)


class _Part(NamedTuple):
    """Partial sums: how many elements changed, the largest difference, and the scaled sum of squares."""

    changed: int
    largest: int | float = 0
    squares: float = 0.0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)


class ValueDifference:
    """Sums up the differences of one leaf, part by part. Thread-safe.

    Args:
        spec: the leaf's spec, which is the same in both versions.
    """

    def __init__(self, spec: Spec) -> None:
        self._values = values_of(spec)
        self._itemsize = spec.itemsize if self._values else 1
        self._elements = spec.nbytes // self._itemsize
        self._lock = threading.Lock()
        self._all = _Part(0)

    def add(self, old: Buffer, new: Buffer) -> None:
        """Compare the same elements in both versions."""
        one, other = (np.frombuffer(view(b), np.uint8).reshape(-1, self._itemsize) for b in (old, new))
        for at in range(0, len(one), _BLOCK):
            part = self._compare(one[at : at + _BLOCK], other[at : at + _BLOCK])
            with self._lock:
                self._all = _joined(part, self._all)  # in this order, so that zero has the leaf's type

    def numbers(self) -> ElementDiff:
        """The totals; elements that were not added count as unchanged."""
        found = self._all
        if self._values is None:
            return ElementDiff(self._elements, found.changed)
        mean = found.squares / self._elements if self._elements else 0.0
        rms = float(found.largest) * math.sqrt(mean) if found.largest else 0.0
        return ElementDiff(self._elements, found.changed, found.largest, rms, found.nan, found.inf)

    def _compare(self, one: Array, other: Array) -> _Part:
        x, y = _units(one), _units(other)
        hit = x != y if x.ndim == 1 else (x != y).any(axis=1)
        count = int(np.count_nonzero(hit))
        if not count or self._values is None:
            return _Part(count)
        if count < len(hit):
            x, y = x[hit], y[hit]
        with np.errstate(all="ignore"):  # converting NaN and overflowing are expected
            return _differences(*(self._values(v.reshape(-1).view(np.uint8)) for v in (x, y)))


def _units(raw: Array) -> Array:
    """Elements as unsigned integers; in two columns if they are longer than 8 bytes."""
    size = raw.shape[1]
    return raw.view(f"<u{size}").reshape(-1) if size <= 8 else raw.view("<u8")


def _differences(x: Array, y: Array) -> _Part:
    if x.dtype.kind in "iu":
        # In unsigned arithmetic the difference of the larger and the smaller is exact for every pair.
        exact = np.maximum(x, y).astype("u8") - np.minimum(x, y).astype("u8")
        return _Part(len(x), int(exact.max()), _squares(exact.astype("f8")))
    both = np.isfinite(x) & np.isfinite(y)
    if both.all():
        apart = _modulus(x - y)
        return _Part(len(x), float(apart.max()), _squares(apart))
    apart = _modulus(x[both] - y[both])
    nan, inf = (tuple(int(np.count_nonzero(is_so(v))) for v in (x, y)) for is_so in (np.isnan, np.isinf))
    largest = float(apart.max()) if len(apart) else 0.0
    return _Part(len(x), largest, _squares(apart), (nan[0], nan[1]), (inf[0], inf[1]))


def _modulus(found: Array) -> Array:
    # NumPy's `abs` of complex numbers has errors larger than rounding.
    return np.hypot(found.real, found.imag) if found.dtype.kind == "c" else np.abs(found)


def _squares(apart: Array) -> float:
    """The sum of squares in units of the largest square, so that it neither overflows nor underflows."""
    top = apart.max() if len(apart) else 0.0
    return float(np.square(apart / top).sum()) if 0 < top < math.inf else float(top > 0)


def _joined(one: _Part, other: _Part) -> _Part:
    largest = max(one.largest, other.largest)
    squares = sum(p.squares * _share(p.largest, largest) ** 2 for p in (one, other))
    nan, inf = ((a[0] + b[0], a[1] + b[1]) for a, b in ((one.nan, other.nan), (one.inf, other.inf)))
    return _Part(one.changed + other.changed, largest, squares, nan, inf)


def _share(part: float, whole: float) -> float:
    if part == whole:
        return 1.0
    return 0.0 if math.isinf(whole) else part / whole


class _Piece(NamedTuple):
    """The same bytes of a leaf in both versions: row of the chunk and offset in it, in the old and the new one."""

    leaf: int
    then: int
    then_at: int
    now: int
    now_at: int
    nbytes: int


def compare(
    old: VersionCopies,
    new: VersionCopies,
    arena: Arena,
    *,
    values: bool = False,
    only: Sequence[str] | None = None,
    progress: Progress = no_progress,
) -> list[LeafDiff]:
    """What changed from one version to another, leaf by leaf.

    Args:
        values: also by how much: chunks with different digests are read in both, verified, and compared by element.
        only: globs of leaf paths.
        progress: called with the raw bytes read since the last call.

    Raises:
        StateMismatch: no leaf of either matches ``only``.
        Damaged: with ``values``, a chunk is whole in no tier.
    """
    only = None if only is None else check_globs(only)
    wanted = selected_paths(old.version, only) | selected_paths(new.version, only)
    if only is not None and not wanted:
        every = {encode_path(leaf.path): leaf for leaf in (*old.version.leaves, *new.version.leaves)}
        raise no_match_error(list(every.values()), only)
    found = [leaf for leaf in diff_versions(old.version, new.version) if encode_path(leaf.path) in wanted]
    return _Comparison(old, new, arena, progress).told(found) if values else found


class _Comparison:
    """Reads two versions and compares them."""

    def __init__(self, old: VersionCopies, new: VersionCopies, arena: Arena, progress: Progress) -> None:
        self._old, self._new = old.version, new.version
        self._then = Fetch(old.version, old.holdings, arena, workers=READ_WORKERS, progress=progress)
        self._now = Fetch(new.version, new.holdings, arena, workers=READ_WORKERS, progress=progress)
        self._gone = _gone(old), _gone(new)
        self._why = new.thinned or old.thinned or "it is in no tier that answers"
        self._tallies: dict[int, ValueDifference] = {}

    def told(self, found: list[LeafDiff]) -> list[LeafDiff]:
        """The leaves with the results of comparing their values."""
        pairs = {n: self._pair(d) for n, d in enumerate(found) if d.change == "changed"}
        notes = {n: self._note(i, j) for n, (j, i) in pairs.items()}
        plain = [n for n, (_, i) in pairs.items() if self._new.leaves[i].spec.kind == ValueProvider.kind]
        numeric = {n: pairs[n] for n in pairs if n not in plain and not notes[n]}
        self._tallies = {i: ValueDifference(self._new.leaves[i].spec) for _, i in numeric.values()}
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
        """Why a leaf's values are not compared; empty if they are."""
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
            if batch and held + nbytes > COMPARE_BATCH:
                self._compare(batch)
                batch, held = [], 0
            batch.append(piece)
            held += nbytes
        if batch:
            self._compare(batch)

    def _pieces(self, pairs: Iterable[tuple[int, int]]) -> Iterator[_Piece]:
        """The bytes to compare, split at the chunk boundaries of both versions; without chunks of equal digest."""
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
        """Read the older version's chunks into memory, then compare each of the newer one as it is read."""
        held: dict[int, Buffer] = {}
        pieces: dict[int, list[_Piece]] = {}
        for piece in batch:
            pieces.setdefault(piece.now, []).append(piece)

        def hold(row: int, raw: Buffer, _slab: object) -> None:
            held[row] = raw.clone()

        def take(row: int, raw: Buffer, _slab: object) -> None:
            for p in pieces[row]:
                before = held[p.then][p.then_at : p.then_at + p.nbytes]
                self._tallies[p.leaf].add(before, raw[p.now_at : p.now_at + p.nbytes])

        self._then.run(sorted({piece.then for piece in batch}), hold)
        self._now.run(sorted(pieces), take)

    def _texts(self, pairs: Sequence[tuple[int, int]]) -> dict[int, tuple[str, str]]:
        """Old and new text of plain values, by the leaf's index in the newer version."""
        before = self._then.leaves([j for j, _ in pairs])
        after = self._now.leaves([i for _, i in pairs])
        with stand_in_classes():
            return {i: (_short(decode_value(before[j])), _short(decode_value(after[i]))) for j, i in pairs}


def _gone(entry: VersionCopies) -> set[int]:
    """Indices of leaves with a chunk that no tier has."""
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
    """A shard's bytes, split at the chunk boundaries of both versions."""
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
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = short_repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
