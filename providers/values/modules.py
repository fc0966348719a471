"""What ``torch.nn.Module.load_state_dict`` does, as far as a restore must know it.

A restore has the result of ``load_state_dict(torch.load(...))``. Filling a module's own tensors in place is faster and
needs no memory, and gives the same where no code of the module or of a hook takes part in loading: `fills_in_place`
says where. Versions of module classes, by which such code knows old states, travel in the state dict's ``_metadata``.
"""

from __future__ import annotations

import base64
import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import METADATA
from tierstate.providers.tensors.tensors import PLAIN_TENSORS, is_meta, local_of

from .copies import copy_state
from .encoding import decode_value, encode_value

_WITHOUT_EFFECT = {
    # They add a buffer that old states lack, or refuse states without metadata; a complete state they load as usual.
    "torch.nn.modules.module.Module._load_from_state_dict",
    "torch.nn.modules.batchnorm._NormBase._load_from_state_dict",
    "torch.nn.modules.instancenorm._InstanceNorm._load_from_state_dict",
    # FSDP2 makes its parameters sharded, as they are since the state was read, and looks for replaced tensors.
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._register_state_dict_hooks.<locals>"
    ".to_sharded_hook",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__.<locals>.<lambda>",
    # Activation checkpointing changes only names, in both directions.
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper._pre_load_state_dict_hook",
}
"""Loaders and hooks of torch that change nothing where a complete state is loaded into plain tensors."""


_WRAPPED = "_checkpoint_wrapped_module."


def fills_in_place(module: nn.Module, state: Any) -> bool:
    """Whether copying bytes into the tensors of this state has the same result as ``module.load_state_dict``.

    So it is if the state has exactly the module's parameters and persistent buffers, each in its own memory or on the
    meta device, and nothing of the module or its submodules overrides or hooks the loading.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module):
        return False
    own = {name.replace(_WRAPPED, ""): tensor for name, tensor in _own_tensors(module)}
    return (
        not any(_takes_part_in_loading(part) for part in module.modules())
        and isinstance(state, Mapping)
        and state.keys() == own.keys()
        and all(_same_memory(tensor, own[name]) for name, tensor in state.items())
    )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in module.named_modules(remove_duplicate=False):
        before = f"{name}." if name else ""
        buffers = (item for item in part._buffers.items() if item[0] not in part._non_persistent_buffers_set)
        for key, tensor in (*part._parameters.items(), *buffers):
            if tensor is not None:
                yield before + key, tensor


def _takes_part_in_loading(part: nn.Module) -> bool:
    hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
    return (
        "_load_from_state_dict" in vars(part)
        or type(part).set_extra_state is not nn.Module.set_extra_state
        or any(_name(one) not in _WITHOUT_EFFECT for one in (type(part)._load_from_state_dict, *hooks))
    )


def _name(function: Any) -> str:
    function = getattr(function, "hook", function)  # torch wraps hooks that get the module
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _same_memory(one: Any, other: torch.Tensor) -> bool:
    if not isinstance(one, torch.Tensor):
        return False
    a, b = local_of(one), local_of(other)
    plain = type(a) in PLAIN_TENSORS and type(b) in PLAIN_TENSORS and a.layout is torch.strided is b.layout
    return (
        plain
        and (a.data_ptr(), a.device, a.dtype) == (b.data_ptr(), b.device, b.dtype)
        and (a.shape, a.stride()) == (b.shape, b.stride())
    )


def assign_meta_tensors(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module that is filled in place the tensors of the state in place of those that it has on the meta device.

    torch would leave these as they are, unless ``load_state_dict`` is called with ``assign=True``; and that would break
    the tie of parameters that are one object.
    """
    _replace_meta_tensors(module, lambda name, _: state[name])


def load_module(module: nn.Module, state: Any) -> None:
    """``load_state_dict``, with memory for parameters and buffers that are on the meta device."""

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        given = state.get(name) if isinstance(state, Mapping) else None
        return torch.empty_like(tensor, device=given.device) if isinstance(given, torch.Tensor) else None

    _replace_meta_tensors(module, make)
    module.load_state_dict(state)


def _replace_meta_tensors(module: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    made: dict[int, torch.Tensor | None] = {}
    for name, tensor in list(_own_tensors(module)):
        if not is_meta(tensor):
            continue
        if id(tensor) not in made:
            new = make(name.replace(_WRAPPED, ""), tensor)
            param = new is not None and isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new.detach(), tensor.requires_grad) if param and new is not None else new
        owner, _, key = name.rpartition(".")
        if made[id(tensor)] is not None:
            setattr(module.get_submodule(owner), key, made[id(tensor)])


def back_up_tensors(module: nn.Module) -> Callable[[], None]:
    """A function that gives the module the parameters and buffers back that it has now, but not their present bytes."""
    tables: list[Any] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    before = [(table, dict(table)) for table in tables]

    def undo() -> None:
        for table, kept in before:
            table.clear()
            table.update(kept)

    return undo


def back_up_module(module: nn.Module) -> Callable[[], None]:
    """A function that gives the module its present state back, past all hooks.

    Bytes are kept in host memory. What an override keeps outside of parameters, buffers, extra state and attributes of
    the module is not kept.
    """
    parts = [(part, _back_up_part(part)) for part in module.modules()]

    def undo() -> None:
        for _, give_back in parts:
            give_back()

    return undo


def _back_up_part(part: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(part))
    tables = {key: dict(attributes[key]) for key in ("_parameters", "_buffers")}
    held = [tensor for table in tables.values() for tensor in table.values() if tensor is not None]
    kept = [(tensor, _on_host(tensor)) for tensor in held if _has_bytes(tensor)]
    has_extra = type(part).get_extra_state is not nn.Module.get_extra_state
    extra = copy_state(part.get_extra_state()) if has_extra else None

    def undo() -> None:
        vars(part).clear()
        vars(part).update(attributes)
        for key, table in tables.items():
            attributes[key].clear()
            attributes[key].update(table)
        with torch.no_grad():
            for tensor, before in kept:
                if local_of(tensor).shape != before.shape:  # resized, as observers do
                    tensor.data = before.to(tensor.device)
                local_of(tensor).copy_(before)
        if has_extra:
            part.set_extra_state(extra)

    return undo


def _has_bytes(tensor: torch.Tensor) -> bool:
    local = local_of(tensor)
    return not nn.parameter.is_lazy(tensor) and type(local) in PLAIN_TENSORS and not local.is_meta


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor).detach().to("cpu", copy=True)


def metadata_of(state: Any) -> dict[str, Any]:
    """The attributes of the leaf of a state dict that has ``_metadata``; empty for any other OrderedDict.

    Submodules are named by the prefix of their keys. ``{"version": 1}``, which most have, is left out for those that
    have a key, and None stands for a prefix of a key without metadata.

    Raises:
        CaptureError: there is something in it that is no plain value.
    """
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return {}
    implied = set(_prefixes(state))
    told = {
        prefix: _as_json(prefix, metadata)
        for prefix, metadata in found.items()
        if not (prefix in implied and metadata == {"version": 1})
    }
    return {METADATA: told | dict.fromkeys(implied - found.keys())}


def copied_metadata(state: Any) -> dict[str, Any] | None:
    """A copy of a state dict's ``_metadata``, to see later whether it has changed; None if it has none."""
    found = getattr(state, "_metadata", None)
    return copy.deepcopy(dict(found)) if isinstance(found, Mapping) else None


def set_metadata(state: OrderedDict[Any, Any], attrs: Mapping[str, Any], name: str) -> None:
    """Give a state dict its ``_metadata`` back; nothing if the version has none. The attributes may be untrusted.

    Raises:
        FormatError: they are not as `metadata_of` returns them; ``name`` is in the message.
    """
    told = attrs.get(METADATA)
    if told is None:
        return
    if not isinstance(told, dict) or not all(isinstance(one, dict | str | None) for one in told.values()):
        raise FormatError(f"{name}: {told!r:.80} is no metadata of a module's state dict")
    found = {prefix: {"version": 1} for prefix in _prefixes(state) if prefix not in told}
    state._metadata = OrderedDict(found | {k: _from_json(v, name) for k, v in told.items() if v is not None})  # type: ignore[attr-defined]


def _prefixes(keys: Iterable[Any]) -> Iterator[str]:
    """The prefixes of keys, as torch names submodules: '' and ``a``, ``a.b`` of the key ``a.b.weight``."""
    seen = {""}
    yield ""
    for key in keys:
        prefix = key.rpartition(".")[0] if isinstance(key, str) else ""
        while prefix not in seen:
            seen.add(prefix)
            yield prefix
            prefix = prefix.rpartition(".")[0]


def _as_json(prefix: Any, metadata: Any) -> Any:
    """The metadata of one submodule: itself where JSON keeps it as it is, otherwise text, its encoded bytes in base64.

    A TensorDict has its batch size, its device and all that is no tensor there.
    """
    try:
        if not (isinstance(prefix, str) and isinstance(metadata, Mapping)):
            raise CaptureError("only a mapping under a name of a module is known")
        exact = encode_value(dict(metadata))
    except CaptureError as error:
        raise CaptureError(
            f"its attribute _metadata has {metadata!r:.80} for {prefix!r:.60}, which cannot be saved: {error}; "
            "keep that as a value of the state, or leave it out"
        ) from error
    try:
        again = json.loads(json.dumps(metadata, allow_nan=False))
        if encode_value(again) == exact:
            return again
    except (TypeError, ValueError, RecursionError):
        pass
    return base64.b64encode(exact).decode()


def _from_json(told: dict[str, Any] | str, name: str) -> dict[str, Any]:
    try:
        found = decode_value(base64.b64decode(told, validate=True)) if isinstance(told, str) else dict(told)
    except (ValueError, FormatError) as error:
        raise FormatError(f"{name}: {told!r:.80} is no metadata of a module: {error}") from error
    if type(found) is not dict:
        raise FormatError(f"{name}: {found!r:.80} is no metadata of a module")
    return found
