"""Waiting for what other ranks are to say: how long yet, and whether there is any use in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tierstate.manifest.errors import RankFailed

from .heartbeat import Terms, Vigil, named
from .line import Line

SOONEST, BUSY, POLLS = 0.0005, 4000.0, 1000.0
"""Seconds between the first looks for a message; how often all ranks may look per second at first, and later."""

Stop: TypeAlias = Callable[[], bool]


def never() -> bool:
    """Nobody ends the wait."""
    return False


class Wait:
    """One wait for messages.

    Args:
        rank, size: of who waits.
        timeout: seconds; None: those of the terms.
        stop: asked all the time: whether to give up.
        alone: no other rank waits for the same.
    """

    def __init__(
        self, line: Line, terms: Terms, rank: int, size: int, timeout: float | None, stop: Stop, *, alone: bool
    ) -> None:
        self._line, self._rank, self._stop = line, rank, stop
        self._timeout = terms.timeout if timeout is None else timeout
        self._began = time.monotonic()
        self._vigil = Vigil(line, terms, size)
        # Where one waits for many, he alone asks. Where all wait for one, their questions come on top of one another.
        asking = 1 if alone else size
        self._soonest, self._latest = max(SOONEST, asking / BUSY), max(0.05, asking / POLLS)

    def idle(self, keys: Mapping[int, str]) -> None:
        """Pass some time.

        Args:
            keys: what is waited for: the ranks, and the key that each is to set.

        Raises:
            RankFailed: there is no more use in waiting.
        """
        waited = time.monotonic() - self._began
        if waited >= self._timeout:
            if lacking := self._lacking(keys):
                raise RankFailed(f"{named(lacking)} did not answer within {self._timeout:.3g} s", lacking)
            return
        dead = self._vigil.look(keys.keys())
        lacking = self._lacking({rank: keys[rank] for rank in dead})  # what it said before it died counts
        if lacking:
            why = "; ".join(f"rank {rank} {dead[rank]}" for rank in lacking[:4])
            more = f"; so did {named(lacking[4:])}" if lacking[4:] else ""
            raise RankFailed(why + more, lacking)
        # A tenth of what was waited is added to it at most, and long waits ask rarely.
        self._pause(min(max(waited / 10, self._soonest), self._latest, self._timeout - waited))

    def _lacking(self, keys: Mapping[int, str]) -> list[int]:
        """The ranks whose key is not there."""
        ranks = {key: rank for rank, key in keys.items()}
        return sorted(ranks[key] for key in self._line.missing(list(ranks)))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            if self._stop():
                raise RankFailed(f"rank {self._rank} gave up waiting for others, as it was told to stop", (self._rank,))
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))
