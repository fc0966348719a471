"""A state as a trainer has it: a GPT-like module, its AdamW with moments, and Python values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

DEEPEST, VOCABULARY, HEADS = 70, 8192, 8
"""Layers of a 4 GiB state (smaller ones have fewer), tokens, attention heads."""
BYTES_PER_PARAMETER = 12
"""A float32 parameter and the two float32 moments of AdamW."""


class Linear(nn.Linear):
    """One whose values come later, so that no time goes into an initialization that is overwritten."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class LayerNorm(nn.LayerNorm):
    """As `Linear`."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """As `Linear`."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Block(nn.Module):
    """A transformer block with what makes small tensors: biases, norms of queries and keys, scales of its branches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)
        self.query_scale = nn.Parameter(torch.empty(width // HEADS))
        self.key_scale = nn.Parameter(torch.empty(width // HEADS))
        self.branch1, self.branch2 = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a perceptron, each beside a residual stream of shape (batch, time, width)."""
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key = split[0] * self.query_scale, split[1] * self.key_scale
        mixed = nn.functional.scaled_dot_product_attention(query, key, split[2], is_causal=True)
        x = x + self.branch1 * self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.branch2 * self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding, self.norm = Embedding(VOCABULARY, width), LayerNorm(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of predicting each next token of (batch, time)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class State:
    """What a trainer saves.

    Args:
        nbytes: bytes of all tensors together, about.
        seed: states of different seeds have no value in common.
        filled: otherwise it takes no memory and has no values.
        device: where module and moments are.
    """

    def __init__(self, nbytes: int, seed: int = 0, filled: bool = True, device: str = "cpu") -> None:
        layers, width = shape_of(nbytes)
        self.device = torch.device(device)
        with self.device:
            self.model = Gpt(layers, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1000.0 + seed, device="cpu"),
                "exp_avg": torch.empty_like(parameter),
                "exp_avg_sq": torch.empty_like(parameter),
            }
        self.values = python_values(seed)
        if filled:
            self._fill(seed)

    def _fill(self, seed: int) -> None:
        """Values that no chunk shares with another, from one block of noise: a generator would take much longer."""
        noise = torch.randn(1 << 23, generator=torch.Generator().manual_seed(seed)).to(self.device) * 0.02
        at = 0
        for tensor in tensors(self.nested()):
            if tensor.dim() == 0 or tensor.dtype is not torch.float32:
                continue
            flat = tensor.view(-1)
            for start in range(0, len(flat), len(noise) // 2):
                part = flat[start : start + len(noise) // 2]
                at = (at + 1_000_003) % (len(noise) // 2)
                part.copy_(noise[at : at + len(part)])
        for moments in self.optimizer.state.values():
            moments["exp_avg_sq"].square_()

    def nested(self) -> dict[str, Any]:
        """The state as state_dicts; its tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **self.values}

    def live(self) -> dict[str, Any]:
        """The state as the objects themselves, for those who take them."""
        return {"model": self.model, "optimizer": self.optimizer, **self.values}

    def tensors(self) -> list[torch.Tensor]:
        """All live tensors, in order."""
        return list(tensors(self.nested()))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors())

    def change(self) -> None:
        """Change every element in place, so that nothing of a save before can be used again."""
        for tensor in self.tensors():
            whole = torch.int32 if tensor.dtype is torch.float32 else torch.uint8
            tensor.view(whole).bitwise_xor_(1)


def shape_of(nbytes: int) -> tuple[int, int]:
    """Layers and width of a module whose training state takes at most so many bytes."""
    layers = max(12, round(DEEPEST * (nbytes / 2**32) ** 0.5))
    wanted = nbytes / BYTES_PER_PARAMETER
    width = max(64, max(w for w in range(0, 8192, 16) if 12 * layers * w * w + 2 * VOCABULARY * w <= wanted))
    return layers, width


def python_values(seed: int) -> dict[str, Any]:
    """What is no module and no optimizer."""
    return {
        "step": 1000 + seed,
        "rng": torch.Generator().manual_seed(seed).get_state(),
        "python_rng": random.Random(seed).getstate(),
        "data": {"epoch": 3, "position": 123_456 + seed, "files": [f"shard-{i:05}.bin" for i in range(200)]},
        "schedule": {"warmup": 2000, "peak": 3e-4, "kind": "cosine", "done": False},
    }


def tensors(nested: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested containers, in order."""
    if isinstance(nested, torch.Tensor):
        yield nested.detach()
    elif isinstance(nested, (dict, list, tuple)):
        for value in nested.values() if isinstance(nested, dict) else nested:
            yield from tensors(value)


def fingerprint(found: Iterator[torch.Tensor] | list[torch.Tensor]) -> str:
    """A digest of all bytes of some tensors, whatever their order."""
    total = sum(xxhash.xxh3_128_intdigest(_bytes(tensor)) for tensor in found)
    return f"{total % 2**128:032x}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
