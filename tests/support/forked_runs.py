"""Runs in one tier, from which others are forked."""

from __future__ import annotations

import os
from pathlib import Path

from support.checkpointer_worlds import policy, tensors, tier

import tierstate as ts
from tierstate.engine.maintain.sweep import DAY


def one_tier(place: Path, **keys: object) -> ts.Policy:
    return policy({"nvme": tier("nvme", place, **keys)})


def saved(ckpt: ts.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(tensors(9000, 4096, seed=step), step=step, metadata={"loss": step}).wait()


def two_days_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (path.stat().st_mtime - 2 * DAY,) * 2)
