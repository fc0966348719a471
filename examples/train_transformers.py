"""Trains a small GPT-2 with Hugging Face's Trainer on random text; killed at any moment, it goes on bit for bit.

    python examples/train_transformers.py --output out --steps 40

Run it again after a crash, and it resumes from the newest version. ``--kill 25`` kills it at step 25.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from tierstate.integrations.transformers import TierTrainer


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints each loss in hex, so that two runs can be compared bit for bit; kills the process at a step."""

    def __init__(self, kill: int | None) -> None:
        self._kill = kill

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """After each step."""
        if "loss" in logs:
            print(state.global_step, float(logs["loss"]).hex(), flush=True)
        if state.global_step == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The command line."""
    args = arguments()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    tokens = torch.randint(0, 64, (256, 32), generator=torch.Generator().manual_seed(7))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    trainer = TierTrainer(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            save_steps=5,
            save_total_limit=3,
            logging_steps=1,
            per_device_train_batch_size=8,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Report(args.kill)],
        policy=args.policy,
    )
    resume = any(Path(args.output).glob("checkpoint-*"))
    result = trainer.train(resume_from_checkpoint=resume)
    print(f"trained to step {result.global_step}")


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", default="out", help="output_dir of the Trainer")
    parser.add_argument("--policy", help="a policy file; by default all lies in the output folder")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--kill", type=int, help="kill the process at this step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
