"""The example's training on a device: saved lazily, killed by SIGKILL and resumed, it goes on bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import fake_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = (12, 1) if fake_cuda.is_installed() else (200, 5)
"""A real device is so fast that its saves after each step come faster than a disk takes them."""

TRAIN = """
import os, runpy, sys
sys.path[:0] = [sys.argv[2], sys.argv[3]]
if sys.argv[1] == "fake":
    from support import fake_cuda
    fake_cuda.install()
del sys.argv[1:4]
sys.argv[0] = "examples/train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(place: Path) -> subprocess.Popen[bytes]:
    """A training that saves often."""
    place.mkdir(exist_ok=True)
    kind = "fake" if fake_cuda.is_installed() else "real"
    command = [sys.executable, "-c", TRAIN, kind, str(ROOT / "examples"), str(ROOT / "tests")]
    command += ["--device", "cuda", "--lazy", "--steps", str(STEPS), "--every", str(EVERY), "--log", str(place / "log")]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TIERSTATE_DEMO": str(place)})


def losses(place: Path) -> list[tuple[int, str]]:
    """Step and loss of every step that was logged."""
    lines = (place / "log").read_text().splitlines() if (place / "log").exists() else []
    return [(row["step"], row["loss"]) for row in (json.loads(line) for line in lines if line.endswith("}"))]


def test_a_lazily_saved_training_on_a_device_is_killed_and_goes_on_bit_for_bit(place: Path) -> None:
    assert start(place / "whole").wait(300) == 0
    truth = dict(losses(place / "whole"))
    killed = start(place / "killed")
    records = place / "killed" / "nvme" / "versions" / "gpt"
    while len(list(records.glob("[!.]*"))) < 2 and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    before = losses(place / "killed")
    assert start(place / "killed").wait(300) == 0
    after = losses(place / "killed")[len(before) :]
    assert 1 < after[0][0] <= before[-1][0] + 1, "it began anew"
    assert [step for step, _ in after] == list(range(after[0][0], STEPS + 1))
    assert all(truth[step] == loss for step, loss in before + after)
