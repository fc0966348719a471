"""Jobs that save to peer memory only, run by `processes.Gang`: ``support.peer_jobs:save FOLDER``."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpointer_worlds import policy
from support.sharded_jobs import full, fully_sharded, train

import tierstate as ts
from tierstate.tiers.peer.tier import Peer

STEPS = 3


def spec_of(folder: str, rank: int) -> ts.Policy:
    """A policy by which everything goes to peer memory; the tier that outlives hosts gets nothing."""
    tiers = {
        "peer": {"type": "peer", "path": f"{folder}/host{rank}", "capacity": "64MiB", "idle": "2min"},
        "unused": {"type": "lustre", "path": f"{folder}/unused"},
    }
    ts.register_tier("peer", Peer)
    ranks = {"timeout": "60s", "silence": "10s"}
    return policy(tiers, rules=[{"match": "**", "tiers": ["peer"]}], durable="unused", ranks=ranks)


def _begin(folder: str) -> ts.Policy:
    dist.init_process_group("gloo")
    return spec_of(folder, dist.get_rank())


def save(folder: str) -> None:
    """Train and save, then wait to be killed."""
    spec = _begin(folder)
    rank = dist.get_rank()
    model, optimizer = fully_sharded(0)
    ckpt = ts.Checkpointer(spec, "run", dist.group.WORLD)
    for step in range(STEPS):
        train(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "own": ts.PerRank(torch.full((2000,), rank + step / 8))}
        ckpt.save(state, step=step).wait("peer")
    print("saved", flush=True)
    time.sleep(1000)


def restore(folder: str) -> None:
    """Have the same again as if nothing had happened."""
    spec = _begin(folder)
    rank = dist.get_rank()
    model, optimizer = fully_sharded(1)
    own = torch.zeros(2000)
    with ts.Checkpointer(spec, "run", dist.group.WORLD) as ckpt:
        state = {"model": model, "optimizer": optimizer, "own": ts.PerRank(own)}
        assert ckpt.restore(into=state) is not None
        same, other = fully_sharded(0)
        for _ in range(STEPS):
            train(same, other)
        for one, two in zip(same.parameters(), model.parameters(), strict=True):
            assert torch.equal(full(one), full(two))
        for one, two in zip(other.state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(full(one[name]), full(two[name])) for name in ("exp_avg", "exp_avg_sq", "step"))
        assert own.eq(rank + (STEPS - 1) / 8).all()
        ckpt.save(state, step=STEPS).wait("peer")
    dist.destroy_process_group()


def keep_on(folder: str) -> None:
    """Save until a keeper has been killed, and on until what is saved has its copies again."""
    spec = _begin(folder)
    with ts.Checkpointer(spec, "run", dist.group.WORLD) as ckpt:
        ckpt.save({"w": torch.zeros(5000)}, step=0).wait("peer")
        print("saved", flush=True)
        while not (Path(folder) / "killed").exists():
            time.sleep(0.02)
        for step in range(1, 200):
            try:
                ckpt.save({"w": torch.full((5000,), float(step))}, step=step).wait("peer")
            except ts.TierstateError as error:
                print("failed", type(error).__name__, flush=True)
                time.sleep(0.2)
            else:
                break
        else:
            raise AssertionError("nobody has started the keeper again")
    dist.destroy_process_group()
