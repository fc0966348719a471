"""`watch`: the status of a run again and again, in place on a terminal and line by line elsewhere, until Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from support.forked import command

from tierstate.engine.progress import byte_progress

pytestmark = pytest.mark.slow

MAIN = "from tierstate.cli import main; main()"


def watching(policy: Path, *more: str, stdout: int = subprocess.PIPE, run: str = "gpt") -> subprocess.Popen[str]:
    words = [*command("-c"), MAIN, "watch", "-p", str(policy), "-r", run, "--interval", "0.1s", *more]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    return subprocess.Popen(words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert (process.returncode, errors) == (0, "")


def test_json_has_a_status_in_each_line(policy: Path) -> None:
    process = watching(policy, "--json")
    assert process.stdout is not None
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    assert first["time"] < second["time"]
    assert [tier["step"] for tier in second["tiers"]] == [3, 2]
    end(process)


def test_a_pipe_gets_one_status_after_the_other(policy: Path) -> None:
    process = watching(policy)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(8)]
    assert sum(line.startswith("tier ") for line in lines) == 2
    end(process)


def test_a_run_that_is_not_there_is_waited_for(policy: Path) -> None:
    process = watching(policy, "--json", run="later")
    assert process.stdout is not None
    assert "'later' has no version" in json.loads(process.stdout.readline())["error"]
    end(process)


def test_a_copy_shows_its_rate_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with byte_progress("copying", total=lambda: 4 << 20) as progress:
        progress(1 << 20)
    shown = written.getvalue()
    assert "copying" in shown
    assert "1.0/4.0 MiB" in shown
    assert "-:--:--" in shown or "0:00" in shown


def test_a_terminal_is_drawn_in_place(policy: Path) -> None:
    terminal, other = pty.openpty()
    process = watching(policy, stdout=other)
    os.close(other)
    shown = b""
    while shown.count(b"Ctrl-C ends") < 2:
        shown += os.read(terminal, 4096)
    end(process)
    os.close(terminal)
    assert b"newest step" in shown
    assert b"\x1b[1A" in shown, "the cursor goes up, and the next status covers this one"
