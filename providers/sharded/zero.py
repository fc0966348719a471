"""ZeroRedundancyOptimizer: each rank saves and restores the states that it owns. Imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.values.stateful import Stateful, register_stateful


def _get(optimizer: Any) -> dict[str, Any]:
    """The state in the form of an ordinary optimizer, with the states of only those parameters that this rank steps."""
    optimizer._check_overlap_initialized()
    number = optimizer._param_to_index
    own = sorted((number[param], state) for param, state in optimizer.optim.state.items())
    # Its own `state` is the one that was loaded last; the current one is in the inner optimizer, which does the steps.
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    return {"state": dict(own), "param_groups": groups}


def _put(optimizer: Any, state: Any) -> None:
    """Set the states of this rank's parameters; the given dict is not changed."""
    optimizer.load_state_dict({"state": dict(state["state"]), "param_groups": state["param_groups"]})


def _takes(optimizer: Any) -> Callable[[Path], bool]:
    """Returns the test whether a saved leaf belongs to this rank: to a state of a parameter that it owns now."""
    owner = optimizer._param_to_rank
    own = {i for param, i in optimizer._param_to_index.items() if owner[param] == optimizer.rank}
    return lambda path: len(path) < 2 or path[0] != "state" or path[1] in own


PROVIDERS: dict[type, Any] = {}
"""Providers by the type of a value: none, since the optimizer is registered as a stateful object."""


register_stateful(ZeroRedundancyOptimizer, Stateful(_get, _put, takes=_takes))
