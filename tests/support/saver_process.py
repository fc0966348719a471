"""A process that saves through a policy, and is killed: ``python saver_process.py POLICY STEP MIB [SEED]``.

It prints ``saving``, and ``durable TIER`` for each tier of the policy as soon as the save is durable there.
"""

from __future__ import annotations

import sys

import torch

import tierstate as ts


def state(mib: int, seed: int) -> dict[str, torch.Tensor]:
    """A state of so many MiB in four tensors, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(mib << 16, generator=generator) for i in range(4)}


def run(policy: str, step: int, mib: int, seed: int) -> None:
    """Save one state, and wait for every tier."""
    with ts.Checkpointer(policy, run="run") as ckpt:
        print("saving", flush=True)
        save = ckpt.save(state(mib, seed), step=step)
        for tier in save.tiers:
            save.wait(tier)
            print("durable", tier, flush=True)


if __name__ == "__main__":
    run(sys.argv[1], *map(int, sys.argv[2:5]))
