"""Data loaders go on after a restore with the batches, and the loop with the draws, that would have come."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import loader_loops
from support.equality import difference
from support.loader_loops import KINDS, OPS, Loop, seed
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import tierstate as ts
from tierstate.manifest.errors import CaptureError
from tierstate.providers.tree.flatten import flatten

ops = st.lists(st.sampled_from(OPS), max_size=14)


def check(kind: str, workers: int, before: list[str], after: list[str], eager: bool, other: int | None = None) -> None:
    seed(1)
    loop = Loop(kind, workers)
    loop.run(before)
    saved = {name: copy.deepcopy(value.state_dict()) for name, value in loop.state.items() if name != "own"}
    own = loop.own.get_state()
    truth = loop.run(after)

    seed(2)  # of a new process nobody knows where its generators are
    again = Loop(kind, workers if other is None else other)
    again.loader.load_state_dict(copy.deepcopy(saved["loader"]))
    assert difference(again.loader.state_dict(), saved["loader"]) == ""
    if eager and again.loader.batches:
        again._begin()
    again.own.set_state(own)
    ts.Rng().load_state_dict(saved["rng"])
    assert again.run(after) == truth


@given(st.sampled_from(KINDS), ops, ops, st.booleans())
@example("generator", ["batch", "own"], ["batch", "epoch", "batch"], False)
@example("generator", ["batch"] * 5, ["own", "batch", "batch", "batch"], False)
@example("generator", ["again", "own", "batch"], ["batch"], False)
@example("replaced", ["batch", "own", *["batch"] * 9], ["batch"], False)
@example("lazy", ["batch", "python"], ["batch", "python", "batch", "epoch"], True)
@settings(max_examples=200)
def test_any_loop_goes_on_alike(kind: str, before: list[str], after: list[str], eager: bool) -> None:
    # A generator that the loop draws from too is where it was only if the iterator is made after both are restored.
    check(kind, 0, before, after, eager and "own" not in (*before, *after))


@pytest.mark.slow
@given(st.sampled_from(KINDS), st.integers(1, 2), ops, ops)
@settings(max_examples=12)
def test_any_loop_with_workers_goes_on_alike(kind: str, workers: int, before: list[str], after: list[str]) -> None:
    check(kind, workers, before, after, False)


@pytest.mark.slow
def test_workers_may_be_others_after_a_restore() -> None:
    """The batches' indices are the same; what a worker draws is not what the process draws."""
    for kind in ("shuffled", "generator", "weighted"):
        seed(1)
        loop = Loop(kind, 1)
        loop.run(["batch", "batch"])
        state = copy.deepcopy(loop.loader.state_dict())
        truth = loop.run(["epoch", "epoch"])
        for workers in (0, 2):
            again = Loop(kind, workers)
            again.loader.load_state_dict(copy.deepcopy(state))
            found = again.run(["epoch", "epoch"])
            assert [[[row[0] for row in b] for b in e] for e in found] == [
                [[r[0] for r in b] for b in e] for e in truth
            ]
            assert workers == 0 or found == truth


@pytest.mark.slow
def test_a_fresh_process_goes_on_alike(tmp_path: Path) -> None:
    chance = random.Random(4)
    cases = [
        {
            "kind": kind,
            "workers": number % 3,
            "before": chance.choices(OPS, k=chance.randrange(12)),
            "after": [*chance.choices(OPS, k=10), "epoch", "batch"],
            "eager": chance.random() < 0.5,
        }
        for number, kind in enumerate(KINDS * 2)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    for call in ("begin", "resume"):
        command = [sys.executable, loader_loops.__file__, call, str(tmp_path)]
        subprocess.run(command, check=True, timeout=300)
    truth, found = (json.loads((tmp_path / f"{call}.json").read_text()) for call in ("begin", "resume"))
    for case, one, other in zip(cases, truth, found, strict=True):
        assert one == other, case


class Shifted(Dataset[int]):
    """Items that a worker can shift, and whether it sees this dataset."""

    def __init__(self) -> None:
        self.shift = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index + self.shift, info is not None and info.dataset is self


def shift(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.shift = 100


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_sees_and_changes_the_dataset_itself(how: str) -> None:
    """As without `ts.Loader`: what ``worker_init_fn`` sets on the dataset, its items have."""
    for start, right in ((shift, [100, 101, 102, 103]), (None, [0, 1, 2, 3])):
        plain = DataLoader(Shifted(), batch_size=2, num_workers=1, worker_init_fn=start, multiprocessing_context=how)
        batches = [(numbers.tolist(), seen.tolist()) for numbers, seen in ts.Loader(plain)]
        assert [number for numbers, _ in batches for number in numbers] == right
        assert all(seen for _, all_seen in batches for seen in all_seen)


def test_batches_before_are_not_read() -> None:
    read: list[int] = []

    class Seen(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    loader = ts.Loader(DataLoader(Seen(range(10)), batch_size=2))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state, again = loader.state_dict(), ts.Loader(DataLoader(Seen(range(10)), batch_size=2))
    read.clear()
    again.load_state_dict(state)
    assert [again.epoch, again.batches, len(again)] == [0, 3, 5]
    assert [batch.tolist() for batch in again] == [[6, 7], [8, 9]]
    assert read == [6, 7, 8, 9]
    assert [again.epoch, again.batches] == [1, 0]


def test_iterators_draw_nothing_from_the_process() -> None:
    seed(3)
    loader = ts.Loader(DataLoader(range(10), batch_size=2, shuffle=True))
    before = ts.Rng().state_dict()
    orders = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert difference(ts.Rng().state_dict(), before) == ""
    assert orders[0] != orders[1]
    same = ts.Loader(DataLoader(range(10), batch_size=2, shuffle=True), seed=3)
    assert [batch.tolist() for batch in same] == orders[0]


def test_an_iterator_of_before_a_restore_cannot_go_on() -> None:
    loader = ts.Loader(DataLoader(range(10)))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="make a new iterator"):
        next(batches)
    assert next(iter(loader)).item() == 1


def test_a_restore_refuses_a_loader_of_another_kind(tmp_path: Path) -> None:
    loader = ts.Loader(DataLoader(range(10), shuffle=True))
    next(iter(loader))
    with ts.Checkpointer(ts.Policy.default(tmp_path), "run") as ckpt:
        ckpt.save({"loader": loader}, step=1).wait()
        other = ts.Loader(DataLoader(range(10), shuffle=True, generator=torch.Generator()))
        with pytest.raises(ts.StateMismatch, match=r"loader: .*they had nothing; nothing, those here have generator"):
            ckpt.restore({"loader": other})
        assert [other.epoch, other.batches] == [0, 0]


def test_a_restore_refuses_a_place_in_an_epoch_of_other_batches(tmp_path: Path) -> None:
    def made(size: int, ranks: int, items: int = 24) -> ts.Loader:
        sampler = DistributedSampler(range(items), ranks, 0, shuffle=False)  # type: ignore[arg-type, var-annotated]
        return ts.Loader(DataLoader(range(items), batch_size=size, sampler=sampler))  # type: ignore[arg-type]

    with ts.Checkpointer(ts.Policy.default(tmp_path), "run") as ckpt:
        loader = made(2, 4)
        batches = iter(loader)
        next(batches)
        ckpt.save({"loader": loader}, step=1).wait()
        for other in (made(1, 4), made(2, 2), made(2, 4, 80)):
            with pytest.raises(ts.StateMismatch, match=r"loader: .* was saved behind batch 1 of 3, and an epoch has"):
                ckpt.restore({"loader": other})
            assert [other.epoch, other.batches] == [0, 0]
        again = made(2, 4)
        ckpt.restore({"loader": again})
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]
        ckpt.save({"loader": loader}, step=2).wait()  # at the end of an epoch
        other = made(4, 2)
        ckpt.restore({"loader": other})
        assert (other.epoch, len(list(other))) == (1, 3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


class Position(Stream):
    """A stream that saves its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 10:
            self.at += 1
            yield self.at + np.random.rand()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@given(st.integers(0, 30), st.integers(1, 3))
@example(4, 3)  # the dataset is at its beginning again, behind the last batch of an epoch
def test_a_dataset_that_saves_its_position(count: int, size: int) -> None:
    def run(loader: ts.Loader, number: int) -> list[Any]:
        return [batch.tolist() for _, batch in zip(range(number), forever(loader), strict=False)]

    def forever(loader: ts.Loader) -> Any:
        while True:
            yield from loader

    seed(1)
    loader = ts.Loader(DataLoader(Position(), batch_size=size))
    batches = forever(loader)
    for _ in range(count):
        next(batches)
    state, rng = copy.deepcopy(loader.state_dict()), ts.Rng().state_dict()
    truth = [next(batches).tolist() for _ in range(12)]
    again = ts.Loader(DataLoader(Position(), batch_size=size))
    again.load_state_dict(state)
    ts.Rng().load_state_dict(rng)
    assert run(again, 12) == truth


class LazyOrder:
    """As the nodes of torchdata: the order is drawn with the first batch of an epoch, or to skip what a restored state
    says was given; where nothing is left of that epoch, the next one begins at once.
    """

    def __init__(self) -> None:
        self.given, self._skip, self.restart_on_stop_iteration = 0, 0, True

    def __iter__(self) -> Any:
        skip, self._skip = self._skip, 0
        order = torch.randperm(5).tolist() if skip else []
        if skip == 5 and self.restart_on_stop_iteration:
            skip, order = 0, []
        self.given = skip
        return self._rest(order, skip)

    def _rest(self, order: list[int], skip: int) -> Any:
        order = order or torch.randperm(5).tolist()
        for self.given in range(skip + 1, 6):
            yield order[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skip = state["given"]


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("count", range(7))
def test_a_loader_that_draws_its_order_late(epochs: int, count: int) -> None:
    def run(loader: ts.Loader, epochs: int) -> list[Any]:
        return [(list(loader), torch.rand(()).item()) for _ in range(epochs)]

    seed(1)
    loader = ts.Loader(LazyOrder())
    run(loader, epochs)
    batches = iter(loader)
    for _ in range(count):
        next(batches, None)
    state, rng = loader.state_dict(), ts.Rng().state_dict()
    truth = [(list(batches), torch.rand(()).item())] if count < 6 else []
    truth += run(loader, 2)
    seed(2)
    again = ts.Loader(LazyOrder())
    again.load_state_dict(state)
    ts.Rng().load_state_dict(rng)
    assert run(again, len(truth)) == truth


class Shard(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: [1, 2], "is no DataLoader"),
        (lambda: DataLoader(Stream()), "Stream gives no indices, and it has no state_dict"),
        (lambda: DataLoader(Position(), num_workers=1), "in worker processes"),
        (lambda: Shard(range(3)), "a Shard iterates in a way of its own"),
        (lambda: DataLoader(range(3), num_workers=1, in_order=False), "no order"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_what_can(loader: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        ts.Loader(loader())
    assert "order" in said or "StatefulDataLoader" in str(caught.value)


def test_a_loader_itself_in_a_state_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"data: a .*DataLoader .* ts\.Loader\(loader\)"):
        flatten({"data": DataLoader(range(3))})
