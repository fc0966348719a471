"""States that do not fit a version: an error lists the differences, and the state is not changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpointer_worlds import tensors
from support.damage import STATE, saved, two
from support.equality import difference

import tierstate as ts

MISMATCHES: dict[str, Any] = {
    "missing": lambda s: {k: v for k, v in s.items() if k != "a"},
    "unexpected": lambda s: {**s, "z": torch.ones(2)},
    "shape": lambda s: {**s, "b": torch.ones(76)},
    "dtype": lambda s: {**s, "b": s["b"].double()},
    "kind": lambda s: {**s, "b": "text"},
    "nested": lambda s: {**s, "b": {"c": s["b"]}},
    "container": lambda s: list(s.values()),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_state_that_changed_shape_is_told_and_untouched(place, name):
    spec = two(place)
    saved(spec, 1)
    into = MISMATCHES[name](tensors(*STATE, seed=7))
    before = MISMATCHES[name](tensors(*STATE, seed=7))
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.StateMismatch) as caught:
            ckpt.restore(into=into)
        assert difference(before, into) == ""
        assert not hasattr(caught.value, "__notes__")
        if name in ("missing", "shape", "dtype", "kind"):
            assert ("a" if name == "missing" else "b") in str(caught.value)


def test_all_mismatches_are_listed(place):
    spec = two(place)
    saved(spec, 1)
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.StateMismatch) as caught:
            ckpt.restore(into={"b": torch.ones(3), "c": torch.ones(1250, dtype=torch.int32), "new": 1, "d": 3})
        for part in ("a", "b", "c", "d", "new"):
            assert part in str(caught.value)
        with pytest.raises(ts.StateMismatch):
            ckpt.load(only=["nothing.like.it"])


def test_only_a_part_is_restored_and_the_rest_left_alone(place):
    spec = two(place)
    truth = saved(spec, 1)
    into = {**tensors(*STATE, seed=7), "extra": 1}
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.restore(into=into, only=["[ab]"])
    for name in "ab":
        assert torch.equal(into[name], truth[0][name])
    for name in "cd":
        assert torch.equal(into[name], tensors(*STATE, seed=7)[name])


def test_names_without_wrappers_are_resumed(place):
    spec = two(place)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({"net": torch.nn.DataParallel(net), "step": 5}, step=5).wait()
    again = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {"net": again, "step": 0}
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.StateMismatch, match=r"rename=ts\.unwrapped"):
            ckpt.resume(into=state)
        assert state["step"] == 0
        assert ckpt.resume(into=state, rename=ts.unwrapped).step == 5
        assert state["step"] == 5
        assert difference(dict(net.state_dict()), dict(again.state_dict())) == ""
        assert ckpt.load(rename={"net.module": "model"}, only=["model.**"]).keys() == {"model"}
        ckpt.restore(into=state, rename=ts.unwrapped, only=["step"])
