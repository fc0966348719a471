"""Fetching: the chunks of a version, verified, each from the nearest tier that has it whole."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import Damaged, NotFound, TierError, TierstateError
from tierstate.manifest.layout import Layout, Place
from tierstate.manifest.version import Version

from .arena import Arena, Slab
from .base import Range
from .codecs import decode
from .shelf import Shelf

log = logging.getLogger("tierstate")

Sink = Callable[[int, Buffer, "Slab | None"], None]
"""Takes row, verified raw bytes, and the slab they lie in (to lease, if they are needed longer), or None."""


class Holding(NamedTuple):
    """One tier's copy of a version."""

    shelf: Shelf
    layout: Layout


class Read(NamedTuple):
    """One read: a run of an object, and which rows lie at which offsets of it.

    Attributes:
        holding: index of the tier's copy.
        start, stop: the run's bytes in the object.
        rows: per distinct place, the place and all rows whose chunk lies there.
    """

    holding: int
    start: int
    stop: int
    rows: tuple[tuple[Place, tuple[int, ...]], ...]


class Trouble(NamedTuple):
    """One chunk that one tier could not give."""

    tier: str
    row: int
    error: TierstateError


def read_plan(rows: Sequence[int], holdings: Sequence[Holding], limit: int) -> tuple[list[Read], list[int]]:
    """Which runs to read from where. Pure.

    Each row goes to the first holding that has it; runs are in order of object and offset, and places that follow
    each other are read together, up to ``limit`` bytes.

    Returns:
        The reads, and the rows that no holding has.
    """
    left, reads = np.asarray(rows, "i8"), []
    for index, holding in enumerate(holdings):
        layout = holding.layout
        here = left[layout.present[left]]
        left = left[~layout.present[left]]
        order = np.lexsort((layout.offset[here], layout.object[here]))
        reads += list(_runs(index, layout, here[order].tolist(), limit))
    return reads, left.tolist()


def _runs(index: int, layout: Layout, rows: list[int], limit: int) -> Iterator[Read]:
    """Rows in order of place, gathered into reads."""
    group: list[tuple[Place, tuple[int, ...]]] = []
    for row in rows:
        place = layout.place(row)
        assert place is not None
        if group and place == group[-1][0]:
            group[-1] = (place, (*group[-1][1], row))
            continue
        if group and not _joins(group[0][0], group[-1][0], place, limit):
            yield _read(index, group)
            group = []
        group.append((place, (row,)))
    if group:
        yield _read(index, group)


def _joins(first: Place, last: Place, place: Place, limit: int) -> bool:
    end = last.offset + last.stored
    return (
        place.object == last.object
        and 0 <= place.offset - end <= 4096
        and place.offset + place.stored - first.offset <= limit
    )


def _read(index: int, group: list[tuple[Place, tuple[int, ...]]]) -> Read:
    last = group[-1][0]
    return Read(index, group[0][0].offset, last.offset + last.stored, tuple(group))


class Fetch:
    """Reads rows of a version from its holdings, nearest first, and hands verified bytes to a sink.

    A chunk that one tier lacks, or has damaged, is read from the next one; ``troubles`` lists each such failure and
    ``mended`` is told the good bytes.

    Args:
        version: whose chunks.
        holdings: copies of it, nearest first.
        arena: where the bytes pass through.
        workers: reads in flight.
        mended: called with (index of the holding that failed, row, raw bytes).
    """

    def __init__(
        self,
        version: Version,
        holdings: Sequence[Holding],
        arena: Arena,
        *,
        workers: int = 1,
        mended: Callable[[int, int, Buffer], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._version, self._holdings, self._arena = version, holdings, arena
        self._digest = algorithm(version.head.digest)
        self._workers, self._mended, self._stop = workers, mended, stop
        self._lock = threading.Lock()
        self.troubles: list[Trouble] = []

    def run(self, rows: Sequence[int], sink: Sink) -> None:
        """Fetch these rows. The sink is called from worker threads, once per row, in no certain order.

        Raises:
            Damaged: a chunk is whole in no tier; the message names leaf, version and every tier's trouble.
        """
        reads, lost = read_plan(rows, self._holdings, self._arena.slab_size)
        if lost:
            raise self._nowhere(lost[0])
        if self._workers == 1 or len(reads) < 2:
            for read in reads:
                self._one(read, sink)
            return
        with ThreadPoolExecutor(self._workers, thread_name_prefix="tierstate-fetch") as pool:
            futures = [pool.submit(self._one, read, sink) for read in reads]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _one(self, read: Read, sink: Sink) -> None:
        holding = self._holdings[read.holding]
        size = read.stop - read.start
        # A version saved with larger chunks than today's policy has does not fit a slab: such a run has its own memory.
        slab = self._arena.acquire(self._stop, last=True) if size <= self._arena.slab_size else None
        try:
            out = slab.buffer[:size] if slab is not None else empty_buffer(size)
            try:
                holding.shelf.tier.read(read.rows[0][0].object, [Range(read.start, out)])
            except (Damaged, TierError) as error:
                self._apart(read, error, sink)
                return
            for place, rows in read.rows:
                stored = out[place.offset - read.start : place.offset - read.start + place.stored]
                try:
                    raw = self._verified(rows[0], place, stored)
                except Damaged as error:
                    self._elsewhere(read.holding, place, rows, error, sink)
                else:
                    self._give(rows, raw, slab if raw is stored else None, sink)
        finally:
            if slab is not None:
                slab.release()

    def _apart(self, read: Read, error: TierstateError, sink: Sink) -> None:
        """A run could not be read: what lies in its undamaged part is still worth having, place by place."""
        for place, rows in read.rows:
            try:
                if not isinstance(error, Damaged):
                    raise error
                raw = self._read_alone(read.holding, rows[0], place)
            except TierstateError as again:
                self._elsewhere(read.holding, place, rows, again, sink)
            else:
                self._give(rows, raw, None, sink)

    def _elsewhere(self, failed: int, place: Place, rows: tuple[int, ...], error: TierstateError, sink: Sink) -> None:
        """Look for one chunk where it was mended, then in the other tiers, and tell of what failed."""
        row = rows[0]
        name = self._holdings[failed].shelf.name
        if isinstance(error, (Damaged, NotFound)):
            self._holdings[failed].shelf.distrust(place.object)
        troubles = [Trouble(name, row, error)]
        for index, spot in self._other_places(failed, row):
            try:
                raw = self._read_alone(index, row, spot)
            except TierstateError as again:
                troubles.append(Trouble(self._holdings[index].shelf.name, row, again))
                continue
            self._note(troubles)
            if self._mended is not None and index != failed and not error.transient:
                self._mended(failed, row, raw)
            self._give(rows, raw, None, sink)
            return
        self._note(troubles)
        raise self._nowhere(row, troubles) from error

    def _other_places(self, failed: int, row: int) -> Iterator[tuple[int, Place]]:
        digest = self._version.digests[row].tobytes()
        for index in [failed, *range(failed), *range(failed + 1, len(self._holdings))]:
            shelf, layout = self._holdings[index]
            place = layout.place(row)
            if place is not None and index != failed:
                yield index, place
            try:
                mended = shelf.mended(digest) if place is not None else None
            except TierstateError as error:
                log.warning("%s: cannot tell what was mended: %s", shelf.name, error)
                continue
            if mended is not None:
                yield index, mended

    def _read_alone(self, index: int, row: int, place: Place) -> Buffer:
        # Rare, so a buffer of its own is better than a second slab, for which this worker might wait on itself.
        out = empty_buffer(place.stored)
        self._holdings[index].shelf.tier.read(place.object, [Range(place.offset, out)])
        return self._verified(row, place, out)

    def _verified(self, row: int, place: Place, stored: Buffer) -> Buffer:
        raw = decode(place.codec, stored, int(self._version.chunk_nbytes[row]))
        if self._digest(raw) != self._version.digests[row].tobytes():
            raise Damaged(
                f"{place.object} at byte {place.offset}: the chunk's digest is not the one it was saved under"
            )
        return raw

    @staticmethod
    def _give(rows: Iterable[int], raw: Buffer, slab: Slab | None, sink: Sink) -> None:
        for row in rows:
            sink(row, raw, slab)

    def _note(self, troubles: list[Trouble]) -> None:
        with self._lock:
            known = {trouble.tier for trouble in self.troubles}
            self.troubles += troubles
        for trouble in troubles:
            # One warning a tier: a lost pack is thousands of chunks. `troubles` has them all.
            level = logging.DEBUG if trouble.tier in known else logging.WARNING
            log.log(level, "%s: %s: %s", trouble.tier, self._leaf(trouble.row), trouble.error)

    def _leaf(self, row: int) -> str:
        return self._version.leaves[int(self._version.chunk_leaf[row])].name

    def _nowhere(self, row: int, troubles: Sequence[Trouble] = ()) -> Damaged:
        head = self._version.head
        told = "; ".join(f"{t.tier}: {t.error}" for t in troubles)
        tried = told or f"none of {', '.join(h.shelf.name for h in self._holdings) or 'the tiers'} has it"
        return Damaged(
            f"leaf {self._leaf(row)} of version {head.seq} (step {head.step}, {self._version.id[:12]}) "
            f"of run {head.run!r} is whole in no tier: {tried}"
        )
