"""Pauses Python's garbage collector while thousands of objects are made, none of which is garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changing = threading.RLock()


_pausing: set[object] = set()
"""One object for each block that is under way, in any thread; the last of them enables the collector again."""


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
                _pausing.add(inside)
            gc.disable()
        yield
    finally:
        with _changing:
            if inside in _pausing:
                _pausing.remove(inside)
                if not _pausing:
                    gc.enable()
