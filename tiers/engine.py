"""The engines of direct I/O: transfers between files and memory, many in flight, with the same promises from each.

`UringEngine` gives the kernel a queue of transfers (io_uring, by pyuring); `ThreadEngine` runs each in a thread
(``pwritev``, ``preadv``). Both are driven by threads of their own, so that any thread may submit, and both finish every
transfer that was begun, error or not, before the memory it used is given back.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from tierstate.manifest.chunk import Buffer, view

log = logging.getLogger("tierstate")

Done = Callable[["OSError | None"], None]
"""Called once when a transfer is over, from a thread of the engine: without an error, all bytes were moved."""

MAX_TRANSFER = 1 << 29
"""Bytes per system call: io_uring cuts lengths to 32 bits, and one huge call would block all that follow."""


@dataclass(slots=True)
class Transfer:
    """Bytes to move.

    Attributes:
        write: from memory to the file; otherwise the other way.
        descriptor: an open file.
        buffer: host memory; it stays alive and untouched until ``done``.
        offset: of the first byte in the file.
        done: called when it is over.
        moved: bytes moved so far.
    """

    write: bool
    descriptor: int
    buffer: Buffer
    offset: int
    done: Done = lambda _error: None
    moved: int = 0

    @property
    def left(self) -> int:
        """Bytes still to move, of one system call."""
        return min(self.buffer.numel() - self.moved, MAX_TRANSFER)

    def advance(self, result: int) -> OSError | None:
        """Take note of a system call's result, as the kernel gives it. Returns what was wrong with it.

        A short transfer is no error: the rest is submitted again, and then the kernel says what the matter is, as with
        a disk that has just become full.
        """
        if result < 0:
            return OSError(-result, os.strerror(-result))
        if result == 0:
            return OSError(errno.EIO, "the file ended" if not self.write else "a write of nothing")
        self.moved += result
        return None


class Engine(ABC):
    """Moves bytes. Made for one process: a child that was forked cannot use it.

    Args:
        depth: transfers in flight.
    """

    name: str

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._pid = os.getpid()
        self._gate = threading.RLock()
        self._ended = False

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer. ``transfer.done`` is called when it is over, whatever comes.

        After `end` it runs at once, in the caller's thread: who is late still finishes.
        """
        if os.getpid() != self._pid:
            raise OSError(errno.EINVAL, "this I/O engine belongs to the process that forked this one")
        with self._gate:
            if not self._ended and transfer.buffer.numel():
                self._submit(transfer)
                return
        move(transfer)

    @abstractmethod
    def _submit(self, transfer: Transfer) -> None: ...

    def end(self) -> None:
        """Have the engine's threads end when what was submitted is done, without waiting for it."""
        with self._gate:
            if not self._ended:
                self._ended = True
                self._end()

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def join(self, timeout: float | None = None) -> bool:
        """Wait until the engine's threads have ended; whether they have after so many seconds."""

    def close(self, timeout: float | None = None) -> bool:
        """Finish what is under way and end the engine's threads; whether that was done in time."""
        self.end()
        return self.join(timeout)

    def run(self, transfer: Transfer) -> None:
        """Move bytes and wait until it is done.

        Raises:
            OSError: what went wrong.
        """
        with all_moved(self, [transfer]):
            pass


class ThreadEngine(Engine):
    """Each of a few threads moves one transfer at a time."""

    name = "threads"

    def __init__(self, depth: int = 4) -> None:
        super().__init__(depth)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tierstate-io-{i}", daemon=True) for i in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def _submit(self, transfer: Transfer) -> None:
        self._queue.put(transfer)

    def _work(self) -> None:
        while (transfer := self._queue.get()) is not None:
            move(transfer)
            del transfer

    def _end(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def move(transfer: Transfer) -> None:
    """Move all bytes of a transfer, in this thread, and tell that it is over."""
    error: OSError | None = None
    while error is None and transfer.left:
        error = transfer.advance(_call(transfer))
    tell(transfer, error)


def tell(transfer: Transfer, error: OSError | None) -> None:
    """Tell that a transfer is over. What the listener raises must not end an engine's thread."""
    try:
        transfer.done(error)
    except Exception:
        log.exception("what was to be told of a transfer failed")


def _call(transfer: Transfer) -> int:
    """One system call; its result, or the negative errno, as io_uring gives them."""
    memory = view(transfer.buffer)[transfer.moved : transfer.moved + transfer.left]
    try:
        if transfer.write:
            return os.pwritev(transfer.descriptor, [memory], transfer.offset + transfer.moved)
        return os.preadv(transfer.descriptor, [memory], transfer.offset + transfer.moved)
    except OSError as error:
        return -(error.errno or errno.EIO)


@contextmanager
def all_moved(engine: Engine, transfers: Sequence[Transfer]) -> Iterator[None]:
    """Transfers, many in flight, beside what the block does; when it is left they are over, whatever happened.

    Raises:
        OSError: the first that one of them met.
    """
    over, errors = threading.Semaphore(0), []

    def done(error: OSError | None) -> None:
        if error is not None:
            errors.append(error)
        over.release()

    sent = 0
    try:
        for transfer in transfers:
            transfer.done = done
            engine.submit(transfer)
            sent += 1
        yield
    finally:
        for _ in range(sent):
            over.acquire()
    if errors:
        raise errors[0]
