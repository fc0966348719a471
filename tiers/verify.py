"""Verifying: whether what the tiers claim to have is there, and is what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tierstate.manifest.columns import Array
from tierstate.manifest.errors import NotFound, TierstateError

from .arena import Arena
from .catalog import Catalog, Entry, Place
from .fetch import Holding
from .findings import Depth, Problem, Report, Unrestorable
from .footers import disagreements
from .testimony import Testimony

__all__ = ["Depth", "Problem", "Report", "Unrestorable", "Verifier"]


RECORDS = Depth()
"""Records, and packs by presence and length."""


class Verifier:
    """Looks at every version of a run in every tier.

    Args:
        how: records, and packs by presence and length; or also the data.
        workers: reads in flight.
        progress: called with the raw bytes read since the last call.
    """

    def __init__(
        self,
        catalog: Catalog,
        arena: Arena,
        how: Depth = RECORDS,
        *,
        workers: int = 1,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._catalog, self._how = catalog, how
        self._sizes: dict[tuple[str, str], str] = {}
        self._doubtful: list[Entry] = []
        self.report = Report(sample=how.sample, seed=how.seed)
        self._chunks = Testimony(arena, how, self.report, workers, progress)

    def run(self, each: Callable[[Entry], None] = lambda _entry: None) -> Report:
        """Look at all versions; ``each`` is called with every one that has a record, and may add to the report."""
        for place in self._catalog.newest_first():
            self._unreadable(place)
            for entry in place.entries:
                for holding in entry.holdings:
                    self._look(entry, holding)
                if self._missing(entry).any():
                    self._doubtful.append(entry)
                each(entry)
        self.report.problems += self._chunks.problems()
        self.report.lost += filter(None, map(self._lost, self._doubtful))
        self.report.lost.sort(key=lambda bad: -bad.seq)
        self.report.unreachable = {name: str(error) for name, error in self._catalog.unreachable.items()}
        return self.report

    def _unreadable(self, place: Place) -> None:
        self.report.problems += [Problem(name, place.seq, None, "", str(error)) for name, error in place.problems]
        if not place.entries:
            self.report.lost.append(Unrestorable(place.seq, None))

    def _look(self, entry: Entry, holding: Holding) -> None:
        head, report = entry.version.head, self.report
        report.versions += 1
        if self._how.reads:
            rows = self._chunks.hear(entry, holding)
            if self._how.deep:
                found = disagreements(holding.shelf.tier, entry.version, holding.layout, rows)
                report.problems += [Problem(holding.shelf.name, head.seq, head.step, "", what) for what in found]
        # Only now, since what was mended meanwhile is no problem any more.
        report.problems += self._packs(entry, holding)

    def _packs(self, entry: Entry, holding: Holding) -> Iterator[Problem]:
        head = entry.version.head
        for key, size in zip(holding.layout.objects, holding.layout.object_sizes.tolist(), strict=True):
            what = self._pack(holding, key, size)
            if what and not _is_mended(entry, holding, key):
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

    def _missing(self, entry: Entry) -> Array:
        """``(chunks,)`` of bool: which chunks no copy is known to have whole."""
        left = np.ones(len(entry.version.digests), bool)
        hopeless = ~left
        for holding in entry.holdings:
            layout = holding.layout
            sizes = zip(layout.objects, layout.object_sizes.tolist(), strict=True)
            # What was read tells more than how long its pack is.
            sound = np.array([self._how.data or not self._pack(holding, *pack) for pack in sizes], bool)
            rows = np.flatnonzero(left & layout.present)
            left[rows] = ~(sound[layout.object[rows]] & ~self._chunks.wrong(holding, rows))
            hopeless[rows] |= self._chunks.wrong(holding, rows, hopeless=True)
        for row in np.flatnonzero(left & ~hopeless).tolist():
            digest = entry.version.digests[row].tobytes()
            left[row] = not any(h.layout.present[row] and mended(h, digest) for h in entry.holdings)
        return left

    def _lost(self, entry: Entry) -> Unrestorable | None:
        """What of a version cannot be restored; None where it can, since it was mended meanwhile."""
        version = entry.version
        leaves = np.unique(version.chunk_leaf[self._missing(entry)]).tolist()
        if not leaves:
            return None
        first = version.leaves[leaves[0]].name
        return Unrestorable(version.head.seq, version.head.step, len(leaves), first, entry.thinned)


def mended(holding: Holding, digest: bytes) -> bool:
    """Whether a chunk was written again in a tier, as far as that can be told."""
    try:
        return holding.shelf.mended(digest) is not None
    except TierstateError:
        return False


def _is_mended(entry: Entry, holding: Holding, key: str) -> bool:
    """Whether all that a version has in a damaged pack was written again elsewhere in the same tier."""
    layout = holding.layout
    number = layout.objects.index(key)
    for row in np.flatnonzero((layout.object == number) | (layout.base_object == number)).tolist():
        base = layout.base(row) if layout.object[row] != number else None
        whole = mended(holding, entry.version.digests[row].tobytes()) or (
            base is not None and mended(holding, base.digest)
        )
        if not whole:
            return False
    return True
