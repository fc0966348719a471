"""The io_uring engine, by pyuring: one ring, owned by one thread, many transfers in flight."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from .engine import Engine, Transfer, tell

log = logging.getLogger("tierstate")

RETRY = 0.01
"""Seconds until the kernel is asked again after it refused."""


class UringEngine(Engine):
    """Gives the kernel up to ``depth`` transfers at once, and hears of each when it is over.

    pyuring is used for four calls only: submit a write, submit a read, wait for a completion, close. Its other calls
    take completions of transfers in flight for their own. Everything around them is ours: short transfers, errors as
    negative numbers, waits that a signal ends, the draining before close (which neither waits nor cancels).

    Raises:
        OSError: no ring can be made here: the kernel forbids it, or pyuring is not installed.
    """

    name = "uring"

    def __init__(self, depth: int = 8) -> None:
        super().__init__(depth)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._waiting: deque[Transfer] = deque()
        self._flying: dict[int, Transfer] = {}
        # Our own small numbers: pyuring submits duplicates and numbers of 2^63 and more, and raises all the same.
        self._numbers = itertools.count(1)
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
        """The ring's thread: takes what is submitted, keeps the ring full, hands out what is over."""
        try:
            self._ring = _open_ring(self.depth)
        except OSError as error:
            started.put(error)
            return
        started.put(None)
        try:
            while not (self._ending and not self._waiting and not self._flying):
                self._take(block=not self._waiting and not self._flying)
                self._fill()
                if self._flying:
                    self._reap()
        finally:
            self._ring.close()

    def _take(self, block: bool) -> None:
        """Move submissions from the queue to the waiting ones; wait for one only when there is nothing else to do."""
        while True:
            try:
                transfer = self._queue.get(block)
            except Empty:
                return
            block = False
            if transfer is None:
                self._ending = True
            else:
                self._waiting.append(transfer)

    def _fill(self) -> None:
        while self._waiting and len(self._flying) < self.depth:
            transfer = self._waiting.popleft()
            number = next(self._numbers)
            call = self._ring.write_async_ptr if transfer.write else self._ring.read_async_ptr
            address = ctypes.c_void_p(transfer.buffer.data_ptr() + transfer.moved)
            self._flying[number] = transfer
            self._submitting(
                call, transfer.descriptor, address, transfer.left, transfer.offset + transfer.moved, number
            )

    def _submitting(self, call: Callable[..., Any], *args: Any) -> None:
        """One call that hands the queue to the kernel.

        pyuring queues a transfer before it submits it, and the queue has room for all that fly: after an error it is
        still queued, and goes with the next call that succeeds. So it counts as flying, and its memory stays in use.
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
            time.sleep(RETRY)
            self._submitting(self._ring.submit)
            if self._unsent:
                return
        try:
            number, result = self._ring.wait_completion()
        except OSError as error:
            # A signal, or something passing. The transfers go on in the kernel whatever we do, and until it says that
            # they are over their memory cannot be given back: there is nothing to do but ask again.
            if error.errno not in (errno.EINTR, errno.EAGAIN):
                log.error("io_uring could not be waited for, which is tried again: %s", error)
                time.sleep(RETRY)
            return
        transfer = self._flying.pop(number)
        if -result in (errno.EINTR, errno.EAGAIN):
            self._waiting.appendleft(transfer)
            return
        found = transfer.advance(result)
        if found is None and transfer.left:
            self._waiting.appendleft(transfer)
        else:
            tell(transfer, found)


def _open_ring(depth: int) -> Any:
    try:
        from pyuring.native.uring_ctx import UringCtx
    except ImportError as error:
        raise OSError(errno.ENOSYS, "io_uring needs the package pyuring: pip install pyuring==0.3.0") from error
    try:
        ring = UringCtx(entries=max(depth, 2))
    except OSError as error:
        raise OSError(error.errno or errno.EOPNOTSUPP, f"io_uring is not to be had here: {error}") from error
    # A child that was forked must not have the ring's memory, or it could submit into our queue.
    dontfork = ring._lib.io_uring_ring_dontfork
    dontfork.argtypes, dontfork.restype = [ctypes.c_void_p], ctypes.c_int
    if dontfork(ring._ring()) != 0:
        log.debug("io_uring: the ring's memory is inherited by children")
    return ring
