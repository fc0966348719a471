"""Commands, and runs to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_calls import call, state

import tierstate as ts

__all__ = ["call"]

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
