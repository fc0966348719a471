"""A plan: what of a state is to be captured, as columns, so that thousands of leaves are no Python work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer, Chunk
from tierstate.manifest.index import Array
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.version import ShardRow

from .packing import in_order

HOST = -1
"""The host, where devices have numbers."""

Chunks = Callable[[int], Iterator[Chunk]]
"""A source's chunks for a given size."""


class Fence(Protocol):
    """A moment on a device's stream, after which the state is what it was when save was called."""

    def synchronize(self) -> None:
        """Return when the moment has passed."""

    def follow(self) -> None:
        """Have what this thread does on the device from now on come after it."""


class Source(NamedTuple):
    """One shard to capture.

    Attributes:
        leaf: its leaf's index.
        box: its place in the leaf.
        nbytes: its length.
        chunks: its chunks for a given size.
        guarded: whether it holds still after the call of save, until somebody who is made to wait changes it.
        memory: its bytes as they lie in host memory, where they do.
        device: number of the CUDA device that it lies on, and whose memory its chunks can be filled into; or HOST.
    """

    leaf: int
    box: Box
    nbytes: int
    chunks: Chunks
    guarded: bool = False
    memory: Buffer | None = None
    device: int = HOST


@dataclass(frozen=True, eq=False)
class Plan:
    """What to capture: leaves, and their shards by rising leaf, as columns.

    Attributes:
        leaves: the version's leaves.
        leaf, boxes, nbytes: per source, as in `Source`.
        guarded: ``(sources,)`` of bool.
        address: ``(sources,)`` of int64: where the bytes lie in host memory; 0 for those that come as chunks.
        chunks: those, by the source's number.
        device: ``(sources,)`` of int64, as in `Source`.
        keep: what keeps the memory alive.
        fences: what to wait for on devices that are in use.
    """

    leaves: tuple[Leaf, ...]
    leaf: Array
    boxes: tuple[Box, ...]
    nbytes: Array
    guarded: Array
    address: Array
    chunks: Mapping[int, Chunks]
    device: Array
    keep: Any = None
    fences: tuple[Fence, ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Leaf], sources: Sequence[Source], fences: Sequence[Fence] = ()) -> Plan:
        """The plan of these sources."""
        return cls(
            tuple(leaves),
            np.array([s.leaf for s in sources], "i8"),
            tuple(s.box for s in sources),
            np.array([s.nbytes for s in sources], "i8"),
            np.array([s.guarded for s in sources], bool),
            np.array([address_of(s.memory) for s in sources], "i8"),
            {i: s.chunks for i, s in enumerate(sources) if s.memory is None},
            np.array([s.device for s in sources], "i8"),
            [s.memory for s in sources],
            tuple(fences),
        )

    def changed(self, sources: Mapping[int, Source]) -> Plan:
        """The plan with some sources in place of those of the same numbers."""
        boxes, chunks, keep = list(self.boxes), dict(self.chunks), [self.keep]
        nbytes, guarded, address = self.nbytes.copy(), self.guarded.copy(), self.address.copy()
        device = self.device.copy()
        for i, source in sources.items():
            boxes[i], nbytes[i], guarded[i], device[i] = source.box, source.nbytes, source.guarded, source.device
            address[i] = address_of(source.memory)
            keep.append(source.memory)
            chunks.pop(i, None)
            if source.memory is None:
                chunks[i] = source.chunks
        columns = replace(self, nbytes=nbytes, guarded=guarded, address=address, device=device)
        return replace(columns, boxes=tuple(boxes), chunks=chunks, keep=keep)

    @cached_property
    def total(self) -> int:
        """Bytes of all sources."""
        return int(self.nbytes.sum())

    def shards(self, rank: int = 0) -> list[ShardRow]:
        """The shards as a version's rows."""
        return [ShardRow(leaf, rank, box) for leaf, box in zip(self.leaf.tolist(), self.boxes, strict=True)]

    def counts(self, chunk: int) -> Array:
        """``(sources,)``: chunks of each source."""
        found: Array = -(-self.nbytes // chunk)
        return found

    def row_leaves(self, chunk: int) -> Array:
        """``(chunks,)``: the leaf of each chunk."""
        return np.repeat(self.leaf, self.counts(chunk))

    def in_order(self, sources: Array) -> Array:
        """These sources in the order in which they are captured."""
        leaves, leaf = self.leaves, self.leaf[sources]
        order = in_order(self.nbytes[sources], lambda i: leaves[int(leaf[i])].spec.itemsize)
        found: Array = sources[order]
        return found

    def without_memory(self) -> Plan:
        """The plan without what keeps the state's memory alive: it may be needed when the state is long gone."""
        return replace(self, chunks={}, keep=None, fences=())

    def stages(self) -> Array:
        """``(leaves,)``: in which part of the capture a leaf comes, whole; -1 where it does not, or only parts of it.

        The chunks of one part come in order, but for a few slabs that overtake each other.
        """
        found = np.full(len(self.leaves), -1)
        found[self.leaf] = 2 * self.guarded + (self.address == 0)
        shapes = (self.leaves[leaf].spec.shape for leaf in self.leaf.tolist())
        parts = (box.shape != shape for box, shape in zip(self.boxes, shapes, strict=True))
        found[self.leaf[np.fromiter(parts, bool, len(self.boxes))]] = -1
        found[np.bincount(self.leaf, minlength=len(found)) > 1] = -1
        return found

    def name(self, source: int) -> str:
        """The source's leaf, for messages."""
        return f"leaf {self.leaves[int(self.leaf[source])].name}"


def address_of(memory: Buffer | None) -> int:
    """Where memory lies, as `Plan.address` says it: not 0 where there is some, though it be empty."""
    return 0 if memory is None else memory.data_ptr() or 1
