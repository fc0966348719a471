"""Jobs: one save's way into one tier, from the slabs of its capture or from a faster tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from tierstate.manifest.errors import (
    AlreadyExists,
    CommitUnknown,
    Damaged,
    NotFound,
    RankFailed,
    StateMismatch,
    TierstateError,
    TierUnavailable,
)
from tierstate.manifest.index import Array
from tierstate.manifest.log import RACES
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .arena import Arena
from .batch import Batch
from .fetch import Fetch, Holding
from .formatted import publication_of, whole
from .leasing import Moved, Source, reading
from .owing import Due
from .publication import Publication
from .routes import Routes
from .shelf import Shelf
from .ticket import Skipped, Ticket
from .verdict import LeftOut


class Kept(NamedTuple):
    """Chunks that were not copied, because every tier of the save has them already."""

    rows: Array
    digests: Array


class Intake:
    """Publishes a save from the slabs of its capture, while the capture still runs."""

    def __init__(self, ticket: Ticket, publication: Publication) -> None:
        self.ticket: Ticket = ticket
        self.publication = publication
        self.due = Due.of(ticket.head, ticket.nbytes)
        self._queue: SimpleQueue[Batch | Kept | Version | BaseException] = SimpleQueue()

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return self.publication.stored

    def feed(self, item: Batch | Kept | Version | BaseException) -> None:
        """The next slab, with a lease that is this intake's; at the end the version, or why there will be none."""
        self._queue.put(item)

    def run(self) -> Record:
        """Write slab by slab, then commit. A failure is kept until the capture ends: it must not have to wait."""
        failure: BaseException | None = None
        while isinstance(item := self._queue.get(), (Batch, Kept)):
            try:
                if failure is None:
                    self._take(item)
            except BaseException as error:
                failure = error
            finally:
                if isinstance(item, Batch):
                    item.slab.release()
        try:
            if failure is not None:
                raise failure
            if isinstance(item, BaseException):
                raise item
            return self.publication.commit(item, self.ticket.cancelled.is_set)
        except BaseException as error:
            self.publication.abort(error)
            raise

    def _take(self, item: Batch | Kept) -> None:
        if isinstance(item, Batch):
            self.publication.take(item)
        elif not self.publication.keep(item.rows, item.digests):
            raise Damaged(
                "chunks that this save relies on were found damaged meanwhile; the next save writes them again"
            )


class NoSource(TierUnavailable):
    """No tier has what is to be copied; the tier it was to be copied to is not to blame."""


class Gone(NoSource):
    """No faster tier has any more what is owed, and none is going to have it again."""

    transient = False


class Copy:
    """Publishes a version from the tiers that have it already: a cascade. Until its turn comes it holds no tables.

    Args:
        due: the version.
        shelf: the run in the tier that gets it.
        faster: the run in the tiers before that one, nearest first.
        routes: which leaves go there.
        ticket: the save, where it is still under way; None: the tier owes it, and any faster tier may have it.
        entries: tiers that the save enters; they are waited for, since they may hold different leaves.
        coming: whether a faster tier may yet get it, though it has not got it now.
    """

    def __init__(
        self,
        due: Due,
        shelf: Shelf,
        faster: Sequence[Shelf],
        routes: Routes,
        arena: Arena,
        ticket: Ticket | None = None,
        entries: Sequence[str] = (),
        coming: Callable[[], bool] = lambda: False,
    ) -> None:
        self.due, self.ticket = due, ticket
        self._coming = coming
        self.cancelled = ticket.cancelled if ticket else threading.Event()
        self.began: float | None = None
        self._shelf, self._faster, self._routes, self._arena = shelf, faster, routes, arena
        self._entries = entries
        self._publication: Publication | None = None

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return self._publication.stored if self._publication else 0

    @property
    def at_hand(self) -> bool:
        """Whether a faster tier has it."""
        return self.ticket is None or any(self.ticket.done(shelf.name) for shelf in self._faster)

    def run(self) -> Record:
        """Wait for the sources, read what this tier lacks, verified, and write it."""
        for _ in range(RACES):
            try:
                return self._run()
            except Moved:
                continue  # another process thinned or repacked it: where it lies now is asked again
        return self._run()

    def _run(self) -> Record:
        coming = self._coming()  # asked before the logs are
        records = self._found(coming)
        version = records[0][1].version
        route = self._routes.of(version.leaves)[self._shelf.name]
        publication = publication_of(
            self._shelf, version.head, version.leaves, version.chunk_leaf, route, partial(whole, version), self._faster
        )
        self._publication, self.began = publication, time.monotonic()
        try:
            with reading([(shelf, record) for shelf, record in records if shelf.leads]):
                holdings = [Holding(shelf, record.layout) for shelf, record in records]
                publication.copy(version, Fetch(version, holdings, self._arena, stop=self.cancelled.is_set))
            return publication.commit(version, None if self.ticket is None else self.cancelled.is_set)
        except BaseException as error:
            # It may have to wait for another turn, and tables do not wait.
            self._publication = None
            publication.abort(error)
            raise

    def _found(self, coming: bool) -> list[Source]:
        """The version's records, nearest first."""
        records: list[Source] = []
        errors: list[tuple[str, TierstateError]] = []
        for shelf in self._sources():
            try:
                records.append((shelf, self._part(shelf.record(self.due.seq))))
            except TierstateError as error:
                errors.append((shelf.name, error))
        if not records:
            raise self._nowhere(errors, coming)
        version = records[0][1].version
        return [(shelf, record) for shelf, record in records if self._is_same(record.version, version)]

    def _part(self, record: Record) -> Record:
        """What of it this rank brings."""
        return record if self.ticket is None else self._shelf.cut(record)

    def _is_same(self, one: Version, other: Version) -> bool:
        # What a rank gave itself, and what was cut out of the whole, say the same of its chunks in other words.
        return one.id == other.id or (self._shelf.together and np.array_equal(one.digests, other.digests))

    def _sources(self) -> list[Shelf]:
        ticket = self.ticket
        if ticket is None:
            return list(self._faster)
        for name in self._entries:
            ticket.tiers[name].exception()
        if (error := ticket.captured.exception()) is not None:
            raise error
        return [shelf for shelf in self._faster if ticket.done(shelf.name)]

    def _nowhere(self, errors: list[tuple[str, TierstateError]], coming: bool) -> TierstateError:
        name, ticket = self._shelf.name, self.ticket
        if ticket and self._shelf.together and all(isinstance(ticket.error(n), Skipped) for n in self._entries):
            return LeftOut(f"step {self.due.step} was left out on {', '.join(self._entries)}")
        told = [*errors, *((n, e) for n in self._entries if ticket and (e := ticket.error(n)) is not None)]
        text = f"step {self.due.step} cannot go on to {name}: no faster tier has it"
        text += f" ({'; '.join(f'{n}: {e}' for n, e in told)})" if told else ""
        if ticket is None and not coming and all(isinstance(error, NotFound) for _, error in errors):
            return Gone(text, tier=name)
        return NoSource(text, tier=name)


BLAMELESS = (NoSource, Damaged, StateMismatch)
"""Errors for which the tier that was to get a save is not to blame."""

STALE = (AlreadyExists, NotFound, CommitUnknown)
"""Errors after which a tier may not be what is remembered of it."""

Job: TypeAlias = Intake | Copy
"""One save's way into one tier."""


def without_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, tables of a version among it: it may be kept for long."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def passing(error: BaseException) -> bool:
    """Whether what failed may well come later, without anybody mending anything."""
    if isinstance(error, Damaged):
        # Whole nowhere, as the tier that has it did not answer.
        error = error.__cause__ or error
    together = isinstance(error, (CommitUnknown, RankFailed))
    return together or (isinstance(error, TierstateError) and error.transient)
