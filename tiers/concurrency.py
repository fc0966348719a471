"""Threads of our own for blocking calls: `WorkerPool`, and `run_concurrently` and `results_ahead` for a call of many
items.

Unlike `concurrent.futures` they run until the very end of the interpreter, where saves are finished, and none of their
calls goes on after the block that made them: not even if that was interrupted while a thread was being started.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from .latch import Latch

CALL_THREADS = 8
"""Number of calls that run at the same time."""


T = TypeVar("T")
R = TypeVar("R")


class Cancelled(RuntimeError):
    """A call was not begun, since its pool was closed."""


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_thread(thread: threading.Thread) -> None:
    """Start a thread that was not started yet. After an interrupt at any moment that may be done again.

    `Thread.start` waits for the thread with an event. Interrupted there, it can leave the event's lock locked, so that
    the thread waits for it for ever, and so does who joins the thread. Only the main thread is interrupted; so one that
    is begun without an event starts it.

    Raises:
        RuntimeError: no thread can be started.
    """
    if thread.ident is not None:
        return
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def start() -> None:
        try:
            _start(thread)
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    _thread.start_new_thread(start, ())
    if (error := outcome.get()) is not None:
        raise error


_starting = threading.Lock()
"""Held only by threads that nothing interrupts."""


def _start(thread: threading.Thread) -> None:
    with _starting:
        if thread.ident is None:
            thread.start()


def _begin_child() -> None:
    """In a forked child the thread that held the lock at the fork does not go on, and would never release it."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_begin_child)


class Task(Generic[R]):
    """A call that a `WorkerPool` runs, and its outcome.

    Attributes:
        begun: whether the call was begun; it does not change any more once the pool is closed.
        error: the error of a call that has failed.
    """

    def __init__(self, call: Callable[[], R], then: Callable[[Task[R]], object] | None) -> None:
        self._call: Callable[[], R] | None = call
        self._then = then
        self._over = Latch()
        self._result: list[R] = []
        self.begun = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the end of the call, whatever its outcome."""
        self._over.wait()

    def result(self) -> R:
        """Wait for the end of the call; returns its result, or raises its error.

        Raises:
            Cancelled: the pool was closed before the call was begun.
        """
        self._over.wait()
        if self.error is not None:
            raise self.error
        if not self._result:
            raise Cancelled("the call was not begun")
        return self._result[0]

    def run(self) -> None:
        """Run the call and keep its outcome."""
        self.begun, call, self._call = True, self._call, None
        assert call is not None
        try:
            self._result.append(call())
        except BaseException as error:
            self.error = error
        del call
        self.end()

    def end(self) -> None:
        """Wake all that wait for the call."""
        self._over.set()
        then, self._then = self._then, None
        if then is not None:
            then(self)


class WorkerPool:
    """A few daemon threads that run calls in the order in which they were submitted.

    Once `close` has returned or raised, none of the calls runs, and none will. That holds also where the thread that
    submits or closes is interrupted (Ctrl-C, a handler that raises) at any moment: a worker registers before it looks
    whether the pool is stopped, and `close` stops the pool before it looks which workers are registered.

    Args:
        threads: how many threads; each is started when a call needs it.
        name: of the threads.

    Attributes:
        stopped: no call is begun any more.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._working: dict[Latch, None] = {}
        self.stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, call: Callable[[], R], then: Callable[[Task[R]], object] | None = None) -> Task[R]:
        """Run a call in a thread; in this one where no thread can be started.

        Args:
            then: called with the task when it has ended, or will never begin; must not raise.
        """
        if self.stopped:
            raise Cancelled("the pool is closed")
        task = Task(call, then)
        self._tasks.put(task)
        if len(self._threads) < self._most and not self._start() and not self._threads:
            self._work_off()
        return task

    def _start(self) -> bool:
        """Start one more thread. Returns whether it could be started."""
        # A daemon, or the interpreter would wait for it at exit, and end it before saves are finished.
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        try:
            start_thread(thread)
        except RuntimeError:
            self._threads.remove(thread)
            return False
        return True

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and self._run(task):
            del task
        self._tasks.put(None)  # for the next thread

    def _work_off(self) -> None:
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                self._run(task)

    def _run(self, task: Task[Any]) -> bool:
        """Run a task, unless the pool is stopped. Returns whether it was run."""
        over: Latch | None = None
        try:
            over = Latch()
            self._working[over] = None
            if self.stopped:
                task.end()
                return False
            task.run()
        except BaseException as error:  # no memory to begin it: if the thread ended, the task would never be over
            task.error = error
            task.end()
        finally:
            if over is not None:
                self._working.pop(over, None)
                over.set()
        return True

    def map(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Run a call for each item; returns the results in the order of the items, or raises the first error at once.

        After an error other calls may still run, until the pool is closed.
        """
        settled, failed, given = Latch(), list[BaseException](), list(items)
        left = deque(given)

        def run(item: T) -> R:
            try:
                return call(item)
            except BaseException as error:
                failed.append(error)
                settled.set()
                raise

        def count(_task: Task[R]) -> None:
            left.pop()
            if not left:
                settled.set()

        tasks = [self.submit(partial(run, item), count) for item in given]
        if tasks:
            settled.wait()
        try:
            if failed:
                raise failed[0]
            return [task.result() for task in tasks]
        finally:
            # An error's traceback refers to this frame, which must not refer to the error.
            failed.clear()
            tasks.clear()

    def end(self) -> None:
        """Begin no more calls, and end threads as soon as they are idle. Waits for nothing: a finalizer may call it."""
        self.stopped = True
        self._tasks.put(None)

    def close(self) -> None:
        """Begin no more calls, and wait for those that run. An interrupt of the wait is raised when they have ended."""
        self.stopped = True
        interrupts: list[BaseException] = []
        while not self._ended(interrupts):
            pass
        if interrupts:
            try:
                raise interrupts[0]
            finally:
                interrupts.clear()

    def _ended(self, interrupts: list[BaseException]) -> bool:
        """Wait until no call runs; False if that was interrupted, which is noted."""
        try:
            self._tasks.put(None)  # ends a thread that waits for a task
            for over in list(self._working):
                over.wait()
            for thread in self._threads:
                if thread.ident is not None and thread is not threading.current_thread():
                    thread.join()
            while not self._tasks.empty():
                task = self._tasks.get()
                if task is not None:
                    task.end()
            self._tasks.put(None)  # for a thread that was started and not seen to start
            return not self._working
        except BaseException as error:
            interrupts.append(error)
            return False


def run_concurrently(
    call: Callable[[T], R],
    items: Iterable[T],
    threads: int = CALL_THREADS,
    name: str = "tierstate-call",
    *,
    apart: bool = False,
) -> list[R]:
    """Run a call for each item in a few threads; returns the results in the order of the items.

    Raises the first error once no call runs any more. This thread only waits; when it is interrupted, the interrupt is
    raised when no call runs any more.

    Args:
        apart: run a single call in a thread, too, so that an interrupt ends the wait for it and not a transfer into
            memory. Otherwise it runs in this thread, since to start one costs more than many a call.
    """
    given: Sequence[T] = list(items)
    if len(given) == 1 and not apart:
        return [call(given[0])]
    pool = WorkerPool(min(threads, len(given)), name)
    # Not a `with` block: an interrupt at the entry of `__exit__` would leave it without having closed the pool.
    try:
        return pool.map(call, given)
    finally:
        pool.stopped = True
        try:
            pool.close()
        except BaseException:
            pool.close()
            raise


def results_ahead(
    call: Callable[[T], R], items: Iterable[T], threads: int = CALL_THREADS, name: str = "tierstate-ahead"
) -> Iterator[R]:
    """The results of a call for each item, in the order of the items. The calls for the next few items are made while
    a result is used: where a call waits for an answer from far away, they wait together.

    Raises the error of a call in place of its result. Once the iteration has ended, was given up, or has raised, no
    call runs any more.

    Args:
        threads: number of calls that run at the same time, and number of results that may wait to be used.
    """
    pool, begun = WorkerPool(threads, name), deque[Task[R]]()
    # As in `run_concurrently`.
    try:
        for item in items:
            begun.append(pool.submit(partial(call, item)))
            if len(begun) > threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.stopped = True
        try:
            pool.close()
        except BaseException:
            pool.close()
            raise
