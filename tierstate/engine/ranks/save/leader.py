"""Host leaders of a two-phase commit, and the merged versions that a process knows.

Where ranks see only the objects of their own host (or process), the lowest rank of each host is its *leader*. It
receives the merged version from the coordinator, creates the record of its host's parts, and acknowledges. A version is
merged once and kept in memory, to however many tiers it is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tierstate.engine.ranks.team.team import Stop, Team
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import CommitUnknown, FormatError, RankFailed, TierError, TierstateError
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import LeafTable
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.manifest.sharded.merge import MergePlan, MergeResult, join_layouts, merge_parts, rows_in_merged
from tierstate.manifest.sharded.part import PartReader
from tierstate.manifest.sharded.state_order import StateOrder, in_state_order

from .messages import CommitKeys, CommitMessages, Vote, decode_message, encode_error, encode_message
from .relay import PATIENCE, VersionRelay

VERSIONS_KEPT = 4
"""Whole versions that are kept in memory; each may take tens of MB."""


IDS_KEPT = 1024
"""Version ids that are kept in memory, since the next version names one as its parent."""


ORDERS_KEPT = 64
"""Versions of which the order of the leaves is kept. One whose save has failed is never merged."""


log = logging.getLogger("tierstate")


class MergedVersions:
    """The merged versions that the commits of a process to all its tiers share.

    Args:
        kept: how many whole versions are kept in memory.

    Attributes:
        relay: by which the leaders of many hosts pass versions on; None: each gets them from rank 0.
        pieces: pieces of the leaf tables of the last parts that were merged, and of those read since, by which parts of
            later saves are known to have the same leaves.
    """

    def __init__(self, kept: int = VERSIONS_KEPT) -> None:
        self._kept = kept
        # Entered in C, as the lock of a `Condition` is not: an interrupt would leave that locked.
        self._lock = threading.RLock()
        self._noted = threading.Condition(self._lock)
        self.relay: VersionRelay | None = None
        self._versions: dict[int, Version] = {}
        self._ids: dict[tuple[int, bool], str] = {}  # by number; True: of what was restored after that number
        self._orders: dict[int, StateOrder] = {}
        self.pieces: dict[bytes, LeafTable] = {}
        self._plan: tuple[MergePlan, StateOrder | None] | None = None

    def continue_from(self, version: str, after: int = 0) -> None:
        """Set the parent of the next version: the id of the version that was restored, or of the run's newest.

        Args:
            after: the number of the newest save so far, which may be merged later, as those before it.
        """
        with self._lock:
            self._ids[after, True] = version

    def sort(self, seq: int, order: StateOrder) -> None:
        """Say in which order the leaves of a version are, that is to be merged; by default as its parts have them."""
        with self._lock:
            last = next(reversed(self._orders.values()), None)
            self._orders[seq] = last if last == order else order  # mostly it is the same, and it may be long
            for old in list(self._orders)[:-ORDERS_KEPT]:
                del self._orders[old]

    def learn(self, version: Version) -> None:
        """Keep a whole version, such as one that is copied from another tier, so that it is not merged again."""
        with self._lock:
            self._note(version)

    def known(self, seq: int) -> Version | None:
        """The whole version with a number; None if it is not kept any more."""
        with self._lock:
            return self._versions.get(seq)

    def wait_for(self, seq: int, version: str, seconds: float) -> Version | None:
        """The whole version with a number and an id; None if it does not come within so many seconds."""

        def there() -> bool:
            return (found := self._versions.get(seq)) is not None and found.id == version

        with self._lock:
            return self._versions[seq] if self._noted.wait_for(there, seconds) else None

    def merge(self, seq: int, parts: Sequence[Version]) -> tuple[Version, Sequence[Array]]:
        """Merge the parts of a version, one of each rank, in the order of the ranks.

        Returns:
            The version, and for each part the version's row of each chunk of the part.

        Raises:
            StateMismatch: the parts do not fit together, or are not of the version that is kept under that number.
        """
        with self._lock:
            version = self._versions.get(seq)
            if version is None:
                merged = self._merge(parts, self._parent(seq), self._orders.get(seq))
                self._note(merged.version)
                return merged.version, merged.rows
            self._note(version)
        return version, [rows_in_merged(version, part) for part in parts]

    def _merge(self, parts: Sequence[Version], parent: str, order: StateOrder | None) -> MergeResult:
        if self._plan is not None and self._plan[1] == order and (again := self._plan[0].again(parts, parent)):
            return again
        self._plan = None  # before the next one is made: it may take gigabytes
        merged = merge_parts(parts, parent=parent)
        merged = merged if order is None else in_state_order(merged, order)
        self._plan = MergePlan(parts, merged), order
        self._drop_pieces(parts)
        return merged

    def _drop_pieces(self, parts: Sequence[Version]) -> None:
        """Keep only the pieces that these parts have: a value whose length changes makes new ones in each save."""
        catalogs = {id(part.catalog): part.catalog for part in parts}.values()
        used = {id(piece) for catalog in catalogs for piece in catalog.pieces}
        # A new dict, of a copy: commits to other tiers may be reading parts.
        self.pieces = {data: piece for data, piece in self.pieces.copy().items() if id(piece) in used}

    def _parent(self, seq: int) -> str:
        """The id of the version before this one in this process."""
        before = [place for place in self._ids if place < (seq,)]
        return self._ids[max(before)] if before else ""

    def _note(self, version: Version) -> None:
        seq = version.head.seq
        self._versions.pop(seq, None)
        self._versions[seq] = version
        self._ids[seq, False] = version.id
        self._noted.notify_all()
        for old in list(self._versions)[: -self._kept]:
            del self._versions[old]
        for place in sorted(self._ids)[:-IDS_KEPT]:
            del self._ids[place]


class HostLeader:
    """A host leader's side of one commit. (The coordinator creates the record of its own host itself.)

    Attributes:
        record: the record that was created; None if none was.
        error: why none was created.
    """

    def __init__(
        self,
        team: Team,
        records: Log,
        merged: MergedVersions,
        shared: Literal["process", "host", "site"],
        stop: Stop,
    ) -> None:
        self._team, self._log, self._merged, self._stop = team, records, merged, stop
        self._ranks, self._leaders = team.ranks_sharing(shared), team.leaders(shared)
        self.record: Record | None = None
        self.error: BaseException | None = None
        if merged.relay is not None:
            merged.relay.serve(self._leaders)  # before this rank votes, so that others find it there

    def follow(self, part: Record, keys: CommitKeys, messages: CommitMessages) -> None:
        """Receive the merged version, create the record, and acknowledge.

        Raises:
            RankFailed: the coordinator is lost.
        """
        try:
            said = self._team.receive(0, keys.version_id, timeout=self._team.timeouts.decision, stop=self._stop)
            if not said:
                return  # the commit has failed: the decision has the reason
            version = self._version(said, keys)
            record = self._record(version, part, keys, messages)
            self._log.commit(record)
            self.record = record
        except RankFailed as error:
            if not self._is_over(keys):
                self._acknowledge(keys, messages, error)
                raise
        except BaseException as error:  # any error: the coordinator waits for an acknowledgement
            self.error = error
            self._acknowledge(keys, messages, error)
        else:
            self._acknowledge(keys, messages, None)

    def _acknowledge(self, keys: CommitKeys, messages: CommitMessages, error: BaseException | None) -> None:
        answer = {"error": None if error is None else encode_error(error, self._team.rank)}
        messages.post(keys, keys.acknowledgement, encode_message(answer))

    def _is_over(self, keys: CommitKeys) -> bool:
        """Whether the decision is already posted: then no rank waits for this one."""
        return self._team.has_posted(0, keys.decision)

    def undo(self, error: TierstateError) -> BaseException:
        """Delete the record that this rank created, since the decision is not to commit.

        Returns:
            The error that this rank raises: why there is no version, or that its record could not be deleted.
        """
        if self.record is None or isinstance(error, CommitUnknown):
            return self.error or error
        return self.error or remove_record(self._log, self.record, error)

    def _version(self, said: bytes, keys: CommitKeys) -> Version:
        head, _ = decode_message(said, "the version id of rank 0")
        known = self._merged.known(keys.seq)
        if known is not None and known.id == head.get("id"):
            return known
        version = Version.decode(self._received(keys, str(head.get("id"))))
        if version.id != head.get("id"):
            raise FormatError(f"rank 0 sent version {version.id} where it announced {head.get('id')!r:.40}")
        self._merged.learn(version)
        return version

    def _received(self, keys: CommitKeys, version: str) -> memoryview:
        relay = self._merged.relay
        began = asked = time.monotonic()

        def stop() -> bool:
            nonlocal asked
            # A leader above that has given this version up itself says so to nobody, and lives on.
            if self._stop() or time.monotonic() - began > self._team.timeouts.timeout:
                return True
            if time.monotonic() - asked < PATIENCE:  # all leaders ask the one store
                return False
            asked = time.monotonic()
            return self._is_over(keys)

        found = None if relay is None else relay.fetch(self._leaders, keys.seq, version, stop)
        return memoryview(self._team.receive(0, keys.version, stop=self._stop)) if found is None else found

    def _record(self, version: Version, part: Record, keys: CommitKeys, messages: CommitMessages) -> Record:
        """The record of this host: the whole version, with the layouts of the parts of this host's ranks."""
        parts, reader = [part], PartReader()
        for rank in self._ranks[1:]:
            vote = self._team.receive(rank, keys.vote, stop=lambda: self._stop() or self._is_over(keys))
            said = Vote.decode(vote, rank)
            parts.append(reader.decode(messages.authentic(keys, rank, said, said.part)))
        return record_of(version, [(rows_in_merged(version, p.version), p.layout) for p in parts], part.commit)


def record_of(version: Version, parts: Sequence[tuple[Array, Layout]], commit: Mapping[str, Any]) -> Record:
    """The record of a whole version with the joined layouts of some parts.

    Args:
        parts: for each part the version's rows of its chunks, and its layout.
        commit: the commit section of the record.
    """
    return Record(version, join_layouts(version, parts), commit)


def remove_record(records: Log, record: Record, error: BaseException) -> BaseException:
    """Delete a record that this process created, of a version that is not committed.

    Returns:
        ``error``; or `CommitUnknown` if the record could not be deleted: then nothing that it names may be deleted.
    """
    seq = record.version.head.seq
    try:
        records.forget(seq)
    except TierError as second:
        name = records.tier.name
        log.warning("%s: the record of version %d, which is not whole, could not be removed: %s", name, seq, second)
        return CommitUnknown(f"{name}: the record of version {seq}, of which not all parts are there, stays: {error}")
    return error
