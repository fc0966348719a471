"""Uploads: copies from host memory to CUDA devices, on a stream of their own beside what the caller's stream does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from tierstate.manifest.chunk import Event


@lru_cache(maxsize=64)
def upload_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which everything is copied to this device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]


def after_caller(device: torch.device) -> None:
    """What is uploaded from now on comes after what the caller's stream was given so far."""
    if device.type == "cuda":
        upload_stream(device).wait_stream(torch.cuda.current_stream(device))


def before_caller(device: torch.device) -> None:
    """What the caller's stream is given from now on comes after what was uploaded so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(upload_stream(device))


def upload(device: torch.device, copy: Callable[[], None]) -> Event:
    """Begin to copy host bytes to a device. From pinned memory the copy runs beside everything else.

    Args:
        copy: queues the copy on the current stream.

    Returns:
        What to wait for before the source may be reused.
    """
    stream = upload_stream(device)
    with torch.cuda.stream(stream):
        copy()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return event
