"""A training job of a few seconds, to be killed: it logs each loss, saves every step, and says what is durable where.

    python job.py POLICY LOG STEPS [--plain]

On standard output: ``ready STEP`` once it has restored, then ``durable TIER STEP`` as soon as that is known.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierstate as ts


def new_state() -> dict[str, Any]:
    """A job at step 0: a frozen part, a trained part with dropout, its optimizer, the generators, a history."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8))
    frozen = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "frozen": frozen, "optimizer": optimizer, "rng": ts.Rng(), "step": 0, "recent": [0.0]}


def train(state: dict[str, Any]) -> float:
    """One step; its loss."""
    with torch.no_grad():
        inputs = state["frozen"](torch.randn(16, 32))
    loss = (state["model"](inputs) ** 2).mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["step"] += 1
    state["recent"] = [*state["recent"][-3:], loss.item()]
    return loss.item()


def tell(pending: list[ts.Save], told: set[tuple[str, int]]) -> None:
    """Say of each save on which tiers it is durable by now."""
    for save in pending:
        for tier in save.tiers:
            if save.done(tier) and (tier, save.step) not in told:
                told.add((tier, save.step))
                print("durable", tier, save.step, flush=True)
    pending[:] = [save for save in pending if not all(save.done(tier) for tier in save.tiers)]


def run(policy: str, log: str, steps: int) -> None:
    """Train up to a step, from the newest version on."""
    state, pending, told = new_state(), [], set()
    with ts.Checkpointer(policy, run="job") as ckpt, open(log, "a", encoding="utf-8") as out:
        with contextlib.suppress(ts.NotFound):
            ckpt.restore(into=state)
        print("ready", state["step"], flush=True)
        while state["step"] < steps:
            loss = train(state)
            out.write(json.dumps([state["step"], loss.hex()]) + "\n")
            out.flush()
            pending.append(ckpt.save(state, step=state["step"], metadata={"loss": loss}))
            if state["step"] % 4 == 0:
                pending[-1].wait()
            tell(pending, told)


def plain(log: str, steps: int) -> None:
    """The same without a Checkpointer."""
    state = new_state()
    rows = []
    while state["step"] < steps:
        loss = train(state)
        rows.append(json.dumps([state["step"], loss.hex()]))
    Path(log).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--plain" in sys.argv:
        plain(sys.argv[2], int(sys.argv[3]))
    else:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
