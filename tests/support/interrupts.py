"""An interrupt (Ctrl-C, a handler that raises) at any one step of the code that waits for threads."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec

from tierstate.tiers import concurrency, latch

OURS = {concurrency.__file__, latch.__file__}


P = ParamSpec("P")


class Interrupted(BaseException):
    """What a handler raises."""


@contextmanager
def interrupt_at(step: int) -> Iterator[Callable[[], int]]:
    """Raise `Interrupted` in this thread at a step: before a line of the pool's modules, or where a function of
    `threading` that they call begins, which are moments at which a signal is handled. Between the few lines of
    `run_concurrently` and `results_ahead`, which are left out, there is no such moment.

    Yields a function: the number of steps so far.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen
        mine = frame.f_code.co_filename in OURS and frame.f_code.co_name not in ("run_concurrently", "results_ahead")
        if (mine and event == "line") or (event == "call" and _of_a_thread(frame)):
            seen += 1
            if seen == step:
                raise Interrupted
        return trace if mine else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: seen
    finally:
        sys.settrace(before)


def in_a_thread_of_its_own(test: Callable[P, None]) -> Callable[P, None]:
    """Runs a test that interrupts itself in another thread: one that is interrupted while it handles an error keeps
    that error as the context of later ones, which a signal would not do."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test, *args, **kwargs).result()

    return run


def _of_a_thread(frame: FrameType) -> bool:
    """Whether this is a function of `threading` on behalf of a pool."""
    while frame.f_code.co_filename == threading.__file__:
        assert frame.f_back is not None
        frame = frame.f_back
        if frame.f_code.co_filename in OURS:
            return True
    return False
