"""Trains a small model with FSDP2 on CPU, saved by torch.distributed.checkpoint into tiers; killed, it goes on.

    torchrun --nproc-per-node 2 examples/train_dcp.py --output out --steps 40

Run it again after a crash, and it resumes from the newest version, bit for bit. ``--kill 25`` kills the ranks at step
25.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierstate as ts
import tierstate.dcp
from tierstate.dcp import TierReader, TierStager, TierWriter

RUN = "small"
SAVE_STEPS = 5


def main() -> None:
    """The command line."""
    args = arguments()
    policy = args.policy or ts.Policy.default(Path(args.output) / "tierstate")
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stager = TierStager(
        guard=optimizer
    )  # parameters and moments are copied during the next step's forward and backward
    background = dist.new_group(backend="gloo")  # gloo cannot save on a group on which the training goes on
    step, saved = resume(policy, model, optimizer), None
    while step < args.steps:
        step += 1
        tell(f"{step} {learn(model, optimizer, step).hex()}")
        if step % SAVE_STEPS == 0:
            finish(saved)  # two saves at once would mix their messages in one group
            writer = TierWriter(policy, RUN, process_group=background)
            state = state_of(model, optimizer, step)
            saved = dcp.async_save(
                state, checkpoint_id=step, storage_writer=writer, async_stager=stager, process_group=background
            )
        if step == args.kill:
            finish(saved)
            os.kill(os.getpid(), signal.SIGKILL)
    finish(saved)
    stager.close()
    tierstate.dcp.close()
    tell(f"trained to step {args.steps}")
    dist.destroy_process_group()


def finish(saved: Any) -> None:
    """Wait until a save is durable, if there is one."""
    if saved is not None:
        saved.upload_completion.result()


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step; the loss on all ranks."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean.item()) / dist.get_world_size()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What is saved, and what a load fills."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def resume(policy: ts.Policy | str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest version; its step, 0 if there is none."""
    with ts.Checkpointer(policy, RUN) as ckpt:
        if not ckpt.versions():
            return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=TierReader(policy, RUN))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    tell(f"resumed at step {state['step']}")
    return int(state["step"])


def tell(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", default="out", help="folder for all that is written")
    parser.add_argument("--policy", help="a policy file; by default all lies in the output folder")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--kill", type=int, help="kill the ranks at this step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
