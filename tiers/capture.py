"""Capture: a state's chunks copied out into slabs and digested, while the state holds still."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from ctypes import c_ubyte, memmove, memset
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import view
from tierstate.manifest.digest import Digest, sample
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.index import Array, as_array

from .arena import Arena, Slab
from .batch import Batch
from .packing import BIG, BLOCK, Slabful, pack
from .plan import Plan
from .standing import Standing
from .streamed import Streamed

WORKERS = 4
"""Threads that copy at most: memory is saturated by then."""

WORTH_A_THREAD = 32 << 20
"""Bytes of which each thread has at least so many to copy."""


class Outlet(NamedTuple):
    """Where a capture's outcome goes.

    Attributes:
        dispatch: takes each full slab, with one lease that is from then on the taker's. Called from several threads.
        kept: told rows and digests of chunks that have not changed and were not copied.
        unguarded_done: called when all that is not guarded has been copied, if there is more.
        stop: asked again and again.
    """

    dispatch: Callable[[Batch], None]
    kept: Callable[[Array, Array], None] = lambda _rows, _digests: None
    unguarded_done: Callable[[], None] = lambda: None
    stop: Callable[[], bool] = lambda: False


class Capture:
    """One state being copied out.

    What lies in host memory is copied by several threads, each a slab at a time; the rest, as from devices, is pulled
    chunk by chunk by one. What is guarded comes last and by one thread: training runs beside it.

    Args:
        plan: what to copy.
        chunk: chunk length in bytes.
        arena: where to.
        digest: the digest function.
        outlet: what becomes of it.
        before: gives what stood at the last save; asked once, before the bulk is copied.
    """

    def __init__(
        self,
        plan: Plan,
        chunk: int,
        arena: Arena,
        digest: Digest,
        outlet: Outlet,
        before: Callable[[], Standing | None] = lambda: None,
    ) -> None:
        self._plan, self._chunk, self._arena = plan, chunk, arena
        self._digest, self._outlet = digest, outlet
        counts = plan.counts(chunk)
        self._first = np.cumsum(counts) - counts
        chunks = int(counts.sum())
        self._before = before
        self._stood = Standing.nothing(plan.nbytes, chunks)
        self._digests, self._samples = np.zeros((chunks, 2), "<u8"), np.zeros(chunks, "<u8")
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def run(self) -> Standing:
        """Copy everything: what is not guarded first.

        Returns:
            what stands now, with the digest of every row.

        Raises:
            CaptureError: a leaf could not be read; the message names it.
        """
        if not self._plan.guarded.any():
            self._look_back()
        self._copy_all(~self._plan.guarded, self._workers())
        if self._plan.guarded.any():
            self._outlet.unguarded_done()
            self._look_back()
            self._copy_all(self._plan.guarded, 1)
        return Standing(self._plan.nbytes, self._digests, self._samples, self._stood.likely)

    def _look_back(self) -> None:
        # Not while a caller waits for the little that is not guarded: it takes a millisecond or two.
        self._stood = self._before() or self._stood

    def _workers(self) -> int:
        here = ~self._plan.guarded & (self._plan.address != 0)
        worth = int(self._plan.nbytes[here].sum()) // WORTH_A_THREAD
        return max(1, min(WORKERS, _cores(), worth))

    def _copy_all(self, which: Array, workers: int) -> None:
        plan = self._plan
        sources = plan.in_order(np.flatnonzero(which & (plan.address != 0)))
        slabfuls = pack(sources, plan.nbytes[sources], self._chunk, self._arena.slab_size)
        helpers = [
            threading.Thread(target=self._work, args=(slabfuls,), name=f"tierstate-copy-{i}") for i in range(1, workers)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in helpers:
                thread.start()
                started.append(thread)
            self._stream(np.flatnonzero(which & (plan.address == 0)))
            self._work(slabfuls)
        except BaseException as error:
            self._failures.append(error)
        for thread in started:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _stream(self, sources: Array) -> None:
        if len(sources):
            for fence in self._plan.fences:
                fence.follow()
            streamed = Streamed(self._plan, self._chunk, self._arena, self._stopped)
            with closing(streamed.run(sources, self._first)) as slabs:
                for slab, rows, at, nbytes in slabs:
                    self._give(slab, rows, at, nbytes)

    def _work(self, slabfuls: Iterator[Slabful]) -> None:
        """Copy slab after slab, until there are no more."""
        try:
            for fence in self._plan.fences:
                fence.synchronize()
            while True:
                with self._lock:
                    slabful = next(slabfuls, None)
                    if slabful is None:
                        return
                    if self._stopped():
                        raise CaptureError("the save was cancelled")
                    # In the order of the slabfuls: who waits for an earlier one, holding a later one, waits for
                    # somebody who has his slab.
                    slab = self._arena.acquire(self._stopped)
                self._copy(slabful, slab)
        except BaseException as error:
            self._failures.append(error)

    def _stopped(self) -> bool:
        return bool(self._failures) or self._outlet.stop()

    def _copy(self, slabful: Slabful, slab: Slab) -> None:
        try:
            slabful = self._without_unchanged(slabful)
            base, at = slab.buffer.data_ptr(), slabful.at
            address = self._plan.address[slabful.source] + slabful.start
            for to, start, nbytes in zip(at.tolist(), address.tolist(), slabful.nbytes.tolist(), strict=True):
                # Neither memoryview (which would keep other threads from running) nor torch (which would use more).
                memmove(base + to, start, nbytes)
        except BaseException:
            slab.release()
            raise
        if len(at):
            self._give(slab, self._rows(slabful), at, slabful.nbytes)
        else:
            slab.release()

    def _without_unchanged(self, slabful: Slabful) -> Slabful:
        kept = self._unchanged(slabful)
        if not kept.any():
            return slabful
        rows = self._rows(slabful)[kept]
        self._outlet.kept(rows, self._digests[rows])
        return slabful.without(kept)

    def _rows(self, slabful: Slabful) -> Array:
        rows: Array = self._first[slabful.source] + slabful.start // self._chunk
        return rows

    def _unchanged(self, slabful: Slabful) -> Array:
        """``(n,)`` of bool: chunks that are as they were at the last save; a sample says which are worth a look."""
        kept = np.zeros(len(slabful.source), bool)
        rows = self._rows(slabful)
        for i in np.flatnonzero(self._stood.likely[rows] & (slabful.nbytes >= BIG)).tolist():
            row, nbytes = int(rows[i]), int(slabful.nbytes[i])
            memory = _memory_at(int(self._plan.address[slabful.source[i]] + slabful.start[i]), nbytes)
            if sample(memory) == int(self._stood.samples[row]):
                kept[i] = self._digest(memory) == self._stood.digests[row].tobytes()
        self._digests[rows[kept]] = self._stood.digests[rows[kept]]
        self._samples[rows[kept]] = self._stood.samples[rows[kept]]
        return kept

    def _give(self, slab: Slab, rows: Array, at: Array, nbytes: Array) -> None:
        """Digest what is in a slab, and hand it on."""
        try:
            digests = self._finish(slab, rows, at, nbytes)
            self._digests[rows] = digests
        except BaseException:
            slab.release()
            raise
        self._outlet.dispatch(Batch(slab, rows, at, nbytes, digests))

    def _finish(self, slab: Slab, rows: Array, at: Array, nbytes: Array) -> Array:
        memory, digests = view(slab.buffer), []
        ends = at + nbytes
        gaps = np.append(at[1:], -(-ends[-1:] // BLOCK) * BLOCK) - ends
        base = slab.buffer.data_ptr()
        for i in np.flatnonzero(gaps).tolist():
            memset(base + int(ends[i]), 0, int(gaps[i]))
        for start, end in zip(at.tolist(), ends.tolist(), strict=True):
            digests.append(self._digest(memory[start:end]))
        for i in np.flatnonzero(nbytes >= BIG).tolist():
            self._samples[rows[i]] = sample(memory[at[i] : ends[i]])
        return as_array(digests)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((c_ubyte * nbytes).from_address(address)).cast("B")
