"""The heartbeat: which of the ranks that are waited for live.

Every rank counts up a number in the store. Only those who wait look at it, and only at those they wait for. A rank
counts as dead when its number has not risen for as long as `Terms.silence`, summed over the looks of whoever waits: a
pause of his own, as while the whole machine stands still, counts for next to nothing. Who was found dead stays so for
all later waits, until its number rises.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .line import CLOSED, Line

BEATS = 400.0
"""Beats per second that all ranks together cost the store, at most."""

SLOWEST = 10.0
"""Seconds between two beats where the ranks are few and the silence is long."""


@dataclass(frozen=True)
class Terms:
    """How long ranks wait for one another, in seconds.

    Attributes:
        timeout: for what another rank has to say, where nothing else is said.
        silence: without a beat of a rank, after which it counts as dead.
    """

    timeout: float = 1800.0
    silence: float = 60.0

    @property
    def verdict(self) -> float:
        """Seconds to wait for the coordinator, who may have come last, and then have waited for yet another rank."""
        return 2 * self.timeout + self.silence

    def interval(self, size: int) -> float:
        """Seconds between two beats of one of so many ranks."""
        return max(min(self.silence / 6, SLOWEST), size / BEATS)

    def quiet(self, size: int) -> float:
        """Seconds after which one of so many ranks counts as dead: a few beats, at the least."""
        return max(self.silence, 4 * self.interval(size))


def beat_of(rank: int) -> str:
    """The key of a rank's beat."""
    return f"beat/{rank}"


class Vigil:
    """Looks after some ranks during one wait.

    Args:
        terms: how long they may be silent.
        size: of the team.
    """

    def __init__(self, line: Line, terms: Terms, size: int) -> None:
        self._line, self._interval, self._limit = line, terms.interval(size), terms.quiet(size)
        self._last = time.monotonic()
        self._known = dict(line.silent)  # to be looked at at once: every save that is under way waits for the dead
        self._beats: dict[int, bytes] = {}
        self._quiet: dict[int, float] = {}

    def look(self, ranks: Collection[int]) -> dict[int, str]:
        """Those of the ranks that are dead or gone, and what is known of each. Mostly does nothing, as it is too soon.

        Raises:
            RankFailed: the store is lost.
        """
        passed = time.monotonic() - self._last
        if passed < self._interval and not self._known.keys() & set(ranks):
            return {}
        self._last += passed
        beats, known, self._known = self._read(ranks), self._known, {}
        found = {}
        for rank in ranks:
            beat = beats.get(rank, b"")
            if beat == CLOSED:
                found[rank] = "has closed its Checkpointer"
            elif known.get(rank) == beat or self._is_quiet(rank, beat, passed):
                self._line.silent[rank] = beat
                found[rank] = f"has given no sign of life for {self._limit:.3g} s"
        return found

    def _is_quiet(self, rank: int, beat: bytes, passed: float) -> bool:
        if beat != self._beats.get(rank):
            self._beats[rank], self._quiet[rank] = beat, 0.0
            return False
        self._quiet[rank] += min(passed, 2 * self._interval)
        return self._quiet[rank] >= self._limit

    def _read(self, ranks: Collection[int]) -> dict[int, bytes]:
        keys = {beat_of(rank): rank for rank in ranks}
        absent = set(self._line.missing(list(keys)))
        there = [key for key in keys if key not in absent]
        beats = self._line.get(there) if there else []
        return {keys[key]: beat for key, beat in zip(there, beats, strict=True)}


def named(ranks: Iterable[int], most: int = 16) -> str:
    """Ranks for people: ``rank 3``, or ``ranks 1, 2, 5``."""
    found = sorted(ranks)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"rank{'s' if len(found) != 1 else ''} {', '.join(map(str, found[:most]))}{more}"
