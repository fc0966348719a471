"""Tensors saved with fewer bits: as near as promised, marked, and refused where nobody asked for them."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, tier
from support.equality import difference
from support.transfer import feed, stream

import tierstate as ts
from tierstate.manifest.errors import FormatError, StateMismatch, Unsafe
from tierstate.manifest.format.leaf import LOSSY, Spec
from tierstate.providers.tensors.lossy import FLOATS, LOSSY_METHODS, CastProvider, LossyProvider, QuantizedProvider
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.tree.lossy_rules import lossy_provider

BLOCK = QuantizedProvider.block


@st.composite
def floats(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of all that a type can say, some of them odd views."""
    dtype = draw(st.sampled_from(FLOATS))
    n = draw(st.sampled_from([0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]))
    scale = draw(st.sampled_from([1.0, 1e-44, 1e-39, 1e-30, 1e30, 3.3e38, 6e4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = (torch.randn(n, generator=generator, dtype=torch.float64) * scale).to(dtype)
    for at in draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=3)) if n else ():
        tensor[at] = draw(st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 65504.0]))
    if draw(st.booleans()) and n % 2 == 0:
        tensor = tensor.view(2, -1).T
    return tensor


@given(value=floats(), method=st.sampled_from(list(LOSSY_METHODS)), size=st.sampled_from([16, 48, 4096]))
def test_what_comes_back_is_as_near_as_the_leaf_says(value: torch.Tensor, method: str, size: int) -> None:
    provider = lossy_provider(TensorProvider(value), method)
    data, spec = stream(provider, size), provider.spec
    assert len(data) == spec.nbytes
    if not isinstance(provider, LossyProvider):
        assert LOSSY not in spec.attrs
        return
    told = spec.attrs[LOSSY]
    back = type(provider).fresh(spec)
    feed(back, data, 5)
    found = back.done()
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    exact, error = value.double(), (found.double() - value.double()).abs()
    if method == "bf16":
        bound = exact.abs() * told["relative"]
    else:
        flat = torch.nn.functional.pad(exact.reshape(-1), (0, -exact.numel() % BLOCK)).view(-1, BLOCK)
        most = flat.abs().amax(1).repeat_interleave(BLOCK)[: exact.numel()] if exact.numel() else flat.view(-1)
        bound = (most * told["of_block_maximum"]).view(exact.shape)
    finite = exact.isfinite()
    assert bool((error <= bound.clamp(min=told["absolute"]))[finite].all())
    assert torch.equal(found.isnan(), value.isnan())
    assert torch.equal(found[value.isinf()], value[value.isinf()])


@pytest.mark.parametrize("method", LOSSY_METHODS)
def test_a_default_device_of_torch_does_not_matter(method: str) -> None:
    value = torch.linspace(-1, 1, BLOCK)
    provider = lossy_provider(TensorProvider(value), method)
    with torch.device("meta"):
        back = type(provider).fresh(provider.spec)
        feed(back, stream(provider))
        assert torch.allclose(back.done(), value, atol=0.01)


@pytest.mark.parametrize("method", LOSSY_METHODS)
def test_the_bytes_do_not_depend_on_where_chunks_are_cut(method: str) -> None:
    value = torch.linspace(-1, 1, 3 * BLOCK + 5)  # its scales begin at an odd byte, so that chunks cut some in two
    provider = lossy_provider(TensorProvider(value), method)
    assert stream(provider, 16) == stream(provider)


@given(value=floats())
def test_values_that_cannot_be_kept_near_are_saved_as_they_are(value: torch.Tensor) -> None:
    eight, half = lossy_provider(TensorProvider(value), "int8"), lossy_provider(TensorProvider(value), "bf16")
    fits = bool(value.isfinite().all()) and bool((value.double().abs() <= torch.finfo(torch.float32).max).all())
    assert isinstance(eight, QuantizedProvider) == fits
    overflows = bool((value.isfinite() & ~value.to(torch.bfloat16).isfinite()).any())
    if value.numel():
        assert isinstance(half, CastProvider) == (value.itemsize > 2 and not overflows)


@pytest.mark.parametrize("value", [torch.arange(4), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.cfloat)])
def test_other_types_are_saved_as_they_are(value: torch.Tensor) -> None:
    assert type(lossy_provider(TensorProvider(value), "int8")) is TensorProvider


def test_a_state_that_changes_while_it_is_captured_is_no_promise_kept() -> None:
    value = torch.zeros(BLOCK)
    provider = lossy_provider(TensorProvider(value), "int8")
    value[3] = float("inf")
    with pytest.raises(ts.CaptureError, match="further off than promised"):
        stream(provider, 4096)


HOSTILE = [
    {"of": "int32"},
    {"of": "no such"},
    {"of": ["float32"]},
    {"shape": [3]},
    {"shape": "7"},
    {"shape": [-1]},
    {"shape": [1 << 60]},
    {"shape": [2.0]},
    {"shape": None},
]


@pytest.mark.parametrize("attrs", HOSTILE)
@pytest.mark.parametrize("method", LOSSY_METHODS)
def test_specs_that_lie_are_refused(method: str, attrs: dict[str, Any]) -> None:
    spec = LOSSY_METHODS[method](torch.randn(7)).spec
    with pytest.raises(FormatError):
        LOSSY_METHODS[method].fresh(Spec(spec.kind, spec.dtype, spec.itemsize, spec.shape, {**spec.attrs, **attrs}))


def rules(place: Path, method: str = "int8") -> ts.Policy:
    return policy({"nvme": tier("nvme", place)}, rules=[{"match": "**.exp_avg*", "lossy": method}])


def adam() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [s[k] for s in optimizer.state_dict()["state"].values() for k in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("method", LOSSY_METHODS)
def test_a_rule_saves_moments_with_fewer_bits_and_a_restore_must_allow_that(place: Path, method: str) -> None:
    model, optimizer = adam()
    state = {"model": model, "optimizer": optimizer}
    with ts.Checkpointer(rules(place, method), "run") as ckpt:
        for step in range(3):  # also by a plan that is remembered
            ckpt.save(state, step=step).wait()
        infos = ckpt.versions()
        assert {info.lossy for info in infos} == {(method,)}
        assert infos[0].id != infos[1].id
        assert ckpt.diff(1, 2)[0].change == "same"
        exact, found = copy.deepcopy(moments(optimizer)), adam()
        for s in found[1].state_dict()["state"].values():
            s["exp_avg"].zero_()
        with pytest.raises(Unsafe, match=r"exp_avg.*and 3 more leaves were saved.*allow_lossy=True"):
            ckpt.restore({"model": found[0], "optimizer": found[1]})
        ckpt.restore({"model": found[0], "optimizer": found[1]}, allow_lossy=True)
        for one, other in zip(moments(found[1]), exact, strict=True):
            assert one.dtype == other.dtype
            assert not torch.equal(one, other)
            torch.testing.assert_close(one, other, rtol=2**-8, atol=float(other.abs().max()) / 250)
        assert difference(found[0].state_dict(), model.state_dict()) == ""
        assert difference(ckpt.load(only=["model.**"])["model"], model.state_dict()) == ""
        loaded = ckpt.load(allow_lossy=True)
        assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], moments(found[1])[0])
        assert ckpt.verify(deep=True).ok


def test_values_turn_to_what_cannot_be_reduced_and_back(place: Path) -> None:
    state = {"exp_avg": torch.randn(300), "w": torch.randn(10)}
    spec = policy({"nvme": tier("nvme", place)}, rules=[{"match": "exp*", "lossy": "int8"}])
    with ts.Checkpointer(spec, "r") as ckpt:
        said = []
        for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
            state["exp_avg"][7] = value
            ckpt.save(state, step=step).wait()
            said.append(ckpt.versions()[-1].lossy)
            got = ckpt.load(allow_lossy=True)
            assert difference(got, state) == "" or said[-1]
        assert said == [("int8",), (), (), ("int8",)]


def test_tensors_that_share_memory_are_saved_exactly(place: Path) -> None:
    base = torch.randn(400)
    state = {"a": base, "b": base, "c": base[:50], "d": torch.randn(5)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, rules=[{"match": "**", "lossy": "bf16"}]), "r") as ckpt:
        ckpt.save(state, step=1).wait()
        got = ckpt.load(allow_lossy=True)
        assert got["a"] is got["b"] or got["a"].data_ptr() == got["b"].data_ptr()
        assert difference({k: got[k] for k in "abc"}, {k: state[k] for k in "abc"}) == ""
        assert torch.equal(got["d"], state["d"].bfloat16().float())


def test_wrapped_values_are_filled_in_place_and_stay_wrapped(place: Path) -> None:
    tensor = torch.randn(600)
    state = {"m": ts.Lossy(tensor, "int8"), "x": 1}
    kept = tensor.clone()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "r") as ckpt:
        ckpt.save(state, step=1).wait()
        tensor.zero_()
        wrapper = state["m"]
        ckpt.restore(state, allow_lossy=True)
        assert state["m"] is wrapper
        torch.testing.assert_close(tensor, kept, rtol=0, atol=float(kept.abs().max()) / 250)
        plain = {"m": torch.zeros(600), "x": 0}
        ckpt.restore(plain, allow_lossy=True)
        assert torch.equal(plain["m"], tensor)
        ckpt.save({"m": kept, "x": 2}, step=2).wait()
        ckpt.restore(state)
        assert state["m"] is wrapper
        assert torch.equal(tensor, kept)
        assert state["x"] == 2
        with pytest.raises(StateMismatch, match="dtype float64 here, float32 in the version"):
            ckpt.restore({"m": torch.zeros(600, dtype=torch.float64), "x": 0}, step=1, allow_lossy=True)
        with pytest.raises(StateMismatch, match="shape"):
            ckpt.restore({"m": torch.zeros(599), "x": 0}, step=1, allow_lossy=True)
        with pytest.raises(StateMismatch, match="is value here"):
            ckpt.restore({"m": 5, "x": 0}, step=1, allow_lossy=True)


def test_memory_that_two_leaves_share_is_not_filled_from_an_exact_and_a_lossy_one(place: Path) -> None:
    shared = torch.zeros(300)
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "r") as ckpt:
        ckpt.save({"a": torch.randn(300), "b": ts.Lossy(torch.randn(300), "int8")}, step=1).wait()
        with pytest.raises(StateMismatch, match="share"):
            ckpt.restore({"a": shared, "b": shared}, allow_lossy=True)
        assert not shared.any()


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_bytes_saved(seed: int) -> None:
    value = torch.from_numpy(np.random.default_rng(seed).standard_normal(100_000).astype("f4"))
    assert lossy_provider(TensorProvider(value), "bf16").spec.nbytes == 200_000
    assert lossy_provider(TensorProvider(value), "int8").spec.nbytes == 100_000 + 4 * 391


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'fp4' is not known; known are bf16, int8"):
        ts.Lossy(torch.ones(1), "fp4")


@given(seed=st.integers(0, 10_000))
def test_states_that_come_to_share_memory_are_flattened_as_if_they_were_the_first(seed: int) -> None:
    dice, recall = random.Random(seed), FlattenCache(lossy=lambda path: "int8" if path == ("a",) else "")
    pool = [torch.randn(10), torch.randn(10), torch.full((10,), float("nan"))]
    for _ in range(4):
        state = {name: dice.choice(pool) for name in "abc"}
        again = recall.flatten(state)
        anew = FlattenCache(lossy=lambda path: "int8" if path == ("a",) else "").flatten(state)
        assert again.leaves == anew.leaves
