"""Capture: a state's chunks copied out into slabs and digested, while the state holds still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Chunk, Event
from tierstate.manifest.digest import Digest
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.manifest.index import Array, as_array
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.version import ShardRow

from .arena import Arena, Slab
from .packs import BIG, BLOCK

_LINE = 64
"""Small chunks start at cache lines, so that every element type can be viewed in place."""


class Source(NamedTuple):
    """One shard to capture.

    Attributes:
        leaf: its leaf's index.
        box: its place in the leaf.
        nbytes: its length.
        chunks: its chunks for a given size.
        guarded: whether it holds still after the call of save, until somebody who is made to wait changes it.
    """

    leaf: int
    box: Box
    nbytes: int
    chunks: Callable[[int], Iterator[Chunk]]
    guarded: bool = False


class Plan(NamedTuple):
    """What to capture: leaves, and their shards by rising leaf.

    Attributes:
        fences: events of device streams after which the state is what it was when save was called.
    """

    leaves: tuple[Leaf, ...]
    sources: tuple[Source, ...]
    fences: tuple[Event, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(s.nbytes for s in self.sources)

    def shards(self, rank: int = 0) -> list[ShardRow]:
        """The shards as a version's rows."""
        return [ShardRow(s.leaf, rank, s.box) for s in self.sources]

    def row_leaves(self, chunk: int) -> Array:
        """``(chunks,)``: the leaf of each chunk."""
        counts = [-(-s.nbytes // chunk) for s in self.sources]
        return np.repeat(np.array([s.leaf for s in self.sources], "i8"), counts)


class Batch(NamedTuple):
    """A slab's chunks: rows, where each starts in the slab, lengths, digests."""

    slab: Slab
    rows: list[int]
    at: list[int]
    nbytes: list[int]
    digests: list[bytes]


class Capture:
    """One state being copied out.

    Args:
        plan: what to copy.
        chunk: chunk length in bytes.
        arena: where to.
        digest: the digest function.
        dispatch: takes each full slab, with one lease that is from then on the taker's.
        stop: asked while waiting for room.
        unguarded_done: called when all that is not guarded has been copied.
    """

    def __init__(
        self,
        plan: Plan,
        chunk: int,
        arena: Arena,
        digest: Digest,
        dispatch: Callable[[Batch], None],
        stop: Callable[[], bool],
        unguarded_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._unguarded_done = unguarded_done
        self._plan, self._chunk, self._arena = plan, chunk, arena
        self._digest, self._dispatch, self._stop = digest, dispatch, stop
        self._batch: Batch | None = None
        self._end = 0

    def run(self) -> Array:
        """Copy everything: what is not guarded first, and small leaves first, so that they share slabs.

        Returns:
            digests by row, ``(chunks, 2)``.

        Raises:
            CaptureError: a leaf could not be read; the message names it.
        """
        digests: list[bytes] = [b""] * sum(-(-s.nbytes // self._chunk) for s in self._plan.sources)
        try:
            for fence in self._plan.fences:
                fence.synchronize()
            for first, source in self._order():
                if source.guarded:
                    self._unguarded_done()
                for i, chunk in enumerate(self._chunks(source)):
                    digests[first + i] = self._copy(first + i, source, chunk)
            self._flush()
        finally:
            if self._batch is not None:
                self._batch.slab.release()
        return as_array(digests)

    def _order(self) -> Sequence[tuple[int, Source]]:
        first, found = 0, []
        for source in self._plan.sources:
            found.append((first, source))
            first += -(-source.nbytes // self._chunk)
        return sorted(found, key=lambda item: (item[1].guarded, item[1].nbytes >= BIG))

    def _chunks(self, source: Source) -> Iterator[Chunk]:
        """The source's chunks, held to the contract: in order, without a gap, of the right lengths."""
        at = 0
        for chunk in self._yielded(source):
            right = min(self._chunk, source.nbytes - at)
            if chunk.start != at or chunk.nbytes != right or right <= 0:
                raise CaptureError(
                    f"{self._name(source)}: its provider gave {chunk.nbytes} bytes at {chunk.start}; "
                    f"right are {right} at {at} of {source.nbytes}"
                )
            at += chunk.nbytes
            yield chunk
        if at != source.nbytes:
            raise CaptureError(f"{self._name(source)}: its provider gave {at} of {source.nbytes} bytes")

    def _yielded(self, source: Source) -> Iterator[Chunk]:
        try:
            for chunk in source.chunks(self._chunk):
                yield Chunk(*chunk)
        except TierstateError:
            raise
        except Exception as error:
            raise CaptureError(f"{self._name(source)}: its provider failed: {error!r}") from error

    def _copy(self, row: int, source: Source, chunk: Chunk) -> bytes:
        if self._stop():
            raise CaptureError("the save was cancelled")
        at = self._room(chunk.nbytes)
        batch = self._batch
        assert batch is not None
        out = batch.slab.buffer[at : at + chunk.nbytes]
        try:
            event = chunk.fill(out)
            if event is not None:
                event.synchronize()
        except TierstateError:
            raise
        except Exception as error:
            raise CaptureError(f"{self._name(source)} could not be read: {error}") from error
        digest = self._digest(out)
        batch.rows.append(row)
        batch.at.append(at)
        batch.nbytes.append(chunk.nbytes)
        batch.digests.append(digest)
        self._end = at + chunk.nbytes
        return digest

    def _room(self, nbytes: int) -> int:
        """Where in the open slab the next chunk goes; a new slab if it does not fit."""
        at = self._end + -self._end % (BLOCK if nbytes >= BIG else _LINE)
        if self._batch is not None and at + nbytes <= self._arena.slab_size:
            return at
        self._flush()
        self._batch = Batch(self._arena.acquire(self._stop), [], [], [], [])
        return 0

    def _flush(self) -> None:
        if self._batch is not None:
            batch, self._batch, self._end = self._batch, None, 0
            self._dispatch(batch)

    def _name(self, source: Source) -> str:
        return f"leaf {self._plan.leaves[source.leaf].name}"
