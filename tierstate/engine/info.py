"""Information for users of the API: `VersionInfo` about a version, `TierStats` and `Stats` about the saves so far.

`list_versions` merges the logs of all tiers: which tiers have each version, and in which it is still missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierstate.engine.publish.backlog import PendingVersion, missed_versions
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.engine.save.protection import Lag
from tierstate.engine.store.catalog import VersionCopies
from tierstate.engine.store.index import SeqSummaries
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.manifest.format.leaf import stored_lossy_methods
from tierstate.manifest.format.record import Summary
from tierstate.manifest.history.removals import Removal, was_removed
from tierstate.tiers.base import Tier
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.wrappers.measure import OperationStats, operations_of

from .placement import Routes

log = logging.getLogger("tierstate")


Copies = Mapping[str, Summary]
"""The copies of one version: the summary of its record in each tier that has it, by the tier's name, nearest first."""


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a run.

    Attributes:
        run, seq: the name of the run, and the version's number in it.
        step: the training step.
        id: 32 hexadecimal digits, the same in every tier.
        time: seconds since 1970 when it was saved.
        nbytes: raw bytes of the state.
        tiers: names of the tiers that have its record, nearest first.
        partial: those of them that hold only some of its leaves, because of the policy's rules.
        stored: bytes that its chunks take in each tier, including shared chunks and the bases of deltas.
        tags: its tags; filled in by `versions` and `info` only.
        metadata: the metadata given to `save`.
        parent: id of the version before it.
        late: names of the tiers that should have it and do not have it yet.
        lossy: methods by which some of its leaves were saved with fewer bits, on request.
        unreadable: the tiers that list it and whose record of it cannot be read, each with the reason; filled in by
            `versions` only. Where no tier's record can be read, nothing but the number is known: the step is -1, the id
            is empty, and ``tiers`` is too.
    """

    run: str
    seq: int
    step: int
    id: str
    time: float
    nbytes: int
    tiers: tuple[str, ...]
    partial: tuple[str, ...] = ()
    stored: Mapping[str, int] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    late: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: VersionCopies) -> VersionInfo:
        """The information about an entry of the catalog."""
        head = entry.version.head
        return cls(
            head.run,
            head.seq,
            head.step,
            entry.version.id,
            head.time,
            entry.version.nbytes,
            entry.tiers,
            tuple(h.tier_run.name for h in entry.holdings if not h.layout.present.all()),
            {h.tier_run.name: h.layout.stored_nbytes for h in entry.holdings},
            metadata=dict(head.metadata),
            parent=head.parent,
            lossy=stored_lossy_methods(entry.version.leaves),
        )

    @classmethod
    def summed(
        cls,
        run: str,
        copies: Mapping[str, Summary],
        tags: tuple[str, ...],
        late: tuple[str, ...],
        unreadable: Mapping[str, str],
    ) -> VersionInfo:
        """The information from the summaries of a version's records, by tier; reads no full record."""
        one = next(iter(copies.values()))
        return cls(
            run,
            one.seq,
            one.step,
            one.id,
            one.time,
            one.nbytes,
            tuple(copies),
            tuple(name for name, summary in copies.items() if not summary.whole),
            {name: summary.stored for name, summary in copies.items()},
            tags,
            dict(one.metadata),
            one.parent,
            late,
            one.lossy,
            unreadable,
        )


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters and times of one tier in this process.

    Attributes:
        raw: raw bytes of the states that were committed to the tier, of what of them rules send there.
        stored: bytes written for them; less than ``raw`` where chunks were reused or compressed.
        saves: saves committed to the tier.
        failures: saves that failed on the tier.
        lag: saves in progress or in the queue.
        seconds: for each of the newest saves, the time from the call of ``save`` to the commit.
        healthy: whether the last save to the tier succeeded.
        hung: what hangs in the tier, and since when; empty while it is in use. A tier that hangs is asked again at
            intervals, and other calls fail at once.
        owed: missing versions: failed saves that are copied from a faster tier when this tier works again.
        brought: missing versions that were copied later, also those that an earlier process left; also in ``saves``.
        skipped: saves that the tier left out because newer ones were waiting (``on_lag``).
        waiting: bytes of state that are still to be written to the tier.
        behind: age in seconds of the oldest version that is still to be written; 0 if nothing is missing.
        speed: bytes of state per second in the latest copies to the tier; 0 before the first one.
        expected: seconds until nothing is missing, at that speed; None if the speed is unknown.
        durable_lag: how far the newest version in the tier is behind the newest save, in steps, seconds and versions:
            what would be lost if the process were killed now and only this tier were left. None before the first save,
            and where the tier has no version at all.
        waited: seconds for which calls of ``save`` have waited for the tier because of its ``max_lag``; also in
            `Stats.blocked`.
        held: versions that the tier keeps longer than ``keep`` says, by number, with the reason.
        operations: calls of the tier by operation, with their times; see `OperationStats`.
    """

    raw: int = 0
    stored: int = 0
    saves: int = 0
    failures: int = 0
    lag: int = 0
    seconds: tuple[float, ...] = ()
    healthy: bool = True
    hung: str = ""
    owed: int = 0
    brought: int = 0
    skipped: int = 0
    waiting: int = 0
    behind: float = 0.0
    speed: float = 0.0
    expected: float | None = None
    durable_lag: Lag | None = None
    waited: float = 0.0
    held: Mapping[int, str] = field(default_factory=dict)
    operations: Mapping[str, OperationStats] = field(default_factory=dict)

    @classmethod
    def of(cls, queue: TierQueue | None) -> TierStats:
        """The counters of a tier's queue; all are zero for None, which means that nothing was saved yet."""
        if queue is None:
            return cls()
        done, coming, left = queue.counters, queue.outstanding(), queue.left
        return cls(
            done.raw,
            done.stored,
            done.saves,
            done.failures,
            queue.waiting,
            tuple(done.seconds),
            queue.healthy,
            owed=len(queue.owed()),
            brought=done.brought,
            skipped=done.skipped,
            waiting=left,
            behind=max(0.0, time.time() - coming[0].time) if coming else 0.0,
            speed=done.speed,
            expected=left / done.speed if done.speed else None,
            held=dict(queue.held),
        )

    def measured(self, tier: Tier) -> TierStats:
        """A copy with the measured operations of the tier."""
        return replace(self, operations=operations_of(tier))


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters and times of a Checkpointer.

    Attributes:
        saves: calls of ``save``.
        skipped: calls that saved nothing because the arena was full (``on_full: skip``).
        blocked: seconds for which each of the newest calls of ``save`` blocked the training.
        waited: seconds for which steps of guarded optimizers have waited for the capture to end.
        arena_peak: largest number of bytes of the arena in use at once, including slabs that a memory tier keeps.
        tiers: `TierStats` by the tier's name.
    """

    saves: int
    skipped: int
    blocked: tuple[float, ...]
    waited: float
    arena_peak: int
    tiers: Mapping[str, TierStats]


def list_versions(
    tier_runs: Sequence[TierRun], policy: Policy, tags: Mapping[tuple[int, str], tuple[str, ...]]
) -> list[VersionInfo]:
    """All versions over all tiers, oldest first, also those whose records cannot be read. A tier whose log cannot be
    listed is left out, with a warning.

    Args:
        tier_runs: the run in each tier, nearest first.
        policy: says which tier should get which version.
        tags: the tags of each version, by its number and id.
    """
    seen: dict[str, Mapping[int, SeqSummaries]] = {}
    for tier_run in tier_runs:
        try:
            seen[tier_run.name] = tier_run.summaries.look()
        except TierstateError as error:
            log.warning("%s: its log cannot be listed: %s", tier_run.name, error)
    versions = _versions(seen)
    late = _Late(tier_runs, policy, versions)
    found: dict[int, list[str]] = {}
    for tier in policy.tiers:
        if tier.persistent and tier.name in seen:
            for seq in late.of(tier):
                found.setdefault(seq, []).append(tier.name)
    run, unreadable = tier_runs[0].run, _unreadable(seen)
    infos = [
        VersionInfo.summed(
            run, copies, tags.get((one.seq, one.id), ()), tuple(found.get(one.seq, ())), unreadable.get(one.seq, {})
        )
        for copies in versions
        for one in [_any(copies)]
    ]
    known = {info.seq for info in infos}
    infos += [
        VersionInfo(run, seq, -1, "", 0.0, 0, (), unreadable=why) for seq, why in unreadable.items() if seq not in known
    ]
    return sorted(infos, key=lambda info: info.seq)


def _unreadable(seen: Mapping[str, Mapping[int, SeqSummaries]]) -> dict[int, dict[str, str]]:
    """By number, the tiers whose record cannot be read, with the reason; not where it was dropped meanwhile."""
    found: dict[int, dict[str, str]] = {}
    for name, numbers in seen.items():
        for seq, one in numbers.items():
            why = [error for error in one.problems if not isinstance(error, NotFound)]
            if one.current is None and why:
                found.setdefault(seq, {})[name] = str(why[-1])
    return found


def _versions(seen: Mapping[str, Mapping[int, SeqSummaries]]) -> list[Copies]:
    """All versions by rising number, and by time of the save where several writers used the same number."""
    places: dict[int, dict[str, dict[str, Summary]]] = {}
    for name, numbers in seen.items():
        for seq, one in numbers.items():
            if (summary := one.current) is not None:
                places.setdefault(seq, {}).setdefault(summary.id, {})[name] = summary
    found: list[Copies] = []
    for _, versions in sorted(places.items(), reverse=True):
        found += sorted(versions.values(), key=lambda copies: _any(copies).time, reverse=True)
    return found[::-1]


def _any(copies: Copies) -> Summary:
    return next(iter(copies.values()))


class _Late:
    """Finds the versions that tiers should have and do not have yet."""

    def __init__(self, tier_runs: Sequence[TierRun], policy: Policy, versions: Sequence[Copies]) -> None:
        self._tier_runs = {tier_run.name: tier_run for tier_run in tier_runs}
        self._versions, self._routes = versions, Routes(policy)
        self._parted = any(rule.tiers is not None for rule in policy.rules)
        self._going: dict[str, Mapping[str, bool]] = {}

    def of(self, tier: TierPolicy) -> list[int]:
        """Numbers of the versions that a tier should get, from its ``every``, newer than all versions that it has."""
        last = next((copies[tier.name] for copies in reversed(self._versions) if tier.name in copies), None)
        newer = [copies for copies in self._versions if last is None or _any(copies).seq > last.seq]
        going = [_any(copies) for copies in newer if self._goes(copies, tier.name)]
        dues = [PendingVersion(one.seq, one.step, one.time, one.nbytes) for one in going]
        late = missed_versions(tier.every, (last.step, last.time) if last else None, dues)
        gone = self._removed(tier.name, late) if late else ()
        return [due.seq for due in late if not was_removed(gone, due.seq, due.step, due.time)]

    def _removed(self, name: str, late: Sequence[PendingVersion]) -> Collection[Removal]:
        """Those of the versions, or others of their numbers, that were removed from a tier by hand."""
        tier_run = self._tier_runs[name]
        try:
            return tier_run.removals({due.seq for due in late})
        except TierstateError as error:
            log.warning("%s: what was removed from it cannot be listed: %s", name, error)
            return ()

    def _goes(self, copies: Copies, name: str) -> bool:
        """Whether the rules send any leaf of a version to a tier."""
        one = _any(copies)
        if not self._parted:
            return one.leaves > 0
        if one.paths not in self._going:
            self._going[one.paths] = self._look(copies)
        return self._going[one.paths].get(name, False)

    def _look(self, copies: Copies) -> Mapping[str, bool]:
        """Which tiers get leaves of this version. Reads one of its records, since a summary has no paths."""
        for name, summary in copies.items():
            try:
                record = self._tier_runs[name].log.read_generation(summary.seq, summary.generation)
            except TierstateError as error:
                log.warning("%s: version %d cannot be read: %s", name, summary.seq, error)
                continue
            routes = self._routes.of(record.version.leaves)
            return {to: bool(route.leaves.any()) for to, route in routes.items()}
        return {}
