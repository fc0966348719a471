"""The coordinator of a two-phase commit: collects the votes, merges the parts, and creates the record.

Where hosts see only their own objects, it also broadcasts the version to the host leaders and waits for their
acknowledgements. `GroupCommit` posts the decision afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from tierstate.engine.ranks.team.team import Stop, Team
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import (
    Damaged,
    FormatError,
    RankFailed,
    RankFull,
    SaveSkipped,
    StateMismatch,
    TierFull,
    format_ranks,
)
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.marker import check_same_tier
from tierstate.manifest.format.record import MAX_RECORD, Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.manifest.sharded.part import PartReader
from tierstate.tiers.base import Tier, read_range
from tierstate.tiers.concurrency import WorkerPool

from .leader import MergedVersions, record_of, remove_record
from .messages import CommitKeys, CommitMessages, PartialCommit, Vote, decode_error, decode_message, encode_message

log = logging.getLogger("tierstate")


PARTS_AT_ONCE = 32
"""Parts that are read in parallel: they are small, and a tier may take long to answer. If so many could not be fetched
from their ranks, no more are tried: each try may take ten seconds."""


UNSETTLED = ("CommitUnknown", "TierUnavailable")
"""Errors of a host leader after which its record may exist all the same."""


class Coordinator:
    """The coordinator's side of one commit.

    Args:
        team: the ranks.
        tier: the tier, from which the ranks' parts are read.
        records: the log, which creates the record.
        merged: the merged versions of this process.
        part: the coordinator's own part.
        stop: called again and again; true cancels the wait.

    Attributes:
        unnamed: by rank, the packs of its part that no record names: of what several ranks gave, one copy counts.
    """

    def __init__(self, team: Team, tier: Tier, records: Log, merged: MergedVersions, part: Record, stop: Stop) -> None:
        self._team, self._tier, self._log, self._merged = team, tier, records, merged
        self._part, self._stop = part, stop
        self._record: Record | None = None
        self._unreached: list[int] = []
        self._holding = False
        self.unnamed: Mapping[int, Sequence[str]] = {}

    def run(self, keys: CommitKeys, messages: CommitMessages) -> Record:
        """Wait for all votes, merge the parts to one version, and have all records of it created.

        Returns:
            The record that this rank created.

        Raises:
            TierstateError: the version is not committed; as `GroupCommit.commit`.
        """
        parts = self._parts(keys, messages)
        messages.all_voted = max(messages.all_voted, keys.seq)
        version, rows = self._merged.merge(keys.seq, [part.version for part in parts])
        layouts = [part.layout for part in parts]
        del parts  # all shards are in the version: of ten thousand ranks they may take gigabytes
        self.unnamed = {r: packs for r, layout in enumerate(layouts) if (packs := unnamed_packs(layout, rows[r]))}
        if self._tier.traits.shared == "site":
            return self._create(version, range(len(layouts)), layouts, rows)
        every = self._team.leaders(self._tier.traits.shared)
        leaders = [rank for rank in every if rank]
        if leaders:
            if self._merged.relay is not None:
                self._merged.relay.serve(every)
            messages.post(keys, keys.version, version.data)
            messages.post(keys, keys.version_id, encode_message({"id": version.id}))
        record = self._create(version, self._team.ranks_sharing(self._tier.traits.shared), layouts, rows)
        self._confirm(leaders, keys)
        return record

    def undo(self, error: BaseException) -> BaseException:
        """Delete the record that this rank created, since the commit has failed. Returns: as `remove_record`."""
        return error if self._record is None else remove_record(self._log, self._record, error)

    def _create(
        self, version: Version, ranks: Sequence[int], layouts: Sequence[Layout], rows: Sequence[Array]
    ) -> Record:
        record = record_of(version, [(rows[r], layouts[r]) for r in ranks], self._part.commit)
        self._log.commit(record)
        self._record = record
        return record

    def _confirm(self, leaders: Sequence[int], keys: CommitKeys) -> None:
        """Wait until all host leaders have acknowledged that their record is created.

        Raises:
            PartialCommit: a leader failed, died or is late.
        """
        try:
            acknowledged = self._team.receive_all(dict.fromkeys(leaders, keys.acknowledgement), stop=self._stop)
        except RankFailed as error:
            raise PartialCommit(str(error), error.ranks, error.ranks) from error
        heads = {r: decode_message(data, f"the acknowledgement of rank {r}")[0] for r, data in acknowledged.items()}
        found = {rank: head.get("error") for rank, head in heads.items()}
        errors = {rank: error for rank, error in found.items() if error is not None}
        if errors:
            unsettled = [rank for rank, error in errors.items() if error.get("kind") in UNSETTLED]
            raise PartialCommit(
                f"{format_ranks(errors)} could not create the record: {_why(errors)}", sorted(errors), unsettled
            )

    # Votes

    def _parts(self, keys: CommitKeys, messages: CommitMessages) -> list[Record]:
        """The parts of all ranks.

        Raises:
            RankFailed: a rank is dead or late, or has voted no.
            StateMismatch: the parts are not of one version.
        """
        fetch, reader = partial(self._fetch, keys, messages), PartReader(self._merged.pieces)
        found: dict[int, Record | None] = {0: self._part}
        found |= self._collect(dict.fromkeys(range(1, self._team.size), keys.vote), fetch, reader)
        missing = [rank for rank, part in found.items() if part is None]
        if missing:
            text = "%s: the parts of %s cannot be fetched from there, so they go through the tier from now on"
            log.warning(text, self._tier.name, format_ranks(missing))
        if self._holding:
            messages.post(keys, keys.fetched, encode_message({"missing": missing}))
        found |= self._collect(dict.fromkeys(missing, keys.second_vote), fetch, reader)
        parts = [part for part in found.values() if part is not None]
        if len(parts) < len(found):
            raise RankFailed(f"{format_ranks(missing)} gave no part through the tier", missing)
        return parts

    def _collect(
        self,
        keys: Mapping[int, str],
        fetch: Callable[[tuple[int, Vote]], bytes | memoryview | None],
        reader: PartReader,
    ) -> dict[int, Record | None]:
        """The parts of these ranks, as their votes under these keys say; None where one cannot be fetched.

        Raises: as `_parts`.
        """
        found, refused = dict[int, Record | None](), dict[int, Vote]()
        votes = self._team.receive_each(keys, stop=self._stop)
        with WorkerPool(PARTS_AT_ONCE, "tierstate-parts") as pool:
            while cast := {rank: Vote.decode(data, rank) for rank, data in islice(votes, PARTS_AT_ONCE)}:
                refused |= {rank: vote for rank, vote in cast.items() if vote.said != "yes"}
                if not refused:
                    call = pool.map if len(cast) > 1 else map
                    for rank, data in zip(cast, call(fetch, cast.items()), strict=True):
                        found[rank] = None if data is None else self._checked(rank, reader.decode(data))
        if refused:
            raise _refusal(refused)
        return found

    def _fetch(self, keys: CommitKeys, messages: CommitMessages, cast: tuple[int, Vote]) -> bytes | memoryview | None:
        """The part of a rank as bytes; None if the rank keeps it and cannot be reached."""
        rank, vote = cast
        if vote.object is not None:
            return self._from_tier(rank, vote.object)
        data = vote.part if vote.held is None else self._from_rank(keys, rank, vote.held)
        return None if data is None else messages.authentic(keys, rank, vote, data)

    def _from_tier(self, rank: int, about: Mapping[str, Any]) -> bytes:
        key, nbytes = about.get("key"), about.get("bytes")
        if not isinstance(key, str) or not isinstance(nbytes, int) or not 0 < nbytes <= MAX_RECORD:
            raise FormatError(f"the vote of rank {rank} names a part of {nbytes!r:.40} bytes at {key!r:.80}")
        data = to_bytes(read_range(self._tier, key, 0, nbytes))
        if checksum(data).hex() != about.get("sum"):
            raise Damaged(
                f"{self._tier.name}: {key}: the part of rank {rank} is not what was written: its checksum differs"
            )
        return data

    def _from_rank(self, keys: CommitKeys, rank: int, held: Mapping[str, Any]) -> memoryview | None:
        at, nbytes, name = (held.get(key) for key in ("at", "bytes", "sum"))
        right = type(nbytes) is int and 0 < nbytes <= MAX_RECORD
        if not (right and isinstance(at, str) and isinstance(name, str)):
            raise FormatError(f"the vote of rank {rank} names a part of {nbytes!r:.40} bytes at {at!r:.80}")
        self._holding, relay = True, self._merged.relay
        if relay is None or len(self._unreached) >= PARTS_AT_ONCE:
            return None
        data = relay.fetch_part(held, keys.seq, self._stop)
        if data is None:
            self._unreached.append(rank)
        return data

    def _checked(self, rank: int, part: Record) -> Record:
        mine, theirs = self._part.version.head, part.version.head
        for name in ("run", "seq", "step"):
            if (ours := getattr(mine, name)) != (its := getattr(theirs, name)):
                raise StateMismatch(f"rank {rank} gave a part of {name} {its!r}, where rank 0 saves {name} {ours!r}")
        if others := set(part.version.shard_rank.tolist()) - {rank}:
            raise FormatError(f"rank {rank} gave a part with shards of {format_ranks(others)}; right are its own")
        if self._tier.traits.shared == "site":
            check_same_tier(self._tier.name, self._part.commit, part.commit, rank)
        return part


def unnamed_packs(layout: Layout, rows: Array) -> list[str]:
    """The packs of a part of which nothing is used, since other ranks' copies of its chunks are kept.

    Args:
        layout: of the part.
        rows: ``(chunks,)``: the row of each chunk in the whole version, or -1 for one whose copy is kept.
    """
    used = (rows >= 0) & layout.present
    if used[layout.present].all():
        return []
    named = {*layout.object[used].tolist(), *layout.base_object[used].tolist()}
    return [key for number, key in enumerate(layout.objects) if number not in named]


def _refusal(refused: Mapping[int, Vote]) -> RankFailed:
    """The error of a commit that fails: because of the ranks that voted no, or else of those that skip the save."""
    failed = {rank: vote.error or {} for rank, vote in refused.items() if vote.said == "no"}
    if failed:
        full = all(error.get("kind") == TierFull.__name__ for error in failed.values())
        return (RankFull if full else RankFailed)(f"{format_ranks(failed)} failed: {_why(failed)}", sorted(failed))
    return SaveSkipped(f"{format_ranks(refused)} left this save out", sorted(refused))


def _why(errors: Mapping[int, Mapping[str, Any]]) -> str:
    """The first four errors, for a message that has named the ranks; of several each with its rank."""
    told = {rank: _text(rank, error) for rank, error in list(errors.items())[:4]}
    return "; ".join(told.values() if len(told) == 1 else (f"rank {rank}: {text}" for rank, text in told.items()))


def _text(rank: int, error: Mapping[str, Any]) -> str:
    text, own = str(decode_error(error)), f"rank {rank} failed: "
    # Of an error whose class other ranks do not know, `encode_error` has put the rank and the class before the text.
    return text.removeprefix(own) if text.startswith(own) else f"{error.get('kind')}: {text}"
