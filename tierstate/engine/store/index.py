"""The index of a run in one tier: summaries of its records, in memory and in index objects that save reading them.

An index object is ``index/<run>/<seq>-<unique>``. It is only a cache: a summary counts if the log still lists the
record. What is in no index is read from its record.

Records never change, but a number can be used again after its version was dropped: by a copy, by a rebuild, or by a
save that reaches a tier late. A cached summary would then belong to the old record. So the writer of the new record
first creates a reuse mark, ``index/<run>/again-<unique>``, and deletes older marks and indexes. A reader that finds a
new mark discards all that it has cached, and an index is valid only while the marks are the same that its writer saw.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tierstate.manifest.chunk import as_buffer, view
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.format.record import MAX_INDEX_BYTES, Record, Summary, decode_index, encode_index
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier
from tierstate.tiers.concurrency import CALL_THREADS, run_concurrently

_INDEX = re.compile(r"([0-9]{12})-([0-9a-f]{8})?[0-9a-f]{12}")


_MARK = re.compile(r"again-[0-9a-f]{12}")


log = logging.getLogger("tierstate")


MIN_UNINDEXED = 64
"""A saver writes a new index when this many records are in none."""


COMMITS_BETWEEN_CHECKS = 16
"""Commits of this process between two checks of that number."""


MAX_READ = 256
"""Records of earlier processes that a saver reads at most to write an index."""


READ_WITHOUT_INDEX = 4
"""So few records are read directly, without looking for an index."""


_Key = tuple[int, int]


class PackUsage(NamedTuple):
    """The packs that all records of a run name.

    Attributes:
        packs: keys.
        commits: commit ids of the records of each number.
    """

    packs: set[str]
    commits: Mapping[int, Collection[str]]


class IndexListing(NamedTuple):
    """Keys under ``index/<run>/``."""

    marks: frozenset[str]
    indexes: list[str]


class IndexObjects:
    """The index objects and reuse marks of one run in one tier."""

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier, self._prefix = tier, f"index/{run}/"

    def objects(self) -> IndexListing:
        """List the objects; keys that cannot be parsed are ignored."""
        names = {key: key.removeprefix(self._prefix) for key in self._tier.list(self._prefix)}
        marks = frozenset(key for key, name in names.items() if _MARK.fullmatch(name))
        return IndexListing(marks, sorted(key for key, name in names.items() if _INDEX.fullmatch(name)))

    def replace(self, before: IndexListing) -> str:
        """Create a new mark, delete the earlier marks and indexes, which it invalidates, and return its key."""
        key = f"{self._prefix}again-{_unique()}"
        self._tier.put(key, as_buffer(b"{}"))
        for old in (*before.indexes, *before.marks):
            self._tier.delete(old)
        return key

    def index_key(self, seq: int, marks: Collection[str]) -> str:
        """A key for an index up to that number; the index is valid while exactly these marks exist."""
        return f"{self._prefix}{seq:012d}-{_era(marks)}{_unique()}"

    def counts(self, key: str, marks: Collection[str]) -> bool:
        """Whether an index is valid with these marks."""
        match = _INDEX.fullmatch(key.removeprefix(self._prefix))
        return match is not None and (match[2] or "") == _era(marks)

    def highest(self, found: IndexListing) -> int:
        """The highest number that an index covers; 0 if there is no index."""
        return max((int(key.removeprefix(self._prefix)[:12]) for key in found.indexes), default=0)


def _era(marks: Collection[str]) -> str:
    return checksum("\n".join(sorted(marks)).encode()).hex()[:8] if marks else ""


def _unique() -> str:
    return uuid.uuid4().hex[:12]


class SeqSummaries(NamedTuple):
    """One number of the log.

    Attributes:
        generations: those of its records, rising.
        summaries: of the records that could be read.
        problems: why the other records could not be read.
    """

    generations: tuple[int, ...]
    summaries: tuple[Summary, ...]
    problems: tuple[TierstateError, ...] = ()

    @property
    def packs(self) -> set[str]:
        """The packs that its records name."""
        return {key for summary in self.summaries for key in summary.packs}

    @property
    def current(self) -> Summary | None:
        """The summary of the record that `Log.read` returns; None if that cannot be read."""
        wanted = 0 if self.generations[0] == 0 else self.generations[-1]
        return next((s for s in self.summaries if s.generation == wanted), None)


def _of_number(
    seq: int, generations: Sequence[int], found: Mapping[_Key, Summary], problems: Mapping[_Key, TierstateError]
) -> SeqSummaries:
    if len(generations) == 1 and (only := found.get((seq, generations[0]))) is not None:  # nearly all of them
        return SeqSummaries((generations[0],), (only,))
    return SeqSummaries(
        tuple(generations),
        tuple(found[seq, g] for g in generations if (seq, g) in found),
        tuple(problems[seq, g] for g in generations if (seq, g) in problems),
    )


class Summaries:
    """A cache of the summaries of a run's records in one tier. Thread-safe."""

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier, self._log = tier, Log(tier, run)
        self._objects = IndexObjects(tier, run)
        self._lock = threading.Lock()
        self._found: dict[_Key, Summary] = {}
        self._sure: set[_Key] = set()  # committed or read by this process, not just found in an index
        self._marks: frozenset[str] = frozenset()
        self._top: int | None = None
        self._indexed: set[_Key] = set()
        self._commits, self._purged = 0, False

    def add(self, record: Record, generation: int = 0) -> SeqSummaries:
        """Add a record that was just committed."""
        found = Summary.of(record, generation)
        with self._lock:
            self._found[found[:2]] = found
            self._sure.add(found[:2])
            self._commits += 1
        return SeqSummaries((generation,), (found,))

    def look(self, at_most: int | None = None) -> dict[int, SeqSummaries]:
        """All numbers of the log, in rising order. Summaries not cached yet come from an index or from the record.

        Args:
            at_most: how many records to read at most, the newest first. Numbers with unread records are left out.

        Raises:
            TierError: the log could not be listed.
        """
        generations = self._list()
        found, missing = self._known(generations)
        if len(missing) > READ_WITHOUT_INDEX:
            self._try_load()
            found, missing = self._known(generations)
        read, problems = self._read(missing[::-1][:at_most])
        found |= read
        unread = {seq for seq, _ in missing[::-1][at_most:]} if at_most is not None else set()
        return {seq: _of_number(seq, gens, found, problems) for seq, gens in generations.items() if seq not in unread}

    def packs(self) -> set[str] | None:
        """The packs that any record of the run names; None as for `named`."""
        named = self.named()
        return None if named is None else named.packs

    def named(self) -> PackUsage | None:
        """The packs that the records name, for code that deletes packs: indexes are not trusted, and each process reads
        each record once. None if a record cannot be read or a key of the log cannot be parsed: then it is not known.

        Raises:
            TierError: the log could not be listed.
        """
        with self._lock:
            before = list(self._found)
        try:
            listed = set(self._log.keys().values())
        except FormatError as error:
            log.warning("no pack is deleted: %s", error)
            return None
        # A writer that reuses a number creates the mark before the record: having seen the record, we see the mark now.
        self._heed(self._objects.objects())
        self._purge(before, listed)
        if self._read(sorted(listed - self._sure))[1]:
            return None
        commits: dict[int, set[str]] = {}
        with self._lock:
            for summary in self._found.values():
                commits.setdefault(summary.seq, set()).add(summary.commit)
            return PackUsage({key for summary in self._found.values() for key in summary.packs}, commits)

    def _list(self) -> dict[int, list[int]]:
        """List the log; cached records that it no longer lists are discarded."""
        with self._lock:
            before = list(self._found)  # not records that are committed during the listing
        generations = self._log.generations()
        self._purge(before, {(seq, g) for seq, found in generations.items() for g in found})
        return generations

    def _purge(self, before: Iterable[_Key], listed: Collection[_Key]) -> None:
        with self._lock:
            for key in set(before).difference(listed):
                self._found.pop(key, None)
                self._sure.discard(key)

    # Reused numbers

    def expect(self, seq: int) -> None:
        """Called before a record of that number is created: creates a reuse mark if the number may be used again.

        Raises:
            TierError: the tier could not be listed, or the mark could not be created.
        """
        if self._top is None:
            self._top = max([*self._log.seqs(), self._objects.highest(self._objects.objects())])
        if seq <= self._top:
            self.renew(seq)
        self._top = max(seq, self._top)

    def renew(self, seq: int) -> None:
        """Called before a number gets a record again: invalidates what all processes have cached of it."""
        found = self._objects.objects()
        self._heed(found)
        mark = self._objects.replace(found)
        with self._lock:
            self._marks |= {mark}
            for known in [known for known in self._found if known[0] == seq]:
                del self._found[known]
                self._sure.discard(known)

    def _heed(self, objects: IndexListing) -> None:
        """Discard the cache if there are new marks."""
        with self._lock:
            if not self._marks >= objects.marks:
                self._found, self._sure, self._indexed = {}, set(), set()
                self._marks |= objects.marks

    def _known(self, generations: Mapping[int, Sequence[int]]) -> tuple[dict[_Key, Summary], list[_Key]]:
        """The summaries that are cached now, and the keys that are not."""
        with self._lock:
            found = dict(self._found)
        return found, [(seq, g) for seq, gens in generations.items() for g in gens if (seq, g) not in found]

    def _read(self, keys: Sequence[_Key]) -> tuple[dict[_Key, Summary], dict[_Key, TierstateError]]:
        """Read records, several in parallel: their summaries, and the errors of those that cannot be read."""
        found: dict[_Key, Summary] = {}
        problems: dict[_Key, TierstateError] = {}

        def read(key: _Key) -> None:
            try:
                summary = Summary.of(self._log.read_generation(*key), key[1])
            except TierstateError as error:
                problems[key] = error
            else:
                with self._lock:
                    found[key] = self._found[key] = summary
                    self._sure.add(key)

        run_concurrently(read, keys)
        return found, problems

    # Index objects

    def keep(self) -> None:
        """Write an index if enough records are in none. It is only a cache, so a failure is only logged."""
        if not self._tier.traits.persistent or not self._commits:
            return
        try:
            if not self._purged:
                self._load(purge=True)
                self._purged = True
            if self._commits < COMMITS_BETWEEN_CHECKS:
                return
            self._commits = 0
            seen = self.look(MAX_READ).values()
            unindexed = {s[:2] for found in seen for s in found.summaries} - self._indexed
            if len(unindexed) >= MIN_UNINDEXED:
                self.write()
        except TierstateError as error:
            log.info("%s: no index of its versions was written: %s", self._tier.name, error)

    def write(self) -> None:
        """Write an index of all records, and delete the earlier indexes.

        Raises:
            TierError: it could not be written, or the earlier ones could not be deleted.
        """
        before = self._load()
        self._list()
        with self._lock:
            found = list(self._found.values())
        if not found:
            return
        highest = max(s.seq for s in found)
        key = self._objects.index_key(highest, before.marks)
        self._tier.put(key, as_buffer(encode_index(self._log.run, found)))
        self._indexed = {s[:2] for s in found}
        for old in before.indexes:
            self._tier.delete(old)

    def _try_load(self) -> None:
        try:
            self._load()
        except TierstateError as error:
            log.debug("%s: its index cannot be looked for: %s", self._tier.name, error)

    def _load(self, *, purge: bool = False) -> IndexListing:
        """Load the summaries of the index objects, and return the listing of those objects.

        Two writers at once leave several indexes, which agree. An index that contradicts a record is older than a
        manual deletion of the newest records, after which their numbers were used again.

        Args:
            purge: delete an index that contradicts.
        """
        objects = self._objects.objects()
        self._heed(objects)
        keys = [key for key in objects.indexes if self._objects.counts(key, objects.marks)]
        for key in keys[::-1][:CALL_THREADS]:
            try:
                found = self._decode(key)
            except TierstateError as error:
                log.debug("%s: index %s is passed over: %s", self._tier.name, key, error)
                continue
            with self._lock:
                stale = any(known.commit != s.commit for s in found if (known := self._found.get(s[:2])) is not None)
                if not stale:
                    self._indexed |= {s[:2] for s in found}
                    self._found = {s[:2]: s for s in found} | self._found
            if stale and purge:
                self._tier.delete(key)
        return objects

    def _decode(self, key: str) -> Collection[Summary]:
        data = self._tier.get_within(key, MAX_INDEX_BYTES, "an index")
        return decode_index(view(data).toreadonly(), self._log.run)
