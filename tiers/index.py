"""The index: summaries of a run's records in one tier, in this process and as objects that spare reading each record.

An index is ``index/<run>/<seq>-<unique>``, and only a cache: a summary counts if the listing shows that record. Records
never change, but a number may come back after it was dropped (a copy, a rebuild, an outage made up for). Whoever brings
one first creates ``index/<run>/again-<unique>``: whoever sees such a mark for the first time forgets what it remembers,
and an index counts only with the very marks that its writer saw. What is in no index is read from its record.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tierstate.manifest.chunk import as_buffer, view
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.log import Log
from tierstate.manifest.record import Record
from tierstate.manifest.summary import MAX_INDEX, Summary, decode, encode

from .abreast import READERS, abreast
from .base import Tier
from .marks import Marks, Objects
from .named import Named

log = logging.getLogger("tierstate")

EVERY = 64
"""Records that are in no index before a saver writes a new one."""

LOOKS = 16
"""Commits of this process between two looks whether that is so."""

AT_ONCE = 256
"""Records of earlier processes that a saver reads at most to write an index."""

FEW = 4
"""Records that are read without looking for an index."""

_Key = tuple[int, int]


class Seen(NamedTuple):
    """One number of the log.

    Attributes:
        generations: those of its records, rising.
        summaries: of the records that could be read.
        problems: why the others could not.
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
        """The record that `Log.read` gives; None where it cannot be read."""
        wanted = 0 if self.generations[0] == 0 else self.generations[-1]
        return next((s for s in self.summaries if s.generation == wanted), None)


class Summaries:
    """What is known of a run's records in one tier. For any thread."""

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier, self._log = tier, Log(tier, run)
        self._objects = Marks(tier, run)
        self._lock = threading.Lock()
        self._found: dict[_Key, Summary] = {}
        self._sure: set[_Key] = set()  # committed or read here, and in no index only
        self._marks: frozenset[str] = frozenset()
        self._top: int | None = None
        self._indexed: set[_Key] = set()
        self._commits, self._purged = 0, False

    def add(self, record: Record, generation: int = 0) -> Seen:
        """Remember a record that was just committed."""
        found = Summary.of(record, generation)
        with self._lock:
            self._found[found[:2]] = found
            self._sure.add(found[:2])
            self._commits += 1
        return Seen((generation,), (found,))

    def look(self, at_most: int | None = None) -> dict[int, Seen]:
        """All numbers of the log, rising. Records that are not known yet are read, or found in an index.

        Args:
            at_most: how many records to read; the newest ones. Numbers with others are left out.

        Raises:
            TierError: the log could not be listed.
        """
        generations = self._list()
        found, missing = self._known(generations)
        if len(missing) > FEW:
            self._try_load()
            found, missing = self._known(generations)
        read, problems = self._read(missing[::-1][:at_most])
        found |= read
        unread = {seq for seq, _ in missing[::-1][at_most:]} if at_most is not None else set()
        return {
            seq: Seen(
                tuple(gens),
                tuple(found[seq, g] for g in gens if (seq, g) in found),
                tuple(problems[seq, g] for g in gens if (seq, g) in problems),
            )
            for seq, gens in generations.items()
            if seq not in unread
        }

    def packs(self) -> set[str] | None:
        """Packs that any record of the run names, as `named` says."""
        named = self.named()
        return None if named is None else named.packs

    def named(self) -> Named | None:
        """What the records name, for whoever deletes packs: no index is asked, so each is read once by each process.
        None where one cannot be read, or a key of the log is not understood: then nobody knows.

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
        # Whoever brings a number back makes the mark before the record: who has seen the record now sees the mark.
        self._heed(self._objects.objects())
        self._purge(before, listed)
        if self._read(sorted(listed - self._sure))[1]:
            return None
        commits: dict[int, set[str]] = {}
        with self._lock:
            for summary in self._found.values():
                commits.setdefault(summary.seq, set()).add(summary.commit)
            return Named({key for summary in self._found.values() for key in summary.packs}, commits)

    def _list(self) -> dict[int, list[int]]:
        """The log's listing; what it does not show any more is forgotten."""
        with self._lock:
            before = list(self._found)  # not what is committed while it is listed
        generations = self._log.generations()
        self._purge(before, {(seq, g) for seq, found in generations.items() for g in found})
        return generations

    def _purge(self, before: Iterable[_Key], listed: Collection[_Key]) -> None:
        with self._lock:
            for key in before:
                if key not in listed:
                    self._found.pop(key, None)
                    self._sure.discard(key)

    # Numbers that come back

    def expect(self, seq: int) -> None:
        """A record of that number is about to be created: if there may have been one, others must not take this for it.

        Raises:
            TierError: the tier could not be asked, or does not take the mark.
        """
        if self._top is None:
            self._top = max([*self._log.seqs(), self._objects.highest(self._objects.objects())])
        if seq <= self._top:
            self.renew(seq)
        self._top = max(seq, self._top)

    def renew(self, seq: int) -> None:
        """A number is about to get a record again: whatever anybody remembers of it is void."""
        found = self._objects.objects()
        self._heed(found)
        mark = self._objects.replace(found)
        with self._lock:
            self._marks |= {mark}
            for known in [known for known in self._found if known[0] == seq]:
                del self._found[known]
                self._sure.discard(known)

    def _heed(self, objects: Objects) -> None:
        """Forget everything if there are marks that were not there before."""
        with self._lock:
            if not self._marks >= objects.marks:
                self._found, self._sure, self._indexed = {}, set(), set()
                self._marks |= objects.marks

    def _known(self, generations: Mapping[int, Sequence[int]]) -> tuple[dict[_Key, Summary], list[_Key]]:
        """What is known at this moment, and which keys are not."""
        with self._lock:
            found = dict(self._found)
        return found, [(seq, g) for seq, gens in generations.items() for g in gens if (seq, g) not in found]

    def _read(self, keys: Sequence[_Key]) -> tuple[dict[_Key, Summary], dict[_Key, TierstateError]]:
        """Read records, some beside each other; those that cannot be read, and why."""
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

        abreast(read, keys)
        return found, problems

    # Objects

    def keep(self) -> None:
        """Write an index now and then; it is only a cache, so a failure is only logged."""
        if not self._tier.traits.persistent or not self._commits:
            return
        try:
            if not self._purged:
                self._load(purge=True)
                self._purged = True
            if self._commits < LOOKS:
                return
            self._commits = 0
            seen = self.look(AT_ONCE).values()
            unindexed = {s[:2] for found in seen for s in found.summaries} - self._indexed
            if len(unindexed) >= EVERY:
                self.write()
        except TierstateError as error:
            log.info("%s: no index of its versions was written: %s", self._tier.name, error)

    def write(self) -> None:
        """Write an index of all that is known, and delete those before it.

        Raises:
            TierError: it could not be written, or those before could not be deleted.
        """
        before = self._load()
        self._list()
        with self._lock:
            found = list(self._found.values())
        if not found:
            return
        highest = max(s.seq for s in found)
        key = self._objects.index_key(highest, before.marks)
        self._tier.put(key, as_buffer(encode(self._log.run, found)))
        self._indexed = {s[:2] for s in found}
        for old in before.indexes:
            self._tier.delete(old)

    def _try_load(self) -> None:
        try:
            self._load()
        except TierstateError as error:
            log.debug("%s: its index cannot be looked for: %s", self._tier.name, error)

    def _load(self, *, purge: bool = False) -> Objects:
        """Take in what the index objects say; what there is.

        Where two writers met there are several, which say the same of the same records. One that says otherwise is from
        before somebody deleted the newest records by hand, so that their numbers were used again.

        Args:
            purge: delete such a one.
        """
        objects = self._objects.objects()
        self._heed(objects)
        keys = [key for key in objects.indexes if self._objects.counts(key, objects.marks)]
        for key in keys[::-1][:READERS]:
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
        size = self._tier.size(key)
        if size > MAX_INDEX:
            raise FormatError(f"{size} bytes are too many for an index")
        return decode(view(self._tier.get(key)).toreadonly(), self._log.run)
