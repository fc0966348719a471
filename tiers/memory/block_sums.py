"""Checksums of device memory, made on the device: whether it still has the bytes that were copied into it.

The `gpu` tier keeps them with each snapshot and makes them again before a rollback, so that nothing but a few numbers
crosses the bus. They are made by a kernel or from torch's own operations, and are the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer

from .kernels import ALIGN, kernels_of

SUM_SIDE = 128


SUM_BLOCK = 4 * SUM_SIDE * SUM_SIDE
"""Bytes that are summed together: a square of 32-bit words, 64 KiB."""


SUM_THREADS = 256
"""Threads of the kernel that sum one block."""


SUM_PART = 16 << 20
"""Bytes that are widened to 64 bits at once. A shorter part stays in a device's cache, a longer one takes fewer
kernels: these are three kernels for each 16 MiB."""


SUM_GROUP = 4 * SUM_PART
"""Bytes whose rows and columns are weighted at once; the sums of these are 1/32 of it."""


def block_sums(memory: Buffer) -> torch.Tensor:
    """Two numbers for each block: the sum of its 32-bit words, and the sum of each word times its place in the block.

    Sums are of signed words modulo 2^64, so that the order of adding does not matter. Any change of one or two words
    changes them: a change of one word changes the first sum; a change of two words with the same first sum changes the
    second, since ``(i - j) * d`` is not 0 and below 2^64. So does any exchange of two words. Any other change is missed
    with a probability below 2^-64. This detects accidental changes, not deliberate ones.

    Each block is a square; its rows and columns are summed, and then those sums are weighted. torch widens the whole
    input of an integer sum to the type of the result, in memory of its own; so that is done here, in parts of
    `SUM_PART` and always in the same memory. The data is read once, and less than 40 MiB are needed beside it. Where
    there are kernels, one of them does all of it, and needs nothing beside its result.

    Args:
        memory: whole blocks, on any device; may be empty.

    Returns:
        ``(blocks, 2)`` of int64, on that device. On CUDA the work is only queued on the current stream.

    Raises:
        RuntimeError: the length is no multiple of `SUM_BLOCK`, or the device has no memory or has failed.
    """
    squares = memory.view(torch.int32).view(memory.numel() // SUM_BLOCK, SUM_SIDE, SUM_SIDE)
    fits = memory.is_cuda and len(squares) > 0 and memory.data_ptr() % ALIGN == 0
    if fits and (kernels := kernels_of(memory.device)) is not None:
        found = squares.new_zeros((len(squares), 2), dtype=torch.int64)
        kernels.launch("block_sums", len(squares), SUM_THREADS, len(squares), squares, found)
        return found
    wide = squares.new_empty((min(len(squares), SUM_PART // SUM_BLOCK), SUM_SIDE, SUM_SIDE), dtype=torch.int64)
    sums = squares.new_empty((len(squares), 2), dtype=torch.int64)
    for group, out in _parts(SUM_GROUP, squares, sums):
        _sum(group, wide, out)
    return sums


def _parts(nbytes: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same blocks of several tensors, as many at a time as ``nbytes`` of memory have."""
    step = nbytes // SUM_BLOCK
    for at in range(0, len(tensors[0]), step):
        yield tuple(tensor[at : at + step] for tensor in tensors)


def _sum(squares: torch.Tensor, wide: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` with the sums of these blocks; ``wide`` is memory for one part of them."""
    edges = out.new_empty((len(squares), 2, SUM_SIDE))  # the sums of rows, and those of columns
    for part, rows, columns in _parts(SUM_PART, squares, edges[:, 0], edges[:, 1]):
        words = wide[: len(part)].copy_(part)
        torch.sum(words, 2, out=rows)
        torch.sum(words, 1, out=columns)
    place = torch.arange(SUM_SIDE, device=out.device)
    torch.sum(edges[:, 0], 1, out=out[:, 0])
    torch.sum(edges.mul_(torch.stack((place * SUM_SIDE, place))), (1, 2), out=out[:, 1])


def sums_on_host(sums: torch.Tensor) -> Array:
    """Copy the sums to the host as a NumPy array. Waits for them on the current stream."""
    return sums.cpu().numpy()


def unchanged_runs(then: Array, now: Array, start: Array, nbytes: Array) -> Array:
    """``(n,)`` of bool: which byte ranges are in unchanged blocks.

    Args:
        then, now: ``(blocks, 2)``: the sums when the bytes were copied, and now.
        start, nbytes: ``(n,)``: the byte ranges, none of them empty.
    """
    changed = np.concatenate([[0], np.cumsum((then != now).any(axis=1))])
    found: Array = changed[start // SUM_BLOCK] == changed[-(-(start + nbytes) // SUM_BLOCK)]
    return found
