"""Shared memory is saved once and tied again, and never lets one leaf overwrite another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import bits, difference
from support.state_strategies import make, scrambled, windows
from support.transfer import restore, transfer

from tierstate.manifest.errors import FormatError, StateMismatch
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.unflatten import plan_restore


def kinds(state: Any) -> dict[str, str]:
    return {leaf.name: leaf.spec.kind for leaf in flatten(state).leaves if leaf.path}


@st.composite
def sharing(draw: st.DrawFn) -> list[torch.Tensor]:
    memory = make(torch.uint8, (48,), draw(st.integers(0, 99))).untyped_storage()
    return draw(st.lists(windows(memory), min_size=2, max_size=5))


@given(sharing(), st.integers(1, 70))
@settings(deadline=None)
def test_any_overlap_comes_back(state: list[torch.Tensor], piece: int) -> None:
    leaves, data = transfer(flatten(state), 16)
    assert difference(state, restore(leaves, data, piece=piece)) == ""
    assert difference(state, restore(leaves, data, piece=piece, into=scrambled(state))) == ""


@given(sharing(), st.data())
@settings(deadline=None, max_examples=300)
def test_a_target_that_shares_otherwise_is_refused_or_right(state: list[torch.Tensor], data: st.DataObject) -> None:
    """Whatever memory the given tensors share, each ends with its own saved bits, or nothing is touched."""
    leaves, saved = transfer(flatten(state))
    memory = torch.zeros(96, dtype=torch.uint8)
    target = []
    for tensor in state:
        size, strides = tensor.element_size(), tensor.stride()
        offset = data.draw(st.sampled_from([tensor.storage_offset(), 0, 48 // size]))
        storage = memory.untyped_storage() if data.draw(st.booleans()) else torch.zeros(96).untyped_storage()
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        view = torch.empty(0, dtype=word).set_(storage, offset, tensor.shape, strides).view(tensor.dtype).detach()
        target.append(view)
    before = memory.clone()
    try:
        out = restore(leaves, saved, into=target)
    except StateMismatch:
        assert torch.equal(memory, before)
    else:
        assert list(map(bits, out)) == list(map(bits, state))


def test_equal_views_are_saved_once() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    tree = flatten({"embed": weight, "head": weight, "t": [weight.T, weight.detach()]})
    assert [n.leaf.spec.kind for n in tree.nodes if n.leaf.spec.has_bytes] == ["tensor"]
    out = restore(*transfer(tree))
    assert out["embed"] is out["head"]
    assert isinstance(out["embed"], torch.nn.Parameter)
    assert type(out["t"][1]) is torch.Tensor
    assert out["t"][0].untyped_storage().data_ptr() == out["embed"].untyped_storage().data_ptr()


def test_the_dense_tensor_that_holds_all_is_the_root() -> None:
    flat = torch.arange(12.0)
    tree = flatten({"part": flat[3:7], "all": flat, "bits": flat.view(torch.int32)[::2]})
    by_name = {leaf.name: leaf.spec for leaf in tree.leaves}
    assert by_name["all"].kind == "tensor"
    assert dict(by_name["part"].attrs) == {"to": '["all"]', "offset": 12, "strides": [1]}
    assert dict(by_name["bits"].attrs) == {"to": '["all"]', "offset": 0, "strides": [2]}


def test_partial_overlaps_are_views_of_a_storage() -> None:
    flat = torch.arange(100.0)
    tree = flatten({"a": flat[40:60], "b": flat[50:70]})
    assert kinds({"a": flat[40:60], "b": flat[50:70]}) == {"a": "tied", "a.storage": "storage", "b": "tied"}
    assert tree.leaves[2].spec.nbytes == 30 * 4


def test_what_shares_a_storage_but_no_bytes_is_separate() -> None:
    base = torch.arange(20.0).view(4, 5)
    assert set(kinds([base[:2], base[2:]]).values()) == {"tensor"}
    assert set(kinds([base[:, :2], base[:, 2:4], base[:, 4]]).values()) == {"tensor"}
    assert set(kinds([base[:0], base[:0]]).values()) == {"tensor"}


def test_a_lone_slice_does_not_drag_its_storage() -> None:
    assert sum(leaf.spec.nbytes for leaf in flatten({"a": torch.zeros(1000, 10)[:, 2:4]}).leaves) == 8000


def test_lazy_conjugates_are_tied() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    out = restore(*transfer(flatten([x.conj(), x, x.conj().imag])))
    assert torch.equal(out[0], x.conj())
    out[1][0] = 5 + 7j
    assert out[0][0] == 5 - 7j
    assert out[2][0] == -7


def test_the_same_array_is_saved_once() -> None:
    array = np.arange(6.0)
    tree = flatten({"a": array, "b": array, "c": array[:3], "t": torch.from_numpy(array)})
    assert [leaf.spec.kind for leaf in tree.leaves] == ["dict", "array", "tied", "array", "tensor"]
    out = restore(*transfer(tree))
    assert out["a"] is out["b"]


def test_tied_in_the_version_and_separate_here() -> None:
    x = torch.randn(3, 3)
    array = np.arange(3)
    leaves, data = transfer(flatten({"a": x, "b": x, "c": x[1:, 1], "n": array, "m": array}))
    given_state = {"a": torch.zeros(3, 3).T, "b": torch.zeros(3, 6)[:, ::2], "c": torch.zeros(2)}
    given_state |= {"n": np.zeros(3, int), "m": np.zeros(6, int)[::2]}
    out = restore(leaves, data, into=given_state)
    assert torch.equal(out["a"], x)
    assert torch.equal(out["b"], x)
    assert torch.equal(out["c"], x[1:, 1])
    assert out["m"].tolist() == out["n"].tolist() == [0, 1, 2]


def test_tied_here_and_separate_in_the_version() -> None:
    leaves, data = transfer(flatten({"a": torch.ones(3), "b": torch.zeros(3)}))
    shared = torch.full((3,), 7.0)
    with pytest.raises(StateMismatch, match="b: shares memory with a here, but not"):
        restore(leaves, data, into={"a": shared, "b": shared})
    assert shared.tolist() == [7, 7, 7]
    assert restore(leaves, data, into={"a": shared, "b": shared.clone()})["a"] is shared


@pytest.mark.parametrize("only", [["b"], ["c"], ["d"]])
def test_a_tied_leaf_without_its_root(only: list[str]) -> None:
    x = torch.arange(6.0)
    state = {"a": x, "b": x, "c": x[2:4], "d": x.view(2, 3).T}
    leaves, data = transfer(flatten(state))
    (name,) = only
    assert torch.equal(restore(leaves, data, only=only)[name], state[name])
    given_state = {key: torch.zeros_like(value) for key, value in state.items()}
    restore(leaves, data, only=only, into=given_state)
    assert {key for key, value in given_state.items() if value.any()} == {name}
    assert torch.equal(given_state[name], state[name])


ROOT = Leaf((), Spec("dict"))
BASE = Leaf(("a",), Spec("tensor", "float32", 4, (4,)))
RAW = Leaf(("a", "storage"), Spec("storage", "uint8", 1, (16,)))


@pytest.mark.parametrize(
    "tied",
    [
        Spec("tied", "float32", 4, (4,)),
        Spec("tied", "float32", 4, (4,), {"to": "[]"}),
        Spec("tied", "float32", 4, (4,), {"to": '["b"]'}),
        Spec("tied", "float32", 4, (4,), {"to": '["no"]'}),
        Spec("tied", "float32", 4, (4,), {"to": ["a"]}),
        Spec("tied", "float32", 4, (5,), {"to": '["a"]'}),
        Spec("tied", "float64", 8, (2,), {"to": '["a"]'}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": 12, "strides": [1]}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": 2, "strides": [1]}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": -4, "strides": [1]}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": 4, "strides": [-1]}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": 0, "strides": [1, 1]}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": 0}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": True, "strides": [1]}),
        Spec("tied", "float32", 4, (2,), {"to": '["a"]', "offset": 0, "strides": [1], "conj": True}),
        Spec("tied", "int32", 4, (2,), {"to": '["a"]', "offset": 0, "strides": [1], "neg": True}),
        Spec("tied", "int32", 4, (2,), {"to": '["a"]', "offset": 0, "strides": [1], "requires_grad": True}),
        Spec("tied", "float32", 8, (2,), {"to": '["a"]', "offset": 0, "strides": [1]}),
        Spec("tied", "object", 8, (2,), {"to": '["a"]', "offset": 0, "strides": [1]}),
        Spec("tied", "uint8", 1, (16,), {"to": '["a","storage"]'}),
        Spec("tied", "uint8", 1, (17,), {"to": '["a","storage"]', "offset": 0, "strides": [1]}),
    ],
)
def test_ties_from_anybody(tied: Spec) -> None:
    with pytest.raises(FormatError, match="b: "):
        plan_restore([ROOT, BASE, RAW, Leaf(("b",), tied)])
