"""ZeroRedundancyOptimizer: each rank's own states. Imported once one is met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from tierstate.manifest.leaf import Path

from .stateful import Stateful, introduce


def _get(optimizer: Any) -> dict[str, Any]:
    """The state as an ordinary optimizer has it, with the states of those parameters that are this rank's to step."""
    optimizer._check_overlap_initialized()
    number = optimizer._param_to_index
    own = sorted((number[param], state) for param, state in optimizer.optim.state.items())
    # What lies in its own `state` is the last that was loaded; it is the optimizer inside that steps.
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    return {"state": dict(own), "param_groups": groups}


def _put(optimizer: Any, state: Any) -> None:
    """Give the states that are this rank's; the given dict stays as it is."""
    optimizer.load_state_dict({"state": dict(state["state"]), "param_groups": state["param_groups"]})


def _takes(optimizer: Any) -> Callable[[Path], bool]:
    """Which saved leaves are this rank's: the states of the parameters that it owns now."""
    owner = optimizer._param_to_rank
    own = {i for param, i in optimizer._param_to_index.items() if owner[param] == optimizer.rank}
    return lambda path: len(path) < 2 or path[0] != "state" or path[1] in own


PROVIDERS: dict[type, Any] = {}
"""Providers by the type of a value: there is none of its own."""

introduce(ZeroRedundancyOptimizer, Stateful(_get, _put, takes=_takes))
