"""Testimony: what each chunk of a run is found to be, tier by tier, each place read once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.columns import Array
from tierstate.manifest.errors import Damaged
from tierstate.manifest.head import Head
from tierstate.manifest.version import Version

from .arena import Arena
from .catalog import Entry
from .fetch import Fetch, Holding
from .findings import Depth, Problem, Report
from .mend import Mender

Key = tuple[str, str]
"""A tier and a pack."""


@dataclass
class _Wrong:
    """What is known of a damaged place."""

    what: str
    whole: bool
    mended: bool = False


class _Hit(NamedTuple):
    """A leaf of a version in a tier, and the damaged places that it has there."""

    tier: str
    head: Head
    leaf: str
    places: list[_Wrong]


class Testimony:
    """Reads chunks, and remembers which places are damaged, and whom that concerns.

    Args:
        how: all places or a sample, and whether to mend.
        report: where the bytes are counted.
        workers: reads in flight.
        progress: called with the raw bytes read since the last call.
    """

    def __init__(self, arena: Arena, how: Depth, report: Report, workers: int, progress: Callable[[int], None]) -> None:
        self._arena, self._how, self._report, self._workers = arena, how, report, workers
        self._progress, self._lock = progress, threading.Lock()
        self._random = np.random.default_rng(how.seed)
        self._credit: dict[str, float] = {}
        self._heard: dict[Key, Array] = {}
        self._wrong: dict[Key, dict[int, _Wrong]] = {}
        self._hits: list[_Hit] = []

    def hear(self, entry: Entry, holding: Holding) -> Array:
        """Read what a tier's copy has at places that were not read before; their rows."""
        fresh = self._unheard(holding)
        self._count(self._report.held, holding, entry.version, fresh)
        rows = self._sampled(holding, entry.version, fresh) if self._how.sample else fresh
        # What was whole nowhere may be so in a tier that has this version and did not have the others.
        again = self._lost(holding) if len(entry.holdings) > 1 else rows[:0]
        if len(rows) or len(again):
            self._read(entry, holding, np.union1d(rows, again))
        self._count(self._report.read, holding, entry.version, rows)
        self._note(entry.version, holding)
        return rows

    def wrong(self, holding: Holding, rows: Array, *, hopeless: bool = False) -> Array:
        """``(n,)`` of bool: which of the rows, all of them present, lie at a place that was found damaged.

        Args:
            hopeless: only those that were whole nowhere, also where they had been mended before.
        """
        found, layout = np.zeros(len(rows), bool), holding.layout
        for number, key in enumerate(layout.objects):
            known = self._wrong.get((holding.shelf.name, key), {})
            offsets = [at for at, w in known.items() if not (hopeless and (w.whole or w.mended))]
            if offsets:
                found |= (layout.object[rows] == number) & np.isin(layout.offset[rows], np.array(offsets, "u8"))
        return found

    def problems(self) -> Iterator[Problem]:
        """What is damaged, by version, tier and leaf."""
        for tier, head, leaf, places in self._hits:
            whole, healed = (all(getattr(p, name) for p in places) for name in ("whole", "mended"))
            yield Problem(tier, head.seq, head.step, leaf, places[0].what, len(places), whole, healed)

    def _unheard(self, holding: Holding) -> Array:
        """The first row of each place that has not come yet; from now on it has."""
        layout, found = holding.layout, [np.zeros(0, "i8")]
        present = np.flatnonzero(layout.present)
        order = present[np.lexsort((layout.offset[present], layout.object[present]))]
        cuts = np.flatnonzero(np.diff(layout.object[order].astype("i8"))) + 1
        for rows in np.split(order, cuts) if len(order) else []:
            key = holding.shelf.name, layout.objects[layout.object[rows[0]]]
            offsets, first = np.unique(layout.offset[rows], return_index=True)
            heard = self._heard.get(key, offsets[:0])
            found.append(rows[first[~np.isin(offsets, heard)]])
            self._heard[key] = np.union1d(heard, offsets)
        return np.sort(np.concatenate(found))

    def _sampled(self, holding: Holding, version: Version, rows: Array) -> Array:
        """Some of the rows, so that of all bytes of the tier so far the share is read that was asked for."""
        order = self._random.permutation(rows)
        nbytes = version.chunk_nbytes[order]
        credit = self._credit.get(holding.shelf.name, 0.0) + self._how.sample * float(nbytes.sum())
        taken = np.cumsum(nbytes) - nbytes < credit
        self._credit[holding.shelf.name] = credit - float(nbytes[taken].sum())
        return np.sort(order[taken])

    def _lost(self, holding: Holding) -> Array:
        """A row for each place that is damaged and, as far as is known, whole nowhere."""
        layout, found = holding.layout, [np.zeros(0, "i8")]
        for number, key in enumerate(layout.objects):
            lost = [o for o, w in self._wrong.get((holding.shelf.name, key), {}).items() if not w.whole]
            rows = np.flatnonzero((layout.object == number) & np.isin(layout.offset, np.array(lost, "u8")))
            _, first = np.unique(layout.offset[rows], return_index=True)
            found.append(rows[first])
        return np.concatenate(found)

    def _read(self, entry: Entry, holding: Holding, rows: Array) -> None:
        """Read each row from this copy; where it is damaged, look in the others, and mend it."""
        version, name = entry.version, holding.shelf.name
        copies = [holding, *(h for h in entry.holdings if h is not holding)]
        mender = Mender(version, copies) if self._how.mend else None
        whole: set[int] = set()
        lost: set[int] = set()

        def good(failed: int, row: int, raw: Buffer) -> None:
            whole.add(row)
            if mender is not None:
                mender(failed, row, raw)

        def gone(row: int, _error: Damaged) -> None:
            lost.add(row)
            self._told(int(version.chunk_nbytes[row]))

        fetch = Fetch(version, copies, self._arena, workers=self._workers, mended=good, lost=gone)
        try:
            fetch.run(rows.tolist(), lambda _row, raw, _slab: self._told(raw.numel()))
        finally:
            done = mender.close().get(name, 0) if mender is not None else 0
        if done:
            self._report.mended[name] = self._report.mended.get(name, 0) + done
        errors = {t.row: t.error for t in reversed(fetch.troubles) if t.tier == name}  # the first of each row
        for row, error in errors.items():
            # In neither set: it is whole in a place of this tier where it was mended before, or is whole elsewhere and
            # this tier did not answer.
            if row in whole or row in lost or error.transient:
                self._remember(holding, version, row, _Wrong(str(error), row not in lost, bool(done and row in whole)))

    def _told(self, nbytes: int) -> None:
        with self._lock:
            self._report.chunks += 1
            self._report.nbytes += nbytes
        self._progress(nbytes)

    def _remember(self, holding: Holding, version: Version, row: int, found: _Wrong) -> None:
        place = holding.layout.place(row)
        assert place is not None
        if found.mended:
            found.mended = holding.shelf.mended(version.digests[row].tobytes()) is not None
        known = self._wrong.setdefault((holding.shelf.name, place.object), {}).setdefault(place.offset, found)
        known.whole, known.mended = found.whole, found.mended

    def _note(self, version: Version, holding: Holding) -> None:
        """Take down which leaves have damaged places."""
        present = np.flatnonzero(holding.layout.present)
        rows = present[self.wrong(holding, present)]
        for leaf in np.unique(version.chunk_leaf[rows]).tolist():
            places = [holding.layout.place(row) for row in rows[version.chunk_leaf[rows] == leaf].tolist()]
            wrong = [self._wrong[holding.shelf.name, p.object][p.offset] for p in places if p is not None]
            self._hits.append(_Hit(holding.shelf.name, version.head, version.leaves[leaf].name, wrong))

    @staticmethod
    def _count(counts: dict[str, int], holding: Holding, version: Version, rows: Array) -> None:
        name = holding.shelf.name
        counts[name] = counts.get(name, 0) + int(version.chunk_nbytes[rows].sum())
