"""Publish one version to one tier: write packs, sync them, then create the record, which is the commit.

`TierWrite` writes native packs, `FormattedTierWrite` files of another format (safetensors, HDF5). A `DirectJob` writes
from the slabs of a capture that is still running, a `CascadeJob` copies from the faster tiers that have the version.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from tierstate.engine.codecs.pool import Encoded
from tierstate.engine.packs.formats import FileFormat, format_of
from tierstate.engine.packs.pack import FooterRows, PackWriter
from tierstate.engine.packs.slab_layout import BIG, BLOCK, SlabChunks, digest_list, run_ends
from tierstate.engine.placement import Route, Routes
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.catalog import Holding, Source, VersionMoved, lease_for_reading
from tierstate.engine.store.run_in_tier import BaseDropped, Stop, TierRun
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import (
    AlreadyExists,
    CommitUnknown,
    Damaged,
    NotFound,
    RankFailed,
    SaveSkipped,
    StateMismatch,
    TierstateError,
    TierUnavailable,
    Unreadable,
)
from tierstate.manifest.format.layout import RAW, LayoutBuilder
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version, copy_stages
from tierstate.manifest.history.log import RACE_RETRIES
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena, LeasedSlab
from tierstate.tiers.trace import span

from .backlog import PendingVersion
from .encode import ChunkEncoder, DeltaBases, VersionChunk
from .leaf_files import LeafFiles
from .save_state import SaveState, Skipped

MIN_DEDUPLICATED = 1024
"""Bytes of the shortest chunk for which duplicates within one save are looked for."""

log = logging.getLogger("tierstate")


LONG_SAVE = 12 * 3600.0
"""Seconds after which a save checks before its commit that its own packs still exist: a sweep of another process
deletes packs that are a day old and have no record."""


Stages = Callable[[], Array]
"""Returns ``(leaves,)``: the stage of the capture in which each leaf comes whole, or -1; see `CapturePlan.stages`."""


_FIRST = np.zeros(1, "i8")
"""The index of the only chunk of a slab."""


class AdoptedChunks(Protocol):
    """Chunks of a version that are in the tier's memory before their digests are known; implemented by `Snapshot`.

    Attributes:
        rows: ``(n,)``: their rows.
        stored: bytes that they take.
    """

    rows: Array

    @property
    def stored(self) -> int: ...

    def place(self, version: Version, draft: LayoutBuilder) -> None:
        """Make them visible as an object, and put their places into the layout ``draft``."""

    def discard(self) -> None:
        """Delete them or free their memory."""


class TierWrite:
    """Writes one version to one tier, in native packs.

    Args:
        tier_run: the run in that tier.
        head: the version's head.
        leaves: the version's leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        route: which leaves go to the tier, and their codecs.
        faster: the run in the faster tiers, nearest first; delta bases may be read from them.

    Attributes:
        committed: the version's id after `commit`; empty before, and where another rank created the record.
    """

    def __init__(
        self,
        tier_run: TierRun,
        head: Head,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        faster: Sequence[TierRun] = (),
    ) -> None:
        self.tier_run, self.committed = tier_run, ""
        self._leaves, self._row_leaves, self._route = leaves, row_leaves, route
        delta_bases = DeltaBases(tier_run, head, leaves, row_leaves, faster)
        self._coding = ChunkEncoder(tier_run, leaves, row_leaves, route, delta_bases, self._put)
        self._packs = PackWriter(self._coding.tier, head.run, head.seq, tier_run.rank)
        self._draft = LayoutBuilder(len(row_leaves))
        self._written: dict[bytes, int] = {}
        self._twins: list[tuple[Array, Array]] = []
        self._sent, self._since = False, time.time()
        self._adopted: AdoptedChunks | None = None
        self._routed: Array = route.leaves[row_leaves]
        self._raw: Array = route.raw[row_leaves]

    @property
    def stored(self) -> int:
        """Bytes written so far, without reused chunks."""
        return self._packs.stored + (0 if self._adopted is None else self._adopted.stored)

    @property
    def plain(self) -> Array:
        """``(leaves,)`` of bool: which leaves go to the tier and are stored raw."""
        found: Array = self._route.leaves & self._route.raw
        return found

    def adopt(self, chunks: AdoptedChunks) -> None:
        """Use chunks that are in the tier's memory already instead of writing them."""
        self._adopted = chunks
        self._routed[chunks.rows] = False

    def needless(self, digests: Array) -> Array:
        """``(chunks,)`` of bool: the rows for which nothing need be written if these, ``(chunks, 2)``, are their
        digests: they do not go to this tier, or it has them. Does no I/O."""
        if not self.tier_run.at_hand:
            return ~self._routed
        rows = np.flatnonzero(self._routed)
        found = ~self._routed
        found[rows] = self.tier_run.reuse(LayoutBuilder(len(digests)), rows, digests[rows])
        return found

    def missing(self, rows: Array, digests: Array) -> Array:
        """Indices into ``rows`` of the chunks that must be written; for all others the layout gets their old place."""
        wanted = np.flatnonzero(self._routed[rows])
        found = self.tier_run.reuse(self._draft, rows[wanted], digests[wanted])
        left: Array = wanted[~found]
        return left

    def keep(self, rows: Array, digests: Array) -> bool:
        """Note chunks that were not copied, since `needless` was true for them. Returns whether the tier has all."""
        return not len(self.missing(rows, digests))

    def take(self, batch: SlabChunks) -> None:
        """Write the chunks of a slab that the tier needs and lacks. Contiguous raw chunks are written as one run."""
        if len(batch.rows) == 1 and self._raw[batch.rows[0]]:
            self._take_raw(batch)
            return
        missing = self.missing(batch.rows, batch.digests)
        raw = self._raw[batch.rows[missing]]
        for number in np.flatnonzero(~raw).tolist():
            i = int(missing[number])
            data = batch.slab.buffer[batch.at[i] : batch.at[i] + batch.nbytes[i]]
            codec = self._coding.codec(int(batch.rows[i]), data)
            raw[number] = codec == RAW
            if codec != RAW:
                self._write(int(batch.rows[i]), data, batch.digests[i].tobytes(), batch.slab, codec)
        plain, twins = self._part_twins(batch, missing[raw])
        for run in np.split(plain, run_ends(batch, plain)):
            if len(run):
                self._write_run(batch, run)
        self._note_twins(batch, twins)
        self._coding.workers.hand_on()

    def _take_raw(self, batch: SlabChunks) -> None:
        """As `take`, for the one chunk of a slab: as for all long leaves, where this takes most of a save's Python."""
        if len(self.missing(batch.rows, batch.digests)):
            if self._is_twin(batch, 0, batch.digests.tobytes()):
                self._note_twins(batch, _FIRST)
            else:
                self._write_run(batch, _FIRST)
        self._coding.workers.hand_on()

    def _part_twins(self, batch: SlabChunks, which: Array) -> tuple[Array, Array]:
        """Split chunks into those to write and duplicates of chunks that this save has written."""
        firsts: list[int] = []
        twins: list[int] = []
        for i, name in zip(which.tolist(), digest_list(batch.digests[which]), strict=True):
            (twins if self._is_twin(batch, i, name) else firsts).append(i)
        return np.array(firsts, "i8"), np.array(twins, "i8")

    def _is_twin(self, batch: SlabChunks, i: int, name: bytes) -> bool:
        """Whether this save has written the same bytes as those of a chunk; if not, it counts as written now."""
        row = int(batch.rows[i])
        return bool(batch.nbytes[i] >= MIN_DEDUPLICATED) and self._written.setdefault(name, row) != row

    def _note_twins(self, batch: SlabChunks, twins: Array) -> None:
        firsts = [self._written[name] for name in digest_list(batch.digests[twins])]
        self._twins.append((batch.rows[twins], np.array(firsts, "i8")))

    def _write_run(self, batch: SlabChunks, run: Array) -> None:
        """Write contiguous chunks of a slab as one piece, with the gaps between them."""
        first, last = int(batch.at[run[0]]), int(batch.at[run[-1]] + batch.nbytes[run[-1]])
        if last - first >= BIG and run[-1] == len(batch.rows) - 1:
            last += -last % BLOCK  # to the end of the block, which is zeros: whole blocks go out without a copy
        offset, nbytes = batch.at[run] - first, batch.nbytes[run]
        rows = FooterRows(batch.digests[run], nbytes, offset, nbytes, RAW)
        batch.slab.lease()
        key, at = self._packs.add_run(batch.slab.buffer[first:last], rows, batch.slab.release)
        self._draft.put_run(batch.rows[run], key, offset + at, nbytes, RAW)

    def write(self, row: int, raw: Buffer, digest: bytes, slab: LeasedSlab | None) -> None:
        """Write one chunk to a pack, unless this save has written the same bytes already.

        Args:
            slab: the slab with ``raw``, which is leased until the tier has written it; None if it is in no slab.
        """
        self._write(row, raw, digest, slab, self._coding.codec(row, raw))

    def _write(self, row: int, raw: Buffer, digest: bytes, slab: LeasedSlab | None, codec: str) -> None:
        first = self._written.setdefault(digest, row)
        if first != row:
            self._twins.append((np.array([row]), np.array([first])))
            return
        chunk = VersionChunk(row, digest, len(raw))
        if codec != RAW and self._coding.takes(row):
            self._coding.add(chunk, raw, slab, codec)
            return
        if slab is not None:
            slab.lease()
        self._put(chunk, Encoded(RAW, raw), slab)

    def _put(self, chunk: VersionChunk, encoded: Encoded, slab: LeasedSlab | None = None) -> None:
        """Append a chunk to the open pack. Its slab is released when the tier has written it.

        Memory outside slabs gets a release callback that does nothing, so that the tier need not copy it or wait.
        """
        release = _let_go if slab is None else slab.release
        place = self._packs.add(encoded.stored, chunk.digest, chunk.nbytes, encoded.codec, release, encoded.base)
        self._draft.put(chunk.row, place)

    def copy(self, version: Version, fetch: Fetch) -> None:
        """Write what this tier lacks of a version that faster tiers have, in the order in which chunks are read."""
        missing = self.missing(np.arange(len(version.digests)), version.digests)
        fetch.run(
            missing.tolist(),
            lambda row, raw, slab: self.write(row, raw, version.digests[row].tobytes(), slab),
        )

    def commit(self, version: Version, stop: Stop | None = None) -> Record:
        """Make packs durable, then create the record; see `TierRun.publish`."""
        with span("commit", tier=self.tier_run.name, step=version.head.step):
            return self._commit(version, stop)

    def _commit(self, version: Version, stop: Stop | None) -> Record:
        self._coding.workers.finish()
        # A pack of one rank's part does not get the version: it is not the whole one, which `rebuild` looks for.
        self._packs.close(*([] if self.tier_run.together and stop is not None else [version.data]))
        for rows, firsts in self._twins:
            self._draft.put_twins(rows, firsts)
        if self._adopted is not None:
            self._adopted.place(version, self._draft)
        sizes, written = self._sizes(), sum(self._written_sizes().values())
        head = version.head
        self.tier_run.events.emit("written", tier=self.tier_run.name, step=head.step, seq=head.seq, nbytes=written)
        self.tier_run.identity.wait_for_others()  # the record names the tiers by their markers
        self.tier_run.identity.ensure()
        record = Record(version, self._draft.build(sizes), self.tier_run.signature())
        self._sent = True
        self.committed = self.tier_run.publish(record, stop)
        return record

    def _sizes(self) -> dict[str, int]:
        """Lengths of all packs that the layout names, both written and reused.

        Raises:
            BaseDropped: a pack was deleted meanwhile.
        """
        sizes = written = self._written_sizes()
        if not 0 <= time.time() - self._since < LONG_SAVE:
            sizes = {}
        for key in self._draft.objects():
            if key not in sizes:
                sizes[key] = self._size(key, "this save wrote" if key in written else "this save builds on")
        return sizes

    def _size(self, key: str, which: str) -> int:
        try:
            return self.tier_run.tier.size(key)
        except NotFound as error:
            text = f"{self.tier_run.name}: {key}, which {which}, was deleted before its record was created"
            raise BaseDropped(text, tier=self.tier_run.name) from error

    def _written_sizes(self) -> dict[str, int]:
        """Lengths of the objects written here."""
        return dict(self._packs.sizes)

    def abort(self, error: BaseException) -> None:
        """Delete what was written, unless the record may still be created: then its packs must stay.

        A create request without an answer may still take effect later, even if no record could be read back.
        """
        self._coding.workers.abort()
        if isinstance(error, CommitUnknown) or (self._sent and isinstance(error, TierUnavailable)):
            return
        try:
            self._discard()
        except TierstateError as second:
            error.add_note(f"and clearing up after it failed too: {second}")

    def _discard(self) -> None:
        try:
            if self._adopted is not None:
                self._adopted.discard()
        finally:
            self._packs.abort()


def _let_go() -> None:
    """Do nothing: memory outside slabs is freed with its last reference."""


def tier_write_of(
    tier_run: TierRun,
    head: Head,
    leaves: Sequence[Leaf],
    row_leaves: Array,
    route: Route,
    stages: Stages,
    faster: Sequence[TierRun] = (),
) -> TierWrite:
    """The `TierWrite` for the route's file format.

    Args:
        tier_run, head, leaves, row_leaves, route: as for `TierWrite`.
        stages: called once, before the first bytes are written, and only if the format is not native.
        faster: as for `TierWrite`.
    """
    kind = format_of(route.format)
    if kind is None:
        return TierWrite(tier_run, head, leaves, row_leaves, route, faster)
    return FormattedTierWrite(tier_run, head, leaves, row_leaves, route, kind, stages, faster)


class FormattedTierWrite(TierWrite):
    """Writes one version to one tier as files of another format, and what they cannot express to native packs.

    Args:
        tier_run, head, leaves, row_leaves, route: as for `TierWrite`.
        kind: the file format.
        stages, faster: as for `tier_write_of`.
    """

    def __init__(
        self,
        tier_run: TierRun,
        head: Head,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        kind: FileFormat,
        stages: Stages,
        faster: Sequence[TierRun] = (),
    ) -> None:
        super().__init__(tier_run, head, leaves, row_leaves, route, faster)
        self._head, self._kind, self._stages = head, kind, stages
        self._begin = threading.Lock()
        self._begun: LeafFiles | None = None

    @property
    def _files(self) -> LeafFiles:
        """The files. Planned at the first use and not in the constructor, for which the training has to wait."""
        with self._begin:
            if self._begun is None:
                leaves, rows = self._leaves, self._row_leaves
                here = self._route.leaves & np.fromiter(map(self._kind.expresses, leaves), bool, len(leaves))
                stages = np.where(here, self._stages(), -1)
                self._elsewhere, self._beside = ~self._routed, self._routed & (stages < 0)[rows]
                self._routed = self._beside
                self._begun = LeafFiles(self.tier_run, self._head, leaves, rows, self._kind, stages)
            return self._begun

    @property
    def stored(self) -> int:
        return super().stored + self._files.stored

    @property
    def plain(self) -> Array:
        """No leaf: a snapshot on the device cannot have the layout of a file."""
        return np.zeros(len(self._leaves), bool)

    def needless(self, digests: Array) -> Array:
        in_files = self._files.needless(digests)
        # For the base class, rows that go into files do not go to this tier.
        found: Array = in_files | (super().needless(digests) & (self._elsewhere | self._beside))
        return found

    def keep(self, rows: Array, digests: Array) -> bool:
        in_files = self._files.keep(rows, digests)
        return super().keep(rows, digests) and in_files

    def take(self, batch: SlabChunks) -> None:
        files = self._files
        super().take(batch)
        files.take(batch)

    def copy(self, version: Version, fetch: Fetch) -> None:
        self._files.copy(version, fetch)
        super().copy(version, fetch)

    def commit(self, version: Version, stop: Stop | None = None) -> Record:
        self._files.finish(self._draft, version)
        return super().commit(version, stop)

    def _written_sizes(self) -> dict[str, int]:
        return super()._written_sizes() | self._files.sizes

    def _discard(self) -> None:
        try:
            if self._begun is not None:
                self._begun.abort()
        finally:
            super()._discard()


class UnchangedChunks(NamedTuple):
    """Chunks that were not copied, because every tier that is written from slabs has them: rows and digests."""

    rows: Array
    digests: Array


class SlabReceiver(ABC):
    """Takes the slabs of a capture while it still runs: a `DirectJob`, or what hands them over to another process."""

    @abstractmethod
    def feed(self, item: SlabChunks | UnchangedChunks | Version | BaseException) -> None:
        """Add the next slab, with a lease that the receiver releases; at the end the version, or the error."""

    @abstractmethod
    def needless(self, digests: Array) -> Array:
        """``(chunks,)`` of bool: the rows that need not be copied if these, ``(chunks, 2)``, are their digests."""


class DirectJob(SlabReceiver):
    """Publishes a save to one tier from the slabs of its capture, while the capture still runs."""

    def __init__(self, save_state: SaveState, publication: TierWrite) -> None:
        self.save_state: SaveState = save_state
        self.publication = publication
        self.due = PendingVersion.of(save_state.head, save_state.nbytes)
        self._queue: SimpleQueue[SlabChunks | UnchangedChunks | Version | BaseException] = SimpleQueue()

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return self.publication.stored

    @property
    def committed(self) -> str:
        """As `TierWrite.committed`."""
        return self.publication.committed

    def feed(self, item: SlabChunks | UnchangedChunks | Version | BaseException) -> None:
        self._queue.put(item)

    def needless(self, digests: Array) -> Array:
        return self.publication.needless(digests)

    def run(self) -> Record:
        """Write slab by slab, then commit. After a failure still releases slabs, so that the capture need not wait."""
        failure = self._unexpected()
        while isinstance(item := self._queue.get(), (SlabChunks, UnchangedChunks)):
            try:
                if failure is None:
                    self._take(item)
            except BaseException as error:
                failure = error
            finally:
                if isinstance(item, SlabChunks):
                    item.slab.release()
        try:
            if failure is not None:
                raise failure
            if isinstance(item, BaseException):
                raise item
            return self.publication.commit(item, self.save_state.cancelled.is_set)
        except BaseException as error:
            self.publication.abort(error)
            raise

    def _unexpected(self) -> BaseException | None:
        """The error if the tier is not the expected one, or cannot be asked."""
        try:
            self.publication.tier_run.identity.ensure(create=False)
        except BaseException as error:
            return error
        return None

    def _take(self, item: SlabChunks | UnchangedChunks) -> None:
        if isinstance(item, SlabChunks):
            self.publication.take(item)
        elif not self.publication.keep(item.rows, item.digests):
            raise Damaged(
                "chunks that this save relies on were found damaged meanwhile; the next save writes them again"
            )


class NoSource(TierUnavailable):
    """No faster tier has the version to copy. It is no failure of the tier that should get it."""


class SourceGone(NoSource):
    """No faster tier has the missing version any more, and none will get it: not tried again."""

    transient = False


class CascadeJob:
    """Copies a version from faster tiers to a slower one. While it waits in the queue it holds no tables of chunks.

    Args:
        due: the version.
        tier_run: the run in the tier that gets it.
        faster: the run in the faster tiers, nearest first.
        routes: which leaves go to which tier.
        arena: the host memory for the reads.
        save_state: the save in progress; None for a missing version, which any faster tier may have.
        entries: the entry tiers of the save. The job waits for all of them, since they may hold different leaves.
        coming: returns whether a faster tier may still get the version.
    """

    def __init__(
        self,
        due: PendingVersion,
        tier_run: TierRun,
        faster: Sequence[TierRun],
        routes: Routes,
        arena: Arena,
        save_state: SaveState | None = None,
        entries: Sequence[str] = (),
        coming: Callable[[], bool] = lambda: False,
    ) -> None:
        self.due, self.save_state = due, save_state
        self._coming = coming
        self.cancelled = save_state.cancelled if save_state else Latch()
        self.began: float | None = None
        self._tier_run, self._faster, self._routes, self._arena = tier_run, faster, routes, arena
        self._entries = entries
        self._publication: TierWrite | None = None

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return self._publication.stored if self._publication else 0

    @property
    def committed(self) -> str:
        """As `TierWrite.committed`."""
        return self._publication.committed if self._publication else ""

    @property
    def at_hand(self) -> bool:
        """Whether a faster tier has the version."""
        return self.save_state is None or any(self.save_state.done(tier_run.name) for tier_run in self._faster)

    def run(self) -> Record:
        """Wait for the entry tiers, read and verify what this tier lacks, and write it."""
        for _ in range(RACE_RETRIES):
            try:
                return self._run()
            except VersionMoved as error:
                # Another process dropped, thinned or repacked it: read its records again, also a cached one.
                for tier_run in self._faster:
                    if tier_run.name == error.tier:
                        tier_run.look_again()
        return self._run()

    def _run(self) -> Record:
        self._tier_run.identity.ensure(create=False)
        coming = self._coming()  # called before the records are read
        records = self._found(coming)
        version = records[0][1].version
        route = self._routes.of(version.leaves)[self._tier_run.name]
        publication = tier_write_of(
            self._tier_run,
            version.head,
            version.leaves,
            version.chunk_leaf,
            route,
            partial(copy_stages, version),
            self._faster,
        )
        self._publication, self.began = publication, time.monotonic()
        try:
            with lease_for_reading([(tier_run, record) for tier_run, record in records if tier_run.leads]):
                holdings = [Holding(tier_run, record.layout) for tier_run, record in records]
                publication.copy(version, Fetch(version, holdings, self._arena, stop=self.cancelled.is_set))
                # Within the lease: a commit by many ranks waits for those that still read.
                return publication.commit(version, None if self.save_state is None else self.cancelled.is_set)
        except BaseException as error:
            # The job may wait in the queue again, and must not hold tables of chunks meanwhile.
            self._publication = None
            publication.abort(error)
            raise

    def _found(self, coming: bool) -> list[Source]:
        """The version's records, nearest first."""
        records: list[Source] = []
        errors: list[tuple[str, TierstateError]] = []
        for tier_run in self._sources():
            try:
                records.append((tier_run, self._part(tier_run.record(self.due.seq))))
            except TierstateError as error:
                errors.append((tier_run.name, error))
        if not records:
            raise self._nowhere(errors, coming)
        version = records[0][1].version
        same = [(tier_run, record) for tier_run, record in records if self._is_same(record.version, version)]
        if len(same) < len(records) and self._tier_run.together and self.save_state is not None:
            # One is this rank's part as it gave it, another was cut out of the whole version, in which chunks that
            # several ranks gave count once. Cut out of their records, all have the same rows.
            cut = [(tier_run, self._part(whole)) for tier_run, _ in records if (whole := self._whole(tier_run))]
            same = [(tier_run, part) for tier_run, part in cut if self._is_same(part.version, cut[0][1].version)]
        return same or records[:1]

    def _whole(self, tier_run: TierRun) -> Record | None:
        try:
            return tier_run.log.read(self.due.seq)
        except TierstateError as error:
            log.debug("%s: version %d is not copied from there: %s", tier_run.name, self.due.seq, error)
            return None

    def _part(self, record: Record) -> Record:
        """The part of the record that this rank copies."""
        return record if self.save_state is None else self._tier_run.cut(record)

    def _is_same(self, one: Version, other: Version) -> bool:
        # A rank's own part and the part cut out of the whole version have other ids, but the same digests.
        return one.id == other.id or (self._tier_run.together and np.array_equal(one.digests, other.digests))

    def _sources(self) -> list[TierRun]:
        save_state = self.save_state
        if save_state is None:
            return list(self._faster)
        for name in self._entries:
            save_state.tiers[name].exception()
        if (error := save_state.captured.exception()) is not None:
            raise error
        return [tier_run for tier_run in self._faster if save_state.done(tier_run.name)]

    def _nowhere(self, errors: list[tuple[str, TierstateError]], coming: bool) -> TierstateError:
        name, save_state = self._tier_run.name, self.save_state
        if (
            save_state
            and self._tier_run.together
            and all(isinstance(save_state.error(n), Skipped) for n in self._entries)
        ):
            return SaveSkipped(f"step {self.due.step} was left out on {', '.join(self._entries)}")
        told = [*errors, *((n, e) for n in self._entries if save_state and (e := save_state.error(n)) is not None)]
        text = f"step {self.due.step} cannot go on to {name}: no faster tier has it"
        text += f" ({'; '.join(f'{n}: {e}' for n, e in told)})" if told else ""
        if save_state is None and not coming and all(isinstance(error, NotFound) for _, error in errors):
            return SourceGone(text, tier=name)
        return NoSource(text, tier=name)


NOT_THE_TIERS_FAULT = (NoSource, Damaged, Unreadable, StateMismatch)
"""Errors that are no failure of the tier that should get the save: it stays healthy."""


LOOK_AGAIN_AFTER = (AlreadyExists, NotFound, CommitUnknown)
"""Errors after which the cached state of a tier may be outdated."""


Job: TypeAlias = DirectJob | CascadeJob
"""A job that publishes one save to one tier."""


def drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and its causes: they keep large tables alive as long as the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def may_succeed_later(error: BaseException) -> bool:
    """Whether a failed save may succeed later without any repair."""
    if isinstance(error, Damaged):
        # A chunk was found in no tier, maybe because the tier that has it did not answer: look at the cause.
        error = error.__cause__ or error
    together = isinstance(error, (CommitUnknown, RankFailed))
    return together or (isinstance(error, TierstateError) and error.transient)
