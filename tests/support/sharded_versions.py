"""Versions with the shards of many ranks, in any tier, and values of which a rank holds boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from support.transfer import transfer

from tierstate.engine.codecs.codecs import compress
from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import digest_array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, Chunk, as_buffer, spans
from tierstate.manifest.digest import digest_function
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.sharded.merge import merge_parts
from tierstate.providers.base import Provider
from tierstate.providers.tensors.dtypes import torch_name
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.flatten import flatten
from tierstate.tiers.base import Tier

Cuts = Mapping[str, Sequence[Box]]
"""Name of a leaf -> its box on each rank; ranks may have the same one."""


def along(n: int, parts: int) -> list[tuple[int, int]]:
    """Where each of so many parts of an axis begins, and how long it is, as `torch.chunk` cuts: the last may be short,
    and some empty.
    """
    size = -(-n // parts)
    return [(min(i * size, n), max(0, min(size, n - i * size))) for i in range(parts)]


def mesh(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """The boxes of a mesh that cuts each axis into so many parts."""
    grid = [along(n, k) for n, k in zip(shape, parts, strict=True)]
    return [Box(tuple(o for o, _ in cell), tuple(n for _, n in cell)) for cell in product(*grid)]


@st.composite
def meshes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A mesh over an array of this shape, of one rank or of several; some of its boxes twice."""
    boxes = mesh(shape, [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in shape])
    return boxes + draw(st.lists(st.sampled_from(boxes), max_size=2))


def keep(
    tier: Tier, state: Any, cuts: Cuts, *, seq: int = 1, chunk: int = 64, codec: str = "raw", digest: str = "xxh3-128"
) -> Version:
    """Save a state as ranks would whose leaves are cut so; what is not named, each rank has as a whole.

    Every rank writes a pack of its own.
    """
    version, data = merged(state, cuts, Head("run", seq, 10 * seq, 1.0 + seq, chunk=chunk, digest=digest))
    pairs = zip(version.shard_leaf.tolist(), version.boxes, strict=True)
    shards = [piece(version.leaves[leaf], data[leaf], box) for leaf, box in pairs]
    places: list[Any] = [None] * len(version.digests)
    sizes = {}
    for rank in np.unique(version.shard_rank).tolist():
        writer = PackWriter(tier, "run", seq, label=str(rank))
        for row in np.flatnonzero(version.shard_rank[version.chunk_shard] == rank).tolist():
            start, end = int(version.chunk_start[row]), int(version.chunk_start[row] + version.chunk_nbytes[row])
            raw = as_buffer(shards[int(version.chunk_shard[row])][start:end])
            how, stored = compress(codec, raw, 1)
            places[row] = writer.add(stored, version.digests[row].tobytes(), raw.numel(), how)
        sizes.update(writer.close())
    TierRun(tier, "run").publish(Record(version, Layout.build(places, sizes), {"id": f"made-{seq}"}))
    return version


def merged(state: Any, cuts: Cuts, head: Head) -> tuple[Version, dict[int, bytes]]:
    """The version that the parts of all ranks make, and each leaf's bytes."""
    tree = flatten(state, allow_pickle=lambda _path: True)
    leaves, data = transfer(tree)
    name = digest_function(head.digest)
    world = max([1, *map(len, cuts.values())])
    parts = []
    for rank in range(world):
        shards = [(i, box) for i in sorted(data) if (box := box_of(leaves[i], cuts, rank)) is not None]
        digests = [
            name(as_buffer(part[at : at + n]))
            for i, box in shards
            for part in [piece(leaves[i], data[i], box)]
            for at, n in spans(len(part), head.chunk)
        ]
        parts.append(Version.build(head, leaves, [ShardRow(i, rank, box) for i, box in shards], digest_array(digests)))
    return merge_parts(parts).version, data


def box_of(leaf: Leaf, cuts: Cuts, rank: int) -> Box | None:
    """What a rank has of a leaf."""
    boxes = cuts.get(leaf.name, [Box.whole(leaf.spec.shape)])
    return boxes[rank] if rank < len(boxes) else None


def piece(leaf: Leaf, data: bytes, box: Box) -> bytes:
    """The bytes of a box of a leaf."""
    cells = np.frombuffer(data, np.uint8).reshape(*leaf.spec.shape, leaf.spec.itemsize)
    return cells[box.slices()].tobytes()


def chunk_of(version: Version, data: Mapping[int, bytes], row: int) -> bytes:
    """The raw bytes of a row."""
    leaf = int(version.chunk_leaf[row])
    start, nbytes = int(version.chunk_start[row]), int(version.chunk_nbytes[row])
    return piece(version.leaves[leaf], data[leaf], version.boxes[version.chunk_shard[row]])[start : start + nbytes]


class Held:
    """Boxes of a global tensor that a rank holds, each in a tensor of its own."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], parts: Sequence[tuple[Box, torch.Tensor]]) -> None:
        self.spec = Spec("tensor", torch_name(dtype), dtype.itemsize, tuple(shape))
        self.parts = parts

    def __state_provider__(self) -> Provider:
        return HeldProvider(self)


class HeldProvider(Provider):
    """Gives each box to the provider of its tensor."""

    kind = "tensor"

    def __init__(self, value: Held) -> None:
        self._value = value
        self._parts = [PartProvider(tensor, box) for box, tensor in value.parts]

    @property
    def spec(self) -> Spec:
        return self._value.spec

    @property
    def parts(self) -> Sequence[Provider]:
        return self._parts

    def chunks(self, size: int) -> Iterator[Chunk]:
        raise NotImplementedError

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> HeldProvider:
        raise NotImplementedError

    def load(self, start: int, data: Buffer) -> None:
        raise NotImplementedError

    def done(self) -> Held:
        for part in self._parts:
            part.done()
        return self._value


class PartProvider(TensorProvider):
    """A tensor that is a box of a larger one."""

    def __init__(self, value: torch.Tensor, box: Box) -> None:
        super().__init__(value)
        self._box = box

    @property
    def box(self) -> Box:
        return self._box


def volume(box: Box, itemsize: int) -> int:
    """Bytes of a box."""
    return math.prod(box.shape) * itemsize
