"""Lanes: one thread per tier, in which saves are published in their order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from tierstate.manifest.errors import TierFull, TierstateError
from tierstate.manifest.record import Record
from tierstate.manifest.retention import Mark

from .backlog import Backlog
from .jobs import BLAMELESS, STALE, Copy, Intake, Job, passing, without_frames
from .owing import Due
from .patience import Patience
from .shelf import Shelf
from .tally import Tally
from .ties import Ties
from .verdict import LeftOut

log = logging.getLogger("tierstate")

MANY = 2
"""Versions that a tier holds longer than ``keep`` says before it is told: one or two are under way all the time."""

_number = attrgetter("seq")


class Lane:
    """The thread of one tier.

    What comes from slabs goes first, since the arena waits for it; then what is copied, oldest first.

    Args:
        shelf: the run in the tier.
        ties: to the flow.
        backlog: where copies wait.

    Attributes:
        healthy: whether the last attempt went well.
        looked: whether it is known what should have come here before this process began.
        held: versions that stay longer than ``keep`` says, and why.
    """

    def __init__(self, shelf: Shelf, ties: Ties, backlog: Backlog[Copy]) -> None:
        self.shelf, self._ties = shelf, ties
        self.tally = Tally()
        self.healthy, self.looked = True, False
        self.held: dict[int, str] = {}
        self._changed = threading.Condition()
        self._intakes: deque[Intake] = deque()
        self._backlog = backlog
        self._running: Job | None = None
        self._patience = Patience()
        self._ended = self._gave_up = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tierstate-{shelf.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, job: Job) -> bool:
        """Add a save. Returns whether it is the next one, with nothing under way before it."""
        with self._changed:
            first = self._running is None and not self._intakes
            if isinstance(job, Intake):
                self._intakes.append(job)
            else:
                self._leave_out(self._backlog.put(job))
            self._changed.notify()
        return first

    def end(self) -> None:
        """No more saves come: do what is left, try once more what is owed, and stop."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def stop(self) -> None:
        """Give up what is under way, as soon as it can be."""
        with self._changed:
            self._ended = self._gave_up = True
            for copy in [self._running, *self._backlog.owed.values()]:
                if isinstance(copy, Copy):
                    copy.cancelled.set()
            self._changed.notify()

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; whether it did."""
        # An interrupted join of a thread makes Python 3.11 take it for ended; of an event it does not.
        if not self._over.wait(timeout):
            return False
        self._thread.join()
        return True

    def wanted(self) -> set[int]:
        """Numbers of the versions that are to be copied here."""
        return {due.seq for due in self.outstanding()}

    def copying(self) -> int | None:
        """The number of the version that is being copied here right now."""
        running = self._running
        return running.due.seq if isinstance(running, Copy) else None

    def outstanding(self) -> list[Due]:
        """All versions that are under way, wait or are owed, oldest first."""
        with self._changed:
            return sorted([*(job.due for job in self._begun()), *self._backlog.dues()], key=_number)

    def owed(self) -> list[Due]:
        """Versions that should be here, are not, and will be brought when that is possible, oldest first."""
        with self._changed:
            running = self._running
            owing = [running.due] if isinstance(running, Copy) and running.ticket is None else []
            return sorted([*owing, *(copy.due for copy in self._backlog.owed.values())], key=_number)

    @property
    def waiting(self) -> int:
        """Saves that are under way or wait."""
        with self._changed:
            return sum(job.ticket is not None for job in self._begun()) + len(self._backlog)

    def _begun(self) -> list[Job]:
        return [*([self._running] if self._running else []), *self._intakes]

    @property
    def left(self) -> int:
        """Bytes of state that are yet to come here, as far as that can be told."""
        running = self._running
        written = running.stored if running else 0
        return max(0, sum(due.nbytes for due in self.outstanding()) - written)

    def _run(self) -> None:
        self._look_back()
        while (job := self._next()) is not None:
            self._publish(job)
            # The job holds the version and its tables: not until the next save comes.
            del job
            with self._changed:
                self._running = None
        self._over.set()

    def _look_back(self) -> None:
        try:
            for copy in self._ties.missed():
                with self._changed:
                    self._backlog.owe(copy)
                log.info("step %d is owed to %s since an earlier process", copy.due.step, self.shelf.name)
        except BaseException as error:
            # Whatever a tier raises: this thread must live on.
            log.warning("%s: what it lacks of earlier saves cannot be told: %r", self.shelf.name, error)
        self.looked = True

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                self._leave_out(self._backlog.trim())
                debts = not self._gave_up and (self._ended or not self._patience.left)
                job = self._take(debts)
                if job is not None or self._ended:
                    self._running = job
                    return job
                self._changed.wait(self._patience.left if self._backlog.owed else None)

    def _take(self, debts: bool) -> Job | None:
        first = self._backlog.first if self._intakes and self.shelf.together else None
        if first is not None and first < self._intakes[0].due.seq:
            # All ranks commit in the order of the saves: each waits for the others, and none for one that is behind.
            return self._backlog.take(debts=False)
        return self._intakes.popleft() if self._intakes else self._backlog.take(debts)

    def _leave_out(self, copies: Sequence[Copy]) -> None:
        name = self.shelf.name
        for copy in copies:
            self.tally.skipped += 1
            level = logging.WARNING if copy.ticket else logging.INFO
            log.log(level, "step %d is left out on %s, which lags behind: newer saves wait", copy.due.step, name)
            if copy.ticket is not None:
                why = f"{name} lags behind, and newer saves waited for it (see `on_lag`)"
                self.shelf.withdraw(copy.due.seq, why, left_out=True)
                copy.ticket.leave_out(name, why)

    def _publish(self, job: Job) -> None:
        if not self.shelf.tier.traits.persistent:
            # A tier that forgets anyway drops its oldest versions before the next one comes, not after.
            self.retire(room_for_one=True)
        try:
            if job.ticket is None and self._needless(job.due):
                self._patience.calm()
                return
            record = job.run()
        except BaseException as error:
            self._fail(job, error)
        else:
            self._arrived(job, record)
            self.retire()
        if job.ticket is not None:
            self._ties.settled(job.ticket)

    def _needless(self, due: Due) -> bool:
        """Whether what is owed is here already, or would be dropped as soon as it is."""
        if due.seq in self.shelf.log.seqs():
            self.shelf.look_again()  # its commit was not answered, so it is not known here
            self._ties.brought(due)
            return True
        marks = [Mark(d.seq, d.step, d.time, d.metadata) for d in self.owed()]
        return due.seq not in self.shelf.worth_bringing(marks)

    def _arrived(self, job: Job, record: Record) -> None:
        name, tally = self.shelf.name, self.tally
        self.healthy = True
        self._patience.calm()
        self._recall_mends()
        tally.saves += 1
        tally.raw += record.version.nbytes
        tally.stored += job.stored
        if isinstance(job, Copy) and job.began is not None:
            tally.copied(job.due.nbytes, time.monotonic() - job.began)
        with self._changed:
            self._backlog.arrived(job.due)
        if job.ticket is None:
            tally.brought += 1
            log.warning("step %d, which had not arrived at %s, is there now", job.due.step, name)
            self._ties.brought(job.due)
        else:
            tally.seconds.append(job.ticket.committed(name))

    def _fail(self, job: Job, error: BaseException) -> None:
        name, ticket = self.shelf.name, job.ticket
        if ticket is not None:
            self.shelf.withdraw(job.due.seq, error, left_out=isinstance(error, LeftOut))
            if isinstance(error, LeftOut):
                self.tally.skipped += 1
                log.warning("step %d is left out on %s: %s", ticket.head.step, name, error)
                ticket.leave_out(name, str(error))
                return
        if not (isinstance(error, BLAMELESS) or (ticket and ticket.lost)):
            # Its own doing, and not that there was nothing to write.
            self.healthy = False
        if isinstance(error, STALE):
            self.shelf.look_again()
        # Before anybody learns of the failure: until then what it is to be copied from is held.
        owed = passing(error) and self._owe(job)
        if ticket is None:
            said = "is still owed" if owed else "cannot be brought"
            log.log(logging.INFO if owed else logging.WARNING, "step %d %s to %s: %s", job.due.step, said, name, error)
            return
        self.tally.failures += 1
        later = "; it is brought when that is possible" if owed else ""
        if isinstance(error, TierFull) and self.held:
            later = f"; {len(self.held)} versions stay there longer than `keep` says: {self._reasons()}"
        foreign = not isinstance(error, TierstateError)  # somebody's bug, to be found by its frames
        log.error("step %d was not saved to %s: %s%s", ticket.head.step, name, error, later, exc_info=foreign)
        without_frames(error)
        ticket.failed(name, error)

    def _owe(self, job: Job) -> bool:
        """Whether what failed is owed from now on."""
        self._patience.failed()
        if job.ticket is None:
            debt = None if job.cancelled.is_set() else job
        else:
            debt = None if job.ticket.lost else self._ties.debt(job.ticket)
        with self._changed:
            self._gave_up = self._gave_up or self._ended
            return debt is not None and self._backlog.owe(debt)

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
            pinned = self._ties.pinned()
            decision = self.shelf.retire(pinned, room_for_one=room_for_one)
        except BaseException as error:
            # Whatever a tier raises: this thread must live on, or every later save would wait for it forever.
            log.warning("%s: old versions could not be dropped, which is tried again: %r", self.shelf.name, error)
            return
        were, self.held = len(self.held), {s: pinned[s] for s, why in decision.keep.items() if why == (pinned.get(s),)}
        if len(self.held) > MANY >= were:
            said = "%s keeps %d versions longer than `keep` says: %s"
            log.warning(said, self.shelf.name, len(self.held), self._reasons())

    def _reasons(self) -> str:
        return ", ".join(sorted(set(self.held.values())))
