"""Placings: which boxes of a global tensor one rank of a mesh holds, and where they lie in its local tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from tierstate.manifest.box import Box, Shape

Run = tuple[int, int]
"""Some indices of one dimension that follow one another: the first, and how many."""


class Cut(NamedTuple):
    """What one dimension of a mesh does to one dimension of a tensor.

    Attributes:
        dim: the tensor's dimension.
        ways: into how many it is cut.
        turn: which of these is held.
        split: into how many it is cut first, each of which is then cut into ``ways`` (torch's ``_StridedShard``).
    """

    dim: int
    ways: int
    turn: int
    split: int = 1


class Piece(NamedTuple):
    """A box of the global tensor, and the index of its first element in the local one."""

    box: Box
    at: Shape


class Frame(NamedTuple):
    """What a local tensor is of a global one.

    Attributes:
        shape: the global shape.
        pieces: the boxes that the local tensor is made of; none where it holds nothing.
    """

    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def of_box(cls, shape: Shape, box: Box) -> Frame:
        """Of a local tensor that is one box."""
        return cls(shape, (Piece(box, (0,) * len(shape)),))


@lru_cache(maxsize=4096)
def frame(shape: Shape, cuts: tuple[Cut, ...]) -> Frame:
    """What is held after these cuts, one after the other, each of what the one before has left.

    A cut is torch's ``chunk``: all parts of the length of the first, the last ones shorter or empty.
    """
    if 0 in shape:
        return Frame.of_box(shape, Box.whole(shape))
    held: list[list[Run]] = [[(0, n)] for n in shape]
    for cut in cuts:
        held[cut.dim] = _apply(held[cut.dim], cut)
    pieces = []
    for runs in product(*map(_placed, held)):
        box = Box(tuple(first for first, _, _ in runs), tuple(n for _, n, _ in runs))
        pieces.append(Piece(box, tuple(at for _, _, at in runs)))
    return Frame(shape, tuple(pieces))


@lru_cache(maxsize=4096)
def local_shape(shape: Shape, cuts: tuple[Cut, ...]) -> Shape:
    """The shape of what is held after these cuts."""
    sizes: list[list[Run]] = [[(0, n)] for n in shape]
    for cut in cuts:
        sizes[cut.dim] = _apply(sizes[cut.dim], cut)
    return tuple(sum(n for _, n in runs) for runs in sizes)


def from_the_right(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """The cuts as they are made where strided ones come last, of what the others have left.

    So FSDP2 makes them on top of tensor parallelism. Where all is even it is the same; where it is not, torch's
    placements, read from left to right, say something else than what lies there.
    """
    strided = [cut._replace(split=1) for cut in reversed(cuts) if cut.split > 1]
    return (*(cut for cut in cuts if cut.split == 1), *strided)


def _apply(runs: list[Run], cut: Cut) -> list[Run]:
    left: list[Run] = []
    for start, stop in (_chunk(_length(runs), cut.split, i) for i in range(cut.split)):
        first, last = _chunk(stop - start, cut.ways, cut.turn)
        left += _taken(runs, start + first, start + last)
    return _joined(left)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = -(-length // count)
    return min(size * index, length), min(size * (index + 1), length)


def _length(runs: list[Run]) -> int:
    return sum(n for _, n in runs)


def _taken(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Those of the runs' indices that have these positions."""
    found, at = [], 0
    for first, n in runs:
        lo, hi = max(start - at, 0), min(stop - at, n)
        if lo < hi:
            found.append((first + lo, hi - lo))
        at += n
    return found


def _joined(runs: list[Run]) -> list[Run]:
    found: list[Run] = []
    for first, n in runs:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + n)
        else:
            found.append((first, n))
    return found


def _placed(runs: list[Run]) -> list[tuple[int, int, int]]:
    """Each run with its position in the local tensor."""
    found, at = [], 0
    for first, n in runs:
        found.append((first, n, at))
        at += n
    return found
