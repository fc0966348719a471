"""Verify that records, packs and chunks in all tiers exist and are unchanged; for ``tierstate verify``.

A deep verification also compares the footers of packs, and loads every leaf with its provider.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from tierstate.engine.packs.keys import pack_prefix, run_of, seq_of
from tierstate.engine.packs.pack import footer_mismatches
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.restore.restore import READ_WORKERS, check_scatter
from tierstate.engine.restore.scatter import Destination, ScatterTargets
from tierstate.engine.store.catalog import Holding, RunCatalog, SeqVersions, VersionCopies
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, NotFound, TierError, TierstateError
from tierstate.manifest.format.layout import is_pack_key
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leases import pin_version, pinned_runs
from tierstate.manifest.history.log import RACE_RETRIES
from tierstate.manifest.history.tags import read_tag, tag_numbers
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tree.structure import version_tree
from tierstate.providers.tree.ties import read_ties
from tierstate.providers.values.classes import stand_in_classes
from tierstate.tiers.concurrency import results_ahead, run_concurrently
from tierstate.tiers.memory.arena import Arena

from .check_chunks import ChunkChecks, Depth, Problem, Unrestorable, VerifyReport

RECORDS_ONLY = Depth()
"""Check records, and the presence and length of packs."""


OPEN_BATCH = 64 << 20
"""Bytes of leaves that are loaded at once, or one leaf if that is more; nothing of them is kept."""


class Verifier:
    """Verifies every version of a run in every tier.

    Args:
        how: what to check; by default records, and the presence and length of packs.
        workers: reads in flight.
        progress: called with the raw bytes read since the last call.
    """

    def __init__(
        self,
        catalog: RunCatalog,
        arena: Arena,
        how: Depth = RECORDS_ONLY,
        *,
        workers: int = 1,
        progress: Progress = no_progress,
    ) -> None:
        self._catalog, self._how = catalog, how
        self._sizes: dict[tuple[str, str], str] = {}
        self._doubtful: list[VersionCopies] = []
        self._shared: dict[str, dict[str, int]] = {}
        self.report = VerifyReport(sample=how.sample, seed=how.seed)
        self._chunks = ChunkChecks(arena, how, self.report, workers, progress)

    def run(self, each: Callable[[VersionCopies], None] = lambda _entry: None) -> VerifyReport:
        """Verify all versions; ``each`` is called with every one that has a record, and may add to the report."""
        for place in results_ahead(self._ask_sizes, self._catalog.every()):
            for left in reversed(range(RACE_RETRIES)):
                if not self._verify(place, each) or not left or not _has_changed(place):
                    break
                # Another process dropped, thinned or repacked it meanwhile, so that packs may be missing rightly.
                self._forget(place.seq)
                place = RunCatalog.look(place.seq, self._having(place))
        self.report.problems += self._chunks.problems()
        for tier_run in self._catalog.tier_runs:
            self.report.problems += self._tags(tier_run)
            self.report.problems += self._pins(tier_run)
        self.report.lost += filter(None, map(self._lost, self._doubtful))
        self.report.lost.sort(key=lambda bad: -bad.seq)
        self.report.unreachable = {name: str(error) for name, error in self._catalog.unreachable.items()}
        return self.report

    def _ask_sizes(self, place: SeqVersions) -> SeqVersions:
        """Ask for the lengths of a number's packs while others are verified; not if a repair may change them."""
        for entry in () if self._how.reads else place.entries:
            for holding in entry.holdings:
                for pack in holding.layout.pack_sizes.items():
                    self._pack(holding, *pack)
        return place

    def _verify(self, place: SeqVersions, each: Callable[[VersionCopies], None]) -> bool:
        """Verify the versions of one number; whether anything was found wrong with them."""
        before = self._found()
        self._unreadable(place)
        for entry in place.entries:
            for holding in entry.holdings:
                self._look(entry, holding)
            if self._missing(entry).any():
                self._doubtful.append(entry)
            each(entry)
        return self._found() > before

    def _found(self) -> int:
        return len(self.report.problems) + len(self.report.lost) + len(self._doubtful) + self._chunks.hits

    def _having(self, place: SeqVersions) -> list[TierRun]:
        """The tiers that have, or had, a record of a number."""
        names = {name for name, _ in place.problems}.union(*(entry.tiers for entry in place.entries))
        return [tier_run for tier_run in self._catalog.tier_runs if tier_run.name in names]

    def _forget(self, seq: int) -> None:
        """Drop what was found about the versions of a number."""
        report = self.report
        report.problems = [problem for problem in report.problems if problem.seq != seq]
        report.lost = [bad for bad in report.lost if bad.seq != seq]
        self._doubtful = [entry for entry in self._doubtful if entry.version.head.seq != seq]
        self._chunks.forget(seq)

    def _tags(self, tier_run: TierRun) -> Iterator[Problem]:
        """The tags of a tier that cannot be read, or that were written as another tag."""
        try:
            for name, numbers in tag_numbers(tier_run.tier, tier_run.run).items():
                try:
                    read_tag(tier_run.tier, tier_run.run, name, numbers[-1])
                except NotFound:
                    continue  # it was moved meanwhile
                except FormatError as error:
                    yield Problem(tier_run.name, 0, None, "", str(error))
        except TierError as error:
            self._catalog.unreachable.setdefault(tier_run.name, error)

    def _pins(self, tier_run: TierRun) -> Iterator[Problem]:
        """Packs of other runs that this run, a fork, uses in a tier without a pin: `keep` may drop them there.

        A repair makes the pin again: what it holds are the packs that the fork's records name, whatever its number.
        """
        shared = self._shared.get(tier_run.name, {})
        try:
            if not shared or tier_run.run in pinned_runs(tier_run.tier):
                return
            for run, seq in sorted(shared.items()):
                what = f"packs of run {run!r} are used and no pin under leases/{run}/ keeps them; --mend makes one"
                if self._how.mend:
                    pin_version(tier_run.tier, run, seq, tier_run.run)
                yield Problem(tier_run.name, 0, None, "", what, mended=self._how.mend)
        except TierError as error:
            self._catalog.unreachable.setdefault(tier_run.name, error)

    def _unreadable(self, place: SeqVersions) -> None:
        self.report.problems += [Problem(name, place.seq, None, "", str(error)) for name, error in place.problems]
        if place.problems and not place.entries:  # without problems, it was dropped since the log was listed
            self.report.lost.append(Unrestorable(place.seq, None))

    def _look(self, entry: VersionCopies, holding: Holding) -> None:
        head, report = entry.version.head, self.report
        report.versions += 1
        if self._how.reads:
            rows = self._chunks.hear(entry, holding)
            if self._how.deep:
                found = footer_mismatches(holding.tier_run.tier, entry.version, holding.layout, rows)
                report.problems += [Problem(holding.tier_run.name, head.seq, head.step, "", what) for what in found]
        shared = self._shared.setdefault(holding.tier_run.name, {})
        for key in holding.layout.objects:
            if (run := run_of(key)) != head.run:
                shared[run] = max(shared.get(run, 0), seq_of(key) or 0)
        # Only now, since a pack that was repaired meanwhile is no problem any more.
        report.problems += self._packs(entry, holding)

    def _packs(self, entry: VersionCopies, holding: Holding) -> Iterator[Problem]:
        head = entry.version.head
        for key, size in holding.layout.pack_sizes.items():
            what = self._pack(holding, key, size)
            if what and not _is_mended(entry, holding, key):
                yield Problem(holding.tier_run.name, head.seq, head.step, "", what)

    def _pack(self, holding: Holding, key: str, size: int) -> str:
        """What is wrong with a pack; empty if nothing. Each pack is checked once, however many versions name it."""
        known = (holding.tier_run.name, key)
        if known not in self._sizes:
            try:
                found = holding.tier_run.tier.size(key)
                self._sizes[known] = "" if found == size else f"{key} has {found} bytes where {size} are right"
            except NotFound:
                self._sizes[known] = f"{key} is missing"
            except TierstateError as error:
                self._sizes[known] = str(error)
        return self._sizes[known]

    def _missing(self, entry: VersionCopies) -> Array:
        """``(chunks,)`` of bool: which chunks are known to be whole in no copy."""
        left = np.ones(len(entry.version.digests), bool)
        hopeless = ~left
        for holding in entry.holdings:
            layout = holding.layout
            # Data that was read is a better check than the length of its pack.
            packs = layout.pack_sizes.items()
            sound = np.array([self._how.data or not self._pack(holding, *pack) for pack in packs], bool)
            rows = np.flatnonzero(left & layout.present)
            left[rows] = ~(sound[layout.object[rows]] & ~self._chunks.wrong(holding, rows))
            hopeless[rows] |= self._chunks.wrong(holding, rows, hopeless=True)
        for row in np.flatnonzero(left & ~hopeless).tolist():
            digest = entry.version.digests[row].tobytes()
            left[row] = not any(h.layout.present[row] and mended(h, digest) for h in entry.holdings)
        return left

    def _lost(self, entry: VersionCopies) -> Unrestorable | None:
        """What of a version cannot be restored; None if all can, for example after a repair."""
        version = entry.version
        leaves = np.unique(version.chunk_leaf[self._missing(entry)]).tolist()
        if not leaves:
            return None
        first = version.leaves[leaves[0]].name
        return Unrestorable(version.head.seq, version.head.step, len(leaves), first, entry.thinned)


def _has_changed(place: SeqVersions) -> bool:
    """Whether a tier has not the record any more by which a version was verified."""
    for entry in place.entries:
        for holding, record in zip(entry.holdings, entry.records, strict=True):
            with suppress(TierstateError):
                if not holding.tier_run.log.stands(record):
                    return True
    return False


def mended(holding: Holding, digest: bytes) -> bool:
    """Whether a tier has a repaired copy of a chunk; False if that cannot be read."""
    try:
        return holding.tier_run.mended(digest) is not None
    except TierstateError:
        return False


def _is_mended(entry: VersionCopies, holding: Holding, key: str) -> bool:
    """Whether all chunks of a version in a damaged pack have repaired copies in the same tier."""
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


def verify_run(catalog: RunCatalog, arena: Arena, how: Depth, progress: Progress) -> VerifyReport:
    """Verify every version of a run in every tier.

    Args:
        how: what to check. ``deep`` also rebuilds the containers, and loads every leaf into a new value with its
            provider, except pickles.
        progress: called with the raw bytes read since the last call.
    """
    verifier = Verifier(catalog, arena, how, workers=READ_WORKERS, progress=progress)
    return verifier.run(_Opening(arena, verifier.report, progress) if how.deep else lambda _entry: None)


def bytes_to_verify(tier_runs: Sequence[TierRun], how: Depth) -> int:
    """About how many raw bytes `verify_run` reads: the lengths of the packs, in proportion to what the versions have
    before their codecs. Tiers that cannot be read count for nothing.

    Content that a version has, the next one has not, and a later one has again counts twice. ``deep`` reads it once,
    but only all records together would tell."""
    found = [0.0]
    for tier_run in tier_runs:
        with suppress(TierstateError):
            summaries = [s for one in tier_run.summaries.look().values() for s in one.summaries]
            if summaries:
                stored = _pack_bytes(tier_run, {key for s in summaries for key in s.packs})
                found.append(stored * _ratio(tier_run.record(summaries[-1].seq)))
    return int(sum(found) * (how.sample or 1.0) + (max(found) if how.deep else 0.0))


def _ratio(record: Record) -> float:
    """Raw bytes for each stored byte of a version in a tier, where a place that many chunks share counts once."""
    layout = record.layout
    rows = np.flatnonzero(layout.present)
    places = np.stack([layout.object[rows].astype("u8"), layout.offset[rows].astype("u8")], 1)
    rows = rows[np.unique(places, axis=0, return_index=True)[1]]
    return float(record.version.chunk_nbytes[rows].sum()) / max(1.0, float(layout.stored[rows].sum()))


def bytes_to_examine(tier_runs: Sequence[TierRun]) -> int:
    """About how many stored bytes `doctor` reads: the lengths of all packs, also of those that no record names. Tiers
    that cannot be read count for nothing."""
    total = 0
    for tier_run in tier_runs:
        with suppress(TierstateError):
            packs = filter(is_pack_key, tier_run.tier.list(pack_prefix(tier_run.run)))
            total += _pack_bytes(tier_run, packs)
    return total


def _pack_bytes(tier_run: TierRun, keys: Iterable[str]) -> int:
    """Bytes of packs; those that are not there or cannot be asked for count for nothing."""

    def size(key: str) -> int:
        try:
            return tier_run.tier.size(key)
        except TierstateError:
            return 0

    return sum(run_concurrently(size, keys))


class _Opening:
    """Loads the leaves of versions with their providers; equal leaves of other versions are not loaded again."""

    def __init__(self, arena: Arena, report: VerifyReport, progress: Progress) -> None:
        self._arena, self._report, self._progress = arena, report, progress
        self._opened: set[bytes] = set()

    def __call__(self, entry: VersionCopies) -> None:
        version = entry.version
        try:
            version_tree(version.leaves)
            read_ties(version.leaves)
        except FormatError as error:
            self._tell(entry, -1, error)
            return
        for batch in _batches(version, list(self._unopened(version))):
            with stand_in_classes():  # of the user's classes only names are known here
                self._open(entry, batch)

    def _unopened(self, version: Version) -> Iterator[int]:
        """Indices of the leaves to load."""
        digests = version.digests.tobytes()
        first, end = (np.searchsorted(version.chunk_leaf, np.arange(len(version.leaves)), s) for s in ("left", "right"))
        shards = np.searchsorted(version.shard_leaf, np.arange(len(version.leaves) + 1)).tolist()
        for i, leaf in enumerate(version.leaves):
            if not leaf.spec.has_bytes:
                continue
            boxes = [version.boxes[s] for s in range(shards[i], shards[i + 1])]
            name = checksum(_described(leaf.spec, boxes) + digests[16 * int(first[i]) : 16 * int(end[i])])
            if name not in self._opened:
                self._opened.add(name)
                yield i

    def _open(self, entry: VersionCopies, leaves: Sequence[int]) -> None:
        version = entry.version
        failed: dict[int, Exception] = {}
        providers = {i: p for i in leaves if (p := self._fresh(entry, i)) is not None}
        targets = self._land(version, providers, failed)
        torn: set[int] = set()  # their damage is already in the report
        self._load(entry, targets, failed, torn)
        for i in providers.keys() - failed.keys() - torn:
            try:
                providers[i].done()
            except Exception as error:
                failed[i] = error
        for i in sorted(failed):
            self._tell(entry, i, failed[i])

    @staticmethod
    def _land(version: Version, providers: Mapping[int, Provider], failed: dict[int, Exception]) -> ScatterTargets:
        """Read targets of the leaves whose shards cover them; the others are added to ``failed``."""
        to = {i: Destination(i, Box.whole(version.leaves[i].spec.shape), p) for i, p in providers.items()}
        targets = ScatterTargets(version, list(to.values()))
        try:
            check_scatter(version, targets)
            return targets
        except FormatError:
            for i, one in to.items():
                try:
                    check_scatter(version, ScatterTargets(version, [one]))
                except FormatError as error:
                    failed[i] = error
        return ScatterTargets(version, [one for i, one in to.items() if i not in failed])

    def _load(
        self, entry: VersionCopies, targets: ScatterTargets, failed: dict[int, Exception], torn: set[int]
    ) -> None:
        """Load the bytes with the providers; their errors go to ``failed``, leaves with a lost chunk to ``torn``."""
        version = entry.version

        def load(row: int, raw: Buffer, _slab: object) -> None:
            try:
                event = targets.give(row, raw)
                if event is not None:
                    event.synchronize()
            except Exception as error:
                failed[int(version.chunk_leaf[row])] = error

        def lose(row: int, _error: TierstateError) -> None:
            torn.add(int(version.chunk_leaf[row]))

        fetch = Fetch(version, entry.holdings, self._arena, workers=READ_WORKERS, lost=lose, progress=self._progress)
        fetch.run(targets.rows.tolist(), load)

    def _fresh(self, entry: VersionCopies, index: int) -> Provider | None:
        """A provider that loads into a new value; None if there is none, or loading is not safe (pickle)."""
        spec = entry.version.leaves[index].spec
        try:
            found = REGISTRY.by_kind(spec.kind)
            if not found.unsafe:
                return found.fresh(spec)
        except Exception as error:
            self._tell(entry, index, error)
            return None
        self._report.unopened += 1
        return None

    def _tell(self, entry: VersionCopies, index: int, error: Exception) -> None:
        head = entry.version.head
        name = entry.version.leaves[index].name if index >= 0 else ""
        what = str(error) if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
        self._report.problems.append(Problem("", head.seq, head.step, name, what))


def _described(spec: Spec, boxes: Sequence[Box]) -> bytes:
    return json.dumps([spec.kind, spec.dtype, spec.shape, spec.attrs, boxes], sort_keys=True, default=str).encode()


def _batches(version: Version, leaves: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    held = 0
    for i in leaves:
        nbytes = version.leaves[i].spec.nbytes
        if batch and held + nbytes > OPEN_BATCH:
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += nbytes
    if batch:
        yield batch
