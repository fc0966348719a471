"""A small GPT over bytes: 1.3 million parameters, its output head tied to its embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Block(nn.Module):
    """Causal attention and a perceptron, each on a normalised input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_perceptron = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` in and out."""
        x = x + self._dropped(self.attend(self.norm_attention(x)))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm_perceptron(x)))))

    def attend(self, x: Tensor) -> Tensor:
        """Each place looks at itself and those before it; ``(batch, length, width)`` in and out."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        joined: Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return joined

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte at every place of a text.

    Args:
        length: bytes that it sees at a time.
        width: numbers per byte, a multiple of ``heads``.
        dropout: share of activations left out in training, so that its random numbers belong to the state.
    """

    def __init__(
        self, length: int = 64, width: int = 160, heads: int = 5, depth: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(_start_small)
        # One tensor under two names: it is to be saved once, and still be one after a restore.
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        """Bytes ``(batch, length)``, as integers, to logits ``(batch, length, 256)``."""
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross entropy, in nats per byte, of bytes ``(batch, length + 1)``."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def _start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.02)
