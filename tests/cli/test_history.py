"""`bisect` and `status`: since when something is wrong, and how a run stands."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cli_calls import Call

import tierstate as ts
from tierstate.cli.output.status import RunStatus, TierStatus, status_lines
from tierstate.engine.info import VersionInfo
from tierstate.engine.versions.bisect import bisect, has_nonfinite

ARGUMENTS = ("-r", "gpt")


def version(number: int) -> VersionInfo:
    return VersionInfo("run", number, number, f"{number:032x}", 0.0, 0, ("nvme",))


@given(st.integers(1, 600), st.data())
def test_the_first_version_is_found_by_few_looks(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count), "the first for which it holds; none if it is the count")
    versions = [version(number) for number in range(count)]
    found = bisect(versions, lambda one: one.seq >= first)
    assert len(found.looks) <= 1 + math.ceil(math.log2(count)) if count > 1 else len(found.looks) == 1
    assert found.first == (None if first == count else versions[first])
    if found.first is not None:
        assert found.before == (versions[first - 1] if first else None)


@given(st.integers(1, 40), st.data())
def test_versions_that_cannot_be_told_are_passed_by(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count))
    silent = data.draw(st.sets(st.integers(0, count - 1)))
    versions = [version(number) for number in range(count)]
    found = bisect(versions, lambda one: None if one.seq in silent else one.seq >= first)
    told = [number for number in range(count) if number not in silent]
    holding = [number for number in told if number >= first]
    assert found.first == (versions[holding[0]] if holding else None)
    before = [number for number in told if number < first]
    if holding:
        assert found.before == (versions[before[-1]] if before else None)
    assert len({look.version.seq for look in found.looks}) == len(found.looks), "each once"


@pytest.mark.parametrize(
    ("state", "bad"),
    [
        ({"w": torch.tensor([1.0, math.nan])}, True),
        ({"w": [torch.tensor([1.0]), torch.tensor([math.inf], dtype=torch.bfloat16)]}, True),
        ({"w": torch.tensor([1, 2]), "x": "text", "y": (1.0, None)}, False),
        ({"w": torch.tensor([complex(0, math.nan)])}, True),
        ({"w": torch.tensor([math.nan]).to(torch.float8_e4m3fn)}, True),
        ({"w": torch.tensor([1.0]).to(torch.float8_e4m3fn)}, False),
        ({"w": torch.zeros(0)}, False),
        ([1.0, math.inf], True),
        ({"w": torch.tensor([1.0]).numpy() * math.nan}, True),
    ],
)
def test_what_is_not_finite(state: Any, bad: bool) -> None:
    assert has_nonfinite(state) is bad


@pytest.fixture
def poisoned(place: Path) -> Path:
    """Forty versions; from step 23 on one layer has a NaN."""
    path = place / "policy.yaml"
    path.write_text(
        "version: 1\nchunk: 4KiB\narena: {size: 64KiB}\nmetrics: {events: true}\n"
        f"tiers: {{nvme: {{type: nvme, path: {place}/nvme}}}}\n"
    )
    with ts.Checkpointer(path, "gpt") as ckpt:
        for step in range(40):
            layers = {f"layer{i}": torch.full((50,), float(step)) for i in range(3)}
            if step >= 23:
                layers["layer1"][7] = math.nan
            ckpt.save({"model": layers}, step=step).wait()
    return path


@pytest.mark.slow
def test_the_first_version_with_a_nan(call: Call, poisoned: Path) -> None:
    found = call("bisect", "-p", poisoned, *ARGUMENTS, "--when", "nonfinite(model.**)", "--json")
    assert found.status == 0
    assert (found.json["first"]["step"], found.json["before"]["step"]) == (23, 22)
    assert len(found.json["looks"]) <= 7
    one = call("bisect", "-p", poisoned, *ARGUMENTS, "--when", "nonfinite(model.layer1)")
    assert "first at step 23" in one.out
    assert "not yet at step 22" in one.out
    other = call("bisect", "-p", poisoned, *ARGUMENTS, "--when", "nonfinite(model.layer2)")
    assert (other.status, "it does not hold for the newest version" in other.out) == (1, True)
    none = call("bisect", "-p", poisoned, *ARGUMENTS, "--when", "missing(optimizer.**)")
    assert "first at step 0" in none.out
    assert "the oldest version" in none.out


def test_a_command_tells(call: Call, poisoned: Path) -> None:
    cmd = 'test -n "$TIERSTATE_VERSION" -a "$TIERSTATE_RUN" = gpt || exit 200; '
    cmd += "[ $TIERSTATE_STEP = 19 ] && exit 125; [ $TIERSTATE_STEP -lt 11 ]"
    found = call("bisect", "-p", poisoned, *ARGUMENTS, "--cmd", cmd, "--json").json
    assert (found["first"]["step"], found["before"]["step"]) == (11, 10)
    broken = call("bisect", "-p", poisoned, *ARGUMENTS, "--cmd", "exit 200")
    assert (broken.status, "--cmd ended with 200 at step 39" in broken.err) == (2, True)
    absent = call("bisect", "-p", poisoned, *ARGUMENTS, "--cmd", "no-such-command-is-here")
    assert (absent.status, "--cmd ended with 127 at step 39" in absent.err) == (2, True)


def test_leaves_that_are_nowhere_are_not_taken_for_finite(call: Call, poisoned: Path) -> None:
    for verb in (("bisect", "--when", "nonfinite(modle.**)"), ("log", "--leaf", "modle.**")):
        found = call(verb[0], "-p", poisoned, *ARGUMENTS, *verb[1:])
        assert (found.status, "no leaf of the version matches modle.**; it has " in found.err) == (2, True)
        assert found.out == ""


@pytest.mark.slow
def test_what_is_asked_wrongly_is_refused(call: Call, poisoned: Path) -> None:
    for wrong in ([], ["--when", "nonfinite(a)", "--cmd", "true"], ["--when", "norm(a)"], ["--when", "nonfinite()"]):
        found = call("bisect", "-p", poisoned, *ARGUMENTS, *wrong)
        assert found.status == 2
        assert "--when" in found.err


def test_how_a_run_stands(call: Call, policy: Path) -> None:
    found = call("status", "-p", policy, *ARGUMENTS, "--json").json
    rows = {row["tier"]: row for row in found["tiers"]}
    assert (rows["nvme"]["step"], rows["nvme"]["behind"], rows["nvme"]["versions"]) == (3, 0, 3)
    assert (rows["store"]["step"], rows["store"]["behind"], rows["store"]["versions"]) == (2, 1, 2)
    text = call("status", "-p", policy, *ARGUMENTS)
    assert text.status == 0
    assert "ago" in text.out
    assert call("status", "-p", policy, "-r", "none").status == 2


def test_a_version_of_a_clock_that_is_ahead_is_no_negative_time_ago() -> None:
    ahead = TierStatus("nvme", 1, 3, time.time() + 7250, 0, 0.0, 0, 0, None, "")
    (line,) = (line for line in status_lines(RunStatus("gpt", [ahead], ()), 200) if "nvme" in line)
    assert "2 h ahead of this clock" in line


def test_a_tier_that_fails_is_told(call: Call, place: Path) -> None:
    path = place / "policy.yaml"
    path.write_text(
        "version: 1\nchunk: 4KiB\narena: {size: 64KiB}\nmetrics: {events: true}\ntiers:\n"
        f"  nvme: {{type: nvme, path: {place}/nvme}}\n  lustre: {{type: lustre, path: {place}/lustre}}\n"
    )
    with ts.Checkpointer(path, "gpt") as ckpt:
        ckpt.save({"w": torch.ones(100)}, 1).wait("lustre")
        (place / "lustre" / "packs").rename(place / "gone")
        (place / "lustre" / "packs").write_text("in the way")
        failed = ckpt.save({"w": torch.zeros(100)}, 2)
        with pytest.raises(ts.TierstateError):
            failed.wait("lustre")
    found = {row["tier"]: row for row in call("status", "-p", path, *ARGUMENTS, "--json").json["tiers"]}
    assert found["lustre"]["trouble"].startswith("step 2 has failed: ")
    assert (found["lustre"]["step"], found["lustre"]["behind"], found["nvme"]["trouble"]) == (1, 1, "")
