"""Streaming writes: an object that is sent to an fsspec store while it is written, in bounded memory.

`StreamWriter` writes through `UploadFile`, an fsspec file that nothing but `UploadFile.publish` completes. Whether the
files of a store keep the promises of a tier is not believed but probed (`StreamProbe`).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from tierstate.manifest.chunk import Buffer, as_buffer, view
from tierstate.manifest.errors import NotFound, TierError
from tierstate.tiers.base import AtomicWriter, Release
from tierstate.tiers.capacity import CapacityCounter

log = logging.getLogger("tierstate")


WRITE = 16 << 20
"""Most bytes that are given to a file at once: it copies them; some files send their blocks in parallel."""


PROBE_BLOCK = 1 << 18
"""Bytes of a block of the probe: no store of ours takes shorter ones."""


PROBE_MOST = 16 << 20
"""Most bytes that the probe writes until a file has sent some of them."""


SEEN_EARLY = "an object can be seen before it is complete"
"""What `StreamProbe.fault` says of files that show a write while it goes on."""


class NoStream(TierError):
    """The files of a store are not of the kind that can be sent piece by piece."""


class UploadFile:
    """A file of fsspec that is being written, and that nobody else completes.

    fsspec closes a file that is garbage, also after an error and at the end of the interpreter, and to close it is to
    publish what was written so far. So the file's own ``close`` is hidden.

    Args:
        open_file: opens the file for writing.
        explained: raises errors of the store as tier errors; called with what is being done.

    Raises:
        NoStream: it is not one of fsspec's buffered files, so that it is not known when it is visible.
    """

    def __init__(self, open_file: Callable[[], Any], explained: Callable[[str], AbstractContextManager[None]]) -> None:
        from fsspec.spec import AbstractBufferedFile

        self._explained = explained
        with explained("begin an upload of"):
            self._file = open_file()
            if not isinstance(self._file, AbstractBufferedFile):
                self._file.close()
                raise NoStream(f"{type(self._file).__name__} is not one of fsspec's buffered files")
        self._file.close = _not_closed

    @property
    def has_sent(self) -> bool:
        """Whether it has begun to send."""
        return self._file.offset is not None

    def write(self, data: memoryview) -> None:
        """Add bytes; sends those that fill a block."""
        with self._explained("write"):
            for at in range(0, len(data), WRITE):
                self._file.write(data[at : at + WRITE])

    def publish(self) -> None:
        """Send the rest, and make the object visible if there is none of this name."""
        with self._explained("create"):
            type(self._file).close(self._file)

    def discard(self) -> None:
        """Drop what was sent. A store that cannot be told removes it some days later."""
        try:
            with self._explained("abort the upload of"):
                self._drop()
        except TierError as error:
            # The error that aborted the object matters more.
            log.warning("parts of an upload stay at the store for now: %s", error)

    def _drop(self) -> None:
        try:
            self._file.discard()
        finally:
            self._file.closed = True
            type(self._file).close(self._file)  # now it only frees its connections


def _not_closed() -> None:
    """In place of a file's ``close``."""


class StreamTarget(Protocol):
    """The part of a bucket that `StreamWriter` uses."""

    name: str
    gauge: CapacityCounter
    streams: bool
    block: ClassVar[int]

    def upload_file(self, key: str) -> UploadFile: ...
    def create(self, key: str, data: Buffer) -> None: ...
    def check_free(self, key: str) -> None: ...
    def size(self, key: str) -> int: ...


class StreamWriter(AtomicWriter):
    """Sends each block when it is full; an object of one block, or in a store that cannot stream, at the end.

    Nothing is visible before ``close``. If the answer to the last request gets lost (`TierUnavailable`), the object may
    exist or not.

    Args:
        tier: the bucket to write to.
        key: the key of the object.
    """

    def __init__(self, tier: StreamTarget, key: str) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._gathered = io.BytesIO()
        self._file: UploadFile | None = None
        self._length = 0

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._tier.gauge.take(buffer.numel(), self._tier.name, self._key)
        self._length += buffer.numel()
        if self._tier.streams and self._length > self._tier.block:
            self._send(view(buffer))
        else:
            self._gathered.write(view(buffer))
        return False

    def _send(self, data: memoryview) -> None:
        if self._file is None:
            self._file = self._tier.upload_file(self._key)
            gathered, self._gathered = self._gathered, io.BytesIO()
            self._file.write(gathered.getbuffer())
        self._file.write(data)

    def _publish(self) -> None:
        if self._file is None:
            self._tier.create(self._key, as_buffer(self._gathered.getbuffer()))
            self._gathered = io.BytesIO()
        else:
            self._publish_file(self._file)
        self._tier.gauge.made(self._length)

    def _publish_file(self, file: UploadFile) -> None:
        # Not every store checks the condition when an upload is completed, so also check here, as late as possible.
        self._tier.check_free(self._key)
        self._complete(file)
        self._file = None
        if (found := self._tier.size(self._key)) != self._length:
            text = f"{self._place}: the store has {found} bytes of the {self._length} that were sent"
            raise TierError(text, tier=self._tier.name, key=self._key)

    def _complete(self, file: UploadFile) -> None:
        try:
            file.publish()
        except TierError as error:
            if not error.transient:
                # Some stores have another error for an upload that lost a race, as the winner removes its blocks.
                self._tier.check_free(self._key)
            raise

    def _discard(self) -> None:
        self._tier.gauge.give_up(self._length)
        self._gathered = io.BytesIO()
        if self._file is not None:
            file, self._file = self._file, None
            file.discard()


class StreamProbe:
    """Finds out whether the files of a store can be used to write objects.

    Args:
        begin: opens a new file of one name, which is free; called with the bytes that it collects before it sends them.
        first_byte: reads the first byte of the object of that name; raises `NotFound` if there is none.
    """

    def __init__(self, begin: Callable[[int], UploadFile], first_byte: Callable[[], int]) -> None:
        self._begin, self._first_byte = begin, first_byte
        self._open: list[UploadFile] = []

    def fault(self, exclusive: bool) -> str:
        """Why they cannot be used; empty if they can.

        Args:
            exclusive: whether a file must not replace an object that was created after the file was opened.

        Raises:
            TierUnavailable, AccessDenied, TierFull
        """
        try:
            return self._visible() or (self._replaced() if exclusive else "")
        except TierError as error:
            if type(error) not in (TierError, NoStream):
                raise
            return str(error)
        finally:
            for file in self._open:
                file.discard()

    def _visible(self) -> str:
        file = self._write(1)
        if self._object() is not None:
            return SEEN_EARLY
        self._open.remove(file)
        file.discard()
        return "" if self._object() is None else "an object that was given up can be seen"

    def _replaced(self) -> str:
        winner, loser = self._write(2), self._write(3)
        winner.publish()
        self._open.remove(winner)
        try:
            loser.publish()
            self._open.remove(loser)
        except TierError as error:
            if error.transient:
                raise
        return "" if self._object() == 2 else "an object that was created meanwhile would be replaced"

    def _write(self, fill: int) -> UploadFile:
        """A file that has sent bytes of the value ``fill``."""
        file = self._begin(PROBE_BLOCK)
        self._open.append(file)
        block = memoryview(bytes([fill]) * (PROBE_BLOCK + 1))
        for _ in range(PROBE_MOST // len(block)):
            file.write(block)
            if file.has_sent:
                return file
        raise NoStream("its files send nothing before they are closed")

    def _object(self) -> int | None:
        try:
            return self._first_byte()
        except NotFound:
            return None
