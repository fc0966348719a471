"""A small training by Lightning, which can be killed: ``python -m support.lightning_job FOLDER KIND [KILL_AFTER]``.

The losses of all steps are appended to ``losses.txt`` in the folder, one line ``step loss`` each, in full precision.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import tierstate as ts
from tierstate.integrations.lightning import RngState, TierCheckpointIO

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

BATCHES = 10
EPOCHS = 3


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8, dtype=torch.float32) * (index + 1))


class Small(pl.LightningModule):
    def __init__(self, width: int = 16, losses: str = "", kill_after: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 8)
        )
        self._losses, self._kill_after = losses, kill_after

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.log("score", float((self.global_step * 7) % 5))
        if self._losses:
            with open(self._losses, "a", encoding="utf-8") as file:
                file.write(f"{self.global_step} {loss.item().hex()}\n")
        if self.global_step == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


def loader(kind: str = "steps") -> Any:
    """For checkpoints within an epoch one that saves its position; at its end that one begins the next epoch anew, with
    Lightning's own checkpoints too, and the plain one draws the next order from the generator."""
    made = torch.utils.data.DataLoader if kind == "epochs" else StatefulDataLoader
    return made(Points(), batch_size=4, shuffle=True)


def policy(folder: Path) -> ts.Policy:
    """Two tiers that last. No file: ranks would write it while others read it."""
    tiers = [f"  {name}: {{type: nvme, path: {folder / name}}}\n" for name in ("fast", "slow")]
    return ts.Policy.parse("version: 1\narena: {size: 64MiB}\ntiers:\n" + "".join(tiers))


def trainer(folder: Path, *callbacks: Any, **more: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "plugins": [TierCheckpointIO(policy(folder), run="small")],
        "callbacks": [*callbacks, RngState()],
    }
    return pl.Trainer(**{**given, **more})


def checkpoints(folder: Path, kind: str, **more: Any) -> ModelCheckpoint:
    when: dict[str, Any] = {"every_n_train_steps": 3} if kind != "epochs" else {"every_n_epochs": 1}
    last = "link" if kind == "link" else True
    given = {"monitor": "score", "save_top_k": 2, "save_last": last, "filename": "{step}", **when, **more}
    return ModelCheckpoint(folder / "ckpt", **given)


def main(folder: Path, kind: str, kill_after: int = -1) -> None:
    pl.seed_everything(5, verbose=False)
    torch.set_num_threads(1)
    model = Small(losses=str(folder / "losses.txt"), kill_after=kill_after)
    job = trainer(folder, checkpoints(folder, kind))
    job.fit(model, loader(kind), ckpt_path="last")
    print("ended", job.global_step, flush=True)


def ddp(folder: str, epochs: str = "3") -> None:
    """One of two ranks; at the end each adds a line with what its weights and its generator are."""
    pl.seed_everything(5, verbose=False)
    torch.set_num_threads(1)
    place, model = Path(folder), Small()
    job = trainer(
        place,
        checkpoints(place, "epochs"),
        strategy="ddp",
        devices=2,
        max_epochs=int(epochs),
        use_distributed_sampler=True,
    )
    torch.manual_seed(job.global_rank)
    data = torch.utils.data.DataLoader(Points(), batch_size=4, shuffle=True)
    job.fit(model, data, ckpt_path="last")
    weights = sum(float(p.double().sum()) for p in model.parameters())
    with (place / "ends.txt").open("a", encoding="utf-8") as file:
        file.write(f"{job.global_step} rank {job.global_rank}: {weights.hex()} {float(torch.rand(1)).hex()}\n")


def run(folder: str, kind: str, *killed_at: str) -> None:
    main(Path(folder), kind, *map(int, killed_at))
