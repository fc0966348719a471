"""Streamed sources: chunks pulled from providers one after the other, while those before are still being copied."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tierstate.manifest.chunk import Chunk, Event
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.manifest.index import Array

from .arena import Arena, Slab
from .packing import BIG, BLOCK, GRAIN
from .plan import Plan

log = logging.getLogger("tierstate")

AHEAD = 2
"""Slabs that a device may still be copying into while the next one is filled."""

Filled: TypeAlias = tuple[Slab, Array, Array, Array]
"""A slab with a lease, and rows, places and lengths of its chunks."""


@dataclass(eq=False)
class _Filling:
    slab: Slab
    end: int = 0
    rows: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    events: list[tuple[str, Event]] = field(default_factory=list)

    def settled(self) -> Filled:
        """The slab, once all copies into it are complete."""
        for name, event in self.events:
            with _reading(name):
                event.synchronize()
        rows, at, nbytes = (np.array(column, "i8") for column in (self.rows, self.at, self.nbytes))
        return self.slab, rows, at, nbytes


class Streamed:
    """Sources that show no host memory: device tensors, tensors of odd strides, custom providers.

    Args:
        plan: whose sources.
        chunk: chunk length in bytes.
        arena: where the chunks go.
        stop: asked before each chunk.
    """

    def __init__(self, plan: Plan, chunk: int, arena: Arena, stop: Callable[[], bool]) -> None:
        self._plan, self._chunk, self._arena, self._stop = plan, chunk, arena, stop
        self._open: _Filling | None = None
        self._waiting: deque[_Filling] = deque()

    def run(self, sources: Array, first: Array) -> Generator[Filled]:
        """Full slabs, each with one lease that is from then on the taker's. Sources come as `Plan.in_order` has them.

        Args:
            first: ``(sources of the plan,)``: each one's first row.

        Raises:
            CaptureError: a provider failed, or broke its contract; the message names the leaf.
        """
        order = self._plan.in_order(sources)
        try:
            for source in order.tolist():
                for i, chunk in enumerate(checked(self._plan, source, self._chunk)):
                    if self._stop():
                        raise CaptureError("the save was cancelled")
                    yield from self._make_room(chunk.nbytes)
                    self._fill(source, int(first[source]) + i, chunk)
            yield from self._shut(0)
        finally:
            self._let_go()

    def _make_room(self, nbytes: int) -> Iterator[Filled]:
        """See that the open slab has room for the next chunk."""
        if self._open is not None:
            self._open.end += -self._open.end % (BLOCK if nbytes >= BIG else GRAIN)
            if self._open.end + nbytes <= self._arena.slab_size:
                return
        yield from self._shut(AHEAD)
        while (slab := self._arena.try_acquire()) is None and self._waiting:
            # None is waited for while we hold some that nobody else could give back.
            yield self._oldest()
        self._open = _Filling(slab if slab is not None else self._arena.acquire(self._stop))

    def _shut(self, ahead: int) -> Iterator[Filled]:
        """The open slab is full; those before it are handed out, but for some whose copies still run."""
        if self._open is not None:
            self._waiting.append(self._open)
            self._open = None
        while len(self._waiting) > ahead or (self._waiting and not self._waiting[0].events):
            yield self._oldest()

    def _oldest(self) -> Filled:
        settled = self._waiting[0].settled()
        self._waiting.popleft()
        return settled

    def _fill(self, source: int, row: int, chunk: Chunk) -> None:
        filling = self._open
        assert filling is not None
        with _reading(self._plan.name(source)):
            event = chunk.fill(filling.slab.buffer[filling.end : filling.end + chunk.nbytes])
        if event is not None:
            filling.events.append((self._plan.name(source), event))
        filling.rows.append(row)
        filling.at.append(filling.end)
        filling.nbytes.append(chunk.nbytes)
        filling.end += chunk.nbytes

    def _let_go(self) -> None:
        """Give back what nobody took, once no device writes into it any more."""
        for filling in [*self._waiting, *([self._open] if self._open is not None else [])]:
            for name, event in filling.events:
                try:
                    event.synchronize()
                except Exception as error:
                    log.debug("%s: a copy that nobody waits for failed: %s", name, error)
            filling.slab.release()


def checked(plan: Plan, source: int, size: int) -> Iterator[Chunk]:
    """A source's chunks, held to the contract: in order, without a gap, of the right lengths.

    Raises:
        CaptureError: its provider failed, or broke the contract.
    """
    at, nbytes = 0, int(plan.nbytes[source])
    for chunk in _yielded(plan, source, size):
        right = min(size, nbytes - at)
        if chunk.start != at or chunk.nbytes != right or right <= 0:
            raise CaptureError(
                f"{plan.name(source)}: its provider gave {chunk.nbytes} bytes at {chunk.start}; "
                f"right are {right} at {at} of {nbytes}"
            )
        at += chunk.nbytes
        yield chunk
    if at != nbytes:
        raise CaptureError(f"{plan.name(source)}: its provider gave {at} of {nbytes} bytes")


def _yielded(plan: Plan, source: int, size: int) -> Iterator[Chunk]:
    try:
        for chunk in plan.chunks[source](size):
            yield Chunk(*chunk)
    except TierstateError:
        raise
    except Exception as error:
        raise CaptureError(f"{plan.name(source)}: its provider failed: {error!r}") from error


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """What goes wrong is told as the leaf's."""
    try:
        yield
    except TierstateError:
        raise
    except Exception as error:
        raise CaptureError(f"{name} could not be read: {error}") from error
