"""Two ranks of a Trainer's, or accelerate's, training under torchrun: ``hugging_face_ranks.py KIND FOLDER``.

Trains, then resumes twice (from a folder; and after all folders are lost), and compares the losses to the last bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from support import accelerate_job, trainer_job
from torch.distributed.tensor import DTensor

import tierstate as ts
from tierstate.integrations.accelerate import use

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "NO_WRAP"}}


def shard_on_cpus() -> None:
    """Let accelerate take processes on CPUs for ones on GPUs: for those it ignores FSDP, and trains by DDP."""
    own = PartialState.__init__

    def made(state: Any, *args: Any, **kwargs: Any) -> None:
        own(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = made


def check_sharding(model: torch.nn.Module, *, sharded: bool) -> None:
    """Whether all parameters of a model are sharded, or none."""
    assert {isinstance(parameter, DTensor) for parameter in model.parameters()} == {sharded}


def run_trainer(place: Path, **given: Any) -> None:
    """Data parallel, with buffers that differ by rank between forward passes; or sharded."""
    output, given = place / "job", {"ddp_backend": "gloo", **given}
    whole, losses, last = trainer_job.Losses(), trainer_job.Losses(), trainer_job.Losses()
    first = trainer_job.trainer(output, whole, **given)
    first.train()
    check_sharding(first.model, sharded="fsdp" in given)
    dist.barrier()
    trainer_job.trainer(output, losses, **given).train(str(output / "checkpoint-8"))
    assert losses.found == {step: whole.found[step] for step in range(9, 13)}
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in output.glob("checkpoint-*"):
            shutil.rmtree(folder)
    dist.barrier()
    trainer_job.trainer(output, last, max_steps=14, **given).train(True)
    assert sorted(last.found) == [13, 14]


def run_accelerate(place: Path, **given: bool) -> None:
    """Data parallel, or sharded."""
    tiers = f"{{nvme: {{type: nvme, path: '{place}/tier'}}}}"
    policy = ts.Policy.parse(f"version: 1\narena: {{size: 64MiB}}\ntiers: {tiers}\n")
    whole: dict[int, str] = {}
    first = accelerate_job.Job(place, policy, **given)
    assert first.accelerator.num_processes == 2
    check_sharding(first.net, sharded="sharded" in given)
    buffers: dict[int, list[torch.Tensor]] = {}

    def seen(step: int, loss: str) -> None:
        whole[step] = loss
        buffers[step] = [buffer.clone() for buffer in first.net.buffers()]

    first.train(seen, save=[2, 4])
    assert first.versions is not None
    first.versions.wait()
    first.versions.close()
    dist.barrier()
    losses: dict[int, str] = {}
    again = accelerate_job.Job(place, policy, **given)
    again.accelerator.load_state(str(place / "step_2"))
    for buffer, was in zip(again.net.buffers(), buffers[2], strict=True):
        expected = was.clone()
        dist.broadcast(expected, 0)
        assert torch.equal(buffer, expected)  # the first one's, all of them
    again.train(losses.__setitem__, done=2, save=[])
    assert losses == {step: loss for step, loss in whole.items() if step > 2}
    assert again.versions is not None
    again.versions.close()


def on_hosts(kind: str, mode: str, to: str) -> None:
    """Save, or resume, by a policy with a disk of each host (`TIERSTATE_HOST`) alone."""
    tiers = f"{{nvme: {{type: nvme, path: '{to}/${{TIERSTATE_HOST}}'}}}}"
    policy = ts.Policy.parse(f"version: 1\narena: {{size: 64MiB}}\ntiers: {tiers}\n")
    if kind == "trainer":
        losses, steps = trainer_job.Losses(), 2 if mode == "save" else 4
        how = {"tier": {"policy": policy}, "max_steps": steps, "ddp_backend": "gloo"}
        trainer_job.trainer(Path(to) / "job", losses, **how).train(mode == "load")
        assert sorted(losses.found) == [steps - 1, steps]
    else:
        load_or_save(policy, mode, f"{to}/step_1")
    if dist.is_initialized():
        dist.destroy_process_group()


def load_or_save(policy: ts.Policy, mode: str, folder: str) -> None:
    """By accelerate, a state of one weight."""
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.constant_(net.weight, 7.0 if mode == "save" else 0.0)
    net = accelerator.prepare(net)
    versions = use(accelerator, policy, "run")
    if mode == "save":
        accelerator.save_state(folder)
    else:
        accelerator.load_state()
    assert bool((accelerator.unwrap_model(net).weight == 7).all())
    versions.close()


def main(kind: str, to: str) -> None:
    folder = Path(to)
    if kind in ("trainer-fsdp2", "fsdp2"):
        shard_on_cpus()
    if kind.startswith("trainer"):
        run_trainer(folder, **FSDP2 if kind == "trainer-fsdp2" else {})
    else:
        run_accelerate(folder, **{"sharded": True} if kind == "fsdp2" else {})
    print("as without interruption", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
