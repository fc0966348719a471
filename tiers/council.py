"""The council: the ranks of a team commit one version to one tier together, or not at all.

Two phases. Every rank *votes*: with its part, a record of what it has put there, or with why it has none. The
coordinator waits for all votes, makes one version of the parts, and creates the record; where hosts or processes see
objects of their own, he has the lowest rank of each create one, too. Then he gives the *verdict*, for which all wait.

A rank that fails, dies or is late fails the commit for all, and never makes a smaller version. Between a rank's vote
and the verdict nobody but the coordinator knows: where he is lost in between, it is `CommitUnknown`, and all stays.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import CommitUnknown, RankFailed, TierError
from tierstate.manifest.log import Log
from tierstate.manifest.part import encode_part
from tierstate.manifest.record import Record

from .ballot import Ballot, Ballots
from .base import Tier
from .leading import Leading
from .minutes import Minutes
from .part_keys import part_key
from .presiding import Presiding
from .team import Stop, Team, never
from .verdict import LeftOut, Vote, heard, told, unpack

log = logging.getLogger("tierstate")


class Council:
    """The ranks of a team about one tier. Every rank has one for each tier, and asks it for one save after the other.

    Args:
        team: the ranks.
        shelf_name: the tier's name: what is said is told apart by it.
        tier: where parts go that all can read.
        log: where records are created.
        minutes: of this process, for all its tiers.
    """

    def __init__(self, team: Team, shelf_name: str, tier: Tier, log: Log, minutes: Minutes) -> None:
        self._team, self._name, self._tier, self._log, self._minutes = team, shelf_name, tier, log, minutes
        self._ballots = Ballots(team, shelf_name)

    def commit(self, part: Record, stop: Stop = never) -> Record:
        """Vote with a part, and wait for what becomes of it. Where this fails before the vote, it withdraws by itself.

        Args:
            part: what this rank has put into the tier.
            stop: asked all the time: whether to give up.

        Returns:
            The record that this rank created; where it creates none, the part.

        Raises:
            RankFailed: it was not committed, because of these ranks.
            CommitUnknown: it may have been committed; nothing may be deleted.
            StateMismatch: it was not committed: the parts do not make one version.
            TierstateError: it was not committed: as `Log.commit`, by whoever created the record.
        """
        ballot = self._ballots.next(part.version.head.seq)
        try:
            if self._team.coordinator:
                return self._preside(part, ballot, stop)
            return self._take_part(part, ballot, stop)
        finally:
            self._ballots.clear()

    def withdraw(self, seq: int, error: BaseException, left_out: bool = False) -> None:
        """Vote no, and wait for nobody: this rank has no part in a version, so no rank shall have one.

        Args:
            error: why.
            left_out: it is not a failure; this save is not made.
        """
        self._withdraw(self._ballots.next(seq), error, left_out)

    def _withdraw(self, ballot: Ballot, error: BaseException, left_out: bool = False) -> None:
        rank = self._team.rank
        try:
            if self._team.coordinator:
                self._ballots.pronounce(ballot, _as_others_see(error, left_out))
            else:
                vote = Vote("left out" if left_out else "no", error=told(error, rank))
                self._ballots.say(ballot, ballot.vote, vote.encode())
        except RankFailed as second:
            said = "%s: the other ranks could not be told that version %d is not saved: %s"
            log.warning(said, self._name, ballot.seq, second)

    # The coordinator

    def _preside(self, part: Record, ballot: Ballot, stop: Stop) -> Record:
        presiding = Presiding(self._team, self._tier, self._log, self._minutes, part, stop)
        try:
            record = presiding.run(ballot, self._ballots)
        except BaseException as error:
            left = presiding.undo(error)
            try:
                self._ballots.pronounce(ballot, left)
            except RankFailed as second:
                left.add_note(f"and the other ranks could not be told: {second}")
            if left is error:
                raise
            raise left from error
        try:
            self._ballots.pronounce(ballot, None)
        except RankFailed as error:
            log.warning("%s: version %d is committed, but others could not be told: %s", self._name, ballot.seq, error)
        return record

    # The others

    def _take_part(self, part: Record, ballot: Ballot, stop: Stop) -> Record:
        try:
            vote = self._vote(part)
        except BaseException as error:
            self._withdraw(ballot, error)
            raise
        leading = self._leading(stop)
        try:
            self._ballots.say(ballot, ballot.vote, vote.encode())
            if leading is not None:
                leading.follow(part, ballot, self._ballots)
            said = self._team.hear(0, ballot.verdict, timeout=self._team.terms.verdict, stop=stop)
            verdict, _ = unpack(said, "the verdict of rank 0")
        except Exception as error:
            raise CommitUnknown(
                f"{self._name}: version {ballot.seq} of run {part.version.head.run!r} may or may not be committed, "
                f"since rank 0 was not heard to say so: {error}; nothing was deleted"
            ) from error
        ballot.settled = True
        if vote.object is not None:
            self._remove(str(vote.object["key"]))
        return self._obey(verdict, part, leading)

    def _vote(self, part: Record) -> Vote:
        """A vote with this part, which goes through the tier where all can read it there."""
        head, data = part.version.head, encode_part(part)
        if self._tier.traits.shared != "site":
            return Vote("yes", part=data)
        key = part_key(head.run, head.seq, self._team.rank)
        self._tier.put(key, as_buffer(data))
        return Vote("yes", {"key": key, "bytes": len(data), "sum": checksum(data).hex()})

    def _leading(self, stop: Stop) -> Leading | None:
        """What this rank has to create; None where another one does it."""
        shared = self._tier.traits.shared
        if shared == "site" or not self._team.leads(shared):
            return None
        return Leading(self._team, self._log, self._minutes, self._team.sight(shared), stop)

    def _obey(self, verdict: Mapping[str, Any], part: Record, leading: Leading | None) -> Record:
        said = verdict.get("error")
        if said is None:
            return part if leading is None or leading.record is None else leading.record
        error = heard(said)
        if leading is not None:
            raise leading.undo(error)
        shared = self._tier.traits.shared
        if shared != "site" and self._team.sight(shared)[0] in (verdict.get("unsettled") or ()):
            raise CommitUnknown(f"{self._name}: a version that is not whole may have a record here: {error}") from error
        raise error

    def _remove(self, key: str) -> None:
        try:
            self._tier.delete(key)
        except TierError as error:
            log.info("%s: %s is left to the sweep: %s", self._name, key, error)


def _as_others_see(error: BaseException, left_out: bool) -> RankFailed:
    """What kept the coordinator from saving, as it is told to the others."""
    if left_out:
        return LeftOut("rank 0 left this save out", (0,))
    return RankFailed(f"rank 0 failed: {type(error).__name__}: {error}", (0,))
