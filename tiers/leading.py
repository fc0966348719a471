"""Leading: the lowest of the ranks that see the same objects creates the record of their parts for all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tierstate.manifest.columns import Array
from tierstate.manifest.errors import CommitUnknown, FormatError, RankFailed, TierError, TierstateError
from tierstate.manifest.join import join
from tierstate.manifest.log import Log
from tierstate.manifest.merge import placed
from tierstate.manifest.part import PartReader
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .ballot import Ballot, Ballots
from .minutes import Minutes
from .team import Stop, Team
from .verdict import Vote, pack, told, unpack

log = logging.getLogger("tierstate")


class Leading:
    """One commit, as a leader that is not the coordinator has to do with it.

    Attributes:
        record: what was created; None where nothing was.
        error: why not.
    """

    def __init__(self, team: Team, records: Log, minutes: Minutes, sight: Sequence[int], stop: Stop) -> None:
        self._team, self._log, self._minutes, self._sight, self._stop = team, records, minutes, sight, stop
        self.record: Record | None = None
        self.error: BaseException | None = None

    def follow(self, part: Record, ballot: Ballot, ballots: Ballots) -> None:
        """Hear the whole version, create the record, and say what came of it.

        Raises:
            RankFailed: the coordinator is lost.
        """
        try:
            said = self._team.hear(0, ballot.whole, timeout=self._team.terms.verdict, stop=self._stop)
            if not said:
                return  # there will be none: the verdict says why
            version = self._version(said, ballot)
            record = self._record(version, part, ballot)
            self._log.commit(record)
            self.record = record
        except RankFailed as error:
            if not self._is_over(ballot):
                self._answer(ballot, ballots, error)
                raise
        except BaseException as error:  # whatever it is, the others must be told, and wait for no answer
            self.error = error
            self._answer(ballot, ballots, error)
        else:
            self._answer(ballot, ballots, None)

    def _answer(self, ballot: Ballot, ballots: Ballots, error: BaseException | None) -> None:
        answer = {"error": None if error is None else told(error, self._team.rank)}
        ballots.say(ballot, ballot.made, pack(answer))

    def _is_over(self, ballot: Ballot) -> bool:
        """Whether the verdict is there already: then others wait for nothing that this rank may yet do."""
        return self._team.has_said(0, ballot.verdict)

    def undo(self, error: TierstateError) -> BaseException:
        """The verdict was against it: the record that was created here goes, as its version is not whole.

        Returns:
            What this rank is to be told: why there is no version, or that its record could not be removed.
        """
        if self.record is None or isinstance(error, CommitUnknown):
            return self.error or error
        return self.error or undone(self._log, self.record, error)

    def _version(self, said: bytes, ballot: Ballot) -> Version:
        head, _ = unpack(said, "what rank 0 says of the version")
        known = self._minutes.known(ballot.seq)
        if known is not None and known.id == head.get("id"):
            return known
        version = Version.decode(memoryview(self._team.hear(0, ballot.version, stop=self._stop)))
        if version.id != head.get("id"):
            raise FormatError(f"rank 0 gave version {version.id} where it said {head.get('id')!r:.40}")
        self._minutes.learn(version)
        return version

    def _record(self, version: Version, part: Record, ballot: Ballot) -> Record:
        """The whole version, and where the parts of those that see what this rank sees lie."""
        parts, reader = [part], PartReader()
        for rank in self._sight[1:]:  # all there, as the coordinator has read them; but forgotten after the verdict
            vote = self._team.hear(rank, ballot.vote, stop=lambda: self._stop() or self._is_over(ballot))
            parts.append(reader.decode(Vote.decode(vote, rank).part))
        return record_of(version, [(placed(version, p.version), p) for p in parts], part.commit)


def record_of(version: Version, parts: Sequence[tuple[Array, Record]], commit: Mapping[str, Any]) -> Record:
    """The record of a whole version, with what these parts have of it; each with the rows its chunks became."""
    return Record(version, join(version, [(rows, part.layout) for rows, part in parts]), commit)


def undone(records: Log, record: Record, error: BaseException) -> BaseException:
    """Delete a record that was created here, of a version that came to nothing.

    Returns:
        Why it came to nothing; or, where the record stays, that: then nothing that it names may be deleted.
    """
    seq = record.version.head.seq
    try:
        records.forget(seq)
    except TierError as second:
        name = records.tier.name
        log.warning("%s: the record of version %d, which is not whole, could not be removed: %s", name, seq, second)
        return CommitUnknown(f"{name}: the record of version {seq}, of which not all parts are there, stays: {error}")
    return error
