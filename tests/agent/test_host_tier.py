"""A `host` tier where there is an agent: its versions are in the agent, and are read from there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.agents import (
    of_hosts,
    pipeline,
    policy,
    policy_text,
    same,
    state_of,
    statuses,
    steps_in,
    wait_until,
    whole,
    whole_on_all_hosts,
)
from support.processes import Gang

import tierstate as ts
from tierstate.agent.memory_tier import HandedMemory
from tierstate.agent.shared_pipeline import decide
from tierstate.tiers.base import layer_of

pytestmark = pytest.mark.slow

RAM = {"RAM": "capacity: 64MiB, keep: {last: 3}"}


def own_bytes(ckpt: ts.Checkpointer) -> int:
    """Bytes of versions in the trainer's own memory."""
    handed = layer_of(ckpt._tier_runs[0].tier, HandedMemory)
    assert handed is not None
    return handed.inner.used  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_what_a_tier_of_the_process_keeps_is_read_from_the_agent(place: Path, kind: str) -> None:
    text = policy_text(place, ram="capacity: 64MiB, keep: {last: 4}", every="100").replace("host", kind)
    with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")
        for step in range(2, 7):
            ckpt.save(state_of(step), step=step).wait("ram")
        assert own_bytes(ckpt) == 0
        assert [info.step for info in ckpt.versions() if "ram" in info.tiers] == [3, 4, 5, 6]
        for step in (3, 4, 5, 6):  # the agent's memory has the last two
            assert same(ckpt.load(step=step), state_of(step))
            assert ckpt.restored is not None
            assert ckpt.restored.tiers[-1] == "ram"
        assert not ckpt.verify(deep=True).problems


def test_a_version_that_was_changed_in_memory_is_read_from_the_next_tier(place: Path) -> None:
    with ts.Checkpointer(policy(place, ram="keep: {last: 4}"), "run") as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(state_of(step), step=step).wait("slow")
        slabs = ckpt._arena.shared
        assert slabs is not None
        memory = bytearray(os.pread(slabs.descriptor, os.fstat(slabs.descriptor).st_size, 0))
        at = memory.index(state_of(1)["w"].numpy().tobytes()[:64])
        os.pwrite(slabs.descriptor, b"something else", at)
        assert ckpt.verify(deep=True).problems
        assert same(ckpt.load(step=1), state_of(1))
        assert ckpt.restored is not None
        assert ckpt.restored.tiers == ("ram", "fast", "slow")
        assert not ckpt.verify(deep=True).problems, "it was repaired in the agent"


def test_a_sealed_host_tier(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_KEY", "ab" * 32)
    text = policy_text(place, ram="keep: {last: 4}", every="100")
    sealed = text.replace("version: 1\n", "version: 1\nseal: {key: '${CHECKPOINT_KEY}'}\n")
    with ts.Checkpointer(ts.Policy.parse(sealed), "run") as ckpt:
        for step in range(1, 6):
            ckpt.save(state_of(step), step=step).wait("ram")
        assert same(ckpt.load(step=2), state_of(2))
        assert ckpt.restored is not None
        assert ckpt.restored.tiers == ("ram",)


def test_what_was_saved_before_the_agent_came_stays_until_it_has_something_newer(place: Path) -> None:
    agent = "mode: auto, idle: 10min, memory: 64MiB"
    with ts.Checkpointer(policy(place, ram="keep: {last: 4}", every="100", agent=agent), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step=step).wait("ram")
            assert pipeline(ckpt).agent is None
        assert own_bytes(ckpt)
        wait_until(pipeline(ckpt)._agent_start.has_started, "the agent listens")
        pipeline(ckpt)._look_for_agent()
        assert pipeline(ckpt).agent is not None
        assert same(ckpt.load(), state_of(2))
        ckpt.save(state_of(3), step=3).wait("ram")
        assert same(ckpt.load(), state_of(3))
        assert own_bytes(ckpt) == 0
        os.kill(statuses()[0]["pid"], signal.SIGKILL)
        wait_until(lambda: pipeline(ckpt).agent is None, "the loss is noticed")
        ckpt.save(state_of(4), step=4).wait("ram")
        assert own_bytes(ckpt)
        assert same(ckpt.load(step=4), state_of(4))


def test_the_agent_of_a_trainer_with_a_host_tier_dies_at_any_moment(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstate.agent.handing.TRY_AGAIN", 0.0)
    chance, ending = random.Random(5), threading.Event()

    def kill() -> None:
        while not ending.wait(chance.random()):
            for agent in statuses():
                os.kill(agent["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    with ts.Checkpointer(policy(place, ram="keep: {last: 2}"), "run") as ckpt:
        killer.start()
        try:
            for step in range(1, 11):
                saved = ckpt.save(state_of(step), step=step)
                saved.wait("slow", timeout=60)
                with suppress(ts.TierstateError):  # its memory may be gone, and in no other tier before it
                    saved.wait("ram", timeout=60)
                assert same(ckpt.load(), state_of(step))
                time.sleep(chance.random() * 0.3)
        finally:
            ending.set()
            killer.join()
    assert steps_in(place, "fast") == steps_in(place, "slow") == list(range(1, 11))


def test_ranks_go_back_to_what_their_host_tier_has_in_the_agent(place: Path) -> None:
    with Gang(2, "support.agent_ranks:go_back", place, 6, 4, env=RAM | {"EVERY": "100"}) as gang:
        said = [text.splitlines() for text in gang.wait()]
    for lines in said:
        assert "restored 4 ram" in lines
        assert "in ram 4 5 6" in lines
        assert any(line.startswith("again 7 by ") and not line.endswith("None") for line in lines)
    wait_until(lambda: not statuses()[0]["sessions"], "the sessions end")
    whole(place, "fast", [1])


def test_a_host_tier_of_ranks_stays_within_its_capacity(place: Path) -> None:
    """A rank's part of a version has 0.4 MB here at first, and 0.2 MB later, as something never changes."""
    env = {"RAM": "capacity: 1MiB, keep: {last: 9}"}
    with Gang(2, "support.agent_ranks:too_long_for_ram", place, 8, env=env) as gang:
        said = [text.split() for text in gang.wait()]
    for words in said:
        assert 200_000 < int(words[words.index("most") + 1]) <= 1 << 20
        assert int(words[-1]) > 0
        assert "TierFull" in words or "RankFailed" in words
    wait_until(lambda: not statuses()[0]["sessions"], "the sessions end")
    whole(place, "slow", list(range(1, 9)))


def test_what_ranks_with_a_host_tier_have_captured_arrives_though_all_are_killed(place: Path) -> None:
    with Gang(2, "support.agent_ranks:wait_to_be_killed", place, 3, "5MiB/s", env=RAM) as gang:
        for rank in range(2):
            gang.hear(rank, "captured")
        for rank in range(2):
            gang.kill(rank)
        gang.codes()
    with Gang(3, "support.agent_ranks:restore", place, "5MiB/s", env=RAM) as gang:
        assert all(text.splitlines()[-1].startswith("restored 3 (agent)") for text in gang.wait())
    wait_until(lambda: steps_in(place, "slow") == [1, 2, 3], "all arrives")
    whole(place, "fast", [1, 2, 3])
    whole(place, "slow", [1, 2, 3])


@pytest.mark.parametrize("victim", [0, 1])
def test_what_all_had_captured_arrives_though_one_is_killed(place: Path, victim: int) -> None:
    with Gang(2, "support.agent_ranks:one_is_killed", place, victim, env=RAM) as gang:
        gang.hear(1 - victim, "captured")
        gang.codes()
    wait_until(lambda: steps_in(place, "slow") == [1], "it arrives")
    whole(place, "slow", [1])


def test_ranks_with_a_host_tier_and_their_agent_are_killed_at_once(place: Path) -> None:
    with Gang(2, "support.agent_ranks:wait_with_slow_tiers", place, 3, "2MiB/s", env=RAM) as gang:
        for rank in range(2):
            gang.hear(rank, "captured")
        pid = int(statuses()[0]["pid"])
        for rank in range(2):
            gang.kill(rank)
        os.kill(pid, signal.SIGKILL)
        gang.codes()
    wait_until(lambda: steps_in(place, "slow") == [1, 2, 3], "all arrives")
    whole(place, "fast", [1, 2, 3])
    whole(place, "slow", [1, 2, 3])


def test_ranks_with_a_host_tier_go_on_without_an_agent_that_was_killed(place: Path) -> None:
    with Gang(2, "support.agent_ranks:agents_die", place, 5, 0.3, env=RAM) as gang:
        os.kill(int(gang.hear(0, "ready")), signal.SIGKILL)
        (place / "killed").touch()
        said = gang.wait()
    assert all("by None" in text for text in said)
    whole(place, "fast", [1, 2, 3, 4, 5])
    whole(place, "slow", [1, 2, 3, 4, 5])


@pytest.mark.soak
def test_ranks_with_a_host_tier_find_agents_again(place: Path) -> None:
    with Gang(2, "support.agent_ranks:agents_come_back", place, 1, env=RAM) as gang:
        os.kill(int(gang.hear(0, "agent-1")), signal.SIGKILL)
        last = int(gang.wait()[0].split()[-1])
    wait_until(lambda: not statuses()[0]["sessions"], "the session ends")
    whole(place, "slow", list(range(1, last + 1)))


def test_ranks_of_two_hosts_with_host_tiers_are_committed_though_all_are_killed(place: Path) -> None:
    hosts = of_hosts("a", "b", "b")
    with Gang(3, "support.agent_ranks:wait_to_be_killed", place, 3, "", env=RAM, per_rank=hosts) as gang:
        for rank in range(3):
            gang.hear(rank, "captured")
        for rank in range(3):
            gang.kill(rank)
        gang.codes()
    wait_until(lambda: not any(agent["sessions"] for agent in statuses()), "the sessions end")
    whole_on_all_hosts(place, [1, 2, 3])


def test_after_a_loss_nothing_is_copied_to_a_faster_tier() -> None:
    """What a slower tier has is published to a host tier from the slabs, if all ranks have theirs, or not at all."""
    leaders = {"ram": [0, 1], "fast": [0], "slow": [0]}

    def outcome(*ram: str) -> Any:
        every = [{"latest": 1, "saves": {"1": {"ram": state, "fast": "done", "slow": "gone"}}} for state in ram]
        return decide(every, leaders, ["fast", "slow"])[1]

    assert outcome("open", "open") == {"ram": "redo", "fast": "committed", "slow": "copy"}
    assert outcome("open", "gone") == {"ram": "failed", "fast": "committed", "slow": "copy"}
    assert outcome("open", "done") == {"ram": "committed", "fast": "committed", "slow": "copy"}
