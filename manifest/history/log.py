"""The log: the records (commits) of one run in one tier, in the order of their sequence numbers (`next_seq`).

A record has the key ``versions/<run>/<seq>``, and its creation is the commit. A later record of the same version, after
chunks were moved or leaves dropped, is a new *generation* with the key ``versions/<run>/<seq>.<n>``. It is created
before the older one is deleted, so that the version always has a record. After an interruption both may exist, and both
are valid. The keys of records are made and parsed only here.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tierstate.manifest.arguments import as_text
from tierstate.manifest.chunk import Buffer, as_buffer, view
from tierstate.manifest.errors import (
    AlreadyExists,
    CommitUnknown,
    FormatError,
    NotFound,
    Oversized,
    TierstateError,
    TierUnavailable,
    Unauthentic,
)
from tierstate.manifest.format.record import MAX_RECORD, Record

LONGEST_RUN = 100
"""The most characters in the name of a run."""


_RUN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._\-]{{0,{LONGEST_RUN - 1}}}")


SEQ_DIGITS = 12
"""Digits of a sequence number in a key."""


_RECORD = re.compile(rf"([0-9]{{{SEQ_DIGITS}}})(?:\.([1-9][0-9]{{0,5}}))?")


PER_SECOND = 100
"""Sequence numbers per second of the clock: hundredths of a second since 1970 have twelve digits until 2286."""


LAST_BY_CLOCK = 5 * 10**11
"""The highest number that is taken from a clock (of the year 2128), so that a clock that is wrong leaves room above."""


RACE_RETRIES = 3
"""How often a read is tried again if another process replaces the record in the meantime."""


class KeyValueStore(Protocol):
    """The part of a tier's interface that the history of a run uses: objects of bytes by key."""

    name: str

    def put(self, key: str, data: Buffer) -> None: ...
    def get(self, key: str) -> Buffer: ...
    def get_within(self, key: str, most: int, what: str) -> Buffer: ...
    def list(self, prefix: str) -> Iterator[str]: ...
    def size(self, key: str) -> int: ...
    def delete(self, key: str) -> None: ...


@dataclass(frozen=True)
class LogEntry:
    """The result of reading one version of the log: its record, or the error of the read."""

    seq: int
    record: Record | None
    error: TierstateError | None = None


def check_run(run: str) -> str:
    """Check that a name can be the name of a run; returns it.

    Raises:
        TypeError: it is no text.
        ValueError: anything but letters, digits, ``.``, ``_``, ``-``, starting with a letter or digit.
    """
    run = as_text(run, "run", "the name of a run is text, as in 'gpt-small'")
    if not _RUN.fullmatch(run):
        raise ValueError(f"{run[:80]!r} cannot name a run; use up to {LONGEST_RUN} letters, digits, '.', '_' and '-'")
    return run


def clock_seq() -> int:
    """The sequence number that the clock of this host stands for."""
    return min(int(time.time() * PER_SECOND), LAST_BY_CLOCK)


def next_seq(highest: int) -> int:
    """The sequence number of a new version: above the highest one in sight, and at least that of the clock.

    So the numbers of a run rise in the order of its saves, also over tiers that were never seen together: a job that
    goes on on another host, without the node-local tier of the first, does not begin with its numbers again. It is a
    hybrid logical clock (Kulkarni et al., "Logical physical clocks", OPODIS 2014) in one integer: the clocks of hosts
    matter only where the tiers of one are out of sight of the other.
    """
    return max(highest + 1, clock_seq())


def commit_id() -> str:
    """A unique id for a new commit. By it the writer recognises its own record if the answer of the tier was lost."""
    return uuid.uuid4().hex


def list_runs(tier: KeyValueStore) -> list[str]:
    """Names of all runs with records in a tier."""
    names = (key.split("/") for key in tier.list("versions/"))
    return sorted({p[1] for p in names if len(p) == 3 and _RUN.fullmatch(p[1]) and _RECORD.fullmatch(p[2])})


class Log:
    """The records of one run in one tier, under ``versions/<run>/<seq>``.

    Args:
        tier: the tier.
        run: the run.
        accept: called with each record that was read; raises FormatError for one that must not be used.
    """

    def __init__(self, tier: KeyValueStore, run: str, accept: Callable[[Record], None] = lambda _record: None) -> None:
        self.tier, self.run, self._accept = tier, check_run(run), accept
        self._prefix = f"versions/{run}/"

    def key(self, seq: int, generation: int = 0) -> str:
        """The key of a record."""
        return f"{self._prefix}{seq:0{SEQ_DIGITS}d}" + (f".{generation}" if generation else "")

    def generations(self) -> dict[int, list[int]]:
        """Sequence numbers of all versions, ascending, each with its generations; from the keys, without a read."""
        return self._listed(self._prefix)

    def _listed(self, prefix: str) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        start = len(self._prefix)
        for key in self.tier.list(prefix):
            name = key[start:]
            if len(name) == SEQ_DIGITS and name.isdigit() and name.isascii():  # nearly all of them
                found.setdefault(int(name), []).append(0)
            elif match := _RECORD.fullmatch(name):
                found.setdefault(int(match[1]), []).append(int(match[2] or 0))
        for generations in found.values():
            if len(generations) > 1:
                generations.sort()
        return dict(sorted(found.items()))

    def keys(self) -> dict[str, tuple[int, int]]:
        """Every key of the log with its number and generation, for garbage collection.

        Raises:
            FormatError: a key cannot be parsed; it may be a record of a later program.
        """
        found = {}
        for key in self.tier.list(self._prefix):
            match = _RECORD.fullmatch(key.removeprefix(self._prefix))
            if match is None:
                raise FormatError(f"{self.tier.name}: {key}: is not the key of a record that this program knows")
            found[key] = int(match[1]), int(match[2] or 0)
        return found

    def seqs(self) -> list[int]:
        """Sequence numbers of all versions, ascending; from the keys, without a read."""
        return list(self.generations())

    def read(self, seq: int) -> Record:
        """The record of one version.

        Raises:
            NotFound: there is no version with this number.
            FormatError: each of its generations is damaged, not a record, too large, or of another run or number.
            TierError: the tier could not be read.
        """
        try:
            return self.read_generation(seq, 0)  # nearly every version has only this one: one request
        except (FormatError, NotFound) as error:
            failure: TierstateError = error
        for _ in range(RACE_RETRIES):
            others = self._listed(f"{self.key(seq)}.").get(seq, [])
            for generation in reversed(others):
                try:
                    return self.read_generation(seq, generation)
                except (FormatError, NotFound) as error:
                    # A format error is more useful than the error of a record that was replaced meanwhile.
                    failure = failure if isinstance(failure, FormatError) else error
            if not others or isinstance(failure, FormatError):
                break
        raise failure

    def read_generation(self, seq: int, generation: int) -> Record:
        """One generation of one version.

        Raises: as `read`.
        """
        key = self.key(seq, generation)
        try:
            record = self._decoded(key)
        except (Oversized, Unauthentic):
            raise  # it says where
        except FormatError as error:
            raise FormatError(f"{self.tier.name}: {key}: {error}") from error
        head = record.version.head
        if (head.run, head.seq) != (self.run, seq):
            raise FormatError(f"{self.tier.name}: {key}: holds version {head.seq} of run {head.run!r}")
        self._accept(record)
        return record

    def _decoded(self, key: str) -> Record:
        """The record under a key, which is read twice before it is called damaged: bytes may be damaged on the way."""
        try:
            return self._read(key)
        except FormatError:
            return self._read(key)

    def _read(self, key: str) -> Record:
        return Record.decode(view(self.tier.get_within(key, MAX_RECORD, "a record")).toreadonly())

    def look(self, seq: int) -> LogEntry:
        """Like `read`, with the error as a value."""
        try:
            return LogEntry(seq, self.read(seq))
        except TierstateError as error:
            return LogEntry(seq, None, error)

    def newest_first(self) -> Iterator[LogEntry]:
        """All versions of the log, newest first; each is read when the iterator reaches it."""
        return (self.look(seq) for seq in reversed(self.seqs()))

    def latest(self) -> Record | None:
        """The newest record, or None if the log is empty.

        Raises:
            FormatError: the newest record cannot be read.
        """
        seqs = self.seqs()
        return self.read(seqs[-1]) if seqs else None

    def commit(self, record: Record, generation: int = 0) -> None:
        """Create the record: from then on the version is committed to the tier.

        If the answer is lost, the record is read back: its commit id shows whether it is ours.

        Raises:
            AlreadyExists: another writer committed this number; nothing was changed.
            CommitUnknown: the tier did not answer, or the key was taken, and then the object under the key could not
                be read; the caller must delete nothing.
            FormatError: the record is of another run, or its bytes could not be decoded again; nothing was sent.
            TierError: the commit did not take effect.
        """
        seq = record.version.head.seq
        if record.version.head.run != self.run:
            raise FormatError(f"a record of run {record.version.head.run!r} has no place in the log of {self.run!r}")
        try:
            self.tier.put(self.key(seq, generation), as_buffer(record.encode()))
        except Exception as error:
            # What is no error of ours, as for lack of memory, does not say either how far the put came.
            lost = isinstance(error, AlreadyExists | TierUnavailable) or not isinstance(error, TierstateError)
            if not lost or not self._is_ours(seq, generation, record, error):
                raise

    def _is_ours(self, seq: int, generation: int, record: Record, error: Exception) -> bool:
        try:
            return bool(self.read_generation(seq, generation).commit["id"] == record.commit["id"])
        except NotFound:
            return False
        except Exception as second:
            # Also for a FormatError: it may be our record, damaged in transfer, and its packs must not be deleted.
            first, then = (str(each) or type(each).__name__ for each in (error, second))
            raise CommitUnknown(
                f"{self.tier.name}: the commit of version {seq} of run {self.run!r} was not confirmed ({first}), "
                f"and reading it back failed too ({then}); nothing was deleted"
            ) from error

    def stands(self, record: Record) -> bool:
        """Whether a record that was read from this log or committed to it still exists: neither dropped nor replaced.

        One small request, unless it was replaced.

        Raises:
            FormatError: a record of that number exists, and cannot be read.
            TierError: the tier could not be read.
        """
        seq = record.version.head.seq
        try:
            return self.tier.size(self.key(seq)) > 0  # if generation 0 exists, it is the one that was read
        except NotFound:
            pass
        try:
            return bool(self.read(seq).commit["id"] == record.commit["id"])
        except NotFound:
            return False

    def holds(self, record: Record) -> bool:
        """As `stands`, for a reader, who looks the version up again if its record has gone: so has one in whose place
        there is one that cannot be read.

        Raises:
            TierError: the tier could not be read.
        """
        try:
            return self.stands(record)
        except FormatError:
            return False

    def forget(self, seq: int, generations: Iterable[int] = (0,)) -> None:
        """Delete records of a version. Without any record the version is gone; a sweep deletes its packs later."""
        for generation in sorted(generations):
            self.tier.delete(self.key(seq, generation))
