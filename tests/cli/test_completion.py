"""The shell completes names from the tiers: in bash, zsh and fish themselves, soon, and never with what would harm."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forked import command

import tierstate as ts
from tierstate.cli import completion

MAIN = "from tierstate.cli import main; main()"


def line(policy: object, run: str = "gpt") -> Any:
    """What a command line has said so far."""
    return SimpleNamespace(params={"policy": policy, "run": run})


def test_names_come_from_the_tiers(policy: Path) -> None:
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.tag("best", 2)
        newest = ckpt.versions()[-1].id
    assert completion.run_names(line(policy), "") == ["gpt", "other"]
    assert completion.run_names(line(policy), "o") == ["other"]
    assert completion.tier_names(line(policy), "") == ["nvme", "store"]
    assert completion.steps(line(policy), "") == ["3", "2", "1"]
    assert completion.ids(line(policy), newest[:6]) == [newest]
    assert completion.tags(line(policy), "") == ["best"]


def test_where_there_is_nothing_to_offer_nothing_is_said(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIERSTATE_POLICY", raising=False)
    for wrong in (None, policy.parent / "none.yaml", policy.parent):
        for names in (completion.run_names, completion.tier_names, completion.steps, completion.ids, completion.tags):
            assert names(line(wrong), "") == []
    assert completion.steps(line(policy, "none"), "") == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["$(touch gone)", "a b", "a;b", "`x`", "a\x1b[2J", "--force", "a\nb", "'", "~", "*"])
def test_what_a_shell_would_obey_is_not_offered(name: str, monkeypatch: pytest.MonkeyPatch, policy: Path) -> None:
    monkeypatch.setattr(completion, "runs_of", lambda *_: {name: ["nvme"], "gpt": ["nvme"]})
    assert completion.run_names(line(policy), "") == ["gpt"]


def test_a_tier_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, policy: Path) -> None:
    answers = threading.Event()
    monkeypatch.setattr(completion, "LIMIT", 0.05)
    monkeypatch.setattr(completion, "runs_of", lambda *_: answers.wait(60))
    start = time.monotonic()
    assert completion.run_names(line(policy), "") == []
    assert time.monotonic() - start < 30
    answers.set()


SHELLS = {
    "bash": (
        'eval "$(_TIERSTATE_COMPLETE=source_bash tierstate)"\n'
        "COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        '_tierstate_completion tierstate; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ),
    "zsh": (
        'compdef() {{ :; }}; _arguments() {{ print -r -- "$@"; }}; eval "$(_TIERSTATE_COMPLETE=source_zsh tierstate)"\n'
        "words=({line}); CURRENT=$#words; _tierstate_completion"
    ),
    "fish": "_TIERSTATE_COMPLETE=source_fish tierstate | source\ncomplete --do-complete {quoted}",
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_completes(shell: str, policy: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "tierstate"  # the installed one would import torch at each question
    program.write_text(f'#!/bin/sh\nexec {shlex.join([*command("-c"), MAIN])} "$@"\n')
    program.chmod(0o755)
    options = [] if shell == "fish" else ["--norc"] if shell == "bash" else ["-f"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for words, expected, other in (
        (f"tierstate copy -p {policy} -r gpt --to s", "store", "nvme"),
        (f"tierstate show -p {policy} -r o", "other", "gpt"),
        ("tierstate doc", "doctor", "verify"),
    ):
        script = SHELLS[shell].format(line=words, quoted=shlex.quote(words))
        done = subprocess.run([shell, *options, "-c", script], env=env, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        assert expected in done.stdout
        assert other not in done.stdout.replace(str(policy), "")
