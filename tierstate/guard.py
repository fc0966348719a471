"""Lazy capture: a guarded optimizer's step waits until what it changes has been copied out.

Between two steps the parameters and the optimizer's state hold still, so that they can be copied while the next
forward and backward pass runs (DataStates-LLM, arXiv 2406.10707).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tierstate.providers.base import Provider
from tierstate.providers.shards import ShardsProvider, local_of
from tierstate.providers.tensors import TensorProvider
from tierstate.tiers.ticket import Ticket

Memory = tuple[torch.device, int]


class Guard:
    """The guarded optimizers of a Checkpointer, and the saves they have to wait for."""

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        self._tickets: list[Ticket] = []
        self.waited = 0.0
        """Seconds that steps have waited."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer's step wait, from now on."""
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def signature(self) -> list[int]:
        """Equal as long as parameters and state of the guarded optimizers lie where they lie."""
        return [local_of(tensor).data_ptr() for optimizer in self._optimizers for tensor in _tensors(optimizer)]

    def covers(self) -> Callable[[Provider], bool]:
        """Whether a provider's tensor lies in memory that nobody but a guarded step changes, as things are now."""
        memory = {_memory(tensor) for optimizer in self._optimizers for tensor in _tensors(optimizer)}
        return lambda provider: _lies_in(provider, memory)

    def watch(self, ticket: Ticket) -> None:
        """One more save to wait for."""
        if not ticket.captured.done():
            self._tickets.append(ticket)

    def wait(self) -> None:
        """Return when every save that was watched is captured, or has failed: its failure is told elsewhere."""
        tickets, self._tickets = self._tickets, []
        start = time.monotonic()
        try:
            for ticket in tickets:
                ticket.captured.exception()
        except BaseException:
            # Interrupted: the state is still being read, so whoever comes next has to wait for it too.
            self._tickets = tickets
            raise
        self.waited += time.monotonic() - start if tickets else 0.0

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.wait()

    def close(self) -> None:
        """Let the optimizers go, once all is captured."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._optimizers, self._hooks = [], []


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All that a step changes: parameters, and tensors of their state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    # Of an optimizer that splits its work among ranks, the one inside has the states of this rank.
    inner = getattr(optimizer, "optim", None)
    for state in (inner if isinstance(inner, torch.optim.Optimizer) else optimizer).state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _lies_in(provider: Provider, memory: set[Memory]) -> bool:
    if not isinstance(provider, (TensorProvider, ShardsProvider)) or provider.value is None:
        return False
    return _memory(provider.value) in memory


def _memory(tensor: torch.Tensor) -> Memory:
    """The memory on this rank; of a DTensor, that of its local tensor."""
    return tensor.device, local_of(tensor).untyped_storage().data_ptr()
