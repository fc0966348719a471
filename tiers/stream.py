"""A stream: bytes appended to one new file, past the page cache, straight from where they lie if that is aligned."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from itertools import count as count_from
from itertools import pairwise

from tierstate.manifest.chunk import Buffer

from .base import Release
from .engine import Engine, Transfer
from .files import BufferedFile
from .pages import PAGE, libc, map_pages

BOUNCE = 1 << 20
"""Bytes of a buffer in which small and unaligned pieces are gathered until they can be written in whole blocks."""

BOUNCES = 4
RESERVE = 256 << 20
"""Bytes reserved in the file at a time, ahead of the writes."""

_KEEP_SIZE = 1


class Stream:
    """Appends to one file. All calls come from one thread at a time; transfers go on beside them.

    Args:
        file: a new, empty file.
        choose: what moves the bytes; None to go through the page cache. Asked once the file turns out to be long.
        part: bytes of a stripe, whole pages: long transfers then cover whole stripes, as far as they can, and what is
            left at their ends goes apart. 0 where the file system has none.

    A file that stays shorter than one bounce buffer goes through the page cache in any case: one small write is not
    worth the detour. A longer one is written in whole blocks by direct I/O alone, and cut to its length at the end.
    """

    def __init__(self, file: BufferedFile, choose: Callable[[], Engine | None], part: int = 0) -> None:
        self._file, self._choose, self._part = file, choose, part
        self._engine: Engine | None = None
        self._begun = False
        self._changed = threading.Condition()
        self._flying = 0
        self._error: OSError | None = None
        self._free: list[Buffer] = []
        self._bounces = 0
        self._bounce: Buffer | None = None
        self._staged = 0
        self._written = 0
        self._reserved = 0
        self._direct = False

    @property
    def length(self) -> int:
        """Bytes appended so far."""
        return self._written + self._staged

    def append(self, buffer: Buffer, release: Release | None) -> bool:
        """Add bytes. Returns whether the lease is kept, to be released when the transfer is over.

        Raises:
            OSError: an earlier transfer failed. None is raised once this buffer's own has begun.
        """
        self._raise()
        if not self._begun:
            if self.length + buffer.numel() < BOUNCE:
                self._stage(buffer)
                return False
            self._begin()
        if self._engine is None:
            self._write_cached(buffer)
            return False
        at, kept = 0, False
        while at < buffer.numel():
            piece = buffer[at:]
            whole = piece.numel() // PAGE * PAGE
            if whole >= BOUNCE and self.length % PAGE == 0 and piece.data_ptr() % PAGE == 0:
                self._flush()
                if whole < piece.numel():
                    # Had before the transfer begins: from then on nothing may fail, or the lease would be let go twice.
                    self._bounce = self._take_bounce()
                self._send_whole(piece[:whole], release)
                at, kept = at + whole, release is not None
                if not kept:
                    # The caller may change the buffer once we return.
                    self._settle()
            else:
                at += self._stage(piece)
        return kept

    def _begin(self) -> None:
        """The file is a long one: find out how it is to be written."""
        engine = self._choose()
        # Asked of each file: another file system may be mounted below the tier's folder.
        self._engine = engine if engine is not None and takes_direct(self._file.descriptor) else None
        self._begun = True
        if self._engine is None:
            self._write_staged()

    def _write_cached(self, buffer: Buffer) -> None:
        self._file.write(self._written, buffer)
        self._written += buffer.numel()

    def _write_staged(self) -> None:
        if self._bounce is not None:
            staged, self._staged = self._bounce[: self._staged], 0
            self._write_cached(staged)
            self._bounce = None

    def _stage(self, piece: Buffer) -> int:
        """Copy the beginning of a piece into the bounce buffer; how much of it."""
        if self._bounce is None:
            self._bounce = self._take_bounce()
        count = min(piece.numel(), BOUNCE - self._staged)
        self._bounce[self._staged : self._staged + count].copy_(piece[:count])
        self._staged += count
        if self._staged == BOUNCE:
            self._flush()
        return count

    def _take_bounce(self) -> Buffer:
        with self._changed:
            while not self._free and self._bounces == BOUNCES:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            made = map_pages(BOUNCE)
            self._bounces += 1
            return made

    def _flush(self) -> None:
        """Send what is staged; it ends at a block's end, or is the last of the file and is padded."""
        if self._bounce is None or not self._staged:
            return
        bounce, staged = self._bounce, self._staged
        self._bounce, self._staged = None, 0
        blocks = -(-staged // PAGE) * PAGE
        bounce[staged:blocks] = 0

        def give_back() -> None:
            with self._changed:
                self._free.append(bounce)
                self._changed.notify_all()

        self._send(bounce[:blocks], give_back, staged)

    def _send_whole(self, buffer: Buffer, release: Release | None) -> None:
        """Send whole blocks from where they lie, cut at stripes; the lease ends with the last transfer."""
        cuts = cut_at(self._written, buffer.numel(), self._part)
        if len(cuts) > 2 and release is not None:
            release = _shared(release, len(cuts) - 1)
        for sent, (start, stop) in enumerate(pairwise(cuts)):
            try:
                self._send(buffer[start:stop], release)
            except OSError as error:
                if not sent:
                    raise
                # The lease is in use by now: the error is told by the next call, and the lease ends with what was sent.
                self._error = self._error or error
                if release is not None:
                    for _ in cuts[sent + 1 :]:
                        release()
                return

    def _send(self, buffer: Buffer, release: Release | None, nbytes: int | None = None) -> None:
        assert self._engine is not None
        self._go_direct()
        self._reserve(self._written + buffer.numel())

        def landed(error: OSError | None) -> None:
            with self._changed:
                self._flying -= 1
                self._error = self._error or error
                self._changed.notify_all()

        def done(error: OSError | None) -> None:
            try:
                if release is not None:
                    release()
            finally:
                landed(error)

        with self._changed:
            while self._flying >= self._engine.depth:
                self._changed.wait()
            self._flying += 1
        try:
            self._engine.submit(Transfer(True, self._file.descriptor, buffer, self._written, done))
        except OSError as error:
            landed(error)
            raise
        self._written += buffer.numel() if nbytes is None else nbytes

    def _go_direct(self) -> None:
        if not self._direct:
            flags = fcntl.fcntl(self._file.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._file.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._direct = True

    def _reserve(self, end: int) -> None:
        """Have blocks reserved up to there, where the file system can; the writes themselves tell if it is full."""
        if end > self._reserved:
            step = max(RESERVE, end - self._reserved)
            reserve(self._file.descriptor, self._reserved, step)
            self._reserved += step

    def finish(self) -> None:
        """Return when all bytes are in the file, which has its length; not synced yet.

        Raises:
            OSError: a transfer failed.
        """
        if not self._begun:
            self._write_staged()
        if self._engine is None:
            return
        length = self.length
        self._flush()
        self._settle()
        self._raise()
        os.ftruncate(self._file.descriptor, length)

    def _settle(self) -> None:
        with self._changed:
            while self._flying:
                self._changed.wait()

    def give_up(self) -> None:
        """Return when no transfer is under way any more: only then may memory and file be let go."""
        self._settle()

    def _raise(self) -> None:
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror) from self._error


def cut_at(offset: int, nbytes: int, part: int) -> list[int]:
    """Where bytes that go to ``offset`` are cut: ``[0, ..., nbytes]``, with whole stripes in the middle.

    Args:
        part: bytes of a stripe; 0 for none.
    """
    first, last = (-offset % part, (offset + nbytes) // part * part - offset) if part else (nbytes, 0)
    return sorted({0, first, last, nbytes}) if first <= last else [0, nbytes]


def _shared(release: Release, count: int) -> Release:
    """What ``count`` parties call once each, the last of which releases."""
    left = count_from(count - 1, -1)

    def one_less() -> None:
        if next(left) == 0:
            release()

    return one_less


def reserve(descriptor: int, offset: int, nbytes: int) -> bool:
    """Reserve blocks without changing the file's length; False where that cannot be done, which is no error.

    `os.posix_fallocate` is not used: where the file system cannot reserve, it writes a byte into every block.
    """
    call = libc().fallocate
    return bool(call(descriptor, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) == 0)


def takes_direct(descriptor: int) -> bool:
    """Whether the file system takes direct I/O on this file."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return True
