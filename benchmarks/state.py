"""A state like a GPT in training: big matrices, thousands of small tensors, and plain values."""

from __future__ import annotations

from typing import Any

import torch


def gpt_like(nbytes: int, seed: int = 0) -> dict[str, Any]:
    """Parameters in bfloat16 and two float32 moments, about ``nbytes`` together, of random values."""
    torch.manual_seed(seed)
    layers = 24
    # Per layer 12 d^2 parameters, of 2 + 4 + 4 bytes each.
    width = max(64, int((nbytes / (layers * 12 * 10)) ** 0.5) // 64 * 64)
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    small = {"norm1": (width,), "norm2": (width,), "bias_up": (4 * width,), "bias_down": (width,)}
    model: dict[str, torch.Tensor] = {}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for layer in range(layers):
        for name, shape in (shapes | small).items():
            model[f"layers.{layer}.{name}"] = torch.randn(shape).to(torch.bfloat16)
            moments[len(moments)] = {
                "step": torch.tensor(1000.0),
                "exp_avg": torch.randn(shape),
                "exp_avg_sq": torch.rand(shape),
            }
    groups = [{"lr": 3e-4, "betas": (0.9, 0.95), "params": list(range(len(moments)))}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "step": 1000}


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors of a state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(tensor_bytes, values))
