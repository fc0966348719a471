"""Checks that the tiers of a run are consistent after a crash."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, policy, wrapped

import tierstate as ts
from tierstate.tiers.testing import Recording

State: TypeAlias = dict[str, torch.Tensor]
Tiers: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Keys of a policy's tiers, by name."""

RUN = "run"

CHANCES = st.integers(0, 1 << 32).map(random.Random)
"""What is taken of a recording: by a generator of its own, since recordings of threads are never twice the same."""


def kept(steps: Collection[int], keep: Mapping[str, int]) -> set[int]:
    """Which of the steps ``last`` and ``every`` keep, said in another way than the product does."""
    ordered = sorted(steps)
    last = set(ordered[-keep["last"] :]) if "last" in keep else set()
    first_of: dict[int, int] = {}
    for step in reversed(ordered) if "every" in keep else ():
        first_of[step // keep["every"]] = step
    return {*ordered[-1:], *last, *first_of.values()} if keep else set(ordered)


def opened(stack: ExitStack, recording: Recording, keys: Tiers) -> dict[str, dict[str, Any]]:
    """Recorded tiers as a policy has them, for as long as the stack lasts."""
    return {name: {**stack.enter_context(wrapped(recording.tier(name))), **more} for name, more in keys.items()}


class Past:
    """What was saved in a run, and what somebody relies on.

    Attributes:
        truth: the state of each step.
        told: tier and step of what was said to be durable.
    """

    def __init__(self, truth: Mapping[int, State], told: Iterable[Hashable] = ()) -> None:
        self.truth = dict(truth)
        self.told: set[Hashable] = set(told)

    def check(self, tiers: Tiers) -> None:
        """Each tier alone gives every version that it lists bit for bit, and lists all that it was to keep."""
        for name, keys in tiers.items():
            self.check_one(name, keys)

    def check_one(self, name: str, keys: Mapping[str, Any]) -> None:
        """The same of one tier."""
        with ts.Checkpointer(policy({name: keys}), RUN) as ckpt:
            found = [(version.step, version.id) for version in ckpt.versions()]
            steps = [step for step, _ in found]
            assert len(steps) == len(set(steps)), f"{name}: a step was saved twice: {steps}"
            promised = {step for step in self.truth if (name, step) in self.told}
            lost = (kept(promised | set(steps), keys.get("keep", {})) & promised) - set(steps)
            assert not lost, f"{name}: steps {sorted(lost)} were durable and are lost; there are {steps}"
            report = ckpt.verify(deep=True)
            assert report.ok, report
            for step, version in found:
                assert alike(self.truth[step], ckpt.load(version=version)), f"{name}: step {step} is not what was saved"

    def go_on(self, tiers: Tiers, state: State) -> int:
        """A new process restores the newest version, saves, and that save arrives everywhere; its step."""
        with ts.Checkpointer(policy(tiers), RUN) as ckpt:
            found = [version.step for version in ckpt.versions()]
            if found:
                assert alike(self.truth[max(found)], ckpt.load())
            step = max(self.truth) + 1
            self.truth[step] = {name: tensor.clone() for name, tensor in state.items()}
            save = ckpt.save(state, step=step)
            for name in save.tiers:
                save.wait(name)
                self.told.add((name, step))
            assert set(save.tiers) == set(tiers)
        return step

    def check_all(self, tiers: Tiers, state: State) -> None:
        """All of it: what is found, a save after it, and what there is then."""
        self.check(tiers)
        self.go_on(tiers, state)
        self.check(tiers)
