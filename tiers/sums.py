"""Sums: what tells, without leaving the device, whether memory still holds what was copied there."""

from __future__ import annotations

import numpy as np
import torch

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.index import Array

SIDE = 128
BLOCK = 4 * SIDE * SIDE
"""Bytes that are summed together: a square of 32-bit words, 64 KiB."""

PART = 1 << 30
"""Bytes that are summed in one go, so that what is needed meanwhile stays small: 1/32 of it."""


def summed(memory: Buffer) -> torch.Tensor:
    """Two numbers for each block: the sum of its 32-bit words, and the sum of each word times its place in the block.

    Taken modulo 2^64 of signed words, by which the order of adding does not matter. Any change of one or two words
    changes them: of one, the sum; of two that leave the sum alone, the other one, as ``(i - j) * d`` is not 0 and is
    below 2^64. So does any exchange of two words. Any other change goes unnoticed by chance alone, of less than one in
    2^64. This finds accidents; it is no defence against forgery.

    The rows and the columns of a square are summed, and those sums weighted: what is summed is read twice and nothing
    of its size is written, however many chunks lie in it.

    Args:
        memory: whole blocks, on any device.

    Returns:
        ``(blocks, 2)`` of int64, on that device.
    """
    parts = [_sum(memory[at : at + PART]) for at in range(0, memory.numel(), PART)]
    return torch.cat(parts)


def _sum(memory: Buffer) -> torch.Tensor:
    squares = memory.view(torch.int32).view(-1, SIDE, SIDE)
    rows, columns = squares.sum(2, dtype=torch.int64), squares.sum(1, dtype=torch.int64)
    place = torch.arange(SIDE, device=memory.device)
    weighted = (rows * place).sum(1) * SIDE + (columns * place).sum(1)
    return torch.stack((rows.sum(1), weighted), 1)


def on_host(sums: torch.Tensor) -> Array:
    """Sums as columns. Waits for them on the current stream."""
    return sums.cpu().numpy()


def sound(then: Array, now: Array, start: Array, nbytes: Array) -> Array:
    """``(n,)`` of bool: which runs of bytes lie in blocks that have not changed.

    Args:
        then, now: ``(blocks, 2)``: the sums when the bytes were copied, and now.
        start, nbytes: ``(n,)``: the runs, none of them empty.
    """
    changed = np.concatenate([[0], np.cumsum((then != now).any(axis=1))])
    found: Array = changed[start // BLOCK] == changed[-(-(start + nbytes) // BLOCK)]
    return found
