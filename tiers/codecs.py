"""Codecs: a chunk's stored form. Lossless, named in the layout, given up where they do not pay."""

from __future__ import annotations

from ctypes import memmove
from mmap import PAGESIZE
from typing import Any

import numpy as np
import torch

from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, view
from tierstate.manifest.errors import Damaged
from tierstate.manifest.layout import RAW

from .packing import BIG

BLOSC = "blosc"
CODECS = ("raw", "fast", "small", "delta", "auto")
"""What a policy may ask for: raw bytes; bit-shuffle + lz4; byte planes + zstd; the difference from an earlier version
(`anchors`), or else the best of those; what a trial says (see `choices`)."""

SAMPLE = 256 * 1024
"""Bytes of a sample by which it is said whether a chunk is worth compressing."""

PIECES = 16
"""A sample is so many pieces from all over the chunk: leaves are not alike from end to end, embeddings least of all."""

PAYS_BELOW = 0.95
"""Stored/raw of the trial from which on compressing is given up: it would cost time and save nothing."""

LONGEST = 255
"""Bytes of the longest element that Blosc takes apart; longer ones count as single bytes."""

PLANE = 128 * 1024
"""Bytes of a plane within a block of ``small``: as many as zstd has one code table for, so that each plane gets its
own. With planes that shared one, weights of bf16 took 0.78 of their length instead of 0.68."""

_LEAST_BLOCK, _MOST_BLOCK = 512 * 1024, 4 << 20
_BLOSC_HEADER = 16


def encode(codec: str, data: Buffer, itemsize: int) -> tuple[str, Buffer]:
    """A chunk's stored form.

    Args:
        codec: one of `CODECS`; ``auto``, about which nothing is known here, is ``fast``.
        data: the raw bytes.
        itemsize: bytes per element, by which bits or bytes of like weight are gathered.

    Returns:
        The name under which `decode` reads it back, and the stored bytes: ``data`` itself where compressing saves less
        than 5 %, by a sample or in the end.
    """
    if codec == RAW or len(data) == 0:
        return RAW, data
    blosc = _blosc(codec, itemsize)
    if len(data) > 2 * SAMPLE:
        sample = spread(data, SAMPLE, itemsize)
        if len(blosc.encode(view(sample))) > PAYS_BELOW * len(sample):
            return RAW, data
    stored = blosc.encode(view(data))
    if len(stored) > PAYS_BELOW * len(data):
        return RAW, data
    return BLOSC, _aligned(stored)


def compressed(codec: str, data: Buffer, itemsize: int) -> int:
    """Bytes that ``fast`` or ``small`` makes of these, whether that pays or not."""
    return len(_blosc(codec, itemsize).encode(view(data)))


def spread(data: Buffer, nbytes: int, itemsize: int) -> Buffer:
    """A sample of about so many bytes: whole elements, from all over ``data``; all of it if it is not longer."""
    if len(data) <= nbytes:
        return data
    unit = itemsize if itemsize <= LONGEST else 1
    piece = nbytes // PIECES // unit * unit
    starts = np.linspace(0, len(data) - piece, PIECES).astype("i8") // unit * unit
    return torch.cat([data[start : start + piece] for start in starts.tolist()])


def decode(codec: str, stored: Buffer, nbytes: int) -> Buffer:
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
    """A copy; of many bytes one that begins at a page, so that they can be written from there past the page cache."""
    if len(data) < BIG:
        return as_buffer(data)
    memory = empty_buffer(len(data) + PAGESIZE)
    start = -memory.data_ptr() % PAGESIZE
    memmove(memory.data_ptr() + start, data, len(data))
    return memory[start : start + len(data)]


def _check_blosc(stored: Buffer, nbytes: int) -> None:
    """The lengths in the stored header are the ones we know, before they size anything."""
    header = bytes(view(stored[:_BLOSC_HEADER]))
    lengths = int.from_bytes(header[4:8], "little"), int.from_bytes(header[12:16], "little")
    if len(header) < _BLOSC_HEADER or lengths != (nbytes, len(stored)):
        raise Damaged(f"compressed chunk says {lengths} bytes raw and stored; {(nbytes, len(stored))} are right")


def _blosc(codec: str, itemsize: int) -> Any:
    from numcodecs import Blosc

    # Called outside the main thread, numcodecs runs one thread per call and no lock: our own workers run side by side.
    if codec == "small":
        block = min(max(_LEAST_BLOCK, PLANE * itemsize), _MOST_BLOCK)
        return Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=block, typesize=itemsize)
    return Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE, typesize=itemsize)
