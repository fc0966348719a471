"""CUDA streams.

`StreamFence` orders this package's copies after the training's work so far; `CopyStream` runs copies on a stream of its
own in parallel to the caller's kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tierstate.manifest.chunk import StreamEvent

from .cudart import device_in_use, relaxed_capture, uses_cuda

_STREAMS: dict[int, Any] = {}


_MAKING = threading.Lock()


class StreamFence:
    """A CUDA event on the caller's stream: after it, the state is what it was when save was called.

    Args:
        device: a CUDA device's index; its current stream is the caller's.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        # A thread that waits for a blocking event sleeps, and leaves its core to the training.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        """Wait until the event has happened."""
        self._event.synchronize()

    def copied(self) -> StreamEvent:
        """An event that happens when all copies are done that were queued so far after `follow`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(_side_stream(self._device))
        return OnStreams(event, self._device)

    def follow(self) -> None:
        """Make this thread use a side stream that waits for the event, but not for what the caller queues later.

        The default stream would wait for everything that the caller has queued, and delay everything queued later.
        """
        stream = _side_stream(self._device)
        stream.wait_event(self._event)
        torch.cuda.set_stream(stream)


def stream_fences(devices: Iterable[int]) -> tuple[StreamFence, ...]:
    """A fence for each of these CUDA devices, and for the current one if it is in use: it may write to host memory.

    Never for another device: the first use of one takes hundreds of megabytes of its memory, even if the device
    belongs to another rank.
    """
    if not uses_cuda():
        return ()
    here = torch.cuda.current_device()
    return tuple(StreamFence(device) for device in sorted({*devices} | ({here} & {device_in_use(here)})))


class OnStreams:
    """A CUDA event as a `StreamEvent`: the current stream that waits for it is the one of its own device."""

    def __init__(self, event: Any, device: int) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        """Wait until it has happened."""
        self._event.synchronize()

    def wait(self) -> None:
        """Make all later work of this thread's current stream of the device wait for it."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _DoneEvent:
    """The event for the host, where nothing is ever queued."""

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        pass


class CopyStream:
    """A separate stream of a device; on the host, where work is done when a call returns, it does nothing.

    Args:
        device: a CUDA device with its index, or the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Make it this thread's current stream in the block; memory allocated there belongs to it."""
        if self._stream is None:
            yield
        else:
            with relaxed_capture(), torch.cuda.stream(self._stream):
                yield

    def follow(self) -> None:
        """Make this stream wait for all work queued so far on this thread's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> StreamEvent:
        """An event that happens when all work queued so far on this stream is done."""
        if self._stream is None:
            return _DoneEvent()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return OnStreams(event, self.device.index)

    def settle(self) -> None:
        """Wait until all work queued so far on this stream is done."""
        with relaxed_capture():
            self.mark().synchronize()


def _side_stream(device: int) -> Any:
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _STREAMS[device]
