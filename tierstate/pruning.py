"""Pruning: what a run no longer needs is dropped, swept and repacked, tier by tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstate.manifest.errors import TierstateError
from tierstate.manifest.retention import Decision
from tierstate.tiers.owing import held
from tierstate.tiers.policy import Policy
from tierstate.tiers.repack import Repacked, repack
from tierstate.tiers.shelf import Shelf
from tierstate.tiers.sweep import DAY, Swept, sweep, unneeded_pins

from .info import VersionInfo
from .listing import listed


class Saving(Protocol):
    """What a process knows of the saves that it has under way."""

    def pinned(self, tier: str) -> Mapping[int, str]:
        """Versions that a tier must keep for now, and why."""
        ...

    def coming(self, tier: str) -> Collection[int]:
        """Numbers of the versions that are being written to a tier, or will be."""
        ...


log = logging.getLogger("tierstate")


@dataclass
class TierPrune:
    """What was done in one tier, or would be.

    Attributes:
        tier: its name.
        keep: versions that stay, by number, and why.
        drop: versions that go.
        thin: versions of which some leaves go, and what stays of each.
        packs: lengths in bytes of the packs that go, by key.
        young: packs that no version names, and that may be of a save under way: they stay.
        ageless: packs that no version names, of unknown age: they go with a grace of 0.
        leases: leases of the dead that go.
        pins: versions that are let go of, and the fork that needs each no longer; the next prune may drop them.
        repacked: what was repacked.
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
        """Bytes of the packs that go."""
        return sum(self.packs.values())


@dataclass(frozen=True)
class PruneReport:
    """What a prune did, or would do.

    Attributes:
        dry_run: nothing was changed.
        tiers: what became of each tier.
        steps: the training step of each version.
    """

    dry_run: bool
    tiers: Sequence[TierPrune]
    steps: Mapping[int, int]

    @property
    def ok(self) -> bool:
        """Whether all could be done in every tier."""
        return not any(tier.problems for tier in self.tiers)


class Pruning:
    """One prune of a run.

    Args:
        policy: which tier is to get what.
        shelves: the run in each tier, in the policy's order; those are pruned that this process leads.
        saving: what this process has under way; None: nothing.
        grace: seconds for which packs that no version names stay, since they may be of a save under way.
        dry_run: only look.
        progress: told what is being done now.
    """

    def __init__(
        self,
        policy: Policy,
        shelves: Sequence[Shelf],
        saving: Saving | None = None,
        grace: float | None = None,
        *,
        dry_run: bool = False,
        progress: Callable[[str], object] = lambda _what: None,
    ) -> None:
        if grace is not None and not (isinstance(grace, (int, float)) and grace >= 0):
            raise ValueError(f"a grace of {grace!r}: right is a number of seconds, 0 or more")
        self._policy, self._shelves, self._saving = policy, list(shelves), saving
        self._grace, self._dry, self._progress = DAY if grace is None else grace, dry_run, progress

    def run(self) -> PruneReport:
        """Prune every tier; one that fails does not stop the others."""
        self._progress("looking at the versions")
        versions = listed(self._shelves, self._policy, {})
        silent = {shelf.name for shelf in self._shelves if not _answers(shelf)}
        tiers = []
        for shelf in (s for s in self._shelves if s.leads):
            found = TierPrune(shelf.name)
            try:
                self._prune(shelf, self._in_use(shelf, silent, versions), found)
            except TierstateError as error:
                found.problems.append(str(error))
            tiers.append(found)
        return PruneReport(self._dry, tiers, {v.seq: v.step for v in versions})

    def _in_use(self, shelf: Shelf, silent: Collection[str], versions: Sequence[VersionInfo]) -> dict[int, str]:
        """Versions that a tier must keep, as slower ones are yet to get them, and why.

        Args:
            silent: names of the tiers that cannot be asked.
        """
        found = {} if self._saving is None else dict(self._saving.pinned(shelf.name))
        if shelf.tier.traits.scarce:
            return found
        slower = [s.name for s in self._shelves[self._shelves.index(shelf) + 1 :] if s.tier.traits.persistent]
        for name in slower:
            if name in silent:
                # Nobody knows what it lacks.
                return found | {v.seq: f"{name} cannot be asked" for v in versions if shelf.name in v.tiers}
        late = {name: [v.seq for v in versions if name in v.late] for name in slower}
        there = {name: [v.seq for v in versions if name in v.tiers] for name in slower}
        parted = any(rule.tiers is not None for rule in self._policy.rules)
        return found | {seq: f"{name} has not got it yet" for seq, name in held(late, there, each=parted).items()}

    def _prune(self, shelf: Shelf, in_use: Mapping[int, str], found: TierPrune) -> None:
        name, saving = shelf.name, self._saving
        self._progress(f"{name}: deciding what to keep")
        decision = shelf.decision(in_use)
        found.keep, found.drop = decision.keep, decision.drop
        found.thin = decision.thin

        def busy() -> Collection[int]:
            return () if saving is None else saving.coming(name)

        self._progress(f"{name}: looking for packs that no version names")
        look = sweep(shelf, grace=self._grace, dry_run=True, busy=busy, dropped=decision.drop)
        _tell(found, look)
        if self._dry:
            found.repacked = repack(shelf, dry_run=True, in_use=in_use, dropped=decision.drop)
        else:
            self._carry_out(shelf, in_use, found, busy)
        if found.repacked.reason:
            found.problems.append(f"{name}: nothing was repacked: {found.repacked.reason}")
        pins = unneeded_pins(shelf, self._grace)
        found.pins = tuple(dict.fromkeys((pin.seq, pin.by) for pin in pins))
        for pin in () if self._dry else pins:
            shelf.tier.delete(pin.key)

    def _carry_out(
        self, shelf: Shelf, in_use: Mapping[int, str], found: TierPrune, busy: Callable[[], Collection[int]]
    ) -> None:
        self._progress(f"{shelf.name}: dropping {len(found.drop)} versions")
        done: Decision = shelf.retire(in_use)
        found.drop = done.drop
        self._progress(f"{shelf.name}: deleting packs")
        expected = found.packs
        swept = sweep(shelf, grace=self._grace, busy=busy)
        _tell(found, swept)
        left = set(shelf.tier.list(f"packs/{shelf.run}/"))
        found.packs = {key: n for key, n in {**expected, **swept.packs}.items() if key not in left}
        self._progress(f"{shelf.name}: repacking")
        found.repacked = repack(shelf, in_use=in_use)
        if found.drop and shelf.tier.traits.persistent:
            try:
                shelf.summaries.write()
            except TierstateError as error:  # only a cache
                log.info("%s: no index of its versions was written: %s", shelf.name, error)


def _answers(shelf: Shelf) -> bool:
    try:
        shelf.log.seqs()
    except TierstateError:
        return False
    return True


def _tell(found: TierPrune, swept: Swept) -> None:
    found.packs, found.leases = dict(swept.packs), len(swept.leases)
    found.young, found.ageless = len(swept.young), len(swept.ageless)
    found.problems = [f"{found.tier}: no pack was deleted: {swept.reason}"] if swept.reason else []
