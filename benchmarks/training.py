"""A training loop: blocks of steps without saves and with saves, taking turns in one process."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field

import torch

from benchmarks.competitor import Competitor, Pending
from benchmarks.gauge import settle
from benchmarks.state import VOCABULARY, State

TOKENS = 192
"""Tokens of one batch: so many that a step of a 45 million parameter model is bound by computing, as training is."""
STEPS = 5
"""Steps of one block."""


@dataclass
class Training:
    """What was found.

    Attributes:
        quiet, saving: seconds of each step, save calls included, of blocks without and with saves.
        blocked: seconds of each call of save.
        waited: seconds that optimizer steps waited, all together.
        drained: seconds from the end of each block with saves until all was durable; no part of the steps.
        threads: torch's.
    """

    quiet: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    waited: float = 0.0
    drained: list[float] = field(default_factory=list)
    threads: int = 0


class Trainer:
    """Takes steps.

    Args:
        state: its module is trained by its optimizer.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        """Forward, backward, and the optimizer's step."""
        tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=self._generator).to(self.state.device)
        self.state.optimizer.zero_grad()
        self.state.model(tokens).backward()
        self.state.optimizer.step()
        self.state.values["step"] += 1
        settle()


def train(competitor: Competitor, state: State, every: int, blocks: int) -> Training:
    """Take turns between blocks of steps, after a block and a save that only warm up."""
    found = Training(threads=max(1, (os.cpu_count() or 2) - 1))
    torch.set_num_threads(found.threads)
    trainer, saver = Trainer(state), Saver(competitor, state)
    competitor.open(state)
    for _ in range(2):
        trainer.step()
    saver.save()
    saver.drain()
    waited, saver.blocked = competitor.waited(), found.blocked
    for block in range(2 * blocks):
        for step in range(STEPS):
            start = time.monotonic()
            trainer.step()
            if block % 2 and step % every == 0:
                saver.save()
            (found.saving if block % 2 else found.quiet).append(time.monotonic() - start)
        if block % 2:
            found.drained.append(saver.drain())
    found.waited = competitor.waited() - waited
    return found


class Saver:
    """Saves under way, and what they cost."""

    def __init__(self, competitor: Competitor, state: State) -> None:
        self._competitor, self._state = competitor, state
        self._pending: list[Pending] = []
        self._number = 0
        self.blocked: list[float] = []

    def save(self) -> None:
        """One more save."""
        start = time.monotonic()
        self._pending.append(self._competitor.save(self._state, self._number))
        self.blocked.append(time.monotonic() - start)
        self._number += 1

    def drain(self) -> float:
        """Seconds until all is on the disk. Old saves are removed after that, where the competitor does not do so."""
        start = time.monotonic()
        for pending in self._pending:
            pending.durable()
        os.sync()
        seconds = time.monotonic() - start
        self._pending.clear()
        for number in range(self._number):
            path = self._competitor.place(number)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        os.sync()
        return seconds
