"""Direct I/O as a tier uses it: which engine, found out once, and files read past the page cache."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

from tierstate.manifest.chunk import Buffer

from .alignment import UNKNOWN, direct_grain
from .base import Range
from .engine import Engine, ThreadEngine, Transfer, all_moved
from .files import BufferedFile, open_file
from .pages import PAGE, map_pages
from .readplan import Grain
from .stream import takes_direct
from .uring import UringEngine

log = logging.getLogger("tierstate")

Io = Literal["auto", "uring", "threads", "buffered"]
"""What moves the bytes: io_uring, threads, or the page cache; ``auto`` takes the first that can be had."""

PATIENCE = 1.0
"""Seconds that closing waits for transfers under way, of which there are none unless a close before has given up."""

WORTH_IT = 1 << 20
"""Bytes of one range from which on the page cache is passed by: shorter ones are rather read through it."""


class DirectIo:
    """The engine of one tier, made when it is first needed.

    Args:
        io: what the policy asks for.
    """

    def __init__(self, io: Io = "auto") -> None:
        self.io = io
        self.note = ""
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = 0
        self._closed = False
        self._grain = UNKNOWN

    def engine(self, descriptor: int) -> Engine | None:
        """The engine, or None where bytes go through the page cache.

        Args:
            descriptor: an open file of the tier's, by which is found out whether its file system takes direct I/O.

        Raises:
            OSError: the policy asks for an engine that cannot be had.
        """
        with self._lock:
            if self._pid != os.getpid():
                # A forked child has none of its parent's threads and rings.
                self._pid, self._engine, self.note = os.getpid(), None, ""
            if self._closed:
                # Who is late, after a close that did not wait, still finishes, without threads that nobody would end.
                return None
            if not self.note:
                self._engine, self.note = self._choose(descriptor)
                if self._engine is not None:
                    # For whoever drops a tier without closing it: the threads hold the engine, but not us.
                    weakref.finalize(self, self._engine.end).atexit = False
            return self._engine

    def _choose(self, descriptor: int) -> tuple[Engine | None, str]:
        if self.io == "buffered":
            return None, "buffered, as the policy says"
        if not takes_direct(descriptor):
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
        """What addresses of long reads are multiples of, by the files that were read so far."""
        return self._grain.memory

    def read(self, path: Path, file: BufferedFile, ranges: Sequence[Range]) -> None:
        """Fill all ranges of a file: long aligned ones past the page cache, all at once.

        Args:
            file: the same file, opened to read through the page cache.
        """
        grain = self._look(file.descriptor)
        long = [wanted for wanted in ranges if grain is not None and _is_worth_it(wanted, grain)]
        # Asked for only when it is of use: short reads need no threads.
        engine = self.engine(file.descriptor) if long else None
        for wanted in ranges:
            if engine is None or grain is None or not _is_worth_it(wanted, grain):
                file.read(*wanted)
        if engine is not None:
            # Never one descriptor for both ways.
            with closing(open_file(path, os.O_DIRECT)) as direct:
                _read_blocks(engine, direct, long)

    def _look(self, descriptor: int) -> Grain | None:
        """What direct I/O asks for on this file; None if it is not to be had. Other files are like it, most likely."""
        grain = None if self.io == "buffered" else direct_grain(descriptor)
        self._grain = grain or Grain()
        return grain

    def close(self) -> None:
        """End the engine's threads. One that is stuck in a transfer is not waited for much longer than a moment."""
        with self._lock:
            engine = self._engine if self._pid == os.getpid() else None
            self._engine, self._closed = None, True
        if engine is not None and not engine.close(PATIENCE):
            log.warning("a transfer is still under way %s s after its tier was closed", PATIENCE)


def _is_worth_it(wanted: Range, grain: Grain) -> bool:
    offset, out = wanted
    return out.numel() >= WORTH_IT and offset % grain.offset == 0 and out.data_ptr() % grain.memory == 0


def _read_blocks(engine: Engine, file: BufferedFile, ranges: Sequence[Range]) -> None:
    """Whole blocks straight into place; a part of a block, at the end, by way of a block of our own."""
    whole = [out.numel() // PAGE * PAGE for _, out in ranges]
    transfers = [
        Transfer(False, file.descriptor, out[:n], offset) for (offset, out), n in zip(ranges, whole, strict=True)
    ]
    with all_moved(engine, transfers):
        for (offset, out), n in zip(ranges, whole, strict=True):
            if n < out.numel():
                _read_tail(file, offset + n, out[n:])


def _read_tail(file: BufferedFile, offset: int, out: Buffer) -> None:
    block = map_pages(PAGE)
    found = os.preadv(file.descriptor, [memoryview(block.numpy())], offset)  # type: ignore[arg-type]
    if found < out.numel():
        raise OSError(errno.EIO, f"the file ends {out.numel() - found} bytes before it should")
    out.copy_(block[: out.numel()])
