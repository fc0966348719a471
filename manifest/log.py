"""The log: the records of one run in one tier, and the commit that adds to it.

A record is ``versions/<run>/<seq>``. One that says anew where a version lies, or that less of it is kept, is another
*generation*, ``versions/<run>/<seq>.<n>``: it is created before the one before is deleted, so that the version is never
without a record. Where an interruption left both, both are true.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .chunk import Buffer, as_buffer, view
from .errors import AlreadyExists, CommitUnknown, FormatError, NotFound, TierstateError, TierUnavailable
from .record import MAX_RECORD, Record

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,99}")
_RECORD = re.compile(r"([0-9]{12})(?:\.([1-9][0-9]{0,5}))?")

RACES = 3
"""How often a record is looked for that others replace meanwhile."""


class Objects(Protocol):
    """What the log needs of a tier."""

    name: str

    def put(self, key: str, data: Buffer) -> None: ...
    def get(self, key: str) -> Buffer: ...
    def list(self, prefix: str) -> Iterator[str]: ...
    def size(self, key: str) -> int: ...
    def delete(self, key: str) -> None: ...


@dataclass(frozen=True)
class Found:
    """What a look at one place of the log found: a record, or why there is none."""

    seq: int
    record: Record | None
    error: TierstateError | None = None


def check_run(run: str) -> str:
    """The name itself, if it can name a run.

    Raises:
        ValueError: anything but letters, digits, ``.``, ``_``, ``-``, starting with a letter or digit.
    """
    if not _RUN.fullmatch(run):
        raise ValueError(f"{run[:80]!r} cannot name a run; use up to 100 letters, digits, '.', '_' and '-'")
    return run


def commit_id() -> str:
    """A new commit's unique id, by which its writer knows it again."""
    return uuid.uuid4().hex


def runs(tier: Objects) -> list[str]:
    """Names of all runs with records in a tier."""
    names = (key.split("/") for key in tier.list("versions/"))
    return sorted({p[1] for p in names if len(p) == 3 and _RUN.fullmatch(p[1]) and _RECORD.fullmatch(p[2])})


class Log:
    """The records of one run in one tier, under ``versions/<run>/<seq>``."""

    def __init__(self, tier: Objects, run: str) -> None:
        self.tier, self.run = tier, check_run(run)
        self._prefix = f"versions/{run}/"

    def key(self, seq: int, generation: int = 0) -> str:
        """The key of a record."""
        return f"{self._prefix}{seq:012d}" + (f".{generation}" if generation else "")

    def generations(self) -> dict[int, list[int]]:
        """Sequence numbers of all versions, rising, and which records each has, without reading any."""
        return self._listed(self._prefix)

    def _listed(self, prefix: str) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for key in self.tier.list(prefix):
            if match := _RECORD.fullmatch(key.removeprefix(self._prefix)):
                found.setdefault(int(match[1]), []).append(int(match[2] or 0))
        return {seq: sorted(found[seq]) for seq in sorted(found)}

    def keys(self) -> dict[str, tuple[int, int]]:
        """Every key of the log with its number and generation, for whoever deletes what no record names.

        Raises:
            FormatError: one is not understood, and may be a record of a later program.
        """
        found = {}
        for key in self.tier.list(self._prefix):
            match = _RECORD.fullmatch(key.removeprefix(self._prefix))
            if match is None:
                raise FormatError(f"{self.tier.name}: {key}: is not the key of a record that this program knows")
            found[key] = int(match[1]), int(match[2] or 0)
        return found

    def holds(self, record: Record) -> bool:
        """Whether a record that was read from here is still there; one small request, unless it has gone.

        Raises:
            TierError: the tier could not be asked.
        """
        seq = record.version.head.seq
        try:
            self.tier.size(self.key(seq))  # where this one is there, it was there before, and was what was read
            return True
        except NotFound:
            pass
        try:
            return bool(self.read(seq).commit["id"] == record.commit["id"])
        except (NotFound, FormatError):
            return False

    def seqs(self) -> list[int]:
        """Sequence numbers of all versions, rising, without reading any."""
        return list(self.generations())

    def read(self, seq: int) -> Record:
        """The record of one version.

        Raises:
            NotFound: there is none of that number.
            FormatError: each of its generations is damaged, foreign, too large, or of another run or number.
            TierError: the tier could not be read.
        """
        try:
            return self.read_generation(seq, 0)  # what nearly every version has, for one request
        except (FormatError, NotFound) as error:
            failure: TierstateError = error
        for _ in range(RACES):
            others = self._listed(f"{self.key(seq)}.").get(seq, [])
            for generation in reversed(others):
                try:
                    return self.read_generation(seq, generation)
                except (FormatError, NotFound) as error:
                    # What is damaged tells more than what somebody has replaced meanwhile.
                    failure = failure if isinstance(failure, FormatError) else error
            if not others or isinstance(failure, FormatError):
                break
        raise failure

    def read_generation(self, seq: int, generation: int) -> Record:
        """One record of one version.

        Raises: as `read`.
        """
        key = self.key(seq, generation)
        size = self.tier.size(key)
        if size > MAX_RECORD:
            raise FormatError(f"{self.tier.name}: {key}: {size} bytes are too many for a record")
        try:
            record = Record.decode(view(self.tier.get(key)).toreadonly())
        except FormatError as error:
            raise FormatError(f"{self.tier.name}: {key}: {error}") from error
        head = record.version.head
        if (head.run, head.seq) != (self.run, seq):
            raise FormatError(f"{self.tier.name}: {key}: holds version {head.seq} of run {head.run!r}")
        return record

    def look(self, seq: int) -> Found:
        """Like `read`, with the error as a value."""
        try:
            return Found(seq, self.read(seq))
        except TierstateError as error:
            return Found(seq, None, error)

    def newest_first(self) -> Iterator[Found]:
        """All places of the log from the newest on, read one by one as they are asked for."""
        return (self.look(seq) for seq in reversed(self.seqs()))

    def latest(self) -> Record | None:
        """The newest record, or None where there is none.

        Raises:
            FormatError: the newest record cannot be read.
        """
        seqs = self.seqs()
        return self.read(seqs[-1]) if seqs else None

    def commit(self, record: Record, generation: int = 0) -> None:
        """Create the record: from then on the version is committed to the tier.

        An answer that got lost is settled by reading back: the commit id in the record tells ours from another's.

        Raises:
            AlreadyExists: another writer committed this number; nothing was changed.
            CommitUnknown: the commit was not answered, or found its place taken, and what lies there could not be
                read; delete nothing.
            FormatError: the record is of another run, or could not be read back; nothing was sent.
            TierError: it did not take effect.
        """
        seq = record.version.head.seq
        if record.version.head.run != self.run:
            raise FormatError(f"a record of run {record.version.head.run!r} has no place in the log of {self.run!r}")
        try:
            self.tier.put(self.key(seq, generation), as_buffer(record.encode()))
        except (AlreadyExists, TierUnavailable) as error:
            if not self._is_ours(seq, generation, record, error):
                raise

    def _is_ours(self, seq: int, generation: int, record: Record, error: TierstateError) -> bool:
        try:
            return bool(self.read_generation(seq, generation).commit["id"] == record.commit["id"])
        except NotFound:
            return False
        except TierstateError as second:
            # Also a FormatError: ours may have been damaged on the way back, and its packs must not be deleted.
            raise CommitUnknown(
                f"{self.tier.name}: the commit of version {seq} of run {self.run!r} was not confirmed ({error}), "
                f"and reading it back failed too ({second}); nothing was deleted"
            ) from error

    def stands(self, record: Record) -> bool:
        """Whether a record that was read from here, or committed here, is there still: neither dropped nor replaced.

        Raises:
            TierError: the tier could not be read.
        """
        seq = record.version.head.seq
        try:
            return self.tier.size(self.key(seq)) > 0  # where there is a first one, it is the one that was read
        except NotFound:
            pass
        try:
            return bool(self.read(seq).commit["id"] == record.commit["id"])
        except NotFound:
            return False

    def forget(self, seq: int, generations: Iterable[int] = (0,)) -> None:
        """Delete records of a version; once it has none, it is gone. Its packs stay until they are swept."""
        for generation in sorted(generations):
            self.tier.delete(self.key(seq, generation))
