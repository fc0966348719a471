"""Processes that save, read and prune one run concurrently: ``python concurrent_processes.py ROLE POLICY N``.

``save`` saves N steps; ``die`` saves one, and is killed after its packs and before its record are written; ``read``
restores N times; ``hold`` is killed while it reads; ``prune`` prunes N times. A failure ends the process with an error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch

import tierstate as ts
from tierstate.engine.maintain.repack import repack
from tierstate.engine.store import catalog
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import Range
from tierstate.tiers.posix.directory import Nvme

GRACE = 600.0
"""Seconds: longer than any save here takes, however slow the machine; what is to be swept is made old by the test."""

WIN = 2_000


def state(step: int) -> dict[str, torch.Tensor]:
    """Leaves that change every 1, 2, 3, 5 and 50 steps, in chunks of their own."""
    return {f"every {n}": torch.full((3_000,), float(step // n)) + torch.arange(3_000) for n in (1, 2, 3, 5, 50)}


def check(found: dict[str, torch.Tensor], step: int) -> None:
    """What was restored is what was saved at that step."""
    wanted = state(step)
    assert list(found) == list(wanted), step
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), step


class Fatal(Nvme):
    """Kills its process when a record is put, or a pack is read."""

    fatal = "record"

    def put(self, key: str, data: Buffer) -> None:
        if self.fatal == "record" and key.startswith("versions/"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(key, data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        if self.fatal == "pack" and key.startswith("packs/"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().read(key, ranges)


def save(ckpt: ts.Checkpointer, count: int) -> None:
    """Save so many steps, from the newest on."""
    first = max((v.step for v in ckpt.versions()), default=-1) + 1
    for step in range(first, first + count):
        ckpt.save(state(step), step=step).wait()


def read(ckpt: ts.Checkpointer, count: int) -> None:
    """Restore the newest version, or the oldest, which may be dropped just then."""
    for number in range(count):
        if number % 2:
            try:
                step = ckpt.versions()[0].step
                check(ckpt.load(step=step), step)
            except ts.NotFound:
                continue
        else:
            found = ckpt.load()
            assert ckpt.restored is not None
            check(found, ckpt.restored.step)


def prune(ckpt: ts.Checkpointer, count: int) -> None:
    """Prune, with more repacking than is usual."""
    for _ in range(count):
        report = ckpt.prune(grace=GRACE)
        # That records or leases changed all the time is no harm; that one could not be read would be.
        told = [p for t in report.tiers for p in t.problems if "did not stay the same" not in p and "leases/" not in p]
        assert not told, told
        for tier_run in ckpt._tier_runs:
            done = repack(tier_run, win=WIN)
            print("repacked", len(done.versions), done.reason, flush=True)


def main(role: str, policy: str, count: int) -> None:
    """One process."""
    catalog.LEASE_FROM = 0  # states are short here, and held all the same
    if role in ("die", "hold"):
        Fatal.fatal = "record" if role == "die" else "pack"
        ts.register_tier("nvme", Fatal)
    with ts.Checkpointer(policy, "run") as ckpt:
        {"save": save, "die": save, "read": read, "hold": read, "prune": prune}[role](ckpt, count)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
