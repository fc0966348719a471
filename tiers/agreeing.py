"""Agreeing: what all ranks of a team know alike of the run that they save: the next number, and which tiers are due."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from tierstate.manifest.errors import PolicyError, TierstateError
from tierstate.manifest.head import Head

from .placement import Last, due
from .policy import Policy
from .shelf import Shelf
from .team import Team

log = logging.getLogger("tierstate")


class Agreed(NamedTuple):
    """What the tiers hold as the team begins.

    Attributes:
        seq: the highest number that any rank finds in any tier.
        last: by tier, step and time of the newest version that any rank finds there.
    """

    seq: int
    last: dict[str, Last | None]


def compare(team: Team, policy: Policy) -> None:
    """Make sure that all ranks save alike, before any tier is opened; waits for all of them.

    Raises:
        PolicyError: they do not, so that some would wait for what others never give; on every rank.
        RankFailed: one does not answer.
    """
    mine: dict[str, Any] = {"chunk": policy.chunk, "digest": policy.digest}
    mine |= {"tiers": [f"{tier.name}: every {tier.every}" for tier in policy.tiers]}
    mine |= {"rules": [f"{rule.match}: {rule.tiers}, lossy {rule.lossy}" for rule in policy.rules]}
    first, *others = (json.loads(said) for said in team.gather("policy", json.dumps(mine).encode()))
    for rank, theirs in enumerate(others, 1):
        if differ := [key for key in first if theirs.get(key) != first[key]]:
            told = "; ".join(f"{key} {theirs.get(key)!r:.400} where rank 0 has {first[key]!r:.400}" for key in differ)
            raise PolicyError(f"the policy of rank {rank} is not that of rank 0: {told}; right is the same for all")


def agree(team: Team, shelves: Sequence[Shelf], highest: Callable[[Shelf], int]) -> Agreed:
    """Have all ranks begin alike; waits for all of them.

    Raises:
        RankFailed: one does not answer.
    """
    seen = {shelf.name: _newest(shelf) for shelf in shelves}
    mine = {"seq": max(map(highest, shelves), default=0), "newest": seen}
    every = [json.loads(said) for said in team.gather("opening", json.dumps(mine).encode())]
    newest: dict[str, list[float]] = {name: max((said["newest"][name] for said in every), default=[]) for name in seen}
    last = {name: (int(found[1]), float(found[2])) if found else None for name, found in newest.items()}
    return Agreed(max(int(said["seq"]) for said in every), last)


def _newest(shelf: Shelf) -> list[float]:
    """Number, step and time of the newest version; nothing where there is none."""
    try:
        newest = shelf.newest()
    except TierstateError as error:
        log.warning("%s: its log cannot be read: %s", shelf.name, error)
        return []
    head = newest.version.head if newest else None
    return [head.seq, head.step, head.time] if head else []


class Dues:
    """Decides which tiers are due, alike on all ranks: where steps decide, each for itself; where time does, the
    coordinator for all.

    Args:
        team: the ranks.
        policy: the cadences.
        last: what went to each tier last.
    """

    def __init__(self, team: Team, policy: Policy, last: Mapping[str, Last | None]) -> None:
        self._team, self._policy, self._last = team, policy, dict(last)
        self._timed = any(isinstance(tier.every, timedelta) for tier in policy.tiers)
        self._latest: tuple[int, tuple[str, ...]] = (-1, ())

    def of(self, seq: int, step: int, time: float) -> tuple[str, ...]:
        """The tiers to which a save goes. They count as visited, whatever becomes of it.

        Raises:
            RankFailed: the coordinator does not say.
        """
        if self._latest[0] != seq:
            names = self._decide(seq, step, time)
            self._last |= dict.fromkeys(names, (step, time))
            self._latest = seq, names
        return self._latest[1]

    def known(self, seq: int) -> tuple[str, ...] | None:
        """What `of` said of a save, if it was asked last."""
        return self._latest[1] if self._latest[0] == seq else None

    def missed(self, seq: int) -> tuple[str, ...] | None:
        """The same where this rank gives nothing: nobody is to wait for what it would have said of it.

        Raises:
            RankFailed: it could not be said.
        """
        if self._latest[0] != seq and self._timed and self._team.coordinator:
            self._latest = seq, tuple(tier.name for tier in self._policy.tiers)
            self._team.say(due_key(seq), json.dumps(self._latest[1]).encode())
        return self.known(seq)

    def _decide(self, seq: int, step: int, time: float) -> tuple[str, ...]:
        if self._timed and not self._team.coordinator:
            named = set(json.loads(self._team.hear(0, due_key(seq))))
            return tuple(tier.name for tier in self._policy.tiers if tier.name in named)
        names = due(self._policy, step, self._last, time)
        if self._timed:
            self._team.say(due_key(seq), json.dumps(names).encode())
        return names


def due_key(seq: int) -> str:
    """What the coordinator says which tiers are due under."""
    return f"due/{seq}"


def head_for(team: Team, head: Head) -> Head:
    """The head of this rank's part of a version."""
    return Head(**{**head.encode(), "world": team.size})
