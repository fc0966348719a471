"""The C library, for the system calls that Python's standard library lacks: huge pages, statx, statfs, NUMA."""

from __future__ import annotations

import ctypes
from functools import lru_cache


@lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """The C library by ctypes; its calls release the GIL, and `ctypes.get_errno` has their error."""
    found = ctypes.CDLL(None, use_errno=True)
    found.syscall.restype = ctypes.c_long
    return found
