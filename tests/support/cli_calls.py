"""Runs commands of the command line and returns their results; saves the states that they work on."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tierstate.cli import main


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON, though Python reads it")


def strict_json(text: str | bytes) -> Any:
    """What a strict reader of JSON makes of it; ValueError for NaN and Infinity, which JSON does not have."""
    return json.loads(text, parse_constant=_refuse)


class Answer(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return strict_json(self.out)


Call = Callable[..., Answer]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process, by the entry point itself."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tierstate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return Answer(code, out, err)

    return run


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


BITS = torch.tensor([0x7FA00001, -0x3EDCBB, -0x80000000, 1], dtype=torch.int32).view(torch.float32)


def odd() -> dict[str, Any]:
    """A state with much that file formats have their own ideas of."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, 30, generator=generator))
    return {
        "model": {
            "embed.weight": weight, "head.weight": weight,
            "norm": torch.randn(5, generator=generator).to(torch.bfloat16),
        },
        "optimizer": {"state": {0: {"m": BITS.clone(), "step": torch.tensor(3)}}, "lr": 0.1},
        "a.b": torch.ones(2), "a": {"b": torch.zeros(2), "none": None, "empty": torch.zeros(0, 3)},
        "seen": [torch.arange(3), "text", (1, b"\0")], "array": np.arange(6, dtype="<i2").reshape(2, 3),
    }  # fmt: skip
