"""Boxes: rectangular parts of an array's index space, and runs of a row-major order as boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


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
        """The common part in global coordinates, or None where there is none."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - low for low, h in zip(lo, hi, strict=True))
        return None if any(n <= 0 for n in shape) else Box(lo, shape)

    def counted_from(self, origin: Sequence[int]) -> Box:
        """The same box in indices that count from ``origin``; it may begin before it."""
        return Box(tuple(o - start for o, start in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index of this box in an array whose first element is at ``origin`` (default: zero)."""
        start = origin if origin is not None else (0,) * len(self.offset)
        return tuple(slice(o - s, o - s + n) for o, s, n in zip(self.offset, start, self.shape, strict=True))


def runs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut the elements ``start:stop`` of a row-major order into boxes.

    Yields ``(flat offset of the first element, box)`` in order, at most ``2 * ndim - 1`` of them, each as large as
    possible: what lets any run of a strided tensor be copied by a few rectangular copies instead of one per row.
    ``start`` and ``stop`` lie within the array: ``0 <= start``, ``stop <= prod(shape)``.
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
    """The runs of one row, lifted back into the array."""
    inner = math.prod(shape[1:])
    for flat, box in runs(shape[1:], start, stop):
        yield row * inner + flat, Box((row, *box.offset), (1, *box.shape))
