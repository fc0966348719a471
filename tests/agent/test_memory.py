"""What an agent keeps in memory, as a tier of a trainer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.agents import pair, policy, same, state_of

import tierstate as ts
from tierstate.agent.memory_tier import AgentMemory, HandedMemory, serve_memory
from tierstate.agent.messages import ConnectionLost, MessageSocket
from tierstate.agent.store import VersionsInMemory
from tierstate.manifest import errors
from tierstate.manifest.chunk import as_buffer, empty_buffer
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.host import Host
from tierstate.tiers.testing import TierContract


@contextmanager
def agent_memory() -> Iterator[AgentMemory]:
    """Reads and writes the memory of an agent, which is empty."""
    memory, threads = VersionsInMemory(64 << 20, 1 << 16), []

    def connect() -> MessageSocket:
        here, there = pair()

        def serve() -> None:
            try:
                serve_memory(memory.tier, memory.slabs, there)
            except ConnectionLost:
                there.close()

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return here

    tier = AgentMemory(connect)
    yield tier
    tier.close()
    for thread in threads:
        thread.join(10)


class TestMemory(TierContract):
    """What an agent keeps, read and written over sockets, is a tier as any other."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with agent_memory() as tier:
            yield tier


class TestHandedMemory(TierContract):
    """A trainer's host tier is a tier as any other, wherever its objects are."""

    @pytest.fixture(params=["without an agent", "with one"])
    def tier(self, request: pytest.FixtureRequest) -> Iterator[Tier]:
        with agent_memory() as agent:
            tier = HandedMemory(Host())
            tier.agent = agent if request.param == "with one" else None
            yield tier
            tier.close()


def test_an_agent_that_refuses_to_be_read_is_away() -> None:
    """So that a restore goes on with the next tier: one of another version may listen by now."""

    def connect() -> MessageSocket:
        raise errors.TierstateError("this agent is of tierstate 2")

    with closing(AgentMemory(connect)) as tier:
        tier.name = "(agent)"
        with pytest.raises(errors.TierUnavailable, match=r"^\(agent\): this agent is of tierstate 2"):
            tier.read("a/b", [Range(0, empty_buffer(1))])


def test_what_a_trainer_has_itself_is_read_until_the_agent_has_something_newer() -> None:
    with agent_memory() as agent:
        tier, data = HandedMemory(Host()), as_buffer(b"data")
        tier.superseded()  # nothing without an agent
        tier.put("a/own", data)
        tier.superseded()
        tier.agent = agent
        tier.put("a/agents", data)
        assert list(tier.list("a/")) == ["a/agents", "a/own"]
        assert list(tier.inner.list("")) == ["a/own"]
        assert list(agent.list("")) == ["a/agents"]
        with pytest.raises(errors.AlreadyExists):
            tier.put("a/own", data)
        assert bytes(tier.get("a/own").numpy()) == bytes(tier.get("a/agents").numpy()) == b"data"
        tier.superseded()
        assert list(tier.list("")) == ["a/agents"]
        tier.discard(["a/agents"])
        assert list(agent.list("")) == []
        tier.agent = None
        assert list(tier.list("")) == []
        tier.close()


@pytest.mark.slow
def test_sealed_versions_in_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_KEY", "ab" * 32)
    text = policy(place).dump().replace("version: 1\n", "version: 1\nseal: {key: '${CHECKPOINT_KEY}'}\n")
    with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step=step).wait("slow")
        assert same(ckpt.load(), state_of(2))
        assert ckpt.restored is not None
        assert ckpt.restored.tiers[0] == "(agent)"
