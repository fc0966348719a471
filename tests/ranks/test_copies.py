"""Copies that several ranks write of one thing, of which one is kept: the others are built on by nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from support.checkpointer_worlds import policy, tier
from support.thread_ranks import as_ranks

import tierstate as ts
from tierstate.engine.ranks.team import Team


def test_no_version_builds_on_a_copy_that_was_swept(place: Path) -> None:
    """Both ranks write the value, that of rank 0 is kept; later rank 1 alone has it, and writes it again."""
    spec = policy({"nvme": tier("nvme", place)})
    swept = threading.Barrier(2, timeout=30)

    def rank(team: Team) -> list[str]:
        told = []
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for step in range(4):
                value = {"value": "x" * 3000} if step == 0 or team.rank else {}
                try:
                    ckpt.save({"w": torch.ones(9), **value}, step=step).wait()
                    told.append("")
                except ts.TierstateError as error:
                    told.append(type(error).__name__)
                swept.wait()
                if step == 0 and team.rank:
                    with ts.Checkpointer(spec, "run") as other:
                        other.prune(grace=0)
                swept.wait()
        return told

    found = as_ranks([0, 0], rank)
    assert found == [[""] * 4] * 2
    with ts.Checkpointer(spec, "run") as alone:
        assert alone.verify(deep=True).ok
        for v in alone.versions():
            assert alone.load(step=v.step)["value"] == "x" * 3000
