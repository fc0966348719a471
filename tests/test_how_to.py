"""The guides' code runs as it stands: each block is the file that its first line names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

GUIDES = Path(__file__).resolve().parents[1] / "docs" / "how-to"


def blocks(guide: str) -> dict[str, str]:
    """Code by file name."""
    found = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL)
    return dict(found)


@pytest.mark.parametrize(
    ("guide", "scripts", "tests"),
    [
        ("write-a-tier.md", ["train.py", "histories.py"], ["test_attic.py", "streaming.py", "test_race.py"]),
        ("write-a-provider.md", ["counter.py", "train.py"], ["test_replay.py"]),
        ("save-from-many-ranks.md", ["mesh.py", "stages.py", "fsdp1.py", "own.py"], []),
        ("read-a-version-as-files.md", ["train.py", "evaluate.py", "local.py"], []),
        ("resume-exactly.md", ["renamed.py"], ["test_resume.py"]),
        ("use-with-torch-dcp.md", ["train.py", "later.py"], []),
    ],
)
def test_the_code_of_a_guide_runs(guide: str, scripts: list[str], tests: list[str], tmp_path: Path) -> None:
    code = blocks(guide)
    assert code.keys() >= {*scripts, *tests}
    assert len(code) == len(re.findall("```python", (GUIDES / guide).read_text())), "a block names no file"
    for name, text in code.items():
        (tmp_path / name).write_text(text)

    # All in one process: most of the time is torch's import.
    each = "".join(f"\n\ndef test_{name[:-3]}():\n    runpy.run_path({name!r})\n" for name in scripts)
    (tmp_path / "test_scripts.py").write_text(f"import runpy\n{each}")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_scripts.py", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
