"""Commands, and runs to look at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.cli_calls import Answer, Call, state

import tierstate as ts
from tierstate.cli import main

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 64KiB}}
tiers:
  nvme: {{type: nvme, path: {place}/nvme}}
  store: {{type: object, url: "file://{place}/object", every: 2}}
rules:
  - {{match: "trust", pickle: true}}
"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process, by the entry point itself."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tierstate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return Answer(code, out, err)

    return run


@pytest.fixture
def policy(place: Path) -> Path:
    """A policy file, and two runs: ``gpt`` with steps 1, 2, 3, of which 1 and 2 are in both tiers, and ``other``."""
    path = place / "policy.yaml"
    path.write_text(POLICY.format(place=place))
    with ts.Checkpointer(path, "gpt") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step), step=step, metadata={"loss": 1.0 / step})
    with ts.Checkpointer(path, "other") as ckpt:
        ckpt.save({}, step=0)
    return path
