"""Recall: whatever changes from one state to the next, the leaves and bytes are those of the state as it is."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state_strategies import scrambled, states
from support.transfer import stream

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.registry import Registry
from tierstate.providers.sharded.shards import Shard
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tree.flatten import FlatState, flatten
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.values.values import ValueProvider


def seen(tree: FlatState) -> list[tuple[Leaf, bytes | None]]:
    """Leaves and bytes of a state."""
    return [(node.leaf, None if node.provider is None else stream(node.provider)) for node in tree.nodes]


@given(states(), states(), st.lists(st.sampled_from("ons"), max_size=5))
@settings(deadline=None)
def test_every_state_is_flattened_as_if_it_were_the_first(state: Any, other: Any, order: list[str]) -> None:
    recall = FlattenCache()
    recall.flatten(state)
    for which in order:
        given_state = {"o": other, "n": state, "s": scrambled(state)}[which]
        again, anew = seen(recall.flatten(given_state)), seen(flatten(given_state))
        assert again == anew  # never the states themselves: torch cannot print every dtype


class Twice(ValueProvider):
    """Saves a value twice, under a kind of its own."""

    kind = "twice"

    def __init__(self, value: Any) -> None:
        super().__init__([value, value])


class Job:
    """A model in training, with what usually goes with it."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.generator = torch.Generator()
        self.extra: dict[str, Any] = {"step": 0, "losses": [0.5], "seen": np.zeros(3), "tied": self.model[0].weight}

    def step(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()
        self.extra["step"] += 1000
        self.extra["losses"].append(0.25)
        torch.rand(3, generator=self.generator)

    def state(self) -> dict[str, Any]:
        rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "own": self.generator}
        return {"model": self.model, "optimizer": self.optimizer, "rng": rng, **self.extra}


def replace_weight(job: Job) -> None:
    job.model[0].weight = torch.nn.Parameter(torch.ones(4, 4))


def replace_data(job: Job) -> None:
    job.model[0].weight.data = torch.ones(4, 4)


def transpose_data(job: Job) -> None:
    job.model[0].weight.data = job.model[0].weight.data.t()


def freeze(job: Job) -> None:
    job.model[0].weight.requires_grad_(False)


def cast(job: Job) -> None:
    job.model.to(torch.float64)


def untie(job: Job) -> None:
    job.extra["tied"] = job.model[0].weight.detach().clone()


def tie(job: Job) -> None:
    job.extra["seen"] = job.model[0].bias.detach()[1:]


def add(job: Job) -> None:
    job.extra["more"] = torch.zeros(2)


def reorder(job: Job) -> None:
    job.extra = dict(reversed(job.extra.items()))


def retype(job: Job) -> None:
    job.extra["losses"] = tuple(job.extra["losses"])


def nest(job: Job) -> None:
    job.extra["losses"] = [torch.zeros(1), 2]


def equal_key(job: Job) -> None:
    job.extra = {1: 0} if 1.0 in job.extra else {1.0: 0}


def conjugate(job: Job) -> None:
    last = job.extra.get("complex")
    job.extra["complex"] = torch.full((2,), 1 + 2j) if last is None else last.conj()


CHANGES = [replace_weight, replace_data, transpose_data, freeze, cast, untie, tie]
CHANGES += [add, reorder, retype, nest, equal_key, conjugate]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_a_job_are_noticed(change: Any) -> None:
    job, recall = Job(), FlattenCache()
    for _ in range(3):
        job.step()
        assert seen(recall.flatten(job.state())) == seen(flatten(job.state()))
    for _ in range(2):
        change(job)
        for _ in range(2):
            state = job.state()
            assert seen(recall.flatten(state)) == seen(flatten(state))


@pytest.mark.parametrize("make", [torch.ones, np.ones])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_values_that_come_to_share_memory_are_tied(make: Any, names: str) -> None:
    stays, moves = names
    recall, state = FlattenCache(), {"a": make(4), "b": make(4)}
    recall.flatten(state)
    state[moves] = state[stays]
    assert [leaf.spec.kind for leaf in recall.flatten(state).leaves][2] == "tied"
    assert seen(recall.flatten(state)) == seen(flatten(state))


@pytest.mark.parametrize("make", [torch.ones, np.ones])
def test_values_that_move_into_the_same_memory_are_tied(make: Any) -> None:
    recall = FlattenCache()
    recall.flatten({"a": make(4), "b": make(4)})
    both = make(4)
    assert [leaf.spec.kind for leaf in recall.flatten({"a": both, "b": both}).leaves][2] == "tied"


def test_what_stays_is_known_again() -> None:
    job, recall = Job(), FlattenCache()
    job.step()
    first = recall.flatten(job.state())
    job.step()
    second = recall.flatten(job.state())
    assert second.token is first.token
    fresh = {second.leaves[i].name for i in second.fresh}
    assert all(name.startswith(("rng.", "losses", "step", "optimizer.param_groups", "seen")) for name in fresh), fresh
    job.model[0].weight.data = torch.ones(4, 4)
    job.extra["tied"] = job.model[0].weight
    assert recall.flatten(job.state()).token is not first.token, "a tensor that others share memory with has moved"


@pytest.mark.slow
def test_nothing_of_a_state_is_held_on_to() -> None:
    recall = FlattenCache()
    for seed in range(3):
        state = {"a": torch.full((5,), seed), "b": np.full(5, seed), "n": [torch.zeros(3), 1], "step": seed}
        recall.flatten(state)
        refs = [weakref.ref(state["a"]), weakref.ref(state["b"]), weakref.ref(state["n"][0])]
        del state
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3


def test_a_later_registration_counts() -> None:
    class Odd:
        def __init__(self) -> None:
            self.array = np.arange(3)

    class OddProvider(ArrayProvider):
        kind = "odd"

        def __init__(self, value: Any) -> None:
            super().__init__(value.array)

    registry = Registry()
    recall = FlattenCache(registry=registry, allow_pickle=lambda path: False)
    state: dict[str, Any] = {"x": 1}
    recall.flatten(state)
    state["x"] = Odd()
    with pytest.raises(CaptureError, match=r"x: a .*Odd has no provider"):
        recall.flatten(state)
    registry.register(Odd, OddProvider)
    assert [leaf.spec.kind for leaf in recall.flatten(state).leaves] == ["dict", "odd"]
    assert [leaf.spec.kind for leaf in recall.flatten(state).leaves] == ["dict", "odd"]


def test_a_later_registration_counts_for_values_that_have_not_changed() -> None:
    registry = Registry()
    recall, state = FlattenCache(registry=registry), {"x": b"abc", "y": 1}
    recall.flatten(state)
    registry.register(bytes, Twice)
    assert [leaf.spec.kind for leaf in recall.flatten(state).leaves] == ["dict", "twice", "value"]
    assert seen(recall.flatten(state)) == seen(flatten(state, registry=registry))


def test_what_cannot_be_saved_is_told_at_any_time() -> None:
    recall = FlattenCache()
    recall.flatten({"x": torch.zeros(2, 2)})
    with pytest.raises(CaptureError, match="x: a tensor of layout"):
        recall.flatten({"x": torch.zeros(2, 2).to_sparse()})
    recall.flatten({"x": torch.zeros(2, 2)})
    recall.flatten({"x": torch.zeros(2, 2)})
    with pytest.raises(CaptureError, match=r"x: a builtins\.object has no provider"):
        recall.flatten({"x": object()})


def test_a_provider_for_a_constant_type_is_asked_again() -> None:
    registry = Registry()
    registry.register(bytes, Twice)
    recall, state = FlattenCache(registry=registry), {"x": b"abc", "y": 1}
    first = seen(recall.flatten(state))
    again = recall.flatten(state)
    assert seen(again) == first
    assert [again.leaves[i].name for i in again.fresh] == ["x"]


def test_attributes_that_are_equal_to_python_are_taken_anew() -> None:
    class Marked(ValueProvider):
        kind = "marked"

        @property
        def spec(self) -> Spec:
            return Spec(self.kind, shape=super().spec.shape, attrs={"zero": next(zeros)})

    zeros = iter([0.0, 0.0, -0.0, -0.0, False, False] * 3)
    registry = Registry()
    registry.register(complex, Marked)
    recall = FlattenCache(registry=registry)
    found = [repr(recall.flatten({"x": 1j}).leaves[1].spec.attrs["zero"]) for _ in range(3)]
    assert set(found) <= {"0.0", "-0.0", "False"}
    assert len(set(found)) > 1


def test_tensors_that_move_with_every_state_leave_nothing_behind() -> None:
    recall, held = FlattenCache(), []
    for _ in range(50):
        state = {"stays": torch.zeros(1) if not held else held[0]["stays"], "moves": torch.zeros(100)}
        held.append(state)  # so that every tensor has an address of its own
        recall.flatten(state)
    assert len(recall._marks) == 2


@st.composite
def boxed(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a tensor of 4 by 4 lies in a global one, and the shape of that."""
    offset = (draw(st.integers(0, 4)), draw(st.integers(0, 4)))
    return offset, (draw(st.integers(8, 10)), draw(st.integers(8, 10)))


@given(st.lists(boxed(), min_size=2, max_size=5), st.booleans())
@settings(deadline=None)
def test_a_tensor_that_is_another_shard_now_is_noticed(places: list[Any], same: bool) -> None:
    tensor, recall = torch.arange(16.0).reshape(4, 4), FlattenCache()
    kept = Shard(tensor, *places[0])
    for offset, shape in places:
        kept.offset, kept.global_shape = offset, shape
        for _ in range(2):
            state = {"kept": kept if same else Shard(tensor, offset, shape), "tied": Shard(tensor, *places[0])}
            assert boxes(recall.flatten(state)) == boxes(flatten(state))


def boxes(tree: FlatState) -> list[tuple[Leaf, list[Any]]]:
    """Leaves, and where the parts of each lie."""
    return [(n.leaf, [part.box for part in n.provider.parts] if n.provider is not None else []) for n in tree.nodes]
