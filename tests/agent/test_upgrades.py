"""Agents and trainers of different versions of tierstate on one host: what becomes of an agent after an upgrade."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest
from support.agents import pipeline, policy, state_of, statuses, steps_in, trainers

import tierstate as ts
from tierstate.agent.messages import PROTOCOL

pytestmark = pytest.mark.slow


def test_an_agent_of_another_version_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")
    old = statuses()[0]["pid"]
    monkeypatch.setattr("tierstate.agent.launch.agent_version", lambda: "0.0/1")
    with ts.Checkpointer(policy(place, agent="mode: auto, memory: 64MiB, idle: 10min"), "run") as ckpt:
        ckpt.save(state_of(2), step=2).wait("slow")
        assert pipeline(ckpt).agent != old
    assert steps_in(place, "slow") == [1, 2]


def installed(site: Path, version: str) -> None:
    """Install this version in a folder, over the one that is there; the code stays the same."""
    for before in site.glob("*.dist-info"):
        shutil.rmtree(before)
    about = site / f"tierstate-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tierstate\nVersion: {version}\n")
    points = importlib.metadata.distribution("tierstate").read_text("entry_points.txt")
    assert points is not None
    (about / "entry_points.txt").write_text(points)


def test_an_agent_from_before_an_upgrade_in_place_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the code of the version before, whatever is installed by now."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place / "site"), os.environ.get("PYTHONPATH", "")]))
    pids, versions = [], ["1.0", "2.0", "2.0"]
    for step, version in enumerate(versions, 1):
        installed(place / "site", version)
        said = trainers("served", place, step)
        _, pid, found = said[-1].split()
        assert found == f"{version}/{PROTOCOL}", said
        pids.append(pid)
    assert pids[0] != pids[1] == pids[2]
    assert steps_in(place, "slow") == [1, 2, 3]


def test_a_trainer_from_before_an_upgrade_does_not_replace_the_new_agent(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")
    agent = statuses()[0]["pid"]
    with monkeypatch.context() as patch:
        patch.setattr("tierstate.agent.launch.agent_version", lambda: "0.0/1")
        patch.setattr("tierstate.agent.version._running", "0.0")
        with pytest.raises(ts.TierUnavailable, match=r"this process runs tierstate 0\.0, and .* is installed by now"):
            ts.Checkpointer(policy(place), "run")
        with ts.Checkpointer(policy(place, agent="mode: auto, idle: 10min, memory: 256MiB"), "run") as ckpt:
            ckpt.save(state_of(2), step=2).wait("slow")
            assert pipeline(ckpt).agent is None
    assert [one["pid"] for one in statuses()] == [agent]
