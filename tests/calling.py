"""What a command did, and the state that is saved for it."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Answer(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Answer]


def state(step: int) -> dict[str, Any]:
    """A state with containers of several kinds."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": OrderedDict(w=torch.randn(3000, generator=generator), b=torch.ones(4, dtype=torch.bfloat16)),
        "sizes": (1, 2.5, "three"),
        "step": step,
    }


def damage(policy: Path, tier: str = "nvme") -> None:
    """Flip a bit in the newest pack of a tier."""
    folder = policy.parent / {"nvme": "nvme", "store": "object"}[tier]
    path = sorted((folder / "packs/gpt").iterdir())[-1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
