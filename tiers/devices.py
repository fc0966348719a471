"""Devices: copies out of them on streams of their own, beside what the caller's streams compute."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

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


class Moment(Protocol):
    """A moment on a line: when all that was queued there before is done."""

    def synchronize(self) -> None:
        """Return when it has passed."""

    def wait(self) -> None:
        """Have what the current stream is given from now on come after it."""


class _Past:
    """Nothing is ever queued on the host."""

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Line:
    """A stream of a device, beside all others; on the host, where work is done when a call returns, no stream at all.

    Args:
        device: a CUDA device with its index, or the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """What this thread does on the device meanwhile goes on this line; memory it takes there is this line's."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def follow(self) -> None:
        """What comes on this line comes after all that this thread's current stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Moment:
        """The moment when all that is on this line by now is done."""
        if self._stream is None:
            return _Past()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def settle(self) -> None:
        """Return when all that is on this line by now is done."""
        self.mark().synchronize()


def _side_stream(device: int) -> Any:
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _STREAMS[device]
