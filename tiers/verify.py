"""Verifying: whether what the tiers claim to have is there, and is what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tierstate.manifest.errors import Damaged, NotFound, TierstateError

from .arena import Arena
from .catalog import Catalog, Entry, Place
from .fetch import Fetch, Holding


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        tier: where.
        seq: the version's number.
        step: its step; None where the record itself cannot be read.
        leaf: the leaf, or empty where it is about a whole record or pack.
        what: what was found.
    """

    tier: str
    seq: int
    step: int | None
    leaf: str
    what: str


@dataclass
class Report:
    """What a verification looked at, and what it found.

    Attributes:
        versions: records read, one per version and tier.
        chunks, nbytes: chunks read and their raw bytes; none unless data was asked for.
        problems: what is not as it should be.
        unreachable: tiers that could not be asked.
    """

    versions: int = 0
    chunks: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every tier answered and nothing is wrong."""
        return not self.problems and not self.unreachable


class Verifier:
    """Looks at every version of a run in every tier.

    Args:
        data: read every chunk and compare its digest; otherwise only records, and packs by presence and length.
        progress: called with the raw bytes read since the last call.
    """

    def __init__(
        self, catalog: Catalog, arena: Arena, *, data: bool = False, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self._catalog, self._arena, self._data, self._progress = catalog, arena, data, progress
        self._sizes: dict[tuple[str, str], str] = {}
        self._seen: set[tuple[str, str, int]] = set()
        self.report = Report()

    def run(self, only: Callable[[Entry], bool] = lambda _: True) -> Report:
        """Look at all versions for which ``only`` holds."""
        for place in self._catalog.newest_first():
            self._unreadable(place)
            for entry in filter(only, place.entries):
                for holding in entry.holdings:
                    self.report.versions += 1
                    self.report.problems += self._packs(entry, holding)
                    if self._data:
                        self.report.problems += self._chunks(entry, holding)
        self.report.unreachable = {name: str(error) for name, error in self._catalog.unreachable.items()}
        return self.report

    def _unreadable(self, place: Place) -> None:
        self.report.problems += [Problem(name, place.seq, None, "", str(error)) for name, error in place.problems]

    def _packs(self, entry: Entry, holding: Holding) -> Iterator[Problem]:
        head = entry.version.head
        for key, size in zip(holding.layout.objects, holding.layout.object_sizes.tolist(), strict=True):
            what = self._pack(holding, key, size)
            if what and not self._is_mended(entry, holding, key):
                yield Problem(holding.shelf.name, head.seq, head.step, "", what)

    def _pack(self, holding: Holding, key: str, size: int) -> str:
        """What is wrong with a pack; each is asked for once, however many versions name it."""
        known = (holding.shelf.name, key)
        if known not in self._sizes:
            try:
                found = holding.shelf.tier.size(key)
                self._sizes[known] = "" if found == size else f"{key} has {found} bytes where {size} are right"
            except NotFound:
                self._sizes[known] = f"{key} is missing"
            except TierstateError as error:
                self._sizes[known] = str(error)
        return self._sizes[known]

    @staticmethod
    def _is_mended(entry: Entry, holding: Holding, key: str) -> bool:
        """Whether all that a version has in a damaged pack was written again elsewhere in the same tier."""
        layout, mended = holding.layout, holding.shelf.mended
        number = layout.objects.index(key)
        for row in np.flatnonzero((layout.object == number) | (layout.base_object == number)).tolist():
            base = layout.base(row) if layout.object[row] != number else None
            whole = mended(entry.version.digests[row].tobytes()) or (base is not None and mended(base.digest))
            if not whole:
                return False
        return True

    def _chunks(self, entry: Entry, holding: Holding) -> Iterator[Problem]:
        version = entry.version
        for row in self._unseen(holding):
            try:
                Fetch(version, [holding], self._arena).run([row], lambda _row, _raw, _slab: None)
            except Damaged as error:
                leaf = version.leaves[int(version.chunk_leaf[row])].name
                # What is wrong in this tier; the error itself speaks of all tiers that a restore would try.
                what = str(error.__cause__ or error)
                yield Problem(holding.shelf.name, version.head.seq, version.head.step, leaf, what)
            nbytes = int(version.chunk_nbytes[row])
            self.report.chunks += 1
            self.report.nbytes += nbytes
            self._progress(nbytes)

    def _unseen(self, holding: Holding) -> Iterator[int]:
        """Rows whose place has not been read for another version or row."""
        for row in np.flatnonzero(holding.layout.present).tolist():
            place = holding.layout.place(row)
            assert place is not None
            key = (holding.shelf.name, place.object, place.offset)
            if key not in self._seen:
                self._seen.add(key)
                yield row
