"""Rebuild lost or damaged records of a tier from the footers of its packs and from the records of other tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tierstate.engine.packs.keys import run_of
from tierstate.engine.packs.pack import PackScan
from tierstate.engine.placement import Routes
from tierstate.engine.store.catalog import release_lease
from tierstate.engine.store.identity import learn_newest
from tierstate.engine.store.run_in_tier import TierRun, tier_run_named
from tierstate.manifest.arrays import Array, digest_list
from tierstate.manifest.chunk import to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, MediaError, NotFound, TierstateError, Unauthentic
from tierstate.manifest.format.layout import LayoutBuilder
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leases import FORK, WHOLE_RUN, Leases, pinned_runs
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.retention import RetentionEntry
from tierstate.tiers.base import Tier
from tierstate.tiers.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class RebuiltVersion:
    """One version whose record a tier has lost.

    Attributes:
        seq, step, id: of the version; step is None and id empty if no record and no pack has a copy of it.
        chunks: how many of its chunks the tier should have.
        found: how many of those are in its packs.
        rebuilt: whether it has a record again, or in a dry run: would have.
        why: why it was not rebuilt.
    """

    seq: int
    step: int | None
    id: str
    chunks: int = 0
    found: int = 0
    rebuilt: bool = False
    why: str = ""


@dataclass
class RebuildReport:
    """What was rebuilt in a tier, and what was not.

    Attributes:
        tier: its name.
        versions: those whose record it has lost, newest first.
        packs: how many packs were read.
        unread: packs whose footer, or whose copy of a version, cannot be read, and why.
        unreachable: tiers whose records could not be read.
        unknown: numbers for which packs were written but of which no record or copy exists: those versions were
            dropped, or all their records are lost.
    """

    tier: str
    versions: list[RebuiltVersion] = field(default_factory=list)
    packs: int = 0
    unread: dict[str, str] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every lost record was rebuilt."""
        return all(version.rebuilt for version in self.versions)


class LastingPacks:
    """The packs of a tier that stay for a new record of a run which names them: its own, and those that pins keep.

    Another run deletes its packs when it needs them no more: their chunks can be read, and may be written again.
    """

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier, self._run = tier, run
        self._sources = pinned_runs(tier).get(run, set())
        self._kept = {key for source in self._sources for key in self._pinned(source)}

    def _pinned(self, run: str) -> Iterator[str]:
        """The packs of all runs that the pinned versions of a run consist of, from which this one was forked."""
        for lease in Leases(self._tier, run).look(self._tier.age).live:
            mine = (lease.kind, lease.by) == (FORK, self._run)
            if mine and (record := Log(self._tier, run).look(lease.seq).record) is not None:
                yield from record.layout.objects

    def has(self, key: str) -> bool:
        """Whether a pack stays."""
        run = run_of(key)
        return run == self._run or run in self._sources or key in self._kept


class _Lost(NamedTuple):
    """Unreadable records of one number: their generations, and why; no generations if the number has no record."""

    generations: Sequence[int]
    why: str = ""
    foreign: bool = False


def rebuild(
    tier_runs: Sequence[TierRun], name: str, policy: Policy, *, partial: bool = False, dry_run: bool = False
) -> RebuildReport:
    """Rebuild lost or damaged records of a tier, if its packs have the chunks.

    The version comes from the record of another tier, or from the copy that a save puts into its last pack. Its layout
    in this tier comes from the footers of this tier's packs. Versions that `keep` would drop at once are skipped.

    Args:
        tier_runs: the run in each tier.
        name: the tier whose records are rebuilt.
        policy: its rules say which leaves the tier should have.
        partial: also rebuild versions of which the packs have only some of those leaves' chunks.
        dry_run: change nothing, only report.

    Raises:
        NotFound: there is no such tier.
        WrongTier: the tier is not the expected one; it may not be mounted.
        TierError: the tier could not be read or written to.
    """
    tier_run = tier_run_named(tier_runs, name)
    learn_newest([one.identity for one in tier_runs])
    tier_run.identity.ensure(create=False)
    others = [s for s in tier_runs if s is not tier_run]
    rebuilder = _Rebuilder(tier_run, others, policy, partial=partial, dry_run=dry_run)
    if dry_run:
        return rebuilder.run()
    # A lease on a version without a record: a sweep deletes no packs until it is known which versions they belong to.
    leases = Leases(tier_run.tier, tier_run.run)
    key = leases.take(WHOLE_RUN, "rebuild")
    try:
        return rebuilder.run()
    finally:
        release_lease(leases, key)
        tier_run.look_again()


class _Rebuilder:
    def __init__(
        self, tier_run: TierRun, others: Sequence[TierRun], policy: Policy, *, partial: bool, dry_run: bool
    ) -> None:
        self._tier_run, self._others, self._partial, self._dry_run = tier_run, others, partial, dry_run
        self._routes = Routes(policy)
        self._report = RebuildReport(tier_run.name)

    def run(self) -> RebuildReport:
        """Find the lost records, and rebuild those that can be rebuilt."""
        tier, run = self._tier_run.tier, self._tier_run.run
        contents = PackScan(tier, run, usable=LastingPacks(tier, run).has)
        readable, damaged = self._own()  # after the packs: a save that was under way has its record by now
        self._report.packs = contents.packs
        versions = self._versions(contents, readable)
        self._report.unread = contents.unread | contents.foreign
        heads = [these[0].head for these in versions.values()]
        kept = self._tier_run.worth_repairing(
            [RetentionEntry(head.seq, head.step, head.time, head.metadata) for head in heads]
        )
        for seq in sorted(kept | damaged.keys(), reverse=True):
            # Other versions may never have been in this tier: it may only have equal chunks.
            was_here = seq in damaged or seq in contents.seqs
            told = self._one(seq, damaged.get(seq, _Lost(())), versions.get(seq, []), contents, was_here)
            if told.rebuilt or was_here:
                self._report.versions.append(told)
        self._report.unknown = sorted(contents.seqs - readable - versions.keys() - damaged.keys())
        return self._report

    def _own(self) -> tuple[set[int], dict[int, _Lost]]:
        """Numbers whose record can be read, and numbers with an unreadable record."""
        readable: set[int] = set()
        damaged: dict[int, _Lost] = {}
        for seq, generations in self._tier_run.log.generations().items():
            try:
                self._tier_run.log.read(seq)
                readable.add(seq)
            except (FormatError, MediaError) as error:
                foreign = isinstance(error, FormatError) and any(
                    _is_whole(self._tier_run, seq, generation) for generation in generations
                )
                damaged[seq] = _Lost(generations, str(error), foreign)
            except NotFound:
                continue  # dropped meanwhile
        return readable, damaged

    def _versions(self, contents: PackScan, readable: set[int]) -> dict[int, list[Version]]:
        """Candidate versions of the numbers without a readable record: from the other tiers, then from the packs."""
        found: dict[int, dict[str, Version]] = {}
        for tier_run in self._others:
            try:
                for seq in tier_run.log.seqs():
                    if seq not in readable and (record := tier_run.log.look(seq).record) is not None:
                        found.setdefault(seq, {}).setdefault(record.version.id, record.version)
            except TierstateError as error:
                self._report.unreachable[tier_run.name] = str(error)
        for version in contents.versions(self._tier_run.run):
            if version.head.seq not in readable:
                found.setdefault(version.head.seq, {}).setdefault(version.id, version)
        return {seq: sorted(these.values(), key=lambda v: v.head.time, reverse=True) for seq, these in found.items()}

    def _one(
        self, seq: int, lost: _Lost, versions: Sequence[Version], contents: PackScan, was_here: bool
    ) -> RebuiltVersion:
        """Rebuild one record, of the candidate of which most chunks are in the tier."""
        if lost.foreign:
            return RebuiltVersion(seq, None, "", why=f"its record is whole, but not for this program: {lost.why}")
        if not versions:
            return RebuiltVersion(
                seq, None, "", why="no other tier has a record of it, and no pack says what it consists of"
            )
        drawn = [(self._draw(version, contents), version) for version in versions]
        (draft, chunks, found), version = max(drawn, key=lambda each: each[0][2])
        told = RebuiltVersion(seq, version.head.step, version.id, chunks, found)
        if found < chunks and not (self._partial and was_here and found):
            return _because(told, f"the packs have {found} of {chunks} chunks")
        if not self._dry_run:
            record = Record(version, draft.build(contents.sizes), rebuilt_commit(self._tier_run))
            self._tier_run.replace(record, lost.generations)
        return RebuiltVersion(seq, version.head.step, version.id, chunks, found, True)

    def _draw(self, version: Version, contents: PackScan) -> tuple[LayoutBuilder, int, int]:
        """A version's layout in this tier; how many chunks the tier should have, and how many of those it has."""
        routed: Array = self._routes.of(version.leaves)[self._tier_run.name].leaves[version.chunk_leaf]
        draft, placed = LayoutBuilder(len(version.digests)), np.zeros(len(version.digests), bool)
        chunks = zip(digest_list(version.digests), version.chunk_nbytes.tolist(), strict=True)
        for row, chunk in enumerate(chunks):
            place = contents.place(*chunk)
            if place is not None:
                draft.put(row, place)
                placed[row] = True
        return draft, int(routed.sum()), int((routed & placed).sum())


def rebuilt_commit(tier_run: TierRun) -> dict[str, Any]:
    """The commit data of a record that is made again where none before it can be read."""
    return {**tier_run.signature(), "rebuilt": True}


def _because(told: RebuiltVersion, why: str) -> RebuiltVersion:
    return RebuiltVersion(told.seq, told.step, told.id, told.chunks, told.found, why=why)


def _is_whole(tier_run: TierRun, seq: int, generation: int) -> bool:
    """Whether an unreadable record is intact: then a newer program version wrote it, and it is not lost."""
    try:
        return is_intact(to_bytes(tier_run.tier.get(tier_run.log.key(seq, generation))))
    except NotFound:
        return False
    except Unauthentic as error:
        return bool(error.key_id)  # sealed with a key that the policy does not have


def is_intact(record: bytes) -> bool:
    """Whether the bytes of a record are what was written, by the checksum at their end."""
    return len(record) > 16 and checksum(record[:-16]) == record[-16:]
