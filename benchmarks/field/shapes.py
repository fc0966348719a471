"""States with the shapes of published work: what one rank of a job saves, tensor by tensor, in true proportions.

The shapes of Llama 3 are those of MLPerf Storage's checkpointing workloads (mlcommons/storage, configs of DLIO), laid
out over ranks as DLIO does that: the layers of a rank in fp16, and its share of the parameters three times in fp32, as
an Adam optimizer has them, each beside a small tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

SCALE = 24
"""Each tensor has so many times fewer elements than in the published work, unless said otherwise."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a state.

    Attributes:
        name: its key.
        length: elements.
    """

    name: str
    length: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Llama:
    """A model of MLPerf Storage, and how its job cuts it.

    Attributes:
        tensor, pipeline: ranks over which each layer is cut, and stages of the pipeline.
        zero: stage of ZeRO: 1 cuts the optimizer over all ranks, 3 also the layers.
        ranks: of the whole job.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tensor: int
    pipeline: int
    zero: int
    ranks: int

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model, but for ZeRO."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def attention(self) -> int:
        """Columns of queries, keys and values, as DLIO counts them."""
        return self.hidden + 2 * self.hidden // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        layer = self.hidden * (self.attention + self.hidden + 3 * self.ffn + 2)
        return 2 * self.vocabulary * self.hidden + layer * self.layers + self.hidden

    def layer(self, number: int) -> list[int]:
        """Lengths of a rank's tensors of a layer: layer 0 is the embedding, and the last two are head and norm."""
        cut = self.replicas if self.zero == 3 else 1
        if number in (0, self.layers + 1):
            return [self.hidden * self.vocabulary // self.tensor // cut]
        if number == self.layers + 2:
            return [self.hidden // cut]
        widths = (self.attention, self.hidden, 2 * self.ffn, self.ffn)
        wide = [self.hidden * width // self.tensor // cut for width in widths]
        return [self.hidden // cut, *wide[:2], self.hidden // cut, *wide[2:]]

    def shard(self, rank: int, scale: int = SCALE) -> list[Tensor]:
        """What one rank saves: layers in fp16 if it is the one that saves them, and its share of the optimizer."""
        replica, stage = rank // (self.tensor * self.pipeline), rank // self.tensor % self.pipeline
        found = []
        if self.zero == 3 or replica == 0:
            found = [
                Tensor(f"layers.{number}.{i}", max(1, length // scale), torch.float16)
                for number in self._stage(stage)
                for i, length in enumerate(self.layer(number))
            ]
        share = max(1, self.parameters // self.ranks // scale)
        for i in range(3):
            found.append(Tensor(f"optimizer.{2 * i}", share, torch.float32))
            found.append(Tensor(f"optimizer.{2 * i + 1}", max(1, 5 * self.hidden // scale), torch.float32))
        return found

    def _stage(self, stage: int) -> Iterable[int]:
        each, more = divmod(self.layers, self.pipeline)
        first = stage * each + min(stage, more) + 1
        end = first + each + (stage < more)
        return range(first if stage else 0, end if stage < self.pipeline - 1 else self.layers + 3)


LLAMAS = {
    "llama3-8b": Llama(32, 4096, 14336, 32, 8, 128256, 1, 1, 3, 8),
    "llama3-70b": Llama(80, 8192, 28672, 128, 8, 128256, 8, 1, 3, 64),
    "llama3-405b": Llama(126, 16384, 53248, 128, 8, 128256, 8, 32, 1, 512),
    "llama3-1t": Llama(128, 25872, 98304, 192, 32, 128256, 8, 64, 1, 1024),
}
"""The models of MLPerf Storage's checkpointing, each with the ranks of its closed division."""


class Shard:
    """The state of one rank; to a competitor it is a `benchmarks.state.State`.

    Args:
        seed: shards of different seeds have no value in common.
    """

    def __init__(self, tensors: Iterable[Tensor], seed: int = 0) -> None:
        noise = torch.randint(-(1 << 62), 1 << 62, (1 << 20,), generator=torch.Generator().manual_seed(seed))
        # One buffer: new ones between the tensors would leave gaps in the heap, five times as long as the state.
        piece = torch.empty_like(noise)
        self.named: dict[str, torch.Tensor] = {}
        for i, one in enumerate(tensors):
            made = torch.empty(one.length, dtype=one.dtype)
            words = made.view(torch.uint8)
            for start in range(0, words.numel(), noise.nbytes):
                part = words[start : start + noise.nbytes]
                # No two pieces are equal, so that no chunk is found to be one that is saved already.
                torch.add(noise, (i << 32) + start, out=piece)
                part.copy_(piece.view(torch.uint8)[: len(part)])
            self.named[one.name] = made
        self.change()

    def nested(self) -> dict[str, Any]:
        """The state as a dict of live tensors."""
        return self.named

    def live(self) -> dict[str, Any]:
        """As `nested`."""
        return self.named

    def tensors(self) -> list[torch.Tensor]:
        """All live tensors, in order."""
        return list(self.named.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.named.values())

    def change(self) -> None:
        """Change every element in place, so that nothing of a save before can be used again."""
        for tensor in self.named.values():
            tensor.view(torch.uint8).bitwise_xor_(1)
