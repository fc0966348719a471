"""Deep copies of states: to undo what an object made of another one, and to hand over what it must not change."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierstate.providers.tensors.tensors import PLAIN_TENSORS, local_of

from .classes import form_items


def copy_state(
    state: Any, keep: Mapping[int, Any] = {}, move: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Any:
    """A deep copy of a state that shares no memory with it.

    Args:
        state: any values.
        keep: objects, by their ids, that the copy refers to itself.
        move: copies one plain tensor, for example to another device; default: on its device.
    """
    memo = dict(keep)
    pending, seen = [state], set()
    while pending:
        value = pending.pop()
        if id(value) in memo or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if type(local_of(value)) in PLAIN_TENSORS:  # deepcopy refuses what a graph has made
                memo[id(value)] = _copied(value, move)
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | deque):
            pending += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            pending += [item for _, item in form_items(value)]
    return copy.deepcopy(state, memo)


def with_values(value: dict[Any, Any], change: Callable[[Any], Any]) -> Any:
    """A dict of the same class with changed values. Its class is not called: a Counter would count the pairs of key and
    value, a defaultdict takes a factory first, and a subclass may take anything.
    """
    made = copy.copy(value)
    for key, item in tuple(made.items()):  # not of the value, which another thread may change meanwhile
        dict.__setitem__(made, key, change(item))
    return made


def _copied(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
    plain = tensor.detach()
    copied = plain.clone() if move is None or type(plain) not in PLAIN_TENSORS else move(plain)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


class HostCopy:
    """A deep copy of a state whose plain tensors are in host memory, so that it needs no device memory."""

    def __init__(self, state: Any) -> None:
        self._devices: dict[int, torch.device] = {}
        self._state = copy_state(state, move=self._to_host)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = tensor.to("cpu", copy=True)
        self._devices[id(host)] = tensor.device
        return host

    def get(self) -> Any:
        """The state, each tensor on the device on which it was."""
        return copy_state(self._state, move=lambda host: host.to(self._devices.get(id(host), host.device)))
