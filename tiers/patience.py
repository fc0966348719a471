"""Patience: when something that failed is tried again."""

from __future__ import annotations

import random
import time

FIRST = 1.0
"""Seconds after the first failure; twice as many after each further one."""

MOST = 60.0
"""Seconds between two attempts at most."""


class Patience:
    """Longer and longer pauses, of which up to half is left to chance, so that many ranks do not come at once."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._until = 0.0

    def failed(self) -> None:
        """One more failure: wait longer than before."""
        self._pause = min(MOST, 2 * self._pause or FIRST)
        self._until = time.monotonic() + self._pause * random.uniform(0.5, 1.0)

    def calm(self) -> None:
        """All is well: no pause."""
        self._pause = self._until = 0.0

    @property
    def left(self) -> float:
        """Seconds until the next attempt; 0 if it may be made now."""
        return max(0.0, self._until - time.monotonic())
