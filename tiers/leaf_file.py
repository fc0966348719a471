"""A leaf file: a file of whole leaves being written from chunks that come nearly in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import Buffer, as_buffer, view
from tierstate.manifest.index import Array

from .arena import Slab
from .base import ObjectWriter, Tier
from .formats import Blueprint
from .packing import BIG


class Piece(NamedTuple):
    """Chunks that follow each other in the file.

    Attributes:
        buffer: where they lie.
        at: ``(n,)``: where each starts there.
        slab: what is leased as long as the buffer is needed; None for memory of its own.
    """

    buffer: Buffer
    at: Array
    slab: Slab | None = None


class LeafFile:
    """One object, appended to in its order; pieces that come too early wait, with a lease, for those before them.

    Args:
        tier, key: where it goes.
        rows: ``(n,)``: the version's row of each of its chunks, in order.
        starts: ``(n,)``: where each starts in its leaf.
        nbytes: ``(n,)``: their lengths.
        leaf: ``(n,)``: which of the file's leaves each belongs to.
        lay_out: gives the layout, when the file is begun.
        again: gives the bytes of a row that will not come, because it passed already; None for one that will come.
    """

    def __init__(
        self,
        tier: Tier,
        key: str,
        rows: Array,
        starts: Array,
        nbytes: Array,
        leaf: Array,
        lay_out: Callable[[], Blueprint],
        again: Callable[[int], Buffer | None] = lambda _row: None,
    ) -> None:
        self._tier, self.key = tier, key
        self.rows, self._starts, self.nbytes, self._leaf = rows, starts, nbytes, leaf
        self._lay_out, self._again = lay_out, again
        self._blueprint: Blueprint | None = None
        self._writer: ObjectWriter | None = None
        self._held: dict[int, Piece] = {}
        self.offset = np.zeros(len(rows), "i8")
        self.next = 0
        self.at = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is written."""
        return self.next == len(self.rows)

    def windows(self, size: int) -> Iterator[Array]:
        """All rows in their order, so many at a time as are not longer together than that, or one."""
        ends, first = np.cumsum(self.nbytes), 0
        while first < len(self.rows):
            before = int(ends[first] - self.nbytes[first])
            stop = max(first + 1, int(np.searchsorted(ends, before + size, "right")))
            yield self.rows[first:stop]
            first = stop

    def take(self, first: int, piece: Piece) -> None:
        """Chunks from the file's ``first`` on: written now, or when those before them are."""
        if first == self.next:
            self._write(piece)
        else:
            if piece.slab is not None:
                piece.slab.lease()
            self._held[first] = piece
        self.advance()

    def advance(self) -> None:
        """Write what can be written by now."""
        while not self.complete:
            held = self._held.pop(self.next, None)
            if held is not None:
                try:
                    self._write(held)
                finally:
                    if held.slab is not None:
                        held.slab.release()
                continue
            memory = self._again(int(self.rows[self.next]))
            if memory is None:
                return
            self._write(Piece(memory, np.zeros(1, "i8")))

    def _write(self, piece: Piece) -> None:
        """Append chunks: long runs from where they lie, short ones gathered."""
        self._begin()
        part, memory = slice(self.next, self.next + len(piece.at)), view(piece.buffer)
        short: list[memoryview] = []
        for offset, start, end in _runs(self.offset[part], self.nbytes[part], piece.at):
            gap = offset - self.at - sum(map(len, short))
            if end - start < BIG:
                short += [memoryview(bytes(gap)), memory[start:end]]
                continue
            self._gather([*short, memoryview(bytes(gap))])
            short = []
            self._append(piece.buffer[start:end], piece.slab)
        self._gather(short)
        self.next += len(piece.at)

    def _begin(self) -> None:
        if self._writer is None:
            self._blueprint = self._lay_out()
            self.offset = np.array(self._blueprint.offsets, "i8")[self._leaf] + self._starts
            self._writer = self._tier.writer(self.key, self._blueprint.size)
            self._append(as_buffer(self._blueprint.head))

    def _gather(self, pieces: Sequence[memoryview]) -> None:
        if gathered := bytearray().join(pieces):
            self._append(as_buffer(gathered))

    def _append(self, buffer: Buffer, slab: Slab | None = None) -> None:
        assert self._writer is not None
        self.at += buffer.numel()
        if slab is None:
            self._writer.append(buffer)
        else:
            slab.lease()
            self._writer.append(buffer, slab.release)

    def close(self, digests: Array) -> int:
        """Make the file visible and durable; its length.

        Args:
            digests: ``(n, 2)``: of its chunks.
        """
        if not self.complete:
            raise RuntimeError(f"{self.key}: chunk {self.next} of {len(self.rows)} did not come")
        self._begin()
        assert self._blueprint is not None
        assert self._writer is not None
        size, table = self._blueprint.size, self._blueprint.digests
        if table >= 0:
            self._gather([memoryview(bytes(table - self.at)), memoryview(digests.astype("<u8").tobytes())])
        self._gather([memoryview(bytes(size - self.at))])
        # Forget the writer only once it closed: after an error, abort() must still reach it.
        self._writer.close()
        self._writer = None
        return size

    def let_go(self) -> None:
        """Give up what waits for its turn."""
        held, self._held = self._held, {}
        for piece in held.values():
            if piece.slab is not None:
                piece.slab.release()

    def abort(self) -> None:
        """Leave nothing. Its close may have taken effect although the answer was lost."""
        self.let_go()
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
            self._tier.delete(self.key)
            self.at = 0


def _runs(offset: Array, nbytes: Array, at: Array) -> Iterator[tuple[int, int, int]]:
    """Chunks that lie together in memory and in the file: offset in the file, start and end in memory."""
    apart = (at[1:] != at[:-1] + nbytes[:-1]) | (offset[1:] != offset[:-1] + nbytes[:-1])
    firsts = np.flatnonzero(np.append(True, apart))
    lasts = np.append(firsts[1:], len(at)) - 1
    columns = offset[firsts], at[firsts], at[lasts] + nbytes[lasts]
    return zip(*(column.tolist() for column in columns), strict=True)
