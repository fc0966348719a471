"""Jobs with torch_checkpointing, started by torchrun: a weight that all ranks share, and a checkpoint at each step.

To gather what resharding needs, torch_checkpointing asks for a CUDA device by name: it gets the CPU.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.megatron_job import OnCpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.default_resharder import DefaultResharder

from tierstate.integrations.torch_checkpointing import TierStorageConfig, close


def wait_to_be_killed(step: str, written: Any) -> None:
    """Called by torch_checkpointing when the files of this rank are written, and before the commit."""
    if written.path.endswith(f"step_{step}"):
        print("halts", flush=True)
        time.sleep(600)


def manager(place: str, how: str, halt: str = "") -> CheckpointManager:
    config = getattr(CheckpointManager.Config, f"with_{how}_save")()
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    config.storage_config = TierStorageConfig(f"{place}/../policy.yaml", "job")
    config.pre_finalize_callback = partial(wait_to_be_killed, halt)
    return CheckpointManager(config)


def begin(place: str) -> tuple[torch.Tensor, DTensor]:
    """Join the other ranks; the data, and a weight of which each rank has some rows."""
    os.makedirs(place, exist_ok=True)
    os.chdir(place)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    OnCpu().__enter__()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torch.randn(8, 16), distribute_tensor(torch.randn(64, 16), mesh, [Shard(0)])


def main(place: str, how: str, steps: str, halt: str = "") -> None:
    """Train from the newest checkpoint on; if halt is given, wait to be killed before this step's commit."""
    data, weight = begin(place)
    kept = manager(place, how, halt)
    names = kept._reader._storage.ls(Path("out")) if os.path.exists("out") else []
    newest = max((int(name.rpartition("_")[2]) for name in names if name.startswith("step_")), default=0)
    if newest:
        kept.load(f"out/step_{newest}", {"model": {"weight": weight}})
    dist.barrier()
    print("begins", newest, flush=True)
    for step in range(newest + 1, int(steps) + 1):
        loss = learn(weight, data)
        print("loss", step, loss.hex(), flush=True)
        saved = kept.save(f"out/step_{step}", {"model": {"weight": weight}, "step": step})
        if saved is not None:
            saved.result()
    kept.close()
    close()
    dist.destroy_process_group()


def learn(weight: DTensor, data: torch.Tensor) -> float:
    """One step of descent; the loss before it."""
    rows = weight.to_local()
    loss = (data @ rows.T).square().sum()
    dist.all_reduce(loss)
    rows -= 0.001 * (data @ rows.T).T @ data
    return float(loss.item())


def reshard(place: str, step: str) -> None:
    """Load what more ranks have saved, and compare it with the steps of this rank alone."""
    data, weight = begin(place)
    right = DTensor.from_local(weight.to_local().clone(), weight.device_mesh, weight.placements)
    for _ in range(int(step)):
        learn(right, data)
    with torch.no_grad():
        weight.to_local().zero_()
    kept = manager(place, "sync")
    kept.load(f"out/step_{step}", {"model": {"weight": weight}})
    torch.testing.assert_close(weight.to_local(), right.to_local())
    print("same", step, flush=True)
    kept.close()
    dist.destroy_process_group()
