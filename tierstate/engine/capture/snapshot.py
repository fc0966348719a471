"""Snapshots in device memory: copy a state within its GPU when `save` is called, and capture it from that copy later.

A copy within a device takes a small part of the time of a copy to the host. The copy becomes an object of a `gpu`
tier; the capture reads it while the training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ctypes import memmove
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tierstate.engine.packs.keys import SNAPSHOT, PackKey
from tierstate.engine.packs.pack import FooterRows, encode_footer
from tierstate.engine.packs.slab_layout import BIG
from tierstate.engine.publish.publish import DirectJob
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import MAX_CHUNK_SIZE, Buffer, DeviceChunk, Event, StreamEvent, as_buffer, spans
from tierstate.manifest.errors import TierFull
from tierstate.manifest.format.layout import RAW, LayoutBuilder
from tierstate.manifest.format.version import Version
from tierstate.tiers.memory.block_sums import SUM_BLOCK, block_sums, sums_on_host
from tierstate.tiers.memory.cuda import CopyStream
from tierstate.tiers.memory.gpu import Gpu

from .capture_thread import CaptureJob
from .plan import HOST, CapturePlan, Chunks
from .streamed import checked_chunks

log = logging.getLogger("tierstate")


ALIGN = 256
"""Alignment in bytes of each source in a snapshot: a device copies aligned words fastest."""


class _Layout(NamedTuple):
    """Which sources are in a snapshot, and where.

    Attributes:
        source: ``(n,)``: indices of the sources, those on the device first.
        at: ``(n,)``: byte offset of each in the snapshot.
        near: how many of them are on the device.
        nbytes: bytes of the snapshot, a multiple of SUM_BLOCK.
    """

    source: Array
    at: Array
    near: int
    nbytes: int


class Snapshot:
    """Chunks in the memory of a `gpu` tier, which become an object when their digests are known (`AdoptedChunks`).

    Args:
        tier: the tier.
        key: the object's key.
        memory: the device memory that was reserved for it.
        sums: block checksums of the memory.
        rows, offset, nbytes: ``(n,)``: the row, byte offset and length of each chunk.
    """

    def __init__(
        self, tier: Gpu, key: str, memory: Buffer, sums: torch.Tensor, rows: Array, offset: Array, nbytes: Array
    ) -> None:
        self._tier, self._key = tier, key
        # None once the memory is an object's, or was given back: it must be free when the tier frees it, and this
        # snapshot may live on, since the write that it belongs to is a part of a reference cycle.
        self._memory: tuple[Buffer, torch.Tensor] | None = memory, sums
        self.rows, self._offset, self._nbytes = rows, offset, nbytes

    @property
    def stored(self) -> int:
        """Bytes of the chunks."""
        return int(self._nbytes.sum())

    def place(self, version: Version, draft: LayoutBuilder) -> None:
        """Make the object visible, and put its chunks into the layout ``draft``. Raises TierError."""
        rows = FooterRows(version.digests[self.rows], self._nbytes, self._offset, self._nbytes, RAW)
        assert self._memory is not None
        memory, sums = self._memory
        with self._tier.failing(self._key), self._tier.line.taken():
            found = sums_on_host(sums)
        self._tier.adopt(self._key, memory, found, as_buffer(encode_footer([rows])))
        self._memory = None
        draft.put_run(self.rows, self._key, self._offset, self._nbytes, RAW)

    def discard(self) -> None:
        """Delete the object or free its memory. The capture must have ended."""
        if self._memory is None:
            self._tier.delete(self._key)
        else:
            (memory, _), self._memory = self._memory, None
            self._tier.give_back(memory)


def take_snapshot(work: CaptureJob) -> CaptureJob:
    """Copy a save's device tensors within the device, if one of its tiers is a `gpu` tier; waits for the copies.

    Returns:
        the save with a plan that captures from the copies; the same save if no tier can do that or the copying failed.
    """
    for queue, job in work.jobs:
        tier = queue.tier_run.gpu
        if isinstance(job, DirectJob) and tier is not None:
            try:
                return _snapped(work, queue, job, tier)
            except Exception as error:
                # Any error: the ordinary capture works without a snapshot, and its errors name the leaf.
                told = "step %d is captured by way of the host, and not within %s: %s"
                log.warning(told, work.save_state.head.step, queue.tier_run.name, error)
    return work


def _snapped(work: CaptureJob, queue: TierQueue, job: DirectJob, tier: Gpu) -> CaptureJob:
    head, plan = work.save_state.head, work.plan
    layout = _layout(plan, job.tier_write.plain, tier.line.device)
    if layout is None:
        return work
    key = str(PackKey.new(head.run, head.seq, queue.tier_run.rank, SNAPSHOT))
    memory = _reserve(queue, tier, layout.nbytes, key)
    taken = np.zeros(len(plan.nbytes), bool)
    taken[layout.source] = True
    live = ~taken & (plan.nbytes > 0)
    try:
        sums = _copy(plan, layout, memory, tier.line)
        snapshot = Snapshot(tier, key, memory, sums, *_rows(plan, layout, head.chunk))
        copied = _from(plan, layout, memory, tier.line.mark(), taken | ~live)
    except BaseException:
        try:
            tier.line.settle()
        finally:
            tier.give_back(memory)
        raise
    # From here on nothing fails: the state may change, and the ordinary capture can no longer take the place of this.
    job.tier_write.adopt(snapshot)
    if not live.any():
        work.save_state.capture_ended(None)
    # Copied sources are captured last, like guarded ones. If all guarded sources are copied, no step has to wait.
    snapped = not (live & plan.guarded).any()
    if plan.read_set is not None:
        copied = replace(copied, read_set=None if snapped else plan.read_set.only(plan.leaf[live & plan.guarded]))
    return work._replace(plan=copied, snapped=snapped)


def _layout(plan: CapturePlan, leaves: Array, device: torch.device) -> _Layout | None:
    """Choose the sources to copy and their offsets; None if no source is on the device.

    Short sources in other memory are copied too, so that for an ordinary state all of it is in the snapshot.
    """
    wanted = leaves[plan.leaf] & (plan.nbytes > 0)
    near = wanted & (plan.device == (HOST if device.type == "cpu" else device.index))
    far = wanted & ~near & (plan.nbytes < BIG)
    if not near.any():
        return None
    source = np.concatenate([np.flatnonzero(near), np.flatnonzero(far)])
    room = -(-plan.nbytes[source] // ALIGN) * ALIGN
    ends = np.cumsum(room)
    return _Layout(source, ends - room, int(near.sum()), -(-int(ends[-1]) // SUM_BLOCK) * SUM_BLOCK)


def _reserve(queue: TierQueue, tier: Gpu, nbytes: int, key: str) -> Buffer:
    try:
        return tier.reserve(nbytes, key)
    except TierFull:
        queue.retire(room_for_one=True)
        return tier.reserve(nbytes, key)


def _copy(plan: CapturePlan, layout: _Layout, memory: Buffer, line: CopyStream) -> torch.Tensor:
    """Copy the sources and wait for that. Returns the block checksums, which the device may still be computing."""
    near, at = layout.near, layout.at.tolist()
    line.follow()
    with line.taken():
        events = [
            e for i, to in zip(layout.source[:near].tolist(), at, strict=False) for e in _fill(plan, i, memory[to:])
        ]
        if near < len(at):
            base = at[near]
            # Pinned memory, so that the copy is asynchronous.
            pin = line.device.type == "cuda"
            staged = torch.empty(layout.nbytes - base, dtype=torch.uint8, device="cpu", pin_memory=pin)
            for i, to in zip(layout.source[near:].tolist(), at[near:], strict=True):
                for event in _fill(plan, i, staged[to - base :]):
                    event.synchronize()
            memory[base:].copy_(staged, non_blocking=True)
        copied = line.mark()
        sums = block_sums(memory)
    copied.synchronize()
    for event in events:
        event.synchronize()
    return sums


def _fill(plan: CapturePlan, source: int, out: Buffer) -> Iterator[Event]:
    """Copy a source to the beginning of a buffer. Yields events to wait for before the copy is complete."""
    if address := int(plan.address[source]):
        for fence in plan.fences:  # a device may still be writing there
            fence.synchronize()
        memmove(out.data_ptr(), address, int(plan.nbytes[source]))
        return
    for start, nbytes, fill in checked_chunks(plan, source, MAX_CHUNK_SIZE):
        event = fill(out[start : start + nbytes])
        if event is not None:
            yield event


def _rows(plan: CapturePlan, layout: _Layout, chunk: int) -> tuple[Array, Array, Array]:
    """Row, byte offset and length of each chunk in a snapshot."""
    counts = plan.counts(chunk)
    first, mine = np.cumsum(counts) - counts, counts[layout.source]
    owner = np.repeat(np.arange(len(mine)), mine)
    number = np.arange(len(owner)) - (np.cumsum(mine) - mine)[owner]
    nbytes = np.minimum(chunk, plan.nbytes[layout.source][owner] - number * chunk)
    return first[layout.source][owner] + number, layout.at[owner] + number * chunk, nbytes


def _from(plan: CapturePlan, layout: _Layout, memory: Buffer, summed_up: StreamEvent, done: Array) -> CapturePlan:
    """The plan that reads the copied sources from the snapshot.

    Args:
        summed_up: the event after which the checksums are complete.
        done: ``(sources,)`` of bool: sources of which nothing is read from the state itself any more.
    """
    address, chunks = plan.address.copy(), dict(plan.chunks)
    address[done], chunks = 1, {i: c for i, c in chunks.items() if not done[i]}
    if memory.is_cuda:
        address[layout.source] = 0
        for i, at in zip(layout.source.tolist(), layout.at.tolist(), strict=True):
            chunks[i] = _chunks(memory[at : at + int(plan.nbytes[i])], summed_up)
    else:
        address[layout.source] = memory.data_ptr() + layout.at
    # Keep the state's own memory alive only while some of it is still to be captured.
    keep = [memory, None if done.all() else plan.keep]
    return replace(plan, address=address, chunks=chunks, guarded=plan.guarded | done, keep=keep)


def _chunks(copy: Buffer, summed_up: StreamEvent) -> Chunks:
    """The chunks of a source that is contiguous in device memory."""

    def fill(start: int, out: Buffer) -> Event:
        with torch.cuda.device(copy.device):
            # Read only after the checksums: a later change of that memory then shows in the checksums or the digests.
            summed_up.wait()
            out.copy_(copy[start : start + out.numel()], non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    return lambda size: (
        DeviceChunk.of(start, copy[start : start + n], partial(fill, start), summed_up)
        for start, n in spans(copy.numel(), size)
    )
