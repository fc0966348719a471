"""The demo, with fewer steps: what the README shows first works, and tells a difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"

FEWER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import demo
demo.STEPS, demo.KILL_FROM = 60, 35
demo.start.__defaults__ = (demo.STEPS,)
sys.exit(demo.main())
"""


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    environment = {**os.environ, "TIERSTATE_DEMO": str(tmp_path / "demo")}
    command = [sys.executable, "-c", FEWER, str(DEMO.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bit for bit the same") == 2
    assert "Every later loss is the uninterrupted run's, to the last bit." in done.stdout
