"""Heartbeats: failure detection among the ranks of a team, and how long they wait for one another.

Every rank raises a counter in the store. Only a waiting rank reads counters, and only those of the ranks that it waits
for. A rank counts as dead when its counter has not risen for `Timeouts.silence` seconds. These seconds are summed over
the looks of the waiting rank, so a pause of that rank itself, as when the whole machine is suspended, hardly counts. A
dead rank counts as dead in all later waits, too, until its counter rises.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from tierstate.manifest.errors import RankFailed

from .store import BROKEN_OFF, CLOSED, StoreClient

BEATS = 400.0
"""Heartbeats per second that all ranks together send to the store, at most."""


SLOWEST = 10.0
"""Seconds between two heartbeats of a rank, at most; unless so many ranks share the store that `BEATS` is the limit."""


@dataclass(frozen=True)
class Timeouts:
    """How long ranks wait for one another, in seconds.

    Attributes:
        timeout: for a message of another rank, where the caller gives no other.
        silence: without a heartbeat of a rank, after which it counts as dead.
    """

    timeout: float = 1800.0
    silence: float = 60.0

    @property
    def decision(self) -> float:
        """Seconds to wait for the coordinator, which may itself be late and then wait for yet another rank."""
        return 2 * self.timeout + self.silence

    def interval(self, size: int) -> float:
        """Seconds between two heartbeats of one rank in a team of ``size``."""
        return max(min(self.silence / 6, SLOWEST), size / BEATS)

    def quiet(self, size: int) -> float:
        """Seconds of silence after which a rank in a team of ``size`` counts as dead: four intervals at least."""
        return max(self.silence, 4 * self.interval(size))


def heartbeat_key(rank: int) -> str:
    """The key of a rank's heartbeat in the store."""
    return f"beat/{rank}"


class HeartbeatMonitor:
    """Finds dead ranks during one wait.

    Args:
        timeouts: how long a rank may be silent.
        size: number of ranks of the team.
    """

    def __init__(self, client: StoreClient, timeouts: Timeouts, size: int) -> None:
        self._client, self._interval, self._limit = client, timeouts.interval(size), timeouts.quiet(size)
        self._last = time.monotonic()
        self._known = dict(client.silent)  # looked at at once: every save in progress waits for dead ranks
        self._beats: dict[int, bytes] = {}
        self._quiet: dict[int, float] = {}

    def look(self, ranks: Collection[int]) -> dict[int, str]:
        """The ranks that are dead or have closed, with the reason for each. Reads the store once per interval at most.

        Raises:
            RankFailed: the store is lost.
        """
        passed = time.monotonic() - self._last
        if passed < self._interval and not self._known.keys() & set(ranks):
            return {}
        self._last += passed
        beats, known, self._known = read_beats(self._client, ranks), self._known, {}
        found = {}
        for rank in ranks:
            beat = beats.get(rank, b"")
            if beat == CLOSED:
                found[rank] = "has closed its Checkpointer"
            elif beat == BROKEN_OFF:
                found[rank] = "goes on without its agent"
            elif known.get(rank) == beat or self._is_quiet(rank, beat, passed):
                found[rank] = f"has given no sign of life for {self._limit:.3g} s"
                self._note(rank, beat, f"rank {rank} {found[rank]}")
        return found

    def _note(self, rank: int, beat: bytes, text: str) -> None:
        new = self._client.silent.get(rank) != beat
        self._client.silent[rank] = beat
        if new and self._client.when_silent is not None:
            self._client.when_silent(text)

    def _is_quiet(self, rank: int, beat: bytes, passed: float) -> bool:
        if beat != self._beats.get(rank):
            self._beats[rank], self._quiet[rank] = beat, 0.0
            return False
        self._quiet[rank] += min(passed, 2 * self._interval)
        return self._quiet[rank] >= self._limit


class LifeCheck:
    """Finds out, without waiting, whether all other ranks of a team live: each of them has given a sign of life since
    this was made, or has closed; or one is dead or has broken off.

    Args:
        rank, size: of this rank and its team.
        timeouts: how long a rank may be silent.
    """

    def __init__(self, client: StoreClient, timeouts: Timeouts, rank: int, size: int) -> None:
        self._client, self._monitor = client, HeartbeatMonitor(client, timeouts, size)
        self._first: dict[int, bytes] = {}
        self._left = [other for other in range(size) if other != rank]
        self._pause, self._next = max(1.0, size / BEATS), 0.0

    def look(self) -> bool | None:
        """True: no other rank is lost; False: one is dead or has broken off, or the store is lost; None: not known yet.

        Reads the store once per second at most, and in large teams more rarely.
        """
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self._pause
        try:
            beats = dict.fromkeys(self._left, b"") | read_beats(self._client, self._left)
            # What is read first may have been stored before this was made. What differs from it was stored since.
            self._left = [r for r, beat in beats.items() if beat != CLOSED and self._first.setdefault(r, beat) == beat]
            lost = BROKEN_OFF in beats.values() or self._monitor.look(self._left)
        except RankFailed:
            return False
        return False if lost else None if self._left else True


def read_beats(client: StoreClient, ranks: Collection[int]) -> dict[int, bytes]:
    """The last heartbeats of these ranks; without those that have given none.

    Raises:
        RankFailed: the store is lost.
    """
    keys = {heartbeat_key(rank): rank for rank in ranks}
    absent = set(client.missing(list(keys)))
    there = [key for key in keys if key not in absent]
    beats = client.get(there) if there else []
    return {keys[key]: beat for key, beat in zip(there, beats, strict=True)}


def has_dead(client: StoreClient) -> bool:
    """Whether the store is lost, or a rank that was found dead has given no sign of life since."""
    silent = dict(client.silent)
    try:
        beats = read_beats(client, silent)
    except RankFailed:
        return True
    return client.lost or any(beats.get(rank, b"") == beat for rank, beat in silent.items())
