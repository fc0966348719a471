"""Pauses Python's garbage collector while thousands of objects are made, none of which is garbage."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changing = threading.RLock()


_pausing: dict[object, int] = {}
"""One object for each block that is under way, and its thread; the last of them enables the collector again."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in this block.

    Making the objects of some thousand leaves starts many collections, each of which scans all objects of the process.
    With torch loaded, that takes as long as all the rest.
    """
    inside = object()
    try:
        with _changing:
            if _pausing or gc.isenabled():  # where the user has disabled it, it stays so
                _pausing[inside] = threading.get_ident()
            gc.disable()
        yield
    finally:
        with _changing:
            if inside in _pausing:
                del _pausing[inside]
                if not _pausing:
                    gc.enable()


def _begin_child() -> None:
    """In a forked child only the thread that forked goes on, and no other one ends its block."""
    global _changing
    _changing = threading.RLock()
    others = [inside for inside, thread in _pausing.items() if thread != threading.get_ident()]
    for inside in others:
        del _pausing[inside]
    if others and not _pausing:
        gc.enable()


os.register_at_fork(after_in_child=_begin_child)
