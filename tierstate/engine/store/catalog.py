"""The catalog: which versions of a run exist, in which tiers; and leases on versions while they are read.

A lease keeps a version, and the packs that its record names, from being deleted by retention, sweep or repack of
another process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from tierstate.engine.packs.keys import pack_prefix
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import (
    NotFound,
    TierError,
    TierstateError,
    Unauthentic,
    Unreadable,
    cannot_be_asked,
    tier_text,
)
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import Record, Summary
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leases import Leases
from tierstate.manifest.history.retention import dropped_groups
from tierstate.tiers.concurrency import results_ahead

from .identity import check_nothing_missing, check_tiers
from .index import MAX_READ, READ_WITHOUT_INDEX, SeqSummaries
from .run_in_tier import TierRun

log = logging.getLogger("tierstate")


LEASE_FROM = 64 << 20
"""A restore of at least this many bytes takes a lease. A shorter one ends before retention can drop what it reads, or
else starts again; the three disk syncs of a lease would be most of its time."""


ID_LENGTH = 32
"""Hexadecimal digits of a version's id."""


LOOK_FURTHER = "`tierstate doctor` looks in all packs of all tiers, and repairs what it finds"
"""What errors say about chunks that no record leads to: a pack whose record is lost, or a copy that belongs to another
version, may have them."""


Source: TypeAlias = tuple[TierRun, Record]
"""A run in a tier, and the record by which a version is read there."""


class Holding(NamedTuple):
    """One tier's copy of a version."""

    tier_run: TierRun
    layout: Layout


@dataclass(frozen=True, eq=False)
class VersionCopies:
    """One version and its copies in the tiers, nearest tier first.

    Attributes:
        records: the record of each copy, in the order of `holdings`.
        away: tiers that cannot be asked now for a record of this number, or which numbers they have, with the reason.
            Each may have another copy.
    """

    version: Version
    holdings: tuple[Holding, ...]
    records: tuple[Record, ...]
    away: tuple[str, ...] = ()

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that have a record of it."""
        return tuple(h.tier_run.name for h in self.holdings)

    @property
    def thinned(self) -> str:
        """A message that says what retention has dropped of it; empty if nothing was dropped."""
        records = zip(self.tiers, self.records, strict=True)
        gone = [f"{glob} from {name}" for name, record in records for glob in dropped_groups(record.commit)]
        return f"`keep` has dropped leaves of it ({', '.join(gone)})" if gone else ""

    @property
    def remedy(self) -> str:
        """For a message about chunks of it that no tier has: what retention has dropped, or what may find them."""
        gone = self.thinned
        return f"{gone}: ask for others by `only`, or for another version" if gone else LOOK_FURTHER

    def absent(self, rows: Array) -> Array:
        """The rows, of those given, whose chunk is in no copy."""
        here = np.zeros(len(self.version.digests), bool)
        for holding in self.holdings:
            here |= holding.layout.present
        missing: Array = rows[~here[rows]]
        return missing


@dataclass(frozen=True)
class SeqVersions:
    """The versions that the tiers have with one number (`seq`), and the records that cannot be read.

    Attributes:
        away: as in `VersionCopies`.
    """

    seq: int
    entries: tuple[VersionCopies, ...]
    problems: tuple[tuple[str, TierstateError], ...]
    away: tuple[str, ...]

    @property
    def told(self) -> str:
        """Text for a message: why no record of it can be read."""
        return "; ".join(dict.fromkeys((*(tier_text(*problem) for problem in self.problems), *self.away)))


@dataclass
class RunCatalog:
    """All versions of a run over all tiers.

    Attributes:
        tier_runs: the run in each tier, nearest first.
        unreachable: tiers whose log could not be listed, with the reason; known after the first listing.
        refused: whether a record was met that is not authentic (`note`).
        unread: whether a number was met of which no record can be read, and one of them only not now (`note`).
    """

    tier_runs: Sequence[TierRun]
    unreachable: dict[str, TierstateError] = field(default_factory=dict)
    refused: bool = False
    unread: bool = False

    @property
    def unlisted(self) -> tuple[str, ...]:
        """The tiers that cannot be asked now which versions they have, with the reason."""
        return tiers_away(self.unreachable.items())

    def seqs(self) -> dict[int, list[TierRun]]:
        """For each number, in rising order, the tier runs that have a record of it."""
        found: dict[int, list[TierRun]] = {}
        for tier_run in self.tier_runs:
            try:
                for seq in tier_run.log.seqs():
                    found.setdefault(seq, []).append(tier_run)
            except TierstateError as error:
                self.unreachable[tier_run.name] = error
                log.warning("%s: its log cannot be listed: %s", tier_run.name, error)
        return dict(sorted(found.items()))

    def steps(self) -> list[int]:
        """The steps of all versions whose records can be read, ascending; tiers that cannot be listed are left out."""
        every = (one for known in self._known().values() for one in known.values())
        return sorted({summary.step for one in every for summary in one.summaries})

    def stray_packs(self) -> str:
        """Text for a message about a run without any record: the tiers that have packs of it; empty if none has."""
        found = []
        for tier_run in self.tier_runs:
            try:
                if any(True for _ in tier_run.tier.list(pack_prefix(tier_run.run))):
                    found.append(tier_run.name)
            except TierstateError as error:
                log.debug("%s: its packs cannot be listed: %s", tier_run.name, error)
        return f"; there are packs of it in {', '.join(found)}, whose records are lost: {LOOK_FURTHER}" if found else ""

    def check_unique(self, prefix: str) -> None:
        """Check that the beginning of an id names at most one version, over all tiers that can be listed.

        Raises:
            ValueError: it is empty, or several versions have ids that begin so.
        """
        if not prefix:
            raise ValueError("an empty id names no version; give the beginning of one")
        found: dict[str, tuple[int, int]] = {}
        for tier_run in self.tier_runs if len(prefix) < ID_LENGTH else ():
            try:
                seen = tier_run.summaries.look()
            except TierstateError as error:
                log.warning("%s: its log cannot be listed: %s", tier_run.name, error)
                continue
            for one in seen.values():
                found |= {s.id: (s.seq, s.step) for s in one.summaries if s.id.startswith(prefix)}
        if len(found) > 1:
            named = ", ".join(f"{id[:12]} (step {step})" for id, (_, step) in sorted(found.items())[:8])
            raise ValueError(f"{prefix!r} fits the ids of {len(found)} versions: {named}; give more of the id")

    def newest_first(
        self,
        upto: int | None = None,
        *,
        fits: Callable[[Summary], bool] | None = None,
        listed: dict[int, list[TierRun]] | None = None,
    ) -> Iterator[SeqVersions]:
        """All numbers from the newest on, or from ``upto`` down; records are read lazily.

        Args:
            fits: whether a version may be wanted; None: each is. Of all but the first few numbers those are left out of
                which it is known that none fits: a record takes a request, and an index has thousands of them.
            listed: what `seqs` has returned; None to list now.
        """
        known: Mapping[str, Mapping[int, SeqSummaries]] | None = None
        found = self.seqs() if listed is None else listed
        numbers = [seq for seq in reversed(found) if upto is None or seq <= upto]
        for count, seq in enumerate(numbers):
            if fits is not None and count >= READ_WITHOUT_INDEX:
                known = self._known(MAX_READ) if known is None else known
                if not any(_may_fit(known[tier_run.name].get(seq), fits) for tier_run in found[seq]):
                    continue
            place = self.look(seq, found[seq], self.unlisted)
            self.note(place)
            yield place

    def every(self) -> Iterator[SeqVersions]:
        """All numbers from the newest on, for those who need them all: the next records are read meanwhile."""
        found = self.seqs()
        for place in results_ahead(lambda seq: self.look(seq, found[seq], self.unlisted), reversed(found)):
            self.note(place)
            yield place

    def _known(self, at_most: int | None = None) -> Mapping[str, Mapping[int, SeqSummaries]]:
        """By tier and number what indexes have, and so many of the records that are in none; nothing of tiers that
        cannot be listed."""
        found: dict[str, Mapping[int, SeqSummaries]] = {}
        for tier_run in self.tier_runs:
            try:
                found[tier_run.name] = tier_run.summaries.look(at_most)
            except TierstateError as error:
                found[tier_run.name] = {}
                log.debug("%s: its log cannot be listed: %s", tier_run.name, error)
        return found

    def note(self, found: SeqVersions) -> None:
        """Remember what is wrong with the records of a number, for the error if no version can be restored."""
        self.refused |= any(isinstance(error, Unauthentic) for _, error in found.problems)
        self.unread |= bool(found.away) and not found.entries

    def check_tiers(self) -> None:
        """Check that each tier is the one that the records name that were read so far.

        Raises:
            WrongTier: a tier is not; it may hold newer versions.
        """
        check_tiers([tier_run.identity for tier_run in self.tier_runs])

    def check_not_turned_back(self) -> None:
        """Check that no tier whose objects are authenticated has lost the newest version that this process saved to it.

        Raises:
            Unauthentic: a tier has.
        """
        for tier_run in self.tier_runs:
            try:
                tier_run.check_not_turned_back()
            except TierError as error:
                log.debug("%s: whether its newest version is there cannot be told: %s", tier_run.name, error)

    def check_empty(self) -> None:
        """Check, where no version was found, that nothing says that a tier is missing in which there may be some.

        Raises:
            WrongTier: a tier is not the expected one.
            TierUnavailable: a persistent tier cannot be read now.
        """
        for tier_run in self.tier_runs:
            error = self.unreachable.get(tier_run.name)
            if error is not None and tier_run.tier.traits.persistent:
                raise Unreadable(
                    f"run {tier_run.run!r} has no version in the tiers that answer, and {tier_run.name} cannot be "
                    f"asked now: {error}",
                    tier=tier_run.name,
                ) from error
        check_nothing_missing([tier_run.identity for tier_run in self.tier_runs])

    @staticmethod
    def look(seq: int, tier_runs: Sequence[TierRun], unlisted: tuple[str, ...] = ()) -> SeqVersions:
        """The versions that these tiers have with one number. ``unlisted``: others, which may have it too."""
        copies: dict[str, list[tuple[Holding, Record]]] = {}
        problems = []
        for tier_run in tier_runs:
            try:
                record = tier_run.log.read(seq)
            except NotFound:
                continue  # dropped since the log was listed
            except TierstateError as error:
                problems.append((tier_run.name, error))
                continue
            tier_run.identity.learn(record)
            copies.setdefault(record.version.id, []).append((Holding(tier_run, record.layout), record))
        away = (*tiers_away(problems), *unlisted)
        entries = [
            VersionCopies(found[0][1].version, tuple(h for h, _ in found), tuple(r for _, r in found), away)
            for found in copies.values()
        ]
        # Two writers may have used one number in different tiers: the later one counts as the newer.
        entries.sort(key=lambda e: e.version.head.time, reverse=True)
        return SeqVersions(seq, tuple(entries), tuple(problems), away)


def _may_fit(known: SeqSummaries | None, fits: Callable[[Summary], bool]) -> bool:
    """Whether a tier's copy of a number may be a version that fits: not if all of its records are known, and none
    does."""
    return known is None or len(known.summaries) < len(known.generations) or any(map(fits, known.summaries))


def tiers_away(problems: Iterable[tuple[str, TierstateError]]) -> tuple[str, ...]:
    """Those of the tiers with an error that cannot be asked now, with the reason."""
    return tuple(tier_text(name, error) for name, error in problems if cannot_be_asked(error))


class VersionMoved(NotFound):
    """A version was dropped, or got a new record, before its lease was taken: look it up again."""

    transient: ClassVar[bool] = True


@contextmanager
def lease_for_reading(sources: Sequence[Source], nbytes: int | None = None) -> Iterator[None]:
    """Hold leases on a version in these tiers while the block reads it.

    Args:
        nbytes: bytes that will be read, if known: a short read needs no lease (`LEASE_FROM`).

    Tiers that only this process sees need no lease. A tier that cannot store one (read-only or full) is read without
    a lease.

    Raises:
        VersionMoved: a record no longer exists; raised before the block is entered.
    """
    with ExitStack() as held:
        for tier_run, record in sources:
            if tier_run.tier.traits.shared != "process" and (nbytes is None or nbytes >= LEASE_FROM):
                _hold(tier_run, record, held)
        yield


@contextmanager
def lease_newest(tier_run: TierRun) -> Iterator[None]:
    """Hold a lease on the newest version of a run in a tier while an older version is copied to it.

    The record of the copy may name packs of the newest version, and a saver could commit the next version and drop
    this one meanwhile.

    Raises:
        VersionMoved: the newest version was just dropped; raised before the block is entered.
    """
    with ExitStack() as held:
        if (record := tier_run.newest()) is not None:
            _hold(tier_run, record, held)
        yield


def read_sources(entry: VersionCopies, rows: Array) -> list[Source]:
    """The copies from which these rows will be read if nothing is damaged: for each row the first that has it."""
    found, left = [], rows
    for holding, record in zip(entry.holdings, entry.records, strict=True):
        here = holding.layout.present[left]
        if here.any():
            found.append((holding.tier_run, record))
        left = left[~here]
    return found


def _hold(tier_run: TierRun, record: Record, held: ExitStack) -> None:
    leases, seq = Leases(tier_run.tier, tier_run.run), record.version.head.seq
    try:
        key = leases.take(seq, record=record.commit["id"])
    except TierError as error:
        log.debug("%s: version %d is read without a lease: %s", tier_run.name, seq, error)
        return
    held.callback(release_lease, leases, key)
    try:
        there = tier_run.log.holds(record)
    except TierError as error:
        log.debug("%s: whether version %d is still there cannot be told: %s", tier_run.name, seq, error)
        return
    if not there:
        raise VersionMoved(
            f"{tier_run.name}: version {seq} of run {tier_run.run!r} was dropped or moved just now", tier=tier_run.name
        )


def release_lease(leases: Leases, key: str) -> None:
    """Release a lease; if that fails, it is told: the lease ends with this process, or in a day."""
    try:
        leases.release(key)
    except TierError as error:
        until = "until this process ends, or for a day where nobody can see that"
        log.warning("%s: %s stays, and may keep packs %s: %s", leases.tier.name, key, until, error)
