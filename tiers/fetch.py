"""Fetching: the chunks of a version, verified, each from the nearest tier that has it whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import Buffer, Event
from tierstate.manifest.columns import Array
from tierstate.manifest.errors import CaptureError, Damaged, TierError, TierstateError
from tierstate.manifest.layout import RAW, Layout
from tierstate.manifest.version import Version

from .arena import Arena, Slab
from .base import Range
from .landing import Landing
from .pages import map_pages
from .readplan import Extent, Grain, Reads, Spot, plan_reads
from .rescue import Holding, Mended, Rescue, Trouble, wrong

__all__ = ["Fetch", "Holding", "Sink", "Trouble"]

Sink = Callable[[int, Buffer, "Slab | None"], None]
"""Takes row, verified raw bytes, and the slab they lie in (to lease, if they are needed longer), or None."""

Lost = Callable[[int, Damaged], None]

Give = Callable[[int, Buffer, "Slab | None"], "Event | None"]

IN_PLACE_FROM = 256 << 10
"""Bytes of a chunk from which on it is worth a transfer of its own, straight to its destination."""

REQUEST = 16 << 20
"""Bytes that are asked for at once where no slab is the limit: enough to keep a disk busy."""

LARGE = 2
"""Runs at once that are longer than a slab, and have memory of their own."""


class Run(NamedTuple):
    """One request to a tier: the index of its holding, and which run of its reads."""

    holding: int
    reads: Reads
    number: int


class Fetch:
    """Reads rows of a version from its holdings, nearest first, and hands on verified bytes.

    A chunk that one tier lacks, or has damaged, is read from the next one; ``troubles`` lists each such failure and
    ``mended`` is told the good bytes.

    Args:
        version: whose chunks.
        holdings: copies of it, nearest first.
        arena: where bytes pass through that cannot go straight to their destination.
        workers: reads in flight.
        mended: called with (index of the holding that failed, row, raw bytes).
        stop: asked before each request and while waiting for a slab; true gives up.
        lost: told of each row that is whole nowhere, which is then left out; without it that is an error.
    """

    def __init__(
        self,
        version: Version,
        holdings: Sequence[Holding],
        arena: Arena,
        *,
        workers: int = 1,
        mended: Mended | None = None,
        stop: Callable[[], bool] = lambda: False,
        lost: Lost | None = None,
    ) -> None:
        self._version, self._holdings, self._arena = version, holdings, arena
        self._lost = lost
        self._workers, self._stop = workers, stop
        self._rescue = Rescue(version, holdings, mended)
        self._large = threading.BoundedSemaphore(LARGE)
        # Not all workers at once: the first one's read is to begin soon, and the others find it under way.
        self._touching = threading.BoundedSemaphore(os.cpu_count() or 1)

    @property
    def troubles(self) -> list[Trouble]:
        """Each chunk that a tier could not give."""
        return self._rescue.troubles

    @property
    def slab_size(self) -> int:
        """Bytes that are read into one slab."""
        return self._arena.slab_size

    def run(self, rows: Sequence[int], sink: Sink) -> None:
        """Fetch these rows. The sink is called from worker threads, once per row, in no certain order.

        Raises:
            Damaged: a chunk is whole in no tier; the message names leaf, version and every tier's trouble.
        """

        def give(row: int, raw: Buffer, slab: Slab | None) -> None:
            sink(row, raw, slab)

        self._all(self._plan(np.asarray(rows, "i8"), None), give, None)

    def fill(self, rows: Array, landing: Landing) -> None:
        """Fetch these rows to where they belong.

        What is read straight into its destination is verified there: after an error the destinations may hold
        anything.

        Raises:
            Damaged: as for `run`.
        """
        runs = self._plan(np.asarray(rows, "i8"), landing)
        self._all(runs, lambda row, raw, _slab: landing.give(row, raw), landing)

    def _plan(self, rows: Array, landing: Landing | None) -> list[Run]:
        """Requests in order of holding, object and offset. Each row is read from the first holding that has it."""
        version, runs, left = self._version, [], rows
        for index, (shelf, layout) in enumerate(self._holdings):
            here = left[layout.present[left]]
            left = left[~layout.present[left]]
            traits = shelf.tier.traits
            grain = Grain(traits.alignment, traits.memory_alignment)
            direct = np.zeros(len(here), bool) if landing is None else self._direct(layout, here, landing, grain)
            content = np.column_stack([version.digests[here], version.chunk_nbytes[here].astype("u8")])
            slab = self._arena.slab_size
            found = plan_reads(layout, here, content, direct, grain, slab, max(REQUEST, slab))
            these = [Run(index, reads, i) for reads in found for i in range(len(reads))]
            runs += sorted(these, key=lambda run: run.reads.order(run.number))
        for row in left.tolist():
            self._give_up([row], self._rescue.nowhere(row))
        return runs

    def _give_up(self, rows: Sequence[int], error: Damaged) -> None:
        if self._lost is None:
            raise error
        for row in rows:
            self._lost(row, error)

    @staticmethod
    def _direct(layout: Layout, rows: Array, landing: Landing, grain: Grain) -> Array:
        """Which rows can be read to their destination as they are stored."""
        raw = np.array([codec == RAW for codec in layout.codecs], bool)[layout.codec[rows]]
        address = landing.address[rows]
        aligned = (address % grain.memory == 0) & (layout.offset[rows].astype("i8") % grain.offset == 0)
        chosen: Array = raw & aligned & (address > 0) & (layout.stored[rows] >= IN_PLACE_FROM)
        return chosen

    def _all(self, runs: Sequence[Run], give: Give, landing: Landing | None) -> None:
        if self._workers == 1:
            for run in runs:
                self._one(run, give, landing)
            return
        # Also for a single run: an interrupt then ends the waiting here, and no transfer into memory that is in use.
        workers = max(1, min(self._workers, len(runs)))
        with ThreadPoolExecutor(workers, thread_name_prefix="tierstate-fetch") as pool:
            futures = [pool.submit(self._one, run, give, landing) for run in runs]
            try:
                _results(futures)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _one(self, run: Run, give: Give, landing: Landing | None) -> None:
        pending: list[tuple[Event, Buffer]] = []
        if self._stop():
            raise CaptureError("given up: the save was cancelled")
        with self._room(run.reads.room(run.number)) as (slab, memory):
            try:
                for row, raw, lease in self._chunks(run, memory, slab, landing):
                    event = give(row, raw, lease)
                    if event is not None:
                        pending.append((event, raw))
            finally:
                # Copies to devices run beside the reads of other workers; the slab is theirs until they are over.
                for event, _ in pending:
                    event.synchronize()

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[tuple[Slab | None, Buffer | None]]:
        """Memory for a run: a slab, or its own where a version has larger chunks than today's policy, or none."""
        if not nbytes:
            yield None, None
        elif nbytes > self._arena.slab_size:
            with self._large:
                yield None, map_pages(nbytes)
        else:
            slab = self._arena.acquire(self._stop, last=True)
            try:
                with self._touching:
                    slab.prepare()
                yield slab, slab.buffer
            finally:
                slab.release()

    def _chunks(
        self, run: Run, memory: Buffer | None, slab: Slab | None, landing: Landing | None
    ) -> Iterator[tuple[int, Buffer, Slab | None]]:
        """The verified chunks of a run, except those that lie in their destination already."""
        extents = list(run.reads.extents(run.number))
        if memory is None:
            assert landing is not None
            buffers = self._destinations(extents, landing)
            parts: Iterable[Buffer] = buffers
        else:
            buffers = [memory[at : at + stop - start] for start, stop, at, _ in extents]
            parts = (memory[spot.at : spot.at + spot.stored] for spot in run.reads.spots(run.number))
        failure = self._read(run, buffers)
        for spot, stored in zip(run.reads.spots(run.number), parts, strict=True):
            raw = self._verified(run, spot, stored, failure)
            if raw is None:
                continue
            arrived = memory is None and raw is stored
            for row in spot.rows[1:] if arrived else spot.rows:
                yield row, raw, slab if raw is stored else None

    def _destinations(self, extents: Sequence[Extent], landing: Landing) -> list[Buffer]:
        with self._touching:
            for extent in extents:
                landing.touch(extent.row)
        return [landing.memory(extent.row) for extent in extents]

    def _read(self, run: Run, buffers: Sequence[Buffer]) -> TierstateError | None:
        starts = (extent.start for extent in run.reads.extents(run.number))
        ranges = [Range(start, out) for start, out in zip(starts, buffers, strict=True)]
        try:
            self._holdings[run.holding].shelf.tier.read(run.reads.key(run.number), ranges)
        except (Damaged, TierError) as error:
            return error
        return None

    def _verified(self, run: Run, spot: Spot, stored: Buffer, failure: TierstateError | None) -> Buffer | None:
        """A chunk's raw bytes: ``stored`` itself, or from elsewhere; None where it was given up."""
        row, layout = spot.rows[0], run.reads.layout
        try:
            if failure is None:
                raw = self._rescue.verified(run.holding, row, layout.codecs[spot.codec], stored)
                if raw is not None:
                    return raw
            place = layout.place(row)
            assert place is not None
            if failure is None:
                raise wrong(place)
            if not isinstance(failure, Damaged):
                raise failure
            # A run could not be read: what lies in its undamaged part is still worth having, place by place.
            return self._rescue.alone(run.holding, row, place)
        except TierstateError as error:
            return self._elsewhere(run.holding, spot.rows, error)

    def _elsewhere(self, holding: int, rows: Sequence[int], error: TierstateError) -> Buffer | None:
        try:
            return self._rescue.elsewhere(holding, rows[0], error)
        except Damaged as nowhere:
            self._give_up(rows, nowhere)
            return None


def _results(futures: Sequence[Future[None]]) -> None:
    """Wait for all, or for the first that fails."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
