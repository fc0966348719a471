"""Pauses Python's garbage collector while thousands of objects are made, none of which is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in this block.

    Making the objects of some thousand leaves starts many collections, each of which scans all objects of the process.
    With torch loaded, that takes as long as all the rest.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
