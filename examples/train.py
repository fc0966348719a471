"""Trains a small GPT on the sources of Python's standard library; killed at any moment, it goes on bit for bit.

    python examples/train.py --policy examples/policy.yaml --run gpt --steps 200 --every 10 --log loss.jsonl

Run it again after a crash, and it resumes from the newest version that is whole on any tier. With ``--device cuda`` it
trains on a GPU, with ``--lazy`` saves are captured while the next step's forward and backward pass run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import tierstate as ts

SEED = 7
LENGTH = 64
BATCH = 8
WARMUP = 20
HORIZON = 2000
"""Step at which the learning rate has come down to a tenth. It does not depend on how long one run is."""


class Shuffled:
    """Batches of a text, cut into windows that come in a new order each epoch.

    Its state is its position and the generator's state from which this epoch's order was drawn.
    """

    def __init__(self, text: Tensor, seed: int) -> None:
        self._windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        self._generator = torch.Generator().manual_seed(seed)
        self._start_epoch(0)

    def batch(self) -> Tensor:
        """The next windows: bytes as integers, ``(BATCH, LENGTH + 1)``."""
        if self._position + BATCH > len(self._order):
            self._start_epoch(self._epoch + 1)
        rows = self._order[self._position : self._position + BATCH]
        self._position += BATCH
        return self._windows[rows].long()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; a few kilobytes, whatever the length of the text."""
        return {"epoch": self._epoch, "position": self._position, "generator": self._drawn_from}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._generator.set_state(state["generator"])
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._drawn_from = self._generator.get_state()
        self._order = torch.randperm(len(self._windows), generator=self._generator)


def library_text(limit: int = 4_000_000) -> Tensor:
    """The first bytes of the standard library's top-level modules, in order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass
class Job:
    """All that training changes."""

    model: GPT
    optimizer: AdamW
    schedule: LambdaLR
    data: Shuffled
    step: int = 0

    def state(self) -> dict[str, Any]:
        """What is saved: the same objects, so that restoring into it restores the job."""
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "data": self.data}
        return {**parts, "rng": ts.Rng(), "step": self.step}


def new_job(device: str = "cpu") -> Job:
    """A job at step 0, the same each time on one kind of device: seeds, threads and algorithms are fixed."""
    # cuBLAS is deterministic only with a workspace of fixed size, which is asked for before its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device != "cpu":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    # With two, two trainings that were never interrupted have been seen to differ in their last bits.
    torch.set_num_threads(1)
    model = GPT(LENGTH).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return Job(model, optimizer, LambdaLR(optimizer, learning_rate), Shuffled(library_text(), SEED))


def learning_rate(step: int) -> float:
    """Share of the highest rate: up in a line, then down along a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    along = min(1.0, (step - WARMUP) / (HORIZON - WARMUP))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * along))


def train(job: Job, steps: int, after: Callable[[float], None]) -> None:
    """Train up to a step, counted from the job's beginning; ``after`` is called with the loss after each."""
    job.model.train()
    while job.step < steps:
        loss = job.model.loss(job.data.batch().to(job.model.position.weight.device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        job.schedule.step()
        job.step += 1
        after(loss.item())


def resume(ckpt: ts.Checkpointer, job: Job) -> None:
    """Restore the newest version into the job, where there is one."""
    found = ckpt.resume(into=job.state())
    if found is None:
        print("no version yet: starting at step 0", flush=True)
    else:
        job.step = found.step
        print(f"resumed at step {job.step}", flush=True)


def main() -> None:
    """The command line."""
    args = arguments()
    job = new_job(args.device)
    with (
        ts.Checkpointer(ts.Policy.load(args.policy), run=args.run) as ckpt,
        open(args.log, "a", encoding="utf-8") as log,
    ):
        if args.resume == "auto":
            resume(ckpt, job)
        if args.lazy:
            ckpt.guard(job.optimizer)

        def after(loss: float) -> None:
            # In hex, so that two runs can be compared bit for bit.
            log.write(json.dumps({"step": job.step, "loss": loss.hex()}) + "\n")
            log.flush()
            if job.step % args.every == 0 or job.step == args.steps:
                ckpt.save(job.state(), step=job.step, metadata={"loss": loss})

        train(job, args.steps, after)
    if args.stats:
        Path(args.stats).write_text(json.dumps(asdict(ckpt.stats())), encoding="utf-8")


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", default=str(Path(__file__).with_name("policy.yaml")), help="a policy file")
    parser.add_argument("--run", default="gpt", help="name of the run")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="save after each multiple of so many steps")
    parser.add_argument("--log", default="loss.jsonl", help="file to which a line is added after each step")
    parser.add_argument("--stats", help="file for what the Checkpointer did, as JSON")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda where there is a GPU")
    parser.add_argument("--lazy", action="store_true", help="capture saves beside the next step")
    parser.add_argument("--resume", choices=["auto", "never"], default="auto", help="whether to look for a version")
    return parser.parse_args()


if __name__ == "__main__":
    main()
