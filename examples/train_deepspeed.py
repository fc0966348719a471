"""Trains a small model with DeepSpeed and ZeRO on CPU; killed at any moment, it goes on bit for bit.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/train_deepspeed.py --output out --steps 40

Run it again after a crash, and it resumes from the newest version. ``--kill 25`` kills a rank at step 25.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import deepspeed
import torch

import tierstate as ts
from tierstate.integrations import deepspeed as tiered

BATCH = 8
SAVE_STEPS = 5
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    """The command line."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    policy = args.policy or ts.Policy.default(Path(args.output) / "tierstate")
    tiers = tiered.use(engine, policy, run="small")

    folder = f"{args.output}/checkpoints"
    path, client = engine.load_checkpoint(folder)  # the newest, or (None, None)
    if path is not None:
        torch.set_rng_state(client["rng"][engine.global_rank])  # DeepSpeed saves no random generators
        tell(engine, f"resumed at step {engine.global_steps}")
    while engine.global_steps < args.steps:
        data = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
        x = torch.randn(BATCH, 16, generator=data)
        loss = torch.nn.functional.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        tell(engine, f"{step} {loss.item().hex()}")
        if step % SAVE_STEPS == 0:
            engine.save_checkpoint(folder, client_state={"rng": generators()})
        if step == args.kill:
            tiers.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    tiers.close()  # all saves are finished
    tell(engine, f"trained to step {args.steps}")
    torch.distributed.destroy_process_group()


def generators() -> list[torch.Tensor]:
    """The state of each rank's random generator: the client's state is that of rank 0, for all."""
    mine = torch.get_rng_state()
    found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, mine)
    return found


def tell(engine: deepspeed.DeepSpeedEngine, text: str) -> None:
    """Print on rank 0."""
    if engine.global_rank == 0:
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
