"""Snapshots: states copied within the memory that a tier has on their device, and captured from there.

Copying within a device takes a small part of the time that copying out of it takes. The copy is what the tier keeps;
the host reads it while training runs.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from ctypes import memmove
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tierstate.manifest.chunk import MAX_CHUNK_SIZE, Buffer, Chunk, Event, as_buffer, spans
from tierstate.manifest.errors import TierFull
from tierstate.manifest.index import Array
from tierstate.manifest.layout import RAW, Draft
from tierstate.manifest.version import Version

from .capturing import Work
from .devices import Line, Moment
from .gpu import Gpu, gpu_in
from .jobs import Intake
from .lane import Lane
from .packing import BIG
from .packs import Rows, encode_footer
from .plan import HOST, Chunks, Plan
from .streamed import checked
from .sums import BLOCK, on_host, summed

log = logging.getLogger("tierstate")

ALIGN = 256
"""What sources start at multiples of: a device copies whole words fastest."""


class _Layout(NamedTuple):
    """Where sources go in a snapshot.

    Attributes:
        source: ``(n,)``: their numbers, those that lie on the device first.
        at: ``(n,)``: where each starts.
        near: how many lie on the device.
        nbytes: bytes of the whole, in blocks.
    """

    source: Array
    at: Array
    near: int
    nbytes: int


class Snapshot:
    """Chunks that lie in a tier's memory, and become an object there once it is known what they are.

    Args:
        tier: where.
        key: the object's key.
        memory: what was reserved for it.
        sums: of the memory.
        rows, offset, nbytes: ``(n,)``: the chunks' rows, and where they lie.
    """

    def __init__(
        self, tier: Gpu, key: str, memory: Buffer, sums: torch.Tensor, rows: Array, offset: Array, nbytes: Array
    ) -> None:
        self._tier, self._key, self._memory, self._sums = tier, key, memory, sums
        self.rows, self._offset, self._nbytes = rows, offset, nbytes
        self._adopted = False

    @property
    def stored(self) -> int:
        """Bytes of the chunks."""
        return int(self._nbytes.sum())

    def place(self, version: Version, draft: Draft) -> None:
        """Make the object visible, and say where its chunks lie.

        Raises:
            TierError
        """
        rows = Rows(version.digests[self.rows], self._nbytes, self._offset, self._nbytes, RAW)
        with self._tier.line.taken():
            sums = on_host(self._sums)
        self._tier.adopt(self._key, self._memory, sums, as_buffer(encode_footer([rows])))
        self._adopted = True
        draft.put_run(self.rows, self._key, self._offset, self._nbytes, RAW)

    def discard(self) -> None:
        """Leave nothing behind. Nobody captures from it any more."""
        if self._adopted:
            self._tier.delete(self._key)
        else:
            self._tier.give_back(self._memory)


def snapped(work: Work) -> Work:
    """The save, captured as far as one of its tiers can do that within the device; the rest is captured from its copy.

    Where no tier can, the save is as it was. Returns when the copying is done.
    """
    for lane, job in work.jobs:
        tier = gpu_in(lane.shelf.tier)
        if isinstance(job, Intake) and tier is not None:
            try:
                return _snapped(work, lane, job, tier)
            except Exception as error:
                # Whatever it is: the ordinary capture does without, and is precise about what cannot be read.
                told = "step %d is captured by way of the host, and not within %s: %s"
                log.warning(told, work.ticket.head.step, lane.shelf.name, error)
    return work


def _snapped(work: Work, lane: Lane, job: Intake, tier: Gpu) -> Work:
    head, plan = work.ticket.head, work.plan
    layout = _layout(plan, job.publication.plain, tier.line.device)
    if layout is None:
        return work
    key = f"packs/{head.run}/{head.seq:012d}-{lane.shelf.rank}-snapshot-{uuid.uuid4().hex[:12]}"
    memory = _reserve(lane, tier, layout.nbytes, key)
    try:
        sums = _copy(plan, layout, memory, tier.line)
    except BaseException:
        tier.line.settle()
        tier.give_back(memory)
        raise
    job.publication.adopt(Snapshot(tier, key, memory, sums, *_rows(plan, layout, head.chunk)))
    taken = np.zeros(len(plan.nbytes), bool)
    taken[layout.source] = True
    live = ~taken & (plan.nbytes > 0)
    if not live.any():
        work.ticket.capture_ended(None)
    # What is taken is captured last, as what is guarded is. Only if all that is guarded is taken, no step has to wait.
    copied = _from(plan, layout, memory, tier.line.mark(), taken | ~live)
    return work._replace(plan=copied, snapped=not (live & plan.guarded).any())


def _layout(plan: Plan, leaves: Array, device: torch.device) -> _Layout | None:
    """What of a plan to copy within a device, and where to; None where none of it lies there.

    Short sources that lie elsewhere come along, so that nothing of an ordinary state has to be waited for.
    """
    wanted = leaves[plan.leaf] & (plan.nbytes > 0)
    near = wanted & (plan.device == (HOST if device.type == "cpu" else device.index))
    far = wanted & ~near & (plan.nbytes < BIG)
    if not near.any():
        return None
    source = np.concatenate([np.flatnonzero(near), np.flatnonzero(far)])
    room = -(-plan.nbytes[source] // ALIGN) * ALIGN
    ends = np.cumsum(room)
    return _Layout(source, ends - room, int(near.sum()), -(-int(ends[-1]) // BLOCK) * BLOCK)


def _reserve(lane: Lane, tier: Gpu, nbytes: int, key: str) -> Buffer:
    try:
        return tier.reserve(nbytes, key)
    except TierFull:
        lane.retire(room_for_one=True)
        return tier.reserve(nbytes, key)


def _copy(plan: Plan, layout: _Layout, memory: Buffer, line: Line) -> torch.Tensor:
    """Copy the sources; returns when that is done, with the sums of the memory, which may not be done yet."""
    near, at = layout.near, layout.at.tolist()
    line.follow()
    with line.taken():
        events = [
            e for i, to in zip(layout.source[:near].tolist(), at, strict=False) for e in _fill(plan, i, memory[to:])
        ]
        if near < len(at):
            base = at[near]
            # Pinned, so that nothing waits on the way.
            staged = torch.empty(layout.nbytes - base, dtype=torch.uint8, pin_memory=line.device.type == "cuda")
            for i, to in zip(layout.source[near:].tolist(), at[near:], strict=True):
                for event in _fill(plan, i, staged[to - base :]):
                    event.synchronize()
            memory[base:].copy_(staged, non_blocking=True)
        copied = line.mark()
        sums = summed(memory)
    copied.synchronize()
    for event in events:
        event.synchronize()
    return sums


def _fill(plan: Plan, source: int, out: Buffer) -> Iterator[Event]:
    """Copy a source to the beginning of a buffer; what to wait for."""
    if address := int(plan.address[source]):
        for fence in plan.fences:  # a device may still be writing there
            fence.synchronize()
        memmove(out.data_ptr(), address, int(plan.nbytes[source]))
        return
    for start, nbytes, fill in checked(plan, source, MAX_CHUNK_SIZE):
        event = fill(out[start : start + nbytes])
        if event is not None:
            yield event


def _rows(plan: Plan, layout: _Layout, chunk: int) -> tuple[Array, Array, Array]:
    """Rows, offsets and lengths of the chunks in a snapshot."""
    counts = plan.counts(chunk)
    first, mine = np.cumsum(counts) - counts, counts[layout.source]
    owner = np.repeat(np.arange(len(mine)), mine)
    number = np.arange(len(owner)) - (np.cumsum(mine) - mine)[owner]
    nbytes = np.minimum(chunk, plan.nbytes[layout.source][owner] - number * chunk)
    return first[layout.source][owner] + number, layout.at[owner] + number * chunk, nbytes


def _from(plan: Plan, layout: _Layout, memory: Buffer, summed_up: Moment, done: Array) -> Plan:
    """The plan, with the copies in place of what was copied.

    Args:
        summed_up: when the sums of the memory are known.
        done: ``(sources,)`` of bool: of which nothing is left to be read where the state is.
    """
    address, chunks = plan.address.copy(), dict(plan.chunks)
    address[done], chunks = 1, {i: c for i, c in chunks.items() if not done[i]}
    if memory.is_cuda:
        address[layout.source] = 0
        for i, at in zip(layout.source.tolist(), layout.at.tolist(), strict=True):
            chunks[i] = _chunks(memory[at : at + int(plan.nbytes[i])], summed_up)
    else:
        address[layout.source] = memory.data_ptr() + layout.at
    # The state's own memory is held on to only while some of it is still to be captured.
    keep = [memory, None if done.all() else plan.keep]
    return replace(plan, address=address, chunks=chunks, guarded=plan.guarded | done, keep=keep)


def _chunks(copy: Buffer, summed_up: Moment) -> Chunks:
    """The chunks of a source that lies in a device's memory without gaps."""

    def fill(start: int, out: Buffer) -> Event:
        with torch.cuda.device(copy.device):
            # Not before: what changes in that memory from then on shows in the digests if it does not in the sums.
            summed_up.wait()
            out.copy_(copy[start : start + out.numel()], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return event

    return lambda size: (Chunk(start, n, partial(fill, start)) for start, n in spans(copy.numel(), size))
