"""Copies by torch alone: the limits of what tierstate copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.gauge import settle

from .machine import PIECE, PINNED
from .state import Params

DOWN, UP, WITHIN = "raw D2H", "raw H2D", "raw copy within the device"
"""The limits that others are compared with."""

LIMITS = {"save to `host`": DOWN, "save to `gpu`: captured": WITHIN, "save to `gpu`: committed": DOWN, "load": UP}
"""What a way is compared with, by how its title begins."""


class Raw:
    """Copies by torch alone, timed by the device's own clock.

    Args:
        params: their tensors are what is copied tensor by tensor; as many bytes are copied in long pieces.
    """

    def __init__(self, params: Params) -> None:
        self._tensors, nbytes = [t.view(torch.uint8) for t in params.tensors], params.nbytes
        self._pinned = torch.empty(min(nbytes, PINNED), dtype=torch.uint8, pin_memory=True)
        piece = torch.zeros(min(nbytes, PIECE), dtype=torch.uint8, device="cuda")
        self._other = torch.empty_like(piece)
        self._pieces = [piece[: min(len(piece), nbytes - at)] for at in range(0, nbytes, len(piece))]

    def ways(self) -> dict[str, Callable[[], float]]:
        """Each way by its title; a call returns seconds."""
        apart = "tensor by tensor"
        return {
            DOWN: lambda: self._timed(self._pieces, down=True),
            UP: lambda: self._timed(self._pieces, down=False),
            WITHIN: self._within,
            f"{DOWN}, {apart}": lambda: self._timed(self._tensors, down=True),
            f"{UP}, {apart}": lambda: self._timed(self._tensors, down=False, into=self._other),
        }

    def _timed(self, tensors: Sequence[torch.Tensor], *, down: bool, into: torch.Tensor | None = None) -> float:
        pairs, at = [], 0
        for tensor in tensors:
            at = at if at + len(tensor) <= len(self._pinned) else 0
            # What lies in the state stays as it is: its values are compared after restores.
            there = tensor if into is None else into[: len(tensor)]
            here = self._pinned[at : at + len(tensor)]
            pairs.append((here, tensor) if down else (there, here))
            at += len(tensor)
        return on_device(lambda: [to.copy_(source, non_blocking=True) for to, source in pairs])

    def _within(self) -> float:
        return on_device(lambda: [self._other[: len(p)].copy_(p, non_blocking=True) for p in self._pieces])


def on_device(work: Callable[[], object]) -> float:
    """Seconds by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    settle()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def limit_of(way: str) -> str:
    """The raw copy that is the limit of a way; empty for the raw ones."""
    way = way.removeprefix("first ")
    if way.startswith("raw"):
        return DOWN if way.startswith(f"{DOWN},") else UP if way.startswith(f"{UP},") else ""
    if way == "restore in place from `gpu`":
        return WITHIN
    return next((limit for begin, limit in LIMITS.items() if way.startswith(begin)), UP)
