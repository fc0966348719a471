"""Verification of chunks (scrubbing): reads each place of a run in each tier once, and remembers which are damaged.

Also the options of a verification (`Depth`) and its result (`VerifyReport`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tierstate.engine.progress import Progress
from tierstate.engine.restore.fetch import Fetch, RepairWriter
from tierstate.engine.store.catalog import Holding, VersionCopies
from tierstate.manifest.arguments import as_int, as_seconds
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.version import Head, Version
from tierstate.tiers.memory.arena import Arena

PackId = tuple[str, str]
"""The name of a tier and the key of a pack."""


@dataclass(frozen=True)
class Depth:
    """How deep a verification looks.

    Attributes:
        data: read and decode every chunk and compare it with its digest.
        sample: read only this random share of each tier's bytes instead (0 to 1); 0 for none.
        seed: random seed of the sample.
        deep: also check pack footers and containers, and load each leaf with its provider.
        mend: repair what is damaged in one tier and whole in another.
    """

    data: bool = False
    sample: float = 0.0
    seed: int = 0
    deep: bool = False
    mend: bool = False

    @classmethod
    def of(
        cls,
        *,
        deep: bool = False,
        data: bool = False,
        sample: float = 0.0,
        seed: int | None = None,
        mend: bool = False,
    ) -> Depth:
        """The depth of these options. ``deep``, and ``mend`` without a sample, read all data.

        Raises:
            ValueError: the sample is not between 0 and 1, or all data is read anyway, or there is a seed and no sample.
            TypeError: the sample or the seed is no number.
        """
        share = "a share is between 0 and 1, or between 0% and 100%"
        if (sample := as_seconds(sample, "sample", share)) > 1:
            raise ValueError(f"sample {sample!r}: {share}")
        if sample and (deep or data):
            raise ValueError("either a sample of the data is read or all of it; leave out one of them")
        if seed is not None:
            seed = as_int(seed, "seed", "write an int, 0 or more")
            if not sample:
                raise ValueError(
                    f"seed {seed}: it draws a sample, and no sample is read; write its share too, as sample"
                )
        whole = data or deep or (mend and not sample)
        return cls(whole, sample, secrets.randbits(32) if seed is None else seed, deep, mend)

    @property
    def reads(self) -> bool:
        """Whether any chunk is read."""
        return self.data or self.sample > 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a verification found.

    Attributes:
        tier: its name; empty if the problem is about the version itself.
        seq: the version's number; 0 if the problem is about a tag, or the pin of a fork.
        step: its step; None if the record cannot be read.
        leaf: the leaf; empty if the problem is about a whole record or pack.
        what: the problem; of several damaged chunks of a leaf, the first.
        chunks: how many chunks of the leaf are damaged.
        whole: whether all of them are whole in another tier; None if that was not checked.
        mended: whether all of them were repaired.
    """

    tier: str
    seq: int
    step: int | None
    leaf: str
    what: str
    chunks: int = 0
    whole: bool | None = None
    mended: bool = False


@dataclass(frozen=True, slots=True)
class Unrestorable:
    """A version that cannot be restored as a whole from the tiers that answered.

    Attributes:
        seq, step: of the version; the step is None if no record of it can be read.
        leaves: how many of its leaves have a chunk that is whole in no tier.
        first: the first of them.
        thinned: a message that says what retention has dropped of it; empty if nothing was dropped.
    """

    seq: int
    step: int | None
    leaves: int = 0
    first: str = ""
    thinned: str = ""


@dataclass
class VerifyReport:
    """What a verification looked at, and what it found.

    Attributes:
        versions: records read, one per version and tier.
        chunks, nbytes: chunks read and their raw bytes; 0 unless the depth reads data.
        problems: all problems, also the repaired ones.
        unreachable: tiers that could not be read, and why.
        lost: versions that cannot be restored as a whole.
        mended: by tier, how many chunks were repaired.
        read, held: by tier, raw bytes read, and raw bytes of all its chunks; if the depth reads data.
        sample, seed: the share of the bytes to read, and the random seed.
        unopened: leaves that a deep verification did not load, since loading them would run code (pickles).
    """

    versions: int = 0
    chunks: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    lost: list[Unrestorable] = field(default_factory=list)
    mended: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    sample: float = 0.0
    seed: int = 0
    unopened: int = 0

    @property
    def ok(self) -> bool:
        """Whether every tier could be read, and all problems were repaired."""
        return not self.unreachable and all(problem.mended for problem in self.problems)


@dataclass
class _Wrong:
    """What is known about a damaged place."""

    what: str
    whole: bool
    mended: bool = False


class _Hit(NamedTuple):
    """A leaf of a version in a tier, and its damaged places."""

    tier: str
    head: Head
    leaf: str
    places: list[_Wrong]


class ChunkChecks:
    """Reads chunks, and records which places are damaged and which leaves of which versions use them.

    Args:
        how: all places or a sample, and whether to repair.
        report: gets the counts of bytes and chunks.
        workers: reads in flight.
        progress: called with the raw bytes read since the last call.
    """

    def __init__(self, arena: Arena, how: Depth, report: VerifyReport, workers: int, progress: Progress) -> None:
        self._arena, self._how, self._report, self._workers = arena, how, report, workers
        self._progress, self._lock = progress, threading.Lock()
        self._random = np.random.default_rng(how.seed)
        self._credit: dict[str, float] = {}
        self._counted: dict[PackId, Array] = {}
        self._wrong: dict[PackId, dict[int, _Wrong]] = {}
        self._hits: list[_Hit] = []

    def hear(self, entry: VersionCopies, holding: Holding) -> Array:
        """Read the chunks of a tier's copy at places that were not read before; returns their rows."""
        fresh = self._unheard(holding)
        self._count(self._report.held, holding, entry.version, fresh)
        rows = self._sampled(holding, entry.version, fresh) if self._how.sample else fresh
        # A chunk that was whole in no tier so far may be whole in a tier that has this version but not the others.
        again = self._lost(holding) if len(entry.holdings) > 1 else rows[:0]
        if len(rows) or len(again):
            self._read(entry, holding, np.union1d(rows, again))
        self._count(self._report.read, holding, entry.version, rows)
        self._note(entry.version, holding)
        return rows

    def wrong(self, holding: Holding, rows: Array, *, hopeless: bool = False) -> Array:
        """``(n,)`` of bool: which of the rows, all of them present, are at a place that was found damaged.

        Args:
            hopeless: only those that were whole in no tier, not even in an earlier repaired copy.
        """
        found, layout = np.zeros(len(rows), bool), holding.layout
        for number, key in enumerate(layout.objects):
            known = self._wrong.get((holding.tier_run.name, key), {})
            offsets = [at for at, w in known.items() if not (hopeless and (w.whole or w.mended))]
            if offsets:
                found |= (layout.object[rows] == number) & np.isin(layout.offset[rows], np.array(offsets, "u8"))
        return found

    def problems(self) -> Iterator[Problem]:
        """All damage, by version, tier and leaf."""
        for tier, head, leaf, places in self._hits:
            whole, healed = (all(getattr(p, name) for p in places) for name in ("whole", "mended"))
            yield Problem(tier, head.seq, head.step, leaf, places[0].what, len(places), whole, healed)

    @property
    def hits(self) -> int:
        """How many leaves of versions use a damaged place."""
        return len(self._hits)

    def forget(self, seq: int) -> None:
        """Report nothing about the versions of that number as they were."""
        self._hits = [hit for hit in self._hits if hit.head.seq != seq]

    def _unheard(self, holding: Holding) -> Array:
        """The first row of each place not seen before; marks the places as seen."""
        layout, found = holding.layout, [np.zeros(0, "i8")]
        present = np.flatnonzero(layout.present)
        order = present[np.lexsort((layout.offset[present], layout.object[present]))]
        cuts = np.flatnonzero(np.diff(layout.object[order].astype("i8"))) + 1
        for rows in np.split(order, cuts) if len(order) else []:
            key = holding.tier_run.name, layout.objects[layout.object[rows[0]]]
            offsets, first = np.unique(layout.offset[rows], return_index=True)
            counted = self._counted.get(key, offsets[:0])
            found.append(rows[first[~np.isin(offsets, counted)]])
            self._counted[key] = np.union1d(counted, offsets)
        return np.sort(np.concatenate(found))

    def _sampled(self, holding: Holding, version: Version, rows: Array) -> Array:
        """A sample of the rows, so that the share of the tier's bytes read so far is ``sample``."""
        order = self._random.permutation(rows)
        nbytes = version.chunk_nbytes[order]
        credit = self._credit.get(holding.tier_run.name, 0.0) + self._how.sample * float(nbytes.sum())
        taken = np.cumsum(nbytes) - nbytes < credit
        self._credit[holding.tier_run.name] = credit - float(nbytes[taken].sum())
        return np.sort(order[taken])

    def _lost(self, holding: Holding) -> Array:
        """One row for each place that is damaged and, as far as is known, whole in no tier."""
        layout, found = holding.layout, [np.zeros(0, "i8")]
        for number, key in enumerate(layout.objects):
            lost = [o for o, w in self._wrong.get((holding.tier_run.name, key), {}).items() if not w.whole]
            rows = np.flatnonzero((layout.object == number) & np.isin(layout.offset, np.array(lost, "u8")))
            _, first = np.unique(layout.offset[rows], return_index=True)
            found.append(rows[first])
        return np.concatenate(found)

    def _read(self, entry: VersionCopies, holding: Holding, rows: Array) -> None:
        """Read each row from this copy; if it is damaged, read the other copies, and repair it."""
        version, name = entry.version, holding.tier_run.name
        copies = [holding, *(h for h in entry.holdings if h is not holding)]
        mender = RepairWriter(version, copies) if self._how.mend else None
        whole: set[int] = set()
        lost: set[int] = set()

        def good(failed: int, row: int, raw: Buffer) -> None:
            whole.add(row)
            if mender is not None:
                mender(failed, row, raw)

        def gone(row: int, _error: TierstateError) -> None:
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
            # In neither set: its earlier repaired copy in this tier is whole, or another tier has it whole and this
            # tier could not be read.
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
            found.mended = holding.tier_run.mended(version.digests[row].tobytes()) is not None
        known = self._wrong.setdefault((holding.tier_run.name, place.object), {}).setdefault(place.offset, found)
        known.whole, known.mended = found.whole, found.mended

    def _note(self, version: Version, holding: Holding) -> None:
        """Record which leaves have damaged places."""
        present = np.flatnonzero(holding.layout.present)
        rows = present[self.wrong(holding, present)]
        for leaf in np.unique(version.chunk_leaf[rows]).tolist():
            places = [holding.layout.place(row) for row in rows[version.chunk_leaf[rows] == leaf].tolist()]
            wrong = [self._wrong[holding.tier_run.name, p.object][p.offset] for p in places if p is not None]
            self._hits.append(_Hit(holding.tier_run.name, version.head, version.leaves[leaf].name, wrong))

    @staticmethod
    def _count(counts: dict[str, int], holding: Holding, version: Version, rows: Array) -> None:
        name = holding.tier_run.name
        counts[name] = counts.get(name, 0) + int(version.chunk_nbytes[rows].sum())
