"""Shelves in a team: one run in one tier, of which several ranks commit one version together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from types import MappingProxyType

from tierstate.manifest.errors import RankFailed, TierstateError
from tierstate.manifest.log import Log
from tierstate.manifest.part import part_of
from tierstate.manifest.record import Record
from tierstate.manifest.retention import Decision, Keep

from .base import Tier
from .council import Council
from .minutes import Minutes
from .shelf import Shelf, Stop
from .team import Team

log = logging.getLogger("tierstate")

REMEMBERED = 4096
"""Numbers of committed versions that a rank which drops none of them remembers."""


class RankedShelf(Shelf):
    """One run in one tier, as one rank of a team has it. What others commit there for it is told by the council.

    Args:
        team: the ranks.
        minutes: what the councils of all tiers share.
        tier, run, keep, rules: as for `Shelf`.
    """

    together = True

    def __init__(
        self,
        team: Team,
        minutes: Minutes,
        tier: Tier,
        run: str,
        keep: Keep | None = None,
        rules: Mapping[str, Keep] = MappingProxyType({}),
    ) -> None:
        super().__init__(tier, run, keep, rules)
        shared = tier.traits.shared
        self.rank, self.leads = team.rank, team.leads(shared)
        self.whole = len(team.sight(shared)) == team.size
        self.alone = self.whole and team.coordinator
        self._minutes, self._coordinator = minutes, team.coordinator
        self._council = Council(team, tier.name, tier, _Checked(self), minutes)
        self._there: dict[int, None] = {}
        self._asked = -1
        self._withdrawn: dict[int, None] = {}
        self._speaking = threading.Lock()
        self._cut: tuple[Record, Record] | None = None

    @property
    def earlier(self) -> Record | None:
        newest = self.newest()
        if newest is None:
            return None
        if self._cut is None or self._cut[0] is not newest:
            self._cut = newest, part_of(newest, self.rank)
        return self._cut[1]

    def cut(self, record: Record) -> Record:
        if self._coordinator:
            self._minutes.learn(record.version)  # so that what goes on to slower tiers is the same version there
        return part_of(record, self.rank)

    def publish(self, record: Record, stop: Stop | None = None) -> None:
        """Commit this rank's part of a version, as all others commit theirs; or, without ``stop``, a whole record.

        Raises:
            RankFailed: another rank gave nothing, so that there is no version.
            CommitUnknown: nobody says whether there is one.
            TierstateError: as `Shelf.publish`.
        """
        seq = record.version.head.seq
        if stop is None:
            super().publish(record)
            return
        with self._speaking:
            if seq in self._withdrawn:  # and told to all: a vote after that would wait for a verdict of its own
                raise RankFailed(f"this rank gives nothing to version {seq}", (self.rank,))
            self._asked = seq
        kept = self._council.commit(record, stop)
        self.build_on(kept)
        _note(self._there, seq)
        if self.leads:
            self.retention.add(kept)

    def withdraw(self, seq: int, why: BaseException | str, *, left_out: bool = False) -> None:
        with self._speaking:
            if seq == self._asked or seq in self._withdrawn:
                return  # the council knows
            _note(self._withdrawn, seq)
        error = RankFailed(why) if isinstance(why, str) else why
        try:
            self._council.withdraw(seq, error, left_out=left_out)
        except TierstateError as second:
            log.debug("%s: that nothing comes of version %d could not be told: %s", self.name, seq, second)

    @property
    def known(self) -> Collection[int]:
        return super().known if self.leads else self._there.keys()

    def retire(self, in_use: Collection[int] = (), *, room_for_one: bool = False) -> Decision:
        """As `Shelf.retire`, by one rank for all that see the same objects; others drop nothing."""
        return super().retire(in_use, room_for_one=room_for_one) if self.leads else Decision({}, ())


class _Checked(Log):
    """The log as the council commits to it: what a record builds on must stand."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf.tier, shelf.run)
        self._shelf = shelf

    def commit(self, record: Record, generation: int = 0) -> None:
        self._shelf.create(record)


def _note(seqs: dict[int, None], seq: int) -> None:
    seqs[seq] = None
    if len(seqs) > REMEMBERED:
        del seqs[next(iter(seqs))]
