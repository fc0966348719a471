"""Jobs of several ranks that save, as functions run by `processes.Gang`: ``support.saving_jobs:save FOLDER``."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpointer_worlds import policy, tier

import tierstate as ts


def _spec(folder: str, **keys: object) -> ts.Policy:
    place = Path(folder)
    tiers = {"host": {"type": "host"}, "nvme": tier("nvme", place), "lustre": tier("lustre", place)}
    return policy(tiers, ranks={"timeout": "60s", "silence": "4s"}, **keys)


def _say(*words: object) -> None:
    print(*words, flush=True)


def save(folder: str, statistics: str = "") -> None:
    """A model that all hold, and a shard that each has alone; five saves, one after another."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with ts.Checkpointer(_spec(folder, statistics=bool(statistics)), "run", dist.group.WORLD) as ckpt:
        for step in range(5):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            own = {rank: torch.full((3000,), float(rank + step))}
            ckpt.save({"model": model, "optimizer": optimizer, "own": own}, step=step)
    torch.save(model.state_dict(), Path(folder) / f"model-{rank}.pt")
    dist.destroy_process_group()


def one_slow(folder: str, slow: str) -> None:
    """One save, in which one rank's disk takes a second longer than the others'."""
    from tierstate.tiers.posix.files import BufferedFile

    dist.init_process_group("gloo")
    rank, sync = dist.get_rank(), BufferedFile.sync

    def slow_sync(file: BufferedFile) -> None:
        time.sleep(1)
        sync(file)

    if rank == int(slow):
        BufferedFile.sync = slow_sync  # type: ignore[method-assign]
    spec = policy({"lustre": tier("lustre", Path(folder))}, ranks={"timeout": "60s", "silence": "20s"})
    with ts.Checkpointer(spec, "run", dist.group.WORLD) as ckpt:
        ckpt.save({"w": torch.ones(5000), rank: torch.ones(9)}, step=3).wait()
    dist.destroy_process_group()


def die(folder: str, victim: str) -> None:
    """Saves until a rank is killed; the others are told, and say so."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ckpt = ts.Checkpointer(_spec(folder), "run", dist.group.WORLD)
    ckpt.save({"w": torch.ones(5000), rank: torch.ones(9)}, step=0).wait("lustre")
    _say("saved")
    if rank == int(victim):
        time.sleep(1000)
    sys.stdin.close()
    while not (Path(folder) / "killed").exists():
        time.sleep(0.02)
    try:
        ckpt.save({"w": torch.zeros(5000), rank: torch.ones(9)}, step=1).wait()
    except ts.TierstateError as error:
        _say("told", type(error).__name__, getattr(error, "ranks", ""))
    threading.Timer(40, os._exit, [3]).start()
    try:
        ckpt.close()
    except ts.TierstateError as error:
        _say("closed", type(error).__name__)
    os._exit(0)  # the process group does not come to an end without the rank that is gone


def measure(folder: str, leaves: str, steps: str) -> None:
    """The time for which steady saves hold up the training."""
    dist.init_process_group("gloo")
    count = int(leaves)
    spec = policy({"nvme": tier("nvme", Path(folder))}, chunk="1MiB", arena={"size": "64MiB"})
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    state = {f"layer{i}": torch.zeros(256) for i in range(count)}
    with ts.Checkpointer(spec, "run", group) as ckpt:
        for step in range(int(steps)):
            for tensor in state.values():
                tensor += 1
            ckpt.save(state, step=step).wait()
        blocked = sorted(ckpt.stats().blocked[2:])
    _say("blocked", 1000 * blocked[len(blocked) // 2], 1000 * blocked[-1])
    dist.destroy_process_group()
