"""Jobs of many ranks whose state at each step is known, so that every restored bit can be checked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

import tierstate as ts

ROWS, COLUMNS = 37, 1000
FAILED = 3
"""Exit status of a rank whose job came to nothing, as another rank was lost."""


def whole(step: int, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    """The tensor that all ranks hold parts of: int64 of ``(rows, columns)``."""
    return torch.arange(rows * columns).view(rows, columns) * 2654435761 % (1 << 31) + step


def rows_of(rank: int, size: int, rows: int = ROWS) -> slice:
    """The rows that a rank holds: as even as can be."""
    return slice(rows * rank // size, rows * (rank + 1) // size)


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """What a rank of so many has at a step: rows of one tensor, a copy of another, a word of its own, numbers."""
    part = rows_of(rank, size)
    return {
        "rows": ts.Shard(whole(step)[part].clone(), (part.start, 0), (ROWS, COLUMNS)),
        "same": torch.full((5000,), step, dtype=torch.float32),
        "mine": ts.PerRank(torch.tensor([step, rank]), missing="keep"),
        "step": step,
        "frozen": torch.arange(30_000),
    }


def check(state: dict[str, Any], rank: int, size: int) -> int:
    """The step whose state it is; raises AssertionError unless each bit is."""
    step: int = state["step"]
    assert torch.equal(state["rows"].tensor, whole(step)[rows_of(rank, size)]), f"rows of step {step}"
    assert torch.equal(state["same"], torch.full((5000,), step, dtype=torch.float32)), f"copies of step {step}"
    assert torch.equal(state["frozen"], torch.arange(30_000))
    mine = state["mine"].value.tolist()
    assert mine == [step, rank] or mine[0] == -1, f"{mine} of step {step}"
    return step


def check_versions(ckpt: ts.Checkpointer, steps: Iterable[int]) -> None:
    """Raise AssertionError unless all that a run has is undamaged, and the versions of these steps are exact, as one
    process restores them."""
    assert not ckpt.verify(deep=True).problems
    for step in steps:
        state = state_of(0, 0, 1)
        ckpt.restore(state, step=step, only=["rows", "same", "step", "frozen"])
        state["mine"].value.fill_(-1)
        assert check(state, 0, 1) == step


def advance(state: dict[str, Any], rank: int, size: int) -> None:
    """One step on, in place."""
    state["step"] += 1
    step = state["step"]
    state["rows"].tensor.copy_(whole(step)[rows_of(rank, size)])
    state["same"].fill_(step)
    state["mine"].value.copy_(torch.tensor([step, rank]))


def job(policy: str, steps: str = "1000000", pause: str = "0.02") -> None:
    """Restore the newest version, say ``own [STEP, RANK]`` of what was this rank's own in it, -1 for nothing, and
    ``ready STEP``; then save every step and say ``durable TIER STEP``.

    Args:
        policy: path of a policy file.
        steps: how many to make at most.
        pause: seconds that a step takes.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    state = state_of(0, rank, size)
    state["mine"].value.fill_(-1)
    saves = []
    try:
        with ts.Checkpointer(policy, "run", process_group=dist.group.WORLD) as ckpt:
            if ckpt.resume(into=state) is not None:
                check(state, rank, size)
            print("own", state["mine"].value.tolist(), flush=True)
            print("ready", state["step"], flush=True)
            for _ in range(int(steps)):
                advance(state, rank, size)
                saves.append(ckpt.save(state, step=state["step"]))
                time.sleep(float(pause))
                saves = [save for save in saves if not _told(save)]
    except (ts.RankFailed, ts.CommitUnknown) as error:
        print("failed", type(error).__name__, error, flush=True)
        # Nobody is there to say goodbye to: what the process group would wait for is gone.
        sys.stdout.flush()
        os._exit(FAILED)
    dist.destroy_process_group()


_SAID: set[tuple[int, str]] = set()


def _told(save: ts.Save) -> bool:
    for tier in save.tiers:
        if save.done(tier) and (save.step, tier) not in _SAID:
            _SAID.add((save.step, tier))
            print("durable", tier, save.step, flush=True)
    return all((save.step, tier) in _SAID for tier in save.tiers)
