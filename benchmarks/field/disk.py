"""The limit of the disk: as many bytes as the state has, by direct I/O from and to memory that is there already."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.competitor import Competitor, Pending
from benchmarks.state import State
from tierstate.tiers.libc import libc
from tierstate.tiers.memory.pages import PAGE, fault_in, map_pages
from tierstate.tiers.posix.io_engine import Engine, ThreadEngine, Transfer, UringEngine

DEPTH, LENGTH = 8, 16 << 20
"""Transfers in flight, and bytes of each."""
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE."""


class Direct(Competitor):
    """Writes the same buffers in huge pages over and over; fdatasync counts."""

    title = "O_DIRECT, bare"
    ways = (title,)
    scattered = False
    note = f"no state is copied or filled: {DEPTH} transfers of {LENGTH >> 20} MiB in flight, and a sync"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._engine: Engine = _engine()
        self._buffers = [map_pages(LENGTH) for _ in range(DEPTH)]
        for buffer in self._buffers:
            fault_in(buffer)
            buffer.random_()

    @classmethod
    def version(cls) -> str:
        engine = _engine()
        engine.close()
        return engine.name

    def save(self, state: State, number: int) -> Pending:
        self.write(self.place(number), state.nbytes)
        return Pending()

    def restore(self, state: State, number: int, way: str) -> None:
        self.read(self.place(number))

    def write(self, path: Path, nbytes: int) -> None:
        """Write about so many bytes to a file, and sync it."""
        nbytes = -(-nbytes // PAGE) * PAGE
        with _opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
            # Where the file system cannot reserve, the writes do without.
            libc().fallocate(descriptor, _KEEP_SIZE, _long(0), _long(nbytes))
            self._move(True, descriptor, nbytes)
            os.fdatasync(descriptor)

    def read(self, path: Path) -> None:
        """Read all of a file."""
        with _opened(path, os.O_RDONLY) as descriptor:
            self._move(False, descriptor, path.stat().st_size)

    def _move(self, write: bool, descriptor: int, nbytes: int) -> None:
        over: SimpleQueue[tuple[int, OSError | None]] = SimpleQueue()
        for index in range(DEPTH):
            over.put((index, None))
        for offset in range(0, nbytes, LENGTH):
            buffer = self._buffers[index := _checked(over.get())]
            part = buffer[: min(LENGTH, nbytes - offset)]
            self._engine.submit(Transfer(write, descriptor, part, offset, lambda e, i=index: over.put((i, e))))
        for _ in range(DEPTH):
            _checked(over.get())

    def close(self) -> None:
        self._engine.close()


def _checked(done: tuple[int, OSError | None]) -> int:
    index, error = done
    if error is not None:
        raise error
    return index


def _engine() -> Engine:
    try:
        return UringEngine(DEPTH)
    except OSError:
        return ThreadEngine(DEPTH)


def _long(number: int) -> Any:
    return ctypes.c_int64(number)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
