"""A crew: threads that run one call each, made as they are needed, and none of which anybody has to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

IDLE = 5.0
"""Seconds after which a thread without work ends."""

_Calls = SimpleQueue["Callable[[], None] | None"]


class Crew:
    """Runs calls in threads of its own. A call that never returns costs its thread, and nothing else."""

    def __init__(self) -> None:
        # Also taken by whoever happens to collect garbage, in whatever thread and at whatever moment.
        self._lock = threading.RLock()
        self._idle: list[_Calls] = []
        self._threads: set[threading.Thread] = set()
        self._ended = False

    def run(self, call: Callable[[], None]) -> None:
        """Begin a call, which must not raise.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = SimpleQueue()
            # A daemon, or the interpreter would wait for it at its end.
            thread = threading.Thread(target=self._work, args=(calls,), name="tierstate-call", daemon=True)
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._forget(thread)
                raise
        calls.put(call)

    def _work(self, calls: _Calls) -> None:
        try:
            while (call := self._next(calls)) is not None:
                call()
                del call
                with self._lock:
                    if self._ended:
                        return
                    self._idle.append(calls)
        finally:
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.discard(thread)

    def _next(self, calls: _Calls) -> Callable[[], None] | None:
        try:
            return calls.get(timeout=IDLE)
        except Empty:
            with self._lock:
                if calls in self._idle:
                    self._idle.remove(calls)
                    return None
            return calls.get()  # it was chosen at the last moment, and its call is on its way

    def end(self, patience: float) -> None:
        """Have every thread end when it has no call, and wait for so many seconds at most until all have."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
            threads = list(self._threads)
        for calls in idle:
            calls.put(None)
        end = time.monotonic() + patience
        for thread in threads if patience else ():
            thread.join(max(0.0, end - time.monotonic()))
