"""Which boxes of a global tensor one rank of a device mesh holds, and where they are in its local tensor.

Pure arithmetic of even, uneven and strided splits (``torch.chunk``, ``_StridedShard``) for DTensors of FSDP2, tensor
parallelism and combinations of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from tierstate.manifest.boxes import Box, Shape

IndexRun = tuple[int, int]
"""Consecutive indices of one dimension: the first index, and the number of them."""


class Cut(NamedTuple):
    """How one dimension of a mesh cuts one dimension of a tensor.

    Attributes:
        dim: the tensor's dimension.
        ways: number of parts.
        turn: index of the part that this rank holds.
        split: number of blocks into which the dimension is cut first; each block is then cut into ``ways`` parts
            (torch's ``_StridedShard``).
    """

    dim: int
    ways: int
    turn: int
    split: int = 1


class LocalBox(NamedTuple):
    """A box of the global tensor, and the index of its first element in the local one."""

    box: Box
    at: Shape


class LocalBoxes(NamedTuple):
    """The boxes of a global tensor that a local tensor consists of.

    Attributes:
        shape: the global shape.
        pieces: the boxes; empty if this rank holds nothing.
    """

    shape: Shape
    pieces: tuple[LocalBox, ...]

    @classmethod
    def of_box(cls, shape: Shape, box: Box) -> LocalBoxes:
        """For a local tensor that is one box."""
        return cls(shape, (LocalBox(box, (0,) * len(shape)),))


@lru_cache(maxsize=4096)
def local_boxes(shape: Shape, cuts: tuple[Cut, ...]) -> LocalBoxes:
    """The boxes that remain after these cuts, each applied to the result of the one before.

    A cut works like ``torch.chunk``: all parts have the length of the first, the last ones may be shorter or empty.
    """
    if 0 in shape:
        return LocalBoxes.of_box(shape, Box.whole(shape))
    held: list[list[IndexRun]] = [[(0, n)] for n in shape]
    for cut in cuts:
        held[cut.dim] = _apply(held[cut.dim], cut)
    pieces = []
    for runs in product(*map(_placed, held)):
        box = Box(tuple(first for first, _, _ in runs), tuple(n for _, n, _ in runs))
        pieces.append(LocalBox(box, tuple(at for _, _, at in runs)))
    return LocalBoxes(shape, tuple(pieces))


@lru_cache(maxsize=4096)
def local_shape(shape: Shape, cuts: tuple[Cut, ...]) -> Shape:
    """The shape of the local tensor after these cuts."""
    sizes: list[list[IndexRun]] = [[(0, n)] for n in shape]
    for cut in cuts:
        sizes[cut.dim] = _apply(sizes[cut.dim], cut)
    return tuple(sum(n for _, n in runs) for runs in sizes)


def strided_last(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """The cuts with strided ones moved to the end, as plain cuts of what the other cuts leave.

    FSDP2 on top of tensor parallelism cuts in this way. For even splits the result is the same. For uneven splits
    torch's placements, read from left to right, do not describe the local tensors that FSDP2 really makes.
    """
    strided = [cut._replace(split=1) for cut in reversed(cuts) if cut.split > 1]
    return (*(cut for cut in cuts if cut.split == 1), *strided)


def _apply(runs: list[IndexRun], cut: Cut) -> list[IndexRun]:
    left: list[IndexRun] = []
    for start, stop in (_chunk(_length(runs), cut.split, i) for i in range(cut.split)):
        first, last = _chunk(stop - start, cut.ways, cut.turn)
        left += _taken(runs, start + first, start + last)
    return _joined(left)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = -(-length // count)
    return min(size * index, length), min(size * (index + 1), length)


def _length(runs: list[IndexRun]) -> int:
    return sum(n for _, n in runs)


def _taken(runs: list[IndexRun], start: int, stop: int) -> list[IndexRun]:
    """The indices at the positions ``start:stop`` of the concatenated runs, as runs."""
    found, at = [], 0
    for first, n in runs:
        lo, hi = max(start - at, 0), min(stop - at, n)
        if lo < hi:
            found.append((first + lo, hi - lo))
        at += n
    return found


def _joined(runs: list[IndexRun]) -> list[IndexRun]:
    found: list[IndexRun] = []
    for first, n in runs:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + n)
        else:
            found.append((first, n))
    return found


def _placed(runs: list[IndexRun]) -> list[tuple[int, int, int]]:
    """Each run with its position in the local tensor."""
    found, at = [], 0
    for first, n in runs:
        found.append((first, n, at))
        at += n
    return found
