"""Codecs: a chunk's stored form. Lossless, named in the layout, given up where they do not pay."""

from __future__ import annotations

from typing import Any

from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, view
from tierstate.manifest.errors import Damaged
from tierstate.manifest.layout import RAW

BLOSC = "blosc"
CODECS = ("raw", "fast", "small", "auto")
"""What a policy may ask for: raw bytes; bit-shuffle + lz4; byte planes + zstd; ``fast`` where a trial says it pays."""

SAMPLE = 256 * 1024
PAYS_BELOW = 0.95
"""Stored/raw of the trial from which on compressing is given up: it would cost time and save nothing."""

_BLOSC_HEADER = 16


def encode(codec: str, data: Buffer, itemsize: int) -> tuple[str, Buffer]:
    """A chunk's stored form.

    Args:
        codec: one of `CODECS`.
        data: the raw bytes.
        itemsize: bytes per element, by which bits or bytes of like weight are gathered.

    Returns:
        The name under which `decode` reads it back, and the stored bytes: ``data`` itself where compressing by a
        sample from its middle would save less than 5 %.
    """
    if codec == RAW or len(data) == 0:
        return RAW, data
    blosc = _blosc(codec, itemsize)
    if len(data) > 2 * SAMPLE:
        start = (len(data) // 2) - (len(data) // 2) % itemsize
        if len(blosc.encode(view(data[start : start + SAMPLE]))) > PAYS_BELOW * SAMPLE:
            return RAW, data
    stored = blosc.encode(view(data))
    if len(stored) > PAYS_BELOW * len(data):
        return RAW, data
    return BLOSC, as_buffer(stored)


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
        return Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, typesize=itemsize)
    return Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE, typesize=itemsize)
