"""Direct I/O (O_DIRECT): reads and writes files without the page cache, from and into aligned memory without a copy.

`AppendStream` writes one new file: aligned memory is written in place, short and unaligned pieces go through
bounce buffers. `DirectIo` chooses the I/O engine of a tier once (io_uring, threads, or the page cache) and reads
ranges. `direct_alignment` asks the kernel (statx) which alignment a file requires.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import count as count_from
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import IoAlignment, Range, Release
from tierstate.tiers.libc import libc
from tierstate.tiers.memory.pages import PAGE, map_pages

from .files import BufferedFile, open_file
from .io_engine import Engine, ThreadEngine, Transfer, UringEngine, as_os_error, transfers_done

_EMPTY_PATH = 0x1000


_DIOALIGN = 0x2000
"""STATX_DIOALIGN, Linux 6.1."""


_MASK, _MEMORY, _OFFSET = 0x00, 0x98, 0x9C
"""Offsets in ``struct statx`` of ``stx_mask``, ``stx_dio_mem_align`` and ``stx_dio_offset_align``."""


SAFE_ALIGNMENT = IoAlignment(PAGE, PAGE)
"""An alignment that suffices on every file system."""


BOUNCE_SIZE = 1 << 20
"""Bytes of a bounce buffer, which collects small and unaligned pieces until whole blocks can be written."""


BOUNCE_BUFFERS = 4
"""Most bounce buffers of one stream."""


PREALLOCATE = 256 << 20
"""Most bytes reserved in a file at a time, ahead of the writes."""


_KEEP_SIZE = 1


log = logging.getLogger("tierstate")


IoMode = Literal["auto", "uring", "threads", "buffered"]
"""What moves the bytes: io_uring, threads, or the page cache; ``auto`` takes the first that is available."""


ENGINE_CLOSE_WAIT = 1.0
"""Seconds that closing waits for transfers in flight, which exist only if an earlier close has timed out."""


DIRECT_MIN = 1 << 20
"""Ranges of at least this many bytes are read by direct I/O; shorter ones through the page cache."""


def direct_alignment(descriptor: int) -> IoAlignment | None:
    """The alignment that direct I/O on an open file requires; None where the file does not support it.

    Disks commonly require offsets of 512 or 4096 bytes, but addresses of as little as 4 (NVMe): then data is read
    directly into tensors. If the kernel or file system does not report it, the result is `SAFE_ALIGNMENT`.
    """
    call = _statx()
    found = ctypes.create_string_buffer(256)
    if call is None or call(descriptor, b"", _EMPTY_PATH, _DIOALIGN, found) != 0:
        return SAFE_ALIGNMENT
    return parse_statx(found.raw)


def parse_statx(found: bytes) -> IoAlignment | None:
    """The alignment in a ``struct statx``; None without direct I/O, or if more than a page is required."""
    mask, memory, offset = (int.from_bytes(found[at : at + 4], "little") for at in (_MASK, _MEMORY, _OFFSET))
    if not mask & _DIOALIGN:
        return SAFE_ALIGNMENT
    if not 0 < offset <= PAGE or not 0 < memory <= PAGE:
        return None
    return IoAlignment(offset, memory)


@lru_cache(maxsize=1)
def _statx() -> Any:
    call = getattr(libc(), "statx", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return call


class AppendStream:
    """Appends to one file. Not thread-safe: one thread at a time calls it; transfers run in the background.

    Args:
        file: a new, empty file.
        choose: returns the I/O engine, or None for the page cache. Called once the file turns out to be long.
        part: bytes of a stripe, whole pages: long transfers are split so that they cover whole stripes, and the
            remainders at their ends are separate transfers. 0 if the file system has no stripes.

    A file shorter than one bounce buffer is written through the page cache: direct I/O is not worth it for one small
    write. A longer one is written only by direct I/O, in whole blocks, and truncated to its length at the end.
    """

    def __init__(self, file: BufferedFile, choose: Callable[[], Engine | None], part: int = 0) -> None:
        self._file, self._choose, self._part = file, choose, part
        self._engine: Engine | None = None
        self._begun = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = 0
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
        """Append bytes. Returns whether the lease is kept, to be released when the transfer is over.

        Raises:
            OSError: an earlier transfer failed. Not raised any more once a transfer of this buffer has started.
        """
        self._raise()
        if not self._begun:
            if self.length + buffer.numel() < BOUNCE_SIZE:
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
            if whole >= BOUNCE_SIZE and self.length % PAGE == 0 and piece.data_ptr() % PAGE == 0:
                self._flush()
                if whole < piece.numel():
                    # Allocated before the transfer starts: after that nothing may fail, or the lease would be released
                    # twice.
                    self._bounce = self._take_bounce()
                self._send_whole(piece[:whole], release)
                at, kept = at + whole, release is not None
                if not kept:
                    # The caller may change the buffer after we return.
                    self._settle()
            else:
                at += self._stage(piece)
        return kept

    def _begin(self) -> None:
        """Called when the file turns out to be long: choose how it is written."""
        engine = self._choose()
        # Checked for each file: another file system may be mounted below the tier's folder.
        self._engine = engine if engine is not None and supports_direct_io(self._file.descriptor) else None
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
        """Copy the beginning of a piece into the bounce buffer; returns the number of bytes copied."""
        if self._bounce is None:
            self._bounce = self._take_bounce()
        count = min(piece.numel(), BOUNCE_SIZE - self._staged)
        self._bounce[self._staged : self._staged + count].copy_(piece[:count])
        self._staged += count
        if self._staged == BOUNCE_SIZE:
            self._flush()
        return count

    def _take_bounce(self) -> Buffer:
        with self._lock:
            while not self._free and self._bounces == BOUNCE_BUFFERS:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            made = map_pages(BOUNCE_SIZE)
            self._bounces += 1
            return made

    def _flush(self) -> None:
        """Write the bounce buffer. It ends at the end of a block, or it is the last of the file and is padded."""
        if self._bounce is None or not self._staged:
            return
        bounce, staged = self._bounce, self._staged
        self._bounce, self._staged = None, 0
        blocks = -(-staged // PAGE) * PAGE
        bounce[staged:blocks] = 0

        def give_back() -> None:
            with self._lock:
                self._free.append(bounce)
                self._changed.notify_all()

        self._send(bounce[:blocks], give_back, staged)

    def _send_whole(self, buffer: Buffer, release: Release | None) -> None:
        """Write whole blocks in place, split at stripes; the lease is released after the last transfer."""
        cuts = stripe_cuts(self._written, buffer.numel(), self._part)
        if len(cuts) > 2 and release is not None:
            release = _shared(release, len(cuts) - 1)
        for sent, (start, stop) in enumerate(pairwise(cuts)):
            try:
                self._send(buffer[start:stop], release)
            except Exception as error:
                if not sent:
                    raise
                # Transfers use the lease by now: the next call raises the error; the last transfer releases it.
                self._error = self._error or as_os_error(error)
                if release is not None:
                    for _ in cuts[sent + 1 :]:
                        release()
                return

    def _send(self, buffer: Buffer, release: Release | None, nbytes: int | None = None) -> None:
        assert self._engine is not None
        self._go_direct()
        self._reserve(self._written + buffer.numel())

        def finish_one(error: OSError | None) -> None:
            with self._lock:
                self._in_flight -= 1
                self._error = self._error or error
                self._changed.notify_all()

        def done(error: OSError | None) -> None:
            try:
                if release is not None:
                    release()
            finally:
                finish_one(error)

        with self._lock:
            while self._in_flight >= self._engine.depth:
                self._changed.wait()
            self._in_flight += 1
        try:
            self._engine.submit(Transfer(True, self._file.descriptor, buffer, self._written, done))
        except Exception as error:  # it was not started, as for lack of memory
            finish_one(as_os_error(error))
            raise
        self._written += buffer.numel() if nbytes is None else nbytes

    def _go_direct(self) -> None:
        if not self._direct:
            flags = fcntl.fcntl(self._file.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._file.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._direct = True

    def _reserve(self, end: int) -> None:
        """Preallocate blocks up to ``end``, if the file system can; if it is full, the writes will fail."""
        if end > self._reserved:
            # At most as much ahead as the file is long: what a short file reserves is room that others do not get, and
            # on tmpfs it is memory that is zeroed.
            step = max(min(PREALLOCATE, self._reserved), end - self._reserved)
            preallocate(self._file.descriptor, self._reserved, step)
            self._reserved += step

    def finish(self) -> None:
        """Wait until all bytes are in the file, and set its length; it is not synced yet.

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
        with self._lock:
            while self._in_flight:
                self._changed.wait()

    def give_up(self) -> None:
        """Wait until no transfer is in flight: only then may memory and file be released."""
        self._settle()

    def _raise(self) -> None:
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror) from self._error


def stripe_cuts(offset: int, nbytes: int, part: int) -> list[int]:
    """Where a write at ``offset`` is split: ``[0, ..., nbytes]``, with whole stripes in the middle.

    Args:
        part: bytes of a stripe; 0 for no stripes.
    """
    first, last = (-offset % part, (offset + nbytes) // part * part - offset) if part else (nbytes, 0)
    return sorted({0, first, last, nbytes}) if first <= last else [0, nbytes]


def _shared(release: Release, count: int) -> Release:
    """A function that is called ``count`` times; the last call releases."""
    left = count_from(count - 1, -1)

    def one_less() -> None:
        if next(left) == 0:
            release()

    return one_less


def preallocate(descriptor: int, offset: int, nbytes: int) -> bool:
    """Reserve blocks without changing the file's length; False if not possible, which is no error.

    `os.posix_fallocate` is not used: if the file system cannot reserve, it writes a byte into every block.
    """
    call = libc().fallocate
    return bool(call(descriptor, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) == 0)


def supports_direct_io(descriptor: int) -> bool:
    """Whether the file system supports direct I/O on this file."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return True


class DirectIo:
    """The I/O engine of one tier, created at the first use.

    Args:
        io: the policy's choice.
    """

    def __init__(self, io: IoMode = "auto") -> None:
        self.io = io
        self.note = ""
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = 0
        self._closed = False
        self._grain = SAFE_ALIGNMENT

    def engine(self, descriptor: int) -> Engine | None:
        """The engine, or None if bytes go through the page cache.

        Args:
            descriptor: an open file of the tier, to test whether its file system supports direct I/O.

        Raises:
            OSError: the engine that the policy chooses is not available.
        """
        with self._lock:
            if self._pid != os.getpid():
                # A forked child has no threads and rings of its parent.
                self._pid, self._engine, self.note = os.getpid(), None, ""
            if self._closed:
                # A call after a close that did not wait still finishes, without starting threads that nothing would
                # end.
                return None
            if not self.note:
                self._engine, self.note = self._choose(descriptor)
                if self._engine is not None:
                    # For a tier that is deleted without `close`: the threads refer to the engine, not to this object.
                    weakref.finalize(self, self._engine.end).atexit = False
            return self._engine

    def _choose(self, descriptor: int) -> tuple[Engine | None, str]:
        if self.io == "buffered":
            return None, "buffered, as the policy says"
        if not supports_direct_io(descriptor):
            if self.io != "auto":
                raise OSError(errno.EINVAL, f"io: {self.io}: the file system takes no direct I/O; write io: buffered")
            return None, "buffered, since the file system takes no direct I/O"
        if self.io == "threads":
            return ThreadEngine(), "direct, by threads, as the policy says"
        try:
            return UringEngine(), "direct, by io_uring"
        except OSError as error:
            if self.io == "uring":
                raise
            return ThreadEngine(), f"direct, by threads, since {error}"

    @property
    def memory_alignment(self) -> int:
        """The memory alignment of direct reads in bytes, by the files that were read so far."""
        return self._grain.memory

    def read(self, path: Path, file: BufferedFile, ranges: Sequence[Range]) -> None:
        """Fill all ranges of a file: long aligned ones by direct I/O, all in flight at once.

        Args:
            file: the same file, opened without O_DIRECT.
        """
        grain = self._look(file.descriptor)
        long = [wanted for wanted in ranges if grain is not None and _is_direct(wanted, grain)]
        # Created only if needed: short reads need no threads.
        engine = self.engine(file.descriptor) if long else None
        for wanted in ranges:
            if engine is None or grain is None or not _is_direct(wanted, grain):
                file.read(*wanted)
        if engine is not None:
            # Never use one descriptor for direct and for cached I/O.
            with closing(open_file(path, os.O_DIRECT)) as direct:
                _read_blocks(engine, direct, long)

    def _look(self, descriptor: int) -> IoAlignment | None:
        """The alignment of direct I/O on this file, or None; also stored for `memory_alignment`."""
        grain = None if self.io == "buffered" else direct_alignment(descriptor)
        self._grain = grain or IoAlignment()
        return grain

    def close(self) -> None:
        """End the engine's threads; waits at most `ENGINE_CLOSE_WAIT` for one that is stuck in a transfer."""
        with self._lock:
            engine = self._engine if self._pid == os.getpid() else None
            self._engine, self._closed = None, True
        if engine is not None and not engine.close(ENGINE_CLOSE_WAIT):
            log.warning("a transfer is still under way %s s after its tier was closed", ENGINE_CLOSE_WAIT)


def _is_direct(wanted: Range, grain: IoAlignment) -> bool:
    offset, out = wanted
    return out.numel() >= DIRECT_MIN and offset % grain.offset == 0 and out.data_ptr() % grain.memory == 0


def _read_blocks(engine: Engine, file: BufferedFile, ranges: Sequence[Range]) -> None:
    """Read whole blocks directly into the destination, and a partial block at the end through a bounce buffer."""
    whole = [out.numel() // PAGE * PAGE for _, out in ranges]
    transfers = [
        Transfer(False, file.descriptor, out[:n], offset) for (offset, out), n in zip(ranges, whole, strict=True)
    ]
    with transfers_done(engine, transfers):
        for (offset, out), n in zip(ranges, whole, strict=True):
            if n < out.numel():
                _read_tail(file, offset + n, out[n:])


def _read_tail(file: BufferedFile, offset: int, out: Buffer) -> None:
    block = map_pages(PAGE)
    found = os.preadv(file.descriptor, [memoryview(block.numpy())], offset)  # type: ignore[arg-type]
    if found < out.numel():
        raise OSError(errno.EIO, f"the file ends {out.numel() - found} bytes before it should")
    out.copy_(block[: out.numel()])
