"""Latches and completions: one-shot events that other threads wait for, and whose wait Ctrl-C can always interrupt."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress

SIGNAL_CHECK = 0.1
"""Longest delay, in seconds, of handling a signal that came just before a wait began, or to another thread."""


class Latch:
    """An event that is set once, and never cleared.

    Waiting for a `threading.Event` cannot be interrupted at every moment, not even by Ctrl-C. A signal that arrives
    between the interpreter's last check and the wait itself is handled only when the wait is over; one that is handled
    while `Event.wait` acquires or releases the event's lock leaves the event locked for ever, or raises a RuntimeError.
    Here a waiting thread holds only a lock of its own, and checks for signals every `SIGNAL_CHECK` seconds.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake all threads that wait."""
        self._set = True  # before waiters are woken: a thread that begins to wait now checks this first
        with suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most ``timeout`` seconds. Returns whether it is set."""
        if self._set:
            return True
        end = None if timeout is None else time.monotonic() + timeout
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            while not self._set and (left := SIGNAL_CHECK if end is None else end - time.monotonic()) > 0:
                mine.acquire(timeout=min(left, SIGNAL_CHECK))
        finally:
            with suppress(ValueError):
                self._waiting.remove(mine)
        return self._set


class Completion:
    """Pending, succeeded, or failed with an error: a `Future` without a value, whose wait can be interrupted."""

    def __init__(self) -> None:
        self._latch = Latch()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._latch.is_set()

    def set_result(self, _result: None) -> None:
        """Mark it as succeeded."""
        self._set(None)

    def set_exception(self, error: BaseException) -> None:
        """Mark it as failed."""
        self._set(error)

    def _set(self, error: BaseException | None) -> None:
        if self.done():
            raise RuntimeError("an outcome is told twice")
        self._error = error
        self._latch.set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end. Returns the error, or None on success.

        Raises:
            TimeoutError: it is still pending after ``timeout`` seconds.
        """
        if not self._latch.wait(timeout):
            raise TimeoutError
        return self._error

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, and raise the error if there is one.

        Raises:
            BaseException: what went wrong.
            TimeoutError: it is still pending after ``timeout`` seconds.
        """
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
        finally:
            del error  # which holds this frame by now
