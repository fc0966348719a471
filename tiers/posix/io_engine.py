"""I/O engines: asynchronous transfers between files and memory, many in flight (queue depth).

`UringEngine` uses io_uring (by pyuring, one ring owned by one thread); `ThreadEngine` calls ``pwritev`` and ``preadv``
in threads. Any thread may submit to both. Both finish every transfer that was begun, even after errors, before
its memory is released.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from tierstate.manifest.chunk import Buffer, view

log = logging.getLogger("tierstate")


Done = Callable[["OSError | None"], None]
"""Called once when a transfer is over, from a thread of the engine: without an error, all bytes were moved."""


MAX_TRANSFER = 1 << 29
"""Bytes per system call: io_uring cuts lengths to 32 bits, and one huge call would block all that follow."""


RETRY_PAUSE = 0.01
"""Seconds until a submission that the kernel refused is repeated."""


@dataclass(slots=True)
class Transfer:
    """One transfer between a file and memory.

    Attributes:
        write: whether it writes to the file; otherwise it reads.
        descriptor: an open file.
        buffer: host memory; it must not be freed or changed until ``done``.
        offset: of the first byte in the file.
        done: called when the transfer is over.
        moved: bytes moved so far.
        error: why it failed; set before ``done`` is called.
    """

    write: bool
    descriptor: int
    buffer: Buffer
    offset: int
    done: Done = lambda _error: None
    moved: int = 0
    error: OSError | None = None

    @property
    def left(self) -> int:
        """The bytes still to move, at most `MAX_TRANSFER`."""
        return min(self.buffer.numel() - self.moved, MAX_TRANSFER)

    def advance(self, result: int) -> OSError | None:
        """Add the result of a system call (bytes or negative errno). Returns the error, if there was one.

        A short transfer is no error: the rest is submitted again, and then the kernel returns the reason, as when
        the disk has just become full.
        """
        if result < 0:
            return OSError(-result, os.strerror(-result))
        if result == 0:
            return OSError(errno.EIO, "the file ended" if not self.write else "a write of nothing")
        self.moved += result
        return None


class Engine(ABC):
    """Runs transfers. Belongs to one process: a forked child cannot use it.

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
        """Start a transfer. ``transfer.done`` is called once, when it has succeeded or failed.

        After `end` the transfer runs at once, in the caller's thread.
        """
        if os.getpid() != self._pid:
            raise OSError(errno.EINVAL, "this I/O engine belongs to the process that forked this one")
        with self._gate:
            if not self._ended and transfer.buffer.numel():
                self._submit(transfer)
                return
        run_transfer(transfer)

    @abstractmethod
    def _submit(self, transfer: Transfer) -> None: ...

    def end(self) -> None:
        """End the threads after all submitted transfers; does not wait."""
        with self._gate:
            if not self._ended:
                self._ended = True
                self._end()

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until the threads have ended. Returns whether they have."""

    def close(self, timeout: float | None = None) -> bool:
        """Finish all submitted transfers and end the threads. Returns whether that was done in time."""
        self.end()
        return self.join(timeout)

    def run(self, transfer: Transfer) -> None:
        """Run a transfer and wait for its end.

        Raises:
            OSError: the transfer failed.
        """
        with transfers_done(self, [transfer]):
            pass


class ThreadEngine(Engine):
    """Runs transfers in a few threads, one per thread at a time."""

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
            run_transfer(transfer)
            del transfer

    def _end(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def as_os_error(error: Exception) -> OSError:
    """An error of this process, such as a lack of memory, as one of the kernel: if it ended the engine's thread, the
    transfer would never be over."""
    if isinstance(error, OSError):
        return error
    number = errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
    return OSError(number, os.strerror(number) if isinstance(error, MemoryError) else repr(error))


def run_transfer(transfer: Transfer) -> None:
    """Run a transfer in this thread, then call its ``done``."""
    error: OSError | None = None
    try:
        while error is None and transfer.left:
            error = transfer.advance(_call(transfer))
    except Exception as failure:
        error = as_os_error(failure)
    notify_done(transfer, error)


def notify_done(transfer: Transfer, error: OSError | None) -> None:
    """Call ``done`` of a transfer. An error that it raises must not end the engine's thread."""
    transfer.error = error
    try:
        transfer.done(error)
    except Exception:
        with suppress(Exception):
            log.exception("the completion callback of a transfer failed")


def _call(transfer: Transfer) -> int:
    """Make one system call; its result, or the negative errno, as with io_uring."""
    try:
        memory = view(transfer.buffer)[transfer.moved : transfer.moved + transfer.left]
        if transfer.write:
            return os.pwritev(transfer.descriptor, [memory], transfer.offset + transfer.moved)
        return os.preadv(transfer.descriptor, [memory], transfer.offset + transfer.moved)
    except OSError as error:
        return -(error.errno or errno.EIO)


@contextmanager
def transfers_done(engine: Engine, transfers: Sequence[Transfer]) -> Iterator[None]:
    """Run transfers while the block runs. When the block is left, all of them have ended, also after errors.

    Raises:
        OSError: the first error of a transfer.
    """
    over, sent = threading.Semaphore(0), 0
    try:
        for transfer in transfers:
            transfer.done = lambda _error: over.release()
            engine.submit(transfer)
            sent += 1
        yield
    finally:
        for _ in range(sent):
            over.acquire()
    for transfer in transfers:
        if transfer.error is not None:
            raise transfer.error


class UringEngine(Engine):
    """Runs up to ``depth`` transfers at a time by io_uring.

    pyuring is used for four calls only: submit a write, submit a read, wait for a completion, close. Its other calls
    consume completions of other transfers in flight. This class handles everything else: short transfers, negative
    error numbers, waits that a signal interrupts, and draining before close (which neither waits nor cancels).

    Raises:
        OSError: no ring can be created: the kernel forbids it, or pyuring is not installed.
    """

    name = "uring"

    def __init__(self, depth: int = 8) -> None:
        super().__init__(depth)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._flying: dict[int, Transfer] = {}
        # Our own small ids: with duplicates and ids of 2^63 or more, pyuring submits the transfer and still raises.
        self._numbers = itertools.count(1)
        self._in_hand: Transfer | None = None  # neither in the queue nor in the ring
        self._ring: Any = None
        self._ending = False
        self._unsent = False
        started: SimpleQueue[OSError | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(started,), name="tierstate-uring", daemon=True)
        self._thread.start()
        failure = started.get()
        if failure is not None:
            self._thread.join()
            raise failure

    def _submit(self, transfer: Transfer) -> None:
        self._queue.put(transfer)

    def _end(self) -> None:
        self._queue.put(None)

    def join(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self, started: SimpleQueue[OSError | None]) -> None:
        """The ring's thread: takes submissions, keeps the ring full, and reports completions."""
        try:
            self._ring = _open_ring(self.depth)
        except Exception as error:
            started.put(as_os_error(error))
            return
        started.put(None)
        try:
            while self._flying or not self._ending:
                try:
                    self._fill()
                    if self._flying:
                        self._reap()
                except Exception as error:
                    self._give_up(error)
        finally:
            self._ring.close()

    def _give_up(self, error: Exception) -> None:
        """After an error of this process, as a lack of memory: end the transfer that is in hand with it, and go on."""
        transfer, self._in_hand = self._in_hand, None
        if transfer is not None:
            notify_done(transfer, as_os_error(error))
        else:
            time.sleep(RETRY_PAUSE)

    def _fill(self) -> None:
        """Start transfers while there is room in the ring; wait for one only if there is nothing else to do."""
        while not self._ending and len(self._flying) < self.depth:
            try:
                self._in_hand = self._queue.get(block=not self._flying)
            except Empty:
                return
            if self._in_hand is None:
                self._ending = True
            else:
                self._start(self._in_hand)

    def _start(self, transfer: Transfer) -> None:
        """Submit a transfer, or what is left of it."""
        number = next(self._numbers)
        call = self._ring.write_async_ptr if transfer.write else self._ring.read_async_ptr
        address = ctypes.c_void_p(transfer.buffer.data_ptr() + transfer.moved)
        try:
            self._flying[number] = transfer
            self._submitting(
                call, transfer.descriptor, address, transfer.left, transfer.offset + transfer.moved, number
            )
        except BaseException:  # the arguments could not be passed on
            self._flying.pop(number, None)
            raise
        self._in_hand = None

    def _submitting(self, call: Callable[..., Any], *args: Any) -> None:
        """Make one call that submits the ring's queue to the kernel.

        pyuring queues a transfer before it submits it, and the queue has room for all transfers in flight. After an
        error it is still queued, and the next successful call submits it. So it counts as in flight, and its memory
        stays in use.
        """
        try:
            call(*args)
        except OSError as error:
            log.debug("io_uring does not take transfers now, they are submitted again: %s", error)
            self._unsent = True
        else:
            self._unsent = False

    def _reap(self) -> None:
        if self._unsent:
            time.sleep(RETRY_PAUSE)
            self._submitting(self._ring.submit)
            if self._unsent:
                return
        try:
            number, result = self._ring.wait_completion()
        except OSError as error:
            # A signal, or a transient error. The transfers go on in the kernel in any case, and their memory cannot be
            # released until the kernel reports their completion: wait again.
            if error.errno not in (errno.EINTR, errno.EAGAIN):
                log.error("io_uring could not be waited for, which is tried again: %s", error)
                time.sleep(RETRY_PAUSE)
            return
        self._in_hand = transfer = self._flying.pop(number)
        again = -result in (errno.EINTR, errno.EAGAIN)
        found = None if again else transfer.advance(result)
        if found is None and transfer.left:
            self._start(transfer)
        else:
            self._in_hand = None
            notify_done(transfer, found)


def _open_ring(depth: int) -> Any:
    try:
        from pyuring.native.uring_ctx import UringCtx
    except ImportError as error:
        raise OSError(errno.ENOSYS, "io_uring needs the package pyuring: pip install pyuring==0.3.0") from error
    try:
        ring = UringCtx(entries=max(depth, 2))
    except OSError as error:
        raise OSError(error.errno or errno.EOPNOTSUPP, f"io_uring is not to be had here: {error}") from error
    # A forked child must not have the ring's memory, or it could submit into our queue.
    dontfork = ring._lib.io_uring_ring_dontfork
    dontfork.argtypes, dontfork.restype = [ctypes.c_void_p], ctypes.c_int
    if dontfork(ring._ring()) != 0:
        log.debug("io_uring: the ring's memory is inherited by children")
    return ring
