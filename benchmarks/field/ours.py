"""tierstate: lazy, eager, waiting until durable, and with a small arena."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import tierstate as ts
from benchmarks.competitor import Competitor, Pending
from benchmarks.state import State


class Eager(Competitor):
    """``save`` returns when the state is captured."""

    title = "tierstate, eager"
    ways = ("tierstate `restore`",)
    loads = "tierstate `load`"
    arena: ClassVar[str] = "2GiB"
    format: ClassVar[str] = "native"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._ckpt: ts.Checkpointer | None = None

    @classmethod
    def version(cls) -> str:
        return f"tierstate {ts.__version__}"

    def _checkpointer(self) -> ts.Checkpointer:
        # Two versions stay, as of the others: their runs remove older saves too, which takes time and gives room.
        tier = f"{{type: nvme, path: '{self.root}', format: {self.format}, keep: {{last: 2}}}}"
        policy = f"version: 1\narena: {{size: {self.arena}}}\ntiers:\n  nvme: {tier}\n"
        return ts.Checkpointer(ts.Policy.parse(policy), run="bench")

    def open(self, state: State) -> None:
        self._ckpt = self._checkpointer()

    def save(self, state: State, number: int) -> Pending:
        assert self._ckpt is not None
        save = self._ckpt.save(state.live(), step=number)
        return Pending(save.wait_captured, save.wait)

    def restore(self, state: State, number: int, way: str) -> None:
        with self._checkpointer() as ckpt:
            ckpt.restore(into=state.live(), step=number)

    def load(self, number: int) -> Any:
        with self._checkpointer() as ckpt:
            return ckpt.load(step=number)

    def close(self) -> None:
        if self._ckpt is not None:
            self._ckpt.close()


class Lazy(Eager):
    """``save`` returns at once, and the optimizer's step waits for the capture."""

    title = "tierstate, lazy"
    ways = ()
    loads = ""
    note = "its files are those of the eager one"

    def open(self, state: State) -> None:
        super().open(state)
        assert self._ckpt is not None
        self._ckpt.guard(state.optimizer)

    def waited(self) -> float:
        assert self._ckpt is not None
        return self._ckpt.stats().waited


class Waiting(Eager):
    """``save().wait()``: nothing goes on before the state is durable."""

    title = "tierstate, `save().wait()`"
    ways = ()
    loads = ""
    note = "its files are those of the eager one"

    def save(self, state: State, number: int) -> Pending:
        super().save(state, number).durable()
        return Pending()


class SmallArena(Eager):
    """Eager, with a quarter of the memory."""

    title = "tierstate, eager, 512 MiB arena"
    ways = ("tierstate `restore`, 512 MiB arena",)
    loads = ""
    arena = "512MiB"


class AsSafetensors(Eager):
    """Eager, into packs that are safetensors files."""

    title = "tierstate, eager, `format: safetensors`"
    ways = ("tierstate `restore` of `format: safetensors`",)
    loads = ""
    format = "safetensors"


class AsHdf5(Eager):
    """Eager, into packs that are HDF5 files."""

    title = "tierstate, eager, `format: hdf5`"
    ways = ("tierstate `restore` of `format: hdf5`",)
    loads = ""
    format = "hdf5"
