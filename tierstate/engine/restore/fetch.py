"""Fetch the chunks of a version and verify them, each from the nearest tier that has it undamaged.

A chunk that is missing or damaged in one tier is read from the next tier (`FallbackReader`), and written again to the
first one in a new pack (`RepairWriter`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from tierstate.engine.codecs.codecs import decompress
from tierstate.engine.packs.keys import MEND
from tierstate.engine.packs.pack import FooterRow, PackWriter
from tierstate.engine.packs.slab_layout import BIG
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.store.catalog import LOOK_FURTHER, Holding
from tierstate.engine.store.delta_base import WrongBase, undo_delta
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, Event, empty_buffer, to_bytes, view
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import (
    CaptureError,
    Damaged,
    NotFound,
    TierError,
    TierstateError,
    Unreadable,
    cannot_be_asked,
    untrusted,
)
from tierstate.manifest.format.layout import DELTA, RAW, ChunkPlace, Layout, stored_as
from tierstate.manifest.format.version import Version
from tierstate.tiers.base import IoAlignment, Range
from tierstate.tiers.concurrency import run_concurrently
from tierstate.tiers.memory.arena import Arena, Slab
from tierstate.tiers.memory.memcpy import SHORT_COPY
from tierstate.tiers.memory.pages import map_pages
from tierstate.tiers.trace import span

from .read_plan import Extent, ReadPlan, StoredChunk, plan_reads
from .scatter import ScatterTargets
from .short_uploads import ShortUploads

log = logging.getLogger("tierstate")


ChunkSink = Callable[[int, Buffer, "Slab | None"], None]
"""Called with a row, its verified raw bytes, and their slab (to lease if the bytes are needed longer) or None."""


OnLost = Callable[[int, Damaged | Unreadable], None]
"""Called with a row that could be read undamaged from no tier, and the error."""


_Deliver = Callable[[int, Buffer, "Slab | None"], "Event | None"]


IN_PLACE_FROM = 256 << 10
"""Bytes of the shortest chunk that is read directly to its destination; shorter ones are read together into slabs."""


REQUEST = 16 << 20
"""Bytes of one request that needs no slab: enough to keep a disk busy."""


MAX_LARGE = 2
"""The most requests at once that are longer than a slab and so have memory of their own."""


class ReadRequest(NamedTuple):
    """One request to a tier: the index of the holding, the read plan, and the number of the run in the plan."""

    holding: int
    reads: ReadPlan
    number: int


class Fetch:
    """Reads rows of a version from its holdings, nearest first, verifies them and passes them on.

    A chunk that is missing or damaged in one tier is read from the next one; ``troubles`` lists each such failure, and
    ``mended`` is called with the good bytes.

    Args:
        version: the version.
        holdings: its copies in the tiers, nearest first.
        arena: gives slabs for bytes that cannot be read directly to their destination.
        workers: number of reads at once.
        mended: called with (index of the holding that failed, row, raw bytes), for the repair.
        stop: called before each request and while waiting for a slab; true cancels.
        lost: called with each row that no tier has undamaged, and the error. Without it the error is raised.
    """

    def __init__(
        self,
        version: Version,
        holdings: Sequence[Holding],
        arena: Arena,
        *,
        workers: int = 1,
        mended: OnRepair | None = None,
        stop: Callable[[], bool] = lambda: False,
        lost: OnLost | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self._version, self._holdings, self._arena = version, holdings, arena
        self._lost, self._progress = lost, progress
        self._workers, self._stop = workers, stop
        self._fallback = FallbackReader(version, holdings, mended)
        self._large = threading.BoundedSemaphore(MAX_LARGE)
        # Fewer workers than reads fault in pages at once, so that the first read can start soon.
        self._touching = threading.BoundedSemaphore(os.cpu_count() or 1)

    @property
    def troubles(self) -> list[ReadFailure]:
        """Each failure to read a chunk from a tier."""
        return self._fallback.troubles

    @property
    def slab_size(self) -> int:
        """Bytes of a slab: the most that one request reads into it."""
        return self._arena.slab_size

    def run(self, rows: Sequence[int], sink: ChunkSink) -> None:
        """Fetch these rows. Calls the sink from worker threads, once per row, in any order.

        Raises:
            Damaged: no tier has a chunk undamaged; the message names the leaf, the version and each tier's error.
            Unreadable: a tier that has a chunk cannot be asked now, and no other tier has it undamaged.
        """

        def give(row: int, raw: Buffer, slab: Slab | None) -> None:
            sink(row, raw, slab)

        self._all(self._plan(np.asarray(rows, "i8"), None), give, None)

    def leaves(self, leaves: Sequence[int]) -> dict[int, bytes]:
        """Fetch leaves that were saved in one piece, such as plain values; returns their bytes by index of the leaf.

        Raises:
            Damaged, Unreadable: as `run`.
        """
        version = self._version
        found = {i: bytearray(version.leaves[i].spec.nbytes) for i in leaves}

        def take(row: int, raw: Buffer, _slab: object) -> None:
            start = int(version.chunk_start[row])
            found[int(version.chunk_leaf[row])][start : start + raw.numel()] = to_bytes(raw)

        self.run(version.rows_of(leaves).tolist(), take)
        return {i: bytes(data) for i, data in found.items()}

    def fill(self, rows: Array, targets: ScatterTargets) -> None:
        """Fetch these rows into their destinations.

        Bytes that are read directly into a destination are verified there: after an error the destinations may have
        any content.

        Raises:
            Damaged: as for `run`.
        """
        runs = self._plan(np.asarray(rows, "i8"), targets)
        self._all(runs, lambda row, raw, _slab: targets.give(row, raw), targets)

    def _plan(self, rows: Array, targets: ScatterTargets | None) -> list[ReadRequest]:
        """Requests in order of holding, object and offset. Each row is read from the first holding that has it."""
        version, runs, left = self._version, [], rows
        for index, (tier_run, layout) in enumerate(self._holdings):
            here = left[layout.present[left]]
            left = left[~layout.present[left]]
            traits = tier_run.tier.traits
            grain = IoAlignment(traits.alignment, traits.memory_alignment)
            direct = np.zeros(len(here), bool) if targets is None else self._direct(layout, here, targets, grain)
            content = np.column_stack([version.digests[here], version.chunk_nbytes[here].astype("u8")])
            slab = self._arena.slab_size
            found = plan_reads(layout, here, content, direct, grain, slab, max(REQUEST, slab))
            these = [ReadRequest(index, reads, i) for reads in found for i in range(len(reads))]
            runs += sorted(these, key=lambda run: run.reads.order(run.number))
        for row in left.tolist():
            self._give_up([row], self._fallback.nowhere(row))
        return runs

    def _give_up(self, rows: Sequence[int], error: Damaged | Unreadable) -> None:
        if self._lost is None:
            raise error
        for row in rows:
            self._lost(row, error)

    @staticmethod
    def _direct(layout: Layout, rows: Array, targets: ScatterTargets, grain: IoAlignment) -> Array:
        """``(n,)`` of bool: rows stored raw that can be read directly into their destination, given the alignment."""
        raw = stored_as(RAW, layout.codecs)[layout.codec[rows]]
        address = targets.address[rows]
        aligned = (address % grain.memory == 0) & (layout.offset[rows].astype("i8") % grain.offset == 0)
        chosen: Array = raw & aligned & (address > 0) & (layout.stored[rows] >= IN_PLACE_FROM)
        return chosen

    def _all(self, runs: Sequence[ReadRequest], give: _Deliver, targets: ScatterTargets | None) -> None:
        if self._workers == 1:
            for run in runs:
                self._one(run, give, targets)
            return
        # As much memory as these reads need, and no more: the first touch of it costs more than a read into it.
        slabs = sum(0 < run.reads.room(run.number) <= self._arena.slab_size for run in runs)
        self._arena.prepare(min(self._workers, slabs) * self._arena.slab_size)
        # Threads even for a single run: an interrupt then ends only this wait, and not a transfer into memory.
        run_concurrently(lambda run: self._one(run, give, targets), runs, self._workers, "tierstate-fetch", apart=True)

    def _one(self, run: ReadRequest, give: _Deliver, targets: ScatterTargets | None) -> None:
        pending: list[tuple[Event, Buffer]] = []
        if self._stop():
            raise CaptureError("given up: the save was cancelled")
        with self._room(run.reads.room(run.number)) as (slab, memory):
            try:
                for row, raw, lease in self._chunks(run, memory, slab, targets, pending):
                    event = give(row, raw, lease)
                    if event is not None:
                        pending.append((event, raw))
            finally:
                # Copies to devices are asynchronous: the slab must not be released before they are complete.
                for event, _ in pending:
                    event.synchronize()

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[tuple[Slab | None, Buffer | None]]:
        """Memory for a run: a slab; memory of its own if the version has chunks longer than a slab; or none."""
        if not nbytes:
            yield None, None
        elif nbytes > self._arena.slab_size:
            with self._large:
                with untrusted("a chunk", named=False):
                    pages = map_pages(nbytes)
                yield None, pages
        else:
            slab = self._arena.acquire(self._stop, last=True)
            try:
                with self._touching:
                    slab.prepare()
                yield slab, slab.buffer
            finally:
                slab.release()

    def _chunks(
        self,
        run: ReadRequest,
        memory: Buffer | None,
        slab: Slab | None,
        targets: ScatterTargets | None,
        pending: list[tuple[Event, Buffer]],
    ) -> Iterator[tuple[int, Buffer, Slab | None]]:
        """Read a run and yield its verified chunks, except those that are in their destination already, or on the way
        there: ``pending`` gets the events of their copies.
        """
        extents = list(run.reads.extents(run.number))
        if memory is None:
            assert targets is not None
            buffers = self._destinations(extents, targets)
        else:
            buffers = [memory[at : at + stop - start] for start, stop, at, _ in extents]
        failure = self._read(run, buffers)
        spots: Iterable[StoredChunk] = run.reads.spots(run.number)
        if memory is not None and targets is not None and failure is None:
            spots = self._fill_short(run, memory, targets, pending)
        for number, spot in enumerate(spots):
            stored = buffers[number] if memory is None else memory[spot.at : spot.at + spot.stored]
            raw = self._verified(run, spot, stored, failure)
            if raw is None:
                continue
            self._progress(len(raw) * len(spot.rows))
            arrived = memory is None and raw is stored
            for row in spot.rows[1:] if arrived else spot.rows:
                yield row, raw, slab if raw is stored else None

    def _fill_short(
        self, run: ReadRequest, memory: Buffer, targets: ScatterTargets, pending: list[tuple[Event, Buffer]]
    ) -> list[StoredChunk]:
        """Verify and copy the short chunks that are stored raw and go to host memory or to CUDA devices, in one loop
        without buffers of their own, which cost several times what the bytes cost. Returns the others, and those with a
        wrong digest.
        """
        plain = [codec == RAW for codec in run.reads.layout.codecs]
        data, base, left, filled = view(memory), memory.data_ptr(), [], 0
        uploads, matches = ShortUploads(memory, self._arena.staging, pending), self._fallback.matches
        with targets.said(), span("verify") as verify:
            for spot in run.reads.spots(run.number):
                rows, stored, codec, at = spot
                raw, there = plain[codec] and stored < BIG, None
                here = raw and stored < SHORT_COPY and targets.in_memory(rows)
                if raw and not here:
                    there = targets.on_devices(rows)
                if not (here or there) or not matches(rows[0], data[at : at + stored]):
                    left.append(spot)
                    continue
                if there is None:
                    targets.copy(rows, base + at)
                else:
                    uploads.add(at, at + stored, there)
                filled += stored * len(rows)
            uploads.flush()
            verify.also(bytes=filled)
        self._progress(filled)
        return left

    def _destinations(self, extents: Sequence[Extent], targets: ScatterTargets) -> list[Buffer]:
        with self._touching:
            for extent in extents:
                targets.touch(extent.row)
        return [targets.memory(extent.row) for extent in extents]

    def _read(self, run: ReadRequest, buffers: Sequence[Buffer]) -> TierstateError | None:
        starts = (extent.start for extent in run.reads.extents(run.number))
        ranges = [Range(start, out) for start, out in zip(starts, buffers, strict=True)]
        try:
            self._holdings[run.holding].tier_run.tier.read(run.reads.key(run.number), ranges)
        except (Damaged, TierError) as error:
            return error
        return None

    def _verified(
        self, run: ReadRequest, spot: StoredChunk, stored: Buffer, failure: TierstateError | None
    ) -> Buffer | None:
        """The verified raw bytes of a chunk: from ``stored``, or from another place or tier; None if it is lost."""
        row, layout = spot.rows[0], run.reads.layout
        try:
            if failure is None:
                with span("verify", bytes=len(stored)):
                    raw = self._fallback.sound(run.holding, row, layout.codecs[spot.codec], stored)
                if raw is not None:
                    return raw
            elif not isinstance(failure, Damaged):
                raise failure
            place = layout.place(row)
            assert place is not None
            # Again, by itself: one damaged part made the whole run fail, or a byte was flipped on the way.
            return self._fallback.alone(run.holding, row, place)
        except TierstateError as error:
            return self._elsewhere(run.holding, spot.rows, error)

    def _elsewhere(self, holding: int, rows: Sequence[int], error: TierstateError) -> Buffer | None:
        try:
            return self._fallback.elsewhere(holding, rows[0], error)
        except (Damaged, Unreadable) as nowhere:
            self._give_up(rows, nowhere)
            return None


OnRepair = Callable[[int, int, Buffer], None]
"""Called with the index of the holding that failed, the row, and the good raw bytes."""


class ReadFailure(NamedTuple):
    """One failure to read a chunk from a tier: the tier's name, the row, the error."""

    tier: str
    row: int
    error: TierstateError


class FallbackReader:
    """Verifies chunks, and reads those that fail from another place or another tier. Thread-safe.

    Args:
        version, holdings, mended: as for `Fetch`.

    Attributes:
        troubles: every failure so far.
    """

    def __init__(self, version: Version, holdings: Sequence[Holding], mended: OnRepair | None) -> None:
        self._version, self._holdings, self._mended = version, holdings, mended
        self._digest = digest_function(version.head.digest)
        self._digests = version.digests.tobytes()
        self._nbytes = version.chunk_nbytes
        self._lock = threading.Lock()
        self.troubles: list[ReadFailure] = []

    def verified(self, index: int, row: int, codec: str, stored: Buffer) -> Buffer | None:
        """Decode a chunk of the holding ``index`` and compare its digest; None if the digest is wrong.

        Returns ``stored`` itself if the codec is raw.

        Raises:
            Damaged: the stored bytes cannot be decoded to this chunk.
            TierError: its delta base could not be read.
        """
        nbytes = int(self._nbytes[row])
        with untrusted("a chunk", named=False):
            if codec == DELTA:
                tier_run, layout = self._holdings[index]
                raw = undo_delta(tier_run, layout.base(row), stored, nbytes, self._digest)
            else:
                raw = decompress(codec, stored, nbytes)
        return raw if self._digest(raw) == self._digests[16 * row : 16 * row + 16] else None

    def matches(self, row: int, raw: memoryview) -> bool:
        """Whether these are the raw bytes of a chunk."""
        return len(raw) == self._nbytes[row] and self._digest(raw) == self._digests[16 * row : 16 * row + 16]

    def sound(self, index: int, row: int, codec: str, stored: Buffer) -> Buffer | None:
        """As `verified`, but None also if the bytes cannot be decoded."""
        try:
            return self.verified(index, row, codec, stored)
        except Damaged:
            return None

    def alone(self, index: int, row: int, place: ChunkPlace) -> Buffer:
        """Read and verify one chunk by itself, at ``place`` in the holding ``index``.

        It is read twice before it is called damaged, since bytes may be damaged on the way.

        Raises:
            Damaged, TierError
        """
        # A buffer of its own: this is rare, and waiting for a second slab while holding one could be a deadlock.
        with untrusted("a chunk", named=False):
            out = empty_buffer(place.stored)
        tier = self._holdings[index].tier_run.tier
        tier.read(place.object, [Range(place.offset, out)])
        raw = self.sound(index, row, place.codec, out)
        if raw is None:
            out = empty_buffer(place.stored)  # the first one may be part of an error or in use by a codec
            tier.read(place.object, [Range(place.offset, out)])
            raw = self.verified(index, row, place.codec, out)
        if raw is None:
            raise wrong_digest(place)
        return raw

    def elsewhere(self, failed: int, row: int, error: TierstateError) -> Buffer:
        """Read one chunk from its repaired copy or from the other tiers. Notes the failures and starts a repair.

        Args:
            failed: index of the holding that failed.
            row: the chunk's row.
            error: why it failed.

        Raises:
            Damaged: no tier has it undamaged; the message names the leaf, the version and each tier's error.
            Unreadable: a tier that has it cannot be asked now, and no other one has it undamaged.
        """
        place = self._holdings[failed].layout.place(row)
        tier_run = self._holdings[failed].tier_run
        if place is not None and isinstance(error, (Damaged, NotFound)) and not isinstance(error, WrongBase):
            tier_run.distrust(place.object)
        troubles = [ReadFailure(tier_run.name, row, error)]
        for index, spot in self._other_places(failed, row):
            try:
                raw = self.alone(index, row, spot)
            except TierstateError as again:
                troubles.append(ReadFailure(self._holdings[index].tier_run.name, row, again))
                continue
            self._note(troubles)
            if self._mended is not None and index != failed and not error.transient:
                self._mended(failed, row, raw)
            return raw
        self._note(troubles)
        raise self.nowhere(row, troubles) from error

    def _other_places(self, failed: int, row: int) -> Iterator[tuple[int, ChunkPlace]]:
        digest = self._digests[16 * row : 16 * row + 16]
        for index in [failed, *range(failed), *range(failed + 1, len(self._holdings))]:
            tier_run, layout = self._holdings[index]
            place = layout.place(row)
            if place is not None and index != failed:
                yield index, place
            try:
                mended = tier_run.mended(digest) if place is not None else None
            except TierstateError as error:
                log.warning("%s: cannot tell what was mended: %s", tier_run.name, error)
                continue
            if mended is not None:
                yield index, mended

    def _note(self, troubles: list[ReadFailure]) -> None:
        with self._lock:
            known = {trouble.tier for trouble in self.troubles}
            self.troubles += troubles
        for trouble in troubles:
            # One warning per tier, since a lost pack has thousands of chunks. `troubles` has all failures.
            quiet = trouble.tier in known or self._let_go(trouble)
            level = logging.DEBUG if quiet else logging.WARNING
            log.log(level, "%s: %s: %s", trouble.tier, self._leaf(trouble.row), trouble.error)

    def _let_go(self, trouble: ReadFailure) -> bool:
        """Whether the failure is normal: a tier that is not persistent has dropped the chunk to make room."""
        here = (h.tier_run.tier.traits.persistent for h in self._holdings if h.tier_run.name == trouble.tier)
        return isinstance(trouble.error, NotFound) and not any(here)

    def _leaf(self, row: int) -> str:
        return self._version.leaves[int(self._version.chunk_leaf[row])].name

    def nowhere(self, row: int, troubles: Sequence[ReadFailure] = ()) -> Damaged | Unreadable:
        """The error for a chunk that could be read undamaged from no tier."""
        head = self._version.head
        told = "; ".join(f"{t.tier}: {t.error}" for t in troubles)
        tried = told or f"none of {', '.join(h.tier_run.name for h in self._holdings) or 'the tiers'} has it"
        what = (
            f"leaf {self._leaf(row)} of version {head.seq} (step {head.step}, {self._version.id[:12]}) "
            f"of run {head.run!r}"
        )
        if away := [trouble.tier for trouble in troubles if cannot_be_asked(trouble.error)]:
            return Unreadable(f"{what} cannot be read now: {tried}", tier=away[0])
        return Damaged(f"{what} is whole in no tier that has a record of it: {tried}; {LOOK_FURTHER}")


def wrong_digest(place: ChunkPlace) -> Damaged:
    """The error for a chunk whose bytes do not match its digest."""
    return Damaged(f"{place.object} at byte {place.offset}: the chunk's digest is not the one it was saved under")


class RepairWriter:
    """Repair: collects good copies of damaged chunks, and writes them to each tier in a new pack.

    Packs and records never change, so a repaired chunk gets a new place: a repair pack (``mend`` in its key), whose
    footer lists its chunks. Readers look for the chunk there when its first place fails, and later saves reuse it. An
    error while writing is only logged: the restore does not need the repair.
    """

    def __init__(self, version: Version, holdings: Sequence[Holding]) -> None:
        self._version, self._holdings = version, holdings
        self._lock = threading.Lock()
        self._packs: dict[int, PackWriter] = {}
        self._rows: dict[int, list[FooterRow]] = {}
        self._given_up: set[int] = set()

    def __call__(self, holding: int, row: int, raw: Buffer) -> None:
        """Add the good bytes of a chunk that is damaged in a holding. ``raw`` must not change afterwards."""
        with self._lock:
            if holding in self._given_up:
                return
            try:
                self._add(holding, row, raw)
            except TierstateError as error:
                self._give_up(holding, error)

    def _add(self, holding: int, row: int, raw: Buffer) -> None:
        head = self._version.head
        tier = self._holdings[holding].tier_run.tier
        pack = self._packs.setdefault(holding, PackWriter(tier, head.run, head.seq, label=MEND))
        digest = self._version.digests[row].tobytes()
        rows = self._rows.setdefault(holding, [])
        if all(known.digest != digest for known in rows):
            rows.append(FooterRow(digest, len(raw), pack.add(raw, digest, len(raw), RAW)))

    def _give_up(self, holding: int, error: TierstateError) -> None:
        name = self._holdings[holding].tier_run.name
        log.warning("%s: damaged chunks could not be mended there: %s", name, error)
        self._given_up.add(holding)
        self._rows.pop(holding, None)
        try:
            self._packs.pop(holding).abort()
        except TierstateError as second:
            log.warning("%s: clearing up after that failed too: %s", name, second)

    def close(self) -> dict[str, int]:
        """Close the packs. Returns the number of repaired chunks by the tier's name."""
        mended = {}
        for holding in list(self._packs):
            tier_run = self._holdings[holding].tier_run
            try:
                self._packs[holding].close()
            except TierstateError as error:
                self._give_up(holding, error)
                continue
            tier_run.add_mends(self._rows[holding])
            mended[tier_run.name] = len(self._rows[holding])
            log.warning("%s: %d damaged chunks were mended", tier_run.name, len(self._rows[holding]))
            tier_run.events.emit("mended", tier=tier_run.name, reason=f"{len(self._rows[holding])} chunks")
        return mended
