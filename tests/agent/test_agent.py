"""Saves by way of an agent: real processes, killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agents import (
    load,
    policy,
    same,
    state_of,
    statuses,
    steps_in,
    wait_until,
    without_agent,
)

import tierstate as ts
from tierstate.agent import handover
from tierstate.agent.pipeline import AgentPipeline

pytestmark = pytest.mark.slow


def pipeline(ckpt: ts.Checkpointer) -> AgentPipeline:
    found = ckpt._pipeline
    assert isinstance(found, AgentPipeline)
    return found


def in_child(call: Callable[[], None]) -> int:
    """Run this in a forked process, which is ended by `os._exit`; its number."""
    if (pid := os.fork()) == 0:
        try:
            call()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


def test_saves_reach_every_tier_and_come_back_from_memory(place: Path) -> None:
    with ts.Checkpointer(policy(place), "run") as ckpt:
        assert pipeline(ckpt).agent == statuses()[0]["pid"] != os.getpid()
        for step in (1, 2, 3):
            save = ckpt.save(state_of(step), step=step)
            assert save.version
        save.wait("slow")
        assert same(ckpt.load(), state_of(3))
        assert ckpt.restored is not None
        assert ckpt.restored.tiers == ("(agent)", "fast", "slow")
        assert ckpt.stats().tiers["slow"].saves == 3
    for tier in ("fast", "slow"):
        assert steps_in(place, tier) == [1, 2, 3]
        assert all(same(load(place, tier, step), state_of(step)) for step in (1, 2, 3))


def test_what_has_not_changed_is_neither_copied_nor_written_again(place: Path) -> None:
    state = state_of(1)
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ckpt.save(state, step=1).wait("slow")
        before = ckpt.stats().tiers["fast"].stored
        ckpt.save(state, step=2).wait("slow")
        state["w"][0] += 1
        ckpt.save(state, step=3).wait("slow")
        stored = ckpt.stats().tiers["fast"].stored - before
        assert stored < 200_000  # one chunk, and what is short
    assert same(load(place, "slow", 3), state)


def killed_after_capture(place: Path, step: int, delay: float, run: str) -> None:
    """A trainer that saves and is killed by SIGKILL so many seconds after its save was captured."""
    told, tell = os.pipe()

    def train() -> None:
        ckpt = ts.Checkpointer(policy(place, slow="10MiB/s"), run)
        ckpt.save(state_of(step), step=step)
        os.write(tell, b"captured")
        time.sleep(100)

    pid = in_child(train)
    os.close(tell)
    assert os.read(told, 8) == b"captured"
    os.close(told)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def check_all_arrive(place: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    for step in range(1, kills + 1):
        killed_after_capture(place, step, chance.choice([0.0, chance.random() * 0.05, chance.random() * 0.5]), "run")
    wait_until(lambda: steps_in(place, "slow") == list(range(1, kills + 1)), "all that was captured arrives")
    for step in range(1, kills + 1):
        assert same(load(place, "slow", step), state_of(step))


def test_whatever_was_captured_arrives_though_the_trainer_is_killed(place: Path) -> None:
    check_all_arrive(place, 50, 1)


@pytest.mark.soak
def test_a_thousand_kills(place: Path) -> None:
    for part in range(20):
        check_all_arrive(place / str(part), 50, part)


def test_a_trainer_killed_within_a_capture_leaves_nothing(place: Path) -> None:
    told, tell = os.pipe()

    class Slow:
        """A value that takes long to read."""

        def __array__(self) -> Any: ...

    def train() -> None:
        ckpt = ts.Checkpointer(policy(place), "run")
        ckpt.save(state_of(1), step=1).wait("slow")
        capture = handover.HandOver.feed

        def feed(self: handover.HandOver, item: Any) -> None:
            capture(self, item)
            os.write(tell, b"x")
            time.sleep(100)

        handover.HandOver.feed = feed  # type: ignore[method-assign]
        ckpt.save(state_of(2), step=2)

    pid = in_child(train)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    os.close(told)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: not statuses()[0]["sessions"], "the session ends")
    assert steps_in(place, "fast") == steps_in(place, "slow") == [1]
    with ts.Checkpointer(policy(place), "run") as ckpt:
        assert same(ckpt.load(), state_of(1))


def test_a_new_process_restores_from_memory_what_no_tier_has_yet(place: Path) -> None:
    killed_after_capture(place, 7, 0.0, "run")
    with ts.Checkpointer(policy(place, slow="10MiB/s"), "run") as ckpt:
        wait_until(lambda: same(ckpt.load(), state_of(7)), "it is in memory")
        assert ckpt.restored is not None
        assert ckpt.restored.tiers[0] == "(agent)"


def test_the_end_of_a_trainer_is_noticed_though_its_child_has_the_socket(place: Path) -> None:
    told, tell = os.pipe()

    def train() -> None:
        ckpt = ts.Checkpointer(policy(place), "run")
        ckpt.save(state_of(1), step=1)
        child = in_child(lambda: time.sleep(60))  # as a worker of a data loader
        os.write(tell, child.to_bytes(8, "little"))
        time.sleep(100)

    pid = in_child(train)
    os.close(tell)
    child = int.from_bytes(os.read(told, 8), "little")
    os.close(told)
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: not statuses()[0]["sessions"], "the session ends")
        assert steps_in(place, "slow") == [1]
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_without_the_agent_the_same_saves_are_published_here(
    place: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "SILENCE", 2.0)
    with ts.Checkpointer(policy(place, slow="3MiB/s"), "run") as ckpt:
        first = ckpt.save(state_of(1), step=1)
        first.wait("fast")
        agent = statuses()[0]["pid"]
        os.kill(agent, number)
        saves = [ckpt.save(state_of(step), step=step) for step in (2, 3)]
        for save in (first, *saves):
            save.wait("slow", timeout=60)
        assert pipeline(ckpt).agent is None
        assert same(ckpt.load(), state_of(3))
        if number == signal.SIGSTOP:
            os.kill(agent, signal.SIGKILL)
    assert steps_in(place, "fast") == steps_in(place, "slow") == [1, 2, 3]
    assert all(same(load(place, "slow", step), state_of(step)) for step in (1, 2, 3))


def test_the_agent_dies_at_any_moment_of_any_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstate.agent.pipeline.TRY_AGAIN", 0.0)
    chance, steps = random.Random(3), 12
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ending = threading.Event()

        def kill() -> None:
            while not ending.wait(chance.random()):
                for agent in statuses():
                    os.kill(agent["pid"], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            for step in range(1, steps + 1):
                ckpt.save(state_of(step), step=step).wait("slow", timeout=60)
                time.sleep(chance.random() * 0.3)
        finally:
            ending.set()
            killer.join()
    assert steps_in(place, "slow") == list(range(1, steps + 1))
    assert all(same(load(place, "slow", step), state_of(step)) for step in range(1, steps + 1))


def test_a_new_agent_is_used_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstate.agent.pipeline.TRY_AGAIN", 0.0)
    with ts.Checkpointer(policy(place), "run") as ckpt:
        os.kill(statuses()[0]["pid"], signal.SIGKILL)
        wait_until(lambda: pipeline(ckpt).agent is None, "the loss is noticed")
        for step in range(1, 100):
            ckpt.save(state_of(step), step=step).wait("slow")
            if pipeline(ckpt).agent is not None:
                break
        assert pipeline(ckpt).agent is not None
        ckpt.save(state_of(step + 1), step=step + 1).wait("slow")
    assert steps_in(place, "slow") == list(range(1, step + 2))


def test_a_policy_with_an_agent_begins_without_one(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: auto, idle: 60s, memory: 64MiB"), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")  # the agent is not there yet
        wait_until(statuses, "the agent is started")
        wait_until(lambda: pipeline(ckpt)._starting is None or not pipeline(ckpt)._starting.is_alive(), "it listens")
        for step in (2, 3):
            ckpt.save(state_of(step), step=step).wait("slow")
        assert pipeline(ckpt).agent is not None
    assert steps_in(place, "slow") == [1, 2, 3]


def test_a_state_longer_than_its_memory_is_published_all_the_same(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: required, memory: 1MiB, idle: 60s"), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step, mib=8), step=step).wait("slow")  # twice the arena, too
        assert same(ckpt.load(), state_of(2, mib=8))


def test_two_trainers_of_one_policy_share_an_agent(place: Path) -> None:
    with ts.Checkpointer(policy(place), "one") as one, ts.Checkpointer(policy(place), "two") as two:
        for step in (1, 2):
            one.save(state_of(step), step=step)
            two.save(state_of(step + 10), step=step)
        assert [len(agent["sessions"]) for agent in statuses()] == [2]
    assert same(load(place, "slow", 2, "one"), state_of(2))
    assert same(load(place, "slow", 2, "two"), state_of(12))


def test_a_closed_trainer_leaves_the_rest_to_the_agent_if_time_is_over(place: Path) -> None:
    ckpt = ts.Checkpointer(policy(place, slow="2MiB/s"), "run")
    for step in (1, 2, 3):
        ckpt.save(state_of(step), step=step)
    start = time.monotonic()
    ckpt.close(timeout=0.1)
    assert time.monotonic() - start < 2
    wait_until(lambda: steps_in(place, "slow") == [1, 2, 3], "the agent goes on")


def test_an_agent_of_another_version_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")
    old = statuses()[0]["pid"]
    monkeypatch.setattr("tierstate.agent.launch.agent_version", lambda: "0.0/1")
    with ts.Checkpointer(policy(place, agent="mode: auto, memory: 64MiB, idle: 60s"), "run") as ckpt:
        ckpt.save(state_of(2), step=2).wait("slow")
        assert pipeline(ckpt).agent != old
    assert steps_in(place, "slow") == [1, 2]


def test_an_idle_agent_ends(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: required, memory: 64MiB, idle: 1s"), "run") as ckpt:
        ckpt.save(state_of(1), step=1)
        pid = statuses()[0]["pid"]
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it ends by itself")
    assert not statuses()


def test_lazy_capture_by_an_agent(place: Path) -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ckpt.guard(optimizer)
        saved = []
        for step in range(1, 6):
            model(torch.randn(8, 256)).sum().backward()
            save = ckpt.save({"model": model, "optimizer": optimizer}, step=step)
            saved.append({k: v.clone() for k, v in model.state_dict().items()})
            optimizer.step()
            optimizer.zero_grad()
        save.wait("slow")
    with ts.Checkpointer(without_agent(place, "slow"), "run") as ckpt:
        for step, expected in enumerate(saved, 1):
            found = ckpt.load(step=step)["model"]
            assert all(torch.equal(found[k], v) for k, v in expected.items())
