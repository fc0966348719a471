"""Trainers with an agent that are killed: run by `processes.py`, in a process without threads, which forks them.

Each function prints a line when its trainers have done what the test waits for.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.agents import policy, same, state_of, statuses

import tierstate as ts
from tierstate.agent import handover


def fork(call: Callable[[], None]) -> int:
    """Run this in a child that ends with it; the child's process number."""
    if (pid := os.fork()) == 0:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def killed(place: str, first: str, count: str, seed: str, slow: str = "10MiB/s") -> None:
    """Trainers that each save one step, and are killed by SIGKILL some time after the save was captured."""
    chance = random.Random(int(seed))
    for step in range(int(first), int(first) + int(count)):
        told, tell = os.pipe()

        def train(step: int = step, tell: int = tell) -> None:
            ckpt = ts.Checkpointer(policy(Path(place), slow=slow), "run")
            ckpt.save(state_of(step), step=step)
            os.write(tell, b"captured")
            time.sleep(100)

        pid = fork(train)
        os.close(tell)
        assert os.read(told, 8) == b"captured"
        os.close(told)
        time.sleep(chance.choice([0.0, chance.random() * 0.05, chance.random() * 0.5]))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print("killed", flush=True)


def captured(
    place: str,
    steps: str,
    fast: str,
    end: str,
    slow: str = "",
    keep: str = "",
    memory: str = "256MiB",
    first: str = "1",
) -> None:
    """A trainer that captures some steps faster than tiers take them.

    Args:
        end: ``close`` or ``kill``: what it does then; else it waits.
    """
    agent = f"mode: required, idle: 10min, memory: {memory}"
    ckpt = ts.Checkpointer(policy(Path(place), fast=fast, slow=slow, keep=keep, agent=agent), "run")
    for step in range(int(first), int(first) + int(steps)):
        ckpt.save(state_of(step), step=step)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "close":
        ckpt.close(timeout=0.1)
    print("captured", os.getpid(), flush=True)
    time.sleep(300)


def within_capture(place: str) -> None:
    """A trainer that saves step 1, and kills itself when a part of step 2 is handed over."""
    ckpt = ts.Checkpointer(policy(Path(place)), "run")
    ckpt.save(state_of(1), step=1).wait("slow")
    whole = handover.HandOver.feed

    def feed(self: handover.HandOver, item: Any) -> None:
        whole(self, item)
        os.kill(os.getpid(), signal.SIGKILL)

    handover.HandOver.feed = feed  # type: ignore[method-assign]
    ckpt.save(state_of(2), step=2)


def with_child(place: str) -> None:
    """A trainer with a child, as a worker of a data loader, that outlives it with the socket to the agent."""
    ckpt = ts.Checkpointer(policy(Path(place)), "run")
    ckpt.save(state_of(1), step=1)
    child = fork(lambda: time.sleep(60))
    print("child", child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def with_reading_child(place: str) -> None:
    """A trainer and its child read side by side, from memory of the agent too, and then the trainer saves again."""
    torch.set_num_threads(1)  # a forked child has none of OpenMP's
    with ts.Checkpointer(policy(Path(place)), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step=step).wait("slow")
        newest, agent = ckpt.info(), statuses()[0]["pid"]
        assert same(ckpt.load(), state_of(2))  # over a connection that the child has, too

        def read() -> None:
            signal.alarm(60)  # it hangs
            for step in (1, 2) * 5:
                assert same(ckpt.load(step=step), state_of(step))
            assert ckpt.stats().tiers.keys() == {"fast", "slow"}
            assert same(ckpt.load(step=1), state_of(1))

        child = fork(read)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            assert same(ckpt.load(), state_of(2))
            assert ckpt.restored is not None
            assert "(agent)" in ckpt.restored.tiers
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        ckpt.save(state_of(3), step=3).wait("slow")
        assert ckpt.info().parent == newest.id
        assert statuses()[0]["pid"] == agent
        assert same(ckpt.load(), state_of(3))
        assert ckpt.restored is not None
        assert "(agent)" in ckpt.restored.tiers
    print("read", flush=True)


def served(place: str, step: str) -> None:
    """A trainer that saves one step, and tells by which agent, and of which version that is."""
    with ts.Checkpointer(policy(Path(place)), "run") as ckpt:
        ckpt.save(state_of(int(step)), step=int(step)).wait("slow")
        (agent,) = statuses()
        print("served", agent["pid"], agent["version"], flush=True)
