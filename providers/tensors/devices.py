"""Devices that tensors are on, and how copies to and from them are ordered with the caller's work there.

On CUDA and ROCm, which torch both calls ``cuda``, copies are queued on streams of their own, beside the caller's
kernels. Every other accelerator that ``torch.accelerator`` names (XPU, MPS and more) is waited for as a whole, and
copies block: what is saved is right there too, but nothing runs beside the training. Tensors of any other device are
refused, since nothing tells when the work that is queued there is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from tierstate.manifest.chunk import Event

CPU = torch.device("cpu")


STREAMED = ("cuda",)
"""Types of devices whose streams and events are used."""


_TOGETHER = threading.local()


def copies_beside(device: torch.device) -> bool:
    """Whether copies from and to the device are queued on streams, and run beside the caller's work."""
    return device.type in STREAMED


def refusal(device: torch.device) -> str:
    """Why tensors of this device can be neither saved nor loaded; empty if they can."""
    if device.type in ("cpu", *STREAMED):
        return ""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return ""
    others = f", and of {accelerator.type}," if accelerator is not None else ""
    return (
        f"a tensor on {str(device)!r}: tierstate takes tensors of the host, of CUDA and ROCm{others} and does not know "
        "how to wait for the work of this device; use the host first, as with .cpu()"
    )


def absence(device: torch.device) -> str:
    """Why this process cannot load to a device of a supported type: it has no such one; empty if it has."""
    if device.type == "cpu":
        return ""
    count = torch.cuda.device_count() if copies_beside(device) else torch.accelerator.device_count()
    if (device.index or 0) < count:
        return ""
    return f"this process sees {count or 'no'} {device.type} device{'' if count == 1 else 's'}; name one that is there"


def wait_for(device: torch.device) -> None:
    """Wait until all work that is queued on an accelerator without streams of ours is done; nothing for others."""
    if device.type != "cpu" and not copies_beside(device):
        torch.accelerator.synchronize(device)


@lru_cache(maxsize=64)
def upload_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all copies from the host to this device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]


def uploads_wait_for_caller(device: torch.device) -> None:
    """Make all later uploads wait for the work that is queued on the caller's stream now."""
    if not copies_beside(device):
        wait_for(device)
        return
    noted: dict[tuple[torch.device, int], torch.cuda.Stream] | None = getattr(_TOGETHER, "noted", None)
    if noted is None:
        upload_stream(device).wait_stream(torch.cuda.current_stream(device))
        return
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in noted:
        noted[key] = torch.cuda.current_stream(device)


@contextmanager
def uploads_wait_once() -> Iterator[None]:
    """In the block, what this thread calls `uploads_wait_for_caller` for is waited for once per stream: at the end, or
    before this thread uploads something. A wait takes 20 us, and a state may have tens of thousands of tensors.
    """
    if getattr(_TOGETHER, "noted", None) is not None:
        yield
        return
    _TOGETHER.noted = {}
    try:
        yield
    finally:
        _wait_as_noted()
        _TOGETHER.noted = None


def _wait_as_noted() -> None:
    noted: dict[tuple[torch.device, int], torch.cuda.Stream] = getattr(_TOGETHER, "noted", None) or {}
    for (device, _), stream in noted.items():
        upload_stream(device).wait_stream(stream)
    noted.clear()


def caller_waits_for_uploads(device: torch.device) -> None:
    """Make all later work of the caller's stream wait for the uploads that are queued now."""
    if copies_beside(device):
        torch.cuda.current_stream(device).wait_stream(upload_stream(device))
    else:
        wait_for(device)


def upload(device: torch.device, copy: Callable[[], None]) -> Event:
    """Start a copy of host bytes to a device. From pinned memory the copy is asynchronous.

    Args:
        device: one for which `copies_beside`.
        copy: queues the copy on the current stream.

    Returns:
        The event to wait for before the source may be reused.
    """
    _wait_as_noted()
    stream = upload_stream(device)
    with torch.cuda.stream(stream):
        try:
            copy()
        except BaseException:
            stream.synchronize()  # a part of it may be queued, and the caller gets no event
            raise
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
    return event
