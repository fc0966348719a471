"""Bounced reads: through memory of their own, a few pieces at a time, so that what comes late goes nowhere else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer, empty_buffer

from .base import Range
from .calls import Call
from .landing import copy
from .pages import PAGE, map_pages
from .watch import Watch

PIECE = 16 << 20
"""Bytes that are read at once."""

AHEAD = 2
"""Pieces of one read under way at once: while one is copied, the next one is read."""

SPARE = 4
"""Pieces whose memory is kept when nobody reads: the first touch of memory may cost more than reading into it."""

PAGED = 1 << 20
"""Bytes of a piece from which on it has pages of its own, by which direct I/O can be used."""


class _Piece(NamedTuple):
    """A part of a read under way: where it belongs, where it is read to, and the memory of that."""

    call: Call[None]
    wanted: Sequence[Range]
    mine: Sequence[Range]
    memory: Buffer


class Bounce:
    """Reads that may be given up.

    Args:
        watch: what gives them up.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._memory = watch, _Memory()

    def read(self, what: str, read: Callable[[Sequence[Range]], None], ranges: Sequence[Range]) -> None:
        """Fill every range by way of memory of its own.

        Args:
            what: what it is, for messages.
            read: reads some ranges.

        Raises:
            Hung: it was given up, or not begun.
        """
        under_way: deque[_Piece] = deque()
        try:
            for wanted in pieces(ranges):
                if len(under_way) == AHEAD:
                    self._land(under_way.popleft())
                under_way.append(self._begin(what, read, wanted))
            while under_way:
                self._land(under_way.popleft())
        except BaseException:
            for _ in under_way:
                self._memory.lose()
            raise

    def _begin(self, what: str, read: Callable[[Sequence[Range]], None], wanted: Sequence[Range]) -> _Piece:
        starts, nbytes = [], 0
        for _, out in wanted:
            starts.append(nbytes)
            nbytes += _paged(out.numel())
        memory = self._memory.take(nbytes)
        try:
            mine = [Range(r.offset, memory[at : at + r.out.numel()]) for r, at in zip(wanted, starts, strict=True)]
            return _Piece(self._watch.begin(what, partial(read, mine)), wanted, mine, memory)
        except BaseException:
            self._memory.lose()
            raise

    def _land(self, piece: _Piece) -> None:
        try:
            piece.call.result()
        except BaseException:
            # It may be in use still: it goes when the call that holds it has come back.
            self._memory.lose()
            raise
        for (_, out), (_, found) in zip(piece.wanted, piece.mine, strict=True):
            if out.numel():
                copy(out.data_ptr(), found.data_ptr(), out.numel())
        self._memory.give_back(piece.memory)


def pieces(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Ranges in groups of `PIECE` bytes at most, long ones cut; one empty group if there are none."""
    group: list[Range] = []
    room = PIECE
    for offset, out in ranges:
        at = 0
        while True:
            if not room:
                yield group
                group, room = [], PIECE
            part = out[at : at + room]
            group.append(Range(offset + at, part))
            at, room = at + part.numel(), max(0, room - _paged(part.numel()))
            if at >= out.numel():
                break
    yield group


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class _Memory:
    """Memory of pieces: all of it is kept while any read is under way, a little of it for the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._taken = 0

    def take(self, nbytes: int) -> Buffer:
        """Memory of at least so many bytes, `PIECE` at most, to be given back or said to be lost."""
        with self._lock:
            self._taken += 1
            if nbytes >= PAGED and self._free:
                return self._free.pop()
        return map_pages(PIECE) if nbytes >= PAGED else empty_buffer(nbytes)

    def give_back(self, memory: Buffer) -> None:
        """Nobody uses it any more."""
        if memory.numel() == PIECE:
            with self._lock:
                self._free.append(memory)
        self.lose()

    def lose(self) -> None:
        """It is not given back: somebody may use it still."""
        with self._lock:
            self._taken -= 1
            if not self._taken:
                del self._free[SPARE:]
