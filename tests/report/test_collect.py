"""The numbers of a report: those that versions, events and retention say themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, tier
from support.cli_calls import Call

import tierstate as ts
from tierstate.checkpointer import open_quietly
from tierstate.engine.info import VersionInfo
from tierstate.report.collect import collect_runs
from tierstate.report.data import STATES, ReportData, RunReport, TierReport
from tierstate.report.layers import MAP_CHUNKS, MAP_VERSIONS, sampled


@pytest.fixture(scope="module")
def data(world: Path) -> ReportData:
    return collect_runs(world, ["gpt", "broken"])


def files_of(place: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in place.rglob("*")}


def tier_of(run: RunReport, name: str) -> TierReport:
    return next(tier for tier in run.tiers if tier.name == name)


@pytest.mark.slow
def test_the_numbers_are_those_of_versions_and_events(world: Path, data: ReportData) -> None:
    for run in data.runs:
        with open_quietly(world, run.run) as ckpt:
            versions, events = ckpt.versions(), ckpt.events()
        kinds = Counter((event.tier, event.kind) for event in events)
        assert (run.versions, run.known, run.events, run.saves) == (len(versions), 12, len(events), 12)
        assert (run.newest, run.nbytes) == (120, versions[-1].nbytes)
        assert run.blocked.total == pytest.approx(sum(e.seconds or 0.0 for e in events if e.kind == "saved"))
        assert run.captured.longest_of_all == max(e.seconds or 0.0 for e in events if e.kind == "captured")
        assert run.failures == kinds["lustre", "failed"]
        assert sum(rank.saves for rank in run.ranks) == 12
        for name in ("nvme", "lustre"):
            tier = tier_of(run, name)
            here = [version for version in versions if name in version.tiers]
            arrived = [e for e in events if e.tier == name and e.kind in ("committed", "cascaded", "brought")]
            assert (tier.versions, tier.newest) == (len(here), here[-1].step)
            assert tier.counts == {kind: count for (of, kind), count in kinds.items() if of == name}
            assert tier.written_total == sum(e.nbytes or 0 for e in arrived) == sum(n or 0 for n in tier.written)
            assert tier.raw_total == sum(e.raw or 0 for e in arrived)
            saved = tier.by_codecs + tier.by_reuse + tier.by_both
            assert tier.raw_total - tier.written_total == saved
            assert sum(n or 0 for n in tier.stored) == sum(version.stored[name] for version in here)
            whole = sum(sum(tier.states[STATES.index(state)]) for state in ("whole", "in part"))
            assert whole == len(here)


@pytest.mark.slow
def test_what_rules_send_elsewhere_is_nothing_that_codecs_have_saved(place: Path) -> None:
    spec = policy(
        {"nvme": tier("nvme", place), "lustre": tier("lustre", place)},
        metrics={"events": True},
        rules=[{"match": "large", "tiers": ["nvme"]}],
    )
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in (1, 2, 3):
            state = {"small": torch.randn(1000), "large": torch.randn(3000)}
            ckpt.save(state, step).wait("lustre")
        assert {name: found.raw for name, found in ckpt.stats().tiers.items()} == {"nvme": 48_000, "lustre": 12_000}
    (run,) = collect_runs(spec, ["run"]).runs
    for name, nbytes in (("nvme", 48_000), ("lustre", 12_000)):
        found = tier_of(run, name)
        assert (found.raw_total, found.by_codecs) == (nbytes, 0)


def test_reasons_of_retention_failures_and_layers(data: ReportData) -> None:
    gpt, broken = data.runs
    kept = {one.tier: one for one in gpt.retention}
    assert {one.reason: one.versions for one in kept["nvme"].reasons} == {"last 4": 4, "newest": 1, "tag best": 1}
    assert {version.step: tuple(version.reasons) for version in kept["lustre"].newest}[40] == ("every 40", "tag best")
    assert [(one.kind, one.step) for one in broken.happenings if one.kind == "failed"] == [("failed", 60)]
    assert gpt.happened == 0
    changed = dict(zip(gpt.layers.layers, gpt.layers.changed, strict=True))
    assert set(changed["model.layers.0"][1:]) == {0.0}, "frozen"
    assert set(changed["model.layers.1"][1:]) == {1.0}
    assert changed["model.layers.1"][0] is None
    assert gpt.layers.steps[-1] == 120
    at = gpt.layers.layers.index("model.layers.1")
    assert gpt.layers.norms[at] == [pytest.approx(step * 3000**0.5, rel=1e-6) for step in gpt.layers.steps]
    before, last = gpt.layers.steps[-2:]
    assert gpt.layers.drift[at][-1] == pytest.approx(last / before - 1)
    assert {count for row in gpt.layers.nonfinite for count in row} <= {0, None}


@pytest.mark.slow
def test_what_each_line_of_the_policy_did(data: ReportData) -> None:
    did = {line.text.strip(): line.did for line in data.runs[0].policy}
    assert did["last: 4"] == "4 versions: last 4"
    assert did["events: true"] == f"{data.runs[0].events:,} events are logged"
    assert did["- match: optimizer.**"].startswith("matches 1 leaves of the newest version")
    assert did["host:"] == "in the memory of the training: not seen from here"


@pytest.mark.slow
def test_a_report_changes_nothing_and_is_json(world: Path) -> None:
    before = files_of(world.parent)
    found = collect_runs(world, ["gpt", "nobody"])
    assert files_of(world.parent) == before
    json.dumps(found.encode(), allow_nan=False)
    assert (found.runs[1].versions, found.runs[1].newest, found.runs[1].axis.time) == (0, None, [])


def test_without_events_records_alone_speak(place: Path) -> None:
    policy = ts.Policy.parse(
        f"version: 1\nchunk: 4KiB\narena: {{size: 64KiB}}\ntiers: {{a: {{type: nvme, path: {place}}}}}"
    )
    with ts.Checkpointer(policy, "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": bytes(9000)}, step).wait()
    run = collect_runs(policy, ["run"]).runs[0]
    assert (run.events, run.versions, run.blocked.mean_of_all, run.tiers[0].arrival.count) == (0, 3, None, 0)
    assert run.tiers[0].written == [None, None, None]
    assert all(run.tiers[0].stored)
    assert run.tiers[0].exposure[0] is None
    assert all((age or 0) > 0 for age in run.tiers[0].exposure[1:])


@given(st.integers(0, 500), st.integers(0, 1 << 50))
def test_the_versions_that_are_looked_at_are_bounded(count: int, nbytes: int) -> None:
    versions = [VersionInfo("run", i, i, "id", 0.0, nbytes, ("nvme",)) for i in range(count)]
    found = sampled(versions, 1 << 24)
    assert len(found) <= min(count, MAP_VERSIONS)
    assert len(found) <= 2 or len(found) * (nbytes >> 24) <= MAP_CHUNKS
    if count:
        assert (found[0], found[-1]) == (versions[0], versions[-1])


@pytest.mark.parametrize("asked", [(), ("--json",)])
def test_a_run_that_is_nowhere_is_no_empty_report(
    call: Call, world: Path, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    page = tmp_path / "report.html"
    found = call("report", "-p", world, "-r", "gpt", "-r", "gtp", "-o", page, *asked)
    assert (found.status, found.out) == (2, "")
    assert "run 'gtp' has no version and no event in host, nvme, lustre" in found.err
    assert not page.exists()
