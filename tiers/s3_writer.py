"""The writer of an S3 object: parts that travel side by side, short objects in one piece."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import TierError

from .base import Release
from .gauge import Gauge
from .s3_parts import MAX_PARTS, Lease, Part, Parts
from .writing import StepWriter

log = logging.getLogger("tierstate")

IN_FLIGHT = 8
"""Parts of one object that are sent at once, at most: what is appended beyond them waits."""


class Upload(Protocol):
    """An upload in parts, begun when it is made."""

    def send(self, number: int, body: Sequence[memoryview], stop: threading.Event) -> Future[dict[str, Any]]: ...
    def complete(self, parts: Sequence[dict[str, Any]]) -> None: ...
    def abort(self) -> None: ...


class Destination(Protocol):
    """What the writer needs of its tier."""

    name: str
    gauge: Gauge

    def explained(self, doing: str, key: str) -> AbstractContextManager[None]: ...
    def create_whole(self, key: str, body: Sequence[memoryview]) -> None: ...
    def check_free(self, key: str) -> None: ...
    def upload(self, key: str) -> Upload: ...


class S3Writer(StepWriter):
    """Sends parts as they become full. Nothing is sent before the first one is; nothing is visible before close.

    Args:
        tier: where to.
        key: the object.
        size_hint: its likely length in bytes: longer objects need longer parts.
    """

    def __init__(self, tier: Destination, key: str, size_hint: int = 0) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._parts = Parts(size_hint)
        self._length = 0
        self._upload: Upload | None = None
        self._room = threading.BoundedSemaphore(IN_FLIGHT)
        self._stop = threading.Event()
        self._sent: list[tuple[Future[dict[str, Any]], threading.Event]] = []
        self._failed: Future[dict[str, Any]] | None = None

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._tier.gauge.take(buffer.numel(), self._tier.name, self._key)
        self._length += buffer.numel()
        lease = Lease(release) if release is not None else None
        try:
            for part in self._parts.add(view(buffer), lease):
                self._send(part)
        except BaseException:
            if lease is not None:
                lease.disown()
            raise
        if lease is None or not lease.shared:
            return False
        lease.done()
        return True

    def _send(self, part: Part) -> None:
        """Send a part as soon as there is room for it."""
        try:
            if self._parts.count > MAX_PARTS:
                text = f"{self._place}: is longer than {MAX_PARTS} parts of S3; say its length when it is begun"
                raise TierError(text, tier=self._tier.name, key=self._key)
            if self._upload is None:
                self._upload = self._tier.upload(self._key)
            sent = self._send_to(self._upload, part)
        except BaseException:
            part.done()
            raise
        arrived = threading.Event()
        self._sent.append((sent, arrived))
        sent.add_done_callback(lambda sent: self._arrived(part, sent, arrived))

    def _send_to(self, upload: Upload, part: Part) -> Future[dict[str, Any]]:
        self._room.acquire()
        try:
            self._check()
            return upload.send(self._parts.count, part.views, self._stop)
        except BaseException:
            self._room.release()
            raise

    def _arrived(self, part: Part, sent: Future[dict[str, Any]], arrived: threading.Event) -> None:
        try:
            part.done()
        finally:
            if not sent.cancelled() and sent.exception() is not None:
                self._failed = sent
            self._room.release()
            arrived.set()

    def _check(self) -> None:
        """Nothing, unless a part has failed already."""
        if self._failed is not None:
            with self._tier.explained("write", self._key):
                self._failed.result()

    def _drain(self) -> None:
        """Wait until all parts have ended, and their leases with them: a future's result is there a moment earlier."""
        for _, arrived in self._sent:
            arrived.wait()

    def _publish(self) -> None:
        rest = list(self._parts.rest())
        if self._upload is None:
            self._tier.create_whole(self._key, [piece for part in rest for piece in part.views])
            return
        for part in rest:
            self._send(part)
        self._drain()
        with self._tier.explained("write", self._key):
            parts = [sent.result() for sent, _ in self._sent]
        # Not every store keeps the condition on a completed upload, so look as late as possible too.
        self._tier.check_free(self._key)
        with self._tier.explained("create", self._key):
            self._upload.complete(parts)
        self._sent, self._parts = [], Parts()

    def _discard(self) -> None:
        self._tier.gauge.give_back(self._length)
        self._stop.set()
        for sent, _ in self._sent:
            sent.cancel()
        self._drain()
        self._parts = Parts()
        if self._upload is not None:
            upload, self._upload = self._upload, None
            try:
                with self._tier.explained("abort the upload of", self._key):
                    upload.abort()
            except TierError as error:
                # Why the object was given up matters more; parts that stay are found by age later.
                log.warning("parts of an upload stay at the store for now: %s", error)
