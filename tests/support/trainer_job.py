"""A small training by Hugging Face's Trainer, to be killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tierstate.integrations.transformers import TierTrainer

STEPS = 12
SAMPLES = 40
"""With batches of 4: an epoch of 10 steps, so that 12 steps reach into a second one."""


class Net(torch.nn.Module):
    """Two layers and dropout, whose masks depend on the state of the random generator."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 4)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.body(x)
        return {"loss": torch.nn.functional.cross_entropy(out.float(), labels), "logits": out}


def samples() -> list[dict[str, torch.Tensor]]:
    given = torch.Generator().manual_seed(3)
    x, labels = torch.randn(SAMPLES, 16, generator=given), torch.randint(0, 4, (SAMPLES,), generator=given)
    return [{"x": x[i], "labels": labels[i]} for i in range(SAMPLES)]


class Losses(TrainerCallback):
    """What was logged, by step, to the last bit; also in a file, which survives the process."""

    def __init__(
        self, file: Path | None = None, kill: int | None = None, number: int = signal.SIGKILL, wait: str | None = None
    ) -> None:
        self.file, self.kill, self.number, self.wait = file, kill, number, wait
        self.found: dict[int, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found[state.global_step] = float(logs["loss"]).hex()
            if self.file is not None:
                with self.file.open("a") as out:
                    out.write(json.dumps([state.global_step, self.found[state.global_step]]) + "\n")
        if state.global_step == self.kill:
            while self.wait and not Path(args.output_dir, self.wait).exists():
                time.sleep(0.01)  # a step takes less time than a write, and something has to be durable
            os.kill(os.getpid(), self.number)


def arguments(output: Path, **given: Any) -> TrainingArguments:
    known: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 5,
    }
    return TrainingArguments(**known | given)


def trainer(
    output: Path,
    losses: Losses | None = None,
    kind: type[Trainer] = TierTrainer,
    model: torch.nn.Module | None = None,
    tier: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """A trainer of this kind, with what `TierTrainer` takes beside in ``tier``."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return kind(
        model=model or Net(),
        args=arguments(output, **given),
        train_dataset=samples(),
        eval_dataset=samples()[:8],
        callbacks=[] if losses is None else [losses],
        **tier or {},
    )


def run(job: dict[str, Any]) -> None:
    """Train with these values, in a process that may be killed."""
    losses = Losses(Path(job["log"]), job.get("kill"), signal.Signals[job.get("signal", "SIGKILL")], job.get("wait"))
    trainer(Path(job["output"]), losses, tier=job.get("tier"), **job.get("arguments", {})).train(job.get("resume"))
