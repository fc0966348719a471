"""Orbax: the asynchronous save of a tree of NumPy arrays, and its restore."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import torch

from benchmarks.competitor import Competitor, Pending
from benchmarks.state import State


class Orbax(Competitor):
    """``StandardCheckpointer``, which copies the arrays and writes beside the training."""

    title = "Orbax"
    ways = ("Orbax `restore`, copied in",)
    loads = "Orbax `restore`"
    note = "made for JAX: it is given the tensors as NumPy arrays, without a copy, and without the other Python values"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._checkpointer = ocp.StandardCheckpointer()

    @classmethod
    def version(cls) -> str:
        return f"orbax-checkpoint {version('orbax-checkpoint')}"

    def save(self, state: State, number: int) -> Pending:
        self._checkpointer.save(self.place(number).absolute(), arrays(state.nested()))
        return Pending(durable=self._checkpointer.wait_until_finished)

    def restore(self, state: State, number: int, way: str) -> None:
        live = arrays(state.nested())
        fill(live, self._checkpointer.restore(self.place(number).absolute(), live))

    def load(self, number: int) -> Any:
        return as_tensors(self._checkpointer.restore(self.place(number).absolute()))

    def close(self) -> None:
        self._checkpointer.close()


def arrays(nested: dict[Any, Any]) -> dict[str, Any]:
    """A state dict's tensors as arrays that share their memory, in the same nested dicts."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            found[str(key)] = value.detach().numpy()
        elif isinstance(value, dict) and (below := arrays(value)):
            found[str(key)] = below
    return found


def fill(live: dict[str, Any], restored: dict[str, Any]) -> None:
    """Copy what was restored into the live arrays."""
    for key, value in live.items():
        if isinstance(value, np.ndarray):
            value[...] = restored[key]
        else:
            fill(value, restored[key])


def as_tensors(restored: dict[str, Any]) -> dict[str, Any]:
    """Nested arrays as tensors."""
    return {
        key: as_tensors(value) if isinstance(value, dict) else torch.from_numpy(np.asarray(value))
        for key, value in restored.items()
    }
