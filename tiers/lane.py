"""Lanes: one thread per tier, in which saves are published in their order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np

from tierstate.manifest.errors import AlreadyExists, Damaged, NotFound, TierUnavailable
from tierstate.manifest.index import Array
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .arena import Arena
from .batch import Batch
from .fetch import Fetch, Holding
from .publication import Publication
from .shelf import Shelf
from .ticket import Ticket

log = logging.getLogger("tierstate")

HISTORY = 1024
"""Saves whose times are remembered."""


class Job(Protocol):
    """One save's way into one tier."""

    ticket: Ticket
    publication: Publication

    def run(self) -> Record:
        """Publish; raises what went wrong, with nothing left behind."""


class Kept(NamedTuple):
    """Chunks that were not copied, because every tier of the save has them already."""

    rows: Array
    digests: Array


class Intake:
    """Publishes a save from the slabs of its capture, while the capture still runs."""

    def __init__(self, ticket: Ticket, publication: Publication) -> None:
        self.ticket, self.publication = ticket, publication
        self._queue: SimpleQueue[Batch | Kept | Version | BaseException] = SimpleQueue()

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
            return self.publication.commit(item)
        except BaseException as error:
            self.publication.abort(error)
            raise

    def _take(self, item: Batch | Kept) -> None:
        if isinstance(item, Batch):
            self.publication.take(item)
        elif len(self.publication.missing(item.rows, item.digests)):
            raise Damaged(
                "chunks that this save relies on were found damaged meanwhile; the next save writes them again"
            )


class NoSource(TierUnavailable):
    """No tier has what is to be copied; the tier it was to be copied to is not to blame."""


class Copy:
    """Publishes a save from the tiers that have it already: a cascade.

    Args:
        sources: the run in those tiers, nearest first.
    """

    def __init__(self, ticket: Ticket, publication: Publication, sources: Sequence[Shelf], arena: Arena) -> None:
        self.ticket, self.publication = ticket, publication
        self._sources, self._arena = sources, arena

    def run(self) -> Record:
        """Wait for the sources, read what this tier lacks, verified, and write it."""
        version = self.ticket.version.result()
        holdings = self._holdings()
        try:
            missing = self.publication.missing(np.arange(len(version.digests)), version.digests).tolist()
            fetch = Fetch(version, holdings, self._arena, stop=self.ticket.cancelled.is_set)
            fetch.run(
                missing,
                lambda row, raw, slab: self.publication.write(row, raw, version.digests[row].tobytes(), slab),
            )
            return self.publication.commit(version)
        except BaseException as error:
            self.publication.abort(error)
            raise

    def _holdings(self) -> list[Holding]:
        """Tiers in which the save has arrived; all are waited for, since they may hold different leaves."""
        holdings, errors = [], []
        for shelf in self._sources:
            try:
                self.ticket.tiers[shelf.name].result()
            except Exception as error:
                errors.append(error)
            else:
                holdings.append(Holding(shelf, self.ticket.records[shelf.name].layout))
        if not holdings:
            told = "; ".join(f"{s.name}: {e}" for s, e in zip(self._sources, errors, strict=True))
            raise NoSource(
                f"step {self.ticket.head.step} cannot go on to {self.publication.shelf.name}: "
                f"no faster tier has it ({told})",
                tier=self.publication.shelf.name,
            )
        return holdings


class Lane:
    """The thread of one tier.

    Args:
        shelf: the run in the tier.
        in_use: numbers that retention must leave alone for now.
        settled: called after each job.
    """

    def __init__(self, shelf: Shelf, in_use: Callable[[], set[int]], settled: Callable[[Ticket], None]) -> None:
        self.shelf = shelf
        self._in_use, self._settled = in_use, settled
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self.waiting = 0
        self.healthy = True
        self.saves = 0
        self.failures = 0
        self.seconds: deque[float] = deque(maxlen=HISTORY)
        self.raw = 0
        self.stored = 0
        self._thread = threading.Thread(target=self._run, name=f"tierstate-{shelf.name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Add a save; it is published after those before it."""
        self.waiting += 1
        self._queue.put(job)

    def end(self) -> None:
        """No more saves come."""
        self._queue.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._publish(job)
            self.waiting -= 1
            self._settled(job.ticket)
            # The job holds the version and its tables: not until the next save comes.
            del job

    def _publish(self, job: Job) -> None:
        ticket = job.ticket
        if not self.shelf.tier.traits.persistent:
            # A tier that forgets anyway drops its oldest versions before the next one comes, not after.
            self.retire(room_for_one=True)
        try:
            record = job.run()
        except BaseException as error:
            self._fail(job, error)
            return
        self.healthy = True
        self._recall_mends()
        self.saves += 1
        self.raw += record.version.nbytes
        self.stored += job.publication.stored
        self.seconds.append(ticket.committed(self.shelf.name, record))
        self.retire()

    def _fail(self, job: Job, error: BaseException) -> None:
        self.failures += 1
        name = self.shelf.name
        if not (isinstance(error, (NoSource, Damaged)) or job.ticket.captured.exception()):
            # Its own doing, and not that there was nothing to write.
            self.healthy = False
        if isinstance(error, (AlreadyExists, NotFound)):
            self.shelf.look_again()
        log.error("step %d was not saved to %s: %s", job.ticket.head.step, name, error)
        job.ticket.failed(name, error)

    def _recall_mends(self) -> None:
        """So that the next capture knows, without asking the tier, what need not be copied."""
        try:
            self.shelf.recall()
        except BaseException as error:
            # Whatever a tier raises: the save is committed, and who waits for it must be told.
            log.debug("%s: what was mended there is asked for later: %r", self.shelf.name, error)

    def retire(self, *, room_for_one: bool = False) -> None:
        """Drop what need not be kept; a failure is only logged, and tried again next time."""
        try:
            self.shelf.retire(self._in_use(), room_for_one=room_for_one)
        except BaseException as error:
            # Whatever a tier raises: this thread must live on, or every later save would wait for it forever.
            log.warning("%s: old versions could not be dropped, which is tried again: %r", self.shelf.name, error)
