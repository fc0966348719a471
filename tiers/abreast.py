"""Abreast: calls that wait for a tier's answer, made by a few threads, since a store may take long to answer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

READERS = 8
"""Calls that are made at once."""

T = TypeVar("T")


def abreast(call: Callable[[T], None], items: Iterable[T]) -> None:
    """Call for each, in a few threads, of which this is one."""
    left: deque[T] = deque(items)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while left and not errors:
                with suppress(IndexError):  # another one took the last
                    call(left.popleft())
        except BaseException as error:
            errors.append(error)

    count = min(READERS, len(left)) - 1
    threads = [threading.Thread(target=work, name="tierstate-index", daemon=True) for _ in range(count)]
    with suppress(RuntimeError):  # no more threads are to be had, as at the interpreter's end: this one does it all
        for thread in threads:
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
