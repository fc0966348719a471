"""Simulates a training job that saves by a policy: the real rules of placement, cascade and retention over tiers and a
clock that exist only as numbers.

Time passes in steps of the training and in writes of the tiers; nothing is random, so the same input gives the same
outcome. A tier writes one version after another at a constant rate, as the threads of a real save do; tiers do not
slow each other down. Where the job comes into a state in which it was before, only later, what follows is what
followed then, and is counted rather than simulated again (`_Job._leap`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tierstate.engine.cadence import AutoCadence, auto_tiers, failures_by_tier
from tierstate.engine.events import Event
from tierstate.engine.placement import (
    LastSave,
    Mask,
    due_tiers,
    enter_without_source,
    entry_tiers,
    is_too_far_behind,
    retention_of,
    route_masks,
)
from tierstate.engine.publish.backlog import PendingVersion, held_versions, missed_versions
from tierstate.manifest.arrays import Array
from tierstate.manifest.history.retention import RetentionEntry, decide_retention
from tierstate.tiers.policy.policy import Policy

from .lanes import DRIFT, OFTEN, TICK, Copy, Lane, Moment, Queue, alike, ticks
from .model import Arrival, Failure, Outcome, Recovery, TierModel, TierOutcome, Workload, restore_seconds

TOLD = 1000
"""Steps after which the progress is told."""


def simulate(
    policy: Policy,
    workload: Workload,
    models: Sequence[TierModel],
    steps: int,
    failures: Sequence[Failure] = (),
    *,
    leaps: bool = True,
    on_steps: Callable[[int], object] = lambda _steps: None,
) -> Outcome:
    """Train for so many steps.

    Args:
        models: of the policy's tiers, in its order.
        failures: by rising time. Those that come while the job starts again count when it has.
        leaps: count stretches of time that repeat, where no failures are given, rather than simulate each of them.
        on_steps: called with the steps made since its last call.
    """
    job = _Job(policy, workload, models, failures, leaps and not failures, on_steps)
    job.train(steps)
    return job.outcome


class _Mark(NamedTuple):
    """What a job looks like after a save.

    Attributes:
        at: when.
        ends: of each tier, in how many seconds what is written there has been written.
        shapes: of each tier.
        moves, settled, held: of each tier, as counted until then.
        newest: of both kinds of failures, how often the newest version that survives it has changed, and which it is.
        auto: what `AutoCadence` knows.
        sums: all that is summed up over time.
        lag: of both kinds of failures.
    """

    at: Moment
    ends: tuple[float, ...]
    shapes: tuple[Any, ...]
    moves: tuple[int, ...]
    settled: tuple[int, ...]
    held: tuple[int, ...]
    newest: dict[bool, tuple[int, LastSave]]
    auto: object
    sums: tuple[float, ...]
    lag: dict[bool, float]


@dataclass
class _Seen:
    """A job as it was after one of the saves to a tier, with which it is compared after later ones.

    The one that it is compared with is a later one each time there were twice as many, so that a repetition of any
    length is found (R. P. Brent, "An improved Monte Carlo factorization algorithm", BIT 20, 1980).
    """

    mark: _Mark | None = None
    count: int = 0
    next: int = 1


_SUMMED = ("saves", "skipped", "blocking", "room", "slowed")
"""Attributes of `Outcome` that are sums over time."""


_SUMMED_BY_TIER = ("versions", "delays", "left_out", "nbytes", "busy", "waited")
"""Attributes of `TierOutcome` that are."""


class _Killed(Exception):
    """The job has failed."""


class _Job:
    """The training loop and the tiers."""

    def __init__(
        self,
        policy: Policy,
        workload: Workload,
        models: Sequence[TierModel],
        failures: Sequence[Failure],
        leaps: bool,
        on_steps: Callable[[int], object],
    ) -> None:
        self._policy, self._workload, self._failures = policy, workload, deque(failures)
        self._leaps, self._on_steps, self._told = leaps, on_steps, 0
        self._step_seconds = max(TICK, ticks(workload.step))
        self._slow_seconds = ticks(self._step_seconds * (1 + workload.slower))
        self._now, self._step, self._seq = 0.0, 0, 0
        self.outcome = Outcome(tiers={model.level.name: TierOutcome() for model in models})
        self._masks, self._sizes = _groups(policy, workload)
        self._parted = any(rule.tiers is not None for rule in policy.rules)
        self._lanes: list[Lane] = []
        for model in models:
            tier = policy.tier(model.level.name)
            told = self.outcome.tiers[tier.name]
            told.share = self._bytes_of(self._masks[tier.name])
            faster = [lane for lane in reversed(self._lanes) if not lane.model.scarce]
            every = tier.every if isinstance(tier.every, int) else None
            self._lanes.append(Lane(model, retention_of(tier), every, Queue(tier.every, tier.on_lag), told, faster))
        self._arena = float(policy.arena.size) * workload.hosts * workload.processes
        self._whole: dict[frozenset[str], bool] = {}
        self._newest = {lost: (0, 0.0) for lost in (False, True)}  # step and time of the newest that survives
        self._changes = dict.fromkeys(self._newest, 0)
        self._lag = dict.fromkeys(self._newest, 0.0)
        self._seen: dict[str, _Seen] = {}
        self._leapt = Moment(0, 0, 0.0)
        self._begin()

    def _begin(self) -> None:
        """A process begins: its clock has begun, and it knows what tiers have."""
        self._last: dict[str, LastSave | None] = {lane.name: _newest(lane.has.values()) for lane in self._lanes}
        levels = [lane.model.level for lane in self._lanes]
        mtbf = partial(failures_by_tier, self._policy.failures, self._workload.hosts, levels)
        bounds = auto_tiers(self._policy)
        self._auto = AutoCadence(bounds, mtbf, self._tell) if bounds else None
        for lane in self._lanes:
            for due in self._missed(lane):
                lane.backlog.owe(Copy(due, lane))

    def _bytes_of(self, mask: Mask) -> float:
        return float(self._sizes[mask].sum())

    def _tell(self, name: str, seconds: float, why: str) -> None:
        self.outcome.tiers[name].interval, self.outcome.tiers[name].why = seconds, why

    def _missed(self, lane: Lane) -> list[PendingVersion]:
        faster = [other for other in lane.faster if other.model.level.persistent]
        if not lane.model.level.persistent or not lane.share:
            return []
        newest = max(lane.has, default=-1)
        there = {seq: due for other in faster for seq, due in other.has.items() if seq > newest}
        every = self._policy.tier(lane.name).every
        return missed_versions(every, _newest(lane.has.values()), [there[seq] for seq in sorted(there)])

    # The training

    def train(self, steps: int) -> None:
        """Train until this step, whatever fails on the way, and then until every tier has what is due there."""
        while self._step < steps:
            try:
                self._train_step(steps)
            except _Killed:
                self._recover()
            if self._step - self._told >= TOLD:
                self._on_steps(self._step - self._told)
                self._told = self._step
        self._on_steps(max(0, self._step - self._told))
        self.outcome.steps, self.outcome.seconds = self._step, self._now
        self.outcome.lost = {lost: area / max(self._now, 1e-9) for lost, area in self._lag.items()}
        self._failures.clear()
        while (ends := self._next_end()) < math.inf:
            self._pass(ends)
        self.outcome.drained = self._now
        for lane in self._lanes:
            lane.told.kept = lane.settled + len(lane.has)

    def _train_step(self, steps: int) -> None:
        seconds, every = self._step_seconds, self._workload.save_every
        count = min(every - self._step % every, steps - self._step)
        if any(lane.running is not None and lane.ends < math.inf for lane in self._lanes):
            self.outcome.slowed += self._slow_seconds - seconds
            seconds, count = self._slow_seconds, 1  # until it ends, they are slower
        self._pass(self._now + seconds * count)
        self._step += count
        if self._step % every == 0:
            names = self._save()
            if self._leaps:
                self._leap(names, steps)

    def _recover(self) -> None:
        failure = self._failures.popleft()
        for lane in self._lanes:
            lane.direct.clear()
            lane.backlog = Queue(self._policy.tier(lane.name).every, self._policy.tier(lane.name).on_lag)
            lane.running, lane.ends, lane.idle_since = None, math.inf, min(lane.idle_since, self._now)
            if not lane.model.level.survives(failure.host_lost):
                lane.has.clear()
        found = {seq for lane in self._lanes for seq in lane.has if self._is_whole(seq, self._lanes)}
        seq = max(found, default=None)
        near = [] if seq is None else [lane for lane in self._lanes if seq in lane.has]
        due = near[0].has[seq] if near and seq is not None else PendingVersion(-1, 0, 0.0)
        models = [lane.model for lane in near]
        went = self._workload.restart + restore_seconds(self._sizes, self._masks, models, lambda tier: tier.burst)
        tier, lost = near[0].name if near else "", failure.time - due.time
        self.outcome.recoveries.append(Recovery(failure, tier, due.step, lost, went))
        self._step = due.step
        self._survivors()
        self._advance(failure.time + went)
        self._failures = deque(later._replace(time=max(later.time, self._now)) for later in self._failures)
        self._begin()
        self._go()

    # Saves

    def _save(self) -> Sequence[str]:
        """Call `save`. Returns the tiers to which it went."""
        now, intervals = self._now, self._auto.intervals() if self._auto else {}
        names = [n for n in due_tiers(self._policy, self._step, self._last, now, intervals) if self._masks[n].any()]
        if self._auto:
            self._auto.goes(self._seq + 1 - self._leapt.seq, names, self._masks)
        if not names:
            self._event("saved", step=self._step, seq=self._seq + 1, seconds=0.0)
            return names
        lanes = {lane.name: lane for lane in self._lanes if lane.name in names}
        nbytes = self._bytes_of(np.any([self._masks[name] for name in names], axis=0))
        if self._policy.arena.on_full == "skip" and self._lacks_room(nbytes):
            self.outcome.skipped += 1
            self._event("skipped", step=self._step, seq=self._seq + 1)
            return ()
        self.outcome.saves, self._seq = self.outcome.saves + 1, self._seq + 1
        due = PendingVersion(self._seq, self._step, now, self._workload.nbytes)
        entry = self._put(due, lanes)
        for name in names:
            self._last[name] = due.step, due.time
        self._go()
        captured = ticks(nbytes / self._workload.capture)
        room = ticks(self._room_at(entry))
        self.outcome.room += max(0.0, room - now - captured)
        self._pass(max(now + captured, room))
        self._keep_up(due)
        blocked = self._now - now
        self.outcome.blocked.append(blocked)
        self.outcome.blocking += blocked
        self._event("saved", step=due.step, seq=due.seq, seconds=blocked)
        return names

    def _put(self, due: PendingVersion, lanes: Mapping[str, Lane]) -> list[Lane]:
        """Queue a save in its tiers. Returns those that are written from the arena."""
        names, lasting = list(lanes), [lane.model.level.persistent for lane in lanes.values()]
        wish = entry_tiers(names, lasting, [True] * len(names))
        sure = {n for n, lasts in zip(names, lasting, strict=True) if lasts}
        entry, cascade = enter_without_source(*wish, {n: self._masks[n] for n in names}, sure)
        for lane in lanes.values():
            lane.moves += 1
        for name in entry:
            lanes[name].direct.append(Copy(due, lanes[name], direct=True))
        for name in cascade:
            lanes[name].told.left_out += len(lanes[name].backlog.put(Copy(due, lanes[name])))
        return [lanes[name] for name in entry]

    def _room_at(self, entry: Sequence[Lane]) -> float:
        """When the arena has had room for all that is queued: its bytes leave it as the slowest tier writes them."""
        found = self._now
        for lane in entry:
            ends = lane.ends if lane.ends < math.inf else self._now
            ends += sum(map(self._duration, lane.direct))
            found = max(found, ends - lane.model.fixed - self._arena / lane.model.write)
        return found

    def _lacks_room(self, nbytes: float) -> bool:
        """Whether a save of so many bytes would have to wait for room in the arena."""
        taken = 0.0
        for lane in self._lanes:
            waiting = sum(self._written(copy.lane) for copy in lane.direct)
            if lane.running is not None and lane.running.direct:
                waiting += max(0.0, lane.ends - self._now) * lane.model.write
            taken = max(taken, waiting)
        return self._arena - taken < min(nbytes, self._arena)

    def _keep_up(self, due: PendingVersion) -> None:
        """Wait until no tier is further behind than its ``max_lag``."""
        for lane in self._lanes:
            bound, began = self._policy.tier(lane.name).max_lag, self._now
            if bound is None or not lane.share:
                continue
            while is_too_far_behind(bound, _newest(lane.has.values()), due.step, due.time):
                if (ends := self._next_end()) == math.inf:
                    break
                self._pass(ends)
            lane.told.waited += self._now - began

    # The clock

    def _pass(self, until: float) -> None:
        """Let time pass; tiers write meanwhile.

        Raises:
            _Killed: the job fails before that.
        """
        while True:
            ends = self._next_end()
            fails = self._failures[0].time if self._failures else math.inf
            if fails <= min(ends, until):
                self._advance(max(fails, self._now))
                raise _Killed
            if ends > until:
                break
            self._advance(ends)
            self._arrive(next(lane for lane in self._lanes if lane.ends == ends))
        self._advance(until)

    def _advance(self, until: float) -> None:
        for lost, (_, saved) in self._newest.items():
            self._lag[lost] += ((until - saved) ** 2 - (self._now - saved) ** 2) / 2
        for lane in self._lanes:
            if lane.running is not None and lane.ends < math.inf:
                lane.told.busy += until - self._now
        self._now = until

    def _next_end(self) -> float:
        return min((lane.ends for lane in self._lanes), default=math.inf)

    def _go(self) -> None:
        """Let idle tiers begin what waits, and those begin whose source has it now."""
        for lane in self._lanes:
            if lane.running is None:
                lane.told.left_out += len(lane.backlog.trim())
                lane.running = lane.direct.popleft() if lane.direct else lane.backlog.take(missing=True)
                if lane.running is not None and not lane.model.level.persistent:
                    self._retire(lane, lane.running.due)  # as `TierQueue` does, to have room for it
            if lane.running is not None and lane.ends == math.inf and lane.running.at_hand:
                lane.began, lane.ends = self._now, self._now + self._duration(lane.running)
                self._read_source(lane.running)

    def _read_source(self, copy: Copy) -> None:
        """A tier's ``bandwidth`` counts what is read from it too (`tierstate.tiers.wrappers.limit`): what it writes at
        the time, or next, is there so much later."""
        source = None if copy.direct else copy.lane.source(copy.due.seq)
        if source is None or not source.model.burst:
            return
        seconds = ticks(self._written(copy.lane) / source.model.read)
        if source.ends < math.inf:
            source.ends += seconds
        else:
            source.idle_since = max(source.idle_since, self._now - source.model.burst) + seconds

    def _duration(self, copy: Copy) -> float:
        lane, nbytes = copy.lane, self._written(copy.lane)
        seconds = lane.model.seconds(nbytes, lane.model.write, self._saved_up(lane))
        source = None if copy.direct else lane.source(copy.due.seq)
        if source is not None:  # read ahead while it is written
            seconds = max(seconds, source.model.seconds(nbytes, source.model.read, self._saved_up(source)))
        return ticks(seconds + lane.model.fixed)

    def _saved_up(self, lane: Lane) -> float:
        return min(lane.model.burst, self._now - lane.idle_since) if lane.ends == math.inf else 0.0

    def _written(self, lane: Lane) -> float:
        return lane.share * (self._workload.changed if lane.told.versions else 1.0)

    def _arrive(self, lane: Lane) -> None:
        copy = lane.running
        assert copy is not None
        due = copy.due
        lane.told.nbytes += self._written(lane)
        lane.told.arrivals.append(Arrival(due.seq, due.step, due.time, lane.began, self._now))
        lane.told.versions, lane.told.delays = lane.told.versions + 1, lane.told.delays + self._now - due.time
        lane.moves += 1
        lane.has[due.seq] = due
        lane.backlog.arrived(due)
        lane.running, lane.ends, lane.idle_since = None, math.inf, max(lane.idle_since, self._now)
        since = due.time if copy.direct else lane.began
        kind = "committed" if copy.direct else "cascaded"
        self._event(kind, tier=lane.name, step=due.step, seq=due.seq, seconds=self._now - since)
        self._survivors()
        self._go()
        self._retire(lane)
        lane.told.held = max(lane.told.held, lane.settled + len(lane.has))

    def _survivors(self) -> None:
        for lost in self._newest:
            safe = [lane for lane in self._lanes if lane.model.level.survives(lost)]
            # Tiers get versions in their order, so that the newest ones are at the end.
            found = (
                next((due for due in reversed(o.has.values()) if self._is_whole(due.seq, safe)), None) for o in safe
            )
            newest = max(filter(None, found), default=None, key=lambda due: due.seq)
            before, self._newest[lost] = self._newest[lost], (0, 0.0) if newest is None else (newest.step, newest.time)
            self._changes[lost] += before != self._newest[lost]
            if newest is not None:
                self.outcome.survived.add(lost)

    def _is_whole(self, seq: int, lanes: Sequence[Lane]) -> bool:
        there = frozenset(lane.name for lane in lanes if seq in lane.has)
        if there not in self._whole:
            masks = [self._masks[name] for name in there]
            self._whole[there] = bool(masks) and bool(np.any(masks, axis=0).all())
        return self._whole[there]

    def _retire(self, lane: Lane, *coming: PendingVersion) -> None:
        settles = self._leaps and not self._parted
        if not lane.has or (lane.keep.all and not settles) or (len(lane.has) > OFTEN and len(lane.has) < lane.look):
            return
        pinned = self._pinned(lane)
        why: dict[int, tuple[str, ...]] = dict.fromkeys(lane.has, ("all",))
        if not lane.keep.all:
            marks = [RetentionEntry(due.seq, due.step, due.time) for due in (*lane.has.values(), *coming)]
            decided = decide_retention(marks, lane.keep, pinned, self._now)
            why = {seq: tuple(reason.partition(" ")[0] for reason in said) for seq, said in decided.keep.items()}
            for seq in decided.drop:
                lane.has.pop(seq, None)
            lane.look = len(lane.has) * (OFTEN + 1) // OFTEN
        if settles:
            # One that comes late may be the first of a window in place of a newer one.
            late = min(lane.wanted(), default=math.inf)
            lane.settle(lambda seq: seq < late and seq not in pinned and not {"all", "every"}.isdisjoint(why[seq]))

    def _pinned(self, lane: Lane) -> Collection[int]:
        """As `Cascade.pinned`."""
        if lane.model.scarce:
            return ()
        after = self._lanes[self._lanes.index(lane) + 1 :]
        slower = [other for other in after if other.model.level.persistent]
        wanted = {other.name: other.wanted() for other in slower}
        found = set(held_versions(wanted, {other.name: other.has for other in slower}, each=self._parted))
        if lane.model.level.persistent:
            found |= {o.running.due.seq for o in slower if o.running is not None and not o.running.direct}
        return found

    def _event(self, kind: str, **values: object) -> None:
        if self._auto:
            # It lives in time without leaps.
            at = self._at(**{name: values.pop(name) for name in ("seq", "step")})  # type: ignore[arg-type]
            self._auto.event(Event(kind, at.time, "", step=at.step, seq=at.seq, **values))  # type: ignore[arg-type]

    # Stretches of time that repeat

    def _at(self, seq: int, step: int) -> Moment:
        return Moment(seq, step, self._now).since(self._leapt)

    def _leap(self, names: Sequence[str], steps: int) -> None:
        """After a save to some tiers: find whether it was as now after an earlier save, and count how often what came
        between comes again, rather than simulate it.

        What happens depends on numbers of versions, on steps and on times only by how far they are apart, and on steps
        by where they are between multiples of an interval. A tier that got nothing between does not change, and the
        time that is left out ends before it is due.
        """
        mark = None
        for name in ("", *names):  # with tiers of rare saves, long repetitions are found; with none, short ones
            seen = self._seen.setdefault(name, _Seen())
            seen.count += 1
            if seen.mark is not None and alike(seen.mark.ends, self._ends(), self._drift(seen.mark)):
                mark = mark or self._mark()
                times = self._times(seen.mark, mark, steps)
                if times:
                    self._repeat(seen.mark, mark, times)
                    self._seen[""] = _Seen(self._mark())
                    return
            if seen.count >= seen.next:
                mark = seen.mark = mark or self._mark()
                seen.next *= 2

    def _drift(self, then: _Mark) -> float:
        """By how many seconds what is as it was then may differ."""
        return DRIFT * (self._now - then.at.time)

    def _ends(self) -> tuple[float, ...]:
        return tuple(lane.ends - self._now for lane in self._lanes)

    def _mark(self) -> _Mark:
        at, lanes = Moment(self._seq, self._step, self._now), self._lanes
        return _Mark(
            at,
            self._ends(),
            tuple(lane.shape(at, self._last[lane.name]) for lane in lanes),
            tuple(lane.moves for lane in lanes),
            tuple(lane.settled for lane in lanes),
            tuple(lane.told.held for lane in lanes),
            {lost: (self._changes[lost], newest) for lost, newest in self._newest.items()},
            self._auto and self._auto.snapshot(*at.since(self._leapt)),
            tuple(float(getattr(one, name)) for one, name in self._sums()),
            dict(self._lag),
        )

    def _sums(self) -> list[tuple[object, str]]:
        tiers = [(lane.told, name) for lane in self._lanes for name in _SUMMED_BY_TIER]
        return [*((self.outcome, name) for name in _SUMMED), *tiers]

    def _resting(self, then: _Mark) -> list[Lane]:
        """Tiers that have got nothing since, and get nothing."""
        return [lane for lane, moves in zip(self._lanes, then.moves, strict=True) if lane.moves == moves and lane.idle]

    def _times(self, then: _Mark, now: _Mark, steps: int) -> int:
        """How often what came between two saves comes again."""
        length, resting = now.at.since(then.at), self._resting(then)
        most = (steps - now.at.step) // length.step - 1  # the end is simulated, for the last versions
        if most < 1 or then.auto != now.auto or not self._repeats(then, now, resting):
            return 0
        least = 0
        while least < most:
            middle = -(-(least + most) // 2)
            if self._wakes(resting, now.at, length.times(middle)):
                most = middle - 1
            else:
                least = middle
        return least

    def _repeats(self, then: _Mark, now: _Mark, resting: Sequence[Lane]) -> bool:
        length, drift = now.at.since(then.at), self._drift(then)
        for i, lane in enumerate(self._lanes):
            grew, more = now.settled[i] > then.settled[i], now.held[i] > then.held[i]
            same = then.shapes[i] is not None and alike(then.shapes[i], now.shapes[i], drift)
            if lane not in resting and (not same or grew > more):
                return False
        for lost, (changes, (step, time)) in now.newest.items():
            before, (old_step, old_time) = then.newest[lost]
            moves = alike((step - old_step, time - old_time), (length.step, length.time), drift)
            if not moves and (changes != before or self._may_survive(lost, resting, then.at)):
                return False
        return True

    def _may_survive(self, lost: bool, resting: Sequence[Lane], since: Moment) -> bool:
        """Whether tiers that get versions may make one of them whole that survives a failure."""
        safe = [lane for lane in self._lanes if lane.model.level.survives(lost)]
        live = [lane for lane in safe if lane not in resting]
        there = max((seq for lane in safe if lane in resting for seq in lane.has), default=-1)
        late = any(seq - (self._seq - since.seq) <= there for lane in live for seq in lane.wanted())
        return late or bool(live and np.any([self._masks[lane.name] for lane in live], axis=0).all())

    def _wakes(self, resting: Sequence[Lane], at: Moment, by: Moment) -> bool:
        """Whether one of these tiers is due, or too far behind, at the latest after so long a time."""
        intervals = self._auto.intervals() if self._auto else {}
        later = by.after(at)
        due = due_tiers(self._policy, later.step, self._last, later.time, intervals)
        return any(
            self._masks[lane.name].any()
            and (
                lane.name in due
                or is_too_far_behind(
                    self._policy.tier(lane.name).max_lag, _newest(lane.has.values()), later.step, later.time
                )
            )
            for lane in resting
        )

    def _repeat(self, then: _Mark, now: _Mark, times: int) -> None:
        by, resting = now.at.since(then.at).times(times), self._resting(then)
        for (one, name), before, after in zip(self._sums(), then.sums, now.sums, strict=True):
            setattr(one, name, type(getattr(one, name))(after + times * (after - before)))
        for lost, (changes, newest) in now.newest.items():
            if changes == then.newest[lost][0]:
                self._lag[lost] += ((by.time + self._now - newest[1]) ** 2 - (self._now - newest[1]) ** 2) / 2
            else:
                self._lag[lost] += times * (now.lag[lost] - then.lag[lost])
                self._newest[lost] = newest[0] + by.step, newest[1] + by.time
        for i, lane in enumerate(self._lanes):
            if lane in resting:
                continue
            grown = times * (now.settled[i] - then.settled[i])
            lane.settled, lane.told.held = lane.settled + grown, lane.told.held + grown
            lane.move(by)
            if last := self._last[lane.name]:
                self._last[lane.name] = last[0] + by.step, last[1] + by.time
        self._seq, self._step, self._now = by.after(now.at)
        self._leapt = by.after(self._leapt)


def _groups(policy: Policy, workload: Workload) -> tuple[dict[str, Mask], Array]:
    """The leaves that go to the same tiers, as one: which groups go to each tier, and the bytes of each group."""
    masks = route_masks(policy, [path for path, _ in workload.leaves])
    groups, group = np.unique(np.stack(list(masks.values())), axis=1, return_inverse=True)
    sizes = np.bincount(group.reshape(-1), weights=[float(nbytes) for _, nbytes in workload.leaves])
    return dict(zip(masks, groups, strict=True)), sizes


def _newest(versions: Collection[PendingVersion]) -> LastSave | None:
    newest = max(versions, default=None, key=lambda due: due.seq)
    return None if newest is None else (newest.step, newest.time)
