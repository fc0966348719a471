"""Capturing: the thread in which saves are captured one after the other, and given to the lanes of their tiers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from operator import is_
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.manifest.index import Array
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.merge import check_whole
from tierstate.manifest.version import Version

from .arena import Arena
from .batch import Batch
from .capture import Capture, Outlet
from .jobs import Copy, Intake, Job, Kept
from .lane import Lane
from .plan import Plan
from .standing import Standing
from .ticket import Ticket

Before: TypeAlias = Callable[[], Standing | None]


class Work(NamedTuple):
    """One save that is to be captured, and its way into each of its tiers.

    Attributes:
        snapped: all that is guarded lies in a snapshot: once the rest is copied out, the state may change.
    """

    ticket: Ticket
    plan: Plan
    jobs: list[tuple[Lane, Job]]
    snapped: bool = False

    def intakes(self) -> list[Intake]:
        """The jobs that take the capture's slabs."""
        return [job for _, job in self.jobs if isinstance(job, Intake)]


class Capturing:
    """Captures saves in their order.

    Args:
        arena: the memory they pass through.
        ended: called when the last one is done.
        rank: of this process, where what is captured is one of several ranks' part; None: it is the whole.
    """

    def __init__(self, arena: Arena, ended: Callable[[], None], rank: int | None = None) -> None:
        self._arena, self._ended, self._rank = arena, ended, rank
        self.parent = ""
        self._standing: Standing | None = None
        self._version: Version | None = None
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstate-capture", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """One more save."""
        self._queue.put(work)

    def end(self) -> None:
        """No more saves come."""
        self._queue.put(None)

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; whether it did."""
        if not self._over.wait(timeout):
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if not work.ticket.begun:
                work.ticket.begun = True
                # Of each, whether the lane had nothing else to do: all are put, and not only those up to the first.
                idle = all([lane.put(job) or isinstance(job, Copy) for lane, job in work.jobs])
                self._save(work, partial(self._before, work) if idle else lambda: None)
            # The plan holds on to the state's memory: not until the next save comes.
            del work
        self._ended()
        self._over.set()

    def _before(self, work: Work) -> Standing | None:
        """What stood at the last save, with what each tier that is written to from slabs has of it by now.

        Such a tier must have had nothing else to do first: a save between would decide what its newest version names,
        and what that does not name may be dropped.
        """
        last, intakes = self._standing, work.intakes()
        if last is None or not intakes or not last.fits(work.plan.nbytes):
            return None
        likely = np.logical_and.reduce([intake.publication.standing(last.digests) for intake in intakes])
        return dataclasses.replace(last, likely=likely)

    def _save(self, work: Work, before: Before) -> None:
        outcome: Version | BaseException
        try:
            standing = self._capture(work, before)
        except BaseException as error:
            outcome = _told(error)
            work.ticket.capture_ended(outcome)
        else:
            work.ticket.capture_ended(None)
            outcome = self._describe(work, standing)
        work.ticket.lost = isinstance(outcome, BaseException)
        for intake in work.intakes():
            intake.feed(outcome)

    def _capture(self, work: Work, before: Before) -> Standing:
        intakes, ticket = work.intakes(), work.ticket

        def dispatch(batch: Batch) -> None:
            for intake in intakes:
                batch.slab.lease()
                intake.feed(batch)
            batch.slab.release()

        def keep(rows: Array, digests: Array) -> None:
            for intake in intakes:
                intake.feed(Kept(rows, digests))

        freed = partial(ticket.capture_ended, None) if work.snapped else ticket.freed.set
        outlet = Outlet(dispatch, keep, freed, ticket.cancelled.is_set)
        digest = algorithm(ticket.head.digest)
        return Capture(work.plan, ticket.head.chunk, self._arena, digest, outlet, before).run()

    def _describe(self, work: Work, standing: Standing) -> Version | BaseException:
        """The version of what was captured."""
        plan, head, last = work.plan, dataclasses.replace(work.ticket.head, parent=self.parent), self._version
        try:
            if last is not None and _alike(last, plan, head.chunk):
                version = last.again(head, standing.digests)
            else:
                version = Version.build(head, plan.leaves, plan.shards(self._rank or 0), standing.digests)
                if self._rank is None:
                    check_whole(version)
            encoded = version.id  # which is encoded by this, and so may fail
        except BaseException as error:
            return _told(error)
        self._version, self._standing = version, standing
        if self._rank is None:
            self.parent = encoded
        return version


def _alike(last: Version, plan: Plan, chunk: int) -> bool:
    """Whether the plan's leaves and shards are those of the last version."""
    return (
        last.head.chunk == chunk
        and _same(last.leaves, plan.leaves)
        and last.boxes == plan.boxes
        and np.array_equal(last.shard_leaf, plan.leaf)
    )


def _same(one: tuple[Leaf, ...], other: tuple[Leaf, ...]) -> bool:
    """Whether they are the very same leaves: paths that are equal to Python, as of 1 and True, need not be the same."""
    return one is other or (len(one) == len(other) and all(map(is_, one, other)))


def _told(error: BaseException) -> TierstateError:
    """An error as whoever waits for the save is to get it."""
    return error if isinstance(error, TierstateError) else CaptureError(f"the capture failed: {error!r}")
