"""Removals of a whole run, killed with SIGKILL before each of their changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_a_removal_that_is_killed_leaves_the_newest_versions_and_goes_on(step: int) -> None:
    script = Path(__file__).resolve().parent / "removed.py"
    done = subprocess.run([sys.executable, script, str(step)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
