"""Things that have a state but are none: modules, optimizers, schedules, random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Stateful:
    """How the state of one type of thing is taken and given back.

    Attributes:
        get: the thing -> its state, a tree of plain leaves.
        put: gives a whole state to the thing.
        strict: the state always has the same leaves, so that a missing or unexpected one is an error; otherwise the
            saved state wins.
        settled: whether these leaf values, filled in place, are all there is to do, so that `put` need not be called.
    """

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    strict: bool = False
    settled: Callable[[Any, Iterable[Any]], bool] = lambda thing, values: False


def stateful(value: Any) -> Stateful | None:
    """How to treat a value that has a state; None where it has none."""
    for kind, found in _TABLE.items():
        if isinstance(value, kind):
            return found
    speaks = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return _SPEAKING if speaks and not isinstance(value, type) else None


def introduce(kind: type, how: Stateful) -> None:
    """Have things of this type, and of its subclasses, treated so from now on."""
    _TABLE[kind] = how


def _settled(module: torch.nn.Module, values: Iterable[Any]) -> bool:
    """Whether all values lie in the module's own memory, and nothing of it wants to be told of a load."""
    own = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return not _listens(module) and all(isinstance(v, torch.Tensor) and _memory(v) in own for v in values)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout is torch.strided
    return (tensor.device, tensor.untyped_storage().data_ptr() if plain else id(tensor))


def _listens(module: torch.nn.Module) -> bool:
    """Whether a part of the module overrides or hooks the loading of its state."""
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return any(
        type(part).load_state_dict is not torch.nn.Module.load_state_dict
        or any(getattr(part, hook, None) for hook in hooks)
        for part in module.modules()
    )


def _set_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _set_bits(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state


_SPEAKING = Stateful(lambda thing: thing.state_dict(), lambda thing, state: thing.load_state_dict(state))

_TABLE: dict[type, Stateful] = {
    torch.nn.Module: Stateful(_SPEAKING.get, _SPEAKING.put, strict=True, settled=_settled),
    torch.Generator: Stateful(
        lambda g: {"state": g.get_state()}, lambda g, state: g.set_state(state["state"].cpu().contiguous())
    ),
    random.Random: Stateful(lambda r: {"state": r.getstate()}, lambda r, state: r.setstate(state["state"])),
    np.random.Generator: Stateful(lambda g: g.bit_generator.state, _set_numpy),
    np.random.BitGenerator: Stateful(lambda b: b.state, _set_bits),
    np.random.RandomState: Stateful(lambda r: r.get_state(legacy=False), lambda r, state: r.set_state(state)),
}
