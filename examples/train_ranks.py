"""Trains the small GPT on many ranks, with FSDP2 and tensor parallelism; goes on with any other number of ranks.

    torchrun --nproc-per-node 4 examples/train_ranks.py --tensor 2 --steps 200 --losses loss.jsonl

After a crash run it again, also with other numbers: `--nproc-per-node 2 --tensor 1`, say.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from train import LENGTH, SEED, Shuffled, learning_rate, library_text

import tierstate as ts


def new_model(mesh: DeviceMesh) -> GPT:
    """The model, each perceptron split over the mesh's ``tensor`` ranks, and all of it sharded over its ``data`` ranks.

    Without dropout, so that the losses of any number of ranks can be compared.
    """
    torch.manual_seed(SEED)
    model = GPT(LENGTH, dropout=0.0).to(mesh.device_type)
    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


class Job:
    """All that training changes, and how one step of it is done.

    Args:
        mesh: the ranks, as ``(data, tensor)``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.step = mesh, 0
        self.model = new_model(mesh)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, learning_rate)
        self.data = Shuffled(library_text(), SEED)

    def state(self) -> dict[str, Any]:
        """What is saved: sharded tensors are known as such, everything else is the same on all ranks, but for the
        random generators: each rank has its own. A rank that was not there before keeps those it has."""
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "data": self.data}
        return {**parts, "rng": ts.PerRank(ts.Rng(), missing="keep"), "step": self.step}

    def advance(self) -> float:
        """One step on the batch that all ranks draw, of which each row of the mesh takes its part; the mean loss."""
        data = self.mesh["data"]
        rows = self.data.batch().chunk(data.size())[data.get_local_rank()].to(self.mesh.device_type)
        loss = self.model.loss(rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.step += 1
        mean = loss.detach() / data.size()
        dist.all_reduce(mean, group=data.get_group())
        return float(mean)


@contextmanager
def ranks(tensor: int) -> Iterator[DeviceMesh]:
    """The process group that torchrun has prepared, as a mesh of ``tensor`` columns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        size = dist.get_world_size()
        yield init_device_mesh(device, (size // tensor, tensor), mesh_dim_names=("data", "tensor"))
    finally:
        dist.destroy_process_group()


def train(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Resume where there is something to resume from, and train up to ``args.steps``."""
    job = Job(mesh)
    with ts.Checkpointer(args.policy, run=args.run, process_group=dist.group.WORLD) as ckpt:
        ckpt.guard(job.optimizer)
        if (found := ckpt.resume(into=job.state())) is not None:
            job.step = found.step
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks start at step {job.step}", flush=True)
        while job.step < args.steps:
            loss = job.advance()
            if dist.get_rank() == 0:
                with open(args.losses, "a", encoding="utf-8") as log:
                    log.write(json.dumps({"step": job.step, "loss": loss}) + "\n")
            if job.step % args.every == 0 or job.step == args.steps:
                ckpt.save(job.state(), step=job.step, metadata={"loss": loss})


def main() -> None:
    """The command line."""
    args = arguments()
    torch.set_num_threads(1)
    with ranks(args.tensor) as mesh:
        train(mesh, args)


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", default=str(Path(__file__).with_name("ranks.yaml")), help="a policy file")
    parser.add_argument("--run", default="gpt", help="name of the run")
    parser.add_argument("--tensor", type=int, default=1, help="ranks over which each perceptron is split")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="save after each multiple of so many steps")
    parser.add_argument("--losses", default="loss.jsonl", help="file to which a line is added after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
