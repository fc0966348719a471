"""States as leaves: what is one leaf, what is walked, and what is refused with a remedy."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.equality import same
from support.state_strategies import Point, states
from support.transfer import restore, transfer

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import CONTAINERS
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.walk import MAX_PATH_DEPTH
from tierstate.providers.values.stateful import Rng


def shape(state: Any) -> list[tuple[str, str]]:
    return [(leaf.name, leaf.spec.kind) for leaf in flatten(state).leaves]


@given(states())
@settings(deadline=None)
def test_containers_come_first_and_paths_are_unique(state: Any) -> None:
    seen: dict[str, str] = {}
    for node in flatten(state).nodes:
        path, kind = node.leaf.path, node.leaf.spec.kind
        if kind != "storage":
            assert not path or seen[encode_path(path[:-1])] in CONTAINERS
        assert encode_path(path) not in seen
        assert (node.provider is not None) == node.leaf.spec.has_bytes
        seen[encode_path(path)] = kind


def test_plain_sequences_are_one_leaf_and_dicts_are_walked() -> None:
    t = torch.zeros(1)
    assert shape([1, (2, {"a": 3})]) == [(".", "value")]
    assert shape([1, (2, t)]) == [(".", "list"), ("0", "value"), ("1", "tuple"), ("1.0", "value"), ("1.1", "tensor")]
    assert shape({"d": {}, "l": [], "t": (), "s": {1}, "z": torch.Size([1])}) == [
        (".", "dict"), ("d", "dict"), ("l", "value"), ("t", "value"), ("s", "value"), ("z", "value"),
    ]  # fmt: skip
    assert shape(Point(1, OrderedDict())) == [(".", "namedtuple"), ("x", "value"), ("y", "odict")]
    assert shape(t) == [(".", "tensor")]
    assert shape(Counter("aab")) == [(".", "value")]


def test_keys_that_look_alike_are_apart() -> None:
    state = {
        "0": 1,
        0: 2,
        "a.b": 3,
        ("a", "b"): 4,
        b"0": 5,
        None: 6,
        "None": 7,
        1.5: 8,
        "1.5": 9,
        True: 10,
        "": 11,
        "\ud83d\ude00": 12,
    }
    assert same(restore(*transfer(flatten(state))), state)
    assert len({leaf.name for leaf in flatten(state).leaves}) == len(state) + 1


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            {"a": [object()]},
            r"a\.0: a builtins\.object has no provider; allow pickle .*match: 'a.0', pickle.* register",
        ),
        ({"a": {"b's": object()}}, r"match: 'a.\"b''s\"', pickle: true"),
        ({"a": defaultdict(lambda: 1)}, "a: a defaultdict that makes values by .* to one of .*; allow pickle"),
        ({"a": {1, object()}}, "a: .*object is not a plain value; or allow pickle"),
        ({"a": {frozenset(): torch.zeros(1)}}, "a: the key frozenset.* cannot be saved"),
        ({"a": {10**5000: torch.zeros(1)}}, "a: the key <int of 16610 bits> of type int cannot be saved"),
        ({"a": {(1, 10**5000): torch.zeros(1)}}, r"a: the key \(1, <int of 16610 bits>\) of type"),
        ({"a": {float("nan"): torch.zeros(1), float("inf") - float("inf"): 2, float("nan") * 1: 3}}, "a: the key nan"),
        ({"a": np.array([object()])}, r"a: .*objects.*; or allow pickle .*pickle: true\}\]`\)$"),
        (
            {"a": torch.eye(2).to_sparse()},
            r"a: .*layout.*; or allow pickle .*pickle: true\}\]`\)$",
        ),  # no provider for all
        ({"a": torch.zeros(4, dtype=torch.uint8).view(torch.qint8)}, "a: a quantized tensor"),
        ({"a": torch.ones([1] * 65)}, "a: .* is not a shape of at most 64 dimensions"),
        ({"a": torch.empty(0, 1 << 40, 1 << 20)}, "a: .* is not a shape of"),
        ({"a": np.empty((0, 1 << 40, 1 << 14))}, "a: .* is not a shape of"),
        ({"a": torch.nn.Linear}, "a: a builtins.type has no provider"),
        ({"a": random.SystemRandom()}, "a: the state of random.SystemRandom failed"),
    ],
)
def test_what_cannot_be_saved_names_its_path(state: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        flatten(state)


def test_cycles_and_depth() -> None:
    state: dict[str, Any] = {"a": {"b": [torch.zeros(1)]}}
    state["a"]["b"].append(state["a"])
    with pytest.raises(CaptureError, match=r"a\.b\.1: is the same object as a, which holds it"):
        flatten(state)
    plain: list[Any] = []
    plain.append(plain)
    with pytest.raises(CaptureError, match="hold itself"):
        flatten(plain)
    deep: Any = torch.arange(3)
    for _ in range(MAX_PATH_DEPTH):
        deep = {"d": deep}
    assert same(restore(*transfer(flatten(deep))), deep)
    assert same(restore(*transfer(flatten(deep)), into=deep), deep)
    with pytest.raises(CaptureError, match="nested deeper"):
        flatten({"d": deep})


def test_a_container_twice_is_saved_twice() -> None:
    inner = {"t": torch.arange(3)}
    out = restore(*transfer(flatten({"a": inner, "b": inner})))
    assert out["a"] is not out["b"]
    assert out["a"]["t"] is out["b"]["t"]


def test_pickle_only_where_it_is_allowed() -> None:
    state = {"a": {"x": complex}, "b": 1, "c": [defaultdict(complex.conjugate, {1: [2]}), torch.zeros(1)]}
    with pytest.raises(CaptureError):
        flatten(state, allow_pickle=lambda path: path[0] == "a")
    tree = flatten(state, allow_pickle=lambda path: True)
    assert [n.leaf.name for n in tree.nodes if n.leaf.spec.kind == "object"] == ["a.x", "c.0"]
    assert restore(*transfer(tree), allow_pickle=lambda path: True) == state


def test_a_state_that_fails_while_it_is_read() -> None:
    class Broken:
        def state_dict(self) -> None:
            raise KeyError("gone")

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(CaptureError, match=r"a\.b: the state of .*Broken failed: KeyError") as error:
        flatten({"a": {"b": Broken()}})
    assert isinstance(error.value.__cause__, KeyError)


def test_the_tree_holds_the_bytes_as_they_are_when_filled() -> None:
    state = {"t": torch.zeros(4), "v": [1, 2]}
    tree = flatten(state)
    state["t"] += 1
    state["v"].append(3)  # plain values are encoded at once
    leaves, data = transfer(tree)
    state["t"] += 1
    out = restore(leaves, data)
    assert out["t"].tolist() == [1] * 4
    assert out["v"] == [1, 2]


def test_random_generators_come_back() -> None:
    def draw() -> list[Any]:
        return [
            torch.rand(2, generator=state["torch"]).tolist(),
            state["python"].random(),
            *(float(state[k].standard_normal()) for k in ("numpy", "philox", "legacy")),
            int(state["bits"].random_raw()),
            random.random(),
            float(np.random.rand()),
            torch.rand(1).item(),
        ]

    state = {
        "torch": torch.Generator().manual_seed(1),
        "python": random.Random(2),
        "numpy": np.random.default_rng(3),
        "philox": np.random.Generator(np.random.Philox(4)),
        "legacy": np.random.RandomState(5),
        "bits": np.random.SFC64(6),
        "all": Rng(),
    }
    leaves, data = transfer(flatten(state))
    first = draw()
    assert draw() != first
    assert restore(leaves, data, into=state) is state
    assert draw() == first


def test_rng_is_set_whole_or_not_at_all() -> None:
    rng = Rng()
    saved = rng.state_dict()
    random.seed(1)
    before = rng.state_dict()
    with pytest.raises(RuntimeError):
        rng.load_state_dict({**saved, "torch": torch.zeros(3, dtype=torch.uint8)})
    assert same(rng.state_dict(), before)
    with pytest.raises(ValueError, match="no generator numpy"):
        rng.load_state_dict({"python": 1, "torch": 2})
    with pytest.raises(ValueError, match="of 3 CUDA devices"):
        rng.load_state_dict({**saved, "cuda": [torch.zeros(16, dtype=torch.uint8)] * 3})
    assert as_buffer(b"x").tolist() == [120]


def test_a_state_dict_in_a_list_is_walked_for_what_it_has_beside_its_items() -> None:
    assert shape([torch.nn.ReLU().state_dict()]) == [(".", "list"), ("0", "odict")]
    counter = Counter(a=1)
    counter._metadata = {"a": 1}  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="has an attribute '_metadata' beside its items"):
        flatten([counter])
