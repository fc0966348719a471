"""Capture: copy the chunks of a state into slabs of the arena and digest them, while the state must not change.

`Capture` copies host memory with several threads and skips chunks that have not changed. `StreamedSources` gets chunks
from providers (device tensors, non-contiguous tensors, custom providers). Copies from a device run ahead, as far as the
arena has slabs, while threads digest what has arrived. `CaptureThread` runs one capture after the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from ctypes import c_ubyte, memmove, memset
from queue import Empty, SimpleQueue
from typing import NamedTuple, NoReturn

import numpy as np

from tierstate.engine.packs.slab_layout import BIG, BLOCK, SlabChunks, SlabPlan, fill_slabs
from tierstate.engine.publish.save_state import QueuedCopies
from tierstate.manifest.arrays import Array, digest_array
from tierstate.manifest.chunk import view
from tierstate.manifest.digest import DigestFunction, sample_hash
from tierstate.manifest.errors import CaptureError
from tierstate.tiers.concurrency import usable_cores
from tierstate.tiers.memory.arena import Arena, Slab
from tierstate.tiers.memory.cudart import relaxed_capture
from tierstate.tiers.memory.device_room import DeviceStaging
from tierstate.tiers.trace import span

from .chunk_statistics import StatisticsWorker
from .device_digests import DeviceDigests, Streams
from .plan import CapturePlan, LastCapture
from .streamed import COPIES_AT_ONCE, COPIES_QUEUED, SLABS_AHEAD, FilledSlab, Filling, StreamedSources

COPY_WORKERS = 4
"""The most threads that copy: with more, memory bandwidth is the limit."""


SEEN_AGAIN = 0.05
"""The share of the chunks digested by devices that must have been as in the save before, so that the next save looks
for unchanged chunks before it copies any: that takes a hundredth of a second, in which nothing crosses the bus."""


WORTH_A_THREAD = 32 << 20
"""Bytes to copy per thread, at least: with less, a thread costs more than it saves."""


class CaptureSink(NamedTuple):
    """Callbacks that receive the results of a capture.

    Attributes:
        dispatch: called with each filled slab and one lease, which it must release. Called from several threads.
        kept: called with rows and digests of chunks that have not changed and were not copied.
        unguarded_done: called when all that is not guarded has been copied; digests of it may follow. None: nobody
            waits for the copies alone.
        copies_queued: called when everything that is guarded was copied from host memory, and its copies from devices
            are queued.
        stop: polled; true cancels the capture.
    """

    dispatch: Callable[[SlabChunks], None]
    kept: Callable[[Array, Array], None] = lambda _rows, _digests: None
    unguarded_done: Callable[[], None] | None = None
    copies_queued: Callable[[QueuedCopies], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False


class Undigested:
    """Slabs that are copied, and digested only when all of them are: `save` waits for the copies alone.

    Digests and what publishes them take as long as the copies do, of the same cores and of the interpreter's lock.

    Args:
        workers: threads that copy.
        copied: called by the last of them, when all copies are done.
    """

    def __init__(self, workers: int, copied: Callable[[], None]) -> None:
        self._lock, self._copying, self._copied = threading.Lock(), workers, copied
        self._slabs: SimpleQueue[FilledSlab] = SimpleQueue()

    def put(self, slab: FilledSlab) -> None:
        """Add a slab, with its lease."""
        self._slabs.put(slab)

    def taken(self) -> Iterator[FilledSlab]:
        """Called by each thread that has no more to copy: the slabs that it is to digest, each with its lease."""
        with self._lock:
            self._copying -= 1
            last = not self._copying
        if last:
            self._copied()
        while (slab := self._next()) is not None:
            yield slab

    def _next(self) -> FilledSlab | None:
        try:
            return self._slabs.get_nowait()
        except Empty:
            return None

    def drop(self) -> None:
        """Release the slabs that nobody has digested, after a failure."""
        while (slab := self._next()) is not None:
            slab[0].release()


class Capture:
    """Copies one state into slabs.

    Host memory is copied by several threads, each a slab at a time; all other sources, such as device tensors, chunk by
    chunk by one thread. Guarded sources come last and are copied by one thread only, since training runs at that time.

    Args:
        plan: what to copy.
        chunk: chunk length in bytes.
        arena: gives the slabs.
        digest: the digest function.
        sink: receives the results.
        before: returns the digests of the last save, or None; called once, before most of the state is copied.
        staging: where short tensors of devices are gathered; kept by the caller from save to save.
        streams: on which devices compute digests; kept as well.
        statistics: finds out what is in the chunks, beside the capture.
    """

    def __init__(
        self,
        plan: CapturePlan,
        chunk: int,
        arena: Arena,
        digest: DigestFunction,
        sink: CaptureSink,
        before: Callable[[], LastCapture | None] = lambda: None,
        staging: DeviceStaging | None = None,
        statistics: StatisticsWorker | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._plan, self._chunk, self._arena = plan, chunk, arena
        self._statistics = statistics
        self._digest, self._sink = digest, sink
        counts = plan.counts(chunk)
        self._first = np.cumsum(counts) - counts
        chunks = int(counts.sum())
        self._before = before
        self._stood = LastCapture.nothing(plan.nbytes, chunks)
        self._digests, self._samples = np.zeros((chunks, 2), "<u8"), np.zeros(chunks, "<u8")
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._queued: QueuedCopies | None = None
        self._staging = staging or DeviceStaging()
        self._streams: Streams = {} if streams is None else streams
        self._on_device = DeviceDigests()
        self._by_devices: list[Array] = []
        self._undigested: Undigested | None = None

    def run(self) -> LastCapture:
        """Copy everything; guarded sources last.

        Returns:
            the digest of every row, to be compared with at the next save.

        Raises:
            CaptureError: a leaf could not be read; the message names it.
        """
        if not self._plan.guarded.any():
            self._look_back()
        self._copy_all(~self._plan.guarded, self._workers(), copied=self._sink.unguarded_done)
        if self._plan.guarded.any():
            self._look_back()
            self._check_memory()
            self._copy_all(self._plan.guarded, 1, self._all_queued)
            self._validate()
        return LastCapture(self._plan.nbytes, self._digests, self._samples, self._stood.likely, self._seen_again())

    def _seen_again(self) -> bool:
        """Whether enough of what devices have digested is as it was in the last save."""
        rows = np.concatenate([*self._by_devices, np.zeros(0, "i8")])
        same = (self._digests[rows] == self._stood.digests[rows]).all(axis=1)
        return bool(len(rows)) and float(same.mean()) >= SEEN_AGAIN

    def _check_memory(self) -> None:
        """Raises CaptureError if memory that is still to be read was freed; reading it would crash."""
        if self._plan.read_set is not None and (freed := self._plan.read_set.freed()):
            self._give_up(freed)

    def _all_queued(self) -> None:
        if self._plan.read_set is not None:
            self._queued = QueuedCopies(self._changed, [fence.copied() for fence in self._plan.fences])
            self._sink.copies_queued(self._queued)

    def _validate(self) -> None:
        """Raises CaptureError unless what was captured after `save` had returned is what it was at the call."""
        if self._queued is not None and (changed := self._queued.changed()):
            self._give_up(changed)

    def _changed(self) -> set[int]:
        """Leaves that were changed since the call of `save`."""
        read_set = self._plan.read_set
        assert read_set is not None
        settled = read_set.settle(self._stopped)
        return read_set.changed() or (set() if settled else self._differing() | read_set.changed())

    def _differing(self) -> set[int]:
        """Leaves of guarded sources in host memory that are not what was captured of them."""
        plan, chunk, found = self._plan, self._chunk, set()
        for source in np.flatnonzero(plan.guarded & (plan.address != 0)).tolist():
            nbytes, row = int(plan.nbytes[source]), int(self._first[source])
            for start in range(0, nbytes, chunk):
                memory = _memory_at(int(plan.address[source]) + start, min(chunk, nbytes - start))
                if self._digest(memory) != self._digests[row + start // chunk].tobytes():
                    found.add(int(plan.leaf[source]))
                    break
        return found

    def _give_up(self, leaves: set[int]) -> NoReturn:
        assert self._plan.read_set is not None
        raise self._plan.read_set.refuse([self._plan.leaves[leaf] for leaf in sorted(leaves)])

    def _look_back(self) -> None:
        # Takes a millisecond or two; so not while the caller waits for what is not guarded, which is little.
        self._stood = self._before() or self._stood

    def _workers(self) -> int:
        here = ~self._plan.guarded & (self._plan.address != 0)
        worth = int(self._plan.nbytes[here].sum()) // WORTH_A_THREAD
        return max(1, min(COPY_WORKERS, usable_cores(), worth))

    def _copy_all(
        self,
        which: Array,
        workers: int,
        then: Callable[[], None] = lambda: None,
        copied: Callable[[], None] | None = None,
    ) -> None:
        """Copy these sources.

        Args:
            workers: threads that copy host memory.
            then: called when the copies from devices are queued, and all others done.
            copied: called when all copies are done. If memory for all of them is ready, they are digested after that.
        """
        plan = self._plan
        sources = plan.in_order(np.flatnonzero(which & (plan.address != 0)))
        streamed = np.flatnonzero(which & (plan.address == 0))
        planned = list(fill_slabs(sources, plan.nbytes[sources], self._chunk, self._arena.slab_size))
        sizes = [slabful.end for slabful in planned]
        at_once = bool(len(streamed)) or not self._arena.has_ready(sizes)
        if at_once:
            self._arena.prepare_for(sizes)
        self._undigested = None if copied is None or at_once else Undigested(workers, copied)
        slabfuls = iter(planned)
        filled: SimpleQueue[list[Filling] | None] = SimpleQueue()
        digesting, started = range(0), list[threading.Thread]()
        try:
            self._begin(streamed)
            digesting = self._digest_threads(streamed)
            copying = (self._thread(self._work, slabfuls, "tierstate-copy") for _ in range(1, workers))
            beside = (self._thread(self._digest_all, filled, "tierstate-digest") for _ in digesting)
            for thread in (*copying, *beside):
                thread.start()
                started.append(thread)
            self._stream(streamed, filled.put if digesting else self._take)
            self._work(slabfuls)
            if not self._failures:
                then()
        except BaseException as error:
            self._failures.append(error)
        for _ in digesting:
            filled.put(None)
        for thread in started:
            thread.join()
        self._end_copies(filled)
        if copied is not None and at_once:
            copied()

    def _end_copies(self, filled: SimpleQueue[list[Filling] | None]) -> None:
        """Release what no thread took, as after a failure, which is raised then."""
        self._drop_all(filled)
        if self._undigested is not None:
            self._undigested.drop()
        if self._failures:
            self._on_device.settle()
            raise self._failures[0]

    @staticmethod
    def _drop_all(filled: SimpleQueue[list[Filling] | None]) -> None:
        """Release slabs that devices copy into: not all threads could be started."""
        while not filled.empty():
            for filling in filled.get() or ():
                filling.drop()

    @staticmethod
    def _thread(target: Callable[..., None], work: object, name: str) -> threading.Thread:
        return threading.Thread(target=target, args=(work,), name=name)

    def _begin(self, sources: Array) -> None:
        """Let devices begin with what they do beside their copies."""
        if len(sources):
            for fence in self._plan.fences:
                fence.follow()
        plan, first = self._plan, self._first
        self._on_device = DeviceDigests.queue(plan, sources, first, self._chunk, self._digest, self._streams)

    def _digest_threads(self, sources: Array) -> range:
        """Threads that digest what devices copy, while this thread queues more copies; none for a small state."""
        worth = (int(self._plan.nbytes[sources].sum()) - self._on_device.nbytes) // WORTH_A_THREAD
        return range(min(COPY_WORKERS, usable_cores(), worth) if self._plan.fences else 0)

    def _stream(self, sources: Array, take: Callable[[list[Filling]], None]) -> None:
        if len(sources):
            ahead, together = 0, 1
            if take == self._take:  # one thread does it all: enough if devices digest, and fewer threads use Python
                ahead, together = (COPIES_QUEUED, COPIES_AT_ONCE) if self._on_device.nbytes else (SLABS_AHEAD, 1)
            plan, arena = self._plan, self._arena
            streamed = StreamedSources(plan, self._chunk, arena, self._stopped, ahead, self._staging, together)
            with closing(streamed.run(sources, self._first, self._unchanged_on_devices())) as slabs:
                for fillings in slabs:
                    take(fillings)
            self._on_device.join()

    def _unchanged_on_devices(self) -> set[int]:
        """Rows of chunks on devices that have not changed since the last save: they need not cross the bus."""
        rows = self._on_device.rows()
        self._by_devices.append(rows)
        rows = rows[self._stood.likely[rows]]
        if not self._stood.seen_again or not len(rows):
            return set()
        found = np.array([self._on_device.of(row) for row in rows.tolist()])
        kept = rows[(found == self._stood.digests[rows]).all(axis=1)]
        self._digests[kept], self._samples[kept] = self._stood.digests[kept], self._stood.samples[kept]
        self._keep(kept)
        return set(kept.tolist())

    def _take(self, fillings: list[Filling]) -> None:
        """Digest and dispatch these slabs, once devices have copied into them. On an error the others are released."""
        left = deque(fillings)
        try:
            while left:
                self._give(*left.popleft().settled())
        finally:
            for filling in left:
                filling.drop()

    def _digest_all(self, filled: SimpleQueue[list[Filling] | None]) -> None:
        """Digest slab after slab, as their copies end. After a failure they are only released."""
        while (fillings := filled.get()) is not None:
            if self._failures:
                for filling in fillings:
                    filling.drop()
                continue
            try:
                with relaxed_capture():
                    self._take(fillings)
            except BaseException as error:
                self._failures.append(error)

    def _work(self, slabfuls: Iterator[SlabPlan]) -> None:
        """Copy slab after slab, until there are no more."""
        try:
            with relaxed_capture():
                for fence in self._plan.fences:
                    fence.synchronize()
            while True:
                with self._lock:
                    slabful = next(slabfuls, None)
                    if slabful is None:
                        break
                    if self._stopped():
                        raise CaptureError("the save was cancelled")
                    # Under the lock, so that slabs are acquired in the order of the slabfuls. Otherwise deadlock: a
                    # file writer may hold the slab of a later slabful and wait for an earlier one that gets no slab.
                    with span("wait for a slab"):
                        slab = self._arena.acquire(self._stopped, nbytes=slabful.end)
                self._copy(slabful, slab)
            if self._undigested is not None:
                self._digest_copied(self._undigested)
        except BaseException as error:
            self._failures.append(error)

    def _digest_copied(self, undigested: Undigested) -> None:
        for slab, *chunks in undigested.taken():
            if self._stopped():
                slab.release()
                raise CaptureError("the save was cancelled")
            self._give(slab, *chunks)

    def _stopped(self) -> bool:
        return bool(self._failures) or self._sink.stop()

    def _copy(self, slabful: SlabPlan, slab: Slab) -> None:
        try:
            slabful = self._without_unchanged(slabful)
            base, at = slab.buffer.data_ptr(), slabful.at
            address = self._plan.address[slabful.source] + slabful.start
            with span("copy", bytes=int(slabful.nbytes.sum())):
                for to, start, nbytes in zip(at.tolist(), address.tolist(), slabful.nbytes.tolist(), strict=True):
                    # memmove: a copy by memoryview would hold the GIL, and torch would start more threads.
                    memmove(base + to, start, nbytes)
        except BaseException:
            slab.release()
            raise
        if not len(at):
            slab.release()
        elif self._undigested is not None:
            self._undigested.put((slab, self._rows(slabful), at, slabful.nbytes))
        else:
            self._give(slab, self._rows(slabful), at, slabful.nbytes)

    def _without_unchanged(self, slabful: SlabPlan) -> SlabPlan:
        kept = self._unchanged(slabful)
        if not kept.any():
            return slabful
        self._keep(self._rows(slabful)[kept])
        return slabful.without(kept)

    def _keep(self, rows: Array) -> None:
        """Tell that these chunks are as they were in the last save."""
        if len(rows):
            self._sink.kept(rows, self._digests[rows])
            if self._statistics is not None:
                self._statistics.keep(rows)

    def _rows(self, slabful: SlabPlan) -> Array:
        rows: Array = self._first[slabful.source] + slabful.start // self._chunk
        return rows

    def _unchanged(self, slabful: SlabPlan) -> Array:
        """``(n,)`` of bool: chunks not changed since the last save. Compares the hash of a sample, then the digest."""
        kept = np.zeros(len(slabful.source), bool)
        rows = self._rows(slabful)
        for i in np.flatnonzero(self._stood.likely[rows] & (slabful.nbytes >= BIG)).tolist():
            row, nbytes = int(rows[i]), int(slabful.nbytes[i])
            memory = _memory_at(int(self._plan.address[slabful.source[i]] + slabful.start[i]), nbytes)
            if sample_hash(memory) == int(self._stood.samples[row]):
                kept[i] = self._digest(memory) == self._stood.digests[row].tobytes()
        self._digests[rows[kept]] = self._stood.digests[rows[kept]]
        self._samples[rows[kept]] = self._stood.samples[rows[kept]]
        return kept

    def _give(self, slab: Slab, rows: Array, at: Array, nbytes: Array) -> None:
        """Digest the chunks in a slab, then dispatch it. Releases the slab on an error."""
        try:
            with span("digest", bytes=int(nbytes.sum())):
                digests = self._finish(slab, rows, at, nbytes)
            self._digests[rows] = digests
            batch = SlabChunks(slab, rows, at, nbytes, digests)
            if self._statistics is not None:
                self._statistics.take(batch)
        except BaseException:
            slab.release()
            raise
        self._sink.dispatch(batch)

    def _finish(self, slab: Slab, rows: Array, at: Array, nbytes: Array) -> Array:
        if len(rows) == 1 and (found := self._on_device.of(int(rows[0]))) is not None:
            end = int(at[0] + nbytes[0])
            if end % BLOCK:
                memset(slab.buffer.data_ptr() + end, 0, -end % BLOCK)
            return found.reshape(1, 2)  # without a sample: what devices digest is compared there
        # Plain numbers: most slabs hold one chunk, for which each operation of NumPy takes longer than all of this.
        memory, digests, base = view(slab.buffer), [], slab.buffer.data_ptr()
        starts = at.tolist()
        for i, (row, start, length) in enumerate(zip(rows.tolist(), starts, nbytes.tolist(), strict=True)):
            end = start + length
            after = starts[i + 1] if i + 1 < len(starts) else -(-end // BLOCK) * BLOCK
            if after != end:
                memset(base + end, 0, after - end)
            chunk = memory[start:end]
            found = self._on_device.of(row)
            digests.append(self._digest(chunk) if found is None else found.tobytes())
            if length >= BIG:
                self._samples[row] = sample_hash(chunk)
        return digest_array(digests)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((c_ubyte * nbytes).from_address(address)).cast("B")
