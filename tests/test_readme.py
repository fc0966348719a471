"""The README's examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port

pytestmark = pytest.mark.slow

README = Path(__file__).resolve().parents[1] / "README.md"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""What torchrun tells the only rank of a job."""


def run(tmp_path, number, check, most):
    """Run the README's example of this number, and then a line that checks what came of it."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= most
    script = tmp_path / "example.py"
    script.write_text(f"{code}\n{check}\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        env=os.environ | ALONE | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints").is_dir()


def test_the_first_example_runs_and_is_short(tmp_path):
    run(tmp_path, 0, "assert state['step'] == 3", 15)


def test_the_example_of_many_ranks_runs(tmp_path):
    run(tmp_path, 1, "assert ckpt.restored.step == 1", 16)
