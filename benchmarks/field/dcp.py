"""torch.distributed.checkpoint, sync and async, in one process."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks.competitor import Competitor, Pending
from benchmarks.state import State

# It says at each call that there is no process group, which is what is meant here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Dcp(Competitor):
    """``dcp.save`` and ``dcp.load``."""

    title = "DCP `save`"
    ways = ("DCP `load`",)
    note = "DCP has no public way to load without a template"

    def save(self, state: State, number: int) -> Pending:
        dcp.save(state.nested(), checkpoint_id=self.place(number))
        return Pending()

    def restore(self, state: State, number: int, way: str) -> None:
        dcp.load(state.nested(), checkpoint_id=self.place(number))


class DcpAsync(Dcp):
    """``dcp.async_save``; a save first waits for the one before, as its documentation asks."""

    title = "DCP `async_save`"
    ways = ()
    note = "its files are those of DCP `save`"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._before: Future[Any] | None = None

    def save(self, state: State, number: int) -> Pending:
        if self._before is not None:
            self._before.result()
        future = dcp.async_save(state.nested(), checkpoint_id=self.place(number))
        assert isinstance(future, Future)
        self._before = future
        return Pending(durable=future.result)

    def close(self) -> None:
        if self._before is not None:
            self._before.result()
