"""Blocks: many tensors in few mappings, each a storage of its own, and gone when the last one is dropped."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.leaks import resident

from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.tensors.host_memory import (
    CACHE_LINE,
    MAX_MAPPING,
    PAGE_ALIGNED_FROM,
    PAGE_BYTES,
    HostAllocator,
)
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.unflatten import plan_restore

AROUND = [PAGE_ALIGNED_FROM - 1, PAGE_ALIGNED_FROM, PAGE_ALIGNED_FROM + 1, MAX_MAPPING // 2, MAX_MAPPING // 2 + 1]
SIZES = st.sampled_from([0, 1, 63, 64, 4096, 100_000, 40 << 20, *AROUND])


def mapped() -> Iterator[int]:
    """Length of each mapping of this process that is no file's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *rest = line.split()
        if len(rest) == 4:
            first, last = (int(n, 16) for n in span.split("-"))
            yield last - first


@given(st.lists(SIZES, max_size=30))
def test_pieces_are_aligned_zeroed_and_apart(sizes: list[int]) -> None:
    blocks = HostAllocator(1 << 40)
    pieces = [blocks.take(size) for size in sizes]
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel()) for p in pieces if p.numel())
    assert all(one[1] <= two[0] for one, two in pairwise(spans))
    for size, piece in zip(sizes, pieces, strict=True):
        assert (piece.numel(), piece.storage_offset(), piece.untyped_storage().nbytes()) == (size, 0, size)
        assert piece.data_ptr() % (PAGE_BYTES if size >= PAGE_ALIGNED_FROM else CACHE_LINE) == 0
        assert not piece[:100].any()
        assert not piece[-100:].any()


@pytest.mark.slow
def test_nothing_is_touched_and_all_is_given_back() -> None:
    gc.collect()
    before, most = resident(), sum(mapped())
    blocks = HostAllocator()
    parts = [[blocks.take(3 << 20) for _ in range(50)] for _ in range(4)]
    assert resident() - before < 50 << 20, "taking memory is not touching it"
    for part in parts:
        for piece in part:
            piece.fill_(1)
    full = resident()
    assert full - before > 500 << 20
    del parts[0], part, piece
    gc.collect()
    assert full - resident() > 80 << 20, "a part of the state is dropped, and its memory with it"
    del parts, blocks
    gc.collect()
    assert resident() - before < 100 << 20
    assert sum(mapped()) - most < 100 << 20


def test_more_than_the_host_has_is_refused_before_any_of_it_is_touched() -> None:
    blocks = HostAllocator(1 << 20)
    blocks.take(1 << 19)
    with pytest.raises(MemoryError, match=rf"{(1 << 19) + (1 << 20)} bytes and more, this host has {1 << 20}"):
        blocks.take(1 << 20)
    before = resident()
    leaves = [Leaf((), Spec("dict", "", 0, ()))]
    leaves += [Leaf((f"w{i}",), Spec("tensor", "float32", 4, (1 << 30,))) for i in range(1000)]
    with pytest.raises(MemoryError, match=r"^w\d+: tensors to be built anew"):
        plan_restore(leaves)
    with pytest.raises(FormatError, match="is not a shape"):
        plan_restore([leaves[0], Leaf(("w",), Spec("tensor", "float32", 4, (1 << 60,)))])
    assert resident() - before < 50 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (1 << 18,)])
def test_a_tensor_in_a_block_is_like_any_other(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    name = str(dtype).removeprefix("torch.")
    attrs = {"requires_grad": True, "parameter": True} if dtype.is_floating_point else {}
    spec = Spec("tensor", name, dtype.itemsize, shape, attrs)
    blocks = HostAllocator()
    blocks.take(1 << 19)
    made = TensorProvider.fresh(spec, None, blocks).done()
    assert (made.dtype, tuple(made.shape), made.is_contiguous(), made._base) == (dtype, shape, True, None)
    assert made.requires_grad == (type(made) is torch.nn.Parameter) == bool(attrs)
    file = io.BytesIO()
    torch.save(made, file)
    assert len(file.getvalue()) < made.numel() * dtype.itemsize + 8192, "the tensor alone, not its block"
    assert copy.deepcopy(made).shape == made.shape
    with torch.no_grad():
        made.fill_(1)
    assert bool((made == 1).all())
    made.data.share_memory_()
    assert made.is_shared()
