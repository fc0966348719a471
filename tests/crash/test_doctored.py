"""Repairs of the doctor, killed with SIGKILL before each of their changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def kill_each(seed: int, step: int) -> None:
    script = Path(__file__).resolve().parent / "doctored.py"
    done = subprocess.run([sys.executable, script, str(seed), str(step)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout


@pytest.mark.parametrize("seed", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_a_repair_that_is_killed_loses_nothing_and_ends_the_same(seed: int) -> None:
    kill_each(seed, 5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_repair_that_is_killed_at_any_change(seed: int) -> None:
    kill_each(seed, 1)
