"""Boxes: rectangular parts (offset, shape) of an array's global index space, by which shards are described.

`Box` is one box as an object. `Boxes` are many boxes as NumPy columns (struct of arrays), which are intersected and
compared all at once: a version may have a million shards. `row_major_runs` cuts a range of elements in row-major order
into boxes, so that it can be copied by a few rectangular copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

import numpy as np

from .arrays import Array, expand_runs, starts_of
from .errors import FormatError

Shape = tuple[int, ...]

MAX_ELEMENTS = 1 << 62
"""Volumes are counted up to this number of elements: no array in memory has so many."""


class Box(NamedTuple):
    """A part ``offset[d] <= index[d] < offset[d] + shape[d]`` of a global index space."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers all of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.shape)

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside an array of this shape."""
        return len(shape) == len(self.shape) == len(self.offset) and all(
            o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The intersection in global coordinates, or None if it is empty."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - low for low, h in zip(lo, hi, strict=True))
        return None if any(n <= 0 for n in shape) else Box(lo, shape)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box with its offset relative to ``origin``; the offset may be negative then."""
        return Box(tuple(o - start for o, start in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index of this box in an array whose first element is at ``origin`` (default: zero)."""
        start = origin if origin is not None else (0,) * len(self.offset)
        return tuple(slice(o - s, o - s + n) for o, s, n in zip(self.offset, start, self.shape, strict=True))


def row_major_runs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut the elements ``start:stop`` of an array in row-major order into boxes.

    Yields ``(flat offset of the first element, box)`` in order, at most ``2 * ndim - 1`` of them, each as large as
    possible, so that any range of a strided tensor can be copied by a few rectangular copies instead of one per row.
    ``start`` and ``stop`` must be within the array: ``0 <= start``, ``stop <= prod(shape)``.
    """
    if start >= stop:
        return
    if not shape:
        yield 0, Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        row = start // inner
        yield from _row(shape, row, start - row * inner, stop - row * inner)
        return
    if start < first * inner:
        yield from _row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        tail = tuple(shape[1:])
        yield first * inner, Box((first, *(0 for _ in tail)), (last - first, *tail))
    if last * inner < stop:
        yield from _row(shape, last, 0, stop - last * inner)


def _row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes of a part of one row, with offsets in the whole array."""
    inner = math.prod(shape[1:])
    for flat, box in row_major_runs(shape[1:], start, stop):
        yield row * inner + flat, Box((row, *box.offset), (1, *box.shape))


class Boxes(Sequence[Box]):
    """A sequence of `Box`, kept as three columns; boxes may have different numbers of axes.

    Methods with other boxes as an argument work by pairs: box i with box i of the argument.

    Args:
        ndim: ``(boxes,)``: number of axes of each box.
        offset, shape: ``(sum of ndim,)`` of int64: offsets and shapes of all boxes, concatenated.
    """

    def __init__(self, ndim: Array, offset: Array, shape: Array) -> None:
        self.ndim, self.offset, self.shape = ndim.astype("i8", copy=False), offset, shape

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> Boxes:
        """These boxes as columns.

        Raises:
            FormatError: a box has more or fewer offsets than lengths, or numbers beyond 64 bits.
        """
        given = tuple(boxes)
        ndim = np.fromiter((len(b.shape) for b in given), "i8", len(given))
        try:
            offset = np.fromiter(chain.from_iterable(b.offset for b in given), "<i8")
            shape = np.fromiter(chain.from_iterable(b.shape for b in given), "<i8")
        except OverflowError as error:
            raise FormatError("a box has numbers beyond 64 bits") from error
        if any(len(b.offset) != len(b.shape) for b in given):
            raise FormatError("a box has more or fewer offsets than lengths")
        found = cls(ndim, offset, shape)
        found.__dict__["rows"] = given
        return found

    @classmethod
    def wholes(cls, shapes: Sequence[Sequence[int]]) -> Boxes:
        """The boxes that cover all of arrays of these shapes.

        Raises:
            FormatError: a length is beyond 64 bits.
        """
        ndim = np.fromiter(map(len, shapes), "i8", len(shapes))
        try:
            shape = np.fromiter((n for s in shapes for n in s), "<i8", int(ndim.sum()))
        except OverflowError as error:
            raise FormatError("an array has an axis longer than 64 bits can say") from error
        return cls(ndim, np.zeros_like(shape), shape)

    @classmethod
    def concat(cls, many: Sequence[Boxes]) -> Boxes:
        """All of these boxes, concatenated."""
        if not many:
            return cls(np.zeros(0, "i8"), np.zeros(0, "<i8"), np.zeros(0, "<i8"))
        return cls(*(np.concatenate(c) for c in zip(*((b.ndim, b.offset, b.shape) for b in many), strict=True)))

    @classmethod
    def from_numbers(cls, ndim: Array, numbers: Array) -> Boxes:
        """The boxes from one column of numbers, as a version stores it: for each box its offsets, then its lengths."""
        lengths = _lengths(ndim)
        return cls(ndim, numbers[~lengths], numbers[lengths])

    def to_numbers(self) -> Array:
        """The inverse of `from_numbers`."""
        lengths, numbers = _lengths(self.ndim), np.empty(2 * len(self.offset), "<i8")
        numbers[~lengths], numbers[lengths] = self.offset, self.shape
        return numbers

    @cached_property
    def starts(self) -> Array:
        """``(boxes,)``: where the numbers of each box start in the columns."""
        return starts_of(np.cumsum(self.ndim))

    @cached_property
    def axes(self) -> int | None:
        """The number of axes, if it is the same for all boxes (they are sliced faster then); otherwise None."""
        ndim = int(self.ndim[0]) if len(self.ndim) else 0
        return ndim if bool((self.ndim == ndim).all()) else None

    @cached_property
    def rows(self) -> tuple[Box, ...]:
        """All boxes as objects: slow if there are many."""
        return tuple(self)

    @cached_property
    def volumes(self) -> Array:
        """``(boxes,)`` of int64: number of elements of each, at most `MAX_ELEMENTS`. No length may be negative."""
        found, solid = np.ones(len(self.ndim), "i8"), self.ndim > 0
        if len(self.shape):
            starts = self.starts[solid]
            found[solid] = np.multiply.reduceat(self.shape, starts)  # exact modulo 2**64
            with np.errstate(over="ignore"):
                about = np.multiply.reduceat(np.maximum(self.shape, 1).astype("f8"), starts)
            if float(about.max()) >= MAX_ELEMENTS:
                beyond = (about >= MAX_ELEMENTS) & (np.minimum.reduceat(self.shape, starts) > 0)
                found[np.flatnonzero(solid)[beyond]] = MAX_ELEMENTS
        return found

    def within(self, wholes: Boxes) -> Array:
        """``(boxes,)`` of bool: whether each box is inside the array that box i of ``wholes`` covers."""
        found: Array = self.ndim == wholes.ndim
        if not found.all():
            alike = np.flatnonzero(found)
            found[alike] = self[alike].within(wholes[alike])
            return found
        # Without a sum, so that nothing can overflow.
        out = (self.offset < 0) | (self.shape < 0) | (self.offset > wholes.shape - self.shape)
        if out.any():
            found[np.repeat(np.arange(len(found)), self.ndim)[out]] = False
        return found

    def intersect(self, others: Boxes) -> Boxes:
        """The intersections of boxes with the same number of axes; an empty intersection is not `solid`."""
        offset = np.maximum(self.offset, others.offset)
        return Boxes(self.ndim, offset, np.minimum(self.offset + self.shape, others.offset + others.shape) - offset)

    @property
    def solid(self) -> Array:
        """``(boxes,)`` of bool: which boxes have elements."""
        found = np.ones(len(self.ndim), bool)
        found[np.repeat(np.arange(len(found)), self.ndim)[self.shape <= 0]] = False
        return found

    def equal(self, others: Boxes) -> Array:
        """``(boxes,)`` of bool: which boxes are equal to box i of ``others``."""
        found: Array = self.ndim == others.ndim
        rows = np.flatnonzero(found)
        one, other = (self, others) if len(rows) == len(found) else (self[rows], others[rows])
        differ = (one.offset != other.offset) | (one.shape != other.shape)
        if differ.any():
            found[rows[np.repeat(np.arange(len(rows)), one.ndim)[differ]]] = False
        return found

    def hashes(self, salt: Array, seed: Array) -> Array:
        """``(boxes,)`` of uint64: a keyed hash of each box, equal for the same box and salt.

        Args:
            salt: ``(boxes,)``: a number that is hashed together with each box.
            seed: two random numbers of uint64, the key of the hash: an attacker without them cannot make collisions.
        """
        found = splitmix64(salt.astype("u8"), seed)
        for rows, offset, shape in self.groups():
            mine = found[rows]
            for column in (*offset.T, *shape.T):
                mine = splitmix64(mine ^ column.astype("u8"), seed)
            found[rows] = mine
        return found

    def groups(self) -> Iterator[tuple[Array, Array, Array]]:
        """The boxes by number of axes: indices of the boxes, and ``(n, ndim)`` of offsets and of lengths."""
        counts = np.bincount(self.ndim)
        for ndim in np.flatnonzero(counts).tolist():
            if counts[ndim] == len(self):
                yield np.arange(len(self)), self.offset.reshape(len(self), ndim), self.shape.reshape(len(self), ndim)
                return
            mine = self.ndim == ndim
            at = np.repeat(mine, self.ndim)
            rows = np.flatnonzero(mine)
            yield rows, self.offset[at].reshape(len(rows), ndim), self.shape[at].reshape(len(rows), ndim)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice | Array) -> Boxes: ...
    def __getitem__(self, index: int | slice | Array) -> Box | Boxes:
        if isinstance(index, (int, np.integer)):
            i = range(len(self.ndim))[index]
            part = slice(int(self.starts[i]), int(self.starts[i]) + int(self.ndim[i]))
            return Box(tuple(self.offset[part].tolist()), tuple(self.shape[part].tolist()))
        ndim = self.ndim[index]
        if isinstance(index, slice) and index.step in (None, 1) and len(ndim):
            first, last, _ = index.indices(len(self))
            part = slice(int(self.starts[first]), int(self.starts[last - 1]) + int(self.ndim[last - 1]))
            return Boxes(ndim, self.offset[part], self.shape[part])
        if self.axes is not None:
            return Boxes(ndim, *(c.reshape(len(self), self.axes)[index].reshape(-1) for c in (self.offset, self.shape)))
        at = expand_runs(self.starts[index], ndim)
        return Boxes(ndim, self.offset[at], self.shape[at])

    def __len__(self) -> int:
        return len(self.ndim)

    def __iter__(self) -> Iterator[Box]:
        offset, shape, at = self.offset.tolist(), self.shape.tolist(), 0
        for ndim in self.ndim.tolist():
            yield Box(tuple(offset[at : at + ndim]), tuple(shape[at : at + ndim]))
            at += ndim

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Boxes):
            mine, theirs = (self.ndim, self.offset, self.shape), (other.ndim, other.offset, other.shape)
            return self is other or all(map(np.array_equal, mine, theirs))
        return self.rows == other if isinstance(other, tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Boxes({', '.join(map(repr, self[:4]))}{', ...' if len(self) > 4 else ''})"


def _lengths(ndim: Array) -> Array:
    """Which numbers of `Boxes.to_numbers` are lengths, as bool; the others are offsets."""
    return np.repeat(np.tile(np.array([False, True]), len(ndim)), np.repeat(ndim, 2))


def splitmix64(numbers: Array, seed: Array) -> Array:
    """The splitmix64 hash of each number of uint64, with a seed of two numbers."""
    with np.errstate(over="ignore"):
        mixed = (numbers ^ seed[0]) + seed[1]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Array = mixed ^ (mixed >> np.uint64(31))
    return found
