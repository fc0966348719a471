"""A competitor: one way of saving and restoring a state, in its default configuration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.state import State


def nothing() -> None:
    """What is left to do when all is done."""


@dataclass
class Pending:
    """A save whose call has returned.

    Attributes:
        captured: returns when the state may change again.
        durable: returns when the save has ended, and tells its errors. What was not synced by then is synced after.
        seconds: of the whole save by the competitor's own clock, where ours would count what is none of its business.
    """

    captured: Callable[[], Any] = nothing
    durable: Callable[[], Any] = nothing
    seconds: float | None = None


class Competitor(ABC):
    """What every way of saving has to offer; each object serves one process.

    Attributes:
        title: as tables show it.
        keeps: whether its saves outlive the process.
        scattered: whether its restore fills the state's own tensors; a mere limit of the hardware does not.
        ways: of restoring in place, as tables show them, each measured for itself.
        loads: its way to give a state without a template, as tables show it; empty where it has none.
        note: what a reader of the figures has to know.
    """

    title: ClassVar[str]
    keeps: ClassVar[bool] = True
    scattered: ClassVar[bool] = True
    ways: ClassVar[tuple[str, ...]] = ()
    loads: ClassVar[str] = ""
    note: ClassVar[str] = ""

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, number: int) -> Path:
        """Where a save lies."""
        return self.root / f"save-{number}"

    @classmethod
    def version(cls) -> str:
        """Of the software that does the work."""
        return f"torch {torch.__version__}"

    def open(self, state: State) -> None:  # noqa: B027 (most have nothing to do)
        """Get ready to save this state again and again; not measured."""

    @abstractmethod
    def save(self, state: State, number: int) -> Pending:
        """Save. Returns when the training may go on, if not the optimizer's step."""

    def restore(self, state: State, number: int, way: str) -> float | None:
        """Fill the state's tensors in place. Returns seconds only if by its own clock."""
        raise NotImplementedError(f"{self.title} does not restore in place")

    def load(self, number: int) -> Any:
        """The state as fresh tensors, every byte of them read."""
        raise NotImplementedError(f"{self.title} does not load without a template")

    def waited(self) -> float:
        """Seconds that optimizer steps have waited for captures, so far."""
        return 0.0

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Let go of everything."""


def copy_into(live: Iterable[torch.Tensor], loaded: Iterable[torch.Tensor]) -> None:
    """Fill tensors with others, one by one."""
    for target, source in zip(live, loaded, strict=True):
        target.copy_(source)
