"""The landing: where restored chunks go, straight into host memory wherever it can be."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer, Event
from tierstate.manifest.meeting import Want, meet
from tierstate.manifest.version import Version

from .pages import PAGE, populate
from .recut import Piece, Recut

SHORT = 64 << 10
"""Bytes that are copied in less time than another thread takes to get the interpreter's lock and give it back."""


class Taker(Protocol):
    """What takes verified bytes of a box, as a provider does; an event where they are needed until it has come."""

    def load(self, start: int, data: Buffer) -> Event | None: ...

    def scatter(self, at: Box, data: Buffer, part: Box) -> Event | None: ...


class Destination(NamedTuple):
    """A box of a leaf, and who takes its bytes.

    Attributes:
        leaf: index of the leaf.
        box: in the leaf's global index space.
        taker: takes them by `load` where they are a run of the box's bytes, and by `scatter` where they are not.
        memory: the box's bytes in host memory, and no fewer, since nobody checks again; None where they are to be
            given to the taker.
    """

    leaf: int
    box: Box
    taker: Taker
    memory: Buffer | None = None


class Landing:
    """The destinations of a version's chunks, however the version and they are cut into boxes.

    Args:
        version: whose chunks.
        destinations: boxes inside their leaves' shapes. They may overlap: each gets all that is its own.
        untouched: the memory is fresh, and its pages are better faulted in before they are read into.

    Attributes:
        destinations: as given.
        meetings: which chunks go to which of them.
        rows: the chunks that are wanted, rising.
        only: ``(chunks,)``: the one destination of a chunk all of whose bytes are one run there; -1 for all others.
        start: ``(chunks,)`` of int64: the first of these bytes in the destination.
        address: ``(chunks,)`` of int64: their address, where that is memory; 0 for all others.
    """

    def __init__(self, version: Version, destinations: Sequence[Destination], *, untouched: bool = False) -> None:
        self._nbytes, self._untouched = version.chunk_nbytes, untouched
        self.destinations = destinations
        self._memories = [to.memory for to in destinations]
        wants = [Want(at.leaf, at.box) for at in destinations]
        self.meetings = meet(version, wants)
        self.rows = self.meetings.rows
        self._recut = Recut(version, wants, self.meetings)
        row, want, start = self._recut.lone()
        self.only, self.start, self.address = (np.full(len(version.digests), n, "i8") for n in (-1, 0, 0))
        self.only[row], self.start[row] = want, start
        base = np.fromiter((0 if m is None else m.data_ptr() for m in self._memories), "i8", len(destinations))[want]
        self.address[row] = np.where(base > 0, base + start, 0)

    def memory(self, row: int) -> Buffer:
        """The destination of a chunk that has an address, to be read into."""
        start, memory = int(self.start[row]), self._memories[int(self.only[row])]
        assert memory is not None
        return memory[start : start + int(self._nbytes[row])]

    def touch(self, row: int) -> None:
        """Have the memory of a chunk's destination faulted in, where it is fresh."""
        if self._untouched:
            address, nbytes = int(self.address[row]), int(self._nbytes[row])
            start = address // PAGE * PAGE
            # Where that cannot be done, reading into the pages does it, one by one.
            populate(start, address + nbytes - start)

    def give(self, row: int, raw: Buffer) -> Event | None:
        """Bring a chunk's verified bytes to every place that wants some of them.

        Returns:
            What to wait for before ``raw`` may be used otherwise.
        """
        nbytes, only = int(self._nbytes[row]), int(self.only[row])
        if raw.numel() != nbytes:
            raise RuntimeError(f"chunk {row} has {nbytes} bytes, and {raw.numel()} were verified")
        if address := int(self.address[row]):
            copy(address, raw.data_ptr(), nbytes)
            return None
        if only >= 0:
            return self._load(only, int(self.start[row]), raw)
        pending = []
        for piece in self._recut.pieces(row, raw):
            event = self._bring(piece)
            if event is not None:
                pending.append((event, piece.data))
        return _All(pending) if pending else None

    def _load(self, index: int, start: int, data: Buffer) -> Event | None:
        memory = self._memories[index]
        if memory is None:
            return self.destinations[index].taker.load(start, data)
        copy(memory.data_ptr() + start, data.data_ptr(), data.numel())
        return None

    def _bring(self, piece: Piece) -> Event | None:
        if piece.start >= 0:
            return self._load(piece.want, piece.start, piece.data)
        return self.destinations[piece.want].taker.scatter(piece.at, piece.data, piece.part)


class _All:
    """Several copies under way as one event; it holds what they copy."""

    def __init__(self, pending: Sequence[tuple[Event, Buffer]]) -> None:
        self._pending = pending

    def synchronize(self) -> None:
        for event, _ in self._pending:
            event.synchronize()


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses, at a tenth of what slicing and copying tensors costs."""
    # Other threads run meanwhile, unless it is over sooner than they would have begun.
    call = _move_shortly() if nbytes < SHORT else ctypes.memmove
    call(target, source, nbytes)


@lru_cache(maxsize=1)
def _move_shortly() -> Any:
    call = ctypes.PyDLL(None).memmove
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    return call
