"""The jobs that publish one version to one tier.

A `DirectJob` writes from the slabs of a capture that is still running, a `CascadeJob` copies from the faster tiers that
have the version. Both write by a `TierWrite`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.placement import Routes
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.catalog import Holding, Source, VersionMoved, lease_for_reading
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array
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
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version, copy_stages
from tierstate.manifest.history.log import RACE_RETRIES
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena

from .backlog import PendingVersion
from .save_state import SaveState, Skipped
from .tier_write import TierWrite, tier_write_of

log = logging.getLogger("tierstate")


SLABS_AT_ONCE = 16
"""Slabs that are looked up together in a tier, at most."""


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

    def __init__(self, save_state: SaveState, tier_write: TierWrite) -> None:
        self.save_state: SaveState = save_state
        self.tier_write = tier_write
        self.due = PendingVersion.of(save_state)
        self._queue: SimpleQueue[SlabChunks | UnchangedChunks | Version | BaseException] = SimpleQueue()
        self._following: UnchangedChunks | Version | BaseException | None = None
        self._ended = False

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return self.tier_write.stored

    @property
    def committed(self) -> str:
        """As `TierWrite.committed`."""
        return self.tier_write.committed

    def feed(self, item: SlabChunks | UnchangedChunks | Version | BaseException) -> None:
        self._queue.put(item)

    def needless(self, digests: Array) -> Array:
        return self.tier_write.needless(digests)

    def run(self) -> Record:
        """Write slab by slab, then commit. After a failure still releases slabs, so that the capture need not wait."""
        failure = self._unexpected()
        while isinstance(item := self._next(), (list, UnchangedChunks)):
            if failure is not None:
                _release(item)
                continue
            try:
                self._take(item)
            except BaseException as error:
                failure = error
        try:
            if failure is not None:
                raise failure
            if isinstance(item, BaseException):
                raise item
            return self.tier_write.commit(item, self.save_state.cancelled.is_set)
        except BaseException as error:
            self.tier_write.abort(error)
            raise

    def _next(self) -> list[SlabChunks] | UnchangedChunks | Version | BaseException:
        """The next item: of slabs all that have come by now, up to `SLABS_AT_ONCE`."""
        item = self._queue.get() if self._following is None else self._following
        self._following = None
        if not isinstance(item, SlabChunks):
            self._ended = not isinstance(item, UnchangedChunks)
            return item
        slabs = [item]
        with suppress(Empty):
            while len(slabs) < SLABS_AT_ONCE:
                item = self._queue.get_nowait()
                if not isinstance(item, SlabChunks):
                    self._following = item
                    break
                slabs.append(item)
        return slabs

    def drain(self) -> None:
        """Release the slabs of a capture that `run` has not taken, as it failed or was not called, until its end."""
        while not self._ended:
            _release(self._next())

    def _unexpected(self) -> BaseException | None:
        """The error if the tier is not the expected one, or cannot be asked."""
        try:
            self.tier_write.tier_run.identity.ensure(create=False)
        except BaseException as error:
            return error
        return None

    def _take(self, item: list[SlabChunks] | UnchangedChunks) -> None:
        if isinstance(item, list):
            self.tier_write.take(item)
        elif not self.tier_write.keep(item.rows, item.digests):
            raise Damaged(
                "chunks that this save relies on were found damaged meanwhile; the next save writes them again"
            )


def _release(item: object) -> None:
    """End the leases of slabs that nobody writes."""
    for batch in item if isinstance(item, list) else ():
        batch.slab.release()


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
        source: the save in progress by which faster tiers get the missing version; None if all of them have what they
            will have.
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
        source: SaveState | None = None,
    ) -> None:
        self.due, self.save_state = due, save_state
        self._source = source
        self.cancelled = save_state.cancelled if save_state else Latch()
        self.began: float | None = None
        self._tier_run, self._faster, self._routes, self._arena = tier_run, faster, routes, arena
        self._entries = entries
        self._tier_write: TierWrite | None = None

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return self._tier_write.stored if self._tier_write else 0

    @property
    def committed(self) -> str:
        """As `TierWrite.committed`."""
        return self._tier_write.committed if self._tier_write else ""

    @property
    def at_hand(self) -> bool:
        """Whether a faster tier has the version."""
        return self.save_state is None or any(self.save_state.done(tier_run.name) for tier_run in self._faster)

    @property
    def too_early(self) -> bool:
        """Whether no faster tier has the missing version yet, and one may still get it."""
        source = self._source
        return source is not None and self._coming() and not any(source.done(one.name) for one in self._faster)

    def _coming(self) -> bool:
        """Whether a faster tier may still get the missing version."""
        made = {} if self._source is None else self._source.tiers
        return any(not made[one.name].done() for one in self._faster if one.name in made)

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
        tier_write = tier_write_of(
            self._tier_run,
            version.head,
            version.leaves,
            version.chunk_leaf,
            route,
            partial(copy_stages, version),
            self._faster,
        )
        self._tier_write, self.began = tier_write, time.monotonic()
        try:
            with lease_for_reading([(tier_run, record) for tier_run, record in records if tier_run.leads]):
                holdings = [Holding(tier_run, record.layout) for tier_run, record in records]
                tier_write.copy(version, Fetch(version, holdings, self._arena, stop=self.cancelled.is_set))
                # Within the lease: a commit by many ranks waits for those that still read.
                return tier_write.commit(version, None if self.save_state is None else self.cancelled.is_set)
        except BaseException as error:
            # The job may wait in the queue again, and must not hold tables of chunks meanwhile.
            self._tier_write = None
            tier_write.abort(error)
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
