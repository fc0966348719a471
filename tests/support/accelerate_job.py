"""A small training loop with Hugging Face's accelerate, to be killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed

from tierstate.integrations.accelerate import AcceleratorVersions, use

EPOCHS = 3
BATCHES = 5
STEPS = EPOCHS * BATCHES


class Net(torch.nn.Module):
    """Two layers, and dropout between them; buffers that differ by rank between forward passes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, width), torch.nn.Linear(width, 4)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training))
        return found


class Seen:
    """A registered object with a state of its own."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


class Job:
    """What a script has made before its loop.

    Args:
        place: the project's folder.
        policy: None for accelerate without tierstate.
        accumulate, mixed_precision, naming, limit, stateful, seedable, workers, sharded: how to train.
        evaluates: also go through a second loader after each second step.
    """

    def __init__(
        self,
        place: Path,
        policy: Any = None,
        *,
        width: int = 32,
        accumulate: int = 1,
        mixed_precision: str = "no",
        naming: bool = False,
        limit: int | None = None,
        stateful: bool = False,
        seedable: bool = True,
        workers: int = 0,
        sharded: bool = False,
        evaluates: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        set_seed(7)
        project = ProjectConfiguration(str(place), automatic_checkpoint_naming=naming, total_limit=limit)
        self.accelerator = Accelerator(
            cpu=True,
            project_config=project,
            gradient_accumulation_steps=accumulate,
            mixed_precision=mixed_precision,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if sharded else None,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable, use_stateful_dataloader=stateful),
        )
        self.place, self.stateful = place, stateful
        self.versions: AcceleratorVersions | None = None
        if policy is not None:
            self.versions = use(self.accelerator, policy, run="job")
        given = torch.Generator().manual_seed(3)
        x, y = torch.randn(BATCHES * 4, 16, generator=given), torch.randint(0, 4, (BATCHES * 4,), generator=given)
        data = torch.utils.data.TensorDataset(x, y)
        net = Net(width)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
        self.net, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            net, optimizer, loader, schedule
        )
        held_out = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        self.held_out = self.accelerator.prepare(held_out) if evaluates else None
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)

    def train(self, after: Callable[[int, str], None], done: int = 0, save: Any = None) -> None:
        """The loop of accelerate's examples, from a step on; ``after`` gets each step and its loss in hex."""
        accelerator, step = self.accelerator, done
        for epoch in range(done // BATCHES, EPOCHS):
            skip = done % BATCHES if epoch == done // BATCHES and not self.stateful else 0
            active = accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
            for x, y in active:
                with accelerator.accumulate(self.net):
                    noise = 0.01 * torch.randn_like(x)  # as in the training of diffusion models
                    loss = torch.nn.functional.cross_entropy(self.net(x + noise).float(), y)
                    accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.seen.samples += len(x)
                step += 1
                if self.held_out is not None and step % 2 == 0:
                    for _ in self.held_out:
                        pass
                if (save is None or step in save) and self.versions is not None:
                    naming = accelerator.project_configuration.automatic_checkpoint_naming
                    accelerator.save_state(None if naming else str(self.place / f"step_{step}"))
                after(step, loss.item().hex())


def run(job: dict[str, Any]) -> None:
    """Train in a process that is killed after a step."""
    place = Path(job["place"])

    def after(step: int, loss: str) -> None:
        with (place.parent / "log.jsonl").open("a") as out:
            out.write(json.dumps([step, loss]) + "\n")
        if step == job["kill"]:
            while not (place / job["wait"]).exists():
                time.sleep(0.01)  # a step takes less time than a write, and something has to be durable
            os.kill(os.getpid(), signal.SIGKILL)

    place.mkdir(exist_ok=True)
    Job(place, job["policy"], **job["given"]).train(after, save=job.get("save"))
