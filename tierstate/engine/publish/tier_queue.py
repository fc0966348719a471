"""One queue and one thread per tier: publishes saves to the tier in their order, and copies failed ones later.

The `Cascade` has the queues of all tiers. It makes the jobs that copy versions from faster tiers to slower ones, and
decides which versions a faster tier must keep until that is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstate.engine.placement import LastSave, Routes
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import RankFailed, SaveSkipped, TierError, TierFull, TierstateError, error_text
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.retention import RetentionEntry
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.trace import span

from .backlog import MAX_WAITING, Backlog, PendingVersion, RetryTimer, held_versions, missed_versions
from .publish import LOOK_AGAIN_AFTER, NOT_THE_TIERS_FAULT, CascadeJob, DirectJob, Job, drop_frames, may_succeed_later
from .save_state import SaveState, SavesUnderWay

log = logging.getLogger("tierstate")


HISTORY = 1024
"""The number of newest saves whose times are kept for statistics."""


RECENT_COPIES = 16
"""The number of newest copies from which the speed of a tier is computed."""


MANY_HELD = 2
"""A warning is logged when a tier holds more versions than this longer than ``keep`` says. One or two are normal:
they are just being copied."""


TRY_AGAIN = 0.5
"""Seconds after which a tier's thread goes on that could not find out what is to be written next."""


LOOK_AT_OTHERS = 0.5
"""Seconds between two looks whether another trainer's save has arrived that is owed to a tier."""


LOOK_FOR_SOURCE = 0.02
"""Seconds between two looks whether a faster tier has got the version that is owed to a tier."""


@dataclass
class TierCounters:
    """Counters of one tier queue, for `Checkpointer.stats`.

    Attributes:
        saves: versions committed.
        failures: saves that failed.
        skipped: saves that were left out, since newer ones were waiting.
        brought: missing versions that were copied later; also in ``saves``.
        raw, stored: raw bytes of the committed states, of what of them goes to the tier, and bytes written for them.
        seconds: for each of the newest saves, the time from the call of ``save`` to the commit.
    """

    saves: int = 0
    failures: int = 0
    skipped: int = 0
    brought: int = 0
    raw: int = 0
    stored: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _copies: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_COPIES))

    def copied(self, nbytes: int, seconds: float) -> None:
        """Count a copy from a faster tier: raw bytes of the state, and seconds."""
        self._copies.append((nbytes, seconds))

    @property
    def speed(self) -> float:
        """Raw bytes per second of the newest copies; 0 before the first one."""
        copies = list(self._copies)
        return sum(n for n, _ in copies) / max(1e-9, sum(s for _, s in copies)) if copies else 0.0


class TierQueue:
    """The queue and the thread of one tier.

    Jobs that write from slabs go first, since captures need the slabs again; then copies, oldest first.

    Args:
        tier_run: the run in the tier.
        cascade: the queues of all tiers: finds missing versions, and versions that slower tiers still need.
        backlog: the waiting copies.

    Attributes:
        healthy: whether the last save succeeded.
        looked: whether the versions that earlier processes left missing have been looked for.
        held: versions that the tier keeps longer than ``keep`` says, by number, with the reason.
    """

    def __init__(self, tier_run: TierRun, cascade: Cascade, backlog: Backlog[CascadeJob]) -> None:
        self.tier_run, self._name, self._cascade = tier_run, tier_run.name, cascade
        self.counters = TierCounters()
        self.healthy, self.looked = True, False
        self.held: dict[int, str] = {}
        self._retired = True  # the last retention, if there was one, has not failed
        # Entered and left in C: an interrupt at the beginning of `Condition.__exit__` would leave it locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._direct_jobs: deque[DirectJob] = deque()
        self._backlog = backlog
        self._running: Job | None = None  # None again when its result is known, before retention
        self._retry_timer = RetryTimer()
        self._busy = self._ended = self._gave_up = False
        self._paused_until = 0.0
        self._over = Latch()
        self._thread = threading.Thread(target=self._run, name=f"tierstate-{tier_run.name}", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it is."""
        start_thread(self._thread)

    def put(self, job: Job) -> bool:
        """Add a job. Returns whether the queue was idle: no job running, and none waiting that writes from slabs."""
        with self._lock:
            first = not self._busy and not self._direct_jobs
            if isinstance(job, DirectJob):
                self._direct_jobs.append(job)
            else:
                self._leave_out(self._backlog.put(job))
            self._changed.notify()
        return first

    def bring(self, copy: CascadeJob) -> None:
        """Copy a version to this tier that was not meant for it, before all other copies."""
        with self._lock:
            self._backlog.owed[copy.due.seq] = copy
            self._backlog.urgent = copy.due.seq
            self._retry_timer.succeeded()
            self._changed.notify()

    def pause_copies(self, seconds: float) -> None:
        """Begin no copy for so many seconds; 0 goes on at once. Jobs that write from slabs go on."""
        with self._lock:
            self._paused_until = time.monotonic() + seconds
            self._changed.notify()

    def end(self) -> None:
        """End the thread after the jobs in the queue and one more try of the missing versions."""
        with self._lock:
            self._ended = True
            self._changed.notify()

    def stop(self) -> None:
        """Cancel copies and end the thread as soon as possible."""
        with self._lock:
            self._ended = self._gave_up = True
            self._paused_until = 0.0
            for copy in [self._running, *self._backlog.owed.values()]:
                if isinstance(copy, CascadeJob):
                    copy.cancelled.set()
            self._changed.notify()

    def join(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for the thread to end. Returns whether it did."""
        # After an interrupted `Thread.join` Python 3.11 takes the thread for ended. A latch has no such problem.
        if not self._over.wait(timeout):
            return False
        self._thread.join()
        return True

    def wanted(self) -> set[int]:
        """Numbers of the versions that are still to be written to this tier."""
        return {due.seq for due in self.outstanding()}

    def copying(self) -> int | None:
        """The number of the version that is being copied to this tier now, or None."""
        running = self._running
        return running.due.seq if isinstance(running, CascadeJob) else None

    def outstanding(self) -> list[PendingVersion]:
        """All versions still to be written: running, waiting or missing; oldest first."""
        with self._lock:
            return sorted([*(job.due for job in self._begun()), *self._backlog.dues()], key=lambda due: due.seq)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is to be written, and the thread neither drops old versions nor looks for missing ones."""
        with self._lock:
            return self.looked and not self._busy and not self.outstanding()

    def owed(self) -> list[PendingVersion]:
        """The missing versions, which are copied when that is possible, oldest first."""
        with self._lock:
            running = self._running
            running_copy = [running.due] if isinstance(running, CascadeJob) and running.save_state is None else []
            return sorted([*running_copy, *(copy.due for copy in self._backlog.owed.values())], key=lambda due: due.seq)

    @property
    def waiting(self) -> int:
        """Number of saves that run or wait; missing versions do not count."""
        with self._lock:
            return sum(job.save_state is not None for job in self._begun()) + len(self._backlog)

    def _begun(self) -> list[Job]:
        return [*([self._running] if self._running else []), *self._direct_jobs]

    @property
    def left(self) -> int:
        """About how many raw bytes are still to be written to this tier."""
        with self._lock:
            written = self._running.stored if self._running else 0
            return max(0, sum(due.nbytes for due in self.outstanding()) - written)

    def _run(self) -> None:
        self.tier_run.identity.prepare()
        self._look_back()
        while (job := self._next()) is not None:
            try:
                self._publish(job)
            except BaseException as error:  # as for `_goes_on`
                self._note_failure("a save", error)
                self._settle(job, self._told(error))
            # The job holds the version and its tables: drop it before waiting for the next one.
            del job
        self._over.set()

    @contextmanager
    def _goes_on(self, what: str) -> Iterator[None]:
        """Whatever fails in the block, as for lack of memory, is only logged: if the thread ended, every later save
        would wait for ever, and so would `close`."""
        try:
            yield
        except BaseException as error:
            self._note_failure(what, error)

    def _note_failure(self, what: str, error: BaseException) -> None:
        with suppress(BaseException):
            log.error("%s: %s failed: %s", self._name, what, error_text(error), exc_info=error)

    def _look_back(self) -> None:
        try:
            for copy in self._cascade.missed(self._name):
                with self._lock:
                    self._backlog.owe(copy)
                log.info("step %d is owed to %s since an earlier process", copy.due.step, self._name)
        except BaseException as error:
            # Any error of a tier: this thread must not end.
            log.warning("%s: what it lacks of earlier saves cannot be told: %r", self._name, error)
        self.looked = True

    def _next(self) -> Job | None:
        """The next job, which is waited for; None at the end."""
        while True:
            try:
                return self._wait_for_job()
            except BaseException as error:  # as for `_goes_on`
                self._note_failure("the look for what is to be written next", error)
            time.sleep(TRY_AGAIN)

    def _wait_for_job(self) -> Job | None:
        with self._lock:
            self._running, self._busy = None, False
            while True:
                self._leave_out(self._backlog.trim())
                missing = not self._gave_up and (self._ended or not self._retry_timer.left)
                waits = bool(self._backlog.owed) and not self._ended
                others = self._cascade.coming_from_others(self._name) if waits else set()
                paused = max(0.0, self._paused_until - time.monotonic())
                early = not self._gave_up and self._backlog.too_early
                # Last, so that nothing can fail once a job is taken.
                job = self._take(missing, others)
                if job is not None or (self._ended and not paused and not early):
                    self._running, self._busy = job, job is not None
                    return job
                look = LOOK_FOR_SOURCE if early else LOOK_AT_OTHERS if others else 0.0
                until = look if self._ended else max(self._retry_timer.left, look)  # the last try waits for no pause
                self._changed.wait(paused or (until if self._backlog.owed else None))

    def _take(self, missing: bool, others: Collection[int]) -> Job | None:
        if time.monotonic() < self._paused_until:
            return self._direct_jobs.popleft() if self._direct_jobs and not self.tier_run.together else None
        first = self._backlog.first if self._direct_jobs and self.tier_run.together else None
        if first is not None and first < self._direct_jobs[0].due.seq:
            # All ranks must commit in the order of the saves: in other orders they would wait for each other.
            return self._backlog.take(missing=False)
        return self._direct_jobs.popleft() if self._direct_jobs else self._backlog.take(missing, others)

    def _leave_out(self, copies: Sequence[CascadeJob]) -> None:
        name = self._name
        for copy in copies:
            self.counters.skipped += 1
            why = f"{name} lags behind, and newer saves waited for it (see `on_lag`)"
            with self._goes_on("a report"):
                level = logging.WARNING if copy.save_state else logging.INFO
                log.log(level, "step %d is left out on %s, which lags behind: newer saves wait", copy.due.step, name)
                if copy.save_state is not None:
                    self.tier_run.withdraw(copy.due.seq, why, left_out=True)
            if copy.save_state is not None:
                copy.save_state.leave_out(name, why)
            with self._goes_on("a report"):
                self._emit("left_out", copy.due, reason="newer saves wait")

    def _publish(self, job: Job) -> None:
        self._make_room()
        try:
            if self._ended and isinstance(job, CascadeJob) and job.save_state is not None and self.tier_run.forsaken():
                # Now, and not after this rank has read and written its part.
                raise RankFailed("other ranks have died, and this one ends")
            if job.save_state is None and self._needless(job.due):
                self._retry_timer.succeeded()
                return
            what = "cascade" if isinstance(job, CascadeJob) else "publish"
            with span(what, tier=self._name, step=job.due.step) as traced:
                record = job.run()
                traced.also(bytes=job.stored)
        except BaseException as raised:
            if isinstance(job, DirectJob):
                job.drain()
            error = self._told(raised)
            with self._goes_on("the report of a failure"):
                self._fail(job, error)
            self._settle(job, error)
            if isinstance(error, TierFull):
                self.retire()  # for the next save: `keep` may be shorter than it was when the tier became full
        else:
            with self._goes_on("the report of a commit"):
                self._arrived(job, record)
            self._settle(job, None)
            self.retire()

    def _make_room(self) -> None:
        """Retention before a save. Never raises: the job must run, as it gives the slabs back that it is fed."""
        with self._goes_on("retention"):
            if not self.tier_run.tier.traits.persistent:
                # A tier that is not persistent drops its oldest versions before the next save, to have room for it.
                self.retire(room_for_one=True)
            elif self.held or not self._retired:
                # Slower tiers may have got by now what was held for them, and in a full tier no version would arrive
                # after which it would be dropped.
                self.retire()

    def _told(self, error: BaseException) -> Exception:
        """The error for callers that wait: in their threads `SystemExit`, say, would end the program without a word."""
        if isinstance(error, Exception):
            return error
        return TierError(f"{self._name}: ended with {error_text(error)}, which is no error of a tier", tier=self._name)

    def _settle(self, job: Job, error: BaseException | None) -> None:
        """See to it that callers that wait for a job get its outcome, also where the report of it has failed."""
        self._running = None
        if job.save_state is not None and not job.save_state.tiers[self._name].done():
            if error is None:
                job.save_state.committed(self._name)
            else:
                drop_frames(error)
                job.save_state.failed(self._name, error)

    def _needless(self, due: PendingVersion) -> bool:
        """Whether a missing version is on the tier already, or retention would drop it at once."""
        if due.seq in self.tier_run.log.seqs():
            self.tier_run.look_again()  # the answer to its commit was lost, so the cached log lacks it
            self._cascade.observer.brought(self._name, due)
            return True
        marks = [RetentionEntry(d.seq, d.step, d.time, d.metadata) for d in self.owed()]
        return due.seq not in self.tier_run.worth_bringing(marks)

    def _arrived(self, job: Job, record: Record) -> None:
        # Of many ranks, the record here is the part of this one. What rules send to other tiers alone does not count:
        # what was written is compared with it.
        name, counters, raw = self._name, self.counters, record.present_nbytes
        about: dict[str, Any] = {"version": job.committed, "saved": job.due.time, "raw": raw}
        if not self.healthy:
            self._emit("back", job.due, **about)
        self.healthy = True
        self._retry_timer.succeeded()
        self._recall_mends()
        counters.saves += 1
        counters.raw += raw
        counters.stored += job.stored
        if isinstance(job, CascadeJob) and job.began is not None:
            counters.copied(job.due.nbytes, time.monotonic() - job.began)
        with self._lock:
            # Before the commit is reported: faster tiers then hold the version no longer for this one.
            self._backlog.arrived(job.due)
            self._running = None
        self._cascade.observer.arrived(self._name, job.due)
        if job.save_state is None:
            log.warning("step %d, which had not arrived at %s, is there now", job.due.step, name)
            self._cascade.observer.brought(self._name, job.due)
            counters.brought += 1
            self._emit("brought", job.due, nbytes=job.stored, **about)
        else:
            job.save_state.version = job.committed or job.save_state.version
            seconds = job.save_state.measured(name)
            counters.seconds.append(seconds)
            job.save_state.committed(name)
            if isinstance(job, CascadeJob) and job.began is not None:
                took = time.monotonic() - job.began
                self._emit("cascaded", job.due, nbytes=job.stored, seconds=took, **about)
            else:
                self._emit("committed", job.due, nbytes=job.stored, seconds=seconds, **about)

    def _fail(self, job: Job, error: BaseException) -> None:
        name, save_state = self._name, job.save_state
        if save_state is not None:
            self.tier_run.withdraw(job.due.seq, error, left_out=isinstance(error, SaveSkipped))
            if isinstance(error, SaveSkipped):
                self.counters.skipped += 1
                log.warning("step %d is left out on %s: %s", save_state.head.step, name, error)
                self._emit("left_out", job.due, reason=str(error))
                save_state.leave_out(name, str(error))
                return
        if not (isinstance(error, NOT_THE_TIERS_FAULT) or (save_state and save_state.lost)):
            self._is_away(error)
        if isinstance(error, LOOK_AGAIN_AFTER):
            self.tier_run.look_again()
        # Before the failure is reported: until then faster tiers hold the version from which it is copied later.
        owed = may_succeed_later(error) and self._owe(job)
        for kind in (["failed"] if save_state is not None else []) + (["owed"] if owed else []):
            self._emit(kind, job.due, reason=error_text(error))
        if save_state is None:
            said = "is still owed" if owed else "cannot be brought"
            log.log(logging.INFO if owed else logging.WARNING, "step %d %s to %s: %s", job.due.step, said, name, error)
            return
        self.counters.failures += 1
        later = "; it is brought when that is possible" if owed else ""
        if isinstance(error, TierFull) and self.held:
            later = f"; {len(self.held)} versions stay there longer than `keep` says: {self._reasons()}"
        foreign = not isinstance(error, TierstateError)  # a bug: log the traceback
        log.error("step %d was not saved to %s: %s%s", save_state.head.step, name, error, later, exc_info=foreign)
        drop_frames(error)
        with self._lock:
            self._running = None
        # Before a waiting caller returns and makes the next save, which may be due on this tier instead.
        self._cascade.observer.failed(self._name, save_state, error)
        save_state.failed(name, error)

    def _emit(self, kind: str, due: PendingVersion, **values: Any) -> None:
        """An event of a version in this tier."""
        self.tier_run.events.emit(kind, tier=self._name, step=due.step, seq=due.seq, **values)

    def _is_away(self, error: BaseException) -> None:
        """A failure of the tier itself, and not of the source or the capture."""
        if self.healthy:
            self.tier_run.events.emit("away", tier=self._name, reason=error_text(error))
        self.healthy = False

    def _owe(self, job: Job) -> bool:
        """Make a failed save a missing version. Returns whether it will be copied later."""
        self._retry_timer.failed()
        if job.save_state is None:
            later = None if job.cancelled.is_set() else job
        else:
            later = None if job.save_state.lost else self._cascade.copy_later(self._name, job.save_state)
        # At the end what is owed is tried once more; so is a save that fails then, unless ranks have died: their job
        # begins again as soon as all of its processes have ended.
        last = self._ended and (job.save_state is None or self.tier_run.forsaken())
        with self._lock:
            self._gave_up = self._gave_up or last
            if later is not None and self._backlog.owe(later):
                self._running = None  # it must not count twice
                self._leave_out(self._backlog.trim())
            return later is not None and later.due.seq in self._backlog.owed

    def _recall_mends(self) -> None:
        """Load the list of repaired chunks now, so that the next capture can decide about reuse without I/O."""
        try:
            self.tier_run.recall()
        except BaseException as error:
            # Any error of a tier: the save is committed, and callers that wait for it must return.
            log.debug("%s: what was mended there is asked for later: %r", self._name, error)

    def retire(self, *, room_for_one: bool = False) -> None:
        """Retention: drop versions that need not be kept. An error is only logged; the next save tries again.

        Args:
            room_for_one: count the version that is about to be written as one of the `last` that are kept.
        """
        try:
            pinned = self._cascade.pinned(self._name)
            decision = self.tier_run.retire(pinned, room_for_one=room_for_one)
        except BaseException as error:
            # Any error of a tier: if this thread ended, every later save would wait for ever.
            log.warning("%s: old versions could not be dropped, which is tried again: %r", self._name, error)
            self._retired = False
            return
        self._retired = True
        for seq in decision.drop:
            self.tier_run.events.emit("dropped", tier=self._name, seq=seq)
        longer = (s for s, why in decision.keep.items() if why == (pinned.get(s),) and s not in self.tier_run.held)
        were, self.held = len(self.held), {s: pinned[s] for s in longer}
        if len(self.held) > MANY_HELD >= were:
            said = "%s keeps %d versions longer than `keep` says: %s"
            log.warning(said, self._name, len(self.held), self._reasons())

    def _reasons(self) -> str:
        return ", ".join(sorted(set(self.held.values())))


class SaveObserver(Protocol):
    """Learns what becomes of each save in each tier; implemented by `SavePipeline`. Called in the tiers' threads."""

    def arrived(self, name: str, due: PendingVersion) -> None:
        """A version was committed to the tier; called before callers that wait for it return."""

    def failed(self, name: str, save_state: SaveState, error: BaseException) -> None:
        """A save failed in the tier; called before callers that wait for it get the error."""

    def brought(self, name: str, due: PendingVersion) -> None:
        """A version that had failed in the tier has been copied to it since."""


class Cascade:
    """The queues of all tiers of a policy, and the copies between tiers.

    Args:
        policy: the tiers, their intervals (`every`) and what happens when a tier lags (`on_lag`).
        tier_runs: the run in each tier, in the policy's order.
        saves: the saves in progress.
        arena: the host memory for copies.
        observer: learns what becomes of each save in each tier.

    Attributes:
        before: number of the first version of this process. Missing versions with lower numbers were found in a faster
            persistent tier.
        others: returns the other ones that publish versions of this run in this process, as an agent has for a trainer
            that was killed and for the next one: retention drops nothing that they wait for or build on, and what they
            are about to write is not copied beside them.
    """

    def __init__(
        self,
        policy: Policy,
        tier_runs: Sequence[TierRun],
        saves: SavesUnderWay,
        arena: Arena,
        observer: SaveObserver,
    ) -> None:
        self._tier_runs = {tier_run.name: tier_run for tier_run in tier_runs}
        self._policy, self._saves, self._arena = policy, saves, arena
        self.observer = observer
        self._routes = Routes(policy)
        # If rules send leaves to different tiers, a tier may lack leaves that a slower tier needs.
        self._parted = any(rule.tiers is not None for rule in policy.rules)
        self.before = 0
        self._told: set[str] = set()
        self.others: Callable[[], Sequence[Cascade]] = tuple
        self.queues: dict[str, TierQueue] = {}

    def make_queues(self, seq: int) -> None:
        """Make the queues, whose threads do not run yet.

        Args:
            seq: number of the first version that this process saves.
        """
        self.before = seq
        self.queues = {name: self._queue(name) for name in self._tier_runs}
        for tier_run in self._tier_runs.values():
            tier_run.identity.settled = Latch()  # before any thread writes a record

    def _queue(self, name: str) -> TierQueue:
        tier = self._policy.tier(name)
        return TierQueue(self._tier_runs[name], self, Backlog(tier.every, tier.on_lag))

    def copy(
        self,
        name: str,
        due: PendingVersion,
        save_state: SaveState | None = None,
        entries: Sequence[str] = (),
        source: SaveState | None = None,
    ) -> CascadeJob:
        """The job that copies a version to a tier from faster tiers; see `CascadeJob` for the arguments."""
        faster = self._faster(name) if save_state is not None else self._whole(name)
        return CascadeJob(due, self._tier_runs[name], faster, self._routes, self._arena, save_state, entries, source)

    def copy_later(self, name: str, save_state: SaveState) -> CascadeJob | None:
        """The job that copies a failed save from a faster tier later; None where no faster tier can have it."""
        if not self._lasts(name) or not self._brings(name):
            return None
        faster = [tier_run.name for tier_run in self._whole(name) if tier_run.name in save_state.tiers]
        if all(save_state.error(n) is not None for n in faster):
            return None
        return self.copy(name, PendingVersion.of(save_state), source=save_state)

    def hurry(self, newest: PendingVersion, seconds: float) -> tuple[str, int] | None:
        """The process will be ended: see to it that the newest version gets to a persistent tier before anything else.

        If no persistent tier gets it, it is copied to the nearest one that works. Copies to other tiers wait until it
        is there, and for half of the time at most.

        Args:
            newest: the newest version.
            seconds: that are left.

        Returns:
            That tier, and the version's number; None if no tier can have it.
        """
        seq, lasting = newest.seq, [name for name in self._tier_runs if self._lasts(name)]
        first = next((n for n in lasting if seq in self.queues[n].wanted() or seq in self._tier_runs[n].known), None)
        if first is None:
            first = next((n for n in lasting if self.queues[n].healthy and self._brings(n) and self._whole(n)), None)
            if first is None:
                return None
            save_state = self._saves.find(seq)
            copy = self.copy_later(first, save_state) if save_state is not None else self.copy(first, newest)
            if copy is None:
                return None
            self.queues[first].bring(copy)
        if seq not in self._tier_runs[first].known:
            for name, queue in self.queues.items():
                if name != first:
                    queue.pause_copies(seconds / 2)
        return first, seq

    def sources(self, name: str, names: Collection[str]) -> list[TierRun]:
        """Those of some tiers from which a tier gets copies."""
        return [tier_run for tier_run in self._faster(name) if tier_run.name in names]

    def go_on(self) -> None:
        """End the pauses that `hurry` began."""
        for queue in self.queues.values():
            queue.pause_copies(0.0)

    def pinned(self, name: str) -> Mapping[int, str]:
        """Versions that a tier must not drop now, by number, with the reason; see `held_versions`."""
        if self._tier_runs[name].tier.traits.scarce:
            return {}
        slower = [n for n in list(self._tier_runs)[list(self._tier_runs).index(name) + 1 :] if self._lasts(n)]
        others = self.others()
        wanted = {n: self.wanted(n).union(*(other.wanted(n) for other in others)) for n in slower}
        found = held_versions(wanted, {n: self._tier_runs[n].known for n in slower}, each=self._parted)
        if self._lasts(name):
            for n, queue in ((n, self.queues[n]) for n in slower):
                if (seq := queue.copying()) is not None:
                    found.setdefault(seq, n)
                if not queue.looked:
                    # It is not known yet which versions of earlier processes it lacks: keep all of them.
                    found |= {s: n for s in self._tier_runs[name].log.seqs() if s < self.before}
        tagged = {seq for one in (self, *others) for seq in tuple(one._tier_runs[name].held)}
        held = dict.fromkeys(tagged, "it is about to get a tag")
        bases = {seq for other in others if (seq := other._base(name)) is not None}
        held |= dict.fromkeys(bases, "what another trainer has saved builds on it")
        return held | {seq: f"{n} has not got it yet" for seq, n in found.items()}

    def wanted(self, name: str) -> set[int]:
        """Numbers of the versions that are still to be written to a tier."""
        queue = self.queues.get(name)
        return self._saves.wanted(name) | (queue.wanted() if queue is not None else set())

    def coming_from_others(self, name: str) -> set[int]:
        """Numbers of the versions that others are writing to a tier, or are about to: this process's copy of one waits
        until it is known whether it is needed."""
        return {seq for other in self.others() for seq in other._saves.wanted(name)}

    def _base(self, name: str) -> int | None:
        """Number of the version whose chunks are reused by what is being written to a tier; None without any."""
        return self._tier_runs[name].base if self.wanted(name) else None

    def missed(self, name: str) -> list[CascadeJob]:
        """Jobs for the versions that earlier processes left missing on a tier, and that a faster tier still has."""
        faster = [tier_run for tier_run in self._whole(name) if self._lasts(tier_run.name)]
        if not faster or not self._lasts(name) or not self._brings(name):
            return []
        there = self._seqs(faster)
        try:
            newest = self._tier_runs[name].newest()
        except TierstateError as error:
            log.warning("%s: its log cannot be read, so the newest version there is may be owed: %s", name, error)
            last: LastSave | None = None
            seqs = sorted(there)[-1:]
        else:
            head = newest.version.head if newest else None
            last = (head.step, head.time) if head else None
            seqs = [seq for seq in sorted(there) if head is None or seq > head.seq][-MAX_WAITING:]
        dues = [due for seq in seqs if (due := self._due(name, there[seq], seq)) is not None]
        return [self.copy(name, due) for due in missed_versions(self._policy.tier(name).every, last, dues)]

    def _seqs(self, tier_runs: Sequence[TierRun]) -> dict[int, TierRun]:
        """Numbers of the versions of earlier processes, each with the nearest of these tiers that has it."""
        found: dict[int, TierRun] = {}
        for tier_run in reversed(tier_runs):
            try:
                found |= dict.fromkeys(tier_run.log.seqs(), tier_run)
            except TierstateError as error:
                log.warning("%s: its log cannot be listed: %s", tier_run.name, error)
        return {seq: tier_run for seq, tier_run in found.items() if seq < self.before}

    def _due(self, name: str, tier_run: TierRun, seq: int) -> PendingVersion | None:
        try:
            version = tier_run.record(seq).version
        except TierstateError as error:
            log.warning("%s: version %d cannot be read: %s", tier_run.name, seq, error)
            return None
        here = self._routes.of(version.leaves)[name].leaves.any()
        return PendingVersion.of(version) if here else None

    def _faster(self, name: str) -> list[TierRun]:
        faster = list(self._tier_runs.values())[: list(self._tier_runs).index(name)]
        return [tier_run for tier_run in faster if not tier_run.tier.traits.scarce]

    def _whole(self, name: str) -> list[TierRun]:
        """The faster tiers in which one rank can read whole versions."""
        return [tier_run for tier_run in self._faster(name) if tier_run.whole]

    def _brings(self, name: str) -> bool:
        """Whether this process copies missing versions to a tier. Warns once if no faster tier has whole versions."""
        tier_run = self._tier_runs[name]
        if tier_run.alone and self._faster(name) and not self._whole(name) and name not in self._told:
            self._told.add(name)
            log.warning("%s: what does not arrive is not brought later: no rank finds whole versions before it", name)
        return tier_run.alone

    def _lasts(self, name: str) -> bool:
        return self._tier_runs[name].tier.traits.persistent
