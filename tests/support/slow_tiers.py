"""A tier of a cascade that a test breaks and mends, and what was saved in it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from support.checkpointer_worlds import faulty, tensors

import tierstate as ts
from tierstate.manifest.format.version import Version
from tierstate.tiers.latch import Completion

GONE = ts.TierUnavailable("the switch is gone", tier="slow")


def steps(ckpt: ts.Checkpointer, name: str) -> list[int]:
    return [v.step for v in ckpt.versions() if name in v.tiers]


def failed(save: ts.Save, name: str = "slow") -> None:
    with pytest.raises(ts.TierUnavailable, match="gone"):
        save.wait(name)


def state(step: int) -> dict[str, Any]:
    return tensors(9000, 4096, seed=step)


def tables(run: str) -> int:
    """Versions of a run that are in memory."""
    gc.collect()
    return sum(type(o) is Version and o.head.run == run for o in gc.get_objects())


class Lingering(Completion):
    """An outcome after which the thread that tells it does nothing more for now."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def _set(self, error: BaseException | None) -> None:
        super()._set(error)
        assert self._gate.wait(120)


def lingering(ckpt: ts.Checkpointer, slow: dict[str, Any], step: int) -> tuple[ts.Save, threading.Event]:
    """A save after whose outcome the slow tier's thread lingers, until the event that is returned is set."""
    begin, go_on = faulty(slow).shut("writer"), threading.Event()
    save = ckpt.save(state(step), step=step)
    save._save_state.tiers["slow"] = Lingering(go_on)
    faulty(slow).gates.clear()
    begin.set()
    return save, go_on
