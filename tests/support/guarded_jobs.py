"""A small job whose optimizer is guarded, and gates that hold its lazy capture back at chosen tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import memmove
from typing import Any

import pytest
import torch

from tierstate.engine.capture import capture


class Job:
    """An embedding, two layers and their optimizer, after a step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 300), torch.nn.Linear(300, 4))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.backward()
        self.optimizer.step()

    @property
    def table(self) -> torch.nn.Parameter:
        return self.model[0].weight  # type: ignore[return-value]

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.model[1].weight  # type: ignore[return-value]

    @property
    def moment(self) -> torch.Tensor:
        return self.optimizer.state[self.weight]["exp_avg"]  # type: ignore[no-any-return]

    def backward(self) -> None:
        # New gradients each time: in a compiled first step momentum may share their memory.
        self.model.zero_grad()
        self.model(torch.arange(50)).square().mean().backward()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def truth(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


class Gates:
    """Holds the capture back before it reads given addresses."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[threading.Event, threading.Event]] = {}

    def hold(self, address: int) -> tuple[threading.Event, threading.Event]:
        return self.held.setdefault(address, (threading.Event(), threading.Event()))

    def memmove(self, target: int, source: int, nbytes: int) -> Any:
        for reached, opened in [gate for address, gate in self.held.items() if source <= address < source + nbytes]:
            reached.set()
            assert opened.wait(60)
        return memmove(target, source, nbytes)


@contextmanager
def gated() -> Iterator[Gates]:
    gates, patch = Gates(), pytest.MonkeyPatch()
    patch.setattr(capture, "memmove", gates.memmove)
    try:
        yield gates
    finally:
        for _, opened in gates.held.values():
            opened.set()
        patch.undo()
