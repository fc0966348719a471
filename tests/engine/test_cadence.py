"""``every: auto``: the interval that costs least, by what was measured; within its bounds, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier

import tierstate as ts
from tierstate.engine.cadence import (
    BUSY,
    AutoCadence,
    Level,
    Shared,
    auto_cadence,
    choose_interval,
    failures_by_tier,
    hosts_of_job,
    job_mtbf,
    optimal_interval,
)
from tierstate.engine.events import Event, EventBus
from tierstate.engine.placement import is_due
from tierstate.engine.publish.backlog import PendingVersion, becomes_pending
from tierstate.tiers.policy.models import AutoEvery, FailuresKeys

SECONDS = st.floats(1e-3, 1e5)
LEVELS = st.lists(st.tuples(st.booleans(), st.sampled_from(["process", "host", "site"])), max_size=5).map(
    lambda found: [Level(f"tier{i}", *one) for i, one in enumerate(found)]
)


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path


def expected_time(interval: float, cost: float, mtbf: float) -> float:
    """Expected seconds for one second of training: each interval with its save is repeated until no failure hits it
    (Daly 2006, equation 13, without the time of a restart)."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@given(cost=st.floats(0.01, 100), times=st.floats(3, 1e6))
def test_no_other_interval_costs_less(cost: float, times: float) -> None:
    mtbf = cost * times
    best = optimal_interval(cost, mtbf)
    least = min(expected_time(best * factor, cost, mtbf) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert expected_time(best, cost, mtbf) <= least * (1 + 1e-9)


@given(LEVELS, st.floats(0, 1), st.floats(1, 1e7), st.integers(1, 10_000))
def test_each_failure_counts_for_the_nearest_tier_that_survives_it(
    levels: list[Level], host_lost: float, mtbf: float, hosts: int
) -> None:
    found = failures_by_tier(FailuresKeys(mtbf=mtbf, host_lost=host_lost), hosts, levels)
    survived = [lost for lost in (False, True) if any(level.survives(lost) for level in levels)]
    share = {False: 1 - host_lost, True: host_lost}
    assert sum(1 / each for each in found.values()) == pytest.approx(sum(share[lost] for lost in survived) / mtbf)
    for i, level in enumerate(levels):
        if any(all(near.survives(lost) for lost in (False, True)) for near in levels[:i]):
            assert found[level.name] == math.inf


def test_a_shared_tier_behind_a_disk_is_there_for_hosts_that_are_lost() -> None:
    levels = [Level("host", False, "process"), Level("nvme", True, "host"), Level("lustre", True, "site")]
    found = failures_by_tier(FailuresKeys(mtbf=100.0, host_lost=0.75), 8, levels)
    assert found == {"host": math.inf, "nvme": pytest.approx(400), "lustre": pytest.approx(100 / 0.75)}


@given(
    st.lists(st.tuples(st.sampled_from(["process", "host", "site"]), st.lists(st.booleans(), min_size=4, max_size=4))),
    st.booleans(),
)
def test_a_failure_counts_for_tiers_that_have_all_of_a_version_between_them(
    tiers: list[tuple[Shared, list[bool]]], lost: bool
) -> None:
    levels = [Level(str(i), shared != "process", shared) for i, (shared, _) in enumerate(tiers)]
    masks = {level.name: np.array(mask) for level, (_, mask) in zip(levels, tiers, strict=True)}
    found = failures_by_tier(FailuresKeys(mtbf=100.0, host_lost=float(lost)), 1, levels, masks)
    needed = [name for name, mtbf in found.items() if mtbf == 100]
    assert needed == [name for name, mtbf in found.items() if mtbf < math.inf]
    safe = [level.name for level in levels if level.survives(lost)]
    assert set(needed) <= set(safe)

    def whole(names: list[str]) -> bool:
        return bool(np.any([masks[name] for name in names] or [np.zeros(4, bool)], axis=0).all())

    assert whole(needed) == whole(safe)
    if not whole(safe):
        assert not needed
        return
    assert not any(whole([name for name in needed if name != left]) for left in needed), "none is too many"
    assert not whole(safe[: safe.index(needed[-1])]), "no nearer ones would do"
    everything = {name: np.ones(4, bool) for name in masks}
    assert failures_by_tier(FailuresKeys(mtbf=100.0, host_lost=float(lost)), 1, levels, everything) == (
        failures_by_tier(FailuresKeys(mtbf=100.0, host_lost=float(lost)), 1, levels)
    )


def test_more_hosts_fail_more_often_unless_it_is_said() -> None:
    assert job_mtbf(FailuresKeys(), 1) == 128 * job_mtbf(FailuresKeys(), 128)
    assert job_mtbf(FailuresKeys(mtbf=60.0), 128) == 60


@given(st.floats(0, 1e3), SECONDS, st.floats(1, 1e9) | st.just(math.inf), st.none() | SECONDS, SECONDS)
def test_an_interval_is_within_its_bounds(
    cost: float, seconds: float, mtbf: float, least: float | None, most: float
) -> None:
    bounds = AutoEvery(min=None if least is None else min(least, most), max=most)
    found, why = choose_interval(cost, seconds, mtbf, bounds)
    assert (bounds.min or 0) <= found <= max(bounds.max, 1e-3)
    assert why
    if (bounds.min or 0) < found < bounds.max:
        assert found >= min(seconds / BUSY, most)


class Loop:
    """A training loop with planted costs, in a clock of its own."""

    def __init__(self, cadence: AutoCadence, step: float, blocked: float, slower: float, seconds: float) -> None:
        self.cadence, self.step = cadence, step
        self.blocked, self.slower, self.seconds = blocked, slower, seconds
        self.now, self.count, self.last = 1e9, 0, -math.inf
        self.arrives: list[tuple[float, int]] = []
        self.saves: list[float] = []

    def tell(self, kind: str, **values: object) -> None:
        self.cadence.event(Event(kind, self.now, "run", **values))  # type: ignore[arg-type]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.step + (self.slower if self.arrives else 0.0)
            self.count += 1
            while self.arrives and self.arrives[0][0] <= self.now:
                _, seq = self.arrives.pop(0)
                self.tell("committed", tier="nvme", seq=seq, seconds=self.seconds)
            interval, blocked = self.cadence.intervals()["nvme"], 0.0
            due = self.now - self.last >= interval.total_seconds()
            self.cadence.goes(self.count, ["nvme"] if due else [])
            if due:
                self.saves.append(self.now)
                self.arrives.append((self.now + self.seconds, self.count))
                self.last, blocked = self.now, self.blocked
            self.now += blocked
            self.tell("saved", step=self.count, seq=self.count, seconds=blocked)


def test_a_save_that_is_skipped_is_on_no_way() -> None:
    cadence = AutoCadence({"nvme": AutoEvery(max=100.0)}, lambda _masks: {"nvme": 3600.0}, lambda *_: None)
    cadence.goes(1, ["nvme"])
    assert cadence.intervals()["nvme"].total_seconds() == 100
    cadence.event(Event("skipped", 1.0, "run", step=1, seq=1))
    assert cadence.intervals()["nvme"].total_seconds() == 0, "the next save is due there"


@settings(max_examples=25)
@example(0.0, 0.25, 0.5)  # a version arrives before the next save, so that a write would be under way in every step
@given(st.floats(0, 2), st.floats(0, 0.4), st.floats(0.5, 8))
def test_costs_are_found_and_the_interval_follows_them(blocked: float, slower: float, seconds: float) -> None:
    told: list[tuple[str, float, str]] = []
    cadence = AutoCadence({"nvme": AutoEvery(max=1e6)}, lambda _masks: {"nvme": 3600.0}, lambda *one: told.append(one))
    loop = Loop(cadence, 1.0, blocked, slower, seconds)
    loop.run(1200)
    cost = blocked + slower * math.ceil(seconds / (1 + slower))  # steps while a version is written
    found = cadence.intervals()["nvme"].total_seconds()
    assert found == pytest.approx(max(optimal_interval(cost, 3600.0), seconds / BUSY), rel=0.2, abs=2)
    assert told[-1][1] == pytest.approx(found, rel=0.11)
    assert {name for name, _, _ in told} == {"nvme"}
    gaps = [later - earlier for earlier, later in zip(loop.saves[-4:], loop.saves[-3:], strict=False)]
    assert all(gap == pytest.approx(found, rel=0.3, abs=3) for gap in gaps)


def test_before_anything_is_measured_one_save_after_the_other_goes() -> None:
    cadence = AutoCadence({"nvme": AutoEvery(max=100.0)}, lambda _masks: {"nvme": 3600.0}, lambda *_: None)
    assert cadence.intervals() == {"nvme": timedelta(0)}
    cadence.goes(1, ["nvme"])
    assert cadence.intervals() == {"nvme": timedelta(seconds=100)}  # the first one is under way
    cadence.event(Event("failed", 0.0, "run", tier="nvme", seq=1))
    assert cadence.intervals() == {"nvme": timedelta(0)}  # tried again at once, as without `every`
    cadence.goes(2, ["nvme"])
    cadence.event(Event("committed", 0.0, "run", tier="nvme", seq=2, seconds=1.0))
    assert cadence.intervals()["nvme"] >= timedelta(seconds=1 / BUSY)


def test_a_clock_that_is_set_back_and_a_rollback_are_no_measurements() -> None:
    cadence = AutoCadence({"nvme": AutoEvery()}, lambda _masks: {"nvme": 3600.0}, lambda *_: None)
    for number, (step, now) in enumerate([(5, 100.0), (6, 50.0), (3, 60.0), (3, 61.0)]):
        cadence.goes(number, ["nvme"])
        cadence.event(Event("saved", now, "run", step=step, seq=number, seconds=0.5))
        cadence.event(Event("committed", now, "run", tier="nvme", seq=number, seconds=0.25))
    assert timedelta(0) < cadence.intervals()["nvme"] <= timedelta(hours=1)


def test_a_clock_that_is_set_ahead_puts_no_saves_off() -> None:
    """Nor a process that stands still, in a step beside a write: what that step took is no cost of the save."""
    cadence = AutoCadence({"nvme": AutoEvery(max=1e6)}, lambda _masks: {"nvme": 3600.0}, lambda *_: None)
    loop = Loop(cadence, 1.0, 0.5, 0.2, 2.0)
    loop.run(1200)
    before = cadence.intervals()["nvme"].total_seconds()
    while not loop.arrives:
        loop.run(1)
    loop.now += 7200
    most = before
    for _ in range(600):
        loop.run(1)
        most = max(most, cadence.intervals()["nvme"].total_seconds())
    assert most < 2 * before
    assert cadence.intervals()["nvme"].total_seconds() == pytest.approx(before, rel=0.2)


def test_failures_are_found_again_only_where_leaves_go_elsewhere(place: Path) -> None:
    asked: list[int] = []
    spec = policy({"nvme": tier("nvme", place, every="auto"), "lustre": tier("lustre", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        auto = ckpt._pipeline.auto
        assert auto is not None
        known = auto._mtbf_of
        auto._mtbf_of = lambda masks: asked.append(len(masks)) or known(masks)  # type: ignore[func-returns-value]
        for step, state in enumerate([{"a": torch.ones(3)}, {"a": torch.zeros(3)}, {"b": torch.ones(3)}]):
            ckpt.save(state, step=step).wait("lustre")
    assert asked == [2, 2]


def test_for_others_only_the_bound_is_known() -> None:
    every = AutoEvery(min=1.0, max=60.0)
    assert not is_due(every, 9, (1, 0.0), 59.0)
    assert is_due(every, 9, (1, 0.0), 60.0)
    # A save that failed is made up for, as nobody knows that it was not needed.
    assert becomes_pending(every, [PendingVersion(1, 1, 0.0)], PendingVersion(2, 2, 1.0))


def test_no_tier_needs_it(place: Path) -> None:
    assert auto_cadence(policy({"nvme": tier("nvme", place, every=3)}), [], 1, EventBus("run")) is None


def test_launchers_say_how_many_hosts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert hosts_of_job() == 1
    monkeypatch.setenv("SLURM_NTASKS", "32")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4(x8)")
    assert hosts_of_job() == 1
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert hosts_of_job() == 8
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert hosts_of_job() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert hosts_of_job() == 8


def test_a_tier_gets_its_saves_and_says_how_often(place: Path) -> None:
    far = AutoEvery(max=0.001)  # so short that each save is due once the one before is there
    spec = policy(
        {
            "nvme": tier("nvme", place, every="auto"),
            "lustre": tier("lustre", place, every={"max": far.max}),
        },
        failures={"mtbf": "30d"},
    )
    told: list[Event] = []
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.on("interval", told.append)
        for step in range(4):
            ckpt.save({"w": torch.full((1000,), float(step))}, step).wait("lustre")
        assert [v.step for v in ckpt.versions() if "lustre" in v.tiers] == [0, 1, 2, 3]
        # The second save is much nearer to the first than a failure in a month is worth.
        assert next(v.step for v in ckpt.versions() if "nvme" in v.tiers) == 0
    assert {event.tier for event in told} == {"nvme", "lustre"}
    assert all(event.reason and event.seconds for event in told)
    with ts.Checkpointer(spec, "run") as ckpt:
        made = ckpt.save({"w": torch.zeros(1000)}, 4)  # the first one of a process is due: nothing is measured yet
    assert {name for name in made.tiers if made.done(name)} >= {"nvme", "lustre"}


@pytest.mark.parametrize(("ruled", "needed"), [("none", True), ("w", False)])
def test_a_tier_of_parts_is_no_survivor(place: Path, ruled: str, needed: bool) -> None:
    """A rule keeps `w` from the disk: after a failure it is of no use without the other tier."""
    spec = policy(
        {"nvme": tier("nvme", place, every="auto"), "lustre": tier("lustre", place, every={"max": 0.001})},
        failures={"mtbf": "30d", "host_lost": 0},
        rules=[{"match": ruled, "tiers": ["lustre"]}],
    )
    told: list[Event] = []
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.on("interval", told.append)
        ckpt.save({"w": torch.zeros(1000), "n": torch.zeros(1000)}, 0).wait("nvme")
        ckpt.save({"w": torch.zeros(1000), "n": torch.zeros(1000)}, 1).wait("lustre")
    (reason, *_) = [event.reason for event in told if event.tier == "nvme"]
    assert ("no failure is expected of which it is the nearest survivor" in str(reason)) is not needed
