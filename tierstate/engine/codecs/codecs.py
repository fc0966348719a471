"""Codecs: lossless compression of a chunk. The layout names the codec; a chunk that hardly shrinks is stored raw."""

from __future__ import annotations

from ctypes import memmove
from mmap import PAGESIZE
from typing import Any

import numpy as np
import torch

from tierstate.engine.packs.slab_layout import BIG
from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, view
from tierstate.manifest.errors import Damaged
from tierstate.manifest.format.layout import DELTA, RAW

BLOSC = "blosc"


AUTO = "auto"
"""The codec name that means: choose by measurements (see `adaptive`)."""


STANDALONE_CODECS = ("fast", "small")
"""The codecs that compress a chunk by itself, least work first: bit-shuffle and lz4; byte planes and zstd. `_blosc`
constructs them. To add one, add it here, in `_blosc`, and to the policy's `Codec`."""


CODECS = (RAW, *STANDALONE_CODECS, DELTA, AUTO)
"""Codecs that a policy may name: raw bytes, one of `STANDALONE_CODECS`, the delta from an earlier version if that is
shorter (`save.encode`), or the adaptive choice."""


SAMPLE = 256 * 1024
"""Bytes of the sample that decides whether a chunk is worth compressing."""


PIECES = 16
"""A sample has this many pieces, spread over the chunk: leaves are not uniform, embeddings least of all."""


PAYS_BELOW = 0.95
"""A chunk is compressed only if the sample's ratio stored/raw is below this: else it costs time and saves nothing."""


LONGEST = 255
"""Bytes of the longest element that Blosc can shuffle; longer ones are treated as single bytes."""


PLANE = 128 * 1024
"""Bytes of a plane within a block of ``small``: the length of a zstd block, which has one code table, so that each
plane gets its own. With a shared table, weights of bf16 took 0.78 of their length instead of 0.68."""


_LEAST_BLOCK, _MOST_BLOCK = 512 * 1024, 4 << 20


_BLOSC_HEADER = 16


def compress(codec: str, data: Buffer, itemsize: int) -> tuple[str, Buffer]:
    """Compress a chunk.

    Args:
        codec: one of `CODECS`; ``auto`` is treated as ``fast``.
        data: the raw bytes.
        itemsize: bytes per element, for the shuffle of its bits or bytes.

    Returns:
        The codec with which `decompress` reads it back, and the stored bytes: raw and ``data`` itself if compression
        saves less than 5 %, of a sample or of the whole.
    """
    if codec == RAW or len(data) == 0:
        return RAW, data
    blosc = _blosc(codec, itemsize)
    if len(data) > 2 * SAMPLE:
        sample = take_sample(data, SAMPLE, itemsize)
        if len(blosc.encode(view(sample))) > PAYS_BELOW * len(sample):
            return RAW, data
    stored = blosc.encode(view(data))
    if len(stored) > PAYS_BELOW * len(data):
        return RAW, data
    return BLOSC, _aligned(stored)


def compressed_size(codec: str, data: Buffer, itemsize: int) -> int:
    """Compressed length in bytes with ``fast`` or ``small``, even if longer than the data."""
    return len(_blosc(codec, itemsize).encode(view(data)))


def take_sample(data: Buffer, nbytes: int, itemsize: int) -> Buffer:
    """A sample of about ``nbytes`` bytes: whole elements, spread over ``data``; all of it if it is not longer."""
    if len(data) <= nbytes:
        return data
    unit = itemsize if itemsize <= LONGEST else 1
    piece = nbytes // PIECES // unit * unit
    starts = np.linspace(0, len(data) - piece, PIECES).astype("i8") // unit * unit
    return torch.cat([data[start : start + piece] for start in starts.tolist()])


def decompress(codec: str, stored: Buffer, nbytes: int) -> Buffer:
    """The raw bytes of a stored chunk; not yet verified.

    Raises:
        Damaged: the stored bytes cannot be this chunk.
    """
    if codec == RAW:
        if len(stored) != nbytes:
            raise Damaged(f"{len(stored)} raw bytes where {nbytes} are right")
        return stored
    if codec != BLOSC:
        raise Damaged(f"stored with codec {codec!r}, which this program does not know")
    _check_blosc(stored, nbytes)
    out = empty_buffer(nbytes)
    try:
        _blosc("fast", 1).decode(view(stored), view(out))
    except (RuntimeError, ValueError) as error:
        raise Damaged(f"cannot be decompressed: {error}") from error
    return out


def _aligned(data: bytes) -> Buffer:
    """A copy; a long one begins at a page, so that direct I/O can write from it."""
    if len(data) < BIG:
        return as_buffer(data)
    memory = empty_buffer(len(data) + PAGESIZE)
    start = -memory.data_ptr() % PAGESIZE
    memmove(memory.data_ptr() + start, data, len(data))
    return memory[start : start + len(data)]


def _check_blosc(stored: Buffer, nbytes: int) -> None:
    """Check the lengths in the stored header before memory is allocated by them."""
    header = bytes(view(stored[:_BLOSC_HEADER]))
    lengths = int.from_bytes(header[4:8], "little"), int.from_bytes(header[12:16], "little")
    if len(header) < _BLOSC_HEADER or lengths != (nbytes, len(stored)):
        raise Damaged(f"compressed chunk says {lengths} bytes raw and stored; {(nbytes, len(stored))} are right")


def _blosc(codec: str, itemsize: int) -> Any:
    from numcodecs import Blosc

    # Outside the main thread, numcodecs uses one thread per call and no lock: our workers run in parallel.
    if codec == "small":
        block = min(max(_LEAST_BLOCK, PLANE * itemsize), _MOST_BLOCK)
        return Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=block, typesize=itemsize)
    return Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE, typesize=itemsize)
