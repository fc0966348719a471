"""The thread that captures one save after the other, and feeds the slabs to the jobs that write them to the tiers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from operator import is_
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.publish.publish import CascadeJob, DirectJob, Job, SlabReceiver, UnchangedChunks
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.manifest.arrays import Array
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import CaptureError, TierstateError, error_text
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.version import Version
from tierstate.manifest.reshard.coverage import check_complete
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import RESERVED_SLABS, Arena
from tierstate.tiers.memory.cudart import relaxed_capture
from tierstate.tiers.memory.device_room import DeviceStaging
from tierstate.tiers.memory.numa import running_on
from tierstate.tiers.trace import span

from .capture import Capture, CaptureSink
from .chunk_statistics import ElementTypes, StatisticsWorker
from .device_digests import Streams
from .plan import CapturePlan, LastCapture

Before: TypeAlias = Callable[[], LastCapture | None]
"""Returns the digests of the last save with which chunks are compared, or None."""


class CaptureJob(NamedTuple):
    """One save that is to be captured, with the job that publishes it to each of its tiers.

    Attributes:
        snapped: all guarded sources are in a snapshot: once all others are copied, the state may change.
        handed_over: what takes the slabs in place of jobs, since another process publishes the save. Then the save
            counts as captured once that process has all of it.
    """

    save_state: SaveState
    plan: CapturePlan
    jobs: list[tuple[TierQueue, Job]]
    snapped: bool = False
    handed_over: SlabReceiver | None = None

    def receivers(self) -> list[SlabReceiver]:
        """What takes the slabs of the capture; the other jobs copy from a faster tier."""
        direct: list[SlabReceiver] = [job for _, job in self.jobs if isinstance(job, DirectJob)]
        return direct if self.handed_over is None else [self.handed_over]


class CaptureThread:
    """The thread that captures saves in their order, for a `SavePipeline`.

    Args:
        arena: gives the slabs.
        ended: called when the last save is captured.
        rank: the rank of this process, if several ranks save together; None if this process saves the whole state.
        watch: called with each version that was captured, which then has statistics of its leaves; None: no statistics.
    """

    def __init__(
        self,
        arena: Arena,
        ended: Callable[[], None],
        rank: int | None = None,
        watch: Callable[[Version], object] | None = None,
    ) -> None:
        self._arena, self._ended, self._rank, self._watch = arena, ended, rank, watch
        self._types: tuple[CapturePlan, ElementTypes] | None = None
        self.parent = ""
        self._last_capture: LastCapture | None = None
        self._version: Version | None = None
        self._staging = DeviceStaging()
        self._streams: Streams = {}
        self._queue: SimpleQueue[CaptureJob | str | None] = SimpleQueue()
        self._over = Latch()
        self._thread = threading.Thread(target=self._run, name="tierstate-capture", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it is."""
        start_thread(self._thread)

    def put(self, work: CaptureJob) -> None:
        """Add a save to the queue."""
        self._queue.put(work)

    def continue_from(self, version: str) -> None:
        """Make a version, by its id, the parent of the next save. Those in the queue were made before it was restored,
        and so was one whose digests are not known yet, though its state is captured."""
        self._queue.put(version)

    def end(self) -> None:
        """End the thread after the saves in the queue."""
        self._queue.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for the thread to end. Returns whether it did."""
        if not self._over.wait(timeout):
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, str):
                self.parent = work
            elif not work.save_state.begun:
                work.save_state.begun = True
                try:
                    self._save(work)
                except BaseException as error:  # if this thread ended, every later `save` would wait for ever
                    work.save_state.capture_ended(_told(error))
            # The plan keeps the state's memory alive: drop it before waiting for the next save.
            del work
        try:
            self._ended()
        finally:
            self._over.set()

    def _before(self, work: CaptureJob) -> LastCapture | None:
        """The last capture, with ``likely`` set for the chunks that every tier written from slabs has already.

        Called only if the queues of those tiers were idle. Otherwise a save in between may become the tier's newest
        version, and chunks that it does not name may be deleted.
        """
        last, receivers = self._last_capture, work.receivers()
        if last is None or not receivers or not last.fits(work.plan.nbytes):
            return None
        likely = np.logical_and.reduce([one.needless(last.digests) for one in receivers])
        return dataclasses.replace(last, likely=likely)

    def _save(self, work: CaptureJob) -> None:
        """Capture a save and tell its outcome, whatever fails: `save`, the tiers and `close` wait for it."""
        outcome: Version | BaseException
        idle, put = True, 0
        try:
            for queue, job in work.jobs:
                idle &= queue.put(job) or isinstance(job, CascadeJob)
                put += 1
            outcome = self._outcome(work, partial(self._before, work) if idle else lambda: None)
        except BaseException as error:
            outcome = _told(error)
            work.save_state.capture_ended(outcome)
            for queue, _ in work.jobs[put:]:
                work.save_state.failed(queue.tier_run.name, outcome)
        work.save_state.lost = isinstance(outcome, BaseException)
        for receiver in work.receivers():
            receiver.feed(outcome)
        if not work.save_state.captured.done():
            work.save_state.capture_ended(None)

    def _outcome(self, work: CaptureJob, before: Before) -> Version | BaseException:
        """Capture a save. Returns its version, or the error why there is none."""
        statistics: StatisticsWorker | None = None
        try:
            statistics = self._statistics(work)
            # Threads that copy and digest are started in it, and run on the same CPUs.
            node, step = self._arena.node if work.plan.fences else None, work.save_state.head.step
            with running_on(node), relaxed_capture(), span("capture", step=step, bytes=work.plan.total):
                captured = self._capture(work, before, statistics)
            if work.handed_over is None:
                work.save_state.capture_ended(None)
            else:
                work.save_state.queued.set()  # steps may go on: the state is copied, and only not handed over yet
            if statistics is not None:
                captured = dataclasses.replace(captured, statistics=statistics.end())
        except BaseException as error:
            if statistics is not None:
                statistics.abandon()
            outcome = _told(error)
            work.save_state.capture_ended(outcome)
            return outcome
        return self._describe(work, captured)

    def _statistics(self, work: CaptureJob) -> StatisticsWorker | None:
        """What finds out the statistics of this save's chunks; None if they are not asked for."""
        if self._watch is None:
            return None
        plan, chunk, last = work.plan, work.save_state.head.chunk, self._last_capture
        known = self._types
        if known is None or known[0].leaves is not plan.leaves or len(known[1].codes) != int(plan.counts(chunk).sum()):
            known = self._types = plan.without_memory(), ElementTypes(plan.leaves, plan.row_leaves(chunk))
        before = last.statistics if last is not None and last.fits(plan.nbytes) else None
        # Counted so that the capture always has a slab to go on with.
        room = max(0, (self._arena.slots - RESERVED_SLABS) // 2 - 1)
        return StatisticsWorker(known[1], before, room)

    def _capture(self, work: CaptureJob, before: Before, statistics: StatisticsWorker | None) -> LastCapture:
        receivers, save_state, waited = work.receivers(), work.save_state, self._arena.waited

        def dispatch(batch: SlabChunks) -> None:
            for receiver in receivers:
                batch.slab.lease()
                receiver.feed(batch)
            batch.slab.release()

        def keep(rows: Array, digests: Array) -> None:
            for receiver in receivers:
                receiver.feed(UnchangedChunks(rows, digests))

        guarded = bool(work.plan.guarded.any())
        freed: Callable[[], None] | None = save_state.freed.set
        if work.snapped or not guarded:
            freed = partial(save_state.capture_ended, None)
        if work.handed_over is not None and not guarded:
            freed = None  # `save` returns when the other process has all of it
        sink = CaptureSink(dispatch, keep, freed, save_state.copies_queued, save_state.cancelled.is_set)
        digest = digest_function(save_state.head.digest)
        chunk, kept = save_state.head.chunk, (self._staging, statistics, self._streams)
        try:
            return Capture(work.plan, chunk, self._arena, digest, sink, before, *kept).run()
        finally:
            seconds = self._arena.waited - waited
            if seconds > 0 and save_state.when_full is not None:
                save_state.when_full(seconds)

    def _describe(self, work: CaptureJob, captured: LastCapture) -> Version | BaseException:
        """The version that was captured, or the error why there is none."""
        plan, head, last = work.plan, dataclasses.replace(work.save_state.head, parent=self.parent), self._version
        try:
            if last is not None and _alike(last, plan, head.chunk):
                version = last.again(head, captured.digests, captured.statistics)
            else:
                shards = plan.shards(self._rank or 0)
                version = Version.build(head, plan.leaves, shards, captured.digests, captured.statistics)
                if self._rank is None:
                    check_complete(version)
            encoded = version.id  # computing the id encodes the version, which may fail
        except BaseException as error:
            return _told(error)
        self._version, self._last_capture = version, captured
        if self._rank is None:
            self.parent = encoded
        if self._watch is not None:
            self._watch(version)
        return version


def _alike(last: Version, plan: CapturePlan, chunk: int) -> bool:
    """Whether the plan's leaves and shards are those of the last version."""
    return (
        last.head.chunk == chunk
        and _same(last.leaves, plan.leaves)
        and last.boxes == plan.boxes
        and np.array_equal(last.shard_leaf, plan.leaf)
    )


def _same(one: tuple[Leaf, ...], other: tuple[Leaf, ...]) -> bool:
    """Whether the leaves are identical objects. Equality is not enough: paths with 1 and with True are equal."""
    return one is other or (len(one) == len(other) and all(map(is_, one, other)))


def _told(error: BaseException) -> TierstateError:
    """The error that is reported to the caller of `save`: unexpected ones become a CaptureError."""
    return error if isinstance(error, TierstateError) else CaptureError(f"the capture failed: {error_text(error)}")
