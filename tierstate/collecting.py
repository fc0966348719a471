"""Garbage collection, put off while thousands of objects are made of which none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for in this block.

    Making the objects of some thousand leaves makes the collector look at everything in the process again and again:
    with torch loaded, that takes as long as all the rest.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
