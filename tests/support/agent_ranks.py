"""Ranks that save together by agents; each function is one rank of a `Gang`."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.agents import hosts_policy, policy
from support.checkpointer_worlds import engine_threads
from support.outcomes import until
from support.rank_jobs import check, state_of

import tierstate as ts
from tierstate.manifest.errors import TierstateError


def opened(place: str, **options: str) -> tuple[ts.Checkpointer, int, int]:
    """The Checkpointer of this rank, its rank, and the number of ranks."""
    dist.init_process_group("gloo")
    options |= {key: os.environ[key.upper()] for key in ("agent", "ram", "every", "slow") if key.upper() in os.environ}
    if "TIERSTATE_HOST" in os.environ:
        told = {key: os.environ[key.upper()] for key in ("peer", "idle", "ram") if key.upper() in os.environ}
        spec = hosts_policy(Path(place), **told)
    else:
        spec = policy(Path(place), **options)
    ckpt = ts.Checkpointer(spec, "run", process_group=dist.group.WORLD)
    return ckpt, dist.get_rank(), dist.get_world_size()


def save(place: str, first: str, last: str) -> None:
    """Save these steps, and wait for all tiers."""
    ckpt, rank, size = opened(place)
    with ckpt:
        print("agent", ckpt._pipeline.agent, flush=True)  # type: ignore[attr-defined]
        for step in range(int(first), int(last) + 1):
            saved = ckpt.save(state_of(step, rank, size), step=step)
        saved.wait("slow")
        print("stored", {name: tier.saves for name, tier in ckpt.stats().tiers.items()}, flush=True)
    print("closed", flush=True)
    dist.destroy_process_group()


def save_without(place: str, first: str, last: str) -> None:
    """As `save`, where an agent is wished for and cannot be had by all."""
    os.environ["AGENT"] = "mode: auto, idle: 10min, memory: 256MiB"
    save(place, first, last)


def restore(place: str, slow: str) -> None:
    """Restore the newest version, and say which step it is, and from which tiers."""
    ckpt, rank, size = opened(place, slow=slow)
    with ckpt:
        state = state_of(0, rank, size)
        state["mine"].value.fill_(-1)
        ckpt.restore(state)
        assert ckpt.restored is not None
        print("restored", check(state, rank, size), *ckpt.restored.tiers, flush=True)
    dist.destroy_process_group()


def wait_to_be_killed(place: str, steps: str, slow: str) -> None:
    """Save so many steps, one after the other, and say so when all are captured."""
    ckpt, rank, size = opened(place, slow=slow)
    for step in range(1, int(steps) + 1):
        ckpt.save(state_of(step, rank, size), step=step)
    print("captured", flush=True)
    time.sleep(100)


def wait_with_slow_tiers(place: str, steps: str, rate: str) -> None:
    """As `wait_to_be_killed`, where both tiers are slow."""
    ckpt, rank, size = opened(place, slow=rate, fast=rate)
    for step in range(1, int(steps) + 1):
        ckpt.save(state_of(step, rank, size), step=step)
    print("captured", flush=True)
    time.sleep(100)


def one_within_capture(place: str, victim: str) -> None:
    """All ranks save step 1; then one kills itself in the capture of step 2, and the others say what they are told."""
    ckpt, rank, size = opened(place)
    ckpt.save(state_of(1, rank, size), step=1).wait("slow")
    print("saved", flush=True)
    if rank == int(victim):
        from tierstate.agent import handover

        handover.HandOver.feed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        ckpt.save(state_of(2, rank, size), step=2).wait("fast")
        print("told nothing", flush=True)
    except ts.TierstateError as error:
        print("told", type(error).__name__, error, flush=True)
    sys.stdout.flush()
    os._exit(0)


def tell_outcomes(place: str, steps: str) -> None:
    """Save so many steps, one after the other, and say what becomes of each in the slow tier."""
    ckpt, rank, size = opened(place)
    with ckpt:
        for step in range(1, int(steps) + 1):
            saved = ckpt.save(state_of(step, rank, size), step=step)
            try:
                saved.wait("slow", timeout=60)
                print(step, "arrived", flush=True)
            except ts.TierstateError as error:
                print(step, "failed", error, flush=True)
            if step == 1:
                until((Path(place) / "gate").exists)
            dist.barrier()
    dist.destroy_process_group()


def one_cannot_hear_of_a_failure(place: str, steps: str) -> None:
    """As `tell_outcomes`, but the second rank has no memory for what its agent says of the first failure."""
    from tierstate.agent import handing

    plain = handing.decode_error

    def unable(encoded: Any) -> Any:
        handing.decode_error = plain
        print("unable", flush=True)
        raise MemoryError("this rank has no memory")

    if os.environ["RANK"] == "1":
        handing.decode_error = unable
    tell_outcomes(place, steps)


def go_back(place: str, steps: str, to: str) -> None:
    """Save so many steps, wait for the host tier, restore one of them, and say from where; then go on from there."""
    ckpt, rank, size = opened(place)
    with ckpt:
        for step in range(1, int(steps) + 1):
            saved = ckpt.save(state_of(step, rank, size), step=step)
            saved.wait("slow" if step == 1 else "ram")  # the host tier keeps it until then
        dist.barrier()
        state = state_of(0, rank, size)
        ckpt.restore(state, step=int(to))
        assert ckpt.restored is not None
        assert state["mine"].value.tolist() == [int(to), rank]
        print("restored", check(state, rank, size), *ckpt.restored.tiers, flush=True)
        found = {info.step: info.tiers for info in ckpt.versions()}
        print("in ram", *(step for step, tiers in found.items() if "ram" in tiers), flush=True)
        tier = ckpt._tier_runs[0].tier
        print("bytes", sum(map(tier.size, tier.list(""))), flush=True)
        assert not ckpt.verify(deep=True).problems
        ckpt.save(state_of(int(steps) + 1, rank, size), step=int(steps) + 1).wait("ram")
        dist.barrier()
        ckpt.restore(state)
        print("again", check(state, rank, size), "by", ckpt._pipeline.agent, flush=True)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def too_long_for_ram(place: str, steps: str) -> None:
    """Save steps of which the host tier cannot have all; say how many bytes it had at most."""
    ckpt, rank, size = opened(place)
    most = failures = 0
    with ckpt:
        tier = ckpt._tier_runs[0].tier
        for step in range(1, int(steps) + 1):
            saved = ckpt.save(state_of(step, rank, size), step=step)
            saved.wait("fast")
            try:
                saved.wait("ram")
            except ts.TierstateError as error:
                failures += 1
                print(type(error).__name__, error, flush=True)
            dist.barrier()
            most = max(most, sum(map(tier.size, tier.list(""))))
            dist.barrier()
    print("most", most, "failures", failures, flush=True)
    dist.destroy_process_group()


def one_is_killed(place: str, victim: str) -> None:
    """Save a step, which all have captured; then one kills itself, and the others end some time after it."""
    ckpt, rank, size = opened(place, slow="5MiB/s")
    saved = ckpt.save(state_of(1, rank, size), step=1)
    saved.wait_captured()
    dist.barrier()
    print("captured", flush=True)
    if rank == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    saved.wait("slow", timeout=60)
    print("arrived", flush=True)
    os._exit(0)


def agents_come_back(place: str, losses: str) -> None:
    """Save again and again, while the test kills agents; say by which agent, until new ones came so many times."""
    from tierstate.agent import handing

    handing.TRY_AGAIN = 0.5
    ckpt, rank, size = opened(place)
    step, seen, before = 0, 0, None
    saves = []
    with ckpt:
        while seen <= int(losses):
            step += 1
            assert step < 100, f"no agent comes back after {seen}"
            saves.append(ckpt.save(state_of(step, rank, size), step=step))
            saves[-1].wait("slow", timeout=90)
            dist.barrier()
            time.sleep(0.7)
            agent = ckpt._pipeline.agent  # type: ignore[attr-defined]
            if agent is not None and before is None:
                seen += 1
                print(f"agent-{seen}", agent, flush=True)
            before = agent
        for _ in range(3):
            step += 1
            saves.append(ckpt.save(state_of(step, rank, size), step=step))
            time.sleep(0.7)
        for saved in saves:
            saved.wait("slow", timeout=90)
        assert ckpt._pipeline.agent == agent, "the last one is not lost"  # type: ignore[attr-defined]
    print("saved", step, flush=True)
    dist.destroy_process_group()


def agents_die(place: str, steps: str, pause: str) -> None:
    """Save so many steps, before the last of which the test kills agents; then say from where that was committed."""
    ckpt, rank, size = opened(place, slow="10MiB/s")
    saves = []
    with ckpt:
        print("ready", ckpt._pipeline.agent, flush=True)  # type: ignore[attr-defined]
        for step in range(1, int(steps) + 1):
            if step == int(steps):
                until((Path(place) / "killed").exists)
            saves.append(ckpt.save(state_of(step, rank, size), step=step))
            time.sleep(float(pause))
        for saved in saves:
            saved.wait("slow", timeout=90)
        print("by", ckpt._pipeline.agent, flush=True)  # type: ignore[attr-defined]
    print("closed", flush=True)
    dist.destroy_process_group()


def lost_within_save(place: str, first: str, step: str, plans: str) -> None:
    """Save from the first step on. The test kills the agent while the first rank plans this step, which the other one
    begins once it knows of the loss; or when both have planned it, and the agent has nothing of it. They have to ask
    each other what each of them saves, and save one more step."""
    ckpt, rank, size = opened(place)
    pipeline = ckpt._pipeline
    last, is_lost = int(step), partial(lost_once, ckpt)
    with ckpt:
        for before in range(int(first), last):
            ckpt.save(state_of(before, rank, size), step=before).wait_captured()
        where = "prepare" if plans else "_start"
        done = getattr(pipeline, where)

        def told(seq: int) -> Any:
            found = done(seq)
            print("within", pipeline.agent, flush=True)  # type: ignore[attr-defined]
            if not plans:
                until(is_lost)
            return found

        if rank == 0 or not plans:
            setattr(pipeline, where, told)
        else:
            until(is_lost)
        more = {"more": torch.arange(100)}
        saves = [ckpt.save(state_of(now, rank, size) | more, step=now) for now in (last, last + 1)]
        saves[-1].wait("slow", timeout=60)
        assert threads_of_tiers() == ["tierstate-fast", "tierstate-slow"]
        print("by", pipeline.agent, flush=True)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def one_cannot_tell(place: str) -> None:
    """The test kills the agent while it has a save, and the last rank cannot say then what it has: the other one must
    not wait for it. Say what became of that save, and save one more step."""
    ckpt, rank, size = opened(place)
    pipeline: Any = ckpt._pipeline

    def unable(*_: object) -> Any:
        raise MemoryError("this rank has no memory")

    if rank == size - 1:
        pipeline._states = unable
    with ckpt:
        held = ckpt.save(state_of(1, rank, size), step=1)
        held.wait_captured()
        print("ready", pipeline.agent, flush=True)
        until(lambda: pipeline._link is None and pipeline._holding is None)
        for tier in ("fast", "slow"):
            try:
                held.wait(tier, timeout=60)
            except (TierstateError, MemoryError) as error:
                print(tier, type(error).__name__, error, flush=True)
        ckpt.save(state_of(2, rank, size), step=2).wait("slow", timeout=60)
    dist.destroy_process_group()


def lost_before_all(place: str) -> None:
    """The test kills the agent, and nothing is saved; say which tiers have a thread."""
    ckpt, _, _ = opened(place)
    with ckpt:
        print("ready", ckpt._pipeline.agent, flush=True)  # type: ignore[attr-defined]
        until(partial(lost_once, ckpt))
    print("left", *threads_of_tiers(), flush=True)
    dist.destroy_process_group()


def lost_once(ckpt: ts.Checkpointer) -> bool:
    """Whether agents were lost, for the first time, and all ranks have agreed on what becomes of their saves."""
    return ckpt._pipeline._losses == 1 and ckpt._pipeline._holding is None  # type: ignore[attr-defined]


def threads_of_tiers() -> list[str]:
    """The names of the threads that write to tiers, sorted."""
    return sorted(name for name in engine_threads() if name in ("tierstate-fast", "tierstate-slow"))


def one_announces_late(place: str, steps: str, late: str) -> None:
    """As `agents_die`, but one rank says that it has lost its agent only once the test has heard it of the others."""
    from tierstate.agent.shared_pipeline import SharedAgentPipeline

    meet = SharedAgentPipeline._on_lost

    def slowly(pipeline: SharedAgentPipeline) -> None:
        until((Path(place) / "heard").exists, 90)
        meet(pipeline)

    if os.environ["RANK"] == late:
        SharedAgentPipeline._on_lost = slowly  # type: ignore[method-assign]
    agents_die(place, steps, "0.3")
