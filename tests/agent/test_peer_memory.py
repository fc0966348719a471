"""Peer memory where there are agents: each host's keeper is a part of its agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.agents import statuses, wait_until
from support.processes import Gang

from tierstate.agent.launch import agents_of_user, ask_agent
from tierstate.tiers.peer.tier import Peer

pytestmark = pytest.mark.slow

HOSTS = [{"TIERSTATE_HOST": name, "PEER": "10min", "TIERSTATE_ADDRESS": "127.0.0.1"} for name in ("a", "b")]


@pytest.fixture
def memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of two hosts' memories, which are freed after the test."""
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")
    yield place
    for name in ("a", "b"):
        with closing(opened(place, name)) as tier:
            tier.stop()


def opened(place: Path, name: str) -> Peer:
    tier = Peer(path=place / name)
    tier.name = "fast"
    return tier


def keepers(place: Path, name: str = "a") -> list[dict[str, Any]]:
    """What the keepers of all hosts say, as one host reaches them."""
    with closing(opened(place, name)) as tier:
        said = [one for _, one in tier.members()]
    assert all(isinstance(one, dict) for one in said), said
    return [dict(one) for one in said if isinstance(one, dict)]


def agent_pids() -> set[int]:
    return {agent["pid"] for agent in statuses()}


def steps_of(place: Path, name: str) -> int:
    """The number of versions of the run in the memory of a host and its peers."""
    with closing(opened(place, name)) as tier:
        return sum(1 for key in tier.list("versions/") if "/run/" in key)


def test_the_keepers_are_the_agents_and_survive_them_as_processes(memory: Path) -> None:
    with Gang(2, "support.agent_ranks:wait_to_be_killed", memory, 2, "", per_rank=HOSTS) as gang:
        for rank in range(2):
            gang.hear(rank, "captured")
        wait_until(lambda: steps_of(memory, "a") == 2, "both versions come")
        assert {one["pid"] for one in keepers(memory)} == agent_pids()
        assert len(agent_pids()) == 2
        assert [len(agent["peer"]) for agent in statuses()] == [1, 1]
        for rank in range(2):
            gang.kill(rank)
        gang.codes()
    wait_until(lambda: not any(agent["sessions"] for agent in statuses()), "the sessions end")
    agents = agent_pids()
    for path in agents_of_user():
        ask_agent(path, "stop")
    wait_until(lambda: not agent_pids(), "the agents end")
    said = keepers(memory)
    assert not agents & {one["pid"] for one in said}
    assert not any(one["in_agent"] for one in said)
    # A new job finds all of it, and new agents take the keepers over again.
    with Gang(2, "support.agent_ranks:restore", memory, "", per_rank=HOSTS) as gang:
        assert [text.splitlines()[-1].split()[:2] for text in gang.wait()] == [["restored", "2"]] * 2
    wait_until(lambda: {one["pid"] for one in keepers(memory)} == agent_pids(), "the agents take the keepers over")


def test_a_keeper_comes_back_when_its_agent_was_killed(memory: Path) -> None:
    with Gang(2, "support.agent_ranks:agents_die", memory, 8, 1.0, per_rank=HOSTS) as gang:
        pid = int(gang.hear(0, "ready"))
        gang.hear(1, "ready")
        wait_until(lambda: steps_of(memory, "b") >= 1, "the first version comes")
        os.kill(pid, signal.SIGKILL)
        (memory / "killed").touch()
        said = gang.wait()
    assert all("by None" in text for text in said)
    wait_until(lambda: len(keepers(memory)) == 2, "both hosts have a keeper")
    assert pid not in {one["pid"] for one in keepers(memory)}
    assert steps_of(memory, "a") == steps_of(memory, "b") == 8


def test_a_rank_that_is_slow_to_say_that_its_agent_is_lost_fails_no_save(memory: Path) -> None:
    """The other's agent finds the lost one's keeper gone at once, and writes to peer memory in vain."""
    with Gang(2, "support.agent_ranks:one_announces_late", memory, 5, 1, per_rank=HOSTS) as gang:
        pids = [int(gang.hear(rank, "ready")) for rank in range(2)]
        wait_until(lambda: steps_of(memory, "b") >= 1, "the first version comes")
        os.kill(pids[1], signal.SIGKILL)
        (memory / "killed").touch()
        wait_until(lambda: "the agent is lost" in gang.said(0), "the other rank hears of it from its agent")
        (memory / "heard").touch()
        gang.wait()
    assert steps_of(memory, "a") == steps_of(memory, "b") == 5


@pytest.mark.soak
def test_new_agents_take_the_keepers_over(memory: Path) -> None:
    with Gang(2, "support.agent_ranks:agents_come_back", memory, 2, per_rank=HOSTS) as gang:
        for number in (1, 2):
            pids = [int(gang.hear(rank, f"agent-{number}")) for rank in range(2)]
            assert {one["pid"] for one in keepers(memory)} == set(pids)
            os.kill(pids[number - 1], signal.SIGKILL)
        pids = [int(gang.hear(rank, "agent-3")) for rank in range(2)]
        last = int(gang.wait()[0].split()[-1])
    assert {one["pid"] for one in keepers(memory)} == agent_pids() == set(pids)
    assert steps_of(memory, "a") == steps_of(memory, "b") == last


def test_an_agent_stays_as_long_as_it_serves_peer_memory(memory: Path) -> None:
    hosts = [host | {"PEER": "12s", "IDLE": "8s"} for host in HOSTS]
    with Gang(2, "support.agent_ranks:save", memory, 1, 2, per_rank=hosts) as gang:
        gang.wait()
    said = statuses()
    if (memory / "a").exists() and (memory / "b").exists():  # a busy machine may look too late
        assert len(said) == 2
        assert all(agent["peer"] for agent in said)
    wait_until(lambda: not (memory / "a").exists() and not (memory / "b").exists(), "the memory is freed")
    wait_until(lambda: not statuses(), "the agents end after it")
    assert list(memory.iterdir()) == [memory / "all"]
