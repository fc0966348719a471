"""Devices: copies out of them on streams of their own, beside what the caller's streams compute."""

from __future__ import annotations

import threading
from collections.abc import Iterable
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


def fences(devices: Iterable[int]) -> tuple[Fence, ...]:
    """One for each of these CUDA devices, and for the caller's own; none where CUDA is not in use.

    Never for all that there are: the first touch of a device takes hundreds of megabytes of it, also where it is
    another rank's.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return tuple(Fence(device) for device in sorted({*devices, torch.cuda.current_device()}))


def _side_stream(device: int) -> Any:
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _STREAMS[device]
