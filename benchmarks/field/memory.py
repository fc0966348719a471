"""The limit of memory: the state copied tensor by tensor into memory that is there already."""

from __future__ import annotations

import torch

from benchmarks.competitor import Competitor, Pending, copy_into
from benchmarks.state import State


class Memcpy(Competitor):
    """``Tensor.copy_`` of every tensor, with torch's default threads."""

    title = "copy in memory (torch's threads)"
    keeps = False
    note = "nothing is kept: the least that a capture can cost"

    def open(self, state: State) -> None:
        self._copies = [torch.zeros_like(t) for t in state.tensors()]
        copy_into(self._copies, state.tensors())  # zeros alone are not yet faulted in

    def save(self, state: State, number: int) -> Pending:
        copy_into(self._copies, state.tensors())
        return Pending()


class MemcpyAlone(Memcpy):
    """The same by one thread."""

    title = "copy in memory (one thread)"

    def open(self, state: State) -> None:
        super().open(state)
        torch.set_num_threads(1)
