"""Statistics of the elements of chunks (NaN, infinities, range, squares), computed from their bytes in slabs.

NaN, infinities and the range come from comparing floats as integers: without the sign bit, their bits rise with their
magnitude. That is two passes of NumPy's SIMD maximum for any float type, and a NaN costs nothing as long as there is
none. Squares are summed as float32, in rows short enough that the sum is exact to some millionths; where float32 would
overflow or lose small squares, and where an element is not finite, the chunk is read again as float64.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from tierstate.engine.packs.slab_layout import BLOCK, SlabChunks
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import view
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import LOSSY, Leaf
from tierstate.manifest.format.statistics import ChunkStatistics
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.trace import span

log = logging.getLogger("tierstate")


ALONE = 256 << 10
"""Chunks of this many bytes or more are read one by one; shorter ones together, since each call of NumPy costs time."""


MOST_THREADS = 4
"""Threads for the chunks of one save, at most; never more than half of the cores."""


ROW = 8192
"""Elements whose squares are summed as float32."""


PIECE = 1 << 20
"""Elements that are converted at a time."""


TOO_SMALL, TOO_LARGE = 1e-15, 1e15
"""Between these magnitudes the squares of float32 elements, and the sum of a row of them, are ordinary numbers."""


class ElementType(NamedTuple):
    """How to read elements.

    Attributes:
        bits: the unsigned integers of their length.
        as_float: the NumPy type of floats; None for floats that NumPy does not know, and for integers.
        top: the bits of the largest finite magnitude; 0 for integers.
        integer: the NumPy type of integers; None for floats.
        paired: real and imaginary parts follow each other: there is no order.
        table: for types of one byte, the value of each byte.
    """

    bits: np.dtype[Any]
    as_float: np.dtype[Any] | None
    top: int
    integer: np.dtype[Any] | None = None
    paired: bool = False
    table: Array | None = None


def _float(name: str, top: int, *, paired: bool = False) -> ElementType:
    dtype = np.dtype(name)
    return ElementType(np.dtype(f"<u{dtype.itemsize}"), dtype, top, paired=paired)


_FLOATS = {
    "float64": _float("<f8", 0x7FEFFFFFFFFFFFFF),
    "float32": _float("<f4", 0x7F7FFFFF),
    "float16": _float("<f2", 0x7BFF),
    "bfloat16": ElementType(np.dtype("<u2"), None, 0x7F7F),
    "complex64": _float("<f4", 0x7F7FFFFF, paired=True),
    "complex128": _float("<f8", 0x7FEFFFFFFFFFFFFF, paired=True),
}


def element_type(leaf: Leaf) -> ElementType | None:
    """How to read the elements of a leaf; None if they are no numbers, or of a rare type."""
    spec = leaf.spec
    if LOSSY in spec.attrs or "fields" in spec.attrs:
        return None
    if spec.kind == "tensor":
        return _of_torch(spec.dtype)
    return _of_numpy(spec.dtype) if spec.kind == "array" else None


@cache
def _of_torch(name: str) -> ElementType | None:
    dtype = getattr(torch, name, None)
    if name in _FLOATS or not isinstance(dtype, torch.dtype):
        return _FLOATS.get(name)
    if dtype.is_floating_point and dtype.itemsize == 1:
        try:
            table = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32).numpy()
        except (RuntimeError, TypeError):  # two elements in one byte
            return None
        return _float("<f4", 0x7F7FFFFF)._replace(table=table)
    if dtype.is_floating_point or dtype.is_complex or not hasattr(np, name.replace("bool", "bool_")):
        return None
    return _integer(np.dtype(name))


@cache
def _of_numpy(name: str) -> ElementType | None:
    dtype = np.dtype(name)
    if dtype.byteorder == ">" or dtype.kind not in "fciub":
        return None
    return _FLOATS.get(dtype.name) if dtype.kind in "fc" else _integer(dtype)


def _integer(dtype: np.dtype[Any]) -> ElementType:
    bits = np.dtype(f"<u{dtype.itemsize}")
    return ElementType(bits, None, 0, bits if dtype.kind == "b" else dtype)


class ElementTypes:
    """How to read the elements of each chunk of a capture.

    Args:
        leaves: the version's leaves.
        chunk_leaf: ``(chunks,)``: the leaf of each chunk.

    Attributes:
        known: the types.
        codes: ``(chunks,)``: for each chunk an index into them; -1 for chunks of which nothing is found out.
    """

    def __init__(self, leaves: Sequence[Leaf], chunk_leaf: Array) -> None:
        types = [element_type(leaf) for leaf in leaves]
        self.known = list({id(one): one for one in types if one is not None}.values())
        codes = {id(one): i for i, one in enumerate(self.known)}
        of_leaf = np.array([codes.get(id(one), -1) for one in types], "i2")
        self.codes: Array = of_leaf[chunk_leaf]


def statistics_of(
    memory: memoryview, at: Array, nbytes: Array, codes: Array, types: Sequence[ElementType]
) -> ChunkStatistics:
    """The statistics of chunks that lie in one piece of memory.

    Args:
        memory: the bytes, aligned for the elements.
        at, nbytes: ``(n,)``: where each chunk is in it; aligned for its elements.
        codes: ``(n,)``: how to read each: an index into ``types``, or -1.
    """
    found = ChunkStatistics.unknown(len(at))
    for code, kind in enumerate(types):
        mine = np.flatnonzero((codes == code) & (nbytes > 0))
        for i in mine[nbytes[mine] >= ALONE].tolist():
            found.put(np.array([i]), _of_one(kind, _elements(kind, memory[at[i] : at[i] + nbytes[i]])))
        for some in _batches(mine[nbytes[mine] < ALONE], at, nbytes):
            found.put(some, _of_many(kind, memory, at[some], nbytes[some]))
    return found


def _batches(rows: Array, at: Array, nbytes: Array) -> list[Array]:
    """The rows in parts that lie close together, of some `PIECE` bytes each."""
    if not len(rows):
        return []
    ends = np.cumsum(nbytes[rows])
    gaps = at[rows[1:]] - (at[rows[:-1]] + nbytes[rows[:-1]])
    cuts = np.searchsorted(ends, np.arange(PIECE, int(ends[-1]), PIECE), "right")
    parts = np.split(rows, np.union1d(cuts, np.flatnonzero(gaps > BLOCK) + 1))
    return [part for part in parts if len(part)]


def _elements(kind: ElementType, memory: memoryview) -> Array:
    """The elements as bits, or as integers."""
    if kind.table is not None:
        values: Array = kind.table[np.frombuffer(memory, "u1")]
        return values.view(kind.bits)
    return np.frombuffer(memory, kind.integer or kind.bits)


def _of_one(kind: ElementType, elements: Array) -> ChunkStatistics:
    """The statistics of one chunk: one row."""
    if kind.integer is not None:
        return _integers(elements.min(keepdims=True), elements.max(keepdims=True))
    size = kind.bits.itemsize
    highest, lowest = int(elements.view(f"<i{size}").max()), int(elements.max())
    sign = 1 << (8 * size - 1)
    magnitude = max(highest, lowest & (sign - 1) if lowest >= sign else 0)
    if highest < 0:  # all are negative: the largest has the smallest magnitude
        highest = int(elements.min())
    if magnitude > kind.top:
        return _of_floats(kind, elements)
    if lowest < sign:  # none is negative
        lowest = int(elements.min())
    low, high, most = _values(kind, np.array([lowest, highest, magnitude], kind.bits)).tolist()
    if most and not TOO_SMALL < most < TOO_LARGE:
        return _of_floats(kind, elements)
    return _row(kind, 0, 0, low, high, _squares(kind, elements))


def _of_many(kind: ElementType, memory: memoryview, at: Array, nbytes: Array) -> ChunkStatistics:
    """The statistics of short chunks that lie close together, of at least one element each: a row each."""
    first, last = int(at[0]), int(at[-1] + nbytes[-1])
    size = 1 if kind.table is not None else (kind.integer or kind.bits).itemsize
    elements = _elements(kind, memory[first : first + (last - first) // size * size])
    starts = (at - first) // size
    # What lies between two chunks is reduced as well, and ignored.
    bounds = np.ravel(np.stack([starts, starts + nbytes // size], axis=1))[:-1]
    if kind.integer is not None:
        return _integers(_reduced(np.minimum, elements, bounds), _reduced(np.maximum, elements, bounds))
    values = _values(kind, elements).astype("<f8" if size == 8 else "<f4", copy=False)
    low, high = _reduced(np.minimum, values, bounds), _reduced(np.maximum, values, bounds)  # NaN, if one is NaN
    with np.errstate(all="ignore"):
        squares = _reduced(np.add, values * values, bounds)
        most = np.maximum(np.abs(low), np.abs(high))
        plain = (most == 0) | ((most > TOO_SMALL) & (most < TOO_LARGE))
    none = np.zeros(len(at), "<u4")
    found = _rows(kind, none, none.copy(), *(column.astype("<f8") for column in (low, high, squares)))
    for i in np.flatnonzero(~plain).tolist():
        found.put(np.array([i]), _of_floats(kind, elements[starts[i] : starts[i] + nbytes[i] // size]))
    return found


def _reduced(by: np.ufunc, values: Array, bounds: Array) -> Array:
    """Reduced from each even bound to the odd one after it."""
    with np.errstate(all="ignore"):
        found: Array = by.reduceat(values, bounds)[::2]
    return found


def _of_floats(kind: ElementType, elements: Array) -> ChunkStatistics:
    """As `_of_one`, where elements may be NaN, infinite, or have squares that float32 cannot hold."""
    nan = infinite = 0
    low, high, squares = np.inf, -np.inf, 0.0
    for start in range(0, len(elements), PIECE):
        values = _values(kind, elements[start : start + PIECE]).astype("<f8", copy=False)
        finite = values[np.isfinite(values)]
        nans = int(np.count_nonzero(np.isnan(values)))
        nan, infinite = nan + nans, infinite + len(values) - len(finite) - nans
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        with np.errstate(over="ignore"):
            squares += float(finite @ finite)
    if low > high:
        low = high = np.nan
    return _row(kind, nan, infinite, low, high, squares)


def _values(kind: ElementType, elements: Array) -> Array:
    """Elements as floats."""
    if kind.as_float is None:  # bfloat16: the upper half of a float32
        return (elements.astype("<u4") << 16).view("<f4")
    return elements.view(kind.as_float)


def _squares(kind: ElementType, elements: Array) -> float:
    """The sum of the squares of elements of ordinary magnitudes."""
    if kind.as_float is None:
        return _squares_of_bfloat16(kind, elements)
    values = elements.view(kind.as_float)
    if kind.as_float.itemsize > 2:
        return _sum_of_squares(values)
    return sum(_sum_of_squares(values[at : at + PIECE].astype("<f4")) for at in range(0, len(values), PIECE))


def _squares_of_bfloat16(kind: ElementType, elements: Array) -> float:
    """Two elements at a time, each made a float32 in place of the pair: half the bytes are written."""
    total = 0.0
    even = len(elements) // 2 * 2
    pairs, scratch = elements[:even].view("<u4"), np.empty(min(PIECE, even // 2), "<u4")
    for start in range(0, len(pairs), PIECE):
        some = pairs[start : start + PIECE]
        out = scratch[: len(some)]
        total += _sum_of_squares(np.bitwise_and(some, 0xFFFF0000, out=out).view("<f4"))
        total += _sum_of_squares(np.left_shift(some, 16, out=out).view("<f4"))
    return total + _sum_of_squares(_values(kind, elements[even:]))


def _sum_of_squares(values: Array) -> float:
    """Summed by rows in the type of the values, and over the rows as float64."""
    whole = len(values) // ROW * ROW
    rows, rest = values[:whole].reshape(-1, ROW), values[whole:]
    return float(_dots(rows).sum(dtype="<f8")) + float(rest @ rest)


def _dots(rows: Array) -> Array:
    if hasattr(np, "vecdot"):  # NumPy 2: by BLAS, and faster
        found: Array = np.vecdot(rows, rows)
        return found
    return np.einsum("ij,ij->i", rows, rows)  # type: ignore[no-any-return]


def _integers(low: Array, high: Array) -> ChunkStatistics:
    none = np.zeros(len(low), "<u4")
    return ChunkStatistics(none, none, low.astype("<f8"), high.astype("<f8"), np.full(len(low), np.nan))


def _row(kind: ElementType, nan: int, infinite: int, low: float, high: float, squares: float) -> ChunkStatistics:
    counts = (np.array([n], "<u4") for n in (nan, infinite))
    return _rows(kind, *counts, *(np.array([x], "<f8") for x in (low, high, squares)))


def _rows(kind: ElementType, nan: Array, infinite: Array, low: Array, high: Array, squares: Array) -> ChunkStatistics:
    none = np.full(len(low), np.nan)
    return ChunkStatistics(nan, infinite, none if kind.paired else low, none if kind.paired else high, squares)


class StatisticsWorker:
    """Computes the statistics of what a capture puts into slabs, by threads of its own that begin after the capture.

    Only where the arena might run out of slabs they begin earlier: the copying threads, for which the caller of `save`
    waits, then share the cores with them.

    Args:
        types: how to read the chunks.
        before: the statistics of the last capture with the same chunks, for those that are not copied again.
        room: slabs that may wait for the end of the capture.
    """

    def __init__(self, types: ElementTypes, before: ChunkStatistics | None, room: int) -> None:
        self._types, self._before, self._room = types, before, room
        self._found = ChunkStatistics.unknown(len(types.codes))
        self._queue: SimpleQueue[SlabChunks | None] = SimpleQueue()
        self._failures: list[BaseException] = []
        self._lock, self._waiting = threading.Lock(), 0
        self._threads: list[threading.Thread] = []

    def take(self, batch: SlabChunks) -> None:
        """Have the chunks of a slab looked at; leases it until that is done. Called from several threads."""
        if (self._types.codes[batch.rows] >= 0).any():
            batch.slab.lease()
            self._queue.put(batch)
            with self._lock:
                self._waiting += 1
                if self._waiting > self._room:
                    self._start()

    def keep(self, rows: Array) -> None:
        """These chunks are as in the last capture."""
        if self._before is not None:
            self._found.put(rows, self._before.rows(rows))

    def end(self) -> ChunkStatistics | None:
        """Wait for the statistics of all chunks; None, and a warning, if they could not be computed."""
        if self._waiting:
            self._finish()
        for thread in self._threads:
            thread.join()
        if not self._failures:
            return self._found
        log.warning("a version has no statistics: %r", self._failures[0])
        return None

    def abandon(self) -> None:
        """The capture has failed: release the slabs."""
        self._failures.append(CaptureError("the capture has failed"))
        self._finish()

    def _start(self) -> None:
        if self._threads:
            return
        for _ in range(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))):
            thread = threading.Thread(target=self._run, name="tierstate-statistics", daemon=True)
            try:
                start_thread(thread)
            except RuntimeError:  # no more threads can be started: those that are must do, or else this one
                break
            self._threads.append(thread)

    def _finish(self) -> None:
        self._start()
        for _ in self._threads or (None,):
            self._queue.put(None)
        if not self._threads:
            self._run()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                if not self._failures:
                    self._look(batch)
            except BaseException as error:
                self._failures.append(error)
            finally:
                batch.slab.release()

    def _look(self, batch: SlabChunks) -> None:
        with span("statistics", bytes=int(batch.nbytes.sum())):
            codes = self._types.codes[batch.rows]
            found = statistics_of(view(batch.slab.buffer), batch.at, batch.nbytes, codes, self._types.known)
            mine = codes >= 0
            self._found.put(batch.rows[mine], found.rows(mine))
