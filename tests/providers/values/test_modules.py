"""Modules and objects of every kind have after a restore what ``load_state_dict(torch.load(...))`` would give them."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import difference
from support.transfer import restore, transfer
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.tree.unflatten import plan_restore
from tierstate.providers.values.modules import fills_in_place


class Migrating(nn.Module):
    """Version 2 of a class whose first version kept the logarithm of its scale."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) + 1)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "scale"] = state[prefix + "scale"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class OldMigrating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))


class Resetting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.zero_()
        super()._load_from_state_dict(state, prefix, *rest)


class ResettingRoot(nn.Linear):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.reset_parameters()
        return super().load_state_dict(state, strict, assign)


class BufferAsExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(4), persistent=False)
        self.cache = torch.rand(2)

    def get_extra_state(self) -> Any:
        return {"table": self.table, "cache": self.cache, "note": "x"}

    def set_extra_state(self, state: Any) -> None:
        self.table.zero_()
        self.table.copy_(state["table"])
        self.cache = state["cache"] * 1


class Clearing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes = {"a": torch.rand(2), "n": int(torch.randint(100, ()))}

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes.clear()
        self.notes.update(state)


class Growing(nn.Module):
    """Takes a buffer of any size, as observers do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.rand(size))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen.resize_(state[prefix + "seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


def with_hook(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def reset(*_args: Any) -> None:
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.zero_()

    def rename(module: Any, state: Any, prefix: str, *_rest: Any) -> None:
        state[f"{prefix}0.bias"] = state.pop(f"{prefix}0.bias") * 2

    def add(module: Any, _keys: Any) -> None:
        module[0].bias.data.add_(1)

    def more(_module: Any, state: Any, _prefix: str, _metadata: Any) -> None:
        state["more"] = torch.ones(1)

    def less(_module: Any, state: Any, prefix: str, *_rest: Any) -> None:
        state.pop(f"{prefix}more")

    for register, hook in {
        "pre": [(module.register_load_state_dict_pre_hook, reset)],
        "pre on a child": [(module[0]._register_load_state_dict_pre_hook, reset)],
        "changing": [(module.register_load_state_dict_pre_hook, rename)],
        "post": [(module.register_load_state_dict_post_hook, add)],
        "saving": [(module.register_state_dict_post_hook, more), (module.register_load_state_dict_pre_hook, less)],
    }[kind]:
        register(hook)
    return module


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


def parametrized() -> nn.Module:
    module = nn.Linear(3, 3)
    parametrize.register_parametrization(module, "bias", Positive())
    return nn.Sequential(parametrizations.weight_norm(module), parametrizations.spectral_norm(nn.Linear(3, 3)))


def old_norms() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2)))


def quantizing() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

    module = nn.Sequential(
        MinMaxObserver(),
        PerChannelMinMaxObserver(),
        FakeQuantize(),
        HistogramObserver(bins=int(torch.randint(4, 6, ()))),
    )
    module(torch.rand(2, int(torch.randint(1, 4, ())) + 1))
    return module


class Unlisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("not_kept", torch.rand(2), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("no_weight", None)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.Dropout()),
    "tied": lambda: (lambda m: (setattr(m[1], "weight", m[0].weight), m)[1])(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ),
    "migrating": Migrating,
    "resetting": Resetting,
    "resetting root": lambda: ResettingRoot(2, 2),
    "extra state of a buffer": BufferAsExtra,
    "extra state of a dict": lambda: nn.Sequential(Clearing(), nn.Linear(2, 1)),
    "growing": lambda: Growing(int(torch.randint(1, 5, ()))),
    **{
        f"hook: {kind}": (lambda kind=kind: with_hook(kind))
        for kind in ("pre", "pre on a child", "changing", "post", "saving")
    },
    "parametrized": parametrized,
    "weight norm and spectral norm": old_norms,
    "quantizing": quantizing,
    "buffers that are not saved": Unlisted,
    "compiled": lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
    "wrapped": lambda: nn.DataParallel(nn.Linear(2, 2)),
    "empty": nn.Identity,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "recurrent": lambda: nn.LSTM(2, 3),
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
}


def by_torch(state: Any) -> Any:
    """What torch.load gives for this state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def inside(module: nn.Module) -> dict[str, Any]:
    """All that can be seen of a module."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "state": {**module.state_dict()},
        "tensors": {name: tensor.detach() for name, tensor in tensors.items()},
        "grads": {name: p.requires_grad for name, p in module.named_parameters()},
        "same": sorted(name for name, _ in module.named_parameters()),
        "notes": [
            getattr(part, name) for part in module.modules() for name in ("notes", "cache") if name in vars(part)
        ],
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated")
@given(st.sampled_from(sorted(ZOO)), st.integers(0, 1 << 30), st.booleans())
@settings(deadline=None)
def test_a_module_has_what_torch_would_have_given_it(name: str, seed: int, by_memory: bool) -> None:
    torch.manual_seed(seed)
    saved = ZOO[name]()
    ours, theirs = seeded(name, seed + 1), seeded(name, seed + 1)
    leaves, data = transfer(flatten({"m": saved}))
    kept = dict(ours.named_parameters())
    before = copy.deepcopy(inside(ours))
    try:
        theirs.load_state_dict(by_torch(saved.state_dict()))
    except RuntimeError:
        with pytest.raises(StateMismatch, match="does not take the saved state"):
            restore(leaves, data, into={"m": ours}, by_memory=by_memory)
        assert difference(inside(ours), before) == ""
        return
    restore(leaves, data, into={"m": ours}, by_memory=by_memory)
    assert difference(inside(ours), inside(theirs)) == ""
    if name != "scripted":  # its parameters are other Python objects at each call
        assert all(p is kept[key] for key, p in ours.named_parameters()), "parameters stay the objects that they are"


def seeded(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ZOO[name]()


@given(st.sampled_from(sorted(set(ZOO) - {"scripted"})), st.integers(0, 1 << 30))
@settings(deadline=None)
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_what_load_gives_is_what_torch_load_gives(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    module = ZOO[name]()
    state = module.state_dict()
    ours, theirs = restore(*transfer(flatten({"m": module})))["m"], by_torch(state)
    assert type(ours) is OrderedDict
    assert difference(dict(ours), dict(theirs)) == ""
    assert dict(ours._metadata) == dict(theirs._metadata)


def test_an_old_class_is_migrated_and_a_new_one_is_not() -> None:
    old, new = nn.Sequential(OldMigrating()), nn.Sequential(Migrating())
    scale = old[0].scale.detach().clone()
    leaves, data = transfer(flatten(old))
    restore(leaves, data, into=new)
    assert torch.equal(new[0].scale, scale.exp())
    again = nn.Sequential(Migrating())
    again.load_state_dict(restore(*transfer(flatten(new))))
    assert torch.equal(again[0].scale, new[0].scale)


def test_lazy_modules_get_their_shapes() -> None:
    saved = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    lazy = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    leaves, data = transfer(flatten(saved))
    restore(leaves, data, into=lazy)
    assert difference({**lazy.state_dict()}, {**saved.state_dict()}) == ""


@pytest.mark.parametrize("hooked", [False, True])
def test_modules_on_the_meta_device_get_memory_and_keep_their_ties(hooked: bool) -> None:
    saved = ZOO["tied"]()
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    target[1].weight = target[0].weight
    target[0].bias = nn.Parameter(torch.zeros(2), requires_grad=False)
    bias = target[0].bias
    if hooked:
        target.register_load_state_dict_post_hook(lambda module, keys: None)
    leaves, data = transfer(flatten({"m": saved}))
    restore(leaves, data, into={"m": target})
    assert difference({**target.state_dict()}, {**saved.state_dict()}) == ""
    assert target[1].weight is target[0].weight
    assert isinstance(target[0].weight, nn.Parameter)
    assert target[0].bias is bias
    assert not bias.requires_grad
    with torch.device("meta"):
        wrong = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with pytest.raises(StateMismatch):
        restore(leaves, data, into={"m": wrong})
    assert wrong[0].weight.is_meta


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", ["meta", "hooked", "lazy"])
def test_modules_without_memory_are_given_no_other_dtype(kind: str) -> None:
    leaves, data = transfer(flatten({"m": nn.Linear(2, 2)}))
    target: Any = nn.LazyLinear(2, dtype=torch.bfloat16)
    if kind != "lazy":
        target = nn.Linear(2, 2, device="meta", dtype=torch.bfloat16)
    if kind == "hooked":
        target.register_load_state_dict_post_hook(lambda module, keys: None)
    with pytest.raises(StateMismatch, match=r"m\.weight: has dtype bfloat16 here, float32 in the version"):
        restore(leaves, data, into={"m": target})
    assert kind == "lazy" or target.weight.is_meta


@pytest.mark.parametrize("how", ["shape", "missing", "unexpected", "override", "later"])
def test_a_module_that_refuses_leaves_everything_as_it_was(how: str) -> None:
    saved = {"w": torch.ones(2), "c": Clearing(), "m": Resetting(), "x": nn.Linear(2, 2), "late": Resetting()}
    target = {"w": torch.zeros(2), "c": Clearing(), "m": Resetting(), "x": nn.Linear(2, 2), "late": Resetting()}
    wrong = target["late" if how == "later" else "m"]
    if how == "shape":
        wrong.weight = nn.Parameter(torch.rand(3, 3))
    elif how == "missing":
        wrong.more = nn.Parameter(torch.rand(1))
    elif how == "unexpected":
        del wrong.weight
        wrong.weight = torch.rand(2, 2)
    else:

        def refuse(module: nn.Module, keys: Any) -> None:
            raise RuntimeError("no")

        wrong.register_load_state_dict_post_hook(refuse)
    before = {key: inside(value) if isinstance(value, nn.Module) else value.clone() for key, value in target.items()}
    leaves, data = transfer(flatten(saved))
    with pytest.raises(StateMismatch, match=f"{'late' if how == 'later' else 'm'}: the Resetting does not take"):
        restore(leaves, data, into=target)
    after = {key: inside(value) if isinstance(value, nn.Module) else value.clone() for key, value in target.items()}
    assert difference(after, before) == ""


def test_observers_that_refuse_have_their_sizes_again() -> None:
    target, calls = nn.Sequential(Growing(2), Resetting()), []
    kept, before = target[0].seen, target[0].seen.clone()
    target.register_load_state_dict_post_hook(lambda module, keys: calls.append(keys) or 1 / 0)
    leaves, data = transfer(flatten(nn.Sequential(Growing(5), Resetting())))
    with pytest.raises(StateMismatch, match="division by zero"):
        restore(leaves, data, into=target)
    assert len(calls) == 1
    assert target[0].seen is kept
    assert torch.equal(kept, before)


def test_optimizers_that_refuse_leave_everything_as_it_was() -> None:
    def pair(groups: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        params = [{"params": [p]} for p in model.parameters()] if groups == 2 else model.parameters()
        optimizer = torch.optim.AdamW(params)
        model(torch.rand(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "first": torch.optim.SGD(model.parameters()), "opt": optimizer}

    target = pair(2)
    before = copy.deepcopy([target["model"].state_dict(), target["opt"].state_dict()])
    leaves, data = transfer(flatten(pair(1)))
    with pytest.raises(StateMismatch, match="opt: the AdamW does not take the saved state"):
        restore(leaves, data, into=target)
    assert difference([{**target["model"].state_dict()}, target["opt"].state_dict()], [{**before[0]}, before[1]]) == ""


class Thing:
    """An object whose state goes through its own code, of several kinds."""

    def __init__(self, how: str) -> None:
        self.how, self.d = how, {"t": torch.rand(2), "n": [int(torch.randint(9, ())), {"x": torch.rand(1)}]}

    def state_dict(self) -> Any:
        return self.d

    def load_state_dict(self, state: Any) -> None:
        if self.how == "clears":
            self.d.clear()
            self.d.update(state)
        elif self.how == "zeroes":
            self.d["t"].zero_()
            self.d["t"].copy_(state["t"])
            self.d["n"] = state["n"]
        elif self.how == "keeps":
            self.d = state
        else:
            self.d = copy.deepcopy(state)
            raise ValueError("too late")


@given(st.sampled_from(["clears", "zeroes", "keeps"]), st.sampled_from([None, ["thing.t"], ["thing.n.*"]]))
def test_objects_get_memory_and_containers_of_their_own(how: str, only: Any) -> None:
    saved, ours = Thing(how), Thing(how)
    theirs, leaves_data = copy.deepcopy(ours), transfer(flatten({"thing": saved}))
    restore(*leaves_data, into={"thing": ours}, only=only)
    state = by_torch(saved.state_dict())
    if only:
        key = only[0][6]
        state = {**copy.deepcopy(theirs.d), key: state[key]}
    theirs.load_state_dict(state)
    assert difference(ours.d, theirs.d) == ""


def test_objects_that_refuse_are_as_they_were() -> None:
    target = {"first": Thing("clears"), "second": Thing("refuses"), "w": torch.zeros(1)}
    before = copy.deepcopy([target["first"].d, target["second"].d])
    leaves, data = transfer(flatten({"first": Thing("keeps"), "second": Thing("keeps"), "w": torch.ones(1)}))
    with pytest.raises(StateMismatch, match="second: the Thing does not take the saved state: too late"):
        restore(leaves, data, into=target)
    assert target["w"].tolist() == [0]
    assert difference(target["first"].d, before[0]) == ""


def test_a_plain_module_is_filled_where_it_is() -> None:
    for name in ("plain", "tied", "compiled", "transformer", "recurrent", "buffers that are not saved", "wrapped"):
        module = ZOO[name]()
        assert fills_in_place(module, module.state_dict()), name
        target = plan_restore(flatten({"m": module}).leaves, into={"m": module})
        assert not target.ahead
    for name in (
        "migrating",
        "resetting",
        "growing",
        "hook: pre",
        "hook: post",
        "quantizing",
        "extra state of a buffer",
    ):
        assert not fills_in_place(ZOO[name](), ZOO[name]().state_dict()), name


def test_metadata_of_a_state_that_is_saved_again() -> None:
    cache, state = FlattenCache(), nn.Sequential(nn.Linear(1, 1)).state_dict()
    first = cache.flatten({"m": state}).leaves
    state._metadata["0"] = {"version": 7}
    second = cache.flatten({"m": state}).leaves
    assert first[1].spec.attrs == {"metadata": {}}
    assert second[1].spec.attrs == {"metadata": {"0": {"version": 7}}}
    del state._metadata["0"]
    assert cache.flatten({"m": state}).leaves[1].spec.attrs == {"metadata": {"0": None}}


_METADATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([torch.Size([3]), torch.device("cpu")]),
    lambda inner: st.tuples(inner) | st.lists(inner, max_size=2) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["", "a", "b", "b.c"]), st.dictionaries(st.text(), _METADATA, max_size=3)))
def test_metadata_that_json_would_change_comes_back_as_it_was(metadata: dict[str, Any]) -> None:
    """A TensorDict has its batch size (torch.Size), its device and its values that are no tensors there."""
    state = OrderedDict({"a.weight": torch.ones(2), "b.c.weight": torch.ones(2)})
    state._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    leaves, data = transfer(flatten({"m": state}))
    again = restore(leaves, data)["m"]._metadata
    assert difference({prefix: again[prefix] for prefix in metadata}, metadata) == ""
    assert again.keys() == metadata.keys()


def test_metadata_that_cannot_be_saved_is_refused_and_no_hindrance_to_a_restore() -> None:
    saved, given = nn.Linear(1, 1).state_dict(), nn.Linear(1, 1).state_dict()
    given._metadata["0"] = {"kind": nn.Linear}
    with pytest.raises(
        CaptureError, match=r"^m: its attribute _metadata has .*Linear.* for '0', .*builtins.type is not"
    ):
        flatten({"m": given})
    restore(*transfer(flatten({"m": saved})), into={"m": given})
    assert torch.equal(given["weight"], saved["weight"])


@pytest.mark.parametrize("wrong", [7, [1], {"a": 3}, {"a": [1]}, {"a": "AQ"}, {"a": "é"}, {"a": "AU4="}])
def test_metadata_from_anybody(wrong: Any) -> None:
    leaves = [Leaf((), Spec("odict", attrs={"metadata": wrong}))]
    with pytest.raises(FormatError, match="no metadata of a module"):
        plan_restore(leaves).finish()
