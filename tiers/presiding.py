"""Presiding: what the coordinator does between the votes and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.manifest.columns import Array
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import Damaged, FormatError, RankFailed, StateMismatch
from tierstate.manifest.log import Log
from tierstate.manifest.part import PartReader
from tierstate.manifest.record import MAX_RECORD, Record
from tierstate.manifest.version import Version

from .ballot import Ballot, Ballots
from .base import Range, Tier
from .heartbeat import named
from .leading import record_of, undone
from .minutes import Minutes
from .team import Stop, Team
from .verdict import Divided, LeftOut, Vote, heard, pack, unpack

AT_ONCE = 32
"""Parts that are read together: they are small, and a store may take long to answer."""

UNSURE = ("CommitUnknown", "TierUnavailable")
"""Errors of a leader after which its record may exist all the same."""


class Presiding:
    """One commit, as the coordinator has to do with it.

    Args:
        part: his own.
    """

    def __init__(self, team: Team, tier: Tier, records: Log, minutes: Minutes, part: Record, stop: Stop) -> None:
        self._team, self._tier, self._log, self._minutes = team, tier, records, minutes
        self._part, self._stop = part, stop
        self._record: Record | None = None

    def run(self, ballot: Ballot, ballots: Ballots) -> Record:
        """Wait for all votes, make one version of the parts, and have all records of it created.

        Returns:
            The record that was created here.

        Raises:
            TierstateError: it is not committed; as `Council.commit`.
        """
        parts = [self._part, *self._parts(ballot)]
        ballots.heard = max(ballots.heard, ballot.seq)
        version, rows = self._minutes.whole(ballot.seq, [part.version for part in parts])
        if self._tier.traits.shared == "site":
            return self._create(version, range(len(parts)), parts, rows)
        leaders = [rank for rank in self._team.leaders(self._tier.traits.shared) if rank]
        if leaders:
            ballots.say(ballot, ballot.version, version.data)
            ballots.say(ballot, ballot.whole, pack({"id": version.id}))
        record = self._create(version, self._team.sight(self._tier.traits.shared), parts, rows)
        self._confirm(leaders, ballot)
        return record

    def undo(self, error: BaseException) -> BaseException:
        """It failed: what was created here is of a version that is not whole. Returns: as `undone`."""
        return error if self._record is None else undone(self._log, self._record, error)

    def _create(self, version: Version, ranks: Sequence[int], parts: Sequence[Record], rows: Sequence[Array]) -> Record:
        record = record_of(version, [(rows[r], parts[r]) for r in ranks], self._part.commit)
        self._log.commit(record)
        self._record = record
        return record

    def _confirm(self, leaders: Sequence[int], ballot: Ballot) -> None:
        """Wait until all leaders have created theirs.

        Raises:
            Divided: one has not.
        """
        try:
            answers = self._team.hear_all(dict.fromkeys(leaders, ballot.made), stop=self._stop)
        except RankFailed as error:
            raise Divided(str(error), error.ranks, error.ranks) from error
        found = {r: unpack(said, f"the answer of rank {r}")[0].get("error") for r, said in answers.items()}
        errors = {rank: error for rank, error in found.items() if error is not None}
        if errors:
            unsure = [rank for rank, error in errors.items() if error.get("kind") in UNSURE]
            raise Divided(f"{named(errors)} could not create the record: {_why(errors)}", sorted(errors), unsure)

    # Votes

    def _parts(self, ballot: Ballot) -> Iterator[Record]:
        """The parts of all other ranks, by rank, once all have given one.

        Raises:
            RankFailed: one is dead or late, or gave none.
            StateMismatch: they are not of one version.
        """
        reader, refused = PartReader(), dict[int, Vote]()
        votes = self._team.hearing({r: ballot.vote for r in range(1, self._team.size)}, stop=self._stop)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tierstate-parts") as pool:
            while cast := {rank: Vote.decode(data, rank) for rank, data in islice(votes, AT_ONCE)}:
                refused |= {rank: vote for rank, vote in cast.items() if vote.said != "yes"}
                if not refused:
                    call = pool.map if len(cast) > 1 else map
                    for rank, data in zip(cast, call(self._fetch, cast, cast.values()), strict=True):
                        yield self._checked(rank, reader.decode(data))
        if refused:
            raise _refusal(refused)

    def _fetch(self, rank: int, vote: Vote) -> bytes:
        if vote.object is None:
            return vote.part
        key, nbytes = vote.object.get("key"), vote.object.get("bytes")
        if not isinstance(key, str) or not isinstance(nbytes, int) or not 0 < nbytes <= MAX_RECORD:
            raise FormatError(f"the vote of rank {rank} names a part of {nbytes!r:.40} bytes at {key!r:.80}")
        out = empty_buffer(nbytes)
        self._tier.read(key, [Range(0, out)])
        data = to_bytes(out)
        if checksum(data).hex() != vote.object.get("sum"):
            raise Damaged(
                f"{self._tier.name}: {key}: the part of rank {rank} is not what was written: its checksum differs"
            )
        return data

    def _checked(self, rank: int, part: Record) -> Record:
        mine, theirs = self._part.version.head, part.version.head
        for name in ("run", "seq", "step"):
            if (ours := getattr(mine, name)) != (its := getattr(theirs, name)):
                raise StateMismatch(f"rank {rank} gave a part of {name} {its!r}, where rank 0 saves {name} {ours!r}")
        if others := set(part.version.shard_rank.tolist()) - {rank}:
            raise FormatError(f"rank {rank} gave a part with shards of {named(others)}; right are its own")
        return part


def _refusal(refused: Mapping[int, Vote]) -> RankFailed:
    """Why there is no version, as all ranks are told."""
    failed = {rank: vote.error or {} for rank, vote in refused.items() if vote.said == "no"}
    if failed:
        return RankFailed(f"{named(failed)} failed: {_why(failed)}", sorted(failed))
    return LeftOut(f"{named(refused)} left this save out", sorted(refused))


def _why(errors: Mapping[int, Mapping[str, Any]]) -> str:
    """The first few errors, for people."""
    every = [f"rank {rank}: {error.get('kind')}: {heard(error)}" for rank, error in list(errors.items())[:4]]
    return "; ".join(every)
