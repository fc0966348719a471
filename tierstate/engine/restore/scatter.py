"""Scatter restored chunks to their destinations: directly into host memory where possible, resharded where needed.

`Scatter` cuts a chunk of a stored shard into the byte runs and boxes that overlap with the wanted boxes;
`ScatterTargets` copies them into memory or passes them to a provider.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box, row_major_runs
from tierstate.manifest.chunk import Buffer, Event, empty_buffer
from tierstate.manifest.errors import untrusted
from tierstate.manifest.format.version import Version
from tierstate.manifest.reshard.overlap import Overlaps, WantedBox, find_overlaps
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.memory.memcpy import memcpy
from tierstate.tiers.memory.pages import PAGE, populate


class ScatterPiece(NamedTuple):
    """Bytes of a chunk, and their destination.

    Attributes:
        want: index of the wanted box.
        data: the bytes.
        start: byte offset in the wanted box, in row-major order; -1 if the bytes are not contiguous there.
        at, part: only if ``start`` is -1: the box of the elements in ``data``, and the wanted part of it.
    """

    want: int
    data: Buffer
    start: int
    at: Box = Box((), ())
    part: Box = Box((), ())


class Scatter:
    """Cuts the chunks of a version into the pieces that are wanted.

    Args:
        version: the version.
        wants: the wanted boxes.
        met: their overlaps with the version's shards.
    """

    def __init__(self, version: Version, wants: list[WantedBox], met: Overlaps) -> None:
        self._version, self._wants, self._met = version, wants, met
        row, pair = met.row, met.pair
        start, nbytes = version.chunk_start[row], version.chunk_nbytes[row]
        source, target = met.source[pair], met.target[pair]
        first, last = np.maximum(start, source), np.minimum(start + nbytes, source + met.nbytes[pair])
        self._first, self._last, self._start = first - start, last - start, target + first - source
        self._torn = _Torn()

    def lone(self) -> tuple[Array, Array, Array]:
        """Chunks that lie whole and contiguous in one wanted box and in no other: rows, boxes, byte offsets there."""
        met = self._met
        other = met.row[1:] == met.row[:-1]
        alone = ~(np.append(other, False) | np.insert(other, 0, False))
        whole = (self._last - self._first) == self._version.chunk_nbytes[met.row]
        here = np.flatnonzero(alone & whole & met.straight[met.pair])
        return met.row[here], met.want[met.pair[here]], self._start[here]

    def pieces(self, row: int, raw: Buffer) -> Iterator[ScatterPiece]:
        """The wanted pieces of a chunk's verified bytes. An element split over two chunks comes with the later one."""
        met = self._met
        begin, end = np.searchsorted(met.row, [row, row + 1]).tolist()
        for k in range(begin, end):
            pair = int(met.pair[k])
            if met.straight[pair]:
                data = raw[int(self._first[k]) : int(self._last[k])]
                yield ScatterPiece(int(met.want[pair]), data, int(self._start[k]))
            else:
                yield from self._boxes(pair, int(self._version.chunk_start[row]), raw)

    def _boxes(self, pair: int, start: int, raw: Buffer) -> Iterator[ScatterPiece]:
        """The pieces of a chunk for one overlap that is not contiguous in both boxes."""
        want = int(self._met.want[pair])
        stored, wanted = self._version.boxes[int(self._met.shard[pair])], self._wants[want]
        size, stop = self._version.leaves[wanted.leaf].spec.itemsize, start + raw.numel()
        for at, box, part in _parts(stored, wanted.box, -(-start // size), stop // size):
            skip = at * size - start
            yield ScatterPiece(want, raw[skip : skip + box.volume * size], -1, box, part)
        # Elements split over two chunks. Most element sizes divide every chunk length, so these are rare.
        for element in {at // size for at in (start, stop) if at % size}:
            for at, box, part in _parts(stored, wanted.box, element, element + 1):
                begin, end = max(at * size, start), min((at + 1) * size, stop)
                data = self._torn.join((pair, at), size, begin - at * size, raw[begin - start : end - start])
                if data is not None:
                    yield ScatterPiece(want, data, -1, box, part)


def _parts(stored: Box, wanted: Box, first: int, stop: int) -> Iterator[tuple[int, Box, Box]]:
    """Divide elements ``first:stop`` of a shard into boxes. Yields, for each box that overlaps with the wanted one, the
    index of its first element, the box in global indices, and the overlap.
    """
    for at, box in row_major_runs(stored.shape, first, stop):
        here = Box(tuple(a + b for a, b in zip(box.offset, stored.offset, strict=True)), box.shape)
        part = here.intersect(wanted)
        if part is not None:
            yield at, here, part


class _Torn:
    """Collects the parts of elements that are split over several chunks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], tuple[Buffer, int]] = {}

    def join(self, key: tuple[int, int], size: int, at: int, data: Buffer) -> Buffer | None:
        """Add bytes of an element. Returns the element once all ``size`` bytes have come, else None."""
        with self._lock:
            memory, have = self._parts[key] if key in self._parts else (empty_buffer(size), 0)
            memory[at : at + data.numel()].copy_(data)
            have += data.numel()
            self._parts[key] = memory, have
            if have < size:
                return None
            del self._parts[key]
            return memory


class Receiver(Protocol):
    """Receives verified bytes of a box, as a provider does. Returns an event while it still reads them."""

    def load(self, start: int, data: Buffer) -> Event | None: ...

    def scatter(self, at: Box, data: Buffer, part: Box) -> Event | None: ...


class Destination(NamedTuple):
    """A box of a leaf, and what receives its bytes.

    Attributes:
        leaf: index of the leaf.
        box: in the leaf's global index space.
        taker: gets contiguous bytes of the box by `load`, and other pieces by `scatter`.
        memory: the host memory of the whole box, whose size is not checked again; None to pass the bytes to the taker.
    """

    leaf: int
    box: Box
    taker: Receiver
    memory: Buffer | None = None


class ScatterTargets:
    """The destinations of a version's chunks. The boxes of version and destinations may differ (reshard).

    Args:
        version: the version.
        destinations: boxes within the shapes of their leaves. They may overlap; each gets all its bytes.
        untouched: the memory is new, so its pages should be faulted in before reading into them.
        what: the version for messages, where an error of a receiver counts as one of what was saved, which may be
            forged; empty to raise it as it is.

    Attributes:
        destinations: as given.
        overlaps: of chunks and destinations.
        rows: the wanted chunks, rising.
        only: ``(chunks,)``: the only destination of a chunk that is whole and contiguous there; else -1.
        start: ``(chunks,)`` of int64: for those chunks the byte offset in the destination.
        address: ``(chunks,)`` of int64: for those chunks the address, if the destination is host memory; else 0.
        there: ``(chunks,)`` of bool: those of them that can be copied to memory of a CUDA device.
    """

    def __init__(
        self, version: Version, destinations: Sequence[Destination], *, untouched: bool = False, what: str = ""
    ) -> None:
        self._nbytes, self._untouched, self._what = version.chunk_nbytes, untouched, what
        self.destinations = destinations
        self._memories = [to.memory for to in destinations]
        self._on_device = [_device_memory(version, to) for to in destinations]
        wants = [WantedBox(at.leaf, at.box) for at in destinations]
        self.overlaps = find_overlaps(version, wants)
        self.rows = self.overlaps.rows
        self._scatter = Scatter(version, wants, self.overlaps)
        row, want, start = self._scatter.lone()
        self.only, self.start, self.address = (np.full(len(version.digests), n, "i8") for n in (-1, 0, 0))
        self.only[row], self.start[row] = want, start
        base = np.fromiter((0 if m is None else m.data_ptr() for m in self._memories), "i8", len(destinations))[want]
        self.address[row] = np.where(base > 0, base + start, 0)
        self.there = np.zeros(len(version.digests), bool)
        self.there[row] = np.fromiter((m is not None for m in self._on_device), bool, len(destinations))[want]

    def memory(self, row: int) -> Buffer:
        """The memory to read a chunk into; only for chunks that have an address."""
        start, memory = int(self.start[row]), self._memories[int(self.only[row])]
        assert memory is not None
        return memory[start : start + int(self._nbytes[row])]

    def touch(self, row: int) -> None:
        """Fault in the pages of a chunk's destination, if they are new."""
        if self._untouched:
            address, nbytes = int(self.address[row]), int(self._nbytes[row])
            start = address // PAGE * PAGE
            # If that fails, nothing is lost: reading into the pages faults them in one by one.
            populate(start, address + nbytes - start)

    def in_memory(self, rows: Sequence[int]) -> bool:
        """Whether each of these chunks has an address."""
        return all(map(self.address.__getitem__, rows))

    def on_devices(self, rows: Sequence[int]) -> list[Buffer] | None:
        """Memory of CUDA devices to which these chunks, which are equal, can be copied; None if one goes elsewhere."""
        return [self.on_device(row) for row in rows] if all(map(self.there.__getitem__, rows)) else None

    def on_device(self, row: int) -> Buffer:
        """Memory of a CUDA device to which a chunk can be copied; only for chunks that are `there`."""
        memory, start, nbytes = self._on_device[self.only[row]], int(self.start[row]), int(self._nbytes[row])
        assert memory is not None
        part: Buffer = memory if memory.numel() == nbytes else memory[start : start + nbytes]
        return part

    def said(self) -> untrusted | nullcontext[None]:
        """A block in which errors of receivers become errors of what was saved, if they are to."""
        return untrusted(self._what, named=False) if self._what else nullcontext()

    def copy(self, rows: Sequence[int], source: int) -> None:
        """Copy verified bytes from an address to that of each of these chunks, which are equal."""
        for row in rows:
            memcpy(int(self.address[row]), source, int(self._nbytes[row]))

    def give(self, row: int, raw: Buffer) -> Event | None:
        """Copy a chunk's verified bytes to every destination that wants some of them.

        Returns:
            the event to wait for before ``raw`` may be reused; None if there is nothing to wait for.
        """
        nbytes = int(self._nbytes[row])
        if raw.numel() != nbytes:
            raise RuntimeError(f"chunk {row} has {nbytes} bytes, and {raw.numel()} were verified")
        if address := int(self.address[row]):
            memcpy(address, raw.data_ptr(), nbytes)
            return None
        with self.said():
            return self._receive(row, raw)

    def _receive(self, row: int, raw: Buffer) -> Event | None:
        if (only := int(self.only[row])) >= 0:
            return self._load(only, int(self.start[row]), raw)
        pending = []
        for piece in self._scatter.pieces(row, raw):
            event = self._bring(piece)
            if event is not None:
                pending.append((event, piece.data))
        return _All(pending) if pending else None

    def _load(self, index: int, start: int, data: Buffer) -> Event | None:
        memory = self._memories[index]
        if memory is None:
            return self.destinations[index].taker.load(start, data)
        memcpy(memory.data_ptr() + start, data.data_ptr(), data.numel())
        return None

    def _bring(self, piece: ScatterPiece) -> Event | None:
        if piece.start >= 0:
            return self._load(piece.want, piece.start, piece.data)
        return self.destinations[piece.want].taker.scatter(piece.at, piece.data, piece.part)


def _device_memory(version: Version, to: Destination) -> Buffer | None:
    """The memory of a CUDA device that has all bytes of a destination in their order, if there is such memory."""
    # A provider with its own `load` may do more than to copy.
    if to.memory is not None or not isinstance(to.taker, TensorProvider) or type(to.taker).load != TensorProvider.load:
        return None
    memory, nbytes = to.taker.on_device(), to.box.volume * version.leaves[to.leaf].spec.itemsize
    return memory if memory is not None and memory.numel() == nbytes else None


class _All:
    """Several asynchronous copies as one event; keeps the bytes that they read alive."""

    def __init__(self, pending: Sequence[tuple[Event, Buffer]]) -> None:
        self._pending = pending

    def synchronize(self) -> None:
        for event, _ in self._pending:
            event.synchronize()
