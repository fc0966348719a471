"""Jobs that save one step, or go on from the newest one, for tests of what their tiers are taken for."""

from __future__ import annotations

import tierstate as ts

from .checkpointer_worlds import tensors
from .equality import difference


def save(policy: ts.Policy, step: int, run: str = "run") -> None:
    """One save by a process of its own."""
    with ts.Checkpointer(policy, run) as ckpt:
        ckpt.save(tensors(9000, seed=step), step=step).wait()


def resumed(policy: ts.Policy, run: str = "run") -> int | None:
    """The step that a job of this policy goes on from; None: it starts afresh."""
    state = tensors(9000, seed=99)
    with ts.Checkpointer(policy, run) as ckpt:
        found = ckpt.resume(into=state)
    if found is None:
        assert difference(tensors(9000, seed=99), state) == "", "a fresh start changes nothing"
        return None
    assert difference(tensors(9000, seed=found.step), state) == ""
    return found.step
