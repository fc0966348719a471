"""The watchdog: runs calls in threads, and gives up those that make no progress before a deadline.

A system call on a dead network file system cannot be interrupted. `Watchdog` runs each call in a thread of
`CallThreads`; one thread watches them all. When a call is overdue, all waiting callers get `Hung`, and new calls are
refused until every call that was given up has returned, every leased buffer is released, and the cleanup is done.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.base import KeepingArena, Release
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.latch import Latch

from .breaker import Breaker, Hung

log = logging.getLogger("tierstate")


T = TypeVar("T")


THREAD_IDLE = 5.0
"""Seconds after which a thread without work ends."""


LINGER = 1.0
"""Seconds after which the watchdog thread ends if there is nothing to watch."""


PULSE = 1.0
"""Seconds that the watchdog thread sleeps at most while there is something to watch: how exactly it knows for how long
this process was stopped."""


THREAD_CLOSE_WAIT = 1.0
"""Seconds that closing waits for a thread that is about to end."""


class Activity:
    """Calls whose progress counts together: a single call, or one writer with all its calls and leased buffers.

    Attributes:
        underway: number of its calls that have not returned and of its buffers that are not released.
        last: monotonic time of the last return or release, or of the first start.
    """

    def __init__(self) -> None:
        self.underway = 0
        self.last = 0.0


class Pending:
    """A call that has not returned, or a leased buffer that is not released.

    Attributes:
        what: description for messages.
        given_up: the watchdog no longer waits for it.
    """

    def __init__(self, what: str, effort: Activity) -> None:
        self.what, self.effort = what, effort
        self.given_up = False


class LentBuffer(Pending):
    """A buffer that a writer has under a lease, until it is released."""

    def __init__(self, what: str, effort: Activity, buffer: Buffer) -> None:
        super().__init__(what, effort)
        self.buffer = buffer


class WatchedCall(Pending, Generic[T]):
    """A call in another thread.

    Attributes:
        refusal: the error that is raised instead of a result, once the call was given up.
        asks: it asks whether the tier answers again (`Breaker.admit`).
        begun: it runs, or has run.
        withdrawn: it will not be begun.
    """

    def __init__(self, what: str, effort: Activity, call: Callable[[], T], late: Callable[[T], object]) -> None:
        super().__init__(what, effort)
        self._call, self._late = call, late
        self._over = Latch()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.refusal: Hung | None = None
        self.asks = self.begun = self.withdrawn = False

    @property
    def answered(self) -> bool:
        """Whether it has returned, also with an error, unless that says that the tier does not answer."""
        return not isinstance(self._error, TierUnavailable)

    @property
    def succeeded(self) -> bool:
        """Whether it returned without an error, in time or late."""
        return bool(self._result)

    def run(self) -> None:
        """Run the call and keep its result or error."""
        try:
            self._result.append(self._call())
        except BaseException as error:
            self._error = error
        del self._call

    def tell(self) -> None:
        """Wake the waiting caller."""
        self._over.set()

    def discard(self) -> None:
        """Undo the result of a call that was given up (``late``)."""
        if self._error is not None:
            log.info("%s came back after it was given up: %r", self.what, self._error)
            return
        try:
            self._late(self._result[0])
        except BaseException as error:  # also `SystemExit` of a tier's method: the tier would be left out for ever
            log.warning("%s came back after it was given up, and could not be undone: %r", self.what, error)

    def result(self) -> T:
        """Wait for the result.

        Raises:
            Hung: it has not returned in time.
            BaseException: the error of the call.
        """
        try:
            self._over.wait()
        except BaseException:
            self.given_up = True  # interrupted: nothing waits for the result any more
            raise
        if self.refusal is not None:
            raise self.refusal
        if self._error is not None:
            # Not kept here: its traceback refers to this call, and the call refers to buffers of the caller.
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return self._result[0]


class CallThreads:
    """A pool of threads for calls. A call that never returns blocks only its own thread.

    A thread that takes a call looks whether the next one has a thread too, so that nothing depends on what an
    interrupted caller has left undone.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer may take it in any thread, at any moment of garbage collection.
        self._lock = threading.RLock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._ended = False

    def run(self, call: Callable[[], None]) -> None:
        """Start a call, which must not raise.

        Raises:
            RuntimeError: no thread can be started. The call may be run later, if another one can.
        """
        self._calls.put(call)
        self.staff()

    def staff(self) -> None:
        """Start a thread, if fewer threads are idle than calls wait."""
        with self._lock:
            if self._calls.qsize() <= self._idle:
                return
            # A daemon, or the interpreter would wait for it at exit.
            thread = threading.Thread(target=self._work, name="tierstate-call", daemon=True)
            self._threads.add(thread)
        try:
            start_thread(thread)
        except BaseException:
            self._forget(thread)
            raise

    def _work(self) -> None:
        try:
            while (call := self._next()) is not None:
                call()
                del call
        finally:
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.discard(thread)

    def _next(self) -> Callable[[], None] | None:
        """The next call; None after `end`, and if there is none for a while."""
        with self._lock:
            self._idle += 1
        try:
            call = self._calls.get(timeout=THREAD_IDLE)
        except Empty:
            call = None
        finally:
            with self._lock:
                self._idle -= 1
        if call is None:
            call = self._left()
        if call is not None:
            with suppress(RuntimeError, MemoryError):  # no thread can be started: this one takes the next call too
                self.staff()
        elif self._ended:
            self._calls.put(None)  # for the next thread
        return call

    def _left(self) -> Callable[[], None] | None:
        """A call for which nothing was started, since this thread was idle until now."""
        try:
            while (call := self._calls.get_nowait()) is None:
                pass
        except Empty:
            return None
        return call

    def end(self, patience: float) -> None:
        """End every thread after its call, and wait for them at most ``patience`` seconds."""
        with self._lock:
            self._ended = True
            threads = list(self._threads)
        self._calls.put(None)
        end = time.monotonic() + patience
        for thread in threads if patience else ():
            if thread.ident is not None:  # it has none yet if its caller was interrupted
                thread.join(max(0.0, end - time.monotonic()))


class Watchdog:
    """Runs calls, and gives them up after too long without progress.

    Then the tier counts as hung: waiting callers get an error, and no call is started until all calls that were given
    up have returned and their buffers are released. Then the deferred cleanup runs, and the tier is used as before;
    unless all that was given up came back with `TierUnavailable`: then it is asked again at intervals (`Breaker`).

    Args:
        seconds: a call is given up after this many seconds without progress.
        arena: its in-flight budget no longer counts leased buffers that were given up.
        name: returns the tier's name, for messages.
    """

    def __init__(self, seconds: float, arena: KeepingArena | None, name: Callable[[], str]) -> None:
        self.seconds, self._arena, self._name = seconds, arena, name
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        # Entered and left in C: an interrupt at the beginning of `Condition.__exit__` would leave it locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads = CallThreads()
        self._underway: set[Pending] = set()
        self._deferred: list[Callable[[], object]] = []
        self._watching: threading.Thread | None = None
        self._closed = self._back = False
        self._breaker = Breaker(self._name, self.seconds, until_when="it is used again once that has come back")

    @property
    def trouble(self) -> str:
        """What hangs, and since when; empty if nothing does."""
        return self._breaker.trouble

    # Calls and leased buffers

    def begin(
        self,
        what: str,
        call: Callable[[], T],
        effort: Activity | None = None,
        late: Callable[[T], object] = lambda _result: None,
    ) -> WatchedCall[T]:
        """Start a call.

        Args:
            what: description for messages.
            effort: the activity that the call belongs to; by default one of its own.
            late: called with the result if it comes after the call was given up.

        Raises:
            Hung: it was not started, since the tier hangs.
        """
        if os.getpid() != self._pid:
            self._start_over()  # a forked child has no threads of its parent, and does not wait for its calls
        made = WatchedCall(what, effort or Activity(), call, late)
        try:
            self._admit(made)
            self._threads.run(lambda: self._run(made))
            return made
        except BaseException:
            self._withdraw(made)
            raise

    def _admit(self, call: WatchedCall[Any]) -> None:
        with self._lock:
            if self.trouble and (self._has_given_up() or self._deferred):
                # What hangs may be a call whose thread ended before it took it, for lack of memory.
                with suppress(RuntimeError, MemoryError):
                    self._threads.staff()
                raise self._breaker.refusal()
            call.asks = True  # should this be interrupted
            try:
                call.asks = self._breaker.admit()
            except Hung:
                call.asks = False
                raise
            self._add(call)

    def _withdraw(self, call: WatchedCall[Any]) -> None:
        """Do not begin a call any more, for which nothing waits. One that has begun is given up."""
        with self._lock:
            call.given_up = True
            if not call.begun:
                call.withdrawn = True
                self._drop(call)
        self._breaker.undecided(asks=call.asks)

    def run(self, what: str, call: Callable[[], T], late: Callable[[T], object] = lambda _result: None) -> T:
        """Run a call and wait for its result.

        Raises:
            Hung: the tier hangs; the call was not started, or was given up.
            BaseException: what the call raised.
        """
        return self.begin(what, call, late=late).result()

    def lend(self, what: str, effort: Activity, buffer: Buffer, release: Release) -> Release:
        """Watch a buffer that is about to be passed to a writer. Returns what to call instead of ``release``."""
        loan = LentBuffer(what, effort, buffer)

        def release_and_remove() -> None:
            try:
                release()
            finally:
                self._remove(loan)

        try:
            with self._lock:
                self._add(loan)
            return release_and_remove
        except BaseException:
            self._remove(loan)
            raise

    def _add(self, one: Pending) -> None:
        if self._watching is None and not self._closed:
            watching = threading.Thread(target=self._look, name="tierstate-watch", daemon=True)
            start_thread(watching)  # it waits for the lock that we hold
            self._watching = watching
        if not one.effort.underway:
            one.effort.last = time.monotonic()
        one.effort.underway += 1
        self._underway.add(one)

    def _remove(self, one: Pending) -> None:
        with self._lock:
            self._drop(one)
            self._back = self._back or isinstance(one, LentBuffer)
            back = one.given_up and not self._has_given_up()
        if back:
            self._clear_up()

    def _drop(self, one: Pending) -> None:
        if one in self._underway:
            one.effort.underway -= 1
            self._underway.remove(one)
            one.effort.last = time.monotonic()

    def _run(self, call: WatchedCall[Any]) -> None:
        with self._lock:
            if call.withdrawn:
                return
            call.begun = True
        call.run()
        with self._lock:
            in_time = not call.given_up
            self._back = self._back or call.answered
            if in_time:
                self._drop(call)
        if in_time:
            try:
                self._report(call)
            finally:
                call.tell()
        else:
            self._breaker.undecided(asks=call.asks)
            call.discard()
            self._remove(call)

    def _report(self, call: WatchedCall[Any]) -> None:
        if call.answered:
            self._breaker.answered()
        elif call.asks:
            self._breaker.silent("", 0.0, asks=True)

    # Giving up, and recovery

    def _look(self) -> None:
        """The watchdog thread: sleeps until something may be overdue."""
        with self._lock:
            while not self._closed and (self._waited() or self._lingered()):
                waited = self._waited()
                left = min((one.effort.last for one in waited), default=time.monotonic()) + self.seconds
                left -= time.monotonic()
                if left > 0:
                    self._sleep(min(left, PULSE))
                else:
                    self._give_up(waited)
            self._watching = None

    def _sleep(self, seconds: float) -> None:
        began = time.monotonic()
        self._changed.wait(seconds)
        now = time.monotonic()
        # If it took longer, this process was stopped (SIGSTOP, a frozen container), which is no silence of the tier.
        if (stopped := now - began - seconds) > PULSE:
            for effort in {one.effort for one in self._waited()}:
                effort.last = min(now, effort.last + stopped)

    def _lingered(self) -> bool:
        """Wait while there is nothing to watch, up to `LINGER`; returns whether there is something to watch again."""
        self._sleep(min(self.seconds, LINGER))
        return bool(self._waited())

    def _waited(self) -> list[Pending]:
        return [one for one in self._underway if not one.given_up]

    def _has_given_up(self) -> bool:
        return any(one.given_up for one in self._underway)

    def _give_up(self, waited: list[Pending]) -> None:
        """Give up everything that is pending: calls that started later will hardly return sooner."""
        slowest = min(waited, key=lambda one: one.effort.last)
        silence = time.monotonic() - slowest.effort.last
        asked = any(isinstance(one, WatchedCall) and one.asks for one in waited)
        self._breaker.silent(f"{slowest.what} has not come back in {self.seconds:g} s", silence, asks=asked)
        self._back = False
        for one in waited:
            one.given_up = True
            if isinstance(one, LentBuffer) and self._arena is not None:
                self._arena.keep(one.buffer)
        for one in waited:
            if isinstance(one, WatchedCall):
                one.refusal = self._breaker.refusal()
                one.tell()

    def afterwards(self, call: Callable[[], object]) -> None:
        """Defer a call until everything that was given up has returned; if nothing was given up, it runs soon."""
        with self._lock:
            self._deferred.append(call)
            ready = not self._has_given_up()
        if ready:
            self._clear_up()

    def _clear_up(self) -> None:
        """Run the deferred calls in a thread; until they have ended the tier counts as hung."""
        with self._lock:
            calls, self._deferred = self._deferred, []
            if calls:
                clearing = WatchedCall("clearing up", Activity(), lambda: _all(calls), lambda _result: None)
                clearing.given_up = True
                self._add(clearing)
            elif self._back and not self._has_given_up():
                self._breaker.answered()
        if calls:
            self._threads.run(lambda: self._run(clearing))

    def close(self, last: Callable[[], object]) -> None:
        """Call ``last`` when nothing is pending, and end the threads. Hung calls are not waited for."""
        try:
            self._finally(last)
        finally:
            self.end(0.0 if self.trouble else THREAD_CLOSE_WAIT)

    def end(self, patience: float = 0.0) -> None:
        """End the threads as soon as they are idle; waits for them at most ``patience`` seconds."""
        if os.getpid() != self._pid:
            return  # a forked child has none of them, and may never get the lock
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            watching = self._watching
        self._threads.end(patience)
        if watching is not None and patience:
            watching.join(patience)

    def _finally(self, last: Callable[[], object]) -> None:
        try:
            call = self.begin("closing", last)
        except Hung:
            self.afterwards(last)
            return
        try:
            call.result()
        except Hung as error:
            log.warning("%s", error)


def _all(calls: list[Callable[[], object]]) -> None:
    """Make all the calls.

    Raises:
        TierUnavailable: that of the last call which raised it.
    """
    silent: TierUnavailable | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            log.warning("clearing up after what was given up failed: %r", error)
            silent = error if isinstance(error, TierUnavailable) else silent
    if silent is not None:
        raise silent
