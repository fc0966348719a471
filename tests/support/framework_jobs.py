"""Guarded training by real frameworks: saves at every step, and a capture so slow that the next step meets it."""

from __future__ import annotations

import copy
import os
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import memmove
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpointer_worlds import policy, scratch, tier
from support.equality import difference
from torch.optim.optimizer import _global_optimizer_pre_hooks

import tierstate as ts
from tierstate.engine.capture import capture

STEPS = 5


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))


class GuardedRun:
    """One run: `save` after each step, then `check`.

    Args:
        optimizer: what is guarded, as the framework gives it.
    """

    def __init__(self, ckpt: ts.Checkpointer, optimizer: Any) -> None:
        self.ckpt, self.optimizer = ckpt, optimizer
        self._step_before = vars(optimizer).get("step")
        self._truth: dict[int, Any] = {}
        self._saves: dict[int, ts.Save] = {}
        ckpt.guard(optimizer)

    def save(self, state: dict[str, Any]) -> None:
        step = len(self._truth)
        plain = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()}
        self._truth[step] = copy.deepcopy(plain)
        self._saves[step] = self.ckpt.save(state, step=step)

    def check(self) -> None:
        """Every version is the state at its call; steps have waited for it; `unguard` leaves nothing behind."""
        for step, save in self._saves.items():
            save.wait()
            assert difference(self._truth[step], self.ckpt.load(step=step)) == ""
        assert len(self._saves) >= STEPS
        assert self.ckpt.stats().waited > 0
        self.ckpt.unguard(self.optimizer)
        assert vars(self.optimizer).get("step") is self._step_before
        assert not _global_optimizer_pre_hooks


@contextmanager
def slow_checkpointer() -> Iterator[ts.Checkpointer]:
    dice, patch = random.Random(3), pytest.MonkeyPatch()

    def slowly(*args: Any) -> Any:
        time.sleep(dice.random() * 0.002)
        return memmove(*args)

    patch.setattr(capture, "memmove", slowly)
    try:
        with scratch() as place, ts.Checkpointer(policy({"nvme": tier("nvme", place)}, chunk="4KiB"), "run") as ckpt:
            yield ckpt
    finally:
        patch.undo()


def fsdp1() -> None:
    """FSDP1 on each rank, whose own pieces of parameters and moments are saved by itself."""
    warnings.simplefilter("ignore")  # torch's own, about FSDP1
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(
        network(), sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with slow_checkpointer() as ckpt:
        run = GuardedRun(ckpt, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            run.save({"parameters": [one.detach() for one in model.parameters()], "moments": moments})
        run.check()
    dist.destroy_process_group()


def deepspeed() -> None:
    """DeepSpeed's engine and its optimizer, of several kinds, on one rank."""
    warnings.simplefilter("ignore")  # its own
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    ds.init_distributed("gloo")
    for stage, half, wrapped in [(0, False, "engine"), (0, True, "optimizer"), (2, True, "engine")]:
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1 if wrapped == "optimizer" else 2,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": half},
        }
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine, optimizer, *_ = ds.initialize(model=model, optimizer=inner, config=config)
        with slow_checkpointer() as ckpt:
            run = GuardedRun(ckpt, engine if wrapped == "engine" else optimizer)
            for _ in range(STEPS):
                x = torch.randn(8, 64, dtype=torch.bfloat16 if half else torch.float32)
                engine.backward(engine(x).float().square().mean())
                engine.step()
                run.save({"model": engine.module, "optimizer": getattr(optimizer, "optimizer", optimizer)})
            run.check()
        engine.destroy()
    dist.destroy_process_group()
