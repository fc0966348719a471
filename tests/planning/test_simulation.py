"""The simulator against closed forms, and what holds whatever the policy, the speeds and the failures are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tierstate as ts
from tierstate.engine.cadence import Level
from tierstate.planning import simulation
from tierstate.planning.lanes import TICK
from tierstate.planning.model import Failure, Outcome, TierModel, Workload
from tierstate.planning.simulation import simulate
from tierstate.tiers.wrappers.limit import BURST

GIB = 1 << 30
HOST, DISK, SITE = Level("host", False, "process"), Level("disk", True, "host"), Level("site", True, "site")


def policy(disk: str = "", site: str = "", host: str | None = None, arena: str = "64GiB", more: str = "") -> ts.Policy:
    first = f"  host: {{type: host, capacity: 64GiB, keep: {{last: 1}}{host}}}\n" if host is not None else ""
    return ts.Policy.parse(
        f"version: 1\narena: {{size: {arena}}}\n{more}tiers:\n{first}"
        f"  disk: {{type: nvme, path: /disk{disk}}}\n  site: {{type: lustre, path: /site{site}}}\n"
    )


def models(write: float = GIB, site: float = GIB, fixed: float = 0.0) -> list[TierModel]:
    return [TierModel(DISK, write, write, fixed), TierModel(SITE, site, site, fixed)]


def workload(nbytes: int = GIB, step: float = 1.0, **more: float) -> Workload:
    return Workload(((("model", "w"), nbytes),), step, **{"capture": math.inf, **more})  # type: ignore[arg-type]


# Closed forms


@given(st.floats(0.1, 5), st.floats(0, 3), st.integers(1, 200))
def test_a_save_costs_its_capture(step: float, capture: float, steps: int) -> None:
    rate = GIB / capture if capture else math.inf
    found = simulate(policy(), workload(step=step, capture=rate), models(1e18, 1e18), steps, leaps=False)
    assert found.blocked == pytest.approx([capture] * steps, abs=TICK)
    assert found.seconds == pytest.approx(steps * (step + capture), abs=steps * TICK)
    assert (found.saves, found.steps, found.room) == (steps, steps, 0)


@given(st.floats(0.2, 5), st.integers(20, 200))
def test_a_tier_that_is_too_slow_makes_saves_as_slow_as_it_is(slower: float, steps: int) -> None:
    """Once the arena is full, a save takes as long as its bytes take to be written."""
    written = 1.0 + slower  # a step takes 1 s
    found = simulate(policy(site=", every: 1000000", arena="2GiB"), workload(), models(GIB / written), steps)
    assert found.drained == pytest.approx(1.0 + steps * written)
    assert found.seconds == pytest.approx(found.drained - 2 * written, abs=written + 1)
    assert found.room == pytest.approx(found.seconds - steps)


@pytest.mark.parametrize("every", [7, 50])
@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_what_is_lost_is_half_an_interval_and_the_time_until_a_version_is_there(every: int, delay: float) -> None:
    found = simulate(policy(site=f", every: {every}"), workload(), models(1e18, 1e18, delay), 100 * every)
    assert found.lost[True] == pytest.approx(every / 2 + 2 * delay, rel=0.02), "it is copied from the other tier"
    assert found.lost[False] == pytest.approx(0.5 + delay, rel=0.02), "each save goes to the nearest"


@given(st.floats(0, 1), st.floats(0.01, 0.9))
@example(1e-9, 0.5)
def test_steps_are_slower_while_something_is_written(slower: float, writing: float) -> None:
    found = simulate(policy(site=", every: 1000000"), workload(slower=slower), models(GIB / writing), 100)
    assert found.slowed == pytest.approx(99 * slower, rel=0.02, abs=99 * TICK)
    assert found.seconds == pytest.approx(100 + found.slowed)


@given(st.floats(0, 0.9), st.integers(2, 20))
def test_what_an_idle_tier_has_saved_up_is_used_once(burst: float, steps: int) -> None:
    limited = [TierModel(DISK, GIB, GIB, burst=burst), *models()[1:]]
    found = simulate(policy(site=", every: 1000000"), workload(step=0.05), limited, steps)
    copy = 1 if burst else 0  # one version goes to the other tier, and is read at the same rate
    assert found.drained == pytest.approx(0.05 + steps + copy - burst, abs=1.1)
    assert found.tiers["disk"].arrivals[-1].arrived == pytest.approx(0.05 + steps + copy - burst)


@given(st.floats(0.05, 3), st.sampled_from([0.5, 1.0, 2.0]), st.integers(5, 60), st.booleans())
def test_what_is_read_from_a_tier_with_a_bandwidth_counts_there(
    step: float, rate: float, steps: int, skips: bool
) -> None:
    """Its bytes, written and read together, take their time; where that is more than there is, it falls behind."""
    there = [TierModel(DISK, rate * GIB, rate * GIB, burst=BURST), *models(site=100 * GIB)[1:]]
    spec = policy(site=", on_lag: skip" if skips else "")
    found = simulate(spec, workload(step=step), there, steps, leaps=False)
    moved = found.tiers["disk"].nbytes + found.tiers["site"].nbytes
    assert moved <= rate * GIB * (found.drained - step + BURST) * (1 + 1e-9)
    if not skips and step < 0.9 / rate:  # no more than its writes need
        assert found.drained == pytest.approx(step + 2 * steps / rate - BURST, abs=1.5 / rate)


@given(st.integers(1, 7), st.integers(1, 60), st.floats(0, 3), st.lists(st.floats(0, 80), max_size=2))
def test_steps_are_made_at_once_where_nothing_happens(
    save_every: int, steps: int, writing: float, times: list[float]
) -> None:
    """As if each of them were a job's step of its own: time passes the same, and failures come when they come."""
    there = models(GIB / writing if writing else 1e18, 1e18)
    failures = [Failure(time, False) for time in sorted(times)]
    found = simulate(policy(), workload(save_every=save_every, slower=0.5), there, steps, failures)
    assert found.steps == steps
    assert [one.failure.time for one in found.recoveries] == pytest.approx(
        sorted(times)[: len(found.recoveries)],
        abs=4,  # one that comes during a restore counts after it
    )
    if not times:
        assert found.saves == steps // save_every
        assert found.seconds == pytest.approx(steps + found.slowed)


# Cadence, cascade, retention


def test_a_slower_tier_copies_what_a_faster_one_has() -> None:
    found = simulate(policy(site=", every: 5"), workload(step=10.0), models(GIB, GIB / 2), 20, leaps=False)
    assert [one.step for one in found.tiers["disk"].arrivals] == [*range(1, 21)]
    assert [one.step for one in found.tiers["site"].arrivals] == [1, 5, 10, 15, 20]
    for copy in found.tiers["site"].arrivals:
        source = next(one for one in found.tiers["disk"].arrivals if one.seq == copy.seq)
        assert (copy.began, copy.arrived) == (source.arrived, pytest.approx(source.arrived + 2))


def test_a_tier_that_skips_gets_as_much_as_it_can_and_what_is_new() -> None:
    skipping = simulate(policy(site=", on_lag: skip"), workload(), models(1e18, GIB / 10), 500)
    queueing = simulate(policy(), workload(), models(1e18, GIB / 10), 500)
    assert skipping.tiers["site"].left_out == pytest.approx(450, abs=15)
    assert skipping.lost[True] < 30
    assert queueing.lost[True] > 50, "the oldest first, and at most 64 wait"
    assert simulate(policy(", keep: {last: 1}"), workload(), models(1e18, GIB / 10), 200).tiers["disk"].held > 60


@given(st.integers(1, 5), st.integers(1, 40))
def test_retention_is_that_of_the_policy(last: int, every: int) -> None:
    found = simulate(policy(site=f", keep: {{last: {last}, every: {every}}}"), workload(), models(1e18, 1e18), 100)
    # The newest of 100, and the first at or after each multiple.
    kept = {*range(101 - last, 101)} | {step for step in range(1, 101) if step == 1 or step % every == 0}
    assert found.tiers["site"].kept == len(kept)


def test_a_save_waits_for_max_lag() -> None:
    found = simulate(policy(site=", max_lag: {steps: 0}"), workload(), models(GIB, GIB / 2), 10, leaps=False)
    assert found.blocked == pytest.approx([3.0] * 10)
    assert found.tiers["site"].waited == pytest.approx(30.0)


def test_a_save_that_finds_no_room_is_left_out_if_the_policy_says_so() -> None:
    text = policy(arena="2GiB").dump().replace("arena:", "arena:\n  on_full: skip")
    found = simulate(ts.Policy.parse(text), workload(), models(GIB / 4, 1e18), 100)
    assert found.room == 0
    assert found.skipped == pytest.approx(75, abs=3)
    assert found.saves + found.skipped == 100


def test_auto_finds_an_interval() -> None:
    text = policy(", every: auto", more="failures: {mtbf: 1h, host_lost: 0.5}\n")
    found = simulate(text, workload(capture=GIB / 2), models(GIB * 10, GIB * 10), 500)
    assert found.tiers["disk"].interval is not None
    assert found.tiers["disk"].why


def test_rules_divide_the_state() -> None:
    text = policy(more="rules:\n- {match: 'optimizer.**', tiers: [disk]}\n")
    leaves = ((("model", "w"), GIB), (("optimizer", "m"), 3 * GIB))
    found = simulate(text, Workload(leaves, 10.0), models(), 10)
    assert [found.tiers[name].nbytes for name in ("disk", "site")] == [40 * GIB, 10 * GIB]
    assert found.lost[True] == pytest.approx(found.seconds / 2), "no version on the shared tier has all of the state"


# Failures


def test_a_killed_process_goes_on_from_the_nearest_tier_and_what_was_owed_is_brought() -> None:
    found = simulate(
        policy(site=", every: 2"), workload(restart=100.0), models(GIB * 10, GIB / 30), 50, [Failure(20.5, False)]
    )
    (recovery,) = found.recoveries
    assert (recovery.tier, recovery.step) == ("disk", 20)
    assert recovery.lost == pytest.approx(0.5)
    assert recovery.seconds == pytest.approx(100.1)
    assert {one.step for one in found.tiers["site"].arrivals} >= {*range(2, 20, 2)}


def test_a_lost_host_takes_its_versions_along() -> None:
    found = simulate(policy(site=", every: 10"), workload(), models(1e18, 1e18), 50, [Failure(28.5, True)])
    assert (found.recoveries[0].tier, found.recoveries[0].step) == ("site", 20)
    assert found.recoveries[0].lost == pytest.approx(8.5)


EVERY = st.sampled_from(["", ", every: 3", ", every: 20s", ", every: auto", ", every: {min: 5s, max: 40s}"])
LAG = st.sampled_from(["", ", on_lag: skip", ", max_lag: {steps: 4}", ", keep: {last: 2}"])


@example(("", ""), ("", ""), "1GiB", 1.0, 1.0, [(0.0, True)])
@given(
    st.tuples(EVERY, LAG),
    st.tuples(EVERY, LAG),
    st.sampled_from(["512MiB", "1GiB", "8GiB"]),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.lists(st.tuples(st.floats(0, 150), st.booleans()), max_size=4),
)
def test_whatever_happens_training_comes_to_its_end(
    disk: tuple[str, str],
    site: tuple[str, str],
    arena: str,
    fast: float,
    slow: float,
    failures: Sequence[tuple[float, bool]],
) -> None:
    def run() -> Outcome:
        said = policy("".join(disk), "".join(site), host="", arena=arena)
        there = [TierModel(HOST, 4 * GIB, 4 * GIB), *models(fast * GIB, slow * GIB)]
        happens = [Failure(*one) for one in sorted(failures)]
        return simulate(said, workload(capture=4 * GIB, slower=0.1, restart=3.0), there, 60, happens, leaps=False)

    found = run()
    assert found == run(), "nothing is random"
    assert found.steps == 60
    assert len(found.recoveries) <= len(failures)
    lost = sum(one.lost + one.seconds for one in found.recoveries)
    assert found.seconds == pytest.approx(60 + sum(found.blocked) + found.slowed + lost, abs=lost + 1e-6)
    assert found.drained >= found.seconds
    for tier in found.tiers.values():
        assert [one.arrived for one in tier.arrivals] == sorted(one.arrived for one in tier.arrivals)
        assert all(one.saved <= one.began <= one.arrived for one in tier.arrivals)
        assert tier.busy <= found.drained
    if not failures:
        seqs = {one.seq for one in found.tiers["disk"].arrivals}
        if not disk[0]:
            assert len(seqs) + found.tiers["disk"].left_out == found.saves


# Stretches of time that repeat


KEEP = st.sampled_from(
    ["", ", keep: {last: 1}", ", keep: {last: 3, every: 17}", ", keep: {every: 40}", ", keep: {within: 90s}"]
)
LATE = st.sampled_from(["", ", on_lag: skip", ", max_lag: {steps: 4}", ", max_lag: {seconds: 30}"])
SELDOM = st.sampled_from(["", ", every: 3", ", every: 20s", ", every: 250", ", every: 7min", ", every: auto"])
TIER_KEYS = st.tuples(SELDOM, LATE, KEEP).map("".join)
MORE = st.sampled_from(["", "rules:\n- {match: 'optimizer.**', tiers: [disk]}\n", "failures: {mtbf: 1h}\n"])


def figures(found: Outcome) -> dict[str, float]:
    """All that a plan is made from."""
    numbers = {
        name: getattr(found, name)
        for name in ("steps", "seconds", "drained", "saves", "skipped", "blocking", "room", "slowed")
    }
    numbers["longest"] = max(found.blocked, default=0.0)
    numbers |= {f"lost {lost}": seconds for lost, seconds in found.lost.items()}
    for name, tier in found.tiers.items():
        keys = ("versions", "delays", "left_out", "nbytes", "busy", "kept", "held", "waited", "interval", "spacing")
        numbers |= {f"{name} {key}": getattr(tier, key) or 0.0 for key in keys}
    return numbers


@pytest.mark.slow
@example(("", ", every: 20s, on_lag: skip, keep: {last: 3, every: 7}", ", every: 20s"), "", "512MiB", 3.0, 0.01, 1, 0.1)
@example((", every: 3, max_lag: {steps: 4}", ", every: 250, max_lag: {seconds: 30}", ""), "", "64GiB", 3.0, 2.5, 1, 0.0)
@given(
    st.tuples(TIER_KEYS, TIER_KEYS, SELDOM),
    MORE,
    st.sampled_from(["512MiB", "64GiB"]),
    st.sampled_from([0.01, 0.4, 3.0]),
    st.sampled_from([0.01, 2.5, 40.0]),
    st.sampled_from([1, 5]),
    st.sampled_from([0.0, 0.1]),
)
def test_what_repeats_is_counted_as_if_it_were_simulated(
    keys: tuple[str, str, str], more: str, arena: str, fast: float, slow: float, save_every: int, slower: float
) -> None:
    text = policy(*keys[:2], host=keys[2], arena=arena, more=more).dump()
    leaves = ((("model", "w"), GIB // 2), (("optimizer", "m"), GIB // 2))
    job = Workload(leaves, 1.0, save_every, capture=7 * GIB, slower=slower, changed=0.7)
    there = [
        TierModel(HOST, 7 * GIB, 7 * GIB),
        TierModel(DISK, GIB / fast, GIB / fast, 0.3),
        TierModel(SITE, GIB / slow, GIB / slow, burst=1.0, peak=4 * GIB / slow),
    ]
    said = ts.Policy.parse(text)
    counted = simulate(said, job, there, 700)
    simulated = simulate(said, job, there, 700, leaps=False)
    assert figures(counted) == pytest.approx(figures(simulated), rel=1e-6, abs=1e-6)
    assert counted.survived == simulated.survived


@pytest.mark.parametrize("disk", [", every: 20", ", every: 90s, keep: {last: 3}", ", every: auto"])
def test_weeks_are_counted(disk: str) -> None:
    """Four weeks with a save after each second, and a tier that gets a version a week."""
    said = policy(disk, ", every: 7d", host="", more="failures: {mtbf: 6h}\n")
    there = [TierModel(HOST, 7 * GIB, 7 * GIB), *models(GIB * 3, GIB / 40)]
    steps = 28 * 86_400
    told: list[int] = []
    found = simulate(said, workload(capture=7 * GIB), there, steps, on_steps=told.append)
    assert (found.steps, found.saves) == (steps, steps)
    assert found.tiers["site"].versions in (4, 5)
    assert found.seconds == pytest.approx(steps + found.blocking)
    assert len(found.blocked) < steps / 100, "so many were simulated"
    assert sum(told) == steps


@pytest.mark.slow
@settings(max_examples=4)
@given(st.floats(1.3, 5.0), st.sampled_from(["", ", on_lag: skip", ", keep: {last: 3}"]), st.floats(0.9, 1.1))
def test_what_nearly_repeats_is_counted_as_if_it_were_simulated(write: float, keys: str, step: float) -> None:
    """A tier that lags behind is hardly ever at the same place of a write again when a save comes."""
    said = policy(", keep: {last: 2}", keys, host="")
    there = [TierModel(HOST, 7 * GIB, 7 * GIB), *models(GIB * 3, GIB / write)]
    job = workload(step=step, capture=7 * GIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "DRIFT", 1e-5)  # so that fewer saves are enough
        counted = simulate(said, job, there, 1500)
    simulated = simulate(said, job, there, 1500, leaps=False)
    assert figures(counted) == pytest.approx(figures(simulated), rel=4e-3, abs=3.0)


@pytest.mark.slow
def test_weeks_are_counted_where_a_tier_lags_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four weeks with a save after each second, and a tier that takes longer than that for each."""
    said = policy(", keep: {last: 2}", host="")
    there = [TierModel(HOST, 7 * GIB, 7 * GIB), *models(GIB * 3, GIB / 2.3717)]
    steps = 28 * 86_400
    monkeypatch.setattr(simulation, "DRIFT", 1e-5)  # so that fewer saves are enough
    found = simulate(said, workload(step=1.01, capture=7 * GIB), there, steps)
    assert found.saves == steps
    assert found.tiers["site"].versions == pytest.approx(found.seconds / 2.3717, rel=1e-4)
    assert found.tiers["site"].versions + found.tiers["site"].left_out == steps
    assert len(found.blocked) < steps / 100, "so many were simulated"
