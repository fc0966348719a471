"""Modules, optimizers and schedules resume bit for bit, and nothing is cast on the way."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.equality import difference, same
from support.transfer import restore, transfer
from torch import nn

from tierstate.manifest.errors import StateMismatch
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.values.stateful import PerRank, Rng

# torch 2.8 warns of what its own schedulers do.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.head = nn.Linear(4, 7, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def training(seed: int, lr: Any = 1e-2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        ],
        milestones=[2],
    )
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "data": torch.Generator().manual_seed(seed)}


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 7, (8,), generator=state["data"])
        loss = nn.functional.cross_entropy(state["model"](x).float(), x)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["schedule"].step()
        losses.append(loss.item())
    return losses


def plain(state: dict[str, Any]) -> Any:
    return restore(*transfer(flatten(state)))


def loaded_by_torch(state: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """What `load_state_dict` makes of the state that `torch.save` wrote."""
    for name, thing in state.items():
        get, put = ("get_state", "set_state") if name == "data" else ("state_dict", "load_state_dict")
        file = io.BytesIO()
        torch.save(getattr(thing, get)(), file)
        file.seek(0)
        getattr(into[name], put)(torch.load(file, weights_only=False))
    return into


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
@pytest.mark.parametrize("before", [0, 2])
def test_training_resumes_bit_for_bit(before: int, lr: Any) -> None:
    """Into fresh objects, and back into objects that have gone on."""
    state = training(1, lr)
    train(state, 3)
    leaves, data = transfer(flatten(state))
    resumed = loaded_by_torch(state, training(3, lr))
    saved, again = plain(state), plain(resumed)
    expected, by_torch = train(state, 4), train(resumed, 4)
    other = training(2, lr)
    train(other, before)
    weight = other["model"].embed.weight
    assert restore(leaves, data, into=other) is other
    assert other["model"].embed.weight is other["model"].head.weight is weight
    assert same(plain(other), again)
    assert train(other, 4) == by_torch
    assert difference(plain(other), plain(resumed)) == ""
    if same(again, saved):
        assert by_torch == expected
        assert difference(plain(other), plain(state)) == ""
    else:  # torch 2.8 writes the schedule's numbers into the optimizer's own lr, a tensor, until both are loaded
        assert isinstance(lr, torch.Tensor)
        assert difference(again, saved) == "other leaves share memory"


def test_a_version_without_optimizer_state_empties_it() -> None:
    leaves, data = transfer(flatten(training(1)))
    other = training(2)
    train(other, 2)
    restore(leaves, data, into=other)
    assert other["optimizer"].state_dict()["state"] == {}
    assert same(plain(other), plain(training(1)))


def test_a_plain_state_dict_restores_into_a_module_and_back() -> None:
    model, other = Tied(), Tied()
    leaves, data = transfer(flatten({"m": model.state_dict()}))
    restore(leaves, data, into={"m": other})
    assert same(restore(*transfer(flatten(other))), restore(*transfer(flatten(model))))
    leaves, data = transfer(flatten({"m": dict(model.state_dict())}))
    restore(leaves, data, into={"m": other})
    leaves, data = transfer(flatten(model))
    assert restore(leaves, data, into=other) is other


def test_a_module_with_other_leaves_is_a_mismatch() -> None:
    leaves, _ = transfer(flatten({"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))}))
    target = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2), nn.PReLU())
    with pytest.raises(StateMismatch) as error:
        restore(leaves, {}, into={"m": target})
    text = str(error.value)
    assert 'm."1.bias"' in text
    assert 'm."2.weight"' in text
    assert 'm."0.weight": has shape (3, 2) here, (2, 2) in the version' in text
    assert "differ in 4 leaves" in text


def test_ties_of_a_module_that_the_version_does_not_have() -> None:
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(7, 4, dtype=torch.bfloat16))
    leaves, data = transfer(flatten(untied))
    with pytest.raises(StateMismatch, match="shares memory with"):
        restore(leaves, data, into=Tied())
    leaves, data = transfer(flatten(Tied()))
    out = restore(leaves, data, into=untied)
    assert torch.equal(out.head.weight, out.embed.weight)


class Extra(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.weight, self.note, self.loads = nn.Parameter(torch.ones(2)), note, 0

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state
        self.loads += 1


@pytest.mark.parametrize("note", ["text", {"t": torch.arange(3)}])
def test_extra_state_is_set(note: Any) -> None:
    leaves, data = transfer(flatten({"m": nn.Sequential(Extra(note))}))
    target = nn.Sequential(Extra("other" if note == "text" else {"t": torch.zeros(3, dtype=torch.int64)}))
    restore(leaves, data, into={"m": target})
    assert same(target[0].note, note)
    assert target[0].loads == 1
    with torch.no_grad():
        target[0].weight.zero_()
    restore(leaves, data, into={"m": target}, only=["m.*weight"])
    assert same(target[0].note, note), "a module with code of its own gets the rest as it is"
    assert target[0].weight.tolist() == [1, 1]


def test_hooks_on_loading_are_called_and_plain_modules_are_filled_alone() -> None:
    calls = []
    leaves, data = transfer(flatten(nn.Linear(2, 2)))
    target = nn.Linear(2, 2)
    target.register_load_state_dict_post_hook(lambda module, keys: calls.append(module))
    restore(leaves, data, into=target)
    assert calls == [target]


class Casting:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].to(torch.bfloat16)


def test_a_cast_is_no_restore() -> None:
    leaves, data = transfer(flatten({"c": [Casting(torch.ones(3)), 1]}))
    with pytest.raises(StateMismatch, match=r"c\.0\.value: .*dtype bfloat16 here, float32 in the version: it was cast"):
        restore(leaves, data, into={"c": [Casting(torch.zeros(3)), 1]})


class Wide(torch.optim.Optimizer):
    """Keeps 32-bit averages of parameters of any dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            average = self.state[p].setdefault("average", torch.zeros(p.shape))
            average.add_(p.detach().float(), alpha=1 / 3)


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_wide_states_of_narrow_parameters_keep_their_bits(stepped: bool, hooked: bool) -> None:
    weight = nn.Parameter(torch.tensor([1.1, 2.2, 3.3], dtype=torch.bfloat16))
    optimizer = Wide([weight])
    optimizer.step()
    leaves, data = transfer(flatten({"o": optimizer}))
    saved = optimizer.state[weight]["average"].clone()
    into = optimizer if stepped else Wide([weight])
    if stepped:
        optimizer.step()
    if hooked:
        into.register_load_state_dict_pre_hook(lambda _optimizer, state: None)
    restore(leaves, data, into={"o": into})
    assert same(into.state[weight]["average"], saved)


def test_an_optimizer_of_other_parameters() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight])
    leaves, data = transfer(flatten({"o": optimizer}))
    with pytest.raises(StateMismatch, match="o: the AdamW does not take the saved state: loaded state dict"):
        restore(leaves, data, into={"o": torch.optim.AdamW([weight, nn.Parameter(torch.ones(1))])})
    weight.sum().backward()
    optimizer.step()
    leaves, data = transfer(flatten({"o": optimizer}))
    other = nn.Parameter(torch.zeros(4))
    wrong = torch.optim.AdamW([other])
    other.sum().backward()
    wrong.step()
    with pytest.raises(StateMismatch, match=r"o\.state\.0\.exp_avg: has shape \(4,\) here, \(3,\) in the version"):
        restore(leaves, data, into={"o": wrong})


def test_only_a_part_of_an_optimizer() -> None:
    state, other = training(1), training(2)
    train(state, 2)
    train(other, 3)
    leaves, data = transfer(flatten(state))
    restore(leaves, data, into=other, only=["optimizer.state.*.exp_avg"])
    mine, theirs = other["optimizer"].state_dict()["state"], state["optimizer"].state_dict()["state"]
    assert all(same(mine[i]["exp_avg"], theirs[i]["exp_avg"]) for i in mine)
    assert mine[0]["step"] == 3
    assert other["schedule"].last_epoch == 3


def test_things_get_their_state_in_order_before_anything_is_filled() -> None:
    order = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {"name": self.name}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.append((state["name"], tensor.tolist()))

    tensor = torch.zeros(1)
    leaves, data = transfer(flatten([Told("a"), Told("b"), torch.ones(1)]))
    restore(leaves, data, into=[Told("c"), Told("d"), tensor])
    assert order == [("a", [0.0]), ("b", [0.0])]
    assert tensor.tolist() == [1]


class Drawing:
    """Draws from all generators where its state is read and where it is set, as a loader that makes an iterator."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own

    def draw(self) -> list[float]:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        drawn += [float(torch.rand((), generator=self.own["torch"])), self.own["python"].random()]
        return [*drawn, float(self.own["numpy"].random()), float(self.own["old"].random_sample())]

    def state_dict(self) -> dict[str, Any]:
        self.draw()
        return {"place": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draw()


@given(st.permutations(["loader", "rng", "torch", "python", "numpy", "bits", "old", "inner"]))
def test_generators_are_as_saved_whatever_other_objects_draw_meanwhile(order: list[str]) -> None:
    def state(seed: int) -> dict[str, Any]:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        numpy = np.random.default_rng(seed)
        own = {"torch": torch.Generator().manual_seed(seed), "python": random.Random(seed), "numpy": numpy}
        own |= {"old": np.random.RandomState(seed)}
        made = own | {"loader": Drawing(own), "rng": Rng(), "bits": numpy.bit_generator}
        made |= {"inner": PerRank({"loader": Drawing(own)})}
        return {name: made[name] for name in order}

    one = state(1)
    without = {name: value for name, value in one.items() if name not in ("loader", "inner")}
    leaves, data = transfer(flatten(without | {"loader": {"place": 1}, "inner": PerRank({"loader": {"place": 1}})}))
    truth = one["loader"].draw()
    other = state(2)
    restore(leaves, data, into=other)
    assert other["loader"].draw() == truth


def test_a_generator_of_another_kind() -> None:
    leaves, data = transfer(flatten({"g": np.random.default_rng(1)}))
    with pytest.raises(StateMismatch, match="g: the Generator does not take the saved state"):
        restore(leaves, data, into={"g": np.random.Generator(np.random.Philox(1))})
