"""Loaders of other libraries in `ts.Loader`: they go on with the same batches, and the loop with the same draws."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loader_loops import Numbers, seed

import tierstate as ts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def loop(loader: ts.Loader, ops: list[str], batches: list[Any]) -> list[Any]:
    """What operations give; the iterator under way is kept in the list."""
    found: list[Any] = []
    for op in ops:
        if op == "end":
            loader.end_epoch()
            batches.clear()
        if op == "draw":
            found.append(torch.rand(()).item() + random.random())
        for _ in range({"batch": 1, "epoch": 100}.get(op, 0)):
            if not batches:
                batches.append(iter(loader))
            batch = next(batches[0], None)
            found.append(None if batch is None else np.asarray(batch).tolist())
            if batch is None:
                batches.clear()
                break
    return found


CASES = [
    ([], ["batch", "draw", "epoch", "batch"]),
    (["batch", "draw"], ["batch", "draw", "epoch", "draw", "epoch"]),
    (["epoch", "draw"], ["draw", "batch", "draw", "epoch"]),
    (["epoch", "batch", "batch"], ["epoch", "draw", "batch"]),
    (["batch", "end"], ["batch", "draw", "epoch", "draw"]),
    (["epoch", "batch", "end", "draw"], ["epoch", "epoch"]),
    (["batch"] * 6, ["batch", "batch", "draw"]),
]


def goes_on(make: Callable[[], Any], before: list[str], after: list[str]) -> None:
    seed(1)
    loader, batches = ts.Loader(make()), []
    loop(loader, before, batches)
    state, rng = copy.deepcopy(loader.state_dict()), ts.Rng().state_dict()
    truth = loop(loader, after, batches)
    seed(2)
    again = ts.Loader(make())
    ts.Rng().load_state_dict(rng)
    again.load_state_dict(state)
    assert loop(again, after, []) == truth


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("before", "after"), CASES)
def test_torchdata(before: list[str], after: list[str], shuffle: bool, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = [torch.tensor(number) for number in range(23)]
    goes_on(lambda: stateful.StatefulDataLoader(data, 4, shuffle, num_workers=workers), before, after)


@pytest.mark.parametrize(("before", "after"), [*CASES, (["batch"] * 5, ["epoch", "draw", "epoch"])])
def test_nodes_of_torchdata(before: list[str], after: list[str]) -> None:
    """Their samplers draw the order of an epoch with its first batch, and again when a restore skips what was given."""
    nodes = pytest.importorskip("torchdata.nodes")

    def make() -> Any:
        items = nodes.MapStyleWrapper(range(20), torch.utils.data.RandomSampler(range(20)))
        return nodes.Loader(nodes.Mapper(nodes.Batcher(items, 4), torch.tensor))

    goes_on(make, before, after)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_save_before_the_first_iteration_changes_nothing(shuffle: bool, workers: int, place: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    policy = ts.Policy.parse(f"tiers: {{n: {{type: nvme, path: {place}}}}}")

    def made(number: int) -> Any:
        seed(number)
        return stateful.StatefulDataLoader(list(range(23)), 4, shuffle, num_workers=workers)

    def trained(loader: Any) -> list[Any]:
        drawn = [torch.rand(()).item()]
        return drawn + [(batch.tolist(), torch.rand(()).item()) for _ in range(2) for batch in loader]

    truth = trained(made(1))
    with ts.Checkpointer(policy, run="r") as ckpt:
        loader = made(1)
        ckpt.save({"rng": ts.Rng(), "loader": loader}, step=0).wait()
        assert trained(loader) == truth
        loader = made(2)
        ckpt.restore(into={"rng": ts.Rng(), "loader": loader})
        assert trained(loader) == truth


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), CASES)
def test_datasets_of_hugging_face(before: list[str], after: list[str], workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(23))}).with_format("torch")
    goes_on(lambda: torch.utils.data.DataLoader(data["x"][:], 4, shuffle=True, num_workers=workers), before, after)

    def numbers() -> Any:
        return data.to_iterable_dataset(num_shards=2).map(lambda row: {"x": row["x"] + 1})

    def collate(rows: list[Any]) -> Any:
        return torch.stack([row["x"] for row in rows])

    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    goes_on(lambda: stateful.StatefulDataLoader(numbers(), 4, collate_fn=collate, num_workers=workers), before, after)
    if not workers:
        goes_on(lambda: torch.utils.data.DataLoader(numbers(), 4, collate_fn=collate), before, after)
    with pytest.raises(ValueError, match="StatefulDataLoader"):
        ts.Loader(torch.utils.data.DataLoader(numbers(), 4, num_workers=1))


@pytest.mark.parametrize("stateful", [False, True])
def test_accelerate_wraps_what_is_wrapped(stateful: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata")
    how = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = accelerate.Accelerator(dataloader_config=how, cpu=True)
    plain = torch.utils.data.DataLoader(list(range(23)), 4, shuffle=True)
    with pytest.raises(ValueError, match=r"wrap the DataLoader that you give to prepare\(\)"):
        ts.Loader(accelerator.prepare(plain))
    loader = accelerator.prepare(ts.Loader(plain))
    assert isinstance(loader, ts.Loader)


def test_a_plain_loader_over_random_items_beside_them() -> None:
    goes_on(lambda: torch.utils.data.DataLoader(Numbers(), 4, shuffle=True, num_workers=2), *CASES[3])
