"""Simulates a training job that saves by a policy: the real rules of placement, cascade and retention over tiers and a
clock that exist only as numbers.

Time passes in steps of the training and in writes of the tiers; nothing is random, so the same input gives the same
outcome. A tier writes one version after another at a constant rate, as the threads of a real save do; tiers do not
slow each other down.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstate.engine.cadence import AutoCadence, auto_tiers, failures_by_tier
from tierstate.engine.capture.plan import retention_of
from tierstate.engine.events import Event
from tierstate.engine.placement import (
    LastSave,
    Mask,
    due_tiers,
    enter_without_source,
    entry_tiers,
    is_too_far_behind,
    route_masks,
)
from tierstate.engine.publish.backlog import Backlog, PendingVersion, held_versions, missed_versions
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest.arrays import Array
from tierstate.manifest.history.retention import RetentionEntry, RetentionPolicy, decide_retention
from tierstate.tiers.policy.policy import Policy

from .model import Arrival, Failure, Outcome, Recovery, TierModel, TierOutcome, Workload, restore_seconds

OFTEN = 100
"""Of more versions than this in a tier, retention decides only after each hundredth part of them."""


@dataclass(slots=True)
class _Copy:
    """A version on its way to a tier (`tierstate.engine.publish.backlog.QueuedCopy`).

    Attributes:
        due: the version.
        lane: of the tier.
        direct: it is written from the arena, rather than copied from a faster tier.
        save_state: none: it has no real save.
    """

    due: PendingVersion
    lane: _Lane
    direct: bool = False
    save_state: SaveState | None = None

    @property
    def at_hand(self) -> bool:
        return self.direct or self.lane.source(self.due.seq) is not None


@dataclass(eq=False)
class _Lane:
    """A tier, and what is on its way to it.

    Attributes:
        model: its speeds.
        keep: its retention.
        backlog, direct: what waits: copies, and what is written from the arena.
        told: what is told of it.
        faster: the lanes that it may copy from, nearest to it first.
        has: versions by number: step and time.
        running, began, ends: what is written, since when and until when; infinite while its source lacks it.
        idle_since: when it last had something to write.
        look: of `OFTEN` versions and more, how many there are when retention decides next.
    """

    model: TierModel
    keep: RetentionPolicy
    backlog: Backlog[_Copy]
    told: TierOutcome
    faster: Sequence[_Lane]
    has: dict[int, PendingVersion] = field(default_factory=dict)
    direct: deque[_Copy] = field(default_factory=deque)
    running: _Copy | None = None
    began: float = 0.0
    ends: float = math.inf
    idle_since: float = -math.inf
    look: int = 0

    @property
    def name(self) -> str:
        return self.model.level.name

    @property
    def share(self) -> float:
        """Bytes of a version that go there."""
        return self.told.share

    def source(self, seq: int) -> _Lane | None:
        """The nearest faster tier that has a version."""
        return next((lane for lane in self.faster if seq in lane.has), None)

    def wanted(self) -> set[int]:
        running = [self.running] if self.running else []
        return {c.due.seq for c in (*running, *self.direct)} | {due.seq for due in self.backlog.dues()}


def simulate(
    policy: Policy, workload: Workload, models: Sequence[TierModel], steps: int, failures: Sequence[Failure] = ()
) -> Outcome:
    """Train for so many steps.

    Args:
        models: of the policy's tiers, in its order.
        failures: by rising time. Those that come while the job starts again count when it has.
    """
    job = _Job(policy, workload, models, failures)
    job.train(steps)
    return job.outcome


class _Killed(Exception):
    """The job has failed."""


class _Job:
    """The training loop and the tiers."""

    def __init__(
        self, policy: Policy, workload: Workload, models: Sequence[TierModel], failures: Sequence[Failure]
    ) -> None:
        self._policy, self._workload, self._failures = policy, workload, deque(failures)
        self._now, self._step, self._seq = 0.0, 0, 0
        self.outcome = Outcome(tiers={model.level.name: TierOutcome() for model in models})
        self._masks, self._sizes = _groups(policy, workload)
        self._parted = any(rule.tiers is not None for rule in policy.rules)
        self._lanes: list[_Lane] = []
        for model in models:
            tier = policy.tier(model.level.name)
            told = self.outcome.tiers[tier.name]
            told.share = self._bytes_of(self._masks[tier.name])
            faster = [lane for lane in reversed(self._lanes) if not lane.model.scarce]
            backlog = Backlog[_Copy](tier.every, tier.on_lag)
            self._lanes.append(_Lane(model, retention_of(tier), backlog, told, faster))
        self._arena = float(policy.arena.size) * workload.hosts * workload.processes
        self._whole: dict[frozenset[str], bool] = {}
        self._newest = {lost: (0, 0.0) for lost in (False, True)}  # step and time of the newest that survives
        self._lag = dict.fromkeys(self._newest, 0.0)
        self._begin()

    def _begin(self) -> None:
        """A process begins: its clock has begun, and it knows what tiers have."""
        self._last: dict[str, LastSave | None] = {lane.name: _newest(lane.has.values()) for lane in self._lanes}
        levels = [lane.model.level for lane in self._lanes]
        mtbf = failures_by_tier(self._policy.failures, self._workload.hosts, levels)
        bounds = auto_tiers(self._policy)
        self._auto = AutoCadence(bounds, mtbf, self._tell) if bounds else None
        for lane in self._lanes:
            for due in self._missed(lane):
                lane.backlog.owe(_Copy(due, lane))

    def _bytes_of(self, mask: Mask) -> float:
        return float(self._sizes[mask].sum())

    def _tell(self, name: str, seconds: float, why: str) -> None:
        self.outcome.tiers[name].interval, self.outcome.tiers[name].why = seconds, why

    def _missed(self, lane: _Lane) -> list[PendingVersion]:
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
                self._train_step()
            except _Killed:
                self._recover()
        self.outcome.steps, self.outcome.seconds = self._step, self._now
        self.outcome.lost = {lost: area / max(self._now, 1e-9) for lost, area in self._lag.items()}
        self._failures.clear()
        while (ends := self._next_end()) < math.inf:
            self._pass(ends)
        self.outcome.drained = self._now
        for lane in self._lanes:
            lane.told.kept = len(lane.has)

    def _train_step(self) -> None:
        seconds = self._workload.step
        if any(lane.running is not None and lane.ends < math.inf for lane in self._lanes):
            self.outcome.slowed += seconds * self._workload.slower
            seconds *= 1 + self._workload.slower
        self._pass(self._now + seconds)
        self._step += 1
        if self._step % self._workload.save_every == 0:
            self._save()

    def _recover(self) -> None:
        failure = self._failures.popleft()
        for lane in self._lanes:
            lane.direct.clear()
            lane.backlog = Backlog[_Copy](self._policy.tier(lane.name).every, self._policy.tier(lane.name).on_lag)
            lane.running, lane.ends = None, math.inf
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

    def _save(self) -> None:
        now, intervals = self._now, self._auto.intervals() if self._auto else {}
        names = [n for n in due_tiers(self._policy, self._step, self._last, now, intervals) if self._masks[n].any()]
        if self._auto:
            self._auto.goes(self._seq + 1, names)
        if not names:
            self._event("saved", step=self._step, seq=self._seq + 1, seconds=0.0)
            return
        lanes = {lane.name: lane for lane in self._lanes if lane.name in names}
        nbytes = self._bytes_of(np.any([self._masks[name] for name in names], axis=0))
        if self._policy.arena.on_full == "skip" and self._lacks_room(nbytes):
            self.outcome.skipped += 1
            self._event("skipped", step=self._step, seq=self._seq + 1)
            return
        self.outcome.saves, self._seq = self.outcome.saves + 1, self._seq + 1
        due = PendingVersion(self._seq, self._step, now, self._workload.nbytes)
        entry = self._put(due, lanes)
        for name in names:
            self._last[name] = due.step, due.time
        self._go()
        captured = nbytes / self._workload.capture
        room = self._room_at(entry)
        self.outcome.room += max(0.0, room - now - captured)
        self._pass(max(now + captured, room))
        self._keep_up(due)
        blocked = self._now - now
        self.outcome.blocked.append(blocked)
        self._event("saved", step=due.step, seq=due.seq, seconds=blocked)

    def _put(self, due: PendingVersion, lanes: Mapping[str, _Lane]) -> list[_Lane]:
        """Queue a save in its tiers. Returns those that are written from the arena."""
        names, lasting = list(lanes), [lane.model.level.persistent for lane in lanes.values()]
        wish = entry_tiers(names, lasting, [True] * len(names))
        sure = {n for n, lasts in zip(names, lasting, strict=True) if lasts}
        entry, cascade = enter_without_source(*wish, {n: self._masks[n] for n in names}, sure)
        for name in entry:
            lanes[name].direct.append(_Copy(due, lanes[name], direct=True))
        for name in cascade:
            lanes[name].told.left_out += len(lanes[name].backlog.put(_Copy(due, lanes[name])))
        return [lanes[name] for name in entry]

    def _room_at(self, entry: Sequence[_Lane]) -> float:
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

    def _duration(self, copy: _Copy) -> float:
        lane, nbytes = copy.lane, self._written(copy.lane)
        seconds = lane.model.seconds(nbytes, lane.model.write, self._saved_up(lane))
        source = None if copy.direct else lane.source(copy.due.seq)
        if source is not None:  # read ahead while it is written
            seconds = max(seconds, source.model.seconds(nbytes, source.model.read, self._saved_up(source)))
        return seconds + lane.model.fixed

    def _saved_up(self, lane: _Lane) -> float:
        return min(lane.model.burst, self._now - lane.idle_since) if lane.ends == math.inf else 0.0

    def _written(self, lane: _Lane) -> float:
        return lane.share * (self._workload.changed if lane.told.arrivals else 1.0)

    def _arrive(self, lane: _Lane) -> None:
        copy = lane.running
        assert copy is not None
        due = copy.due
        lane.told.nbytes += self._written(lane)
        lane.told.arrivals.append(Arrival(due.seq, due.step, due.time, lane.began, self._now))
        lane.has[due.seq] = due
        lane.backlog.arrived(due)
        lane.running, lane.ends, lane.idle_since = None, math.inf, self._now
        since = due.time if copy.direct else lane.began
        kind = "committed" if copy.direct else "cascaded"
        self._event(kind, tier=lane.name, step=due.step, seq=due.seq, seconds=self._now - since)
        self._survivors()
        self._go()
        self._retire(lane)
        lane.told.held = max(lane.told.held, len(lane.has))

    def _survivors(self) -> None:
        for lost in self._newest:
            safe = [lane for lane in self._lanes if lane.model.level.survives(lost)]
            # Tiers get versions in their order, so that the newest ones are at the end.
            found = (
                next((due for due in reversed(o.has.values()) if self._is_whole(due.seq, safe)), None) for o in safe
            )
            newest = max(filter(None, found), default=None, key=lambda due: due.seq)
            self._newest[lost] = (0, 0.0) if newest is None else (newest.step, newest.time)
            if newest is not None:
                self.outcome.survived.add(lost)

    def _is_whole(self, seq: int, lanes: Sequence[_Lane]) -> bool:
        there = frozenset(lane.name for lane in lanes if seq in lane.has)
        if there not in self._whole:
            masks = [self._masks[name] for name in there]
            self._whole[there] = bool(masks) and bool(np.any(masks, axis=0).all())
        return self._whole[there]

    def _retire(self, lane: _Lane, *coming: PendingVersion) -> None:
        if lane.keep.all or not lane.has or (len(lane.has) > OFTEN and len(lane.has) < lane.look):
            return
        lane.look = len(lane.has) * (OFTEN + 1) // OFTEN
        pinned = self._pinned(lane)
        marks = [RetentionEntry(due.seq, due.step, due.time) for due in (*lane.has.values(), *coming)]
        for seq in decide_retention(marks, lane.keep, pinned, self._now).drop:
            lane.has.pop(seq, None)

    def _pinned(self, lane: _Lane) -> Collection[int]:
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
            self._auto.event(Event(kind, self._now, "", **values))  # type: ignore[arg-type]


def _groups(policy: Policy, workload: Workload) -> tuple[dict[str, Mask], Array]:
    """The leaves that go to the same tiers, as one: which groups go to each tier, and the bytes of each group."""
    masks = route_masks(policy, [path for path, _ in workload.leaves])
    groups, group = np.unique(np.stack(list(masks.values())), axis=1, return_inverse=True)
    sizes = np.bincount(group.reshape(-1), weights=[float(nbytes) for _, nbytes in workload.leaves])
    return dict(zip(masks, groups, strict=True)), sizes


def _newest(versions: Collection[PendingVersion]) -> LastSave | None:
    newest = max(versions, default=None, key=lambda due: due.seq)
    return None if newest is None else (newest.step, newest.time)
