"""Devices: copies out of them on streams of their own, beside what the caller's streams compute."""

from __future__ import annotations

import threading
from typing import Any

import torch

_STREAMS: dict[int, Any] = {}
_MAKING = threading.Lock()


class Fence:
    """A moment on a device's stream, after which the state is what it was when save was called.

    Args:
        device: a CUDA device's index; its current stream is the caller's.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        """Return when the moment has passed."""
        self._event.synchronize()

    def follow(self) -> None:
        """Have what this thread does on the device from now on come after the moment, and beside what comes later.

        A thread's own default stream would wait for all that the caller has queued, and hold up all that it queues.
        """
        stream = _side_stream(self._device)
        stream.wait_event(self._event)
        torch.cuda.set_stream(stream)


def fences() -> tuple[Fence, ...]:
    """One for each CUDA device in use; none where there is no CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return ()
    return tuple(Fence(device) for device in range(torch.cuda.device_count()))


def _side_stream(device: int) -> Any:
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _STREAMS[device]
