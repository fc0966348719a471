"""Leaves that are renamed while they are restored: their bytes and ties stay, and no two become one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.equality import bits, difference
from support.manifest_strategies import keys, paths
from support.transfer import restore, transfer
from torch import nn

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf_path import Path, format_path
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.rename import WRAPPERS, compile_rename, unwrapped

PARTS = st.sampled_from(["a", "b", "0", "layers", "weight"])
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(tuple)


def renamed(rename: Any, *path: Any) -> Path:
    for step in compile_rename(rename):
        path = step(path)
    return path


@pytest.mark.parametrize(
    ("rename", "path", "new"),
    [
        ({"a": "b"}, ("a", "x"), ("b", "x")),
        ({"a": "b"}, ("c", "a"), ("c", "a")),
        ({"a": "b", "b": "a"}, ("b", 0), ("a", 0)),
        ([("a", "b"), ("b", "c")], ("a", 0), ("c", 0)),
        ({"model.module": "model"}, ("model", "module.layers.0.w"), ("model", "layers.0.w")),
        ({"model.module": "net.core"}, ("model", "module.layers.0.w"), ("net", "core.layers.0.w")),
        ({"model": "net.core"}, ("model", "layers.0.w"), ("net", "core", "layers.0.w")),
        ({"opt.state": "o"}, ("opt", "state", "l.0.w", "exp_avg"), ("o", "l.0.w", "exp_avg")),
        ({"fc": "head"}, ("fc.weight",), ("head.weight",)),
        ({"m.a.w": "m.b.v"}, ("m", "a.w"), ("m", "b.v")),
        ({"m.a.w": "m.w"}, ("m", "a.w"), ("m", "w")),
        ({"m.a.w": "m"}, ("m", "a.w"), ("m",)),
        ({"m": "."}, ("m", "a.w"), ("a.w",)),
        ({"**": "m.**"}, ("a", 1), ("m", "a", 1)),
        ({"model.**": "net.**"}, ("model", "a.w"), ("net", "a.w")),
        ({"**.module": "**"}, ("model", "net.module.fc.w"), ("model", "net.fc.w")),
        ({"l.*.inner": "l.*"}, ("l", 3, "inner", "w"), ("l", 3, "w")),
        ({"l.*.inner": "l.*"}, ("l.3.inner.w",), ("l.3.w",)),
        ({"a": "0"}, ("a", "x"), (0, "x")),
        ({"a": '"0.x"'}, ("a", "x"), ("0.x", "x")),
        ({'m."a.w"': 'm."b.v"'}, ("m", "a.w"), ("m", "b.v")),
        ({'m."a.w"': "m.v"}, ("m", "a.w", 0), ("m", "v", 0)),
        ({'m."a"': "m.b"}, ("m", "a.w"), ("m", "b.w")),
        ({'m."a.w"': "m.v"}, ("m", "a", "w"), ("m", "a", "w")),
        (lambda path: path[1:], ("a", "x"), ("x",)),
        ([unwrapped, {"m": "n"}], ("m", "module.w"), ("n", "w")),
        (unwrapped, ("m", "_orig_mod.module.a._checkpoint_wrapped_module.w"), ("m", "a.w")),
        (unwrapped, ("m", "module", "a", "module"), ("m", "a", "module")),
        (unwrapped, ("module",), ("module",)),
        (unwrapped, (), ()),
        (unwrapped, (0, None, "modules.x"), (0, None, "modules.x")),
    ],
)
def test_a_rule_changes_a_path(rename: Any, path: Path, new: Path) -> None:
    assert renamed(rename, *path) == new


@given(paths.filter(bool), keys)
def test_a_printed_path_is_a_rule_for_it(path: Path, more: Any) -> None:
    """Messages and listings name leaves in this way."""
    assert renamed({format_path(path): "new"}, *path, more) == ("new", more)


@pytest.mark.parametrize(
    ("rename", "error"),
    [
        ({"a.*": "b"}, ValueError),
        ({"a": "b.**"}, ValueError),
        ({"a..b": "c"}, ValueError),
        ({"a": 1}, TypeError),
        ("a=b", TypeError),
        (7, TypeError),
        ([("a",)], TypeError),
        (lambda _path: "model", TypeError),
        (lambda _path: (object(),), TypeError),
    ],
)
def test_what_is_no_rule_is_refused(rename: Any, error: type[Exception]) -> None:
    leaves, data = transfer(flatten({"a": torch.ones(2)}))
    with pytest.raises(error):
        restore(leaves, data, rename=rename)


@st.composite
def wrapped_states(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state dict with ties, and one of the same shapes; both with wrappers at any places of any names."""

    def wrap(name: tuple[str, ...]) -> str:
        found: list[str] = []
        for part in name:
            found += [*draw(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=2)), part]
        return ".".join(found)

    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    tied = draw(st.lists(st.sampled_from(names), max_size=2))
    values = [{name: torch.randn(3) if side == 0 else torch.zeros(3) for name in names} for side in range(2)]
    for one in values:
        for name in tied:
            one[name] = one[names[0]]
    states = [OrderedDict((wrap(name), value) for name, value in one.items()) for one in values]
    return tuple({"model": state, "step": at, "list": [1, {"x": 2.5}]} for at, state in enumerate(states))  # type: ignore[return-value]


@given(wrapped_states())
def test_wrappers_on_either_side_do_not_matter(case: Any) -> None:
    saved, into = case
    leaves, data = transfer(flatten(saved))
    truth = dict(zip(into["model"], saved["model"].values(), strict=True))
    kept = dict(into["model"])
    out = restore(leaves, data, into=into, rename=unwrapped)
    assert out is into
    assert all(out["model"][name] is tensor and bits(tensor) == bits(truth[name]) for name, tensor in kept.items())
    assert out["step"] == 0
    loaded = restore(leaves, data, rename=unwrapped)
    plain = OrderedDict((unwrapped((name,))[0], tensor) for name, tensor in saved["model"].items())
    assert difference(loaded, {**saved, "model": plain}) == ""


@given(st.lists(NAMES, min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_a_function_may_permute_names(names: list[tuple[str, ...]], random: Any) -> None:
    """Also from and to names with dots, of which one may begin another."""
    saved = {".".join(name): torch.randn(2) for name in names}
    to = list(saved)
    random.shuffle(to)
    new = dict(zip(saved, to, strict=True))
    leaves, data = transfer(flatten(saved))
    out = restore(leaves, data, rename=lambda path: (new[path[0]],) if path else path)
    assert difference(out, {new[name]: tensor for name, tensor in saved.items()}) == ""
    into = {name: torch.zeros(2) for name in saved}
    restore(leaves, data, into=into, rename=lambda path: (new[path[0]],) if path else path)
    assert all(bits(into[new[name]]) == bits(tensor) for name, tensor in saved.items())


def test_two_leaves_of_one_name_are_an_error_that_names_both() -> None:
    saved = {"a": {"module": {"w": torch.ones(2)}, "w": torch.zeros(2)}, "b": {"v": 1}, "c": 2}
    leaves, data = transfer(flatten(saved))
    with pytest.raises(StateMismatch, match=r"a\.w: becomes a\.w, a\.module\.w too"):
        restore(leaves, data, rename=unwrapped)
    with pytest.raises(StateMismatch, match="another leaf lies above or below"):
        restore(leaves, data, rename={"c": "b.v.w"})
    with pytest.raises(StateMismatch, match="has no name left"):
        restore(leaves, data, rename={"c": "."})


def test_a_name_that_could_be_two_in_the_given_state_is_an_error() -> None:
    leaves, data = transfer(flatten({"w": torch.ones(2)}))
    into = {"module.w": torch.zeros(2), "_orig_mod.w": torch.zeros(2)}
    with pytest.raises(StateMismatch, match=r"may be \"module\.w\" and \"_orig_mod\.w\""):
        restore(leaves, data, into=into, rename=unwrapped)


def test_only_matches_the_new_names() -> None:
    saved = {"model": {"module.a": torch.ones(2), "module.b": torch.ones(2)}, "n": 5}
    leaves, data = transfer(flatten(saved))
    into = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "n": 0}
    restore(leaves, data, into=into, rename=unwrapped, only=["model.a"])
    assert [into["model"]["a"].sum(), into["model"]["b"].sum(), into["n"]] == [2, 0, 0]
    assert restore(leaves, data, rename={"model.module": "net"}, only=["net.b"]).keys() == {"net"}


@pytest.mark.parametrize("here", ["a", "module.a", "_orig_mod.a"])
def test_the_error_names_the_rule_that_fits(here: str) -> None:
    leaves, data = transfer(flatten({"model": {"_fsdp_wrapped_module.a": torch.ones(2)}}))
    with pytest.raises(StateMismatch, match=r"1 of these names differ only .* rename=ts.unwrapped"):
        restore(leaves, data, into={"model": {here: torch.zeros(2)}})
    with pytest.raises(StateMismatch) as caught:
        restore(leaves, data, into={"model": {"b": torch.zeros(2)}})
    assert "rename" not in str(caught.value)


def test_containers_follow_their_items() -> None:
    saved = {"a": [torch.ones(1), (1, 2, torch.zeros(1))], "b": {"x": {}}, "d": OrderedDict(k=torch.ones(1))}
    leaves, data = transfer(flatten(saved))
    assert difference(restore(leaves, data, rename={"a": "c.d", "b.x": "e"}), {
        "c": {"d": saved["a"]}, "e": {}, "d": saved["d"]
    }) == ""  # fmt: skip
    assert difference(restore(leaves, data, rename={"a.0": "d.z"})["a"], {1: saved["a"][1]}) == ""
    swapped = restore(leaves, data, rename=lambda path: ("a", 1 - path[1], *path[2:]) if path[:1] == ("a",) else path)
    assert difference(swapped["a"], [saved["a"][1], saved["a"][0]]) == ""


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Old(nn.Module):
    """A module that knows the version of its class in old states."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen: int | None = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("wrapped_here", [False, True])
@pytest.mark.parametrize("wrapped_there", [False, True])
def test_a_module_loads_its_versions_under_the_new_names(wrapped_here: bool, wrapped_there: bool) -> None:
    nets = [nn.Sequential(Old(), nn.ReLU(), nn.BatchNorm1d(2)) for _ in range(2)]
    nn.init.normal_(nets[0][0].weight)
    sides = [Wrapper(net) if wrap else net for net, wrap in zip(nets, (wrapped_there, wrapped_here), strict=True)]
    leaves, data = transfer(flatten({"net": sides[0]}))
    restore(leaves, data, into={"net": sides[1]}, rename=unwrapped)
    assert bits(nets[0][0].weight) == bits(nets[1][0].weight)
    assert nets[1][0].seen == 3
    if wrapped_there:
        plain = restore(leaves, data, rename=unwrapped)["net"]
        assert plain._metadata == nets[0].state_dict()._metadata


@pytest.mark.parametrize("compiled", [0, 1])
def test_compiled_and_parallel_modules(compiled: int) -> None:
    nets = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2)]
    sides: list[Any] = list(nets)
    sides[compiled] = torch.compile(nets[compiled], backend="eager")
    sides[1 - compiled] = nn.DataParallel(nets[1 - compiled])
    adams = [torch.optim.Adam(net.parameters()) for net in nets]
    nets[0](torch.ones(1, 2)).sum().backward()
    adams[0].step()
    leaves, data = transfer(flatten({"net": sides[0], "optimizer": adams[0]}))
    restore(leaves, data, into={"net": sides[1], "optimizer": adams[1]}, rename=unwrapped)
    assert difference(dict(nets[0].state_dict()), dict(nets[1].state_dict())) == ""
    assert difference(adams[0].state_dict(), adams[1].state_dict()) == ""
