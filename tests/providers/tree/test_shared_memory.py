"""What shares memory, or is one object: restored as it was saved, or an error says why this is not possible."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import same
from support.transfer import restore, transfer

import tierstate as ts
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import StateMismatch
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.unflatten import plan_restore


@given(st.integers(0, 5), st.integers(0, 8), st.booleans(), st.booleans())
@settings(deadline=None)
def test_rows_of_one_memory_are_right_or_refused(first: int, second: int, alike: bool, plain: bool) -> None:
    memory = torch.arange(40.0).reshape(10, 4)
    saved = {
        "a": memory[first : first + 5].clone(),
        "b": (memory if alike else -memory - 1)[second : second + 2].clone(),
    }
    leaves = flatten(saved).leaves
    here = torch.zeros(10, 4)
    a, b = here[first : first + 5], here[second : second + 2]
    target = plan_restore(
        leaves, into={"a": ts.Shard(a, (0, 0), (5, 4)), "b": b if plain else ts.Shard(b, (0, 0), (2, 4))}
    )
    for index, provider in [*target.ahead, *target.wanted.items()]:
        provider.load(0, as_buffer(saved[str(leaves[index].path[0])].numpy().tobytes()))
    if alike or second >= first + 5 or second + 2 <= first:
        target.settle()
        target.finish()
        assert torch.equal(a, saved["a"])
        assert torch.equal(b, saved["b"])
    else:
        with pytest.raises(StateMismatch, match=r"shares memory with . here, and they are not equal"):
            target.settle()
        assert not here.any()


class Holder:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KINDS: dict[str, Callable[[int], Any]] = {
    "dict": lambda n: {"x": n, "deep": {"y": [n, torch.full((1,), float(n))]}},
    "list": lambda n: [torch.full((1,), float(n)), n],
    "stateful": Holder,
    "generator": generator,
    "random": random.Random,
    "numpy generator": np.random.default_rng,
    "array": lambda n: np.full(3, n),
    "optimizer": lambda n: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=float(n)),
    "module": lambda n: torch.nn.BatchNorm1d(n),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_object_at_two_places_must_be_equal_in_the_version(kind: str) -> None:
    one, other, here = KINDS[kind](1), KINDS[kind](2), KINDS[kind](3)
    if kind == "module":
        one, other, here = KINDS[kind](1), KINDS[kind](1), KINDS[kind](1)
        torch.nn.init.zeros_(other.weight)
    before = plain(here)
    leaves, data = transfer(flatten({"a": one, "b": [other]}))
    with pytest.raises(StateMismatch, match=r"is the same object as|shares memory with") as error:
        restore(leaves, data, into={"a": here, "b": [here]})
    assert "b.0" in str(error.value)
    assert "a" in str(error.value)
    assert same(plain(here), before)
    leaves, data = transfer(flatten({"a": one, "b": [one]}))
    restore(leaves, data, into={"a": here, "b": [here]})
    assert same(plain(here), plain(one))
    if kind in ("stateful", "generator", "random", "numpy generator", "optimizer"):  # no memory of another leaf changes
        leaves, data = transfer(flatten({"a": one, "b": [other]}))
        restore(leaves, data, into={"a": here, "b": [here]}, only=["b.**"])
        assert same(plain(here), plain(other))


def plain(value: Any) -> Any:
    return restore(*transfer(flatten(value)))


def test_two_faces_of_the_global_generators() -> None:
    torch.manual_seed(1)
    saved = {"all": ts.Rng(), "torch": generator(5)}
    leaves, data = transfer(flatten(saved))
    with pytest.raises(StateMismatch, match=r"torch\.state: is the same object as all\.torch here"):
        restore(leaves, data, into={"all": ts.Rng(), "torch": torch.default_generator})
    leaves, data = transfer(flatten({"all": ts.Rng(), "again": ts.Rng(), "torch": torch.default_generator}))
    before = torch.rand(1)
    restore(leaves, data, into={"all": ts.Rng(), "again": ts.Rng(), "torch": torch.default_generator})
    assert torch.equal(torch.rand(1), before)


@st.composite
def views(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    kinds = ["array", "from_numpy", "frombuffer", "shard", "step", "expanded", "backwards"]
    one = st.tuples(st.sampled_from(kinds), st.integers(0, 9), st.integers(1, 6), st.integers(1, 3))
    return draw(st.lists(one, min_size=1, max_size=5))


def view(memory: np.ndarray[Any, Any], kind: str, first: int, count: int, step: int) -> Any:
    part = memory[first : first + count]
    if kind == "array":
        return part
    if kind == "step":
        return memory[first : first + count * step : step]
    if kind == "backwards":
        return part[::-1]
    if kind == "frombuffer":
        return torch.frombuffer(memory, dtype=torch.int32)[first : first + count]
    tensor = torch.from_numpy(part)
    if kind == "expanded":
        return tensor[:1].expand(step + 1)
    return ts.Shard(tensor, (0,), (count,)) if kind == "shard" else tensor


def value_of(thing: Any) -> list[int]:
    found: list[int] = (thing.tensor if isinstance(thing, ts.Shard) else thing).tolist()
    return found


@given(views(), st.booleans(), st.integers(0, 1 << 20))
@settings(deadline=None)
def test_views_of_one_memory_are_all_right_or_none_is_touched(
    places: list[tuple[str, int, int, int]], apart: bool, seed: int
) -> None:
    """``apart``: the saved values need not be equal where the given ones overlap."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, 40, dtype="i4")
    saved = [view(truth.copy() if apart else truth, *place) for place in places]
    if apart:
        for thing in saved:
            array = thing.tensor.numpy() if isinstance(thing, ts.Shard) else np.asarray(thing)
            if array.flags.writeable and 0 not in array.strides:
                array += rng.integers(0, 2, array.shape, dtype="i4")
    here = np.full(40, -1, "i4")
    into = [view(here, *place) for place in places]
    leaves, data = transfer(flatten(saved))
    try:
        restore(leaves, data, into=into)
    except StateMismatch:
        assert apart
        assert (here == -1).all()
    else:
        assert [*map(value_of, into)] == [*map(value_of, saved)]


def test_an_expanded_target_is_refused_before_anything_is_touched() -> None:
    leaves, data = transfer(flatten({"a": torch.ones(3), "w": torch.tensor([1.0, 2.0])}))
    into = {"a": torch.zeros(3), "w": torch.zeros(1).expand(2)}
    with pytest.raises(StateMismatch, match="w: shares memory with itself here"):
        restore(leaves, data, into=into)
    assert not into["a"].any()
    leaves, data = transfer(flatten({"a": torch.ones(3), "w": torch.tensor([2.0, 2.0])}))
    restore(leaves, data, into=into)
    assert into["w"].tolist() == [2, 2]
