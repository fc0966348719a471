"""Saves by way of an agent: real processes, killed at any moment."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch
from support.agents import (
    PATIENCE,
    agent_logs,
    held,
    load,
    pipeline,
    policy,
    policy_text,
    same,
    state_of,
    statuses,
    steps_in,
    trainers,
    wait_until,
    without_agent,
)

import tierstate as ts
from tierstate.agent import handover
from tierstate.agent.handing import BackgroundStart
from tierstate.agent.handover import HandOver
from tierstate.agent.messages import ConnectionLost
from tierstate.agent.pipeline import AgentPipeline
from tierstate.cli import app
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.manifest.errors import PolicyError, WrongTier

pytestmark = pytest.mark.slow


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


def test_memory_that_is_short_of_one_more_version_keeps_the_newest_of_those_before(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: required, idle: 10min, memory: 6MiB"), "run") as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save({"w": state_of(step, 2.0)["w"]}, step=step).wait("slow")
            memory = pipeline(ckpt).memory
            assert memory is not None
            memory.look_again()
            assert len(memory.log.seqs()) == min(step, 2)
        assert torch.equal(ckpt.load()["w"], state_of(4, 2.0)["w"])


def test_memory_that_is_full_of_what_no_tier_has_drops_the_oldest(place: Path) -> None:
    """All persistent tiers are away: what is in memory is nowhere else."""
    text = policy_text(place, agent="mode: required, idle: 10min, memory: 9MiB")
    text = text.replace("type: nvme,", "type: nvme, initialized: true,")
    file = place / "policy.yaml"
    file.write_text(f"on_failure: {{action: warn, unprotected: 1h}}\n{text}")
    app(["init", "--policy", str(file)], standalone_mode=False)
    ckpt = ts.Checkpointer(file, "run")

    def in_memory() -> list[int]:
        memory = pipeline(ckpt).memory
        assert memory is not None
        memory.look_again()
        return [memory.record(seq).version.head.step for seq in memory.log.seqs()]

    for name in ("fast", "slow"):
        (place / name).rename(place / f"{name}-away")
    for step in range(1, 8):
        ckpt.save({"w": state_of(step, 2.0)["w"]}, step=step)
        wait_until(lambda step=step: in_memory() == list(range(max(1, step - 3), step + 1)), "it is in memory")  # type: ignore[misc]
    with pytest.raises(WrongTier):
        ckpt.close()


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


def check_all_arrive(place: Path, kills: int, seed: int) -> None:
    assert trainers("killed", place, 1, kills, seed)[-1:] == ["killed"]
    steps = list(range(1, kills + 1))
    wait_until(lambda: steps_in(place, "slow") == steps, "all that was captured arrives")
    with ts.Checkpointer(without_agent(place, "slow"), "run") as ckpt:
        assert all(same(ckpt.load(step=step), state_of(step)) for step in steps)


def test_whatever_was_captured_arrives_though_the_trainer_is_killed(place: Path) -> None:
    check_all_arrive(place, 50, 1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills(place: Path) -> None:
    for part in range(20):
        (place / str(part)).mkdir()
        check_all_arrive(place / str(part), 50, part)


@pytest.mark.parametrize("memory", ["256MiB", "64KiB"])
def test_a_new_trainer_drops_nothing_that_what_a_killed_one_saved_still_needs(place: Path, memory: str) -> None:
    """The first one's versions reach the fast tier while the second one saves, which keeps its newest version only."""
    rest = ("2MiB/s", "kill", "1MiB/s", "last: 1", memory)
    for first in (1, 5, 9):
        assert trainers("captured", place, 4, *rest, first) == []
    steps = list(range(1, 13))
    wait_until(lambda: steps_in(place, "slow") == steps, "all that was captured arrives")
    assert all(same(load(place, "slow", step), state_of(step)) for step in steps)
    assert "cannot be brought" not in agent_logs()  # nothing was copied twice
    assert trainers("captured", place, 1, *rest, 13) == []
    wait_until(lambda: steps_in(place, "fast") == [13], "the fast tier keeps one version")


def test_a_trainer_killed_within_a_capture_leaves_nothing(place: Path) -> None:
    assert trainers("within_capture", place) == []
    wait_until(lambda: not statuses()[0]["sessions"], "the session ends")
    assert steps_in(place, "fast") == steps_in(place, "slow") == [1]
    with ts.Checkpointer(policy(place), "run") as ckpt:
        assert same(ckpt.load(), state_of(1))


def test_a_new_process_restores_from_memory_what_no_tier_has_yet(place: Path) -> None:
    assert trainers("killed", place, 7, 1, 1)[-1:] == ["killed"]
    with ts.Checkpointer(policy(place, slow="10MiB/s"), "run") as ckpt:
        wait_until(lambda: same(ckpt.load(), state_of(7)), "it is in memory")
        assert ckpt.restored is not None
        assert ckpt.restored.tiers[0] == "(agent)"


def test_the_end_of_a_trainer_is_noticed_though_its_child_has_the_socket(place: Path) -> None:
    child = int(trainers("with_child", place)[-1].split()[1])
    try:
        wait_until(lambda: not statuses()[0]["sessions"], "the session ends")
        assert steps_in(place, "slow") == [1]
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_reads_does_not_speak_to_the_agent_for_its_parent(place: Path) -> None:
    assert trainers("with_reading_child", place)[-1:] == ["read"]


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


def test_an_agent_that_wakes_up_again_touches_nothing_of_the_trainer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "SILENCE", 2.0)
    monkeypatch.setattr("tierstate.agent.handing.TRY_AGAIN", 1000.0)
    # So slow that slabs are in use when the agent wakes up.
    with ts.Checkpointer(policy(place, fast="2MiB/s", slow="8MiB/s"), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")
        agent = statuses()[0]["pid"]
        begun = ckpt.save(state_of(2), step=2)  # the agent is in the middle of publishing it
        os.kill(agent, signal.SIGSTOP)
        begun.wait("slow", timeout=60)
        wait_until(lambda: pipeline(ckpt).agent is None, "the loss is noticed")  # on a slow host it was done already
        saves = [ckpt.save(state_of(step), step=step) for step in (3, 4, 5)]
        os.kill(agent, signal.SIGCONT)
        saves += [ckpt.save(state_of(step), step=step) for step in range(6, 12)]
        for save in saves:
            save.wait("slow", timeout=60)
        wait_until(lambda: not statuses()[0]["sessions"], "the agent notices that it was left")
        saves += [ckpt.save(state_of(step), step=step) for step in range(12, 15)]
    for tier in ("fast", "slow"):
        assert steps_in(place, tier) == list(range(1, 15))
        assert all(same(load(place, tier, step), state_of(step)) for step in range(1, 15))


def test_an_agent_that_cannot_take_a_message_touches_nothing_of_the_trainer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the session, though the trainer lives and has not left: that publishes what is in its slabs."""
    monkeypatch.setattr("tierstate.agent.handing.TRY_AGAIN", 1000.0)
    with ts.Checkpointer(policy(place, fast="2MiB/s"), "run") as ckpt:
        saves = [ckpt.save(state_of(step), step=step) for step in (1, 2, 3)]
        link = pipeline(ckpt)._link
        assert link is not None
        link.send({"kind": "of another version"})
        wait_until(lambda: pipeline(ckpt).agent is None, "the loss is noticed")
        saves += [ckpt.save(state_of(step), step=step) for step in range(4, 8)]
        for save in saves:
            save.wait("slow", timeout=60)
    for tier in ("fast", "slow"):
        assert steps_in(place, tier) == list(range(1, 8))
        assert all(same(load(place, tier, step), state_of(step)) for step in range(1, 8))


def test_what_a_lost_agent_commits_in_its_last_moment_is_no_failure(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has looked for it just before, and then publishes the same version itself."""
    spec, look, held_back = policy(place), AgentPipeline._find_committed, ExitStack()

    def look_too_early(self: AgentPipeline, handover: HandOver) -> None:
        look(self, handover)
        held_back.close()
        wait_until(lambda: steps_in(place, "fast") == [1], "the agent commits")

    monkeypatch.setattr(AgentPipeline, "_find_committed", look_too_early)
    with held_back:
        held_back.enter_context(held(spec, place, "fast/versions"))
        with ts.Checkpointer(spec, "run") as ckpt:
            save = ckpt.save(state_of(1), step=1)
            wait_until(lambda: list((place / "fast" / "versions").rglob(".tmp*")), "the agent is about to commit")
            link = pipeline(ckpt)._link
            assert link is not None
            link._link.shut()
            save.wait("slow", timeout=60)
    for tier in ("fast", "slow"):
        assert steps_in(place, tier) == [1]
        assert same(load(place, tier, 1), state_of(1))
    assert len(list((place / "fast" / "packs" / "run").iterdir())) == 1


def test_the_agent_dies_at_any_moment_of_any_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstate.agent.handing.TRY_AGAIN", 0.0)
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


def test_an_agent_that_ends_before_it_is_used_has_a_successor(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that is stopped by hand when a trainer has just seen it."""
    ensure, ended = AgentPipeline._ensure_agent, list[int]()

    def ensure_and_end(self: AgentPipeline) -> None:
        ensure(self)
        if len(ended) < 2:
            ended.append(statuses()[0]["pid"])
            os.kill(ended[-1], signal.SIGKILL)
            wait_until(lambda: not statuses(), "it has ended")

    monkeypatch.setattr(AgentPipeline, "_ensure_agent", ensure_and_end)
    with ts.Checkpointer(policy(place), "run") as ckpt:
        assert pipeline(ckpt).agent not in {None, *ended}
        ckpt.save(state_of(1), step=1).wait("slow")
    assert len(ended) == 2


def test_a_new_agent_is_used_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstate.agent.handing.TRY_AGAIN", 0.0)
    with ts.Checkpointer(policy(place), "run") as ckpt:
        os.kill(statuses()[0]["pid"], signal.SIGKILL)
        wait_until(lambda: pipeline(ckpt).agent is None, "the loss is noticed")
        end = time.monotonic() + PATIENCE
        for step in count(1):
            ckpt.save(state_of(step), step=step).wait("slow")
            if pipeline(ckpt).agent is not None:
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        ckpt.save(state_of(step + 1), step=step + 1).wait("slow")
    assert steps_in(place, "slow") == list(range(1, step + 2))


@pytest.mark.parametrize("busy", ["_look_back", "retire"])
def test_a_save_does_not_wait_for_a_slow_tier_so_that_an_agent_can_be_used(
    place: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    """The threads of this process end before an agent takes over: not while one looks a slow tier through."""
    every = "10" if busy == "_look_back" else "1"
    with ts.Checkpointer(policy(place, agent="mode: 'off'", every=every), "run") as ckpt:
        ckpt.save(state_of(10), step=10).wait("slow")
    looks, go_on, usual = list[int](), threading.Event(), getattr(TierQueue, busy)

    def wait(queue: TierQueue, **more: bool) -> None:
        if queue.tier_run.name == "slow":
            go_on.wait(PATIENCE)
        usual(queue, **more)

    def connect(_: AgentPipeline) -> None:
        looks.append(1)
        raise ConnectionLost("not there yet")

    monkeypatch.setattr(TierQueue, busy, wait)
    monkeypatch.setattr(AgentPipeline, "_connect", connect)
    monkeypatch.setattr(BackgroundStart, "begin", lambda _: None)
    monkeypatch.setattr(BackgroundStart, "has_started", lambda _: True)
    spec = policy(place, agent="mode: auto, idle: 10min", every=every)
    with ts.Checkpointer(spec, "run") as ckpt, ExitStack() as end:
        end.callback(go_on.set)
        save = ckpt.save(state_of(11), step=11)
        for name in save.tiers:
            save.wait(name)
        looks.clear()
        ckpt.save(state_of(12), step=12)
        assert not looks
        go_on.set()
        wait_until(lambda: pipeline(ckpt)._is_quiet(), "nothing is under way")
        ckpt.save(state_of(13), step=13)
        assert looks


def test_a_policy_with_an_agent_begins_without_one(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: auto, idle: 10min, memory: 64MiB"), "run") as ckpt:
        ckpt.save(state_of(1), step=1).wait("slow")  # the agent is not there yet
        wait_until(statuses, "the agent is started")
        wait_until(pipeline(ckpt)._agent_start.has_started, "it listens")
        for step in (2, 3):
            ckpt.save(state_of(step), step=step).wait("slow")
        assert pipeline(ckpt).agent is not None
    assert steps_in(place, "slow") == [1, 2, 3]


def test_a_state_longer_than_its_memory_is_published_all_the_same(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: required, memory: 1MiB, idle: 10min"), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step, mib=8), step=step).wait("slow")  # twice the arena, too
        assert same(ckpt.load(), state_of(2, mib=8))


def test_a_memory_with_room_for_one_version_has_the_newest(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: required, memory: 5MiB, idle: 10min"), "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step, mib=3), step=step).wait("slow")
            assert same(ckpt.load(), state_of(step, mib=3))
            assert ckpt.restored is not None
            assert ckpt.restored.tiers[0] == "(agent)"


def test_slabs_are_let_go_though_no_persistent_tier_gets_the_save(place: Path) -> None:
    text = (
        "version: 1\nchunk: 64KiB\narena: {size: 4MiB}\nagent: {mode: required, idle: 10min, memory: 8MiB}\n"
        "tiers:\n  ram: {type: host, keep: {last: 1}}\n"
        f'  disk: {{type: nvme, path: "{place}/disk", every: 100000}}\n'
    )
    over = threading.Event()
    busy = [threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(over.is_set, True)]) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
            for step in range(20):
                ckpt.save(state_of(step), step=step).wait("ram")
            wait_until(lambda: statuses()[0]["sessions"][0]["held"] < 8 << 20, "the slabs are let go")
    finally:
        over.set()


def test_close_waits_until_what_a_lost_agent_had_is_taken_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = AgentPipeline._find_committed

    def slow(self: AgentPipeline, handed: handover.HandOver) -> None:
        time.sleep(0.3)  # as a tier that answers slowly
        found(self, handed)

    monkeypatch.setattr(AgentPipeline, "_find_committed", slow)
    ckpt = ts.Checkpointer(policy(place, slow="1MiB/s"), "run")
    for step in (1, 2, 3):
        ckpt.save(state_of(step, mib=0.5), step=step)
    agent = statuses()[0]["pid"]
    killer = threading.Timer(0.3, os.kill, (agent, signal.SIGKILL))
    killer.start()
    ckpt.close()
    killer.join()
    assert steps_in(place, "slow") == [1, 2, 3]


def test_each_save_is_taken_back_with_its_own_leaves(place: Path) -> None:
    with ts.Checkpointer(policy(place, slow="1MiB/s"), "run") as ckpt:
        states = [state_of(step) | {f"more{step}": torch.full((step * 1000,), float(step))} for step in (1, 2, 3)]
        agent = statuses()[0]["pid"]
        os.kill(agent, signal.SIGSTOP)
        saves: list[ts.Save] = []

        def save() -> None:
            saves.extend(ckpt.save(state, step=step) for step, state in enumerate(states, 1))

        thread = threading.Thread(target=save)
        thread.start()
        time.sleep(1)
        os.kill(agent, signal.SIGKILL)
        thread.join()
        for one in saves:
            one.wait("slow", timeout=60)
    for step, state in enumerate(states, 1):
        found = load(place, "slow", step)
        assert same(found, state_of(step))
        assert torch.equal(found[f"more{step}"], state[f"more{step}"])


def test_two_trainers_of_one_policy_share_an_agent(place: Path) -> None:
    with ts.Checkpointer(policy(place), "one") as one, ts.Checkpointer(policy(place), "two") as two:
        for step in (1, 2):
            one.save(state_of(step), step=step)
            two.save(state_of(step + 10), step=step)
        assert [len(agent["sessions"]) for agent in statuses()] == [2]
    assert same(load(place, "slow", 2, "one"), state_of(2))
    assert same(load(place, "slow", 2, "two"), state_of(12))


def test_a_closed_trainer_leaves_the_rest_to_the_agent_if_time_is_over(place: Path) -> None:
    with held(policy(place), place, "fast", "slow"):
        ckpt = ts.Checkpointer(policy(place), "run")
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step=step)
        ckpt.close(timeout=0.1)
        assert steps_in(place, "fast") == steps_in(place, "slow") == []
    wait_until(lambda: steps_in(place, "slow") == [1, 2, 3], "the agent goes on")
    assert all(same(load(place, "slow", step), state_of(step)) for step in (1, 2, 3))


def test_a_checkpointer_that_could_not_be_made_leaves_the_agent(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the agent had a trainer that never saves, as long as the process lives."""

    def fail(*_: object) -> None:
        raise PolicyError("not now")

    monkeypatch.setattr("tierstate.checkpointer.Telemetry", fail)
    with pytest.raises(PolicyError, match="not now"):
        ts.Checkpointer(policy(place), "run")
    wait_until(lambda: not statuses()[0]["sessions"], "the session ends")


def test_an_idle_agent_ends(place: Path) -> None:
    with ts.Checkpointer(policy(place, agent="mode: required, memory: 64MiB, idle: 1s"), "run") as ckpt:
        ckpt.save(state_of(1), step=1)
        pid = statuses()[0]["pid"]
    wait_until(lambda: not statuses(), "it ends by itself, although it is looked at again and again")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "its process ends")


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


def test_a_start_that_fails_in_any_way_is_not_tried_again_at_each_save() -> None:
    tries: list[None] = []

    def start() -> None:
        tries.append(None)
        raise OSError(errno.EMFILE, "no file can be opened")

    agent_start = BackgroundStart(start)
    for _ in range(3):
        assert not agent_start.has_started()
        agent_start._thread.join()
    assert len(tries) == 1
