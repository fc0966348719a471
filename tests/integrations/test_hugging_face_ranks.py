"""Two ranks under torchrun: data parallel by the Trainer and by accelerate, and sharded by FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["trainer", "trainer-fsdp2", pytest.param("accelerate", marks=pytest.mark.soak), "fsdp2"]
)
def test_two_ranks_go_on_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command += ["-m", "support.hugging_face_ranks", kind, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.count("as without interruption") == 2, done.stdout + done.stderr
