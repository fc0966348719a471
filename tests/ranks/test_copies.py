"""Copies that several ranks write of one thing, of which one is kept: the others are built on by nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.thread_ranks import as_ranks

import tierstate as ts
from tierstate.engine.publish.publish import CascadeJob
from tierstate.engine.ranks.team.team import Team
from tierstate.engine.store.catalog import Source


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


def test_a_copy_has_all_tiers_as_its_sources(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 remembers its part as it gave it to `b`; what of it was kept is cut out of the whole record of `a`."""
    spec = policy({"a": tier("host", place), "b": tier("nvme", place), "c": tier("lustre", place)})
    found, sources = CascadeJob._found, dict[int, list[str]]()

    def noted(self: CascadeJob, coming: bool) -> list[Source]:
        records = found(self, coming)
        sources[self._tier_run.rank] = [tier_run.name for tier_run, _ in records]
        assert len({record.version.digests.tobytes() for _, record in records}) == 1
        return records

    monkeypatch.setattr(CascadeJob, "_found", noted)

    def rank(team: Team) -> None:
        with ts.Checkpointer(spec, "run", team) as ckpt:
            ckpt.save({"w": torch.ones(9), "value": "x" * 3000}, step=0).wait("c")

    assert as_ranks([0, 0], rank) == [None, None]
    assert sources == {0: ["a", "b"], 1: ["a", "b"]}
    with ts.Checkpointer(spec, "run") as alone:
        assert alone.verify(deep=True).ok
