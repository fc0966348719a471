"""Ballots: the keys under which ranks speak of one commit, and when each may be forgotten."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from tierstate.manifest.errors import RankFailed

from .team import Team
from .verdict import Divided, pack, told

KEPT = 8
"""Verdicts that stay for ranks that come late: who votes on a later one has long heard, or given up."""


@dataclass(eq=False)
class Ballot:
    """One vote on one version for one tier.

    Attributes:
        seq: the version's number.
        base: how its keys begin.
        settled: whether the verdict was given, or heard.
        said: keys under which this rank has said something.
    """

    seq: int
    base: str
    settled: bool = False
    said: list[str] = field(default_factory=list)

    @property
    def vote(self) -> str:
        """What each rank says."""
        return f"{self.base}/vote"

    @property
    def whole(self) -> str:
        """What the coordinator says to leaders: the version's id; nothing where there is none."""
        return f"{self.base}/whole"

    @property
    def version(self) -> str:
        """The version itself."""
        return f"{self.base}/version"

    @property
    def made(self) -> str:
        """What each leader says of the record that it was to create."""
        return f"{self.base}/made"

    @property
    def verdict(self) -> str:
        """What becomes of it."""
        return f"{self.base}/verdict"


class Ballots:
    """The ballots of one rank about one tier, one after the other."""

    def __init__(self, team: Team, name: str) -> None:
        self._team, self._name = team, name
        self._open: deque[Ballot] = deque()
        self._lock = threading.RLock()  # a save is left out by one thread while another one waits for a verdict
        self.heard = -1
        """A number on which all ranks have voted yes, and before that have heard all verdicts on lower ones."""

    def next(self, seq: int) -> Ballot:
        """The next vote on a number. All ranks count alike, since each takes part in every vote."""
        with self._lock:
            return self._next(seq)

    def _next(self, seq: int) -> Ballot:
        self.clear()
        base = f"{self._name}/{seq}"
        ballot = Ballot(seq, f"{base}.{self._team.turn(base)}")
        self._open.append(ballot)
        return ballot

    def say(self, ballot: Ballot, key: str, data: bytes) -> None:
        """Say something of a ballot, until it is over.

        Raises:
            RankFailed: the store is lost.
        """
        ballot.said.append(key)
        self._team.say(key, data)

    def pronounce(self, ballot: Ballot, error: BaseException | None) -> None:
        """Give the verdict; the coordinator's alone.

        Raises:
            RankFailed: the store is lost.
        """
        unsettled = list(error.unsettled) if isinstance(error, Divided) else []
        reason = None if error is None else told(error, self._team.rank)
        if error is not None and ballot.whole not in ballot.said:
            self.say(ballot, ballot.whole, b"")  # leaders wait for this first
        self.say(ballot, ballot.verdict, pack({"error": reason, "unsettled": unsettled}))
        ballot.settled = True
        if error is None and ballot.version in ballot.said:
            self._team.forget([ballot.whole, ballot.version])  # it is long, and all leaders have heard it
            ballot.said = [ballot.verdict]

    def clear(self) -> None:
        """Forget what nobody needs any more. A vote stays until it was read: its reader knows that it is there."""
        with self._lock, suppress(RankFailed):  # the store is lost, as the next question finds out, too
            for later, ballot in reversed(list(enumerate(reversed(self._open)))):
                if (later >= KEPT and ballot.seq < self.heard) or self._is_over(ballot):
                    self._open.remove(ballot)
                    self._team.forget(ballot.said)

    def _is_over(self, ballot: Ballot) -> bool:
        """Whether what this rank said of a ballot was heard; a verdict may be heard late."""
        if self._team.coordinator:
            return False
        return ballot.settled or self._team.has_said(0, ballot.verdict)
