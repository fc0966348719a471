"""A training job that is preempted: ``python -m support.preempted_job FOLDER KIND``.

KIND says how it ends: ``plain`` never asks whether it is preempted, nor does ``planned``, in which the signal comes
before anything of the save is captured; ``asks`` does after each step, saves once more and
ends by itself. Each may have a handler of its own for SIGTERM before: ``plain-handler``, ``asks-handler``,
``plain-ignore``. ``hung`` has a slowest tier that never takes anything, ``hung-long`` with more grace, ``rare`` only
tiers that are seldom due.
Prints what has been told to be saved, and how it ended.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from support.slow_values import Fill

import tierstate as ts
from tierstate.tiers.posix.directory import Directory

POLICY = """
version: 1
chunk: 64KiB
arena: {{size: 4MiB}}
preemption: {{signals: [SIGTERM, USR1], grace: {grace}s}}
tiers:
  host: {{type: host, capacity: 16MiB, keep: {{last: 2}}}}
  nvme: {{type: nvme, path: "{place}/nvme", every: {every}}}
  far: {{type: object, url: "file://{place}/far", every: {every}}}
"""

NBYTES = 512 << 10

GRACE = {"hung": 3, "hung-long": 600}
"""Seconds, where they are not 200: so many that no save takes as long, on whatever machine."""


def policy(place: Path, every: int = 1, grace: float = 200) -> ts.Policy:
    """The job's policy."""
    return ts.Policy.parse(POLICY.format(place=place, every=every, grace=grace))


def state(step: int) -> dict[str, Any]:
    """What the job has at a step."""
    return {"w": torch.full((NBYTES // 8,), step), "step": step}


def say(*words: object) -> None:
    """Print at once."""
    print(*words, flush=True)


def hang_far_tier() -> None:
    """From now on no record reaches the slowest tier."""
    put = Directory.put

    def stuck(tier: Directory, key: str, data: Any) -> None:
        if tier.name == "far" and key.startswith("versions"):
            time.sleep(3600)
        put(tier, key, data)

    Directory.put = stuck  # type: ignore[method-assign]


def save_slowly(ckpt: ts.Checkpointer, step: int) -> None:
    """A save that says ``now`` while it is captured."""
    begun = threading.Event()

    def slow(out: torch.Tensor) -> None:
        begun.set()
        time.sleep(0.01)
        out.fill_(7)

    def tell() -> None:
        begun.wait()
        say("now")

    threading.Thread(target=tell, daemon=True).start()
    ckpt.save({**state(step), "slow": Fill(1 << 20, slow)}, step=step)
    say("saved", step)


class Planned(Fill):
    """So many bytes, of which it says ``now`` that they are about to be saved."""

    def __state_provider__(self) -> ts.Provider:
        say("now")
        time.sleep(0.5)
        return super().__state_provider__()


HANDLED = threading.Event()


def handle(*_: object) -> None:
    """The job's own handler."""
    say("handled")
    HANDLED.set()


def goes_on(ckpt: ts.Checkpointer, kind: str) -> bool:
    """Whether the job makes another step."""
    if kind.startswith("asks"):
        return not ckpt.preempted
    watch = ckpt._preemption
    return watch is None or not (HANDLED.is_set() or (kind == "plain-ignore" and watch.over))


def main(folder: str, kind: str) -> None:
    """The job."""
    if kind.endswith("handler"):
        signal.signal(signal.SIGTERM, handle)
    if kind.endswith("ignore"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind.startswith("hung"):
        hang_far_tier()
    spec = policy(Path(folder), every=1000 if kind == "rare" else 1, grace=GRACE.get(kind, 200))
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(0), step=0).wait()
        if kind == "planned":
            ckpt.save({**state(1), "slow": Planned(1 << 20, lambda out: out.fill_(7))}, step=1)
        else:
            save_slowly(ckpt, 1)
        while goes_on(ckpt, kind):
            time.sleep(0.05)
        if kind.startswith("asks"):
            ckpt.save(state(2), step=2)
            say("saved", 2)
    say("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
