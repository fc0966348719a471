"""Recutting: a chunk of a stored shard as runs and boxes of the places that want its elements."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tierstate.manifest.box import Box, runs
from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.columns import Array
from tierstate.manifest.meeting import Meetings, Want
from tierstate.manifest.version import Version


class Piece(NamedTuple):
    """Bytes of a chunk, and where they belong.

    Attributes:
        want: number of the wanted box.
        data: the bytes.
        start: the first of them in the wanted box, in row-major order; -1 where they are no run there.
        at, part: where they are none: the box whose elements they are, and which of it are wanted.
    """

    want: int
    data: Buffer
    start: int
    at: Box = Box((), ())
    part: Box = Box((), ())


class Recut:
    """Cuts the chunks of a version into what is wanted of them.

    Args:
        wants: the wanted boxes.
        met: what they have in common with the version's shards.
    """

    def __init__(self, version: Version, wants: list[Want], met: Meetings) -> None:
        self._version, self._wants, self._met = version, wants, met
        row, pair = met.row, met.pair
        start, nbytes = version.chunk_start[row], version.chunk_nbytes[row]
        source, target = met.source[pair], met.target[pair]
        first, last = np.maximum(start, source), np.minimum(start + nbytes, source + met.nbytes[pair])
        self._first, self._last, self._start = first - start, last - start, target + first - source
        self._torn = _Torn()

    def lone(self) -> tuple[Array, Array, Array]:
        """Chunks that only one wanted box wants and that are one run of its bytes, the box, and where in it they go."""
        met = self._met
        other = met.row[1:] == met.row[:-1]
        alone = ~(np.append(other, False) | np.insert(other, 0, False))
        whole = (self._last - self._first) == self._version.chunk_nbytes[met.row]
        here = np.flatnonzero(alone & whole & met.straight[met.pair])
        return met.row[here], met.want[met.pair[here]], self._start[here]

    def pieces(self, row: int, raw: Buffer) -> Iterator[Piece]:
        """What is wanted of a chunk's verified bytes. Elements that two chunks share come with the later one."""
        met = self._met
        begin, end = np.searchsorted(met.row, [row, row + 1]).tolist()
        for k in range(begin, end):
            pair = int(met.pair[k])
            if met.straight[pair]:
                data = raw[int(self._first[k]) : int(self._last[k])]
                yield Piece(int(met.want[pair]), data, int(self._start[k]))
            else:
                yield from self._boxes(pair, int(self._version.chunk_start[row]), raw)

    def _boxes(self, pair: int, start: int, raw: Buffer) -> Iterator[Piece]:
        """The wanted boxes among a chunk's elements, for a pair whose common elements are no run."""
        want = int(self._met.want[pair])
        stored, wanted = self._version.boxes[int(self._met.shard[pair])], self._wants[want]
        size, stop = self._version.leaves[wanted.leaf].spec.itemsize, start + raw.numel()
        for at, box, part in _parts(stored, wanted.box, -(-start // size), stop // size):
            skip = at * size - start
            yield Piece(want, raw[skip : skip + box.volume * size], -1, box, part)
        # Elements of most types divide every chunk's length, and are not torn.
        for element in {at // size for at in (start, stop) if at % size}:
            for at, box, part in _parts(stored, wanted.box, element, element + 1):
                begin, end = max(at * size, start), min((at + 1) * size, stop)
                data = self._torn.join((pair, at), size, begin - at * size, raw[begin - start : end - start])
                if data is not None:
                    yield Piece(want, data, -1, box, part)


def _parts(stored: Box, wanted: Box, first: int, stop: int) -> Iterator[tuple[int, Box, Box]]:
    """The boxes, in global indices, that elements ``first:stop`` of a shard are, with the number of the first element
    of each and what is wanted of it; not those of which nothing is.
    """
    for at, box in runs(stored.shape, first, stop):
        here = Box(tuple(a + b for a, b in zip(box.offset, stored.offset, strict=True)), box.shape)
        part = here.intersect(wanted)
        if part is not None:
            yield at, here, part


class _Torn:
    """Elements that lie in more than one chunk, while parts of them have not come yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], tuple[Buffer, int]] = {}

    def join(self, key: tuple[int, int], size: int, at: int, data: Buffer) -> Buffer | None:
        """Add bytes of an element; it is given once all have come."""
        with self._lock:
            memory, have = self._parts[key] if key in self._parts else (empty_buffer(size), 0)
            memory[at : at + data.numel()].copy_(data)
            have += data.numel()
            self._parts[key] = memory, have
            if have < size:
                return None
            del self._parts[key]
            return memory
