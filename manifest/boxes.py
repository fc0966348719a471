"""Many boxes as columns: a million of them are numbers, and no Python objects until somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from . import columns as col
from .box import Box
from .errors import FormatError

Array = col.Array

MANY = 1 << 62
"""Where counting of elements ends: nothing that is there has so many."""


class Boxes(Sequence[Box]):
    """A sequence of `Box`, kept as three columns.

    Args:
        ndim: ``(boxes,)``: number of axes of each.
        offset, shape: ``(sum of ndim,)`` of int64: those of all boxes one after another.
    """

    def __init__(self, ndim: Array, offset: Array, shape: Array) -> None:
        self.ndim, self.offset, self.shape = ndim.astype("i8", copy=False), offset, shape

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> Boxes:
        """The columns of these boxes.

        Raises:
            FormatError: a box has not as many offsets as lengths, or numbers beyond 64 bits.
        """
        given = tuple(boxes)
        ndim = np.fromiter((len(b.shape) for b in given), "i8", len(given))
        try:
            offset = np.fromiter((n for b in given for n in b.offset), "<i8")
            shape = np.fromiter((n for b in given for n in b.shape), "<i8")
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
        """All of these, one after another."""
        if not many:
            return cls(np.zeros(0, "i8"), np.zeros(0, "<i8"), np.zeros(0, "<i8"))
        return cls(*(np.concatenate(c) for c in zip(*((b.ndim, b.offset, b.shape) for b in many), strict=True)))

    @classmethod
    def split(cls, ndim: Array, numbers: Array) -> Boxes:
        """From the numbers as a version's bytes have them: each box's offsets, then its lengths."""
        ndim = ndim.astype("i8")
        late = np.arange(len(numbers)) - np.repeat(col.starts_of(np.cumsum(2 * ndim)), 2 * ndim)
        lengths = late >= np.repeat(ndim, 2 * ndim)
        return cls(ndim, numbers[~lengths], numbers[lengths])

    def joined(self) -> Array:
        """The inverse of `split`."""
        both = np.repeat(self.ndim, 2)
        numbers = np.concatenate([self.offset, self.shape])
        starts = np.stack([self.starts, self.starts + len(self.offset)], axis=1).reshape(-1)
        return numbers[col.spread(starts, both)].astype("<i8", copy=False)

    @cached_property
    def starts(self) -> Array:
        """``(boxes,)``: where each one's numbers start."""
        return col.starts_of(np.cumsum(self.ndim))

    @cached_property
    def rows(self) -> tuple[Box, ...]:
        """All of them as objects, which is for few."""
        return tuple(self)

    @cached_property
    def volumes(self) -> Array:
        """``(boxes,)`` of int64: number of elements of each, at most MANY; of boxes without negative lengths."""
        found, solid = np.ones(len(self.ndim), "i8"), self.ndim > 0
        if len(self.shape):
            starts = self.starts[solid]
            found[solid] = np.multiply.reduceat(self.shape, starts)  # exact modulo 2**64
            with np.errstate(over="ignore"):
                about = np.multiply.reduceat(np.maximum(self.shape, 1).astype("f8"), starts)
            if float(about.max()) >= MANY:
                beyond = (about >= MANY) & (np.minimum.reduceat(self.shape, starts) > 0)
                found[np.flatnonzero(solid)[beyond]] = MANY
        return found

    def within(self, wholes: Boxes) -> Array:
        """``(boxes,)`` of bool: whether each lies inside the array that the box of the same number in ``wholes``, which
        starts at zero, is all of."""
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

    def alike(self, others: Boxes) -> Array:
        """``(boxes,)`` of bool: whether each is the same as the one of the same number in ``others``."""
        found: Array = self.ndim == others.ndim
        rows = np.flatnonzero(found)
        one, other = (self, others) if len(rows) == len(found) else (self[rows], others[rows])
        differ = (one.offset != other.offset) | (one.shape != other.shape)
        found[rows[np.repeat(np.arange(len(rows)), one.ndim)[differ]]] = False
        return found

    def mixed(self, with_: Array, seed: Array) -> Array:
        """``(boxes,)`` of uint64: equal for the same box and the same number, and for others by chance alone.

        Args:
            with_: ``(boxes,)``: a number for each.
            seed: two numbers of uint64; whoever does not know them cannot make others equal.
        """
        found = mix(with_.astype("u8"), seed)
        for rows, offset, shape in self.groups():
            mine = found[rows]
            for column in (*offset.T, *shape.T):
                mine = mix(mine ^ column.astype("u8"), seed)
            found[rows] = mine
        return found

    def groups(self) -> Iterator[tuple[Array, Array, Array]]:
        """Boxes of one number of axes together: their numbers, and ``(n, ndim)`` of offsets and of lengths."""
        counts = np.bincount(self.ndim)
        for ndim in np.flatnonzero(counts).tolist():
            if counts[ndim] == len(self):
                yield np.arange(len(self)), self.offset.reshape(len(self), ndim), self.shape.reshape(len(self), ndim)
                return
            rows = np.flatnonzero(self.ndim == ndim)
            at = self.starts[rows][:, None] + np.arange(ndim)
            yield rows, self.offset[at], self.shape[at]

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
        at = col.spread(self.starts[index], ndim)
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


def mix(numbers: Array, seed: Array) -> Array:
    """Numbers of uint64 stirred, each the same way (the function of splitmix64, with a seed of two numbers)."""
    with np.errstate(over="ignore"):
        mixed = (numbers ^ seed[0]) + seed[1]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Array = mixed ^ (mixed >> np.uint64(31))
    return found
