"""A tally: what one tier's lane has done, and how fast."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

HISTORY = 1024
"""Saves whose times are remembered."""

RECENT = 16
"""Copies by which the speed of a tier is judged."""


@dataclass
class Tally:
    """What one lane has done.

    Attributes:
        saves: versions committed.
        failures: saves that did not arrive when it was their turn.
        skipped: saves that were left out, since newer ones waited.
        brought: versions that had not arrived at first, and were brought later.
        raw, stored: bytes of the states committed, and bytes written for them.
        seconds: from the call of ``save`` to the commit, of the newest saves.
    """

    saves: int = 0
    failures: int = 0
    skipped: int = 0
    brought: int = 0
    raw: int = 0
    stored: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _copies: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def copied(self, nbytes: int, seconds: float) -> None:
        """One version was copied from a faster tier."""
        self._copies.append((nbytes, seconds))

    @property
    def speed(self) -> float:
        """Bytes of state per second at which versions were copied lately; 0 before the first."""
        copies = list(self._copies)
        return sum(n for n, _ in copies) / max(1e-9, sum(s for _, s in copies)) if copies else 0.0
