"""A restore that is refused, at whatever moment and by whatever object, leaves the state as it was."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import scratch
from support.equality import difference
from torch import nn

import tierstate as ts

PARTS = ("model", "hooked", "optimizer", "thing", "rng", "array", "tensor", "values", "own")


class Thing:
    def __init__(self, seed: int) -> None:
        self.state = {"ema": torch.full((500,), float(seed)), "steps": [seed, {"best": seed / 3}]}
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state["ema"].zero_()
        if self.refuses:
            self.refuses = False
            raise ValueError("not this one")
        self.state = state


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, hooked = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300)), nn.Linear(3, 3)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "hooked": hooked,
        "optimizer": optimizer,
        "thing": Thing(seed),
        "rng": torch.Generator().manual_seed(seed),
        "array": np.full((70, 50), seed),
        "tensor": torch.full((3000,), float(seed)),
        "values": {"step": seed, "names": ["a", seed]},
        "own": ts.PerRank({"at": seed, "w": torch.full((4,), float(seed))}),
    }
    return state


def seen(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, ts.PerRank):
            found[name] = value.value
        elif isinstance(value, torch.Generator):
            found[name] = value.get_state()
        elif isinstance(value, np.random.Generator):
            found[name] = value.bit_generator.state
        else:
            found[name] = dict(value.state_dict()) if hasattr(value, "state_dict") else value
    return copy.deepcopy(found)


def refuse(state: dict[str, Any], how: str) -> None:
    """Change the state so that a version of `training` is refused."""
    if how == "thing":
        state["thing"].refuses = True
    elif how == "hooked":
        state["hooked"].register_load_state_dict_post_hook(lambda module, keys: 1 / 0)
    elif how == "groups":
        state["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in state["model"].parameters()])
    elif how == "expanded":
        state["tensor"] = torch.zeros(1).expand(3000)
    elif how == "overlap":
        state["array"] = np.zeros(3550, "i8")[:3500].reshape(70, 50)
        state["more"] = state["array"].base[25:3525].reshape(70, 50)
    elif how == "shape":
        state["tensor"] = torch.zeros(2999)
    else:
        state["rng"] = np.random.Generator(np.random.Philox(1))


@pytest.mark.slow
@given(
    st.permutations(PARTS), st.sampled_from(["thing", "hooked", "groups", "expanded", "overlap", "shape", "generator"])
)
@settings(deadline=None, max_examples=20)
def test_a_state_that_is_refused_is_as_it_was(order: list[str], how: str) -> None:
    saved, into = training(1), training(2)
    saved["tensor"] = torch.arange(3000.0)
    if how == "overlap":
        saved["more"] = np.full((70, 50), 9)
        saved["array"] = np.full((70, 50), 8)
    refuse(into, how)
    names = [*order, *(["more"] if how == "overlap" else [])]
    saved, into = {name: saved[name] for name in names}, {name: into[name] for name in names}
    before = seen(into)
    with scratch() as place, ts.Checkpointer(ts.Policy.default(place), "run") as ckpt:
        ckpt.save(saved, step=1).wait()
        with pytest.raises(ts.StateMismatch) as error:
            ckpt.restore(into=into)
        assert difference(seen(into), before) == ""
        assert not hasattr(error.value, "__notes__")
        if how in ("thing", "hooked"):
            into["thing"].refuses = False
            into["hooked"]._load_state_dict_post_hooks.clear()
            ckpt.restore(into=into)
            assert difference(seen(into), seen(saved)) == ""
