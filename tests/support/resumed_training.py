"""Small training loops for `tierstate.testing.resumes_exactly`: one that is right, and some with a mistake each."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tierstate as ts
from tierstate.testing import record

STEPS = 12
MISTAKE = "TIERSTATE_TEST_MISTAKE"


def train(folder: str, mistake: str = "") -> None:
    """Train, and leave something out of what is saved."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    plain = DataLoader(data, batch_size=4, shuffle=True)
    loader: Any = plain if mistake == "plain loader" else ts.Loader(plain)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"rng": ts.Rng()} | ({} if loader is plain else {"loader": loader})
    state = {name: part for name, part in parts.items() if name != mistake} | {"step": 0}
    watched = {name: part for name, part in parts.items() if name != "rng"}
    with ts.Checkpointer(ts.Policy.default(folder), "run") as ckpt:
        ckpt.resume(into=state)
        step = state["step"]
        while step < STEPS:
            for x, y in loader:
                record(step, **watched)
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                state["step"] = step + 1
                if step % 2:
                    ckpt.save(state, step=step).wait()
                record(step, loss=loss, batch=x)
                step += 1
                if step == STEPS or (mistake == "short" and step == 5):
                    return
                if mistake == "crash" and step == 7:
                    raise RuntimeError("the planted crash")


def ranks(folder: str, mistake: str = "") -> None:
    """One of the ranks of torchrun trains with the others; again with something left out."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(torch.linspace(-1, 1, 80).view(20, 4), torch.linspace(0, 1, 20).view(20, 1))
    loader = ts.Loader(DataLoader(data, batch_size=2, sampler=DistributedSampler(data)))
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "loader": ts.PerRank(loader), "step": 0}
    state |= {} if mistake == "rng" else {"rng": ts.PerRank(ts.Rng())}
    with ts.Checkpointer(ts.Policy.default(folder), "run", dist.group.WORLD) as ckpt:
        ckpt.resume(into=state)
        while state["step"] < STEPS:
            for x, y in loader:
                step = state["step"]
                record(step, model=model, optimizer=optimizer, loader=loader)
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state["step"] = step + 1
                if step % 2:
                    ckpt.save(state, step=step).wait()
                record(step, loss=loss, batch=x)
                if state["step"] == STEPS:
                    break
    dist.destroy_process_group()


def main(folder: str) -> None:
    """The loop, with the mistake that an environment variable names."""
    mistake = os.environ.get(MISTAKE, "")
    if mistake == "unseeded":
        torch.manual_seed = lambda _seed: torch.default_generator  # type: ignore[assignment]
    (ranks if "RANK" in os.environ else train)(folder, mistake)


if __name__ == "__main__":
    main(sys.argv[1])
