"""Alignment: what direct I/O on a file asks of addresses, offsets and lengths."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from .pages import PAGE, libc
from .readplan import Grain

_EMPTY_PATH = 0x1000
_DIOALIGN = 0x2000
"""STATX_DIOALIGN, Linux 6.1."""

_MASK, _MEMORY, _OFFSET = 0x00, 0x98, 0x9C
"""Where ``struct statx`` has the mask of what was found, ``stx_dio_mem_align`` and ``stx_dio_offset_align``."""

UNKNOWN = Grain(PAGE, PAGE)
"""What suffices everywhere."""


def direct_grain(descriptor: int) -> Grain | None:
    """What direct I/O on an open file asks for; None where the file takes none.

    Disks commonly ask for offsets of 512 or 4096 bytes, but for addresses of as little as 4 (NVMe): then tensors are
    read into where they are. A kernel or file system that does not say gets `UNKNOWN`.
    """
    call = _statx()
    found = ctypes.create_string_buffer(256)
    if call is None or call(descriptor, b"", _EMPTY_PATH, _DIOALIGN, found) != 0:
        return UNKNOWN
    return read_grain(found.raw)


def read_grain(found: bytes) -> Grain | None:
    """The grain in a ``struct statx``; None where there is none, or not by whole pages."""
    mask, memory, offset = (int.from_bytes(found[at : at + 4], "little") for at in (_MASK, _MEMORY, _OFFSET))
    if not mask & _DIOALIGN:
        return UNKNOWN
    if not 0 < offset <= PAGE or not 0 < memory <= PAGE:
        return None
    return Grain(offset, memory)


@lru_cache(maxsize=1)
def _statx() -> Any:
    call = getattr(libc(), "statx", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return call
