"""Restoring in place and anew: all differences at once, only what was asked for, nothing from anybody believed."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import same
from support.state_strategies import Point
from support.transfer import restore, transfer

from tierstate.manifest.errors import FormatError, StateMismatch, Unsafe
from tierstate.manifest.format.leaf import CONTAINERS, Leaf, Spec
from tierstate.providers.tensors import tensors
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.structure import named_type, version_tree
from tierstate.providers.tree.unflatten import NEW, plan_restore


def nested() -> dict[str, Any]:
    return {
        "model": OrderedDict(w=torch.arange(6.0).view(2, 3), b=torch.ones(3)),
        "layers": [{"k": torch.zeros(1)}, {"k": torch.ones(1)}, 5],
        "pair": (torch.full((2,), 3.0), "x"),
        "point": Point(np.arange(3), None),
        "step": 3,
        "plan": [1, 2, 3],
        7: {"none": None, "empty": {}},
    }


LEAVES, DATA = transfer(flatten(nested()))


def test_the_given_objects_are_filled_and_returned() -> None:
    target = nested()
    target["model"]["w"].zero_()
    target["step"], target["plan"], target[7]["none"] = "other", [], 4
    target["pair"] = (target["pair"][0], "other")
    tensor, array, pair = target["model"]["w"], target["point"].x, target["pair"]
    out = restore(LEAVES, DATA, into=target)
    assert out is target
    assert same(out, nested())
    assert out["model"]["w"] is tensor
    assert out["point"].x is array
    assert out["pair"] is not pair  # its text was replaced, and a tuple cannot change
    assert out["pair"][0] is pair[0]


def test_all_differences_are_listed_before_anything_is_touched() -> None:
    target = nested()
    target["model"]["w"] = torch.zeros(3, 2)
    target["model"]["b"] = torch.zeros(3, dtype=torch.bfloat16)
    target["layers"] = tuple(target["layers"])
    target["point"] = Point({"deep": 1}, None)
    del target["step"]
    target["new"] = {"x": torch.full((2,), 9.0), "y": 1}
    before = {"w": target["model"]["w"], "x": target["new"]["x"]}
    with pytest.raises(StateMismatch) as error:
        restore(LEAVES, DATA, into=target)
    assert str(error.value).splitlines() == [
        "the given state and the version differ in 7 leaves; nothing was restored",
        "only in the given state (2):",
        "  new.x",
        "  new.y",
        "only in the version (1):",
        "  step",
        "not alike (4):",
        "  model.w: has shape (3, 2) here, (2, 3) in the version",
        "  model.b: has dtype bfloat16 here, float32 in the version",
        "  layers: is tuple here, list in the version",
        "  point.x: is dict here, array in the version",
    ]
    assert not before["w"].any()
    assert before["x"].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("here", "saved", "says"),
    [
        (torch.zeros(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16), "float16 here, bfloat16"),
        (torch.zeros(2, dtype=torch.int32), torch.ones(2), "int32 here, float32"),
        (np.zeros(2, "<i4"), np.ones(2, "<f4"), "<i4 here, <f4"),
    ],
)
def test_a_dtype_of_the_same_width_is_another_dtype(here: Any, saved: Any, says: str) -> None:
    leaves, _ = transfer(flatten({"x": saved}))
    with pytest.raises(StateMismatch, match=f"x: has dtype {says} in the version"):
        plan_restore(leaves, into={"x": here})


def test_a_long_list_of_differences_is_cut() -> None:
    leaves, _ = transfer(flatten({str(i): 0 for i in range(50)}))
    with pytest.raises(StateMismatch, match="differ in 50 leaves") as error:
        plan_restore(leaves, into={})
    assert str(error.value).endswith("and 30 more")


def test_keys_of_another_type_are_other_keys() -> None:
    leaves, _ = transfer(flatten({1: 0}))
    for key in (True, 1.0, "1"):
        with pytest.raises(StateMismatch, match="differ in 2 leaves"):
            plan_restore(leaves, into={key: 0})


def test_leaves_belong_to_the_container_with_their_very_key() -> None:
    keys = (1, True, "1")
    leaves = [Leaf((key,), Spec("dict")) for key in keys] + [Leaf((key, "x"), Spec("value")) for key in keys]
    root = version_tree([Leaf((), Spec("dict")), *leaves])
    assert [[leaf.index for leaf in node.children.values()] for node in root.children.values()] == [[4], [5], [6]]


def test_a_target_that_could_not_be_saved() -> None:
    target = nested()
    target["step"] = object()
    with pytest.raises(StateMismatch, match=r"step: a builtins.object has no provider"):
        restore(LEAVES, DATA, into=target)
    assert restore(LEAVES, DATA, into=target, only=["model.**"]) is target


def test_tensors_on_the_meta_device_are_replaced() -> None:
    target = nested() | {"model": OrderedDict(w=torch.zeros(2, 3, device="meta"), b=torch.ones(3))}
    restore(LEAVES, DATA, into=target)
    assert same(target, nested())
    for wrong in (torch.zeros(3, 3, device="meta"), torch.zeros(2, 3, device="meta", dtype=torch.int64)):
        target = nested() | {"model": OrderedDict(w=wrong, b=torch.ones(3))}
        with pytest.raises(StateMismatch, match=r"model\.w: has (shape|dtype) .* here"):
            restore(LEAVES, DATA, into=target)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["model.*"], {"model": OrderedDict(w=torch.arange(6.0).view(2, 3), b=torch.ones(3))}),
        (["layers"], {"layers": [{"k": torch.zeros(1)}, {"k": torch.ones(1)}, 5]}),
        (["layers.1.**"], {"layers": {1: {"k": torch.ones(1)}}}),
        (["pair.1", "step"], {"pair": {1: "x"}, "step": 3}),
        (["point.x"], {"point": {"x": np.arange(3)}}),
        (["7.empty"], {7: {"empty": {}}}),
        (["**"], nested()),
        (["."], nested()),
    ],
)
def test_only_some_leaves_anew(only: list[str], expected: Any) -> None:
    target = plan_restore(LEAVES, only=only)
    assert len(target.wanted) == len([leaf for leaf in flatten(expected).leaves if leaf.spec.has_bytes])
    assert same(restore(LEAVES, DATA, only=only), expected)


def test_only_some_leaves_in_place() -> None:
    target = {"model": OrderedDict(w=torch.zeros(2, 3)), "pair": (torch.zeros(2), "y"), "other": object()}
    out = restore(LEAVES, DATA, into=target, only=["model.w", "pair.1"])
    assert out is target
    assert out["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert out["pair"][0].tolist() == [0, 0]
    assert out["pair"][1] == "x"
    with pytest.raises(StateMismatch, match=r"only in the version \(1\):\n  model.b$"):
        restore(LEAVES, DATA, into=target, only=["model.*"])
    target["model"]["extra"] = 1
    with pytest.raises(StateMismatch, match=r"only in the given state \(1\):\n  model.extra\n"):
        restore(LEAVES, DATA, into=target, only=["model.*"])


@pytest.mark.parametrize("into", [NEW, {}])
def test_patterns_that_match_nothing(into: Any) -> None:
    with pytest.raises(StateMismatch, match=r"matches weights.\*\*; it has model.w, model.b"):
        plan_restore(LEAVES, only=["weights.**"], into=into)


@pytest.mark.parametrize("state", [torch.arange(3), np.arange(3), 5, [1], (torch.ones(1), 2), Point(torch.ones(1), 2)])
def test_the_root_may_be_anything(state: Any) -> None:
    leaves, data = transfer(flatten(state))
    assert same(restore(leaves, data), state)
    assert same(restore(leaves, data, into=state), state)
    assert same(restore(leaves, data, only=["**"]), state)


def test_unsafe_leaves_need_leave() -> None:
    leaves, data = transfer(flatten({"a": {"f": complex}, "b": 1}, allow_pickle=lambda path: True))
    for into in (NEW, {"a": {"f": None}, "b": 0}, {"a": {"f": complex}, "b": 0}):
        with pytest.raises(Unsafe, match=r"a.f: builtins.type is a pickle, .* allow pickle for this leaf"):
            plan_restore(leaves, into=into)
    assert restore(leaves, data, only=["b"]) == {"b": 1}
    assert restore(leaves, data, allow_pickle=lambda path: path == ("a", "f")) == {"a": {"f": complex}, "b": 1}
    given_state = {"a": {"f": print}, "b": 0}
    assert restore(leaves, data, into=given_state, allow_pickle=lambda path: True) == {"a": {"f": complex}, "b": 1}


def test_fresh_tensors_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    monkeypatch.setattr(tensors, "allocate", lambda spec, device, *_: devices.append(device) or torch.empty(spec.shape))
    plan_restore(LEAVES, device=torch.device("cuda:3"), only=["model.w"])
    assert devices == [torch.device("cuda:3")]


def test_namedtuples_without_their_module() -> None:
    local = namedtuple("local", "x y")
    leaves, data = transfer(flatten([local(1, torch.ones(1)), local(2, 3)]))
    first, second = restore(leaves, data)
    assert (type(first).__name__, first._fields, first.x, second.y) == ("local", ("x", "y"), 1, 3)
    assert type(first) is type(second)
    assert flatten([first]).leaves[1] == leaves[1], "saved again, it is what it was"
    target = [local(0, torch.zeros(1)), local(0, 0)]
    assert type(restore(leaves, data, into=target)[0]) is local
    renamed = namedtuple("renamed", "class y def", rename=True)
    (third,) = restore(*transfer(flatten([renamed(1, torch.ones(1), 3)])))
    assert (type(third).__name__, third._fields, third._0) == ("renamed", ("_0", "y", "_2"), 1)
    with pytest.raises(ValueError, match="no fields"):
        named_type("m:P", ("y", "_0"))
    assert named_type("support.state_strategies:Point", ("x", "y")) is Point
    assert named_type("support.state_strategies:Point", ("x", "z")) is not Point
    assert named_type("os:system", ("x",)).__name__ == "system"


def test_bytes_that_are_no_value_name_the_leaf() -> None:
    index = next(i for i, leaf in enumerate(LEAVES) if leaf.path == ("step",))
    with pytest.raises(FormatError, match="step: an encoded value"):
        restore(LEAVES, {**DATA, index: bytes(len(DATA[index]))})


ROOT, T = Leaf((), Spec("dict")), Spec("tensor", "float32", 4, (1,))
RAW = Leaf(("a", "storage"), Spec("storage", "uint8", 1, (4,)))
NAMED = {"type": "m:P", "fields": ["x"]}


@pytest.mark.parametrize(
    "leaves",
    [
        [],
        [Leaf(("a",), T)],
        [ROOT, ROOT],
        [Leaf((), Spec("storage", "uint8", 1, (4,)))],
        [ROOT, Leaf(("a",), T), Leaf(("a",), T)],
        [ROOT, Leaf(("a",), T), RAW, RAW],
        [ROOT, RAW, Leaf(("a",), Spec("dict")), Leaf(("a", "storage"), T)],
        [ROOT, Leaf((), RAW.spec)],
        [ROOT, Leaf(("a", "b"), T)],
        [ROOT, Leaf(("a", "b"), T), Leaf(("a",), Spec("dict"))],
        [ROOT, Leaf(("a",), T), Leaf(("a", "b"), T)],
        [ROOT, Leaf(("a",), T), Leaf(("a", "b", "c"), T)],
        [Leaf((), T), Leaf(("a",), T)],
        [Leaf((), Spec("list")), Leaf((1,), T)],
        [Leaf((), Spec("list")), Leaf(("0",), T)],
        [Leaf((), Spec("list")), Leaf((True,), T)],
        [Leaf((), Spec("tuple")), Leaf((1,), T), Leaf((0,), T)],
        [Leaf((), Spec("namedtuple")), Leaf(("x",), T)],
        [Leaf((), Spec("namedtuple", attrs={**NAMED, "fields": "x"})), Leaf(("x",), T)],
        [Leaf((), Spec("namedtuple", attrs=NAMED)), Leaf(("y",), T)],
        [Leaf((), Spec("namedtuple", attrs=NAMED))],
        [Leaf((), Spec("namedtuple", attrs={"type": "m:P", "fields": ["1x"]})), Leaf(("1x",), T)],
        [ROOT, Leaf(("a",), Spec("wonder"))],
        [ROOT, Leaf(("a",), Spec("tensor", "float31", 4, (1,)))],
        [ROOT, *(Leaf(("a",) * n, Spec("dict")) for n in range(1, 300))],
    ],
)
def test_leaves_from_anybody(leaves: list[Leaf]) -> None:
    with pytest.raises(FormatError):
        restore(leaves, dict.fromkeys(range(len(leaves)), b"\0" * 4))


_attrs = st.dictionaries(
    st.sampled_from(
        ["to", "offset", "strides", "fields", "type", "order", "parameter", "requires_grad", "conj", "neg"]
    ),
    st.one_of(
        st.sampled_from(['["a"]', "[]", '["b"]', "m:P", "F", True]), st.integers(-2, 9), st.lists(st.integers(-1, 4))
    ),
    max_size=4,
)
_specs = st.builds(
    Spec,
    st.sampled_from(["tensor", "array", "value", "object", "tied", "storage", *sorted(CONTAINERS), "huh"]),
    st.sampled_from(["float32", "uint8", "<f4", "|V4", "complex64", "bits8", "|O"]),
    st.sampled_from([1, 4, 8, 0, -1]),
    st.lists(st.integers(-1, 5), max_size=3).map(tuple),
    _attrs,
)
_paths = st.lists(st.sampled_from(["a", "b", 0, 1, "storage"]), max_size=2).map(tuple)


@given(_specs, st.lists(st.builds(Leaf, _paths, _specs), max_size=5))
@settings(deadline=None, max_examples=500)
def test_any_leaves_are_a_state_or_one_of_our_errors(root: Spec, rest: list[Leaf]) -> None:
    leaves = [Leaf((), root), *rest]
    data = {i: bytes(max(0, leaf.spec.nbytes)) for i, leaf in enumerate(leaves)}
    for into in (NEW, {"a": torch.zeros(2), "b": [1, np.zeros(1)]}):
        try:
            restore(leaves, data, into=into)
        except (FormatError, Unsafe, StateMismatch):
            continue
