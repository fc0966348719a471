"""A training state that changes in every way that states do, and its expected content at any step."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


class Change(NamedTuple):
    """What becomes of one leaf; size and dtype are those of a new tensor."""

    name: str
    how: str
    size: int
    dtype: torch.dtype
    seed: int


Changes = list[Change]
CHANGES = st.lists(
    st.builds(
        Change,
        st.sampled_from(["a", "b", "c", "d", "e"]),
        st.sampled_from(["add", "one", "tensor", "array", "value", "remove"]),
        st.sampled_from([9000, 3000, 1000, 3, 0]),
        st.sampled_from(DTYPES),
        st.integers(0, 99),
    ),
    max_size=4,
)


def made(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of about so many bytes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size // dtype.itemsize, generator=generator)
    return values.to(dtype) if dtype.is_floating_point else (100 * values).abs().to(dtype)


class Training:
    """A model, its optimizer, and leaves that come, go and change.

    Attributes:
        state: what is saved.
    """

    def __init__(self) -> None:
        self.model = torch.nn.Linear(24, 24)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(made(p.nbytes, p.dtype, 1).reshape(p.shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.leaves: dict[str, Any] = {"a": made(9000, torch.float32, 2), "b": made(3000, torch.bfloat16, 3)}
        self.state = {"model": self.model, "optimizer": self.optimizer, "leaves": self.leaves, "steps": 0}

    def truth(self) -> dict[str, Any]:
        """What a fresh load gives of the state as it is now."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**self.state, **parts})

    def train(self, seed: int) -> None:
        """A step of the optimizer."""
        self.state["steps"] += 1
        for i, p in enumerate(self.model.parameters()):
            p.grad = made(p.nbytes, p.dtype, seed + i).reshape(p.shape)
        self.optimizer.step()

    def change(self, changes: Changes) -> None:
        """Change leaves: in place, all of a tensor or one element; or put others in their place; or remove them."""
        for name, how, size, dtype, seed in changes:
            leaf = self.leaves.get(name)
            if how in ("add", "one") and isinstance(leaf, torch.Tensor) and leaf.numel():
                (leaf if how == "add" else leaf[seed % leaf.numel() :][:1]).add_(1)
            elif how == "remove":
                self.leaves.pop(name, None)
            elif how == "array":
                self.leaves[name] = np.arange(seed, seed + size // 8)
            elif how == "value":
                self.leaves[name] = [seed, str(seed), seed / 7, None]
            else:
                self.leaves[name] = made(size, dtype, seed)
