"""Processes that end without `close`, in every way: what was saved is there, and the exit is the script's own."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, tier

import tierstate as ts

pytestmark = pytest.mark.slow

JOB = """
import atexit, os, signal, sys, threading, time
import torch
import tierstate as ts

place, codec, format, ending = sys.argv[1:]
text = f'''
version: 1
chunk: 1MiB
arena: {{size: 64MiB}}
tiers:
  nvme: {{type: nvme, path: "{place}", codec: {codec}, format: {format}}}
'''
ckpt = ts.Checkpointer(ts.Policy.parse(text), "run")
if ending == "atexit":
    atexit.register(ckpt.close)
state = {"a": torch.zeros(1 << 18), "b": torch.zeros(3 << 17)}

def train():
    if ending == "thread":
        threading.main_thread().join()
    for step in range(3):
        for value in state.values():
            value.fill_(step + 1)
        ckpt.save(state, step=step)
    if ending == "thread":
        ckpt.save(state, step=3).wait()
        ckpt.restore(into=state, step=1)
        assert state["b"].eq(2).all()

if ending == "thread":
    threading.Thread(target=train).start()
else:
    train()
if ending == "error":
    raise ValueError("the training failed")
if ending == "signal":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    os.kill(os.getpid(), signal.SIGTERM)
"""

STATUS = {"end": 0, "atexit": 0, "thread": 0, "error": 1, "signal": 3}
CASES = [
    *(("fast", "native", ending) for ending in STATUS),
    *(("raw", "hdf5", ending) for ending in ("end", "signal")),
    *((codec, "native", "end") for codec in ("raw", "small", "auto", "delta")),
    ("raw", "safetensors", "end"),
]
ALL = [
    *((codec, "native", ending) for codec in ("raw", "fast", "small", "auto", "delta") for ending in STATUS),
    *(("raw", format, ending) for format in ("hdf5", "safetensors") for ending in STATUS for _ in range(5)),
]


def end(place: Path, codec: str, format: str, ending: str) -> None:
    """Run a job, and compare what it left with what it saved."""
    job = subprocess.run([sys.executable, "-c", JOB, str(place), codec, format, ending], capture_output=True, text=True)
    assert job.returncode == STATUS[ending], job.stderr
    steps = range(4 if ending == "thread" else 3)
    with ts.Checkpointer(policy({"nvme": tier("nvme", place, path=str(place))}), "run") as ckpt:
        assert [version.step for version in ckpt.versions()] == list(steps)
        for step in steps:
            expected = min(step, 2) + 1
            assert all(torch.equal(value, torch.full_like(value, expected)) for value in ckpt.load(step=step).values())


@pytest.mark.parametrize(("codec", "format", "ending"), CASES)
def test_saves_that_were_under_way_are_finished(place: Path, codec: str, format: str, ending: str) -> None:
    end(place, codec, format, ending)


@pytest.mark.soak
@pytest.mark.parametrize(("codec", "format", "ending"), ALL)
def test_saves_that_were_under_way_are_finished_whatever_their_form(
    place: Path, codec: str, format: str, ending: str
) -> None:
    end(place, codec, format, ending)


@pytest.mark.parametrize(("version", "told"), [("3.12.1", True), ("3.12.3", False), ("3.11.7", False)])
def test_a_python_that_starts_no_thread_at_its_end_is_told_by_name(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, version: str, told: bool
) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        monkeypatch.setattr(platform, "python_version", lambda: version)
        with caplog.at_level(logging.WARNING, "tierstate"):
            ckpt._at_exit()
    assert (f"Python {version} starts no thread while it ends" in caplog.text) == told
