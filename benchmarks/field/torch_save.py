"""torch.save and torch.load."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.competitor import Competitor, Pending, copy_into
from benchmarks.state import State, tensors


class TorchSave(Competitor):
    """One file of state_dicts."""

    title = "torch.save"
    ways = ("torch.load, copied in", "torch.load(mmap=True), copied in")
    loads = "torch.load"

    def save(self, state: State, number: int) -> Pending:
        torch.save(state.nested(), self.place(number))
        return Pending()

    def restore(self, state: State, number: int, way: str) -> None:
        loaded = torch.load(self.place(number), mmap="mmap" in way)
        copy_into(state.tensors(), tensors(loaded))

    def load(self, number: int) -> Any:
        return torch.load(self.place(number))
