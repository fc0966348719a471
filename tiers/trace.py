"""A trace of what the threads of this process do for saves and restores, in the format of Chrome and Perfetto.

``with span("digest", bytes=n):`` around work that is worth a look; without a trace under way it costs a few tenths of a
microsecond. Events go to a file as JSON lines within one array, which viewers also read if its end is missing, as after
a kill: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, TracebackType
from typing import Any, Self

from .concurrency import start_thread
from .thread_stacks import thread_stacks

log = logging.getLogger("tierstate")


VARIABLE = "TIERSTATE_TRACE"
"""Names the file to which a whole process is traced."""


MAX_EVENTS = 2_000_000
"""Events of one trace, at most; viewers do not take more."""


PROBE = 0.02
"""Seconds between two looks at how soon a thread gets the interpreter."""


LATE = 0.01
"""Seconds from which on a wait for the interpreter is an event: more than one switch between threads (5 ms)."""


_tracer: Tracer | None = None


class Tracer:
    """Writes the events of this process to a file until it is closed.

    Args:
        path: of the file, which is made anew.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._threads: set[int] = set()
        self._left, self._failed, self._over = MAX_EVENTS, False, False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._write_all, name="tierstate-trace", daemon=True)
        start_thread(self._thread)
        self._probe = threading.Thread(target=self._probe_interpreter, name="tierstate-trace-probe", daemon=True)
        start_thread(self._probe)
        self._put({"name": "process_name", "ph": "M", "args": {"name": f"tierstate, process {self._pid}"}})

    def add(self, name: str, start: float, end: float, values: dict[str, Any]) -> None:
        """A span has ended in this thread. Times are of `time.perf_counter`."""
        if self._failed or self._left <= 0 or os.getpid() != self._pid:
            return
        self._left -= 1
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads.add(thread)
            named = {"name": threading.current_thread().name}
            self._put({"name": "thread_name", "ph": "M", "tid": thread, "args": named})
        event = {"name": name, "ph": "X", "ts": round(1e6 * start, 1), "dur": round(1e6 * (end - start), 1)}
        self._put({**event, "tid": thread, "cat": "tierstate", "args": values})

    def _put(self, event: dict[str, Any]) -> None:
        self._queue.put({"pid": self._pid, **event})

    def _probe_interpreter(self) -> None:
        """Sleep, and note when this thread runs again much too late: another one has held the interpreter's lock, or
        no core was free, which the kernel tells (`queued`)."""
        main = threading.main_thread().ident or 0
        with _queue_time() as queue_time:
            while not (self._over or self._failed):
                due, used, queued = time.perf_counter() + PROBE, time.process_time(), queue_time()
                time.sleep(PROBE)
                now = time.perf_counter()
                if now - due > LATE:
                    at = "".join(_line_of(*inner) for inner in thread_stacks(1).get(main, ()))
                    cpu, ready = round(time.process_time() - used, 4), round(queue_time() - queued, 4)
                    values = {"cpu": cpu, "queued": ready, "main thread": at}
                    self.add("wait for the interpreter", due, now, values)

    def _write_all(self) -> None:
        comma = ""
        try:
            while (event := self._queue.get()) is not None:
                self._file.write(f"{comma}{json.dumps(event, separators=(',', ':'), default=str)}")
                comma = ",\n"
                if self._queue.empty():
                    self._file.flush()
            self._file.write("\n]\n")
            self._file.close()
        except OSError as error:
            self._failed = True
            log.warning("%s: the trace ends here: %s", self.path, error)
            with suppress(OSError):
                self._file.close()
            while not self._queue.empty():
                self._queue.get()

    def close(self) -> None:
        """Write what is left."""
        if os.getpid() == self._pid and self._thread.is_alive():
            self._over = True
            self._probe.join()
            self._queue.put(None)
            self._thread.join()


def _line_of(code: CodeType, instruction: int) -> str:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return f"{Path(code.co_filename).name}:{next(lines, None)}"


@contextmanager
def _queue_time() -> Iterator[Callable[[], float]]:
    """What tells for how many seconds, in all, this thread was ready to run and had no core; zero where the kernel
    does not count them (no CONFIG_SCHED_INFO, other systems). Linux, Documentation/scheduler/sched-stats.rst."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(descriptor, 128, 0).split()[1]) / 1e9
    finally:
        os.close(descriptor)


class Span:
    """A block that becomes one event; `also` adds numbers that are known only within it."""

    __slots__ = ("_name", "_start", "_values")

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self._name, self._values, self._start = name, values, 0.0

    def also(self, **values: Any) -> None:
        """Add values."""
        self._values.update(values)

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._values["error"] = f"{type(error).__name__}: {error}"[:200]
        if (tracer := _tracer) is not None:
            tracer.add(self._name, self._start, time.perf_counter(), self._values)


class NoSpan:
    """What `span` returns where nothing is traced."""

    __slots__ = ()

    def also(self, **values: Any) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_NONE = NoSpan()


def span(name: str, **values: Any) -> Span | NoSpan:
    """A block of work of this thread, as an event of the trace.

    Args:
        values: numbers and names by which a person understands it: ``step``, ``tier``, ``bytes``.
    """
    return _NONE if _tracer is None else Span(name, values)


def begin(path: str | os.PathLike[str]) -> Tracer:
    """Trace this process from now on, to a file.

    Raises:
        RuntimeError: it is being traced already.
        OSError: the file cannot be written.
    """
    global _tracer
    if _tracer is not None:
        raise RuntimeError(f"this process is being traced already, to {_tracer.path}")
    _tracer = Tracer(path)
    return _tracer


def end() -> None:
    """End the trace, if there is one: its file is whole then."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()


def begin_by_environment() -> None:
    """Trace to the file that ``TIERSTATE_TRACE`` names, until this process ends; ``{rank}`` and ``{pid}`` in the name
    are replaced. Does nothing without it, and where a trace is under way. What cannot be written is a warning: no
    training ends since nobody can watch it."""
    name = os.environ.get(VARIABLE, "")
    if name and _tracer is None:
        rank = os.environ.get("RANK", "0")
        path = name.replace("{rank}", rank).replace("{pid}", str(os.getpid()))
        try:
            begin(path)
        except OSError as error:
            log.warning("%s: %s cannot be written, so nothing is traced: %s", VARIABLE, path, error.strerror or error)
        else:
            atexit.register(end)
