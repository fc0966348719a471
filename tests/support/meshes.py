"""Meshes without processes: the DTensors of any rank on any mesh, and states joined from the shards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.providers.base import Provider
from tierstate.providers.tensors.dtypes import torch_dtype
from tierstate.providers.tree.flatten import FlatState
from tierstate.providers.tree.target import Target

WORLD = 64


@contextmanager
def pretended() -> Iterator[None]:
    """A process group that only pretends: this process is rank 0 of 64."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_at(shape: Sequence[int], coordinate: Sequence[int] | None) -> DeviceMesh:
    """A mesh in which this process has that coordinate; None: in which it is not."""
    count = math.prod(shape)
    ranks = torch.arange(count) + 1
    if coordinate is not None:
        ranks.view(*shape)[tuple(coordinate)] = 0
    return DeviceMesh("cpu", ranks.view(*shape), _init_backend=False)


def coordinates(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Those of all ranks of a mesh."""
    return [
        tuple(int(i) for i in torch.unravel_index(torch.tensor(at), tuple(shape))) for at in range(math.prod(shape))
    ]


def spread(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of this process, without a word to others."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


@st.composite
def meshes(draw: st.DrawFn, most: int = 64) -> tuple[int, ...]:
    """Shapes of meshes of that many ranks at most."""
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
    return tuple(draw(sizes.filter(lambda found: math.prod(found) <= most)))


@cache
def uneven_strides() -> bool:
    """Whether torch cuts unevenly with strides as tierstate says: 2.8 cuts in another way, which FSDP never uses."""
    first = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(5), 2, with_padding=False)[0][0]
    return first.tolist() == [0, 1, 3]


@st.composite
def placements(draw: st.DrawFn, mesh: Sequence[int], dims: int) -> list[Placement]:
    """One for each dimension of the mesh."""
    one: st.SearchStrategy[Placement] = st.just(Replicate())
    if dims:
        one |= st.integers(0, dims - 1).map(Shard)
        one |= st.builds(
            lambda dim, split: _StridedShard(dim, split_factor=split),
            st.integers(0, dims - 1),
            st.integers(1, 3 if uneven_strides() else 1),
        )
    return [draw(one) for _ in mesh]


Given = dict[str, tuple[tuple[int, ...], torch.dtype, list[tuple[Box, torch.Tensor]]]]
"""What one rank gives of each tensor: the global shape, and its boxes."""


def given_by(tree: FlatState) -> Given:
    """What this rank gives."""
    return {
        encode_path(node.leaf.path): (
            node.leaf.spec.shape,
            torch_dtype(node.leaf.spec.dtype),
            [(part.box, _tensor(part)) for part in node.provider.parts],
        )
        for node in tree.nodes
        if node.provider is not None and node.leaf.spec.kind == "tensor"
    }


def part_bytes(part: Provider, size: int = 32) -> bytes:
    """The bytes of one box, by its chunks, which its memory agrees with."""
    found, at, nbytes = [], 0, part.box.volume * part.spec.itemsize
    for start, length, fill in part.chunks(size):
        assert (start, length) == (at, min(size, nbytes - at))
        out = empty_buffer(length)
        fill(out)
        found.append(to_bytes(out))
        at += length
    assert at == nbytes
    memory = part.memory()
    assert memory is None or to_bytes(memory) == b"".join(found)
    return b"".join(found)


def _tensor(part: Provider) -> torch.Tensor:
    data = torch.frombuffer(bytearray(part_bytes(part)) or bytearray(16), dtype=torch.uint8)
    data = data[: part.box.volume * part.spec.itemsize]
    return data.view(torch_dtype(part.spec.dtype)).view(part.box.shape)


def gathered(all_given: Sequence[Given]) -> dict[str, torch.Tensor]:
    """The global tensors by path; every element is seen to be there once, copies of one box aside."""
    boxes: dict[str, dict[Box, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for path, (shape, dtype, own) in (item for one in all_given for item in one.items()):
        whole.setdefault(path, torch.zeros(shape, dtype=dtype))
        for box, tensor in own:
            assert torch.equal(boxes.setdefault(path, {}).setdefault(box, tensor), tensor)
    for path, tensor in whole.items():
        seen = torch.zeros(tensor.shape, dtype=torch.int64)
        for box, part in boxes.get(path, {}).items():
            assert box.within(tuple(tensor.shape))
            tensor[box.slices()] = part
            seen[box.slices()] += 1
        assert bool((seen == 1).all()), (path, list(boxes.get(path, {})))
    return whole


def load(
    target: Target, leaves: Sequence[Any], whole: Mapping[str, torch.Tensor], data: Mapping[str, bytes] = {}
) -> Any:
    """Give each wanted box its bytes of the global tensors (or a leaf its own), and finish."""

    def give(index: int, provider: Provider) -> None:
        path = encode_path(leaves[index].path)
        for part in provider.parts:
            if path in whole:
                raw = whole[path][part.box.slices()].contiguous().view(-1).view(torch.uint8)
            else:
                raw = torch.frombuffer(bytearray(data[path]), dtype=torch.uint8)
            if raw.numel():
                part.load(0, raw)

    for index, provider in target.ahead:
        give(index, provider)
    target.settle()
    for index, provider in target.wanted.items():
        give(index, provider)
    return target.finish()
