"""The guides' code runs as it stands: each block is the file that its first line names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_blocks import GUIDES, ROOT, blocks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", GUIDES)
def test_the_code_of_a_guide_runs(name: str, tmp_path: Path) -> None:
    guide = GUIDES[name]
    for block in blocks(ROOT / "docs" / "how-to" / name):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    assert all((tmp_path / file).exists() for file in guide.files)

    # All in one process: most of the time is torch's import.
    each = "".join(f"\n\ndef test_{file[:-3]}():\n    runpy.run_path({file!r})\n" for file in guide.scripts)
    (tmp_path / "test_scripts.py").write_text(f"import runpy\n{each}")
    options = ["-q", "-p", "no:cacheprovider", "test_scripts.py", *guide.tests]
    command = [sys.executable, "-W", "error", "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
