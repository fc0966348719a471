"""Marks: objects beside a run's indexes which say that a number came back after it was dropped.

A mark is ``index/<run>/again-<unique>``. It is created before the record is, and then those before it are deleted: so
there is one from the first time on, and whoever looks sees one that was not there before.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from typing import NamedTuple

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.digest import checksum

from .base import Tier

_INDEX = re.compile(r"([0-9]{12})-([0-9a-f]{8})?[0-9a-f]{12}")
_MARK = re.compile(r"again-[0-9a-f]{12}")


class Objects(NamedTuple):
    """Keys under ``index/<run>/``."""

    marks: frozenset[str]
    indexes: list[str]


class Marks:
    """The marks and the keys of indexes of one run in one tier."""

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier, self._prefix = tier, f"index/{run}/"

    def objects(self) -> Objects:
        """What is there; keys that are not understood are passed over."""
        names = {key: key.removeprefix(self._prefix) for key in self._tier.list(self._prefix)}
        marks = frozenset(key for key, name in names.items() if _MARK.fullmatch(name))
        return Objects(marks, sorted(key for key, name in names.items() if _INDEX.fullmatch(name)))

    def replace(self, before: Objects) -> str:
        """Make a mark, and delete the marks and indexes before it, which count no more; its key."""
        key = f"{self._prefix}again-{_unique()}"
        self._tier.put(key, as_buffer(b"{}"))
        for old in (*before.indexes, *before.marks):
            self._tier.delete(old)
        return key

    def index_key(self, seq: int, marks: Collection[str]) -> str:
        """A key for an index up to that number, which counts for as long as there are these marks and no others."""
        return f"{self._prefix}{seq:012d}-{_era(marks)}{_unique()}"

    def counts(self, key: str, marks: Collection[str]) -> bool:
        """Whether an index counts while these marks are there."""
        match = _INDEX.fullmatch(key.removeprefix(self._prefix))
        return match is not None and (match[2] or "") == _era(marks)

    def highest(self, found: Objects) -> int:
        """The highest number that an index speaks of; 0 where there is none."""
        return max((int(key.removeprefix(self._prefix)[:12]) for key in found.indexes), default=0)


def _era(marks: Collection[str]) -> str:
    return checksum("\n".join(sorted(marks)).encode()).hex()[:8] if marks else ""


def _unique() -> str:
    return uuid.uuid4().hex[:12]
