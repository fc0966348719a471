"""Preempted ranks: all see it at the same step, whichever of them got the signal, and save that step together."""

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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outcomes import until
from support.preempted_job import hang_far_tier
from support.rank_jobs import check, state_of
from support.slow_values import Fill
from support.thread_ranks import as_ranks
from support.torchrun import Torchrun

import tierstate as ts
from tierstate.engine.ranks.save.preemption import SharedPreemption
from tierstate.engine.ranks.team.team import Team
from tierstate.tiers.policy.models import PreemptionKeys

NO_SIGNALS = PreemptionKeys.model_construct(signals=(), grace=30.0)
"""The tests call `note` instead: handlers belong to the main thread."""


class Nothing:
    """No saves are under way."""

    ending = False

    def hurry(self, end: float) -> None:
        pass

    def unfinished(self) -> str:
        return ""

    def left_behind(self) -> str:
        return ""

    def bring_newest(self) -> None:
        pass


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(2, 5),
    signalled=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 0.2)), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    collective=st.booleans(),
)
def test_all_ranks_end_at_the_same_step(
    size: int, signalled: list[tuple[int, float]], seed: int, collective: bool
) -> None:
    """``collective``: the training's steps wait for one another, as with an all-reduce; else ranks drift apart."""
    steps = threading.Barrier(size)

    def train(team: Team) -> int:
        dice, saves = random.Random(seed * 10 + team.rank), Nothing()
        watch = SharedPreemption(NO_SIGNALS, saves, team)
        watch._interval = 0.05
        for rank, after in signalled:
            if rank % size == team.rank:
                threading.Timer(after, watch.note, [signal.SIGTERM]).start()
        step = 0
        while not watch.preempted():
            step += 1
            time.sleep(dice.choice([0, 0.001, 0.01]))
            if collective:
                steps.wait(20)
        assert saves.ending
        watch._signal = None  # so that nothing is raised for the test's process
        watch.close_begins()
        watch.close_ends()
        return step

    found = as_ranks([0] * size, train)
    assert all(isinstance(one, int) for one in found), found
    assert len(set(found)) == 1, found


POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 1MiB}}
ranks: {{timeout: 60s, silence: 20s}}
preemption: {{signals: [TERM, USR1], grace: 200s}}
tiers:
  host: {{type: host, capacity: 64MiB, keep: {{last: 2}}}}
  shared: {{type: lustre, path: "{place}/shared", every: 1000}}
"""


def job(folder: str) -> None:
    """One rank: trains until it is preempted, saves, and ends."""
    import torch.distributed as dist
    from support.rank_jobs import advance

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with ts.Checkpointer(ts.Policy.parse(POLICY.format(place=folder)), "run", dist.group.WORLD) as ckpt:
        state: dict[str, Any] = state_of(0, rank, size)
        ckpt.save(state, step=0).wait("shared")
        while not ckpt.preempted:
            advance(state, rank, size)
            if state["step"] == 1:
                print(f"pid {os.getpid()}", flush=True)
            dist.barrier()
            time.sleep(0.01)
        ckpt.save(state, step=state["step"]).wait("shared")
        print(f"ended {state['step']}", flush=True)
    dist.destroy_process_group()


def found_later(place: Path) -> tuple[int, list[int]]:
    """The step that one process restores, each bit of it checked, and the steps of all versions."""
    with ts.Checkpointer(ts.Policy.parse(POLICY.format(place=place)), "run", preemption=False) as ckpt:
        return check(ckpt.restore(into=state_of(0, 0, 1)), 0, 1), [version.step for version in ckpt.versions()]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one rank", "torchrun"])
def test_a_job_under_torchrun(place: Path, who: str) -> None:
    """A signal to one rank, as when its node is taken away; or to torchrun, which passes it on to all."""
    with Torchrun(3, "ranks.test_preemption:job", place) as ranks:
        pids = [int(ranks.hear(rank, "pid")) for rank in range(3)]
        os.kill(*((pids[1], signal.SIGUSR1) if who == "one rank" else (ranks._agent.pid, signal.SIGTERM)))
        (step,) = {ranks.hear(rank, "ended") for rank in range(3)}
        ranks.code()
    assert found_later(place) == (int(step), [0, int(step)])
    assert int(step) > 0


def saving_job(folder: str, failing: int | None = None) -> None:
    """One rank: saves after each step, looks whether it is preempted after that, and closes. ``failing``: a rank whose
    saves fail from the third on."""
    import torch.distributed as dist
    from support.rank_jobs import advance

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ckpt = ts.Checkpointer(ts.Policy.parse(POLICY.format(place=folder)), "run", dist.group.WORLD)
    state: dict[str, Any] = state_of(0, rank, size)
    ckpt.save(state, step=0).wait("shared")
    while not ckpt.preempted:
        advance(state, rank, size)
        if state["step"] == 3:
            print(f"pid {os.getpid()}", flush=True)
        broken = {"broken": object()} if rank == failing and state["step"] >= 3 else {}
        with suppress(ts.CaptureError):
            ckpt.save(state | broken, step=state["step"])
        time.sleep(0.01)
    try:
        ckpt.close()
    except ts.TierstateError as error:
        print(f"told {type(error).__name__}", flush=True)
    print(f"ended {state['step']}", flush=True)
    dist.destroy_process_group()


def job_without_a_part(folder: str) -> None:
    """As `saving_job`; rank 1 has no part of the newest version."""
    saving_job(folder, failing=1)


@pytest.mark.slow
@pytest.mark.parametrize("who", [[0], [2], [0, 1, 2]], ids=str)
def test_what_was_in_the_memory_of_each_rank_only_is_brought_by_all_of_them(place: Path, who: list[int]) -> None:
    """No persistent tier was due: at the end the newest version goes to the nearest one."""
    with Torchrun(3, "ranks.test_preemption:saving_job", place) as ranks:
        pids = [int(ranks.hear(rank, "pid")) for rank in range(3)]
        for rank in who:
            os.kill(pids[rank], signal.SIGUSR1)
        (step,) = {ranks.hear(rank, "ended") for rank in range(3)}
        ranks.code()
    assert found_later(place) == (int(step), [0, int(step)])
    assert int(step) >= 3


@pytest.mark.slow
def test_a_version_of_which_a_rank_has_no_part_is_waited_for_by_none(place: Path) -> None:
    with Torchrun(3, "ranks.test_preemption:job_without_a_part", place) as ranks:
        pids = [int(ranks.hear(rank, "pid")) for rank in range(3)]
        os.kill(pids[0], signal.SIGUSR1)
        start = time.monotonic()
        assert len({ranks.hear(rank, "ended") for rank in range(3)}) == 1
        ranks.code()
    assert time.monotonic() - start < 200, "the whole grace was waited for"
    assert found_later(place) == (0, [0])


SLOW_POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 1MiB}}
ranks: {{timeout: 60s, silence: 20s}}
preemption: {{signals: [TERM, USR1], grace: {grace}s}}
tiers:
  host: {{type: host, capacity: 64MiB, keep: {{last: 2}}}}
  near: {{type: lustre, path: "{place}/near"}}
  far: {{type: object, url: "file://{place}/far"}}
"""

PARTS = [name for part in state_of(0, 0, 1) for name in (part, f"{part}.**")]


def slow_save(ckpt: ts.Checkpointer, state: dict[str, Any], step: int, signalled: Path) -> None:
    """A save whose capture takes a second on each rank, which says ``now`` in it and waits for a file before."""
    begun = threading.Event()

    def slow(out: torch.Tensor) -> None:
        if not begun.is_set():
            print("now", flush=True)
            until(signalled.exists)
        begun.set()
        time.sleep(0.02)
        out.fill_(7)

    ckpt.save({**state, "slow": ts.PerRank({"fill": Fill(200_000, slow)})}, step=step)
    print(f"saved {step}", flush=True)


def job_in_a_save(folder: str, kind: str) -> None:
    """One rank, which is signalled in the middle of a save.

    Args:
        kind: ``asks`` reads `preempted` in each step, and ``never`` does not; ``hung`` does not either, and its slowest
            tier takes nothing.
    """
    import torch.distributed as dist
    from support.rank_jobs import advance

    dist.init_process_group("gloo")
    if kind == "hung":
        hang_far_tier()
    rank, size = dist.get_rank(), dist.get_world_size()
    policy = ts.Policy.parse(SLOW_POLICY.format(place=folder, grace=60 if kind == "hung" else 200))
    with ts.Checkpointer(policy, "run", dist.group.WORLD) as ckpt:
        print(f"pid {os.getpid()}", flush=True)
        state: dict[str, Any] = state_of(0, rank, size)
        ckpt.save(state, step=0).wait("near")
        advance(state, rank, size)
        slow_save(ckpt, state, 1, Path(folder) / "signalled")
        while not (kind == "asks" and ckpt.preempted):
            advance(state, rank, size)
            dist.barrier()  # as the collectives of a training; raises once another rank has ended
            time.sleep(0.01)
        ckpt.save(state, step=state["step"]).wait("near")
        print(f"ended {state['step']}", flush=True)
    dist.destroy_process_group()


def steps_in(place: Path, tier: str, kind: str) -> list[int]:
    """What one tier alone has, each version checked bit for bit."""
    text = SLOW_POLICY.format(place=place, grace=20).split("tiers:")[1].splitlines()
    (line,) = [line for line in text if line.startswith(f"  {tier}:")]
    with ts.Checkpointer(ts.Policy.parse(f"version: 1\ntiers:\n{line}\n"), "run") as ckpt:
        found = [version.step for version in ckpt.versions()]
        for step in found:
            alone = state_of(0, 0, 1)
            ckpt.restore(into=alone, step=step, only=PARTS)
            assert check(alone, 0, 1) == step, kind
    return found


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one rank", "torchrun"])
@pytest.mark.parametrize("kind", ["asks", "never"])
def test_a_signal_in_the_middle_of_a_save(place: Path, kind: str, who: str) -> None:
    """What all ranks had begun to save is committed on all tiers, also by ranks that never ask, and end by signals."""
    with Torchrun(3, "ranks.test_preemption:job_in_a_save", place, kind, forked=True) as ranks:
        pids = [int(ranks.hear(rank, "pid")) for rank in range(3)]
        ranks.hear(1, "now")
        assert "saved 1" not in ranks.said(1)
        os.kill(*((pids[1], signal.SIGUSR1) if who == "one rank" else (ranks._agent.pid, signal.SIGTERM)))
        (place / "signalled").touch()
        last = {ranks.hear(rank, "ended") for rank in range(3)} if kind == "asks" else set[str]()
        code = ranks.code()
    assert len(last) == (kind == "asks")
    assert code == 0 or (kind, who) != ("asks", "one rank")
    right = [0, 1, *map(int, last)]
    assert steps_in(place, "near", kind) == steps_in(place, "far", kind) == right


@pytest.mark.slow
def test_ranks_that_are_killed_at_the_end_of_the_grace(place: Path) -> None:
    """A tier hangs, and SIGKILL comes: what all ranks had begun to save was committed on the nearest one before."""
    with Torchrun(3, "ranks.test_preemption:job_in_a_save", place, "hung", forked=True) as ranks:
        pids = [int(ranks.hear(rank, "pid")) for rank in range(3)]
        ranks.hear(1, "now")
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        (place / "signalled").touch()
        until(lambda: steps_in(place, "near", "hung") == [0, 1], pause=0.2)
        for rank in reversed(range(3)):
            os.kill(pids[rank], signal.SIGKILL)
        assert ranks.code() != 0
    assert steps_in(place, "near", "hung") == [0, 1]
    assert steps_in(place, "far", "hung") == []
