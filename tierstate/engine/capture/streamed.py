"""Capture of what is not in host memory: device tensors, strided tensors, custom providers, chunk by chunk into slabs.

`StreamedSources` queues copies from devices, and runs ahead of them. Short tensors of a device are gathered in its
memory first (`DeviceStaging`) and cross the bus in one transfer: to queue one takes longer than to copy 100 KB. Copies
of long ones are queued several at a time, as each call lets the training in, and takes the interpreter from it again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from tierstate.engine.packs.slab_layout import BIG, BLOCK, GRAIN
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, Chunk, DeviceChunk, Event, StreamEvent
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.tiers.memory.arena import Arena, Slab
from tierstate.tiers.memory.device_room import STAGING, DeviceStaging
from tierstate.tiers.trace import span

from .plan import CapturePlan

log = logging.getLogger("tierstate")


SLABS_AHEAD = 2
"""Slabs that a device may still be copying into while the next one is filled, if one thread does everything."""


COPIES_QUEUED = 16
"""Slabs that devices may be copying into, and events of such copies. With some 50 events on which threads sleep,
recording one more waits until the oldest has happened, and lets no other thread run meanwhile (docs/benchmarks-gpu.md).
"""


COPIES_AT_ONCE = 8
"""Slabs whose copies are queued by one call, and waited for as one, if one thread does everything: half of
`COPIES_QUEUED`, so that devices copy into one half while the other half is worked on."""


class _Piece(NamedTuple):
    """A chunk that is to be copied with others: its source, its byte offset in the slab, its bytes, and what has to be
    waited for before they are read."""

    source: int
    at: int
    data: Buffer
    after: StreamEvent | None


_Copies: TypeAlias = tuple[Callable[[], str], Event]
"""Asynchronous copies: the name of the leaf, or of several, for messages; and the event after them."""


FilledSlab: TypeAlias = tuple[Slab, Array, Array, Array]
"""A slab with a lease, and the rows, byte offsets and lengths of the chunks in it, ``(n,)`` of int64 each."""


@dataclass(eq=False)
class Filling:
    """A slab that is being filled.

    Attributes:
        end: bytes in use.
        rows, at, nbytes: row, byte offset and length of each chunk.
        events: asynchronous copies into the slab.
        gathered: short chunks of one device, one after the other in the slab, whose copies are not queued yet.
        long: long chunks of devices whose copies are not queued yet.
    """

    slab: Slab
    end: int = 0
    rows: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    events: list[_Copies] = field(default_factory=list)
    gathered: list[_Piece] = field(default_factory=list)
    long: list[_Piece] = field(default_factory=list)

    @property
    def copying(self) -> bool:
        """Whether devices may still be copying into the slab, or are to."""
        return bool(self.events or self.long)

    def settled(self) -> FilledSlab:
        """Wait for all copies into the slab, then return it. Raises CaptureError if a copy failed; the slab is released
        then."""
        try:
            with span("wait for a device"):
                for name, event in self.events:
                    with _reading(name):
                        event.synchronize()
        except BaseException:
            self.drop()
            raise
        rows, at, nbytes = (np.array(column, "i8") for column in (self.rows, self.at, self.nbytes))
        return self.slab, rows, at, nbytes

    def drop(self) -> None:
        """Release the slab, once no device writes into it any more."""
        for name, event in self.events:
            try:
                event.synchronize()
            except Exception as error:
                log.debug("%s: a copy that nobody waits for failed: %s", name(), error)
        self.slab.release()


class StreamedSources:
    """Captures sources that have no contiguous host memory: device tensors, strided tensors, custom providers.

    Args:
        plan: the plan with the sources.
        chunk: chunk length in bytes.
        arena: gives the slabs.
        stop: called before each chunk; true cancels the capture.
        ahead: slabs that are filled before the first of them is yielded. 0 if other threads wait for their copies.
        staging: where short tensors of devices are gathered.
        together: slabs that are yielded together, at most, and whose long chunks are queued by one call.
    """

    def __init__(
        self,
        plan: CapturePlan,
        chunk: int,
        arena: Arena,
        stop: Callable[[], bool],
        ahead: int,
        staging: DeviceStaging,
        together: int = 1,
    ) -> None:
        self._plan, self._chunk, self._arena, self._stop, self._ahead = plan, chunk, arena, stop, ahead
        self._staging, self._together = staging, together
        self._open: Filling | None = None
        self._waiting: deque[Filling] = deque()
        self._unqueued: list[Filling] = []  # the last of these, which have long chunks that are not queued yet
        self._queued: deque[_Copies] = deque()

    def run(self, sources: Array, first: Array, kept: Container[int] = ()) -> Generator[list[Filling]]:
        """Yield slabs, into which devices may still copy. The caller must settle or drop each. Order:
        `CapturePlan.in_order`.

        Args:
            sources: indices of the sources to capture.
            first: ``(sources of the plan,)``: the first row of each source.
            kept: rows that are not copied.

        Raises:
            CaptureError: the save was cancelled, or a provider failed or broke its contract; the message names the
                leaf.
        """
        order = self._plan.in_order(sources)
        try:
            for source in order.tolist():
                for i, chunk in enumerate(checked_chunks(self._plan, source, self._chunk)):
                    if self._stop():
                        raise CaptureError("the save was cancelled")
                    if (row := int(first[source]) + i) in kept:
                        continue
                    yield from self._make_room(chunk.nbytes)
                    self._fill(source, row, chunk)
            yield from self._shut(0)
        finally:
            self._let_go()

    def _make_room(self, nbytes: int) -> Iterator[list[Filling]]:
        """Open another slab if the open one has no room for the next chunk; yields filled slabs."""
        if self._open is not None:
            self._open.end += -self._open.end % (BLOCK if nbytes >= BIG else GRAIN)
            if self._open.end + nbytes <= self._arena.slab_size:
                return
        yield from self._shut(self._ahead)
        while (slab := self._arena.try_acquire()) is None and self._waiting:
            # No blocking wait for a slab while this generator still holds filled ones: nobody else could release them.
            yield self._next()
        self._open = Filling(slab if slab is not None else self._arena.acquire(self._stop))

    def _shut(self, ahead: int) -> Iterator[list[Filling]]:
        """Close the open slab and yield filled ones, except the last ``ahead``, into which devices may still copy."""
        if self._open is not None:
            self._transfer(self._open)
            self._waiting.append(self._open)
            if self._open.long:
                self._unqueued.append(self._open)
            self._open = None
        if len(self._unqueued) >= self._together:
            self._queue()
        while len(self._waiting) > ahead:
            yield self._next()
        while self._waiting and not self._waiting[0].copying:
            yield [self._waiting.popleft()]

    def _next(self) -> list[Filling]:
        """The slabs that are yielded next; all their copies are queued."""
        count = min(self._together, len(self._waiting))
        if any(self._waiting[i].long for i in range(count)):
            self._queue()
        return [self._waiting.popleft() for _ in range(count)]

    def _queue(self) -> None:
        """Queue the copies of long chunks, those of a device by one call."""
        fillings, self._unqueued = self._unqueued, []
        pieces = [(filling, piece) for filling in fillings for piece in filling.long]
        for device, group in groupby(pieces, lambda one: one[1].data.device):
            run = list(group)
            name = self._names([piece for _, piece in run])
            with _reading(name):
                wait_for_all(piece.after for _, piece in run)
                torch._foreach_copy_(
                    [filling.slab.buffer[piece.at : piece.at + piece.data.numel()] for filling, piece in run],
                    [piece.data for _, piece in run],
                    non_blocking=True,
                )
                event = _Recorded(device)
            for filling in {id(filling): filling for filling, _ in run}.values():
                filling.events.append((name, event))
            self._bound(name, event)
        for filling in fillings:
            filling.long = []

    def _bound(self, name: Callable[[], str], event: Event) -> None:
        """Wait for the oldest copies that are queued, if there are `COPIES_QUEUED`."""
        self._queued.append((name, event))
        if len(self._queued) > COPIES_QUEUED:
            name, event = self._queued.popleft()
            with _reading(name):
                event.synchronize()

    def _names(self, run: list[_Piece]) -> Callable[[], str]:
        """What to call these chunks in a message."""
        # Not of a method: the plan, with the state's memory, would stay in a circle until garbage is collected.
        return partial(_told, self._plan, run[0].source, run[-1].source, len(run) - 1)

    def _fill(self, source: int, row: int, chunk: Chunk) -> None:
        filling = self._open
        assert filling is not None
        if isinstance(chunk, DeviceChunk) and chunk.data.is_cuda:
            piece = _Piece(source, filling.end, chunk.data, chunk.after)
            if chunk.nbytes < BIG:
                self._gather(filling, piece)
            else:
                filling.long.append(piece)
        else:
            self._transfer(filling)
            name = partial(self._plan.name, source)
            with _reading(name):
                event = chunk.fill(filling.slab.buffer[filling.end : filling.end + chunk.nbytes])
            if event is not None:
                filling.events.append((name, event))
                self._bound(name, event)
        filling.rows.append(row)
        filling.at.append(filling.end)
        filling.nbytes.append(chunk.nbytes)
        filling.end += chunk.nbytes

    def _gather(self, filling: Filling, chunk: _Piece) -> None:
        run = filling.gathered
        if run and (run[0].data.device != chunk.data.device or chunk.at + chunk.data.numel() - run[0].at > STAGING):
            self._transfer(filling)
        filling.gathered.append(chunk)

    def _transfer(self, filling: Filling) -> None:
        """Queue the copies of what is gathered: in one transfer, together with the gaps between."""
        run, filling.gathered = filling.gathered, []
        if not run:
            return
        device, slab, start = run[0].data.device, filling.slab.buffer, run[0].at
        name = self._names(run)
        with _reading(name):
            wait_for_all(chunk.after for chunk in run)
            staging = self._staging.on(device) if len(run) > 1 else None
            to = slab if staging is None else staging
            base = 0 if staging is None else start
            parts = [to[chunk.at - base :][: chunk.data.numel()] for chunk in run]
            if staging is None:
                for part, chunk in zip(parts, run, strict=True):
                    part.copy_(chunk.data, non_blocking=True)
            else:
                torch._foreach_copy_(parts, [chunk.data for chunk in run])
                end = run[-1].at + run[-1].data.numel()
                slab[start:end].copy_(staging[: end - start], non_blocking=True)
            event = _Recorded(device)
        filling.events.append((name, event))
        self._bound(name, event)

    def _let_go(self) -> None:
        """Release the slabs that were not yielded."""
        dropped = [*self._waiting, *([self._open] if self._open is not None else [])]
        for fence in self._plan.fences if dropped else ():
            try:
                fence.copied().synchronize()  # a copy that failed may have queued a part that has no event
            except Exception as error:
                log.debug("a device did not finish copies that nobody waits for: %s", error)
        for filling in dropped:
            filling.drop()


def checked_chunks(plan: CapturePlan, source: int, size: int) -> Iterator[Chunk]:
    """The chunks of a source, checked against the provider's contract: in order, no gaps, right lengths.

    Raises:
        CaptureError: the provider failed or broke the contract.
    """
    at, nbytes = 0, int(plan.nbytes[source])
    try:
        for given in plan.chunks[source](size):
            chunk = given if isinstance(given, Chunk) else Chunk(*given)
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
    except TierstateError:
        raise
    except Exception as error:
        raise CaptureError(f"{plan.name(source)}: its provider failed: {error!r}") from error


def wait_for_all(events: Iterable[StreamEvent | None]) -> None:
    """Make all later work of this thread's current streams wait for these events, for each of them once."""
    for event in {id(event): event for event in events}.values():
        if event is not None:
            event.wait()


def _told(plan: CapturePlan, first: int, last: int, more: int) -> str:
    name = plan.name(first)
    return f"{name}, or one of {more} more up to {plan.name(last)}," if more else name


class _Recorded:
    """An event after all that is queued so far on this thread's current stream of a device. Once it has been waited
    for, another wait is nothing that lets other threads have the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))
        self._over = False

    def synchronize(self) -> None:
        """Wait for it."""
        if not self._over:
            self._event.synchronize()
            self._over = True


@contextmanager
def _reading(name: Callable[[], str]) -> Iterator[None]:
    """Turn errors into a CaptureError that names the leaf."""
    try:
        yield
    except TierstateError:
        raise
    except Exception as error:
        raise CaptureError(f"{name()} could not be read: {error}") from error
