"""A training by Lightning that is killed and goes on: ``python examples/lightning_resume.py``, some seconds on a CPU.

Needs ``pip install 'tierstate[lightning]' torchdata``. It trains once without an interruption. Then it trains again
in a process that kills itself in the middle, and resumes that by ``ckpt_path="last"``: every later loss is the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from tierstate.integrations.lightning import RngState, TierCheckpointIO

POLICY = """
version: 1
tiers:
  nvme: {{type: nvme, path: {folder}/nvme}}
  slow: {{type: nvme, path: {folder}/slow, every: 20}}
"""
STEPS, KILL_AT = 60, 37


class Denoise(pl.LightningModule):  # type: ignore[misc]
    """Removes noise from sine waves; with dropout, so that the generators matter."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32)
        )
        self.losses: dict[int, float] = {}
        self._kill_at = kill_at

    def training_step(self, wave: Tensor, index: int) -> Tensor:
        """The loss of a batch, ``(8, 32)``."""
        if self.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.net(wave + 0.1 * torch.randn_like(wave)) - wave).square().mean()
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(folder: Path, kill_at: int = -1) -> dict[int, float]:
    """Train in a folder, from its last checkpoint on if there is one. Returns the loss of each step."""
    (folder / "policy.yaml").write_text(POLICY.format(folder=folder))
    pl.seed_everything(7, verbose=False)
    torch.set_num_threads(1)
    waves: Any = [torch.sin(torch.arange(32) * 0.05 * (n + 1)) for n in range(160)]
    model = Denoise(kill_at)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[TierCheckpointIO(folder / "policy.yaml", run="denoise")],
        callbacks=[
            ModelCheckpoint(folder / "ckpt", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=10),
            RngState(),
        ],
    )
    trainer.fit(model, StatefulDataLoader(waves, batch_size=8, shuffle=True), ckpt_path="last")
    return model.losses


def main() -> None:
    """Train, kill, resume, compare."""
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), KILL_AT)
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place, "whole"), Path(place, "killed")
        whole.mkdir()
        killed.mkdir()
        truth = train(whole)
        done = subprocess.run([sys.executable, __file__, str(killed)], check=False, capture_output=True)
        print(f"killed in step {KILL_AT} (status {done.returncode})")
        again = train(killed)
        print(f"resumed at step {min(again)}")
        same = all(truth[step] == loss for step, loss in again.items())
        print("Every later loss is the same, to the last bit." if same else "The losses differ.")
        sys.exit(not same)


if __name__ == "__main__":
    main()
