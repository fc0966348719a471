"""Corners: boxes in columns, many of as many axes, compared and cut all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .box import Box
from .columns import Array


class Corners(NamedTuple):
    """The corners of boxes: ``(boxes, axes)`` of int64 each; the high one lies behind the last element."""

    low: Array
    high: Array

    @classmethod
    def of(cls, boxes: Sequence[Box], ndim: int) -> Corners:
        """Boxes of so many axes."""
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(boxes)), "i8", 2 * ndim * len(boxes))
        both = flat.reshape(len(boxes), 2, ndim)
        return cls(both[:, 0], both[:, 0] + both[:, 1])

    @property
    def shape(self) -> Array:
        """``(boxes, axes)``: elements along each axis."""
        return self.high - self.low

    @property
    def steps(self) -> Array:
        """``(boxes, axes)``: elements from one index to the next of each axis, in row-major order."""
        steps = np.ones_like(self.low)
        steps[:, :-1] = np.cumprod(self.shape[:, :0:-1], axis=1)[:, ::-1]
        return steps

    @property
    def solid(self) -> Array:
        """``(boxes,)`` of bool: which have elements; those without may have a shape that is none."""
        rising: Array = np.all(self.low < self.high, axis=1)
        return rising

    def pick(self, index: Array) -> Corners:
        """Some of the boxes."""
        return Corners(self.low[index], self.high[index])

    def common(self, other: Corners) -> Corners:
        """What each box has in common with its counterpart: not `solid` where that is nothing."""
        return Corners(np.maximum(self.low, other.low), np.minimum(self.high, other.high))

    def counted_from(self, origin: Corners) -> Corners:
        """The same boxes in indices that count from the first element of their counterparts."""
        return Corners(self.low - origin.low, self.high - origin.low)

    def equal(self, other: Corners) -> Array:
        """``(boxes,)`` of bool: which are the same as their counterparts."""
        alike: Array = np.all((self.low == other.low) & (self.high == other.high), axis=1)
        return alike

    def ends(self, outer: Corners) -> tuple[Array, Array]:
        """Row-major numbers, in the boxes around them, of the first element of each, and behind the last one."""
        inner, steps = self.counted_from(outer), outer.steps
        return (inner.low * steps).sum(axis=1), ((inner.high - 1) * steps).sum(axis=1) + 1
