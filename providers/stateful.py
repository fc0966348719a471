"""Things that have a state but are none: modules, optimizers, schedules, random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Path, Spec

from .shards import PLAIN, like, local_of


@dataclass(frozen=True, slots=True)
class Stateful:
    """How the state of one type of thing is taken and given back.

    Attributes:
        get: the thing -> its state, a tree of plain leaves.
        put: gives a whole state to the thing.
        strict: the state always has the same leaves, so that a missing or unexpected one is an error; otherwise the
            saved state wins.
        settled: whether these leaf values, filled in place, are all there is to do, so that `put` need not be called.
        takes: of a thing, which of the saved leaves it takes on this rank, by the keys below it; None where it is all.
        anew: of a thing, a maker of values that saved leaves are loaded into which the thing has not yet; it gives None
            where that is any new value.
    """

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    strict: bool = False
    settled: Callable[[Any, Iterable[Any]], bool] = lambda thing, values: False
    takes: Callable[[Any], Callable[[Path], bool]] | None = None
    anew: Callable[[Any], Callable[[Path, Spec], Any]] | None = None


def stateful(value: Any) -> Stateful | None:
    """How to treat a value that has a state; None where it has none."""
    for kind, found in _TABLE.items():
        if isinstance(value, kind):
            return found
    speaks = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return _SPEAKING if speaks and not isinstance(value, type) else None


def introduce(kind: type, how: Stateful) -> None:
    """Have things of this type, and of its subclasses, treated so from now on."""
    global _TABLE
    _TABLE = {kind: how} | _TABLE  # before those of its base classes


def _settled(module: torch.nn.Module, values: Iterable[Any]) -> bool:
    """Whether all values lie in the module's own memory, and nothing of it wants to be told of a load."""
    own = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return not _listens(module) and all(isinstance(v, torch.Tensor) and _memory(v) in own for v in values)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = local_of(tensor)
    plain = type(local) in PLAIN and local.layout is torch.strided
    return (tensor.device, local.untyped_storage().data_ptr() if plain else id(tensor))


def _listens(module: torch.nn.Module) -> bool:
    """Whether a part of the module overrides or hooks the loading of its state."""
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return any(
        type(part).load_state_dict is not torch.nn.Module.load_state_dict
        or any(getattr(part, hook, None) for hook in hooks)
        for part in module.modules()
    )


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    if any(getattr(p, "_fsdp_flattened", False) for group in optimizer.param_groups for p in group["params"]):
        raise CaptureError(
            "the optimizer of a module that FSDP1 has wrapped has states of flat parameters, which fit no other number "
            "of ranks; save FSDP.optim_state_dict(module, optimizer) in its place"
        )
    return optimizer.state_dict()


def _moments(optimizer: torch.optim.Optimizer) -> Callable[[Path, Spec], Any]:
    """States of parameters that are DTensors are DTensors of the same kind, also in an optimizer that never stepped."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def make(path: Path, spec: Spec) -> torch.Tensor | None:
        at = path[1] if len(path) == 3 and path[0] == "state" else None
        if type(at) is not int or not 0 <= at < len(params) or type(params[at]) in PLAIN:
            return None
        return like(params[at], spec)

    return make


def _set_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _set_bits(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state


_SPEAKING = Stateful(lambda thing: thing.state_dict(), lambda thing, state: thing.load_state_dict(state))

_TABLE: dict[type, Stateful] = {
    torch.nn.Module: Stateful(_SPEAKING.get, _SPEAKING.put, strict=True, settled=_settled),
    torch.optim.Optimizer: Stateful(_optimizer_state, _SPEAKING.put, anew=_moments),
    torch.Generator: Stateful(
        lambda g: {"state": g.get_state()}, lambda g, state: g.set_state(state["state"].cpu().contiguous())
    ),
    random.Random: Stateful(lambda r: {"state": r.getstate()}, lambda r, state: r.setstate(state["state"])),
    np.random.Generator: Stateful(lambda g: g.bit_generator.state, _set_numpy),
    np.random.BitGenerator: Stateful(lambda b: b.state, _set_bits),
    np.random.RandomState: Stateful(lambda r: r.get_state(legacy=False), lambda r, state: r.set_state(state)),
}
