"""The save pipeline: asynchronous saves, from the call of `save` to the commit in every tier that is due.

One thread captures the states, and one thread per tier publishes them. The pipeline numbers the versions, decides to
which tiers a save is written directly and to which it is copied later (cascade), and finishes all saves at close.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeAlias

from tierstate.engine.cadence import AutoCadence
from tierstate.engine.capture.capture_thread import CaptureJob, CaptureThread
from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.capture.snapshot import take_snapshot
from tierstate.engine.events import EventBus
from tierstate.engine.placement import (
    CadenceCount,
    LastSave,
    Route,
    Routes,
    due_tiers,
    enter_without_source,
    entry_tiers,
    rule_warnings,
)
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.publish import DirectJob, Job
from tierstate.engine.publish.save_state import SaveState, SavesUnderWay
from tierstate.engine.publish.tier_queue import Cascade, TierQueue
from tierstate.engine.publish.tier_write import Stages, tier_write_of
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import AlreadyExists, NotFound, RankFull, TierFull, TierstateError, TierUnavailable
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history.log import next_seq
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.places import check_places
from tierstate.tiers.policy.models import format_every
from tierstate.tiers.policy.policy import Policy

from .alarms import LeafAlarms
from .protection import FailurePolicy, Lag, LagBound, SaveHistory

log = logging.getLogger("tierstate")


OnDrain: TypeAlias = Callable[[Mapping[str, int]], None]
"""Called while `SavePipeline.close` waits, with the bytes still to be written to each tier."""


DRAIN_INTERVAL = 0.1
"""Seconds between two calls of OnDrain."""


NO_LEAF = "no rule sends a leaf there"
"""Why a tier gets nothing of a save, though it is due."""


INTERRUPT_GRACE = 5.0
"""Seconds that `close` waits for the threads to end after it was interrupted."""


class PlannedRows(Protocol):
    """What jobs need to know of a save before its bytes come; a `CapturePlan`, or what another process hands over.

    Attributes:
        leaves: the version's leaves.
    """

    @property
    def leaves(self) -> tuple[Leaf, ...]: ...

    def row_leaves(self, chunk: int) -> Array:
        """``(chunks,)``: the leaf of each chunk."""


class _Hurry(NamedTuple):
    """What `SavePipeline.hurry` found: the newest version, and the tier to which it goes first, with its number."""

    newest: PendingVersion | None = None
    first: tuple[str, int] | None = None


class SavePipeline:
    """Writes saves to the tiers of a policy, for a `Checkpointer`: one thread captures, one per tier publishes.

    Args:
        policy: the tiers and the rules.
        tier_runs: the run in each tier, in the policy's order.
        arena: the host memory for captures and copies.
    """

    rank: int | None = None
    """The rank of this process, if several ranks save together."""

    required: Sequence[str] = ()
    """Tiers to which every save goes, whatever their ``every`` says; the same on all ranks."""

    auto: AutoCadence | None = None
    """Chooses the intervals of tiers with ``every: auto``."""

    def __init__(self, policy: Policy, tier_runs: Sequence[TierRun], arena: Arena) -> None:
        self._policy, self._arena = policy, arena
        self._tier_runs = {tier_run.name: tier_run for tier_run in tier_runs}
        self.events = tier_runs[0].events if tier_runs else EventBus("")
        self._on_device = any(tier_run.gpu is not None for tier_run in tier_runs)
        self._pid = os.getpid()
        self._last: dict[str, LastSave | None] = {}
        self._routes = Routes(policy)
        self._saves = SavesUnderWay()
        self._cascade = Cascade(policy, tier_runs, self._saves, arena, self)
        self._history, self._bounds = SaveHistory(), dict[str, LagBound]()
        self.on_failure = FailurePolicy(policy.on_failure)
        self.alarms = LeafAlarms(policy.alarms)
        self._seq, self._look = 0, True
        self._parent = ""
        self._rules_checked = False
        fixed = [(tier.name, tier.every) for tier in policy.tiers]
        self._cadences = {
            name: CadenceCount(name, every) for name, every in fixed if isinstance(every, (int, timedelta))
        }
        self.skipped = 0
        self.ending, self._end, self._hurried = False, math.inf, _Hurry()
        self._capturing: CaptureThread | None = None

    @property
    def queues(self) -> Mapping[str, TierQueue]:
        """The queue of each tier, by the tier's name; empty before the first save."""
        return self._cascade.queues

    def continue_from(self, version: str) -> None:
        """Make a version the parent of the next one, because the state was restored from it. ``version``: its id."""
        self._parent = version
        if self._capturing is not None:
            self._capturing.continue_from(version)

    def submit(self, plan: CapturePlan, head: Head) -> SaveState:
        """Start a save. The state must not change until ``captured`` of the returned `SaveState` is done.

        Args:
            plan: what to capture.
            head: the head of the new version.
        """
        capturing = self._start(head.seq)
        self.on_failure.began()
        self._tell_lost(head.seq)
        routes = self._routes.of(plan.leaves)
        # Not by what is there alone: the first save may be under way when the next one is due.
        new = {name for name in self._cadences if self._last.get(name) is None and self._history.newest(name) is None}
        names, elsewhere = self._due(head, routes)
        for name, cadence in self._cadences.items():
            cadence.add(head.step, head.time, due=name in names, first=name in new)
        self._check_rules(plan.leaves)
        if self.auto is not None:
            self.auto.goes(head.seq, names, {name: route.leaves for name, route in routes.items()})
        save_state = SaveState(head, plan.total, names, elsewhere)
        if not names:
            save_state.nothing_to_do()
            return save_state
        about = {"step": head.step, "seq": head.seq, "nbytes": plan.total}
        save_state.when_captured = lambda seconds: self.events.emit("captured", seconds=seconds, **about)
        save_state.when_full = lambda seconds: self.events.emit("arena_full", seconds=seconds, **about)
        if self._must_skip(plan):
            self.skipped += 1
            save_state.when_full(0.0)
            self.events.emit("skipped", reason="the arena is full (on_full: skip)", **about)
            log.warning("step %d is not saved: the arena is full (on_full: skip)", head.step)
            save_state.skip()
            return save_state
        self._arena.prepare(plan.total)
        final = [plan.without_memory()]  # the plan that is captured in the end: a snapshot may replace it
        work = self._capture_job(save_state, plan, names, routes, lambda: final[0].stages())
        try:
            if self._on_device:
                work = take_snapshot(work)
                final[0] = work.plan.without_memory()
            self._saves.add(save_state)
            self._last |= dict.fromkeys(names, (head.step, head.time))
            self._note_sent(save_state)
            capturing.put(work)
        except BaseException:
            # Interrupted: the capture thread ends it as cancelled. Wait until it does not read the state any more.
            save_state.cancelled.set()
            save_state.told |= set(names)
            capturing.put(work)
            save_state.captured.exception()
            raise
        return save_state

    def _capture_job(
        self,
        save_state: SaveState,
        plan: CapturePlan,
        names: Sequence[str],
        routes: Mapping[str, Route],
        stages: Stages,
    ) -> CaptureJob:
        """What the capture thread does for a save. Arguments as for `_jobs`."""
        return CaptureJob(save_state, plan, self._jobs(save_state, plan, names, routes, stages))

    def _check_rules(self, leaves: Sequence[Leaf]) -> None:
        """At the first save, warn of rules that do nothing for this state. ``leaves``: of the whole state."""
        if not self._rules_checked:
            self._rules_checked = True
            for text in rule_warnings(self._policy, [leaf.path for leaf in leaves]):
                log.warning("policy: %s", text)

    def _note_sent(self, save_state: SaveState) -> None:
        self._history.made(PendingVersion.of(save_state))
        for name, bound in self._bounds.items():
            if name in save_state.tiers:
                bound.sent(save_state)

    def abandon(self, seq: int) -> None:
        """Cancel a save without reporting it as failed. Returns when its state is not read any more."""
        for save_state in self._saves.save_states():
            if save_state.head.seq == seq:
                save_state.cancelled.set()
                self._arena.wake()
                save_state.captured.exception()
                save_state.told |= set(save_state.tiers)

    def _tell_lost(self, before: int) -> None:
        """Raise the error of a save before this version that reached no persistent tier, once; or warn, by the policy's
        ``on_failure``."""
        lasting = [n for n, s in self._tier_runs.items() if s.tier.traits.persistent]
        for save_state, error in self._saves.lost(lasting, before):
            save_state.told |= set(save_state.tiers)
            what = f"this is what became of the save of step {save_state.head.step}; it has no durable copy"
            if save_state.lost:
                error.add_note(what)
                raise error
            self.on_failure.tell(error, what)

    def keep_up(self, save_state: SaveState) -> None:
        """Wait until no tier is further behind this save than its ``max_lag``; called before `save` returns.

        Raises:
            BaseException: why no version that is near enough reached the tier, unless ``on_failure`` says to warn. The
                save was made, and goes on in other tiers.
        """
        for name, bound in self._bounds.items():
            if save_state.skipped or save_state.elsewhere.get(name) == NO_LEAF:
                continue
            error = bound.wait(save_state, self._history.newest(name))
            if error is not None:
                save_state.told.add(name)
                newest = self._history.newest(name)
                has = "has no version" if newest is None else f"has step {newest.step} as its newest"
                what = f"{name} {has}, which is further behind step {save_state.head.step} than its `max_lag` allows"
                self.on_failure.tell(error, what)

    def lag(self, tier: str) -> Lag | None:
        """How far the newest version in a tier is behind the newest save; None if one of them is not known."""
        return self._history.lag(tier)

    def waited(self, tier: str) -> float:
        """Seconds for which saves have waited for a tier because of its ``max_lag``."""
        return self._bounds[tier].waited if tier in self._bounds else 0.0

    def next_seq(self) -> int:
        """The number of the next version (`next_seq`), above all that are in the tiers whose log can be listed.

        Raises:
            PolicyError: two tiers lie in one place.
        """
        if self._look:
            check_places([tier_run.tier for tier_run in self._tier_runs.values()])
            self._look = False
            # Never lower than a number that this process has used: such a save may still be in progress.
            self._seq = max(self._seq, *map(self._highest, self._tier_runs.values()))
        self._seq = self._after(self._seq)
        return self._seq

    def _after(self, highest: int) -> int:
        return next_seq(highest)

    @staticmethod
    def _highest(tier_run: TierRun) -> int:
        try:
            return tier_run.highest_seq()
        except TierstateError as error:
            log.warning("%s: its log cannot be listed: %s", tier_run.name, error)
            return 0

    def _start(self, seq: int) -> CaptureThread:
        if self._capturing is None:
            self._bounds = {tier.name: LagBound(tier.name, tier.max_lag) for tier in self._policy.tiers if tier.max_lag}
            for name in self._tier_runs:
                if (last := self._last_of(name)) is not None:
                    self._history.arrived(name, PendingVersion(-1, *last))
            self._make_queues(seq)
            watch = self._watch if self._policy.statistics else None
            capturing = CaptureThread(self._arena, self._end_queues, self.rank, watch)
            capturing.parent = self._parent
            self._capturing = capturing
        return self._run_threads(self._capturing)

    def _watch(self, version: Version) -> None:
        """Look at the statistics of a version that was captured."""
        try:
            for alarm in self.alarms.look(version):
                log.warning("step %d: %s", alarm.step, alarm.text)
                self.events.emit("alarm", step=alarm.step, seq=alarm.seq, reason=f"{alarm.kind}: {alarm.text}")
        except Exception:  # the version is saved, whatever is wrong with looking at it
            log.exception("the statistics of step %d were not looked at", version.head.step)

    def _make_queues(self, seq: int) -> None:
        """Make the tiers' queues, before the first version of this process, which has this number."""
        self._cascade.make_queues(seq)

    def _run_threads(self, capturing: CaptureThread) -> CaptureThread:
        """Start all threads that do not run yet; not once and for all, since that may have been interrupted."""
        for queue in self.queues.values():
            queue.start()
        capturing.start()
        return capturing

    def _end_queues(self) -> None:
        for queue in self.queues.values():
            queue.end()

    def _due(self, head: Head, routes: Mapping[str, Route]) -> tuple[list[str], dict[str, str]]:
        last = {name: self._last_of(name) for name in self._tier_runs}
        due = due_tiers(self._policy, head.step, last, head.time, self._intervals())
        names = {*due, *self._last_resort(routes)}
        going, elsewhere = [], {}
        for tier in self._policy.tiers:
            if tier.name not in names:
                elsewhere[tier.name] = f"its `every: {format_every(tier.every)}` is not due"
            elif not routes[tier.name].leaves.any():
                elsewhere[tier.name] = NO_LEAF
            else:
                going.append(tier.name)
        return going, elsewhere

    def _intervals(self) -> dict[str, timedelta]:
        return {} if self.auto is None else self.auto.intervals()

    def _last_resort(self, routes: Mapping[str, Route] | None = None) -> tuple[str, ...]:
        """The required tiers, and, if the process will be ended, the nearest persistent tier; of those that get leaves,
        where that is known."""
        lasting = [n for n, tier_run in self._tier_runs.items() if tier_run.tier.traits.persistent]
        taking = [n for n in lasting if routes is None or routes[n].leaves.any()]
        return (*self.required, *(taking[:1] if self.ending else ()))

    def newest_step(self) -> int | None:
        """The step of this process's last save, or else of the newest version in any tier; None if there is none."""
        if (latest := self._history.latest()) is not None:
            return latest.step
        found = [last for name in self._tier_runs if (last := self._last_of(name)) is not None]
        return max(found, key=lambda last: last[1])[0] if found else None

    def _last_of(self, name: str) -> LastSave | None:
        """Step and time of the newest save to a tier: of this process, or else from the tier's log; None if none."""
        if name not in self._last:
            try:
                newest = self._tier_runs[name].newest()
            except TierstateError as error:
                log.warning("%s: its log cannot be read, so this save is taken to be due there: %s", name, error)
                return None
            self._last[name] = (newest.version.head.step, newest.version.head.time) if newest else None
        return self._last[name]

    def _must_skip(self, plan: CapturePlan) -> bool:
        return self._policy.arena.on_full == "skip" and self._arena.lacks(plan.total)

    def _jobs(
        self,
        save_state: SaveState,
        plan: PlannedRows,
        names: Sequence[str],
        routes: Mapping[str, Route],
        stages: Stages,
    ) -> list[tuple[TierQueue, Job]]:
        """The jobs that publish the save: a `DirectJob` for each entry tier, a `CascadeJob` for each other tier."""
        persistent = [self._tier_runs[n].tier.traits.persistent for n in names]
        wish = entry_tiers(names, persistent, [self.queues[n].healthy for n in names])
        # The caller waits for the required tiers: they do not wait for a faster one.
        now = [n for n in names if n in wish[0] or n in self.required]
        wish = (*now,), tuple(n for n in names if n not in now)
        sources = [n for n in names if not self._tier_runs[n].tier.traits.scarce]
        sure = {n for n, lasts in zip(names, persistent, strict=True) if lasts and self.queues[n].healthy}
        entry, cascade = enter_without_source(*wish, {n: routes[n].leaves for n in names}, sure)
        entries, rows = [n for n in entry if n in sources], plan.row_leaves(self._policy.chunk)

        def job(name: str) -> Job:
            if name in cascade:
                return self._cascade.copy(name, PendingVersion.of(save_state), save_state, entries)
            tier_run, faster = (
                self._tier_runs[name],
                list(takewhile(lambda s: s.name != name, self._tier_runs.values())),
            )
            return DirectJob(
                save_state, tier_write_of(tier_run, save_state.head, plan.leaves, rows, routes[name], stages, faster)
            )

        return [(self.queues[name], job(name)) for name in names]

    def hurry(self, end: float) -> None:
        """The process will be ended: get the newest version to a persistent tier first, and bound `close`.

        Args:
            end: the time of `time.monotonic` until which saves may go on.
        """
        self._end, newest = end, self._history.latest()
        if newest is not None and self.queues:
            first = self._cascade.hurry(newest, max(0.0, end - time.monotonic()))
            self._hurried = _Hurry(newest, first)

    def bring_newest(self) -> None:
        """Nothing: a process that saves alone brings it by `hurry`."""

    def seconds_left(self) -> float:
        """Seconds until the process will be ended; infinite before `hurry`."""
        return self._end - time.monotonic()

    def unfinished(self) -> str:
        """The saves under way that were made before `hurry`, for messages; empty if there are none."""
        newest, first = self._hurried
        found = self._saves.late(newest.seq if newest else None)
        if newest and first and self._on_its_way(*first) and (text := f"step {newest.step} to {first[0]}") not in found:
            found.insert(0, text)
        return ", ".join(found)

    def _on_its_way(self, name: str, seq: int) -> bool:
        return seq in self.queues[name].wanted() and seq not in self._tier_runs[name].known

    def left_behind(self) -> str:
        """What becomes of the versions that some tier still lacks when this process ends; empty if there are none."""
        left = ((name, queue.outstanding()) for name, queue in self.queues.items())
        return "; ".join(self._left_of(name, dues) for name, dues in left if dues)

    def _settled(self, name: str, seq: int) -> None:
        if self._hurried.first == (name, seq):
            self._cascade.go_on()

    def arrived(self, name: str, due: PendingVersion) -> None:
        """A version was committed to a tier."""
        self._settled(name, due.seq)
        self._history.arrived(name, due)
        if self._tier_runs[name].tier.traits.persistent:
            self.on_failure.taken()

    def failed(self, name: str, save_state: SaveState, error: BaseException) -> None:
        """A save failed in a tier."""
        self._settled(name, save_state.head.seq)
        if self._last.get(name) == (save_state.head.step, save_state.head.time):
            # A failed save does not count for the interval (`every`): the next save goes to that tier instead.
            self._last[name] = None
        if isinstance(error, (AlreadyExists, NotFound)):
            # Another writer used the number, or deleted packs that this save reuses: list the logs again.
            self._look = True

    def brought(self, name: str, due: PendingVersion) -> None:
        """A version whose save had failed was copied to the tier: it counts for the interval (`every`) now."""
        self._saves.brought(name, due.seq)
        if self._last.get(name) is None:
            self._last[name] = due.step, due.time

    def pinned(self, tier: str) -> Mapping[int, str]:
        """Versions that a tier must keep, by number, with the reason: slower tiers still have to copy them from it."""
        return self._cascade.pinned(tier) if self.queues else {}

    def coming(self, tier: str) -> set[int]:
        """Numbers of the versions being written to a tier or waiting for it: garbage collection keeps their packs."""
        return self._cascade.wanted(tier)

    def hold(self, seq: int, *, end: bool) -> None:
        """Keep a version in every tier, however many newer ones there are, until this is called again with ``end``."""
        for tier_run in self._tier_runs.values():
            (tier_run.held.discard if end else tier_run.held.add)(seq)

    def failures(self) -> list[tuple[SaveState, str, BaseException]]:
        """The failures that were not reported yet: save, tier, error. They count as reported from now on.

        Without those of a memory tier that has no room for a version which a persistent tier has: nothing is lost by
        that. They were logged, counted and told as events.
        """
        return [failure for failure in self._saves.failures() if not self._only_lacks_room(*failure)]

    def _only_lacks_room(self, save_state: SaveState, name: str, error: BaseException) -> bool:
        lasting = [n for n, tier_run in self._tier_runs.items() if tier_run.tier.traits.persistent]
        seq = save_state.head.seq
        has = any(save_state.done(n) or seq in self._tier_runs[n].known for n in lasting)
        return isinstance(error, (TierFull, RankFull)) and name not in lasting and has

    def close(self, timeout: float | None = None, watch: OnDrain | None = None) -> str:
        """Finish the saves in progress, try missing versions once more, and end the threads.

        Args:
            timeout: seconds to wait at most; None: without limit.
            watch: called every DRAIN_INTERVAL seconds with the bytes still to be written, by tier.

        A tier that hangs is waited for once: then its breaker refuses all further calls (`tiers/wrappers/breaker.py`).

        Returns:
            What becomes of the versions that are still missing, by tier; empty if none are.

        Raises:
            TierUnavailable: not done within ``timeout`` seconds; the message lists what is missing.
        """
        if self._capturing is None or os.getpid() != self._pid:
            return ""
        for text in filter(None, (cadence.warning() for cadence in self._cadences.values())):
            log.warning("policy: %s", text)
        began = time.monotonic()
        try:
            self._run_threads(self._capturing).end()
            self._drain(math.inf if timeout is None else timeout, watch)
        except BaseException as error:
            error.add_note(f"closed while still under way: {', '.join(self._saves.late()) or 'nothing'}")
            self.stop()
            raise
        late, owed = self._saves.late(), self._still_owed()
        if owed:
            log.warning("closed while still owed, which the next process looks for: %s", owed)
        if lost := self._lost_by_cadence():
            log.warning("closed with %s", lost)
        if late:
            self._give_up()
            self._capturing = None
            told = ", ".join(late) + (f"; still owed: {owed}" if owed else "")
            raise TierUnavailable(f"closed after {time.monotonic() - began:.3g} s while still under way: {told}")
        self._finish()
        return owed

    def stop(self) -> None:
        """Cancel all saves and end the threads, unless `close` has: they must not use tiers and memory any more when
        those are closed."""
        if self._capturing is None or os.getpid() != self._pid:
            return
        self._run_threads(self._capturing).end()
        self._give_up()
        self._end = math.inf
        self._drain(INTERRUPT_GRACE, None)
        self._capturing = None

    def _finish(self) -> None:
        for queue in self.queues.values():
            if queue.join(0.0):
                # Retention once more: versions that were kept for slower tiers may be dropped now.
                queue.retire()
            else:
                queue.stop()  # it still copies missing versions, and that takes too long
        self._capturing = None

    def _drain(self, seconds: float, watch: OnDrain | None) -> None:
        """Wait until all threads have ended, at most ``seconds``."""
        end = time.monotonic() + seconds
        joins = [self._capturing.join, *(queue.join for queue in self.queues.values())] if self._capturing else []
        while joins and (left := min(end, self._end) - time.monotonic()) > 0:
            if watch is not None:
                watch({name: queue.left for name, queue in self.queues.items()})
            if joins[0](min(left, DRAIN_INTERVAL)):
                del joins[0]

    def _still_owed(self) -> str:
        owed = ((name, queue.owed()) for name, queue in self.queues.items())
        return "; ".join(self._left_of(name, dues) for name, dues in owed if dues)

    def _lost_by_cadence(self) -> str:
        """The newest version, if no persistent tier was due to get it; empty if one has it, or failed to get it."""
        latest, lasting = self._history.latest(), [n for n, s in self._tier_runs.items() if s.tier.traits.persistent]
        save_state = None if latest is None else self._saves.find(latest.seq)
        if self.rank or save_state is None or latest is None or not set(lasting).isdisjoint(save_state.tiers):
            return ""  # rank 0 tells it for all ranks
        has = [name for name in save_state.tiers if save_state.done(name)]
        try:
            if not has or any(latest.seq in self._tier_runs[name].log.seqs() for name in lasting):
                return ""
        except TierstateError:
            return ""  # it may be there, as by `copy`
        newest = {name: self._history.newest(name) for name in lasting}
        steps = ", ".join(f"{name} has step {v.step}" if v else f"{name} has none" for name, v in newest.items())
        remedy = f"; `copy` it to {lasting[0]} before `close` to keep it" if self.rank is None else ""
        where = f"step {latest.step}, the newest version, in {', '.join(has)} alone"
        return f"{where}, since by `every` no persistent tier was due: {steps}{remedy}"

    def _left_of(self, name: str, owed: Sequence[PendingVersion]) -> str:
        """What becomes of the versions that a tier lacks when this process ends."""
        faster = list(takewhile(lambda s: s.name != name, self._tier_runs.values()))
        kept = {seq for tier_run in faster if tier_run.tier.traits.persistent for seq in list(tier_run.known)}
        told = []
        for there, fate in (
            (True, "a faster tier has it, from which the next process that saves this run copies it"),
            (False, "no persistent tier before it has it, so it is lost with this process"),
        ):
            if steps := [str(d.step) for d in owed if (d.seq in kept or d.seq < self._cascade.before) is there]:
                told.append(f"{name}: step {', '.join(steps)} ({fate})")
        return "; ".join(told)

    def _give_up(self) -> None:
        self._saves.cancel()
        for queue in self.queues.values():
            queue.stop()
        self._arena.wake()
