"""Another process of this Python imports modules from where this one does, and from nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tierstate.tiers.interpreter import same_modules, same_python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("first", "where"), [([""], "here"), (["other"], "other"), ([], None)])
def test_modules_of_the_working_directory_are_found_where_this_process_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[str], where: str | None
) -> None:
    for name in ("here", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "queue.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    rest = [entry for entry in sys.path if entry]
    added = [name and str(tmp_path / name) for name in first]
    monkeypatch.setattr(sys, "path", [*added, *rest, tmp_path])  # a `Path` there is ignored by Python, too
    command = same_python("-c", "import queue, sys; print(queue.__file__, *sys.path, sep='\\n')")
    told = subprocess.run(command, env=same_modules(), capture_output=True, text=True, check=True).stdout.splitlines()
    assert Path(told[0]).parent == (Path(subprocess.__file__).parent if where is None else tmp_path / where)
    assert [entry for entry in told[1:] if entry in rest] == list(dict.fromkeys(rest))
