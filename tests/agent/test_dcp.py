"""Ranks that save through torch.distributed.checkpoint, by way of an agent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.agents import held, statuses, steps_in, wait_until, without_agent
from support.dcp_jobs import same
from support.processes import Gang

import tierstate as ts
from tierstate.manifest.format.leaf import Leaf

pytestmark = pytest.mark.slow


def policy_of(place: Path) -> Path:
    """A policy whose slow tier gets everything later."""
    path = place / "policy.yaml"
    path.write_text(
        "version: 1\nchunk: 4KiB\narena: {size: 1MiB}\n"
        "agent: {mode: required, idle: 10min, memory: 256MiB}\n"
        f"tiers:\n  nvme: {{type: nvme, path: {place}/nvme}}\n"
        f"  lustre: {{type: lustre, path: {place}/lustre}}\n"
    )
    return path


def test_what_ranks_save_by_an_agent_is_what_they_save_themselves(place: Path) -> None:
    path = policy_of(place)
    with Gang(2, "support.dcp_jobs:rounds", path) as gang:
        gang.wait()
    assert len(statuses()) == 1
    wait_until(lambda: not statuses()[0]["sessions"], "the sessions end")
    whole = torch.load(place / "whole.pt", weights_only=False)
    by_agent = [leaf.name for leaf in leaves(place)]
    assert [name for name in by_agent if "." not in name] == list(whole)  # in the order of the state
    with ts.Checkpointer(without_agent(place, "nvme", "lustre"), "run") as ckpt:
        saved = ckpt.versions()
        assert [(v.step, v.tiers) for v in saved] == [(step, ("nvme", "lustre")) for step in (1, 2, 3)]
        assert [v.parent for v in saved[1:]] == [v.id for v in saved[:-1]]
        assert not ckpt.verify(deep=True).problems
    assert by_agent == names_of_ranks_alone(place / "alone")


def leaves(place: Path) -> list[Leaf]:
    """The leaves of step 1."""
    with ts.Checkpointer(without_agent(place, "nvme"), "run") as ckpt:
        return list(ckpt.leaves(step=1))


def names_of_ranks_alone(place: Path) -> list[str]:
    """The names of the leaves, in their order, that the same ranks save without an agent."""
    place.mkdir()
    path = policy_of(place)
    path.write_text(path.read_text().replace("mode: required", "mode: 'off'"))
    with Gang(2, "support.dcp_jobs:rounds", path) as gang:
        gang.wait()
    return [leaf.name for leaf in leaves(place)]


def test_what_ranks_have_saved_arrives_everywhere_though_all_are_killed(place: Path) -> None:
    path = policy_of(place)
    with (
        held(ts.Policy.load(path), place, "lustre"),
        Gang(2, "support.dcp_jobs:wait_to_be_killed", path, 3) as gang,
    ):
        for rank in range(2):
            gang.hear(rank, "durable")
        for rank in range(2):
            gang.kill(rank)
        gang.codes()
        assert steps_in(place, "lustre") == []
    wait_until(lambda: steps_in(place, "lustre") == [1, 2, 3], "all arrives")
    whole = torch.load(place / "whole.pt", weights_only=False)
    with ts.Checkpointer(without_agent(place, "lustre"), "run") as ckpt:
        assert not ckpt.verify(deep=True).problems
        loaded = ckpt.load(step=3)
        loaded["loader"].pop("rank_1")
        loaded["schedule"]["lambdas"] = whole["schedule"]["lambdas"]  # of which DCP tells nothing
        same(loaded, whole)
