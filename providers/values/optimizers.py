"""What ``torch.optim.Optimizer.load_state_dict`` does, as far as a restore must know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.tensors.tensors import PLAIN_TENSORS, empty_like_dtensor

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    """Its ``state_dict()``.

    Raises:
        CaptureError: its parameters are flat parameters of FSDP1.
    """
    if any(getattr(p, "_fsdp_flattened", False) for p in _params(optimizer)):
        raise CaptureError(
            "the optimizer of a module that FSDP1 has wrapped has states of flat parameters, which fit no other number "
            "of ranks; save FSDP.optim_state_dict(module, optimizer) in its place"
        )
    return optimizer.state_dict()


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether only torch's own code takes part in loading a state, and no hook does."""
    kind, base = type(optimizer), torch.optim.Optimizer
    own = {"state_dict", "load_state_dict", "__setstate__"} & vars(optimizer).keys()
    return (
        kind.load_state_dict is base.load_state_dict
        and kind.state_dict is base.state_dict
        and kind.__setstate__.__module__.startswith("torch.optim.")
        and not own
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def keeps_given_tensors(optimizer: torch.optim.Optimizer, state: Any) -> bool:
    """Whether the optimizer's present tensors may be filled in place: they are handed to its ``load_state_dict``, which
    neither reads nor changes them, and keeps them.
    """
    params = _params(optimizer)
    return loads_as_torch(optimizer) and all(
        optimizer.state[params[at]] is own for at, own in state["state"].items() if type(at) is int
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """``load_state_dict``, but states keep the dtype in which they were saved.

    torch casts them to the dtype of their parameter, so that 32-bit moments of 16-bit parameters would lose bits.
    """
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        for at, param in enumerate(_params(optimizer)):
            if at in state["state"] and param in optimizer.state:
                optimizer.state[param] = _not_cast(optimizer.state[param], state["state"][at])


def _not_cast(kept: Any, given: Any) -> Any:
    """What the optimizer kept, with the given tensors in place of those that were cast."""
    if isinstance(kept, torch.Tensor) and isinstance(given, torch.Tensor):
        return kept if kept.dtype == given.dtype else given.to(kept.device)
    if isinstance(kept, dict) and isinstance(given, Mapping):
        return {key: _not_cast(value, given.get(key)) for key, value in kept.items()}
    if type(kept) in (list, tuple) and type(given) is type(kept) and len(kept) == len(given):
        return type(kept)(map(_not_cast, kept, given))
    return kept


def back_up_references(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that gives an optimizer its present state back, where `loads_as_torch`: torch's own code replaces the
    dicts of states and the groups, and changes no tensor of theirs.
    """
    before = dict(vars(optimizer))
    return lambda: vars(optimizer).update(before)


def new_moments(optimizer: torch.optim.Optimizer) -> Callable[[Path, Spec], Any]:
    """Creates optimizer states: for a parameter that is a DTensor a DTensor with the same placements. An optimizer that
    has not stepped yet has no states to take them from.
    """
    params = _params(optimizer)

    def make(path: Path, spec: Spec) -> torch.Tensor | None:
        at = path[1] if len(path) == 3 and path[0] == "state" else None
        if type(at) is not int or not 0 <= at < len(params) or type(params[at]) in PLAIN_TENSORS:
            return None
        return empty_like_dtensor(params[at], spec)

    return make


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
