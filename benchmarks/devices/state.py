"""The state on a device that is copied, and the device memory that a copy takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gauge import settle

SHAPES = ("large", "small")

LARGE, SMALL, MANY = 64 << 20, 40_000, 20_000
"""Bytes of a tensor of each shape, and the most tensors of the small one."""


class Params:
    """A state on the device, and an optimizer whose step changes every element of it.

    Args:
        shape: one of `SHAPES`.
        nbytes: bytes of all tensors together, at most.
    """

    def __init__(self, shape: str, nbytes: int) -> None:
        each = min(LARGE if shape == "large" else SMALL, nbytes)
        count = nbytes // each if shape == "large" else min(MANY, nbytes // each)
        self.tensors = [torch.randn(each // 4, device="cuda") for _ in range(count)]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.param_groups = [{"params": self.tensors}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None:
        """Change everything."""
        torch._foreach_add_(self.tensors, 1.0)

    def saved(self) -> dict[str, torch.Tensor]:
        """What is given to save and restore."""
        return {f"t{i:05}": tensor for i, tensor in enumerate(self.tensors)}


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A sum of each tensor's bits."""
    found = torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])
    return [int(one) for one in found.tolist()]


def compare(one: Sequence[int], other: Sequence[int]) -> None:
    """Check that restored tensors are those that were saved, by their `sums`."""
    if one != other:
        raise ValueError("other bytes came back than were saved")


class Peak:
    """Most device memory that torch has allocated since this was made, beyond what was allocated then."""

    def __init__(self) -> None:
        settle()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def extra(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated() - self._before
