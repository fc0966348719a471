"""Prune: applies retention, then garbage collection, then repacking, tier by tier, and reports what was done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstate.engine.info import VersionInfo, list_versions
from tierstate.engine.packs.keys import pack_prefix
from tierstate.engine.progress import Pace
from tierstate.engine.publish.backlog import held_versions
from tierstate.engine.store.identity import learn_newest
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arguments import as_seconds
from tierstate.manifest.errors import TierFull, TierstateError
from tierstate.manifest.history.retention import RetentionDecision
from tierstate.tiers.policy.policy import Policy

from .repack import Repacked, repack
from .sweep import DAY, Swept, sweep, unneeded_fork_pins


class PendingSaves(Protocol):
    """The saves that this process has under way."""

    def pinned(self, tier: str) -> Mapping[int, str]:
        """Versions that a tier must keep for now, and why."""
        ...

    def coming(self, tier: str) -> Collection[int]:
        """Numbers of the versions that are being written to a tier, or will be."""
        ...


log = logging.getLogger("tierstate")


@dataclass
class TierPrune:
    """What a prune did, or would do, in one tier.

    Attributes:
        tier: its name.
        keep: versions that are kept, by number, and why.
        drop: versions that are dropped.
        thin: versions that lose some leaves, and what stays of each.
        packs: lengths in bytes of the deleted packs, by key.
        young: unnamed packs within the grace, which may belong to a save under way: they stay.
        ageless: unnamed packs of unknown age: only a grace of 0 deletes them.
        leases: deleted leases of dead processes.
        pins: versions whose pin is removed, and the fork that no longer needs it; the next prune may drop them.
        repacked: the result of repacking.
        problems: what could not be done, and why.
    """

    tier: str
    keep: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    drop: tuple[int, ...] = ()
    thin: Mapping[int, Any] = field(default_factory=dict)
    packs: dict[str, int] = field(default_factory=dict)
    young: int = 0
    ageless: int = 0
    leases: int = 0
    pins: tuple[tuple[int, str], ...] = ()
    repacked: Repacked = field(default_factory=Repacked)
    problems: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Total bytes of the deleted packs."""
        return sum(self.packs.values())


@dataclass(frozen=True)
class PruneReport:
    """What a prune did, or would do.

    Attributes:
        dry_run: nothing was changed.
        tiers: the result in each tier.
        steps: by tier and number, the training step of each version: two tiers may have other versions of one number.
    """

    dry_run: bool
    tiers: Sequence[TierPrune]
    steps: Mapping[tuple[str, int], int]

    @property
    def ok(self) -> bool:
        """Whether no tier had a problem."""
        return not any(tier.problems for tier in self.tiers)


class PruneRun:
    """One prune of a run.

    Args:
        policy: says which tier gets which versions.
        tier_runs: the run in each tier, in the policy's order; only those are pruned that this process leads.
        saving: the saves that this process has under way; None: none.
        grace: seconds for which packs that no version names stay, as they may belong to a save under way.
        dry_run: change nothing.
        progress: called with a text that says what is being done, how fast and for how long yet.
    """

    def __init__(
        self,
        policy: Policy,
        tier_runs: Sequence[TierRun],
        saving: PendingSaves | None = None,
        grace: float | None = None,
        *,
        dry_run: bool = False,
        progress: Callable[[str], object] = lambda _what: None,
    ) -> None:
        self._policy, self._tier_runs, self._saving = policy, list(tier_runs), saving
        self._grace, self._dry, self._progress = DAY if grace is None else as_seconds(grace, "grace"), dry_run, progress

    def run(self) -> PruneReport:
        """Prune every tier; one that fails does not stop the others."""
        self._progress("looking at the versions")
        versions = list_versions(self._tier_runs, self._policy, {})
        learn_newest([tier_run.identity for tier_run in self._tier_runs])
        silent = {tier_run.name for tier_run in self._tier_runs if not _answers(tier_run)}
        tiers = []
        for tier_run in (s for s in self._tier_runs if s.leads):
            found = TierPrune(tier_run.name)
            try:
                tier_run.identity.ensure(create=False)  # another one in its place may keep what this one does not
                self._prune(tier_run, self._in_use(tier_run, silent, versions), {v.seq for v in versions}, found)
            except TierstateError as error:
                found.problems.append(str(error))
            tiers.append(found)
        return PruneReport(self._dry, tiers, {(tier, v.seq): v.step for v in versions for tier in v.tiers})

    def decisions(self, versions: Sequence[VersionInfo]) -> dict[str, RetentionDecision | TierstateError]:
        """What retention would do in each tier now, with all reasons, by the tier's name; or why it is not known.

        Args:
            versions: of the run, as `list_versions` returns them.
        """
        silent = {tier_run.name for tier_run in self._tier_runs if not _answers(tier_run)}
        found: dict[str, RetentionDecision | TierstateError] = {}
        for tier_run in self._tier_runs:
            try:
                found[tier_run.name] = tier_run.decision(self._in_use(tier_run, silent, versions))
            except TierstateError as error:
                found[tier_run.name] = error
        return found

    def _in_use(self, tier_run: TierRun, silent: Collection[str], versions: Sequence[VersionInfo]) -> dict[int, str]:
        """Versions that a tier must keep, since slower tiers have not got them yet, and why.

        Args:
            silent: names of the tiers that cannot be read.
        """
        found = {} if self._saving is None else dict(self._saving.pinned(tier_run.name))
        if tier_run.tier.traits.scarce:
            return found
        slower = [s.name for s in self._tier_runs[self._tier_runs.index(tier_run) + 1 :] if s.tier.traits.persistent]
        for name in slower:
            if name in silent:
                # Which versions it lacks is unknown.
                return found | {v.seq: f"{name} cannot be asked" for v in versions if tier_run.name in v.tiers}
        late = {name: [v.seq for v in versions if name in v.late] for name in slower}
        there = {name: [v.seq for v in versions if name in v.tiers] for name in slower}
        parted = any(rule.tiers is not None for rule in self._policy.rules)
        return found | {
            seq: f"{name} has not got it yet" for seq, name in held_versions(late, there, each=parted).items()
        }

    def _prune(self, tier_run: TierRun, in_use: Mapping[int, str], seen: Collection[int], found: TierPrune) -> None:
        name, saving = tier_run.name, self._saving
        self._progress(f"{name}: deciding what to keep")
        decision = tier_run.decision(in_use, seen=seen)
        found.keep, found.drop = decision.keep, decision.drop
        found.thin = decision.thin

        def busy() -> Collection[int]:
            return () if saving is None else saving.coming(name)

        self._progress(f"{name}: looking for packs that no version names")
        look = sweep(tier_run, grace=self._grace, dry_run=True, busy=busy, dropped=decision.drop)
        _tell(found, look)
        if self._dry:
            found.repacked = repack(tier_run, dry_run=True, in_use=in_use, dropped=decision.drop)
        else:
            try:
                self._carry_out(tier_run, in_use, seen, found, busy)
            except TierstateError:
                _tell_what_went(tier_run, found)
                raise
        if found.repacked.reason:
            found.problems.append(f"{name}: nothing was repacked: {found.repacked.reason}")
        pins = unneeded_fork_pins(tier_run, self._grace)
        found.pins = tuple(dict.fromkeys((pin.seq, pin.by) for pin in pins))
        for pin in () if self._dry else pins:
            tier_run.tier.delete(pin.key)

    def _carry_out(
        self,
        tier_run: TierRun,
        in_use: Mapping[int, str],
        seen: Collection[int],
        found: TierPrune,
        busy: Callable[[], Collection[int]],
    ) -> None:
        expected, what = found.packs, f"{tier_run.name}: dropping {len(found.drop)} versions"
        self._progress(what)
        # Retention deletes the packs of what it drops, and the sweep the others.
        deleting = Pace(what, self._progress, len(found.drop) + len(expected) + found.leases, "objects")
        full = ""
        try:
            done: RetentionDecision = tier_run.retire(in_use, seen=seen, progress=deleting)
            found.drop = done.drop
        except TierFull as error:  # there is no room for the record of a version that loses leaves; garbage may go yet
            full, left_over = str(error), tier_run.log.seqs()
            found.drop, found.thin = tuple(seq for seq in found.drop if seq not in left_over), {}
        self._progress(f"{tier_run.name}: deleting packs")
        swept = sweep(tier_run, grace=self._grace, busy=busy, progress=deleting)
        _tell(found, swept)
        found.problems += [f"{full}; leaves that `keep` drops stay in some versions"] if full else []
        left = set(tier_run.tier.list(pack_prefix(tier_run.run)))
        found.packs = {key: n for key, n in {**expected, **swept.packs}.items() if key not in left}
        self._progress(f"{tier_run.name}: repacking")
        found.repacked = repack(tier_run, in_use=in_use, progress=self._progress)
        if found.drop and tier_run.tier.traits.persistent:
            try:
                tier_run.summaries.write()
            except TierstateError as error:  # the index is only a cache
                log.info("%s: no index of its versions was written: %s", tier_run.name, error)


def _answers(tier_run: TierRun) -> bool:
    try:
        tier_run.identity.ensure(create=False)
        tier_run.log.seqs()
    except TierstateError:
        return False
    return True


def _tell(found: TierPrune, swept: Swept) -> None:
    found.packs, found.leases = dict(swept.packs), len(swept.leases)
    found.young, found.ageless = len(swept.young), len(swept.ageless)
    found.problems = [f"{found.tier}: no pack was deleted: {swept.reason}"] if swept.reason else []


def _tell_what_went(tier_run: TierRun, found: TierPrune) -> None:
    """After a failure: of what was to go, report only what has gone, and nothing where that cannot be asked."""
    found.thin, found.leases = {}, 0
    try:
        seqs, packs = set(tier_run.log.seqs()), set(tier_run.tier.list(pack_prefix(tier_run.run)))
    except TierstateError:
        found.drop, found.packs = (), {}
        return
    found.drop = tuple(seq for seq in found.drop if seq not in seqs)
    found.packs = {key: nbytes for key, nbytes in found.packs.items() if key not in packs}
