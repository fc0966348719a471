"""The clock of the storage, by which the age of objects is measured, since the clocks of hosts disagree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CLOCK_REFRESH = 60.0
"""Seconds after which the remote clock is read again."""


class RemoteClock:
    """A clock that is expensive to read: it is read rarely, and the local monotonic clock adds the time since then.

    Args:
        look: reads the remote time in seconds; None where that is impossible.
    """

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._seen: tuple[float, float] | None = None

    def now(self) -> float | None:
        """The remote time in seconds; None where it cannot be read."""
        with self._lock:
            here = time.monotonic()
            if self._seen is None or here - self._seen[0] > CLOCK_REFRESH:
                there = self._look()
                self._seen = None if there is None else (here, there)
            return None if self._seen is None else self._seen[1] + here - self._seen[0]
