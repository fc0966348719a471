"""The examples of frameworks: killed, run again, and the same losses as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


SETTINGS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
OTHERS = ("{", "[", "DeepSpeed ")
"""How lines begin that are of the Trainer, and of DeepSpeed's log."""


def run_example(name: str, output: Path, *more: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if "deepspeed" in name else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), "--output", str(output), "--steps", "12", *more]
    env = os.environ | SETTINGS
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    return [line for line in done.stdout.splitlines() if not line.startswith(OTHERS)]


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["transformers", "accelerate", "deepspeed", "torch_checkpointing"])
def test_an_example_goes_on_after_a_kill(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    name = f"train_{framework}.py"
    whole = run_example(name, tmp_path / "whole")
    assert whole[-1] == "trained to step 12"
    killed = run_example(name, tmp_path / "job", "--kill", "11")
    assert killed == whole[:11]
    resumed = run_example(name, tmp_path / "job")
    assert resumed[-1] == whole[-1]
    assert set(resumed[1:]) <= set(whole)
