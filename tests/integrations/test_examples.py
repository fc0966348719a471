"""The examples of frameworks: killed, run again, and the same losses as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


SETTINGS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
OTHERS = ("{", "[", "DeepSpeed ")
"""How lines begin that are of the Trainer, and of DeepSpeed's log."""


def run_example(name: str, output: Path, *more: str) -> list[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = ranks if name in ("train_deepspeed.py", "train_dcp.py") else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), "--output", str(output), "--steps", "12", *more]
    env = os.environ | SETTINGS
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    return [line for line in done.stdout.splitlines() if not line.startswith(OTHERS)]


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["transformers", "accelerate", "deepspeed", "dcp", "torch_checkpointing"])
def test_an_example_goes_on_after_a_kill(framework: str, tmp_path: Path) -> None:
    pytest.importorskip({"dcp": "torch.distributed.checkpoint"}.get(framework, framework))
    name = f"train_{framework}.py"
    whole = run_example(name, tmp_path / "whole")
    assert whole[-1] == "trained to step 12"
    killed = run_example(name, tmp_path / "job", "--kill", "11")
    assert killed == whole[:11]
    resumed = run_example(name, tmp_path / "job")
    assert resumed[-1] == whole[-1]
    assert set(resumed[1:]) <= set(whole)


@pytest.mark.soak
def test_ray_goes_on_after_its_worker_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    lines = run_example("train_ray.py", tmp_path / "job", "--kill", "11")
    begins = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("begins")]
    assert (begins[0], len(begins), lines[-1]) == (0, 2, "trained to step 12")
    losses = [line for line in lines if line[0].isdigit()]
    assert len(losses) == 11 + 12 - begins[1]
    assert len(set(losses)) == 12  # a step that was made twice had the same loss


@pytest.mark.soak
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_gets_a_reference_that_can_be_read(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker)
    command = [sys.executable, str(EXAMPLES / "log_versions.py"), "--tracker", tracker, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("step "))
    with fsspec.open(f"{line.rpartition(' ')[2]}/version.json") as file:
        assert json.load(file)["step"] == int(line.split()[1])
