"""The index: summaries of a run's records in one tier, in this process and as objects that spare reading each record.

An index is ``index/<run>/<seq>-<unique>``, and only a cache: a summary counts if the listing shows that very record,
since records never change and their keys are not used twice. What is in no index is read from its record.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from tierstate.manifest.chunk import as_buffer, view
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.log import Log
from tierstate.manifest.record import Record
from tierstate.manifest.summary import MAX_INDEX, Summary, decode, encode

from .base import Tier

log = logging.getLogger("tierstate")

EVERY = 64
"""Records that are in no index before a saver writes a new one."""

LOOKS = 16
"""Commits of this process between two looks whether that is so."""

AT_ONCE = 256
"""Records of earlier processes that a saver reads at most to write an index."""

FEW = 4
"""Records that are read without looking for an index."""

READERS = 8
"""Records read beside each other, since a store may take long to answer."""

_NAME = re.compile(r"[0-9]{12}-[0-9a-f]{8,32}")

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
        self._prefix = f"index/{run}/"
        self._lock = threading.Lock()
        self._found: dict[_Key, Summary] = {}
        self._indexed: set[_Key] = set()
        self._commits, self._purged = 0, False

    def add(self, record: Record, generation: int = 0) -> Seen:
        """Remember a record that was just committed."""
        found = Summary.of(record, generation)
        with self._lock:
            self._found[found[:2]] = found
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
        missing = self._missing(generations)
        if len(missing) > FEW:
            self._try_load()
            missing = self._missing(generations)
        problems = self._read(missing[::-1][:at_most])
        unread = {seq for seq, _ in missing[::-1][at_most:]} if at_most is not None else set()
        found = self._found
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
        """Packs that any record of the run names; None where one of them is not known, since then nobody knows.

        Raises:
            TierError: the log could not be listed.
        """
        if self._missing(self._list()):
            return None
        with self._lock:
            return {key for summary in self._found.values() for key in summary.packs}

    def _list(self) -> dict[int, list[int]]:
        """The log's listing; what it does not show any more is forgotten."""
        with self._lock:
            before = list(self._found)  # not what is committed while it is listed
        generations = self._log.generations()
        with self._lock:
            for seq, generation in before:
                if generation not in generations.get(seq, ()):
                    self._found.pop((seq, generation), None)
        return generations

    def _missing(self, generations: Mapping[int, Sequence[int]]) -> list[_Key]:
        return [(seq, g) for seq, gens in generations.items() for g in gens if (seq, g) not in self._found]

    def _read(self, keys: Sequence[_Key]) -> dict[_Key, TierstateError]:
        """Read records, some beside each other; those that cannot be read, and why."""
        problems: dict[_Key, TierstateError] = {}

        def read(key: _Key) -> None:
            try:
                summary = Summary.of(self._log.read_generation(*key), key[1])
            except TierstateError as error:
                problems[key] = error
            else:
                with self._lock:
                    self._found[key] = summary

        _beside(read, keys)
        return problems

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
        key = f"{self._prefix}{highest:012d}-{uuid.uuid4().hex[:12]}"
        self._tier.put(key, as_buffer(encode(self._log.run, found)))
        self._indexed = {s[:2] for s in found}
        for old in before:
            self._tier.delete(old)

    def _try_load(self) -> None:
        try:
            self._load()
        except TierstateError as error:
            log.debug("%s: its index cannot be looked for: %s", self._tier.name, error)

    def _load(self, *, purge: bool = False) -> list[str]:
        """Take in what the index objects say; their keys.

        Where two writers met there are several, which say the same of the same records. One that says otherwise is from
        before somebody deleted the newest records by hand, so that their numbers were used again.

        Args:
            purge: delete such a one.
        """
        keys = [key for key in self._tier.list(self._prefix) if _NAME.fullmatch(key.removeprefix(self._prefix))]
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
        return keys

    def _decode(self, key: str) -> Collection[Summary]:
        size = self._tier.size(key)
        if size > MAX_INDEX:
            raise FormatError(f"{size} bytes are too many for an index")
        return decode(view(self._tier.get(key)).toreadonly(), self._log.run)


def _beside(call: Callable[[_Key], None], keys: Iterable[_Key]) -> None:
    """Call for each, in a few threads, of which this is one."""
    left: deque[_Key] = deque(keys)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while left and not errors:
                with suppress(IndexError):  # another one took the last
                    call(left.popleft())
        except BaseException as error:
            errors.append(error)

    count = min(READERS, len(left)) - 1
    threads = [threading.Thread(target=work, name="tierstate-index", daemon=True) for _ in range(count)]
    with suppress(RuntimeError):  # no more threads are to be had, as at the interpreter's end: this one does it all
        for thread in threads:
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
