"""How often to save: the interval that costs least (Young, Daly), and ``every: auto``, which finds it at run time.

Saves cost time, and so does what is computed again after a failure. With a cost C of a save and a mean time M between
failures the best interval is about sqrt(2 C M): J. W. Young, "A first order approximation to the optimum checkpoint
interval", CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22(3), 2006. With several tiers each failure has a nearest tier that survives it, and the interval of each tier is
that for the failures of which it is the nearest: to first order they do not depend on each other (N. H. Vaidya, "A case
for two-level distributed recovery schemes", SIGMETRICS 1995).
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from tierstate.tiers.policy.models import AutoEvery, FailuresKeys
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import rough_duration

from .events import Event, EventBus
from .placement import Mask

Shared: TypeAlias = Literal["process", "host", "site"]
"""As `Traits.shared`."""


HOST_MTBF = 264 * 86400.0
"""Seconds between two failures of a host with 8 GPUs: 54 days and 2,048 hosts per 419 unplanned interruptions (The
Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4)."""


BUSY = 0.5
"""For at most this share of its time a tier with ``every: auto`` writes: the rest is for restores and for others."""


TOLD = 1.1
"""An interval that has changed by this factor is told."""


LISTENED = ("saved", "skipped", "waited", "committed", "cascaded", "failed", "left_out")
"""Kinds of events from which `AutoCadence` learns."""


_MEMORY = 64
"""Periods without a write under way that the duration of a step is the median of."""


_WEIGHT = 0.3
"""Of the newest measurement, in the mean of costs and durations."""


_LEAP, _SLACK = 4.0, 1.0
"""A measurement counts for at most so many times the mean before it and so many seconds more. One in which the clock
was set ahead, or the process stood still for hours, would put off the next saves for as long as the bounds allow."""


class Level(NamedTuple):
    """What a tier survives, as its traits say.

    Attributes:
        name: the tier's name.
        persistent: what it keeps survives its host.
        shared: which ranks see the same objects.
    """

    name: str
    persistent: bool
    shared: Shared

    def survives(self, host_lost: bool) -> bool:
        """Whether it has its versions after a process was killed, or after a host was lost for good."""
        return self.shared == "site" if host_lost else self.persistent or self.shared != "process"


def optimal_interval(cost: float, mtbf: float) -> float:
    """Seconds of training between two saves for which saves and failures together cost least (Daly 2006, equation 37).

    Args:
        cost: seconds of training that a save costs.
        mtbf: mean seconds between two failures; infinite for none.
    """
    if cost <= 0 or math.isinf(mtbf):
        return math.inf if math.isinf(mtbf) else 0.0
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


def job_mtbf(failures: FailuresKeys, hosts: int) -> float:
    """Mean seconds between two unplanned ends of a job on so many hosts."""
    return failures.mtbf or HOST_MTBF / max(1, hosts)


def failures_by_tier(
    failures: FailuresKeys,
    hosts: int,
    levels: Sequence[Level],
    masks: Mapping[str, Mask] = MappingProxyType({}),
) -> dict[str, float]:
    """For each tier the mean seconds between two failures of which it is the nearest survivor; infinite for none.

    A failure that leaves no whole version counts for no tier. Where rules divide a state, it counts for each of the
    tiers that are needed together.

    Args:
        levels: the tiers in the policy's order.
        masks: which leaves go to each tier (`tierstate.engine.placement.route_masks`); if empty, all go to all.
    """
    mtbf, rates = job_mtbf(failures, hosts), dict.fromkeys((level.name for level in levels), 0.0)
    for lost, share in ((False, 1 - failures.host_lost), (True, failures.host_lost)):
        for name in _needed([level.name for level in levels if level.survives(lost)], masks):
            rates[name] += share / mtbf
    return {name: 1 / rate if rate else math.inf for name, rate in rates.items()}


def _needed(names: Sequence[str], masks: Mapping[str, Mask]) -> list[str]:
    """Of some tiers, nearest first, those from which a version can be restored whole: as near ones as possible, and
    none that the others can do without; nothing if not even all of them have all of it."""
    if not any(len(mask) for mask in masks.values()):
        return list(names[:1])
    count = next((n for n in range(1, len(names) + 1) if _whole(names[:n], masks)), 0)
    found = list(names[:count])
    for name in names[:count]:
        rest = [other for other in found if other != name]
        if rest and _whole(rest, masks):
            found = rest
    return found


def _whole(names: Sequence[str], masks: Mapping[str, Mask]) -> bool:
    return bool(np.any([masks[name] for name in names], axis=0).all())


def hosts_of_job() -> int:
    """How many hosts this process's job has, as launchers say (torchrun, Slurm); 1 if they say nothing."""
    for ranks, here in (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")):
        said = [os.environ.get(name, "") for name in (ranks, here)]
        if all(one.isdecimal() and int(one) for one in said):
            return max(1, int(said[0]) // int(said[1]))
    return 1


def auto_tiers(policy: Policy) -> dict[str, AutoEvery]:
    """The tiers of a policy with ``every: auto``, and the bounds of each."""
    return {tier.name: tier.every for tier in policy.tiers if isinstance(tier.every, AutoEvery)}


@dataclass
class _Measured:
    """What is known of one tier.

    Attributes:
        cost: seconds of training that a save to it costs; None before one is measured.
        seconds: until a version is there; None before one is.
        running: what the save that is under way has cost so far; None if there is none.
        interval: seconds.
        told: the interval that was told last.
    """

    cost: float | None = None
    seconds: float | None = None
    running: float | None = None
    interval: float = 0.0
    told: float = 0.0
    flying: set[int] = field(default_factory=set)


class AutoCadence:
    """Chooses the intervals of tiers with ``every: auto`` from measurements.

    The cost of a save is what it has blocked its caller, and by how much steps were slower while it was written than in
    times without a write. What several tiers cost together is divided among them. An interval is never so short that
    the tier would be busy for more than `BUSY` of the time.

    Before anything is measured, a tier is due as soon as nothing is under way to it; then not before there were steps
    without a write, with which the others are compared.

    Args:
        bounds: of each tier.
        mtbf: returns it by tier, as `failures_by_tier`, of the leaves that go to each.
        tell: called with a tier's name, its interval in seconds, and why, when that has changed.
    """

    def __init__(
        self,
        bounds: Mapping[str, AutoEvery],
        mtbf: Callable[[Mapping[str, Mask]], Mapping[str, float]],
        tell: Callable[[str, float, str], object],
    ) -> None:
        self._bounds, self._mtbf_of, self._tell = bounds, mtbf, tell
        self._masks: Mapping[str, Mask] = {}
        self._mtbf = mtbf(self._masks)
        self._tiers = {name: _Measured() for name in bounds}
        self._lock = threading.Lock()  # saves come from the training thread, events from one of the bus
        self._quiet: deque[float] = deque(maxlen=_MEMORY)
        self._went: dict[int, tuple[str, ...]] = {}
        self._after: tuple[int, float] | None = None
        self._burdened: frozenset[str] = frozenset()
        self._waited = 0.0

    def intervals(self) -> dict[str, timedelta]:
        """The interval of each tier, now."""
        with self._lock:
            return {name: timedelta(seconds=self._interval_now(name)) for name in self._tiers}

    def _interval_now(self, name: str) -> float:
        tier = self._tiers[name]
        if tier.seconds is None:
            return self._bounds[name].max if tier.flying else 0.0
        # Where a write ends before the next save, no step would ever be without one, and what a write costs never seen.
        return tier.interval if self._quiet else self._bounds[name].max

    def goes(self, seq: int, names: Iterable[str], masks: Mapping[str, Mask] = MappingProxyType({})) -> None:
        """A save goes to some tiers.

        Args:
            seq: its number.
            masks: which of its leaves go to each tier.
        """
        with self._lock:
            known = self._masks
            if masks.keys() != known.keys() or any(masks[name] is not known[name] for name in masks):
                self._masks, self._mtbf = masks, self._mtbf_of(masks)
            mine = tuple(name for name in names if name in self._tiers)
            if len(self._went) >= _MEMORY:
                del self._went[min(self._went)]  # of a save that was interrupted
            self._went[seq] = mine
            for name in mine:
                self._tiers[name].flying.add(seq)

    def snapshot(self, seq: int, step: int, time: float) -> object:
        """All that later choices depend on, seen from a version's number, a step and a time: after equal snapshots, the
        same events lead to the same choices. For simulations."""
        with self._lock:
            return (
                [
                    (one.cost, one.seconds, one.running, one.interval, one.told, sorted(n - seq for n in one.flying))
                    for one in self._tiers.values()
                ],
                [(number - seq, names) for number, names in self._went.items()],
                self._after and (self._after[0] - step, self._after[1] - time),
                (tuple(self._quiet), self._burdened, self._waited),
            )

    def event(self, event: Event) -> None:
        """Something has happened: saves, waits for captures, and versions that arrive or fail."""
        changed = []
        with self._lock:
            match event.kind:
                case "saved":
                    self._saved(event)
                case "skipped":
                    self._skipped(event)
                case "waited":
                    self._waited += event.seconds or 0.0
                case "committed" | "cascaded" | "failed" | "left_out" if event.tier in self._tiers:
                    self._ended(event)
                    changed = self._decide(event.tier)
        for name, seconds, why in changed:
            self._tell(name, seconds, why)

    def _saved(self, event: Event) -> None:
        blocked = event.seconds or 0.0
        self._period(event.step or 0, event.time - blocked)
        mine = self._went.pop(event.seq, ()) if event.seq is not None else ()
        for name in mine:
            tier = self._tiers[name]
            if tier.running is not None:
                tier.cost = _mean(tier.cost, tier.running)
            tier.running = blocked / len(mine)
        self._after = event.step or 0, event.time
        self._burdened = frozenset(name for name, tier in self._tiers.items() if tier.flying)

    def _skipped(self, event: Event) -> None:
        if event.seq is not None:
            self._went.pop(event.seq, None)
            for tier in self._tiers.values():
                tier.flying.discard(event.seq)

    def _period(self, step: int, end: float) -> None:
        """The time between two saves, in which steps were made: all of them quiet, or burdened by writes."""
        if self._after is None:
            return
        steps, seconds = step - self._after[0], end - self._after[1]
        waited, self._waited = self._waited, 0.0
        if steps <= 0 or seconds < 0:
            return  # after a rollback, or a clock that was set back
        if not self._burdened:
            self._quiet.append(seconds / steps)
            return
        slower = seconds - steps * median(self._quiet) if self._quiet else 0.0
        for name in self._burdened:
            tier = self._tiers[name]
            if tier.running is not None:
                tier.running += max(waited, slower, 0.0) / len(self._burdened)

    def _ended(self, event: Event) -> None:
        tier = self._tiers[event.tier]
        if event.seq is not None:
            tier.flying.discard(event.seq)
        if event.kind in ("committed", "cascaded"):
            tier.seconds = _mean(tier.seconds, event.seconds or 0.0)

    def _decide(self, name: str) -> list[tuple[str, float, str]]:
        tier, bounds = self._tiers[name], self._bounds[name]
        if tier.seconds is None:
            return []
        cost = tier.running or 0.0 if tier.cost is None else tier.cost
        tier.interval, why = choose_interval(cost, tier.seconds, self._mtbf[name], bounds)
        if tier.told and 1 / TOLD < tier.interval / tier.told < TOLD:
            return []
        tier.told = tier.interval
        return [(name, tier.interval, why)]


def choose_interval(cost: float, seconds: float, mtbf: float, bounds: AutoEvery) -> tuple[float, str]:
    """The interval of a tier with ``every: auto``, in seconds, and why.

    Args:
        cost: seconds of training that a save costs.
        seconds: until a version is in the tier.
        mtbf: mean seconds between two failures of which it is the nearest survivor.
    """
    best, least = optimal_interval(cost, mtbf), seconds / BUSY
    lost = "no failure is expected of which it is the nearest survivor"
    if math.isfinite(mtbf):
        lost = f"a failure of which it is the nearest survivor is expected every {rough_duration(mtbf)}"
    why = f"a save costs {rough_duration(cost)} of training, and {lost}"
    if best < least:
        best, why = (
            least,
            f"a version takes {rough_duration(seconds)}, and at most {BUSY:.0%} of the time is for writing",
        )
    if best > bounds.max:
        return bounds.max, f"{why}; no longer than `max`"
    if bounds.min is not None and best < bounds.min:
        return bounds.min, f"{why}; no shorter than `min`"
    return max(best, 1e-3), why


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * min(now, _LEAP * before + _SLACK)


def auto_cadence(policy: Policy, levels: Sequence[Level], hosts: int, events: EventBus) -> AutoCadence | None:
    """What chooses the intervals of a policy's tiers with ``every: auto`` by the events of a bus, and tells them there;
    None if there is no such tier.

    Args:
        levels: the tiers in the policy's order.
        hosts: of the job.
    """
    bounds = auto_tiers(policy)
    if not bounds:
        return None
    chosen = AutoCadence(
        bounds,
        partial(failures_by_tier, policy.failures, hosts, levels),
        lambda name, seconds, why: events.emit("interval", tier=name, seconds=seconds, reason=why),
    )
    events.subscribe(LISTENED, chosen.event, apart=True)
    return chosen
