"""Run blocking calls of a tier in a few threads, since a remote store may take long to answer each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

CALL_THREADS = 8
"""Number of calls that run at the same time."""


T = TypeVar("T")


def run_concurrently(call: Callable[[T], None], items: Iterable[T]) -> None:
    """Call ``call`` for each item, in a few threads including this one. Raises the first error in the end."""
    left: deque[T] = deque(items)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while left and not errors:
                with suppress(IndexError):  # another thread took the last item
                    call(left.popleft())
        except BaseException as error:
            errors.append(error)

    count = min(CALL_THREADS, len(left)) - 1
    threads = [threading.Thread(target=work, name="tierstate-index", daemon=True) for _ in range(count)]
    with suppress(RuntimeError):  # no thread can be started, as at the interpreter's exit: this one does all the work
        for thread in threads:
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
