"""Ranks that restore together, one of which reads too slowly: ``support.straggler_jobs:restore FOLDER HOW``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpointer_worlds import alike, policy, tensors

import tierstate as ts
from tierstate.tiers.base import Range
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.registry import register_tier
from tierstate.tiers.wrappers.base import Wrapping

VICTIM = 1
STATE = tensors(400_000, 4_000)
PAUSE = 0.5
"""Seconds that each read of a slow rank takes."""


class Straggling(Wrapping):
    """A folder that all ranks see, of which one rank cannot read packs for the time being.

    Args:
        path: the folder.
        how: ``hangs`` until there is a file ``go``; the rank ``stops`` by a signal, once; each read is ``slow``.
    """

    def __init__(self, *, path: str, how: str) -> None:
        super().__init__(Directory(Path(path)))
        self._path, self._how = Path(path), how

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Be late."""
        if self._how and key.startswith("packs/"):
            if self._how == "hangs":
                while not (self._path / "go").exists():
                    time.sleep(0.02)
            elif self._how == "slow":
                time.sleep(PAUSE)
            else:
                self._how = ""
                os.kill(os.getpid(), signal.SIGSTOP)
        super().read(key, ranges)


def restore(folder: str, how: str) -> None:
    """Save, restore with a straggler, and say who was late and whether all came back."""
    logging.basicConfig(stream=sys.stdout, format="log %(message)s", force=True)
    register_tier("straggling", Straggling)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tiers = {"shared": {"type": "straggling", "path": f"{folder}/shared", "how": how if rank == VICTIM else ""}}
    with ts.Checkpointer(policy(tiers), "run", dist.group.WORLD) as ckpt:
        ckpt.on("rank_late", lambda event: print(f"event {event.reason}", flush=True))
        ckpt.save(STATE, step=1).wait()
        dist.barrier()
        began = time.monotonic()
        into = {name: torch.zeros_like(value) for name, value in STATE.items()}
        ckpt.restore(into=into)
        print(f"restored {time.monotonic() - began:.1f} {alike(into, STATE)}", flush=True)
        dist.barrier()
        (Path(folder) / "shared" / "go").touch()
        # What a read that has hung brings after the restore does not change the state.
        for value in into.values():
            value.fill_(7)
        time.sleep(0.5)
        assert all(bool(value.eq(7).all()) for value in into.values())
    dist.destroy_process_group()
