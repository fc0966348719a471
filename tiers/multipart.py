"""Multipart writing: long objects in parts that travel side by side, short ones in one piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tierstate.manifest.chunk import Buffer, empty_buffer, view

from .base import Release
from .gauge import Gauge
from .stores import Upload
from .writing import StepWriter

PART = 16 << 20
"""Bytes of one part, at least; S3 asks for 5 MiB and allows 10,000 parts."""

MAX_PARTS = 9_000
IN_FLIGHT = 4
"""Parts that are sent at once, each with its own memory."""


class Destination(Protocol):
    """What the writer needs of its tier."""

    name: str
    gauge: Gauge

    def explained(self, doing: str, key: str) -> AbstractContextManager[None]: ...
    def create(self, key: str, data: Buffer) -> None: ...
    def check_free(self, key: str) -> None: ...


class MultipartWriter(StepWriter):
    """Gathers parts and sends them. Nothing is sent before the first part is full; nothing is visible before close.

    Args:
        tier: where to.
        key: the object.
        size_hint: its likely length in bytes: longer objects need longer parts.
        begin: begins the upload of that object.
    """

    def __init__(self, tier: Destination, key: str, size_hint: int, begin: Callable[[], Upload]) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key, self._begin = tier, key, begin
        self._part_size = max(PART, -(-size_hint // MAX_PARTS))
        self._part = empty_buffer(0)
        self._filled = self._length = 0
        self._upload: Upload | None = None
        self._sent: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._tier.gauge.take(buffer.numel(), self._tier.name, self._key)
        self._length += buffer.numel()
        while buffer.numel():
            if self._filled == self._part.numel():
                self._send()
            n = min(buffer.numel(), self._part.numel() - self._filled)
            self._part[self._filled : self._filled + n].copy_(buffer[:n])
            self._filled, buffer = self._filled + n, buffer[n:]
        return False

    def _send(self) -> None:
        """Send what is gathered, if anything, and begin a new part."""
        if self._filled:
            with self._tier.explained("write", self._key):
                if self._upload is None:
                    self._upload = self._begin()
                while len(self._sent) >= IN_FLIGHT:
                    self._parts.append(self._sent.popleft().result())
                number = len(self._parts) + len(self._sent) + 1
                self._sent.append(self._upload.part(number, view(self._part[: self._filled])))
        if not self._part.numel():
            self._part = empty_buffer(self._part_size)
        self._filled = 0

    def _publish(self) -> None:
        if self._upload is None:
            self._tier.create(self._key, self._part[: self._filled])
            return
        self._send()
        with self._tier.explained("write", self._key):
            while self._sent:
                self._parts.append(self._sent.popleft().result())
        # Not every store keeps the condition on a completed upload, so look as late as possible too.
        self._tier.check_free(self._key)
        with self._tier.explained("create", self._key):
            self._upload.complete(self._parts)

    def _discard(self) -> None:
        self._tier.gauge.give_back(self._length)
        for future in self._sent:
            future.cancel()
        wait(self._sent)
        self._part = empty_buffer(0)
        if self._upload is not None:
            upload, self._upload = self._upload, None
            with self._tier.explained("abort the upload of", self._key):
                upload.abort()
