"""safetensors: one flat file of tensors. Python values are left out: the format has none."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.competitor import Competitor, Pending
from benchmarks.state import State


class Safetensors(Competitor):
    """``save_file`` of names and tensors."""

    title = "safetensors"
    ways = ("safetensors `load_file`, copied in", "safetensors `safe_open`, copied in")
    loads = "safetensors `load_file`, cloned"
    note = "tensors only, without the Python values"

    @classmethod
    def version(cls) -> str:
        return f"safetensors {version('safetensors')}"

    def save(self, state: State, number: int) -> Pending:
        save_file(flat(state.nested()), self.place(number))
        return Pending()

    def restore(self, state: State, number: int, way: str) -> None:
        live = flat(state.nested())
        if "load_file" in way:
            loaded = load_file(self.place(number))
            for name, tensor in live.items():
                tensor.copy_(loaded[name])
            return
        with safe_open(self.place(number), framework="pt") as file:
            for name, tensor in live.items():
                tensor.copy_(file.get_tensor(name))

    def load(self, number: int) -> Any:
        # Its tensors are views of a mapped file: only a copy has really been read.
        return {name: tensor.clone() for name, tensor in load_file(self.place(number)).items()}


def flat(nested: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors by their dotted names."""
    if isinstance(nested, torch.Tensor):
        return {prefix: nested.detach()}
    found: dict[str, torch.Tensor] = {}
    for key, value in nested.items() if isinstance(nested, dict) else ():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
