"""Doctor: what is lost of a run over all of its tiers, what is not, and how to repair it; for ``tierstate doctor``.

`verify` follows records. The doctor also looks at chunks that no record leads to: packs whose record is lost or cannot
be read, packs of other tiers, repaired copies, and what is still legible of a damaged record. So a version counts as
lost only if some chunk of it is undamaged in no pack of any tier.

A repair writes the missing chunks of a version and then a record of it, and deletes nothing but records that this one
replaces. An interruption therefore leaves unused packs and never less than there was; the next run goes on from there.
What only another run has is written again, since that run may drop it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from tierstate.engine.packs.pack import PackScan, PackWriter, related_runs
from tierstate.engine.placement import Cadence, LastSave, Routes, is_due
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.publish.backlog import PendingVersion, missed_versions
from tierstate.engine.store.catalog import RunCatalog, release_lease
from tierstate.engine.store.identity import learn_newest
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.copy import copy_version
from tierstate.engine.versions.tags import TagFlaw, Tags
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import to_bytes
from tierstate.manifest.errors import (
    AlreadyExists,
    FormatError,
    MediaError,
    NotFound,
    TierstateError,
    Unauthentic,
)
from tierstate.manifest.format.layout import RAW, Layout, LayoutBuilder
from tierstate.manifest.format.record import Record, surviving_parts
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history.leases import Leases, pinned_runs
from tierstate.manifest.history.log import RACE_RETRIES, Log
from tierstate.manifest.history.removals import removals, was_removed
from tierstate.manifest.history.retention import RetentionEntry
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .chunk_search import ChunkId, ChunkSearch, chunk_ids
from .rebuild import LastingPacks, commit_rebuilt, is_intact

Kind = Literal["rebuild", "mend", "clean", "copy", "tag"]


State = Literal["whole", "part", "damaged", "lost", "unknown"]


LEAVES_NAMED = 20
"""Names of lost leaves that a report has of each version."""


_BESIDE = "a damaged record beside a sound one"


@dataclass(frozen=True)
class Repair:
    """One repair, in one tier.

    Attributes:
        kind: ``rebuild``: a lost or damaged record is made again; ``mend``: damaged or missing chunks are written
            again, under a new record; ``clean``: damaged records beside a sound one are deleted; ``copy``: a version
            that is due in the tier is copied there; ``tag``: a tag is written again.
        tier: the tier that gets it; empty for tags, which all persistent tiers get.
        seq, step: the version; 0 and None for tags.
        what: the damage.
        chunks, nbytes: how many chunks are written, and their raw bytes.
        sources: the tiers from which these chunks come.
        done: whether it was carried out.
        error: why it failed.
    """

    kind: Kind
    tier: str
    seq: int
    step: int | None
    what: str
    chunks: int = 0
    nbytes: int = 0
    sources: tuple[str, ...] = ()
    done: bool = False
    error: str = ""


@dataclass(frozen=True)
class VersionHealth:
    """One version over all tiers, as it was found.

    Attributes:
        seq, step, id: of the version; None and empty if nothing says what it consisted of.
        state: ``whole``: it can be restored, and every copy is whole; ``damaged``: some copy is not, and all of it can
            be repaired; ``part``: what should be there is whole, and retention, or the rules, have left out the rest;
            ``lost``: a part of it is nowhere; ``unknown``: what is missing may be in a tier that cannot be asked.
        tiers: by tier, the state of its copy: ``whole``, ``part``, ``damaged``, ``record damaged``, ``record lost``.
        restorable: whether a restore gets it as it is now.
        leaves: how many leaves have a chunk that is nowhere.
        lost: names of the first of them.
        left_out: how many leaves no tier should have any more, or never got.
        why: why it is lost or unknown.
    """

    seq: int
    step: int | None
    id: str
    state: State
    tiers: Mapping[str, str] = field(default_factory=dict)
    restorable: bool = False
    leaves: int = 0
    lost: tuple[str, ...] = ()
    left_out: int = 0
    why: str = ""


@dataclass
class DoctorReport:
    """What a doctor found, and did or would do.

    Attributes:
        applied: whether the repairs were carried out.
        versions: newest first; the state is the one before any repair.
        repairs: in the order in which they are to be carried out.
        unreachable: tiers that could not be read, or not everywhere, and why.
        notes: other damage, with what can be done about it.
        unknown: numbers of which packs are there, and neither a record nor a copy: dropped, or lost as a whole.
    """

    applied: bool = False
    versions: list[VersionHealth] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, or all that was wrong has been repaired."""
        lost = any(version.state in ("lost", "unknown") for version in self.versions)
        return not (lost or self.unreachable or self.notes) and all(repair.done for repair in self.repairs)


class _Step(NamedTuple):
    """A repair, and what is needed to carry it out."""

    repair: Repair
    version: Version | None = None
    rows: tuple[int, ...] = ()
    base: Record | None = None
    replaced: tuple[int, ...] = ()


class _TierView:
    """All that one tier has of a run: records of every generation, what is legible of damaged ones, and footers."""

    def __init__(self, tier_run: TierRun, related: Sequence[str]) -> None:
        self.tier_run, self.name = tier_run, tier_run.name
        self.lasts = tier_run.tier.traits.persistent
        self.records: dict[int, dict[int, Record]] = {}
        self.damaged: dict[int, dict[int, str]] = {}
        self.away: dict[int, str] = {}
        self.foreign: dict[int, str] = {}
        self._sectors: set[tuple[int, int]] = set()
        self.legible: list[Version] = []
        self.layouts: list[tuple[Version, Layout]] = []
        self._removals = removals(tier_run.tier, tier_run.run)
        for seq, generations in tier_run.log.generations().items():
            for generation in generations:
                self._read(seq, generation)
        self.scan = PackScan(tier_run.tier, tier_run.run, related, go_on=True)
        for run in self.scan.runs[:-1]:
            found = (entry.record for entry in Log(tier_run.tier, run).newest_first())
            self.layouts += [(record.version, record.layout) for record in found if record is not None]
        self.copies = list(self.scan.versions(tier_run.run))
        self.lasting = LastingPacks(tier_run.tier, tier_run.run)

    def _read(self, seq: int, generation: int) -> None:
        try:
            record = self.tier_run.log.read_generation(seq, generation)
        except NotFound:
            return  # dropped or replaced meanwhile
        except MediaError as error:
            self.damaged.setdefault(seq, {})[generation] = str(error)
            self._sectors.add((seq, generation))
        except FormatError as error:
            self._salvage(seq, generation, error)
        except TierstateError as error:
            self.away[seq] = str(error)
        else:
            self.records.setdefault(seq, {})[generation] = record
            self.layouts.append((record.version, record.layout))

    def look_again(self, seqs: Collection[int]) -> bool:
        """Forget records that are gone, and read those that have come: beside a running job, what it has dropped or
        moved since is not damaged, and what it was just saving is not lost. Returns whether there were any.

        Args:
            seqs: numbers of the versions that are known; others, which were saved since, are not looked at.
        """
        try:
            listed = self.tier_run.log.generations()
            there = {(seq, generation) for seq, these in listed.items() for generation in these}
            known = {(seq, g) for found in (self.records, self.damaged) for seq, these in found.items() for g in these}
            gone = known - there
            new = [one for one in there - known if one[0] in seqs and not {one[0]} & {*self.away, *self.foreign}]
            if gone:
                self._removals = removals(self.tier_run.tier, self.tier_run.run)
        except TierstateError:
            return False  # what was read before is what is known
        for seq, generation in gone:
            for found in (self.records, self.damaged):
                found.get(seq, {}).pop(generation, None)
        self.records = {seq: these for seq, these in self.records.items() if these}
        self.damaged = {seq: these for seq, these in self.damaged.items() if these}
        for seq, generation in sorted(new):
            self._read(seq, generation)
        return bool(gone or new)

    @property
    def removed(self) -> set[int]:
        """Numbers of versions that were removed by hand."""
        return {removal.entry.seq for removal in self._removals}

    def _salvage(self, seq: int, generation: int, error: FormatError) -> None:
        """Take what is legible of a damaged record, but leave the record of a newer program alone."""
        try:
            data = to_bytes(self.tier_run.tier.get(self.tier_run.log.key(seq, generation)))
        except TierstateError:
            data = b""
        # Sealed with a key that the policy does not have, it may be whole as well.
        if is_intact(data) or (isinstance(error, Unauthentic) and error.key_id):
            self.foreign[seq] = str(error)
            return
        self.damaged.setdefault(seq, {})[generation] = str(error)
        version, layout = surviving_parts(memoryview(data))
        if version is not None and (version.head.run, version.head.seq) == (self.tier_run.run, seq):
            self.legible.append(version)
            if layout is not None:
                self.layouts.append((version, layout))

    def current(self, seq: int) -> Record | None:
        """The record that a restore reads (`Log.read`): it passes over damaged ones, but not over bad sectors."""
        found = self.records.get(seq, {})
        for generation in sorted(self.generations(seq), key=lambda g: (g > 0, -g)):
            if generation in found:
                return found[generation]
            if (seq, generation) in self._sectors:
                return None
        return None

    def has(self, version: Version) -> bool:
        """Whether a restore finds a record of this version."""
        record = self.current(version.head.seq)
        return record is not None and record.version.id == version.id

    def unread(self, seq: int) -> dict[str, str]:
        """The tier with the state of a record that a restore does not get; empty if there is none."""
        if seq in self.away or seq in self.foreign:
            return {self.name: "cannot be read"}
        return {self.name: "record damaged"} if seq in self.damaged else {}

    def generations(self, seq: int) -> tuple[int, ...]:
        """All generations of a number, legible or not."""
        return tuple(sorted({*self.records.get(seq, ()), *self.damaged.get(seq, ())}))

    def was_removed(self, version: Version) -> bool:
        """Whether somebody has removed this version by hand, and not an earlier one of its number."""
        head = version.head
        return was_removed(self._removals, head.seq, head.step, head.time)

    def taken(self, seq: int) -> bool:
        """Whether the number has any record, so that no other may be written beside it."""
        return seq in self.foreign or seq in self.away or bool(self.generations(seq))


def doctor(
    tier_runs: Sequence[TierRun],
    policy: Policy,
    arena: Arena,
    *,
    apply: bool = False,
    progress: Progress = no_progress,
) -> DoctorReport:
    """Find out what is lost of a run, and what can be repaired from what; with ``apply`` also repair it.

    Every chunk in every tier is read. A repair is right only while no other process saves, prunes or repairs this run.
    Calling it again, also after it was killed, does what is left to do.

    Args:
        tier_runs: the run in each tier, nearest first.
        policy: its rules say which leaves a tier should have, `every` which versions are due, `keep` which are wanted.
        apply: carry out the repairs; otherwise nothing is changed.
        progress: called with the bytes read since the last call.
    """
    report, views = DoctorReport(apply), []
    related = related_runs(list(_pins(tier_runs)), tier_runs[0].run, forks=True)
    learn_newest([tier_run.identity for tier_run in tier_runs])
    with ExitStack() as held:
        for tier_run in tier_runs:
            try:
                # What is missing in the mount point of a file system that is not mounted is not lost.
                tier_run.identity.ensure(create=False)
            except TierstateError as error:
                report.unreachable[tier_run.name] = str(error)
                continue
            try:
                # A lease on no version: no sweep deletes packs meanwhile.
                if apply and tier_run.tier.traits.persistent:
                    leases = Leases(tier_run.tier, tier_run.run)
                    held.callback(release_lease, leases, leases.take(0, "doctor"))
            except TierstateError as error:
                report.notes.append(f"{tier_run.name}: repairs of it cannot be kept from a sweep: {error}")
            try:
                views.append(_TierView(tier_run, related))
            except TierstateError as error:
                report.unreachable[tier_run.name] = str(error)
        if apply:
            _level_tags([view.tier_run for view in views if view.lasts], report)
        found = _Diagnosis(views, policy, report, progress)
        steps = found.run()
        if apply:
            _Treatment(tier_runs, policy, arena, found.search, progress).run(steps, report)
        else:
            report.repairs = [step.repair for step in steps]
    return report


def _tag_steps(flaws: Mapping[str, TagFlaw]) -> list[_Step]:
    """The repairs of tags that can be read in one tier and not in another."""
    return [_Step(Repair("tag", "", 0, None, f"tag {name}: {it.why}")) for name, it in flaws.items() if it.legible]


def _level_tags(lasting: Sequence[TierRun], report: DoctorReport) -> None:
    """Repair tags before all else: while one cannot be read, it is not known which versions `keep` wants."""
    steps = _tag_steps(Tags(lasting).flaws() if lasting else {})
    with suppress(TierstateError):  # then it is tried again with the other repairs, and told
        if steps:
            Tags(lasting).level()
            report.repairs += [dataclasses.replace(step.repair, done=True) for step in steps]


def _pins(tier_runs: Sequence[TierRun]) -> Iterator[Mapping[str, set[str]]]:
    """The pins of forks in each tier that can be listed; one may have a fork without them, which was saved there."""
    for tier_run in tier_runs:
        try:
            yield pinned_runs(tier_run.tier)
        except TierstateError:
            continue  # it is told where the rest of the tier is read


class _Case:
    """One version, as far as its diagnosis has come.

    Attributes:
        expected: ``(chunks,)`` of bool: which chunks it should have.
        lost: those of them that are undamaged nowhere.
        served: those that a restore gets now.
        kept: those that it gets after the repairs decided so far.
        states: by tier, the state of its copy.
    """

    def __init__(self, version: Version, expected: Array, exists: Array) -> None:
        self.version, self.expected = version, expected
        self.lost: Array = expected & ~exists
        self.served, self.kept = np.zeros(len(expected), bool), np.zeros(len(expected), bool)
        self.states: dict[str, str] = {}

    @property
    def restorable(self) -> bool:
        """Whether a restore gets all of it as it is now."""
        return bool((self.served | ~self.expected).all())

    @property
    def left(self) -> Array:
        """The chunks that a restore does not get after the repairs."""
        found: Array = self.expected & ~self.kept
        return found


def _asked_of(tiers: Collection[str]) -> str:
    return f"what is missing may be in {', '.join(sorted(tiers))}, which cannot be asked now"


class _Diagnosis:
    """Finds what each version lacks in each tier, and decides on the repairs. Changes nothing."""

    def __init__(self, views: Sequence[_TierView], policy: Policy, report: DoctorReport, progress: Progress) -> None:
        self._views, self._policy, self._report = views, policy, report
        self._lasting = [view for view in views if view.lasts]
        self._routes = Routes(policy)
        self._steps: list[_Step] = []
        self.search = ChunkSearch([(view.tier_run, view.scan, view.lasting.has) for view in views], progress)
        self._ids: dict[str, list[ChunkId]] = {}
        self._has: dict[str, Array] = {}
        self._missing: dict[str, set[int]] = {}

    def run(self) -> list[_Step]:
        """Fill in the report, but for the repairs, which are returned in their order."""
        versions, known = self._versions(), set[int]()
        packs = {seq for view in self._views for seq in view.scan.seqs}
        self._examine(versions)
        for _ in range(RACE_RETRIES):
            known |= {version.head.seq for version in versions}
            if not sum(view.look_again(known | packs) for view in self._views):
                break
            versions = self._versions()
            self._examine(versions)
        for version in versions:
            self._has[version.id] = np.array([self.search.exists(one) for one in self._ids[version.id]], bool)
        for view in self._views:
            # What is named or listed there may be what is missing.
            for key, why in (*view.scan.away.items(), *((f"version {seq}", why) for seq, why in view.away.items())):
                self._report.unreachable.setdefault(view.name, f"{key}: {why}")
        self._decide(versions)
        self._unexplained(known | {version.head.seq for version in versions})
        self._tags()
        self._steps += self._copies(versions)
        self._report.unreachable = {**self.search.unasked, **self._report.unreachable}
        self._report.versions.sort(key=lambda one: -one.seq)
        return self._steps

    def _examine(self, versions: Sequence[Version]) -> None:
        """Read every place of the chunks of these versions that was not read yet."""
        for version in versions:
            self.search.want(version)
            self._ids[version.id] = chunk_ids(version)
        for view in self._views:
            for version, layout in view.layouts:
                self.search.add_layout(view.name, version, layout)
        self.search.run({(version.head.chunk, version.head.digest) for version in versions})

    def _versions(self) -> list[Version]:
        """All versions of which a record, or a copy in a pack, is legible anywhere; newest first."""
        found: dict[str, Version] = {}
        for view in self._views:
            records = [record.version for these in view.records.values() for record in these.values()]
            for version in (*records, *view.legible, *view.copies):
                found.setdefault(version.id, version)
        return sorted(found.values(), key=lambda v: (v.head.seq, v.head.time), reverse=True)

    # Versions

    def _decide(self, versions: Sequence[Version]) -> None:
        for view in self._lasting:
            self._missing[view.name] = self._worth(view, versions)
        wanted = {view.name: self._missing[view.name] & view.scan.seqs for view in self._lasting}
        for version in versions:
            seq = version.head.seq
            has_record = any(
                view.has(version)
                or seq in view.away
                or (seq in view.damaged and not view.was_removed(version) and self._is_of(view, version, versions))
                for view in self._views
            )
            if has_record or any(seq in these for these in wanted.values()):
                self._look(version, versions, wanted)

    def _worth(self, view: _TierView, versions: Sequence[Version]) -> set[int]:
        """Numbers of which a tier has no record, but should: it has packs that were written for them, or they were due
        there; and `keep` would keep them there."""
        due = self._once_due(view, [version.head for version in reversed(versions)])
        seqs = view.scan.seqs | due
        gone = [v.head for v in versions if v.head.seq in seqs and not view.taken(v.head.seq)]
        return self._kept(view, gone) if gone else set()

    def _once_due(self, view: _TierView, heads: Sequence[Head]) -> set[int]:
        """Numbers of versions that were due in a tier, and are not there. Before its first one it is not known which
        were, unless all are due: a fork, or what retention has left, need not begin with one that was."""
        found: set[int] = set()
        last: LastSave | None = None
        known = self._every(view) in (None, 1) or not any(view.taken(head.seq) for head in heads)
        for head in heads:
            if view.taken(head.seq):
                last = head.step, head.time
            elif (last or known) and is_due(self._every(view), head.step, last, head.time):
                found.add(head.seq)
                last = head.step, head.time
        return found

    def _every(self, view: _TierView) -> Cadence:
        return next(tier.every for tier in self._policy.tiers if tier.name == view.name)

    def _kept(self, view: _TierView, heads: Sequence[Head]) -> set[int]:
        marks = [RetentionEntry(head.seq, head.step, head.time, head.metadata) for head in heads]
        try:
            return view.tier_run.worth_repairing(marks)
        except TierstateError as error:
            self._report.unreachable[view.name] = str(error)
            return set()

    def _is_of(self, view: _TierView, version: Version, versions: Sequence[Version]) -> bool:
        """Whether a damaged record is most likely of this version: two may have one number, in tiers that did not see
        each other. What the tier itself says of the number decides, then how much of a version it has."""
        rivals = [other for other in versions if other.head.seq == version.head.seq]
        if len(rivals) == 1:
            return True

        def evidence(one: Version) -> tuple[bool, int]:
            said = any(one.id == mine.id for mine in (*view.legible, *view.copies))
            return said, sum(view.name in self.search.tiers_with(chunk) for chunk in self._ids[one.id])

        return max(rivals, key=evidence) is version

    def _look(self, version: Version, versions: Sequence[Version], wanted: Mapping[str, set[int]]) -> None:
        case, before = _Case(version, self._expected(version), self._has[version.id]), len(self._steps)
        for view in self._views:
            if (record := view.current(version.head.seq)) is not None and view.has(version):
                fine = self._served(view, record)
                case.served |= fine
                case.kept |= self._mend(view, case, record, fine) if view.lasts else fine
        if not case.lost.any():
            for view in self._lasting:
                if what := self._lacks_record(view, version, versions, wanted):
                    case.kept |= self._rebuild(view, case, what)
            if case.left.any():
                case.kept |= self._place_anywhere(case)
        for view in self._views:
            case.states |= view.unread(version.head.seq) if view.name not in case.states else {}
        self._judge(case, repairs=len(self._steps) > before)

    def _lacks_record(
        self, view: _TierView, version: Version, versions: Sequence[Version], wanted: Mapping[str, set[int]]
    ) -> str:
        """What happened to the record of a version in a tier that is to get it again; empty if it is not."""
        seq = version.head.seq
        if view.current(seq) is not None or seq in view.away or seq in view.foreign or view.was_removed(version):
            return ""
        if seq in view.damaged:
            return "record damaged" if self._is_of(view, version, versions) else ""
        return "record lost" if seq in wanted[view.name] else ""

    def _judge(self, case: _Case, *, repairs: bool) -> None:
        version, lost = case.version, case.lost
        head, ids = version.head, self._ids[version.id]
        away = {*self._report.unreachable, *(view.name for view in self._views if head.seq in view.away)}
        away |= set(self.search.unasked) if any(self.search.in_doubt(ids[r]) for r in np.flatnonzero(lost)) else set()
        names = [version.leaves[leaf].name for leaf in np.unique(version.chunk_leaf[lost]).tolist()]
        left_out = len(np.unique(version.chunk_leaf[~case.expected]))
        state: State = "damaged" if repairs or not case.restorable else "part" if left_out else "whole"
        why = ""
        if names:
            state = "unknown" if away else "lost"
            why = _asked_of(away) if away else f"chunks that are undamaged in no pack of any tier: {int(lost.sum())}"
        elif case.left.any():
            state, why = "unknown", _asked_of(away) if away else "no tier can take a record of it"
        told = len(names), tuple(names[:LEAVES_NAMED]), left_out, why
        now = case.restorable and not left_out
        self._report.versions.append(VersionHealth(head.seq, head.step, version.id, state, case.states, now, *told))

    def _expected(self, version: Version) -> Array:
        """The rows that a version should have: those of its records, and those that the rules send to tiers that have
        lost theirs, or should have got one. Retention may have dropped the rest, or nothing was due where it belongs.
        """
        if self._report.unreachable:
            return np.ones(len(version.digests), bool)  # what these have of it is not known
        rows, seq = np.zeros(len(version.digests), bool), version.head.seq
        for view in self._views:
            if view.has(version):
                for record in view.records[seq].values():
                    rows |= record.layout.present
            elif view.taken(seq) or seq in self._missing.get(view.name, ()):
                rows |= self._route(view, version)
        return rows

    def _served(self, view: _TierView, record: Record) -> Array:
        """``(chunks,)`` of bool: which chunks a restore gets from this record, as far as that could be asked."""
        layout, ids = record.layout, self._ids[record.version.id]
        sizes = dict(zip(layout.objects, layout.object_sizes.tolist(), strict=True))
        fine = np.zeros(len(ids), bool)
        for row in np.flatnonzero(layout.present).tolist():
            place, search = layout.place(row), self.search
            assert place is not None
            fine[row] = search.serves(view.name, ids[row], place, sizes) or not search.asked(view.name, ids[row], place)
        return fine

    # Repairs

    def _mend(self, view: _TierView, case: _Case, record: Record, fine: Array) -> Array:
        """Decide how a record with damaged chunks is repaired; the rows that it has afterwards."""
        version, seq, present = case.version, case.version.head.seq, record.layout.present
        broken: Array = present & ~fine
        fixable: Array = broken & self._has[version.id]
        case.states[view.name] = "damaged" if broken.any() else "whole" if present.all() else "part"
        if broken.any() and (better := self._other(view, version, present)) is not None:
            older = tuple(g for g in view.generations(seq) if g < better)
            self._add("clean", view, version, "a record was replaced, and is still there", replaced=older)
            return present
        if fixable.any():
            self._add("mend", view, version, f"damaged or missing chunks: {int(broken.sum())}", fixable, record)
        elif seq in view.damaged:
            self._add("clean", view, version, _BESIDE, replaced=tuple(view.damaged[seq]))
        return fine | fixable

    def _other(self, view: _TierView, version: Version, rows: Array) -> int | None:
        """The highest generation of a version whose chunks are all undamaged, these rows among them."""
        for generation, record in sorted(view.records.get(version.head.seq, {}).items(), reverse=True):
            present = record.layout.present
            if record.version.id == version.id and present[rows].all() and self._served(view, record)[present].all():
                return generation
        return None

    def _rebuild(self, view: _TierView, case: _Case, what: str) -> Array:
        """Decide how a lost record is made again; the rows that the tier has afterwards."""
        version, seq, ids = case.version, case.version.head.seq, self._ids[case.version.id]
        case.states[view.name] = what
        if (sound := self._other(view, version, np.zeros(len(ids), bool))) is not None:
            others = tuple(g for g in view.generations(seq) if g != sound)
            self._add("clean", view, version, _BESIDE, replaced=others)
            found: Array = view.records[seq][sound].layout.present
            return found
        rows: Array = self._route(view, version) & case.expected
        if version.head.world > 1:  # a tier of one host has the chunks of its own ranks
            rows &= np.array([self.search.place(view.name, one) is not None for one in ids], bool) | ~case.kept
        if rows.any():
            self._add("rebuild", view, version, what, rows)
        return rows

    def _route(self, view: _TierView, version: Version) -> Array:
        """``(chunks,)`` of bool: the chunks that the rules send to a tier."""
        found: Array = self._routes.of(version.leaves)[view.name].leaves[version.chunk_leaf]
        return found

    def _place_anywhere(self, case: _Case) -> Array:
        """Give chunks that no record leads to, and none will, to the first tier that can have a record of them."""
        version, seq, rows = case.version, case.version.head.seq, case.left
        lasting = [view for view in self._lasting if not view.was_removed(version)]
        for view in sorted(lasting, key=lambda view: not (rows & self._route(view, version)).any()):
            if view.has(version):
                self._add("mend", view, version, "chunks that no record leads to", rows, view.current(seq))
                return rows
            if not view.taken(seq):
                case.states[view.name] = "record lost"
                self._add("rebuild", view, version, "record lost", rows | self._route(view, version) & case.expected)
                return rows
        return np.zeros(len(rows), bool)

    def _add(
        self,
        kind: Kind,
        view: _TierView,
        version: Version,
        what: str,
        rows: Array | None = None,
        base: Record | None = None,
        replaced: tuple[int, ...] | None = None,
    ) -> None:
        ids, head = self._ids[version.id], version.head
        chosen = [] if rows is None else np.flatnonzero(rows).tolist()
        needed = list(dict.fromkeys(ids[row] for row in chosen if self.search.place(view.name, ids[row]) is None))
        sources = tuple(dict.fromkeys(name for one in needed for name in self.search.tiers_with(one)[:1]))
        nbytes = sum(one.nbytes for one in needed)
        repair = Repair(kind, view.name, head.seq, head.step, what, len(needed), nbytes, sources)
        gone = view.generations(head.seq) if replaced is None else replaced
        self._steps.append(_Step(repair, version, tuple(chosen), base, gone))

    def _copies(self, versions: Sequence[Version]) -> Iterator[_Step]:
        """Versions that are due in a tier by its `every`, newer than all it has, and not there."""
        sound = {one.id for one in self._report.versions if one.state in ("whole", "part", "damaged")}
        known = [version for version in reversed(versions) if version.id in sound]
        coming = {(s.repair.tier, s.version.id) for s in self._steps if s.version is not None}
        for view in self._lasting:
            have = [v.head for v in known if view.has(v) or (view.name, v.id) in coming]
            newer = [v for v in known if not have or v.head.seq > have[-1].seq]
            free = [v for v in newer if not view.taken(v.head.seq) and self._route(view, v).any()]
            for version in self._due(view, have[-1] if have else None, free):
                head, nbytes = version.head, version.nbytes
                what = "due there, and not there"
                yield _Step(Repair("copy", view.name, head.seq, head.step, what, len(version.digests), nbytes), version)

    def _due(self, view: _TierView, last: Head | None, newer: Sequence[Version]) -> list[Version]:
        pending = [PendingVersion(v.head.seq, v.head.step, v.head.time, v.nbytes) for v in newer]
        due = {one.seq for one in missed_versions(self._every(view), (last.step, last.time) if last else None, pending)}
        kept = self._kept(view, [v.head for v in newer if v.head.seq in due]) if due else set()
        return [version for version in newer if version.head.seq in kept]

    # The rest

    def _unexplained(self, known: set[int]) -> None:
        """Numbers with a damaged record, or with packs, of which nothing says what they consisted of."""
        report, seen = self._report, {one.seq for one in self._report.versions}
        for one in self._views:
            for seq, why in one.foreign.items():
                report.notes.append(f"{one.name}: the record of version {seq} is of another program: {why}")
        away = ", ".join(report.unreachable)
        why = f"{away} cannot be asked" if away else "no tier has a record of it, and no pack says what it was"
        for seq in sorted({seq for one in self._views for seq in one.damaged} - seen):
            there = {name: said for one in self._views for name, said in one.unread(seq).items()}
            report.versions.append(VersionHealth(seq, None, "", "unknown" if away else "lost", there, why=why))
        packs = {seq for one in self._views for seq in one.scan.seqs}
        taken = {seq for one in self._views for seq in packs if one.taken(seq) or seq in one.removed}
        report.unknown = sorted(packs - known - seen - taken)

    def _tags(self) -> None:
        lasting = [view.tier_run for view in self._lasting]
        flaws = Tags(lasting).flaws() if lasting else {}
        self._steps += _tag_steps(flaws)
        for name, flaw in flaws.items():
            if not flaw.legible:
                self._report.notes.append(
                    f"tag {name} cannot be read in any tier: {flaw.why}; give it again with "
                    f"`tierstate tag {name} --step N`"
                )


class _Treatment:
    """Carries out repairs."""

    def __init__(
        self, tier_runs: Sequence[TierRun], policy: Policy, arena: Arena, search: ChunkSearch, progress: Progress
    ) -> None:
        self._tier_runs = {tier_run.name: tier_run for tier_run in tier_runs}
        self._policy, self._arena, self._search, self._progress = policy, arena, search, progress

    def run(self, steps: Sequence[_Step], report: DoctorReport) -> None:
        """Carry out each step; one that fails does not stop the others."""
        tasks: dict[Kind, Callable[[_Step], None]] = {
            "rebuild": self._write, "mend": self._write, "clean": self._clean, "copy": self._copy, "tag": self._tag,
        }  # fmt: skip
        for step in steps:
            try:
                tasks[step.repair.kind](step)
                report.repairs.append(dataclasses.replace(step.repair, done=True))
            except TierstateError as error:
                report.repairs.append(dataclasses.replace(step.repair, error=str(error)))
            if step.repair.tier:
                self._tier_runs[step.repair.tier].look_again()

    def _write(self, step: _Step) -> None:
        """Write the chunks that the tier lacks, then the record."""
        version, tier_run = step.version, self._tier_runs[step.repair.tier]
        assert version is not None
        ids, draft = chunk_ids(version), LayoutBuilder(len(version.digests))
        sizes = dict(self._search.sizes(tier_run.name))
        if step.base is not None:
            layout = step.base.layout
            rows = np.flatnonzero(layout.present)
            draft.put_like(rows, layout, rows)
            sizes |= zip(layout.objects, layout.object_sizes.tolist(), strict=True)
        new = self._fill(tier_run, version, [ids[row] for row in step.rows])
        for row in step.rows:
            place = self._search.place(tier_run.name, ids[row])
            if place is None:
                raise NotFound(f"{tier_run.name}: a chunk of version {version.head.seq} has gone meanwhile")
            draft.put(row, place)
        about = None if step.base is None else step.base.commit
        commit_rebuilt(tier_run, version, draft.build({**sizes, **new}), step.replaced, about)

    def _fill(self, tier_run: TierRun, version: Version, wanted: Sequence[ChunkId]) -> Mapping[str, int]:
        """Write those of the chunks that have no place in the tier into new packs; lengths of these by key."""
        lacking = [one for one in dict.fromkeys(wanted) if self._search.place(tier_run.name, one) is None]
        if not lacking:
            return {}
        writer = PackWriter(tier_run.tier, tier_run.run, version.head.seq)
        try:
            places = {}
            for one in lacking:
                raw = self._search.read(one)
                places[one] = writer.add(raw, one.digest, one.nbytes, RAW)
                self._progress(one.nbytes)
            sizes = writer.close(version.data)
        except BaseException:
            writer.abort()
            raise
        for one, place in places.items():
            self._search.add_good(tier_run.name, one, place, sizes[place.object])
        return sizes

    def _clean(self, step: _Step) -> None:
        """Delete records that a sound one replaces, once that was read again."""
        tier_run, seq = self._tier_runs[step.repair.tier], step.repair.seq
        left = [g for g in tier_run.log.generations().get(seq, []) if g not in step.replaced]
        if not left:
            raise NotFound(f"{tier_run.name}: version {seq} has no other record any more")
        tier_run.log.read_generation(seq, left[-1])
        tier_run.summaries.renew(seq)
        tier_run.log.forget(seq, step.replaced)

    def _copy(self, step: _Step) -> None:
        assert step.version is not None
        tier_run, seq = self._tier_runs[step.repair.tier], step.repair.seq
        found = RunCatalog.look(seq, [t for t in self._tier_runs.values() if t is not tier_run])
        entry = next((e for e in found.entries if e.version.id == step.version.id), None)
        if entry is None:
            raise NotFound(f"version {seq} is in no other tier any more")
        try:
            copy_version(entry, tier_run.apart(), self._policy, self._arena, self._progress)
        except AlreadyExists:
            if tier_run.log.read(seq).version.id != step.version.id:
                raise

    def _tag(self, _step: _Step) -> None:
        Tags([tier_run for tier_run in self._tier_runs.values() if tier_run.tier.traits.persistent]).level()
