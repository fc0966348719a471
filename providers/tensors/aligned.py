"""Tensors in memory that direct I/O can read into: page-aligned, and in huge pages where there are some.

torch's own tensors lie at multiples of 64 bytes, and many drives transfer to multiples of 512: a restore then reads
into a slab first, and copies.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .host_memory import HostAllocator
from .strided import INT_DTYPES
from .tensors import PLAIN_TENSORS, with_autograd_flags

T = TypeVar("T")


def aligned_like(state: T) -> T:
    """A state of the same structure, whose tensors lie where a restore can read into them without a copy.

    For the memory that is trained in, before training begins: ``parameter.data = ts.aligned_like(parameter.data)``, or
    ``state = ts.aligned_like(state)``. It saves the copy from slab to tensor on drives whose direct I/O wants aligned
    memory (``stx_dio_mem_align`` of statx, often 512); on those that take any, and for tensors of devices, it changes
    nothing. Storages of such tensors cannot be resized. What `Checkpointer.load` makes lies so already.

    Args:
        state: a tensor, or nested dicts, lists and tuples of tensors and other values.

    Returns:
        New tensors with any content, of the same shapes, dtypes and strides, parameters as parameters; a tensor that
        comes twice is one tensor again. Tensors that only share memory with each other do not share it any more.
        Tensors on devices, subclasses of tensors and those that are not dense are made by `torch.empty_like`. Other
        values are the same objects.

    Raises:
        MemoryError: all of it together is more than this host's memory.
    """
    return _like(state, HostAllocator(), {})  # type: ignore[no-any-return]


def _like(value: Any, blocks: HostAllocator, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            made[id(value)] = _tensor(value, blocks)
        return made[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_like(item, blocks, made) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_like(item, blocks, made) for item in value))
    if type(value) is dict or (isinstance(value, dict) and type(value).__module__ == "collections"):
        found = value.copy()  # as a defaultdict is made with its factory
        found.update((key, _like(item, blocks, made)) for key, item in value.items())
        return found
    return value


def _tensor(value: torch.Tensor, blocks: HostAllocator) -> torch.Tensor:
    plain = type(value) in PLAIN_TENSORS and value.device.type == "cpu" and value.layout is torch.strided
    # Dense: empty_like then keeps the strides, and the memory has room for just the elements.
    like = torch.empty_like(value) if not plain else torch.empty_like(value, device="meta")
    if not plain or value.is_quantized or like.stride() != value.stride():
        return torch.empty_like(value)
    unit = INT_DTYPES.get(value.dtype.itemsize, value.dtype)
    flat = blocks.take(value.numel() * value.dtype.itemsize).view(unit)
    tensor = flat.as_strided(value.shape, value.stride()).view(value.dtype).detach()
    return with_autograd_flags(
        tensor, {"parameter": type(value) is torch.nn.Parameter, "requires_grad": value.requires_grad}
    )
