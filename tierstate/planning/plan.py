"""A plan: what a policy costs and protects, and which intervals would cost least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from tierstate.engine.cadence import BUSY, failures_by_tier, job_mtbf, optimal_interval
from tierstate.engine.placement import route_masks
from tierstate.engine.progress import Pace
from tierstate.tiers.policy.models import AutoEvery
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import MAX_SECONDS, format_size, rough_duration, rough_size

from .model import Outcome, TierModel, TierOutcome, Workload, restore_seconds
from .simulation import simulate

DAY = 86400.0


FULL = 0.95
"""A tier that writes for at least this share of the time cannot keep up."""


WORTH = 0.001
"""Other intervals are advised if they gain at least this share of the time."""


COSTLY = 0.01
"""A tier that no failure needs is named if its saves cost at least this share of the time."""


MANY = 1000
"""Saves that are enough to know a policy by."""


CURVE = tuple(2.0**power for power in range(-6, 7))
"""Intervals of a plot, as multiples of the best one."""


@dataclass(frozen=True)
class TierForecast:
    """What becomes of one tier.

    Attributes:
        tier: its name.
        every: its ``every``, as in the policy; with ``auto``, what was chosen.
        interval: mean seconds between the saves of its versions; None for fewer than two.
        versions: that it gets, a day.
        nbytes: that are written to it, a day.
        money: that it costs, a day; None if no price was given.
        busy: share of the time in which it writes.
        delay: mean seconds from a save until it is there; None if none came.
        left_out: versions that it lagged too far behind for, a day.
        kept: versions that it had at most.
        stored: bytes of these.
        mtbf: mean seconds between two failures of which it is the nearest survivor; None for none.
        restore: seconds to read a version back.
    """

    tier: str
    every: str
    interval: float | None
    versions: float
    nbytes: float
    money: float | None
    busy: float
    delay: float | None
    left_out: float
    kept: int
    stored: float
    mtbf: float | None
    restore: float


@dataclass(frozen=True)
class FailureForecast:
    """What a failure costs.

    Attributes:
        host_lost: a host, with all that lies on it, rather than only the processes.
        share: of all failures.
        tier: the nearest that survives it; empty if no whole version does, so that everything is lost.
        lost: mean seconds of training that have to be done again.
        recovery: seconds until the training goes on.
    """

    host_lost: bool
    share: float
    tier: str
    lost: float | None
    recovery: float


@dataclass(frozen=True)
class Forecast:
    """What becomes of a job under a policy.

    Attributes:
        simulated: seconds of training that were simulated.
        saves: a day.
        blocked: mean seconds that a save blocks.
        longest: the longest of them.
        room: mean seconds of it for which it waits for room in the arena.
        saving: share of the time that saves cost: blocked, and steps that writes make slower.
        failures: of both kinds.
        goodput: share of the time in which steps are made that count in the end.
        tiers: in the policy's order.
    """

    simulated: float
    saves: float
    blocked: float
    longest: float
    room: float
    saving: float
    failures: tuple[FailureForecast, ...]
    goodput: float
    tiers: tuple[TierForecast, ...]


@dataclass(frozen=True)
class Curve:
    """What a tier's saves and its failures cost together, by its interval.

    Attributes:
        tier: its name.
        cost: seconds of training that a save there costs.
        best: the interval that costs least, in seconds; None if no failure needs the tier.
        intervals, shares: seconds, and the share of the time that is lost with each.
    """

    tier: str
    cost: float
    best: float | None
    intervals: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        mtbf: mean seconds between two failures of the job.
        nbytes: of the state.
        now: with the policy as it is.
        best: with the intervals that cost least.
        every: these, by tier, as the policy would say them; empty if those of the policy cost no more.
        curves: for each tier that gets versions.
        advice: what to change, a sentence each.
    """

    mtbf: float
    nbytes: int
    now: Forecast
    best: Forecast
    every: Mapping[str, str]
    curves: tuple[Curve, ...]
    advice: tuple[str, ...]


def make_plan(
    policy: Policy,
    workload: Workload,
    models: Sequence[TierModel],
    seconds: float | None = None,
    prices: Mapping[str, float] | None = None,
    tell: Callable[[str], object] = lambda _doing: None,
) -> Plan:
    """Simulate a job with a policy, and with the intervals that cost least; compare them.

    Args:
        models: of the policy's tiers, in its order.
        seconds: of training that are simulated; None for a day, or less where that is many saves.
        prices: by tier, what a GB costs for a month.
        tell: takes texts that say how far this is.
    """
    steps = math.ceil((seconds or _enough(policy, workload)) / workload.step)
    steps = max(1, -(-steps // workload.save_every)) * workload.save_every
    pace = Pace("simulating", tell, steps * (2 + len(models)), "steps")
    outcome = simulate(policy, workload, models, steps, on_steps=pace)
    now = _forecast(policy, workload, models, outcome, prices or {})
    curves = tuple(_curves(policy, workload, models, outcome, pace))
    every = {curve.tier: every_text(curve.best, workload) for curve in curves if curve.best is not None}
    better = _with_every(policy, every)
    outcome = simulate(better, workload, models, steps, on_steps=pace)
    best = _forecast(better, workload, models, outcome, prices or {})
    if best.goodput <= now.goodput:
        best, every = now, {}
    advice = tuple(_advice(policy, workload, models, now, best, every, curves))
    return Plan(job_mtbf(policy.failures, workload.hosts), workload.nbytes, now, best, every, curves, advice)


def check_simulated(policy: Policy, workload: Workload, seconds: float) -> None:
    """Raises:
    ValueError: so many seconds of training are less than an interval of the policy, of which they would tell nothing.
    """
    for tier in policy.tiers:
        longest = _longest(tier.every, workload)
        if seconds < longest and not isinstance(tier.every, AutoEvery):
            raise ValueError(
                f"--for {rough_duration(seconds)}: {tier.name} gets a version every {rough_duration(longest)}; say no "
                "less than that, or nothing"
            )


def _enough(policy: Policy, workload: Workload) -> float:
    """Seconds in which each tier gets a few versions."""
    longest = max(_longest(tier.every, workload) for tier in policy.tiers)
    return max(min(DAY, MANY * workload.save_every * workload.step), 4 * longest)


def _longest(every: Any, workload: Workload) -> float:
    """Seconds of training between two versions of a tier, at most; 0 for every save."""
    if isinstance(every, timedelta):
        return every.total_seconds()
    if isinstance(every, AutoEvery):
        return every.max
    return 0.0 if every is None else float(every * workload.step)


def every_text(seconds: float, workload: Workload) -> str:
    """An interval as the policy says it, rounded; empty for every save."""
    if seconds <= workload.step * workload.save_every:
        return ""
    for unit, name, below in ((1.0, "s", 120), (60.0, "min", 7200), (3600.0, "h", 48 * 3600), (86400.0, "d", math.inf)):
        if seconds < below:
            return f"{max(1, round(seconds / unit))}{name}"
    raise AssertionError


def _with_every(policy: Policy, every: Mapping[str, str]) -> Policy:
    changed = {
        tier.name: tier.model_validate({**dict(tier), "every": every[tier.name] or None})
        for tier in policy.tiers
        if tier.name in every
    }
    return policy.model_copy(update={"tiers": tuple(changed.get(tier.name, tier) for tier in policy.tiers)})


def _forecast(
    policy: Policy, workload: Workload, models: Sequence[TierModel], outcome: Outcome, prices: Mapping[str, float]
) -> Forecast:
    per_day, by_tier = DAY / outcome.seconds, _mtbf_by_tier(policy, workload, models)
    saving = 1 - outcome.steps * workload.step / outcome.seconds
    failures = tuple(_failure(policy, workload, models, outcome, lost) for lost in (False, True))
    mtbf = job_mtbf(policy.failures, workload.hosts)
    return Forecast(
        simulated=outcome.seconds,
        saves=outcome.saves * per_day,
        blocked=outcome.blocking / max(1, outcome.saves),
        longest=max(outcome.blocked, default=0.0),
        room=outcome.room / max(1, outcome.saves),
        saving=saving,
        failures=failures,
        goodput=_goodput(mtbf, saving, failures),
        tiers=tuple(
            _tier(policy, workload, model, outcome, by_tier[model.level.name], prices.get(model.level.name))
            for model in models
        ),
    )


def _goodput(mtbf: float, saving: float, failures: Sequence[FailureForecast]) -> float:
    """The share of the time in which steps are made that count: of what lies between two failures, and the restart."""
    lost = sum(one.share * (mtbf if one.lost is None else one.lost) for one in failures)
    recovery = sum(one.share * one.recovery for one in failures)
    return max(0.0, mtbf - lost) * (1 - saving) / (mtbf + recovery)


def _failure(
    policy: Policy, workload: Workload, models: Sequence[TierModel], outcome: Outcome, host_lost: bool
) -> FailureForecast:
    share = policy.failures.host_lost if host_lost else 1 - policy.failures.host_lost
    if host_lost not in outcome.survived:
        return FailureForecast(host_lost, share, "", None, workload.restart)
    there = [m for m in models if m.level.survives(host_lost) and outcome.tiers[m.level.name].versions]
    masks = route_masks(policy, [path for path, _ in workload.leaves])
    sizes = np.array([nbytes for _, nbytes in workload.leaves], float)
    recovery = workload.restart + restore_seconds(sizes, masks, there, lambda _tier: 0.0)
    return FailureForecast(host_lost, share, there[0].level.name, outcome.lost[host_lost], recovery)


def _tier(
    policy: Policy,
    workload: Workload,
    model: TierModel,
    outcome: Outcome,
    mtbf: float,
    price: float | None,
) -> TierForecast:
    name, per_day = model.level.name, DAY / outcome.seconds
    told = outcome.tiers[name]
    stored = told.share * (1 + (told.held - 1) * workload.changed) if told.held else 0.0
    return TierForecast(
        tier=name,
        every=describe_every(policy, name, told),
        interval=told.spacing,
        versions=told.versions * per_day,
        nbytes=told.nbytes * per_day,
        money=None if price is None else stored / 1e9 * price * 12 / 365,
        busy=min(1.0, told.busy / outcome.drained),
        delay=told.delay,
        left_out=told.left_out * per_day,
        kept=told.held,
        stored=stored,
        mtbf=None if math.isinf(mtbf) else mtbf,
        restore=told.share / model.read + model.fixed,
    )


def _mtbf_by_tier(policy: Policy, workload: Workload, models: Sequence[TierModel]) -> dict[str, float]:
    masks = route_masks(policy, [path for path, _ in workload.leaves])
    return failures_by_tier(policy.failures, workload.hosts, [model.level for model in models], masks)


def describe_every(policy: Policy, name: str, told: TierOutcome) -> str:
    """A tier's ``every`` for people."""
    every: Any = policy.tier(name).every
    if every is None:
        return "save"
    if isinstance(every, AutoEvery):
        return "auto" if told.interval is None else f"auto: {rough_duration(told.interval)}"
    return rough_duration(every.total_seconds()) if isinstance(every, timedelta) else f"{every} steps"


def _curves(
    policy: Policy, workload: Workload, models: Sequence[TierModel], outcome: Outcome, pace: Pace
) -> Iterator[Curve]:
    mtbf = _mtbf_by_tier(policy, workload, models)
    for model in models:
        name = model.level.name
        if not outcome.tiers[name].versions:
            continue
        cost, least = _cost(policy, workload, models, outcome, name, pace), workload.step * workload.save_every
        if math.isinf(mtbf[name]):
            yield Curve(name, cost, None)
            continue
        told = outcome.tiers[name]
        seconds = told.nbytes / told.versions / model.write + model.fixed
        best = min(MAX_SECONDS, max(optimal_interval(cost, mtbf[name]), seconds / BUSY, least))
        intervals = tuple(best * factor for factor in CURVE)
        delay = told.delay or 0.0
        shares = tuple(min(1.0, cost / (cost + t) + (t / 2 + delay) / mtbf[name]) for t in intervals)
        yield Curve(name, cost, best, intervals, shares)


def _cost(
    policy: Policy, workload: Workload, models: Sequence[TierModel], outcome: Outcome, name: str, pace: Pace
) -> float:
    """Seconds of training that a save to a tier costs: by how much the job is faster if the tier gets only one."""
    seldom = _with_every(policy, {name: f"{MAX_SECONDS:.0f}s"})
    without = simulate(seldom, workload, models, outcome.steps, on_steps=pace)
    fewer = outcome.tiers[name].versions - without.tiers[name].versions
    return max(0.0, outcome.seconds - without.seconds) / max(1, fewer)


def _advice(
    policy: Policy,
    workload: Workload,
    models: Sequence[TierModel],
    now: Forecast,
    best: Forecast,
    every: Mapping[str, str],
    curves: Sequence[Curve],
) -> Iterator[str]:
    for failure in now.failures:
        if failure.share and not failure.tier:
            yield _unsurvived(failure.host_lost, models)
    for tier, model in zip(now.tiers, models, strict=True):
        yield from _of_tier(policy, workload, tier, model)
    if now.room > 0.01 * max(now.blocked, 1e-9):
        ranks = workload.hosts * workload.processes
        wanted = -(-workload.nbytes // ranks) + policy.chunk
        wanted += -wanted % (1 << 20)
        yield (
            f"saves wait {rough_duration(now.room)} on average for room in the arena: "
            f"{rough_size(policy.arena.size * ranks)} hold less than the state of {rough_size(workload.nbytes)}, or "
            f"what was saved before is not written yet; an arena of {format_size(wanted)} per process holds one state"
        )
    for curve, tier in ((c, t) for c in curves for t in now.tiers if c.tier == t.tier and c.best is None):
        share = curve.cost * tier.versions / DAY
        if share >= COSTLY:
            yield (
                f"saves to {tier.tier} cost {share:.1%} of the time, and no failure needs it: write a longer `every` "
                "there, if it is for rollbacks only"
            )
    if best.goodput - now.goodput >= WORTH:
        said = ", ".join(
            f"{name}: {{every: {text}}}" if text else f"{name}: no `every`" for name, text in every.items()
        )
        yield f"write {said}: {now.goodput:.2%} of the time counts now, and {best.goodput:.2%} then; or `every: auto`"


def _unsurvived(host_lost: bool, models: Sequence[TierModel]) -> str:
    """What is said of a failure that leaves no whole version."""
    there = ", ".join(model.level.name for model in models if model.level.survives(host_lost))
    if there:
        what = "the loss of a host" if host_lost else "the end of a process"
        return f"{what} leaves no whole version, only what is in {there}: let `rules` send every leaf there"
    what = "a host that is lost takes every version along" if host_lost else "no tier outlives a process"
    return f"{what}: add a tier of type lustre or object"


def _of_tier(policy: Policy, workload: Workload, tier: TierForecast, model: TierModel) -> Iterator[str]:
    if tier.busy >= FULL and model.level.persistent:
        lag = "" if not tier.left_out else f", and {tier.left_out:.0f} versions a day are left out"
        yield (
            f"{tier.tier} cannot keep up: it writes for {tier.busy:.0%} of the time{lag}, and a version is there after "
            f"{rough_duration(tier.delay or 0.0)}; a longer `every` there, or `on_lag: skip`, keeps what it has new"
        )
    capacity = getattr(policy.tier(tier.tier), "capacity", None) or policy.tier(tier.tier).options.get("capacity")
    parts = {"site": 1, "host": workload.hosts, "process": workload.hosts * workload.processes}[model.level.shared]
    if capacity and tier.stored > capacity * parts:
        yield (
            f"{tier.tier}: {tier.kept} {'version is' if tier.kept == 1 else 'versions are'} "
            f"{rough_size(tier.stored)}, more than its capacity of "
            f"{rough_size(int(capacity) * parts)} in the whole job: keep fewer"
        )
