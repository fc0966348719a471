"""Trains a small model on CPU, with checkpoints of torch_checkpointing in tiers; killed at any moment, it goes on.

    python examples/train_torch_checkpointing.py --output out --steps 40

Run it again after a crash, and it resumes from the newest checkpoint, bit for bit. ``--kill 25`` kills it at step 25.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig

import tierstate as ts
from tierstate.integrations.torch_checkpointing import TierStorageConfig

SAVE_STEPS = 5
FOLDER = Path("checkpoints")


def main() -> None:
    """The command line."""
    args = arguments()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    os.chdir(args.output)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    storage = TierStorageConfig(args.policy or ts.Policy.default("tierstate"), run="small")
    on_cpu = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = CheckpointManager(
        CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=on_cpu),
            items={name: ItemSpec() for name in ("model", "optimizer", "rng", "step")},
            storage_config=storage,
        )
    )
    saved = None
    step = resume(manager, storage, model, optimizer)
    while step < args.steps:
        step += 1
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step))
        loss = torch.nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        with manager.lock():
            optimizer.step()
        print(step, loss.item().hex(), flush=True)
        if step % SAVE_STEPS == 0:
            saved = manager.save(str(FOLDER / f"step_{step}"), state_of(model, optimizer, step))
        if step == args.kill:
            if saved is not None:
                saved.result()
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()  # the last save is finished
    print(f"trained to step {args.steps}")


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What is saved."""
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": step,
    }  # fmt: skip


def resume(
    manager: CheckpointManager, storage: TierStorageConfig, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Restore the newest checkpoint; its step, 0 if there is none."""
    files = storage.create_storage()
    names = files.ls(FOLDER) if files.exists(FOLDER) else []
    steps = [int(name.removeprefix("step_")) for name in names if name.startswith("step_")]
    if not steps:
        return 0
    found = manager.load(FOLDER / f"step_{max(steps)}")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["rng"])
    print(f"resumed at step {found['step']}")
    return int(found["step"])


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", default="out", help="folder for all that is written")
    parser.add_argument(
        "--policy", type=os.path.abspath, help="a policy file; by default all lies in the output folder"
    )
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--kill", type=int, help="kill the process at this step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
