"""Removals: which versions of a run were removed from a tier by hand, so that nothing brings them back.

A removed version may still have all of its chunks in packs that other versions share, and a copy of its tables in one
of them. Without a mark ``rebuild``, ``doctor`` and the cascade would take it for lost. A mark is the key
``removed/<run>/<seq>-<id>``. The object says what retention knew of the version, because older versions were dropped on
account of it, and because the number may mean another one by now (`Removal.is_of`): every fork begins with number 1.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import json_checksum, json_with_checksum
from tierstate.manifest.errors import AlreadyExists, MediaError, NotFound, Oversized
from tierstate.manifest.format.version import MAX_TIME, Head

from .log import KeyValueStore, check_run
from .retention import RetentionEntry

MAX_MARK_BYTES = 64 << 10
"""A longer mark is not read: no program writes one."""

ReadEach = Callable[[Callable[[str], bytes | None], Iterable[str]], Iterable[bytes | None]]
"""Calls a function that reads an object for each of several keys; gives the results in the order of the keys."""

_MARK = re.compile(r"([0-9]{12})-([0-9a-f]{1,64})")


def removal_key(run: str, seq: int, id: str) -> str:
    """The key of the mark of a removed version; ``id`` is its id, or ``0`` if no record of it could be read."""
    return f"removed/{check_run(run)}/{seq:012d}-{id or '0'}"


def mark_removed(tier: KeyValueStore, run: str, seq: int, id: str, head: Head | None = None) -> None:
    """Mark a version as removed from a tier; once more is no error.

    Args:
        head: the version's head, if a record of it could be read.

    Raises:
        TierError: the tier could not be written to.
    """
    mark: dict[str, Any] = {"time": time.time()}
    if head is not None:
        mark["version"] = {"step": head.step, "time": head.time, "metadata": dict(head.metadata)}
    data = json_with_checksum(mark)
    if head is not None and len(data) > MAX_MARK_BYTES:
        data = json_with_checksum(mark | {"version": mark["version"] | {"metadata": {}}})
    with suppress(AlreadyExists):
        tier.put(removal_key(run, seq, id), as_buffer(data))


def is_removed(tier: KeyValueStore, run: str, seq: int) -> bool:
    """Whether a version was removed from a tier by hand, by a mark that is read: a forged one raises.

    Raises:
        Unauthentic: the tier's objects are sealed, and a mark is not.
        TierError: the tier could not be read.
    """
    marks = list(tier.list(f"removed/{check_run(run)}/{seq:012d}-"))
    for key in marks:
        tier.get(key)
    return bool(marks)


def removal_marks(tier: KeyValueStore, run: str) -> Iterator[tuple[str, int]]:
    """The key of each mark, and the number of the version that it is about."""
    prefix = f"removed/{check_run(run)}/"
    for key in tier.list(prefix):
        if m := _MARK.fullmatch(key.removeprefix(prefix)):
            yield key, int(m[1])


def removed_since(tier: KeyValueStore, run: str, key: str, age: Callable[[str], float | None]) -> bool:
    """Whether a version of a run was removed by hand after an object was created; False if that is not known.

    Args:
        key: the object's key.
        age: seconds since an object was created, by the tier's own clock.

    Raises:
        TierError: the tier could not be read.
    """
    with suppress(NotFound):  # deleted meanwhile
        made, marked = age(key), [age(mark) for mark, _ in removal_marks(tier, run)]
        return made is not None and any(since is not None and since < made for since in marked)
    return False


class Removal(NamedTuple):
    """The removal of one version from a tier.

    Attributes:
        entry: what retention knew of the version. If its record could not be read, only the number is known: it counts
            for ``last`` and for no other rule.
        known: whether more than the number is known.
        time: of the removal, in seconds since 1970; infinite if the mark does not say it.
    """

    entry: RetentionEntry
    known: bool = False
    time: float = inf

    def is_of(self, seq: int, step: int, saved: float) -> bool:
        """Whether this version was removed, and not an earlier one of its number.

        Args:
            seq, step, saved: its number, its step, and the time of its save.
        """
        if seq != self.entry.seq:
            return False
        return (step, saved) == (self.entry.step, self.entry.time) if self.known else saved <= self.time


def was_removed(gone: Iterable[Removal], seq: int, step: int, saved: float) -> bool:
    """Whether one of these removals is that of this version; see `Removal.is_of`."""
    return any(removal.is_of(seq, step, saved) for removal in gone)


def removals(tier: KeyValueStore, run: str, seqs: Collection[int] | None = None, each: ReadEach = map) -> list[Removal]:
    """The versions that were removed from a tier.

    Args:
        seqs: only those with these numbers.
        each: calls a function for each key, as `map` does, or for several at the same time.

    Raises:
        Unauthentic: the tier's objects are sealed, and a mark is not.
        TierError: the tier could not be read.
    """
    wanted = [(key, seq) for key, seq in removal_marks(tier, run) if seqs is None or seq in seqs]
    marks = each(lambda key: _contents(tier, key), [key for key, _ in wanted])
    return [_removal(seq, mark) for (_, seq), mark in zip(wanted, marks, strict=True) if mark is not None]


def _contents(tier: KeyValueStore, key: str) -> bytes | None:
    try:
        return to_bytes(tier.get_within(key, MAX_MARK_BYTES, "a mark"))
    except (Oversized, MediaError):
        return b""  # what its key says counts
    except NotFound:
        return None  # copied back meanwhile


def _removal(seq: int, mark: bytes) -> Removal:
    # A negative step is in no window of ``every`` that a version is in.
    unknown, when = RetentionEntry(seq, -1 - seq), inf
    try:
        said = json.loads(mark)
        whole = _is_whole(said)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        return Removal(unknown)
    match said:
        case {"time": int() | float() as at} if 0 <= at <= MAX_TIME:
            when = float(at)
    match said:
        case {"version": {"step": int(step), "time": int() | float() as saved, "metadata": dict(metadata)}} if (
            0 <= saved <= MAX_TIME  # no number that a float cannot have, and no NaN
        ):
            return Removal(RetentionEntry(seq, step, float(saved), metadata), True, when)
    return Removal(unknown, time=when)


def _is_whole(said: Any) -> bool:
    """Whether a mark is what was written, as far as it can be known: those of earlier programs have no checksum."""
    if not isinstance(said, dict) or "sum" not in said:
        return True
    return bool(said["sum"] == json_checksum({key: value for key, value in said.items() if key != "sum"}))
