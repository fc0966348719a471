"""What tiers claim to have, which of it is undamaged, and what a restore must therefore return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

import tierstate as ts
from tierstate.engine.packs.keys import is_mend
from tierstate.engine.packs.pack import read_footer
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.format.layout import ChunkPlace, DeltaBase
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier

Tops = tuple[str, ...] | None
"""First keys of the leaves that are wanted; None: all."""


class Look:
    """What lies in a tier at one moment, to be held against what its records claim.

    Args:
        tier: a handle on it.
        hits: objects that were damaged or lost, as they were before; whatever else is wrong is nobody's doing but ours.

    Attributes:
        records: those that can be read, by number.
        unread: numbers of versions whose records cannot be read.
        packs: keys.
    """

    def __init__(self, tier: Tier, hits: Mapping[str, Buffer], run: str = "run") -> None:
        self._tier, self._hits = tier, hits
        self._now: dict[str, Buffer] = {}
        self.packs = set(tier.list("packs/"))
        self.records: dict[int, Record] = {}
        self.unread: set[int] = set()
        log = Log(tier, run)
        for seq, generations in log.generations().items():
            found = log.look(seq)
            if found.record is not None:
                self.records[seq] = found.record
            else:
                assert any(log.key(seq, n) in hits for n in generations), f"{tier}: {found.error}"
                self.unread.add(seq)

    def intact(self, record: Record) -> np.ndarray:
        """``(chunks,)`` of bool: which chunks lie here as they were written. What was never damaged has to be there."""
        layout = record.layout
        for key in set(layout.objects) - self.packs:
            assert key in self._hits, f"{self._tier}: version {record.version.head.seq} needs {key}, which is gone"
        found = layout.present.copy()
        for row in np.flatnonzero(found).tolist():
            place = layout.place(row)
            for one in filter(None, (place, place.base)):
                if one.object in self._hits:
                    found[row] &= self._is_intact(one)
        return found

    def _is_intact(self, place: ChunkPlace | DeltaBase) -> bool:
        if place.object not in self.packs:
            return False
        if place.object not in self._now:
            self._now[place.object] = self._tier.get(place.object)
        start, end = place.offset, place.offset + place.stored
        now, was = self._now[place.object], self._hits[place.object]
        return now.numel() >= end and now[start:end].equal(was[start:end])

    def mended(self) -> set[bytes]:
        """Digests of the chunks that were written here again."""
        found = set()
        for key in filter(is_mend, self.packs):
            try:
                found |= {row.digest for row in read_footer(self._tier, key)}
            except ts.FormatError:
                assert key in self._hits, key
        return found

    def named(self) -> set[str]:
        """Packs that records name."""
        return {key for record in self.records.values() for key in record.layout.objects}


class Claim(NamedTuple):
    """One version by one record: what a tier says it has."""

    look: Look
    record: Record

    @property
    def n(self) -> int:
        """Which save it was."""
        return int(self.record.version.head.metadata["n"])


def number(key: str) -> int:
    """Which version a record's key is of."""
    return int(key.rpartition("/")[2].partition(".")[0])


def claimed(look: Look) -> list[Claim]:
    """What a tier says it has."""
    return [Claim(look, record) for record in look.records.values()]


def globs(only: Tops) -> list[str] | None:
    """For a restore."""
    return None if only is None else [glob for top in only for glob in (top, f"{top}.**")]


def whole(version: Version, looks: Iterable[Look], only: Tops) -> bool:
    """Whether these tiers have, undamaged and together, all that is wanted of a version."""
    tops = np.array([not leaf.path or only is None or leaf.path[0] in only for leaf in version.leaves], bool)
    wanted = tops[version.chunk_leaf]
    found = np.zeros(len(wanted), bool)
    for claim in (claim for look in looks for claim in claimed(look)):
        if claim.record.version.id == version.id:
            found |= claim.look.intact(claim.record)
    return bool(found[wanted].all())


def complete(version: Version, looks: Iterable[Look], only: Tops) -> bool:
    """Whether they claim to."""
    tops = np.array([not leaf.path or only is None or leaf.path[0] in only for leaf in version.leaves], bool)
    found = np.zeros(len(version.digests), bool)
    for claim in (claim for look in looks for claim in claimed(look)):
        if claim.record.version.id == version.id:
            found |= claim.record.layout.present
    return bool(found[tops[version.chunk_leaf]].all())


def newest(looks: Sequence[Look], only: Tops, older: bool) -> int | None:
    """Which save a restore of the newest version has to give; None where damage leaves it open."""
    seqs = {seq for look in looks for seq in [*look.records, *look.unread]}
    for seq in sorted(seqs, reverse=True):
        claims = [Claim(look, look.records[seq]) for look in looks if seq in look.records]
        if not claims and not older:
            return None
        claims.sort(key=lambda claim: -claim.record.version.head.time)
        for claim in claims:
            if complete(claim.record.version, looks, only):
                if whole(claim.record.version, looks, only):
                    return claim.n
                if not older:
                    return None
    return None


def unmended(look: Look) -> list[int]:
    """Numbers of the versions that are damaged here, of which something was not written again."""
    mended = look.mended()
    found = sorted(look.unread)
    for seq, record in look.records.items():
        lost = np.flatnonzero(record.layout.present & ~look.intact(record))
        if any(record.version.digests[row].tobytes() not in mended for row in lost):
            found.append(seq)
    return found
