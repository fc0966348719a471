"""Loops over data loaders, with draws from random generators in between, that can be saved anywhere and resumed."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import tierstate as ts

KINDS = ("shuffled", "generator", "replaced", "distributed", "weighted", "subset", "lazy", "single", "in order")
OPS = ("batch", "batch", "batch", "torch", "python", "numpy", "own", "again", "end", "epoch")
SIZE = 23


class Numbers(Dataset[Any]):
    """Its items are random: the index, and what each generator draws."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)

    def __len__(self) -> int:
        return SIZE


class Lazy(Sampler[int]):
    """Draws each index when it is asked for, from a generator of the process."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield random.randrange(SIZE)


class Loop:
    """A loop over a loader of some kind. Its state is what a training script would save."""

    def __init__(self, kind: str, workers: int) -> None:
        data, own = Numbers(), torch.Generator().manual_seed(5)
        samplers: dict[str, Any] = {
            "replaced": RandomSampler(data, replacement=True, num_samples=70, generator=own),
            "distributed": DistributedSampler(data, 2, 1),
            "weighted": WeightedRandomSampler(torch.arange(1.0, SIZE + 1), SIZE, generator=own),
            "subset": BatchSampler(SubsetRandomSampler(range(3, SIZE)), 3, True),
            "lazy": Lazy(),
        }
        how: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
        if kind in ("shuffled", "generator", "single"):
            how |= {"shuffle": True, "generator": own if kind == "generator" else None}
        if kind == "single":
            how["batch_size"] = None
        if kind in samplers:
            how["sampler"] = samplers[kind]
        if kind == "subset":
            how = {"batch_sampler": samplers[kind], "num_workers": workers, "persistent_workers": workers > 0}
        self.loader, self.own, self.kind = ts.Loader(DataLoader(data, **how)), own, kind
        self.batches: Iterator[Any] | None = None
        self.state = {"loader": self.loader, "rng": ts.Rng(), "own": own}

    def run(self, ops: Sequence[str]) -> list[Any]:
        """What each operation gives."""
        return [getattr(self, f"_{op}")() for op in ops]

    def _begin(self) -> None:
        if self.kind == "distributed":
            self.loader.loader.sampler.set_epoch(self.loader.epoch)
        self.batches = iter(self.loader)

    def _batch(self) -> Any:
        if self.batches is None:
            self._begin()
        assert self.batches is not None
        found = next(self.batches, None)
        if found is None:
            self.batches = None
        return None if found is None else found.tolist()

    def _again(self) -> None:
        """Leave the epoch and begin another."""
        self.loader.end_epoch()
        self._begin()

    def _end(self) -> None:
        self.loader.end_epoch()
        self.batches = None

    def _epoch(self) -> Any:
        found = []
        while (batch := self._batch()) is not None:
            found.append(batch)
        return found

    def _torch(self) -> float:
        return torch.nn.functional.dropout(torch.ones(64)).sum().item() + torch.rand(()).item()

    def _python(self) -> float:
        return random.random()

    def _numpy(self) -> float:
        return float(np.random.rand())

    def _own(self) -> float:
        return torch.rand((), generator=self.own).item()


def seed(number: int) -> None:
    """Seed what a script seeds at its start."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def begin(cases: list[dict[str, Any]], place: Path) -> list[Any]:
    """Run each case up to its save, save it, and go on; what comes after the save."""
    truth = []
    for number, case in enumerate(cases):
        seed(number)
        loop = Loop(case["kind"], case["workers"])
        loop.run(case["before"])
        with ts.Checkpointer(ts.Policy.default(place / str(number)), "run") as ckpt:
            ckpt.save(loop.state, step=1).wait()
        truth.append(loop.run(case["after"]))
    return truth


def resume(cases: list[dict[str, Any]], place: Path) -> list[Any]:
    """Restore each case, and go on with it."""
    found = []
    for number, case in enumerate(cases):
        loop = Loop(case["kind"], case["workers"])
        with ts.Checkpointer(ts.Policy.default(place / str(number)), "run") as ckpt:
            ckpt.resume(into=loop.state)
        if case["eager"] and loop.loader.batches:
            loop._begin()
        found.append(loop.run(case["after"]))
    return found


if __name__ == "__main__":
    place = Path(sys.argv[2])
    call = {"begin": begin, "resume": resume}[sys.argv[1]]
    (place / f"{sys.argv[1]}.json").write_text(json.dumps(call(json.loads((place / "cases.json").read_text()), place)))
