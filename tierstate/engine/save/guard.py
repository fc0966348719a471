"""Lazy capture: `save` returns early, and the step of a guarded optimizer waits until its tensors are captured.

Between two steps the parameters and the optimizer's state do not change, so they can be copied while the next forward
and backward pass runs (DataStates-LLM, arXiv 2406.10707).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tierstate.providers.base import Provider
from tierstate.providers.sharded.shards import ShardsProvider
from tierstate.providers.tensors.tensors import TensorProvider, local_of

from .save_state import SaveState

Memory = tuple[torch.device, int]


class Guard:
    """The guarded optimizers of a Checkpointer, and the saves for whose capture their steps wait."""

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        self._save_states: list[SaveState] = []
        self.waited = 0.0
        """Seconds that steps have waited."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Guard an optimizer: from now on its step waits for captures."""
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def signature(self) -> list[int]:
        """Addresses of the guarded tensors. Equal lists mean that no tensor got other memory."""
        return [local_of(tensor).data_ptr() for optimizer in self._optimizers for tensor in _tensors(optimizer)]

    def covers(self) -> Callable[[Provider], bool]:
        """Returns a function: whether a provider's tensor lies in memory of the guarded tensors, as they are now."""
        memory = {_memory(tensor) for optimizer in self._optimizers for tensor in _tensors(optimizer)}
        return lambda provider: _lies_in(provider, memory)

    def watch(self, save_state: SaveState) -> None:
        """Wait for this save too, unless it is captured already."""
        if not save_state.captured.done():
            self._save_states.append(save_state)

    def wait(self) -> None:
        """Wait until every watched save is captured or has failed. Does not raise its error: the `Save` reports it."""
        save_states, start = self._save_states, time.monotonic()
        for save_state in save_states:
            save_state.captured.exception()
        # After an interrupt above, the state is still being read: the next call must wait for those saves too.
        self._save_states = [save_state for save_state in self._save_states if not save_state.captured.done()]
        self.waited += time.monotonic() - start if save_states else 0.0

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.wait()

    def close(self) -> None:
        """Wait for all captures, then remove the hooks from the optimizers."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._optimizers, self._hooks = [], []


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that a step changes: parameters and optimizer state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    # In an optimizer that shards its state over ranks, such as ZeroRedundancyOptimizer, the inner one has this rank's.
    inner = getattr(optimizer, "optim", None)
    for state in (inner if isinstance(inner, torch.optim.Optimizer) else optimizer).state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _lies_in(provider: Provider, memory: set[Memory]) -> bool:
    if not isinstance(provider, (TensorProvider, ShardsProvider)) or provider.value is None:
        return False
    return _memory(provider.value) in memory


def _memory(tensor: torch.Tensor) -> Memory:
    """Device and address of a tensor's storage; of a DTensor, those of its local tensor."""
    return tensor.device, local_of(tensor).untyped_storage().data_ptr()
