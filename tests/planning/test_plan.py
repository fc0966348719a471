"""Plans: what is advised is better, figures are what was given, and the page shows the numbers of ``--json``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli_calls import Call, call

import tierstate as ts
from tierstate.engine.cadence import BUSY, Level, Shared, optimal_interval
from tierstate.engine.events import Event
from tierstate.planning.figures import Speed, figures_of, levels_of, parse_speeds, parse_state, tier_models
from tierstate.planning.model import TierModel, Workload
from tierstate.planning.plan import Plan, check_simulated, every_text, make_plan
from tierstate.tiers.units import MAX_SECONDS, parse_seconds

__all__ = ["call"]

GIB = 1 << 30

TEXT = """
version: 1
arena: {size: 1GiB}
failures: {mtbf: 6h, host_lost: 0.5}
tiers:
  host: {type: host, capacity: 4GiB, keep: {last: 1}}
  nvme: {type: nvme, path: /local/nvme, every: 20, keep: {last: 3}}
  lustre: {type: lustre, path: /lustre, every: 4h, keep: {last: 5}}
"""


def made(seconds: float, write: float = 2.0, **more: float) -> Plan:
    policy = ts.Policy.parse(TEXT)
    workload = Workload(parse_state("10GiB"), 10.0, **{"capture": 8 * GIB, "hosts": 2, "processes": 8, **more})  # type: ignore[arg-type]
    speeds = {"nvme": Speed(write * GIB, write * GIB), "lustre": Speed(GIB, GIB)}
    return make_plan(policy, workload, tier_models(policy, 2, 8, workload.capture, speeds, {}), seconds)


@pytest.mark.slow
def test_what_is_advised_is_better() -> None:
    plan = made(30_000, slower=0.1)
    assert plan.best.goodput > plan.now.goodput
    assert parse_seconds(plan.every["lustre"]) < 4 * 3600
    assert any(advice.startswith("write nvme: {every: ") for advice in plan.advice)
    by_tier = {curve.tier: curve for curve in plan.curves}
    assert by_tier["host"].best is None
    assert min(by_tier["lustre"].shares) == by_tier["lustre"].shares[6], "the curve is lowest at the best interval"


@settings(max_examples=15)
@given(st.floats(0.1, 8), st.floats(0, 0.3), st.floats(0.05, 1))
def test_shares_are_shares(write: float, slower: float, changed: float) -> None:
    plan = made(1000, write=write, slower=slower, changed=changed)
    for forecast in (plan.now, plan.best):
        assert 0 <= forecast.saving <= 1
        assert 0 <= forecast.goodput <= 1
        assert sum(failure.share for failure in forecast.failures) == pytest.approx(1)
        assert all(0 <= tier.busy <= 1 for tier in forecast.tiers)
    assert plan.best.goodput >= plan.now.goodput


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("lustre: {type: lustre, path: /lustre, every: 4h, keep: {last: 5}}", ""), "a host that is lost takes"),
        (("every: 4h", "every: 1, on_lag: skip"), "lustre cannot keep up"),
        (("size: 1GiB", "size: 64MiB"), "for room in the arena"),
        (("every: 20, keep: {last: 3}", "every: 20, keep: {last: 30}, capacity: 8GiB"), "more than its capacity"),
        (("mtbf: 6h", "mtbf: 6d"), "saves to host cost"),
    ],
)
def test_what_is_wrong_is_told(change: tuple[str, str], said: str) -> None:
    policy = ts.Policy.parse(TEXT.replace(*change))
    workload = Workload(parse_state("10GiB"), 10.0, capture=8 * GIB, hosts=2, processes=8)
    speeds = {"nvme": Speed(GIB / 4, GIB), "lustre": Speed(GIB / 2, GIB)}
    plan = make_plan(policy, workload, tier_models(policy, 2, 8, workload.capture, speeds, {}), 2000)
    assert any(said in advice for advice in plan.advice), plan.advice


@given(st.floats(3, 30 * 86_400))
def test_an_interval_as_text_is_the_interval(seconds: float) -> None:
    text = every_text(seconds, Workload((), 0.5))
    assert parse_seconds(text) == pytest.approx(seconds, rel=0.26)


def test_an_interval_of_a_step_is_every_save() -> None:
    assert every_text(60.0, Workload((), 6.0, save_every=10)) == ""


# Closed forms


def alone(keys: str = "", hosts: int = 1, shared: Shared = "site", **more: float) -> Plan:
    """A plan for one tier, which gets 1 GiB after each step of 1 s, and a failure an hour."""
    text = f"arena: {{size: 64GiB}}\nfailures: {{mtbf: 1h}}\ntiers:\n  disk: {{type: nvme, path: /disk{keys}}}\n"
    level, fixed = Level("disk", True, shared), more.pop("fixed", 0.0)
    model = TierModel(level, more.pop("write", 1e18), more.pop("read", 1e18), fixed)
    workload = Workload(((("w",), GIB),), 1.0, hosts=hosts, **more)  # type: ignore[arg-type]
    return make_plan(ts.Policy.parse(text), workload, [model], 200)


@settings(max_examples=25)
@given(st.floats(0.05, 20))
def test_a_save_costs_its_capture_and_the_best_interval_is_dalys(capture: float) -> None:
    plan = alone(capture=GIB / capture, restart=60.0, read=GIB / 30)
    (curve,) = plan.curves
    assert curve.cost == pytest.approx(capture)
    assert curve.best == pytest.approx(max(1.0, optimal_interval(capture, 3600.0)))
    assert plan.now.saving == pytest.approx(capture / (1 + capture))
    lost = plan.now.failures[0].lost
    assert lost == pytest.approx((1 + capture) / 2, rel=0.01)
    assert plan.now.goodput == pytest.approx((3600 - lost) / (3600 + 60 + 30) / (1 + capture))


def test_no_interval_is_advised_in_which_a_tier_is_busy_for_more_than_half_of_the_time() -> None:
    (curve,) = alone(", every: 40s", write=GIB / 20.0, fixed=5.0).curves
    assert curve.cost == 0
    assert curve.best == pytest.approx(25.0 / BUSY)


@settings(max_examples=20)
@given(st.integers(2, 20), st.floats(0, 1))
def test_after_the_first_version_what_changed_is_written_and_kept(last: int, changed: float) -> None:
    (tier,) = alone(f", keep: {{last: {last}}}", changed=changed).now.tiers
    assert tier.kept == last
    assert tier.stored == pytest.approx(GIB * (1 + (last - 1) * changed))
    assert tier.nbytes / tier.versions == pytest.approx(GIB * (1 + 199 * changed) / 200)


@pytest.mark.parametrize(("shared", "hosts", "told"), [("host", 5, False), ("host", 4, True), ("site", 5, True)])
def test_a_capacity_is_that_of_each_host_or_of_all(shared: Shared, hosts: int, told: bool) -> None:
    plan = alone(", keep: {last: 10}, capacity: 2GiB", hosts, shared)
    assert any("more than its capacity" in advice for advice in plan.advice) is told


DIVIDED = """
version: 1
arena: {size: 4GiB}
failures: {mtbf: 6h, host_lost: 0.5}
tiers:
  nvme: {type: nvme, path: /local/nvme, every: 5}
  lustre: {type: lustre, path: /lustre, every: 10}
rules:
  - {match: 'RULED.**', tiers: [TIER]}
"""


def divided(ruled: str, tier: str) -> Plan:
    policy = ts.Policy.parse(DIVIDED.replace("RULED", ruled).replace("TIER", tier))
    workload = Workload(parse_state("14GiB"), 10.0, capture=8 * GIB, restart=100.0)
    models = [
        TierModel(Level("nvme", True, "host"), 2 * GIB, 4 * GIB, fixed=1.0),
        TierModel(Level("lustre", True, "site"), 2 * GIB, GIB, fixed=0.5),
    ]
    return make_plan(policy, workload, models, 4000)


def test_what_rules_keep_from_shared_tiers_is_lost_with_a_host() -> None:
    """A version without its optimizer is none that training goes on from."""
    plan = divided("optimizer", "nvme")
    killed, lost = plan.now.failures
    assert (killed.tier, lost.tier, lost.lost, lost.recovery) == ("nvme", "", None, 100.0)
    assert plan.now.goodput <= 0.5
    assert any("the loss of a host leaves no whole version, only what is in lustre" in one for one in plan.advice)
    assert {curve.tier: curve.best is None for curve in plan.curves} == {"nvme": False, "lustre": True}
    assert plan.now.tiers[1].mtbf is None
    assert "lustre" not in plan.every


def test_each_leaf_is_read_back_from_the_nearest_tier_that_has_it() -> None:
    killed, lost = divided("optimizer", "lustre").now.failures
    assert killed.recovery == pytest.approx(100 + (2 / 4 + 1.0) + (12 / 1 + 0.5))
    assert lost.recovery == pytest.approx(100 + 14 / 1 + 0.5)
    whole = divided("nothing", "lustre").now.failures
    assert whole[0].recovery == pytest.approx(100 + 14 / 4 + 1.0)
    assert whole[1].recovery == pytest.approx(100 + 14 / 1 + 0.5)


# Figures


@pytest.mark.parametrize(("text", "nbytes"), [("70b", 980e9), ("1.5T", 21e12), ("40GiB", 40 * GIB), ("1", 1)])
def test_states(text: str, nbytes: float) -> None:
    leaves = parse_state(text)
    assert sum(n for _, n in leaves) == nbytes
    assert {path[0] for path, _ in leaves} == {"model", "optimizer"}


def test_speeds_are_of_each_host_or_of_all() -> None:
    policy = ts.Policy.parse(TEXT.replace("path: /lustre", "path: /lustre, bandwidth: 1MiB/s"))
    speeds = parse_speeds(["nvme=2GiB/s:3GiB/s", "lustre=50GiB/s"], policy)
    host, nvme, lustre = tier_models(policy, 4, 8, 100.0, speeds, {"nvme": 0.5})
    assert (host.write, nvme.write, nvme.read, nvme.fixed) == (100.0, 8 * GIB, 12 * GIB, 0.5)
    assert lustre.write == 4 * 8 * 2**20, "its bandwidth is that of each process"
    assert levels_of(policy)["lustre"] == (Level("lustre", True, "site"), False)
    with pytest.raises(ValueError, match="the speed of nvme is not known"):
        tier_models(policy, 4, 8, 100.0, {}, {})


def test_figures_of_a_run(disk: Path) -> None:
    text = f"metrics: {{events: true}}\ntiers:\n  nvme: {{type: nvme, path: {disk}/nvme}}\n"
    with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
        for step in (5, 10, 15):
            ckpt.save({"w": torch.full((1000,), float(step)), "n": step}, step=step).wait()
        found = figures_of(ckpt)
    assert (("w",), 4000) in found.leaves
    assert found.save_every == 5
    assert found.step is not None
    assert 0 < found.step < 10


RULED = """
metrics: {{events: true}}
tiers:
  nvme: {{type: nvme, path: {disk}/nvme, every: 10}}
  lustre: {{type: lustre, path: {disk}/lustre, every: 10}}
rules:
  - {{match: 'large', tiers: [nvme]}}
"""


def test_figures_are_of_saves_that_went_somewhere_and_of_what_went_there(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten saves nine are due nowhere, and one tier gets a quarter of the state."""
    ruled = ts.Policy.parse(RULED.format(disk=disk))
    with ts.Checkpointer(ruled, "run") as ckpt:
        for step in range(1, 41):
            ckpt.save({"small": torch.full((1000,), float(step)), "large": torch.full((3000,), float(step))}, step=step)
    with ts.Checkpointer(ruled, "run") as ckpt:
        said = [replaced(event) for event in ckpt.events()]
        monkeypatch.setattr(ckpt, "events", lambda: said)
        found = figures_of(ckpt)
    assert found.save_every == 1
    assert found.capture == pytest.approx(16_000 / 2.0)
    assert found.speeds["nvme"] == pytest.approx((16_000 / 4.0,) * 2)
    assert found.speeds["lustre"] == pytest.approx((4_000 / 4.0,) * 2)


def replaced(event: Event) -> Event:
    """With a time that is known: a save blocks for 2 s, or not if it copied nothing, and a version takes 4 s."""
    blocked = 2.0 if event.step in (1, 10, 20, 30, 40) else 0.001
    return event._replace(seconds=blocked if event.kind == "saved" else 4.0)


# The command


OPTIONS = ("--state", "7b", "--step", "2s", "--nodes", 4, "--speed", "nvme=2GiB/s:3GiB/s", "--speed", "lustre=4GiB/s")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.slow
def test_the_command_and_its_page(call: Call, policy: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    policy.write_text(TEXT.replace("every: 4h", "every: 5min"))
    done = call("plan", "-p", policy, *OPTIONS, "--price", "lustre=0.02", "--for", "10min", "-o", page)
    assert (done.status, done.err) == (0, "")
    assert "job: 4 hosts of 8 processes; a failure every 6 h" in done.out
    assert "of the time counts in the end" in done.out
    plan = call("plan", "-p", policy, *OPTIONS, "--price", "lustre=0.02", "--for", "10min", "--json").json
    assert plan["nbytes"] == 98e9
    lustre = plan["now"]["tiers"][2]
    assert lustre["money"] == pytest.approx(lustre["stored"] / 1e9 * 0.02 * 12 / 365)
    text = page.read_text()
    data = text.partition('<script type="application/json" id="report-data">')[2].partition("</script>")[0]
    assert json.loads(data) == {"runs": [plan]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--step", "2s"), "say either --state"),
        (("--state", "7b"), "how long a training step takes is not known"),
        (("--state", "7b", "--step", "2s"), "the speed of nvme, lustre is not known"),
        (("--state", "many", "--step", "2s"), "a number of parameters, as in 70b"),
        ((*OPTIONS, "--speed", "nvme=fast"), "TIER=WRITE:READ"),
        ((*OPTIONS, "--speed", "tape=1GiB/s"), "'tape' is no tier of this policy"),
        ((*OPTIONS, "--price", "nvme=cheap"), "right is TIER=PRICE"),
        ((*OPTIONS, "--price", "nvme=nan"), "right is TIER=PRICE"),
        ((*OPTIONS, "--price", "nvme=inf"), "right is TIER=PRICE"),
        ((*OPTIONS, "--price", "nvme=1", "--price", "nvme=-1"), "right is TIER=PRICE"),
        (("--state", f"{'9' * 400}b", "--step", "2s"), "a number of parameters, as in 70b"),
        (("--state", "0b", "--step", "2s"), "--state '0b' is nothing"),
        (("--state", "0.01m", "--step", "0.001s"), "the speed of nvme, lustre is not known"),
        ((*OPTIONS, "--for", "3h59min"), "lustre gets a version every 4 h; say no less"),
        (("--run", "gpt", "--step", "2s", "--state", "7b"), "say either --state"),
    ],
)
def test_what_is_missing_or_wrong_is_told(call: Call, policy: Path, arguments: tuple[object, ...], said: str) -> None:
    done = call("plan", "-p", policy, *arguments)
    assert done.status == 2
    assert said in done.err


@pytest.mark.slow
def test_what_could_not_be_measured_is_told(call: Call, disk: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        f"tiers:\n  nvme: {{type: nvme, path: {disk}/nvme}}\n  lustre: {{type: lustre, path: /proc/none, every: 5}}\n"
    )
    asked = ("plan", "-p", path, "--state", "1MiB", "--step", "1s", "--measure", "--for", "1min")
    failed = call(*asked)
    assert failed.status == 2
    assert "lustre was not measured: " in failed.err
    assert "/proc/none" in failed.err
    done = call(*asked, "--speed", "lustre=1GiB/s", "--json")
    assert done.status == 0
    assert done.json["now"]["tiers"][0]["versions"] > 0
    assert "lustre was not measured: " in json.loads(done.err)["warning"]


@pytest.mark.slow
def test_as_much_is_simulated_as_each_interval_needs() -> None:
    """A tier of which one version came says nothing about what a failure costs."""
    policy = ts.Policy.parse(TEXT.replace("every: 4h", "every: {min: 1s, max: 90s}"))
    workload = Workload(parse_state("1MiB"), 10.0, capture=8 * GIB)
    check_simulated(policy, workload, 200.0)
    with pytest.raises(ValueError, match="nvme gets a version every 3 min 20 s"):
        check_simulated(policy, workload, 199.0)
    speeds = {"nvme": Speed(GIB, GIB), "lustre": Speed(GIB, GIB)}
    plan = make_plan(policy, workload, tier_models(policy, 1, 8, workload.capture, speeds, {}))
    assert plan.now.simulated == pytest.approx(10_000, rel=0.01), "a thousand saves"
    far = ts.Policy.parse(TEXT.replace("every: 20", "every: 300").replace("every: 4h", "every: 1h"))
    plan = make_plan(far, workload, tier_models(far, 1, 8, workload.capture, speeds, {}))
    assert plan.now.simulated == pytest.approx(4 * 3600, rel=0.01), "four times the longest interval"


def test_what_takes_centuries_is_no_reason_to_fail() -> None:
    """A tier that needs longer for a version than a policy can say in an interval."""
    (curve,) = (plan := alone(", every: 40s", write=0.1)).curves
    assert curve.best == MAX_SECONDS
    assert parse_seconds(plan.every.get("disk", "1s")) <= MAX_SECONDS


def test_steps_between_saves_cost_nothing(call: Call, policy: Path) -> None:
    plan = call("plan", "-p", policy, *OPTIONS, "--save-every", 100_000_000, "--json").json
    assert plan["now"]["simulated"] >= 2e8


def test_a_plan_from_a_run(call: Call, disk: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"metrics: {{events: true}}\ntiers:\n  nvme: {{type: nvme, path: {disk}/nvme}}\n")
    with ts.Checkpointer(path, "run") as ckpt:
        for step in range(4):
            ckpt.save({"w": torch.full((1000,), float(step))}, step=step).wait()
    plan = call("plan", "-p", path, "--run", "run", "--step", "1s", "--for", "5min", "--json").json
    assert plan["nbytes"] == 4000
    assert plan["now"]["tiers"][0]["versions"] > 80_000
    assert call("plan", "-p", path, "--run", "none", "--step", "1s").status == 2


def test_a_tier_of_no_use_is_a_curve_without_a_best_interval() -> None:
    policy = ts.Policy.parse(TEXT)
    models = [
        TierModel(Level("host", False, "process"), 1e9, 1e9),
        TierModel(Level("nvme", True, "site"), 1e9, 1e9),
        TierModel(Level("lustre", True, "site"), 1e9, 1e9),
    ]
    plan = make_plan(policy, Workload(parse_state("1GiB"), 1.0, capture=math.inf), models, 300)
    assert {curve.tier: curve.best is None for curve in plan.curves} == {"host": True, "nvme": False, "lustre": True}
    assert set(plan.every) <= {"nvme"}
