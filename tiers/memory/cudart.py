"""Calls of the CUDA runtime that torch does not bind: the last error, and the capture mode of a thread.

They are made by ctypes in the library that torch has loaded. A process that does not use CUDA never looks for it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

RELAXED = 2
"""cudaStreamCaptureModeRelaxed, and the same of HIP."""


_LIBRARY = re.compile(r"/\S*lib(?:cudart|amdhip64)[-.\w]*\.so[.\d]*$")


class _Named:
    """The functions of a runtime library under their names of CUDA; HIP names the same ones otherwise."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._prefix = "hip" if "amdhip" in path else "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name.replace("cuda", self._prefix, 1))


@lru_cache(maxsize=1)
def _loaded() -> _Named | None:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found = next((match[0] for line in lines if (match := _LIBRARY.search(line))), None)
    return _Named(found) if found is not None else None


def uses_cuda() -> bool:
    """Whether this process has begun to use CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_in_use(preferred: int | None = None) -> int | None:
    """A CUDA device that this process has used; None if there is none.

    The first use of a device takes hundreds of megabytes of its memory, so that no other is ever touched.

    Args:
        preferred: the one to return, if it was used.
    """
    if not uses_cuda():
        return None
    core: Any = torch._C
    used = [index for index in range(torch.cuda.device_count()) if core._cuda_hasPrimaryContext(index)]
    return preferred if preferred in used else next(iter(used), None)


def runtime() -> Any | None:
    """The CUDA runtime that this process has loaded; None if there is none, or torch was linked with all of it."""
    return _loaded() if uses_cuda() else None


def clear_last_error() -> None:
    """Forget the error that a call of this thread has left behind.

    A call that fails, such as a refused ``cudaHostRegister``, leaves its error to the next check of the same thread:
    that is after the next kernel launch, in the user's training (CUDA Runtime API, error handling).
    """
    if (library := runtime()) is not None:
        library.cudaGetLastError()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """In the block, calls of this thread do not break a CUDA graph that another thread is capturing.

    A capture in the mode "global", torch's default, is made invalid by calls of any thread that allocate or pin memory,
    or ask for an event; a thread whose own mode is "relaxed" may make them (cudaThreadExchangeStreamCaptureMode).
    """
    if (library := runtime()) is None:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def is_capturing() -> bool:
    """Whether the current stream of this thread is being captured into a CUDA graph."""
    return uses_cuda() and torch.cuda.is_current_stream_capturing()
