"""A training function for Ray Train: dropout, AdamW, a save and a report at every step; a worker may kill itself."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as dist

import tierstate as ts
from tierstate.integrations.ray import report, restore

STEPS = 8


def train(job: dict[str, Any]) -> None:
    """Train to the end, or until a worker is killed.

    Args:
        job: ``place`` (a folder for logs), ``policy`` (text), ``kill`` (the rank that is killed, once, after
            ``kill_at`` steps and when Ray has a checkpoint), ``broken`` (the step after which the folder of the tier
            becomes a file, so that saves fail, and the step after which it is there again), ``until`` (the last
            step).
    """
    torch.set_num_threads(1)
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    place = Path(job["place"])
    state, model = new_state(size, rank)
    with ts.Checkpointer(ts.Policy.parse(job["policy"]), "job", dist.group.WORLD if size > 1 else None) as ckpt:
        found = restore(ckpt, ray.train.get_checkpoint(), state)
        _log(place, rank, {"began": state["step"], "version": None if found is None else found.id})
        while state["step"] < job.get("until", STEPS):
            state["step"] += 1
            _log(place, rank, {"step": state["step"], "loss": one_step(state, model).hex()})
            save = ckpt.save(state, step=state["step"])
            report({"step": state["step"]}, save)
            if state["step"] in job.get("broken", ()):
                _exchange(place, save)
            if rank == job.get("kill") and state["step"] == job["kill_at"]:
                _kill_once(place)


def _exchange(place: Path, save: ts.Save) -> None:
    """The folder of the tier becomes a file, or is made of it again."""
    while not (save.done() or save.errors()):
        time.sleep(0.01)
    if (place / "away").exists():
        (place / "tier").unlink()
        (place / "away").rename(place / "tier")
    else:
        (place / "tier").rename(place / "away")
        (place / "tier").touch()


def new_state(size: int = 1, rank: int = 0) -> tuple[dict[str, Any], torch.nn.Module]:
    """What is saved, and the model that is called in a step."""
    torch.manual_seed(3)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11 + rank)
    state = {"step": 0, "model": model, "optimizer": optimizer, "rng": ts.PerRank(ts.Rng())}
    return state, torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model


def one_step(state: dict[str, Any], model: torch.nn.Module) -> float:
    state["optimizer"].zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    state["optimizer"].step()
    return float(loss.item())


def _kill_once(place: Path) -> None:
    """SIGKILL this worker, the first time, when Ray's controller has written down a checkpoint."""
    if (place / "killed").exists():
        return
    while not (place / "ray/job/checkpoint_manager_snapshot.json").exists():
        time.sleep(0.01)
    (place / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _log(place: Path, rank: int, line: dict[str, Any]) -> None:
    with (place / f"{rank}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")
