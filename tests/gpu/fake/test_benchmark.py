"""The benchmark of the device path runs to its end, and leaves no row out. Its figures on fake devices mean nothing."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.fake_cuda import fake

from benchmarks.devices import bench, raw, state
from benchmarks.devices.__main__ import arguments, main
from benchmarks.devices.bench import PHASES, TIERS
from benchmarks.devices.raw import DOWN, UP, WITHIN
from benchmarks.devices.state import SHAPES
from tierstate.tiers.memory import block_sums

MIB = 1 << 20

DOCS = Path(__file__).resolve().parents[3] / "docs"

TINY = ["--size", "256KiB", "--rounds", "2", "--step", "0.001", "--width", "32", "--chunk", "64KiB"]

RAW = [DOWN, UP, WITHIN, "raw D2H, tensor by tensor", "raw H2D, tensor by tensor"]
SAVED = ["save to `{}`: captured", "save to `{}`: committed", "restore in place from `{}`"]
WAYS = [way.format(tier) for tier in ("host", "gpu") for way in SAVED] + ["load to the device from `host`"]


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LARGE", 64 << 10)
    monkeypatch.setattr(state, "SMALL", 4000)


@pytest.mark.usefixtures("small_tensors")
def test_a_step_may_replay_a_graph(place: Path) -> None:
    out = place / "devices.json"
    only = ["--graph", "--only", "stalls", "--shapes", "large", "--tiers", "host"]
    assert main([*TINY, *only, "--path", str(place), "--out", str(out)]) == 0
    found = json.loads(out.read_text())["samples"]
    assert len(found) == 4
    assert all(sample["saving"] > 0 for sample in found)


@pytest.mark.slow
def test_what_python_leaves_of_a_bus_is_measured_both_ways() -> None:
    command = [sys.executable, "-m", "benchmarks.bus", "--size", "128MiB", "--rate", "10", "--rounds", "2"]
    said = subprocess.run(command, cwd=DOCS.parent, stdout=subprocess.PIPE, text=True, check=True).stdout
    row = r"[\d.]+ ms, ([\d.]+) of the rate, \d+ µs of processor time for each chunk"
    step = r"step of \d+ ms of Python, beside a lazy save: "
    step += r"-?[\d.]+ ms more, -?\d+ µs for each chunk; the call [\d.]+ ms"
    found = re.fullmatch(rf"save to host: captured: {row}\nrestore in place from host: {row}\n{step}\n", said)
    assert found, said
    # Copies that take no time would be a fake that does not keep it.
    assert all(0 < float(share) <= 1.01 for share in found.groups())


@pytest.mark.usefixtures("small_tensors")
def test_every_row_is_there_and_has_figures(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "devices.json"
    assert main([*TINY, "--path", str(place), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["GPU"].startswith("fake")
    page = capsys.readouterr().out
    assert "nan" not in page
    assert "inf" not in page
    by_phase = {phase: [s for s in found["samples"] if s["phase"] == phase] for phase in PHASES}
    for shape in SHAPES:
        copies = [s for s in by_phase["copies"] if s["peer"] == shape]
        assert {s["way"] for s in copies} == {*RAW, *WAYS, *(f"first {way}" for way in WAYS)}
        assert all(s["seconds"] > 0 and s["size"] > 200_000 for s in copies)
        for way in WAYS:
            assert [s["round"] for s in copies if s["way"] == way] == [1, 2]
            assert page.count(f"| {way} |") == 2
        stalls = [s for s in by_phase["stalls"] if s["peer"] == shape]
        assert {s["way"] for s in stalls} == {f"{how}, `{tier}`" for how in ("lazy", "eager") for tier in TIERS}
        assert len(stalls) == 2 * 2 * 3
        for sample in stalls:
            assert min(sample["quiet"], sample["saving"], sample["call"]) > 0
            assert math.isfinite(sample["stall"])
            assert sample["waited"] == 0 or sample["way"].startswith("lazy")
        assert any(s["waited"] > 0 for s in stalls)
    assert {s["way"] for s in by_phase["pin"]} == {"fault in", "pin", "unpin"}
    assert all(s["seconds"] > 0 for s in by_phase["pin"])
    assert not fake().pinned()


def test_no_more_device_memory_than_three_states(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LARGE", MIB)
    monkeypatch.setattr(raw, "PIECE", MIB)
    # So that a small state is many times the length of what is computed at once.
    monkeypatch.setattr(block_sums, "SUM_PART", MIB // 4)
    monkeypatch.setattr(block_sums, "SUM_GROUP", MIB)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    peaks: list[int] = []

    class Peak(state.Peak):
        def __init__(self) -> None:  # it forgets the peak so far
            peaks.append(torch.cuda.max_memory_allocated())
            super().__init__()

    monkeypatch.setattr(bench, "Peak", Peak)
    command = ["--size", "8MiB", "--chunk", "1MiB", "--rounds", "1", "--only", "copies", "--shapes", "large"]
    assert main([*command, "--path", str(place), "--out", str(place / "devices.json")]) == 0
    peaks.append(torch.cuda.max_memory_allocated())
    assert 24 * MIB <= max(peaks) - before < 28 * MIB


@pytest.mark.parametrize(
    ("size", "free", "why"),
    [("8GiB", 20 << 30, "two copies in a gpu tier; 20 GiB are free"), ("1KiB", 1 << 40, "less than a tensor")],
)
def test_what_does_not_fit_is_told(
    size: str, free: int, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    assert main(["--size", size]) == 1
    assert why in capsys.readouterr().err


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["how-to/first-gpu-run.md", "benchmarks-gpu.md"])
def test_the_commands_of_the_pages_are_understood(page: str) -> None:
    found = re.findall(r"-m benchmarks\.devices ([^`\n]*)", (DOCS / page).read_text())
    assert len(found) > 2
    for command in found:
        assert arguments(shlex.split(command.split(" 2>&1")[0])).size >= 1 << 30


def test_the_page_has_a_place_for_every_row() -> None:
    page = (DOCS / "benchmarks-gpu.md").read_text()
    stalls = [f"{shape} | {how}, `{t}`" for shape in SHAPES for how in ("lazy", "eager") for t in TIERS]
    missing = [row for row in [*RAW, *WAYS, "fault in", "pin", "unpin", *stalls] if f"| {row} |" not in page]
    assert not missing
