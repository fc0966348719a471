"""Trains a small model in a loop of Hugging Face's accelerate; killed at any moment, it goes on bit for bit.

    python examples/train_accelerate.py --output out --steps 40

Run it again after a crash, and it resumes from the newest version. ``--kill 25`` kills it at step 25.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import tierstate as ts
from tierstate.integrations.accelerate import use

BATCH = 8
SAMPLES = 128
SAVE_STEPS = 5


def main() -> None:
    """The command line."""
    args = arguments()
    torch.set_num_threads(1)
    set_seed(7)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    versions = use(accelerator, args.policy or ts.Policy.default(Path(args.output) / "tierstate"), run="small")

    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(7)))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    if versions.ckpt.versions():
        accelerator.load_state()  # the newest
        step = versions.ckpt.info().step
        print(f"resumed at step {step}", flush=True)
    while step < args.steps:
        for (x,) in accelerator.skip_first_batches(loader, step % len(loader)) if step % len(loader) else loader:
            loss = torch.nn.functional.mse_loss(model(x), x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(step, loss.item().hex(), flush=True)
            if step % SAVE_STEPS == 0:
                accelerator.save_state(f"{args.output}/step_{step}")
            if step == args.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.steps:
                break
    accelerator.end_training()  # all saves are finished
    print(f"trained to step {step}")


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", default="out", help="folder for all that is written")
    parser.add_argument("--policy", help="a policy file; by default all lies in the output folder")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--kill", type=int, help="kill the process at this step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
