"""Runs in one tier, from which others are forked."""

from __future__ import annotations

import os
from pathlib import Path

from support.checkpointer_worlds import names, opened, policy, tensors, tier

import tierstate as ts
from tierstate.engine.maintain.sweep import DAY
from tierstate.tiers.base import Tier


def one_tier(place: Path, **keys: object) -> ts.Policy:
    return policy({"nvme": tier("nvme", place, **keys)})


def saved(ckpt: ts.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(tensors(9000, 4096, seed=step), step=step, metadata={"loss": step}).wait()


def forked(place: Path) -> tuple[ts.Policy, Tier, str]:
    """A run of one version, of which ``run-b`` is a fork: the policy, the tier, and the key of the fork's pin."""
    spec = one_tier(place, keep={"last": 1})
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("run-b")
    nvme = opened(spec, "nvme")
    (pin,) = names(nvme, "leases/run/")
    return spec, nvme, pin


def two_days_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (path.stat().st_mtime - 2 * DAY,) * 2)
