"""What `doctor` finds out: which versions are whole, damaged or lost, and which repairs would mend them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from tierstate.engine.placement import Cadence, LastSave, Routes, is_due
from tierstate.engine.progress import Progress
from tierstate.engine.publish.backlog import PendingVersion, missed_versions
from tierstate.engine.versions.tags import TagFlaw, Tags
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history.log import RACE_RETRIES
from tierstate.manifest.history.retention import RetentionEntry
from tierstate.tiers.policy.policy import Policy

from .chunk_search import ChunkId, ChunkSearch, chunk_ids
from .health import DoctorReport, Kind, Repair, RepairStep, State, VersionHealth
from .tier_view import TierView

_BESIDE = "a damaged record beside a sound one"


LEAVES_NAMED = 20
"""Names of lost leaves that a report has of each version."""


def tag_steps(flaws: Mapping[str, TagFlaw]) -> list[RepairStep]:
    """The repairs of tags that can be read in one tier and not in another."""
    return [RepairStep(Repair("tag", "", 0, None, f"tag {name}: {it.why}")) for name, it in flaws.items() if it.legible]


class CopyHealth:
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


class Diagnosis:
    """Finds what each version lacks in each tier, and decides on the repairs. Changes nothing."""

    def __init__(self, views: Sequence[TierView], policy: Policy, report: DoctorReport, progress: Progress) -> None:
        self._views, self._policy, self._report = views, policy, report
        self._lasting = [view for view in views if view.lasts]
        self._routes = Routes(policy)
        self._steps: list[RepairStep] = []
        scans = [(view.tier_run, view.scan, view.lasting.has, view.pack_runs) for view in views]
        self.search = ChunkSearch(scans, progress)
        self._ids: dict[str, list[ChunkId]] = {}
        self._has: dict[str, Array] = {}
        self._missing: dict[str, set[int]] = {}
        self._dropped: set[int] = set()

    def run(self) -> list[RepairStep]:
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

    def _worth(self, view: TierView, versions: Sequence[Version]) -> set[int]:
        """Numbers of which a tier has no record, but should: it has packs that were written for them, or they were due
        there; and `keep` would keep them there."""
        due = self._once_due(view, [version.head for version in reversed(versions)])
        seqs = view.scan.seqs | due
        gone = [v.head for v in versions if v.head.seq in seqs and not view.taken(v.head.seq)]
        return self._kept(view, gone) if gone else set()

    def _once_due(self, view: TierView, heads: Sequence[Head]) -> set[int]:
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

    def _every(self, view: TierView) -> Cadence:
        return next(tier.every for tier in self._policy.tiers if tier.name == view.name)

    def _kept(self, view: TierView, heads: Sequence[Head]) -> set[int]:
        marks = [RetentionEntry(head.seq, head.step, head.time, head.metadata) for head in heads]
        try:
            return view.tier_run.worth_repairing(marks)
        except TierstateError as error:
            self._report.unreachable[view.name] = str(error)
            return set()

    def _is_of(self, view: TierView, version: Version, versions: Sequence[Version]) -> bool:
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
        case, before = CopyHealth(version, self._expected(version), self._has[version.id]), len(self._steps)
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

    def _was_dropped(self, case: CopyHealth) -> bool:
        """Whether all that is known of a version is what retention leaves of one that it has dropped: no record, packs
        that newer versions share, and of the other packs no trace. `keep` may have become wider since."""
        seq, lost = case.version.head.seq, [self._ids[case.version.id][row] for row in np.flatnonzero(case.lost)]
        if not lost or case.states or self._may_be_elsewhere() or not all(map(self.search.is_gone, lost)):
            return False
        packs_here = [view for view in self._lasting if seq in view.scan.seqs]
        return all(any(newer > seq for newer in view.records) for view in packs_here)

    def _lacks_record(
        self, view: TierView, version: Version, versions: Sequence[Version], wanted: Mapping[str, set[int]]
    ) -> str:
        """What happened to the record of a version in a tier that is to get it again; empty if it is not."""
        seq = version.head.seq
        if view.current(seq) is not None or seq in view.away or seq in view.foreign or view.was_removed(version):
            return ""
        if seq in view.damaged:
            return "record damaged" if self._is_of(view, version, versions) else ""
        return "record lost" if seq in wanted[view.name] else ""

    def _judge(self, case: CopyHealth, *, repairs: bool) -> None:
        version, lost = case.version, case.lost
        if self._was_dropped(case):
            self._dropped.add(version.head.seq)
            return
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
                rows |= self._route(view, version) & ~self._dropped_leaves(view, version)[version.chunk_leaf]
        return rows

    def _dropped_leaves(self, view: TierView, version: Version) -> Array:
        """``(leaves,)`` of bool: the leaves that retention has dropped from a version of which a tier has no record, or
        a damaged one. They are in no pack any more, and were perhaps in none when it was lost.

        Where no record is left, these are any leaves: the version was perhaps dropped, and `keep` became wider since.
        """
        gone, seq = np.zeros(len(version.leaves), bool), version.head.seq
        if any(newer > seq for newer in view.records) and not view.scan.unread:
            rows = np.array([self.search.is_gone(one) for one in self._ids[version.id]], bool)
            gone[version.chunk_leaf[rows]] = True
        if not view.taken(seq):
            return gone
        found: Array = view.tier_run.retention.thinned(version, gone)
        return found

    def _may_be_elsewhere(self) -> bool:
        """Whether what is in no pack that was read may be in one that was not."""
        return bool(self._report.unreachable) or any(view.scan.unread for view in self._views)

    def _served(self, view: TierView, record: Record) -> Array:
        """``(chunks,)`` of bool: which chunks a restore gets from this record, as far as that could be asked."""
        layout, ids = record.layout, self._ids[record.version.id]
        sizes = layout.pack_sizes
        fine = np.zeros(len(ids), bool)
        for row in np.flatnonzero(layout.present).tolist():
            place, search = layout.place(row), self.search
            assert place is not None
            fine[row] = search.serves(view.name, ids[row], place, sizes) or not search.asked(view.name, ids[row], place)
        return fine

    # Repairs

    def _mend(self, view: TierView, case: CopyHealth, record: Record, fine: Array) -> Array:
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

    def _other(self, view: TierView, version: Version, rows: Array) -> int | None:
        """The highest generation of a version whose chunks are all undamaged, these rows among them."""
        for generation, record in sorted(view.records.get(version.head.seq, {}).items(), reverse=True):
            present = record.layout.present
            if record.version.id == version.id and present[rows].all() and self._served(view, record)[present].all():
                return generation
        return None

    def _rebuild(self, view: TierView, case: CopyHealth, what: str) -> Array:
        """Decide how a lost record is made again; the rows that the tier has afterwards."""
        version, seq, ids = case.version, case.version.head.seq, self._ids[case.version.id]
        case.states[view.name] = what
        if (sound := self._other(view, version, np.zeros(len(ids), bool))) is not None:
            others = tuple(g for g in view.generations(seq) if g != sound)
            self._add("clean", view, version, _BESIDE, replaced=others)
            found: Array = view.records[seq][sound].layout.present
            return found
        rows: Array = self._route(view, version) & case.expected
        # A tier of one host has the chunks of its own ranks; which these were is known by what it has.
        if version.head.world > 1 and view.tier_run.tier.traits.shared != "site":
            rows &= np.array([self.search.place(view.name, one) is not None for one in ids], bool) | ~case.kept
        if rows.any():
            self._add("rebuild", view, version, what, rows)
        return rows

    def _route(self, view: TierView, version: Version) -> Array:
        """``(chunks,)`` of bool: the chunks that the rules send to a tier."""
        found: Array = self._routes.of(version.leaves)[view.name].leaves[version.chunk_leaf]
        return found

    def _place_anywhere(self, case: CopyHealth) -> Array:
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
        view: TierView,
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
        self._steps.append(RepairStep(repair, version, tuple(chosen), base, gone))

    def _copies(self, versions: Sequence[Version]) -> Iterator[RepairStep]:
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
                what, count = "due there, and not there", len(version.digests)
                yield RepairStep(Repair("copy", view.name, head.seq, head.step, what, count, nbytes), version)

    def _due(self, view: TierView, last: Head | None, newer: Sequence[Version]) -> list[Version]:
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
                report.notes.append(f"{one.name}: the record of version {seq} is whole, but cannot be read here: {why}")
        away = ", ".join(report.unreachable)
        why = f"{away} cannot be asked" if away else "no tier has a record of it, and no pack says what it was"
        for seq in sorted({seq for one in self._views for seq in one.damaged} - seen):
            there = {name: said for one in self._views for name, said in one.unread(seq).items()}
            report.versions.append(VersionHealth(seq, None, "", "unknown" if away else "lost", there, why=why))
        packs = {seq for one in self._views for seq in one.scan.seqs}
        taken = {seq for one in self._views for seq in packs if one.taken(seq) or seq in one.removed}
        report.unknown = sorted(packs - (known - self._dropped) - seen - taken)

    def _tags(self) -> None:
        lasting = [view.tier_run for view in self._lasting]
        flaws = Tags(lasting).flaws() if lasting else {}
        self._steps += tag_steps(flaws)
        for name, flaw in flaws.items():
            if not flaw.legible:
                self._report.notes.append(
                    f"tag {name} cannot be read in any tier: {flaw.why}; give it again with "
                    f"`tierstate tag {name} --step N`"
                )
