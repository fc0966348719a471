"""Ranks as processes that save together: what they leave behind, and what becomes of those that lose another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.global_arrays import read
from support.processes import Gang

import tierstate as ts
from tierstate.tiers.registry import open_tier

pytestmark = pytest.mark.slow


def test_ranks_save_what_a_single_process_finds(place: Path) -> None:
    with Gang(2, "support.saving_jobs:save", place) as gang:
        gang.wait()
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        versions = ckpt.versions()
        assert [(v.step, v.tiers) for v in versions] == [(step, ("nvme", "lustre")) for step in range(5)]
        # All ranks number alike: from the clock when they began, and by one from then on.
        assert [v.seq - versions[0].seq for v in versions] == [0, 1, 2, 3, 4]
        assert not ckpt.verify(deep=True).problems
        state = ckpt.load()
    trained = torch.load(place / "model-0.pt")
    assert all(torch.equal(state["model"][name], value) for name, value in trained.items())
    for kind in ("nvme", "lustre"):
        keys = tier(kind, place)
        record, found = read([open_tier(kind, keys.pop("type"), keys)], "run", versions[-1].seq)
        assert record.version.head.world == 2
        assert set(record.version.shard_rank.tolist()) == {0, 1}
        assert all(np.all(found[f"own.{rank}"] == rank + 4.0) for rank in range(2))


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_rank_that_dies_fails_the_save_of_the_others(place: Path, victim: int) -> None:
    with Gang(2, "support.saving_jobs:die", place, victim) as gang:
        for rank in range(2):
            gang.hear(rank, "saved")
        gang.kill(victim)
        gang.processes[victim].wait()
        (place / "killed").touch()
        told = gang.hear(1 - victim, "told")
        assert told.split()[0] in (("RankFailed",) if victim == 1 else ("RankFailed", "CommitUnknown"))
        assert gang.codes()[1 - victim] == 0, gang.said(1 - victim)
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [0]
        assert not ckpt.verify(deep=True).problems
