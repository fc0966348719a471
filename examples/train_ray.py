"""Trains a small model with Ray Train on CPU; its worker is killed, and Ray goes on from the last version, bit for bit.

python examples/train_ray.py --output out --steps 40 --kill 25
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import tierstate as ts
from tierstate.integrations.ray import report, restore

SAVE_STEPS = 5


def train(job: dict[str, Any]) -> None:
    """Runs in Ray's worker, and again from the beginning when that was killed."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"step": 0, "model": model, "optimizer": optimizer, "rng": ts.Rng()}
    killed = Path(job["output"]) / "killed"
    policy = job["policy"] or ts.Policy.default(Path(job["output"]) / "tierstate")
    with ts.Checkpointer(policy, run="small") as ckpt, (Path(job["output"]) / "losses.jsonl").open("a") as log:
        found = restore(ckpt, ray.train.get_checkpoint(), state)
        print(json.dumps({"resumed": 0 if found is None else found.step}), file=log, flush=True)
        while state["step"] < job["steps"]:
            state["step"] += 1
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * state["step"]))
            loss = torch.nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(json.dumps({"step": state["step"], "loss": loss.item().hex()}), file=log, flush=True)
            save = ckpt.save(state, step=state["step"]) if state["step"] % SAVE_STEPS == 0 else None
            report({"loss": loss.item()}, save)
            if state["step"] == job["kill"] and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The command line."""
    args = arguments()
    output = Path(args.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    (output / "losses.jsonl").unlink(missing_ok=True)
    ray.init(include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args) | {"output": str(output)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="small", storage_path=f"{output}/ray", failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    ray.shutdown()
    for line in map(json.loads, (output / "losses.jsonl").read_text().splitlines()):
        print(f"{line['step']} {line['loss']}" if "step" in line else f"begins at step {line['resumed']}")
    print(f"trained to step {args.steps}")


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", default="out", help="folder for all that is written")
    parser.add_argument(
        "--policy", type=os.path.abspath, help="a policy file; by default all lies in the output folder"
    )
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--kill", type=int, help="kill the worker at this step, once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
