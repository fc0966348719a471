"""Remove one version from one tier or from all, or a whole run, by hand: for ``tierstate rm``. As careful as retention.

First a mark says that the version was removed, so that nothing takes it for lost; then its records are deleted, then
the packs that no other record and no fork names. An interruption leaves a version that can be removed again, or packs
for the next `prune`. In a full tier the mark comes last, as the version itself makes the room for it.

Of a run the oldest versions go first, so that what an interruption leaves is a run with its newest versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tierstate.engine.packs.keys import pack_prefix, seq_of
from tierstate.engine.store.catalog import RunCatalog, VersionCopies
from tierstate.engine.store.identity import learn_newest
from tierstate.engine.store.retention import UnusedPacks, batches
from tierstate.engine.store.run_in_tier import TierRun, tier_run_named
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.errors import (
    FormatError,
    MediaError,
    NotFound,
    TierFull,
    TierstateError,
    Unreadable,
    tier_text,
)
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.leases import WHOLE_RUN
from tierstate.manifest.history.removals import mark_removed, removal_marks
from tierstate.tiers.base import Tier

from .prune import PendingSaves
from .sweep import Swept, sweep

Logged: TypeAlias = Callable[[Tier], Sequence[str]]
"""The keys of the log of a run's events in a tier."""


@dataclass
class TierRemoval:
    """The removal of a version from one tier.

    Attributes:
        tier: its name.
        reasons: why it must not go; with these nothing is removed anywhere.
        forced: why it should not go, which ``force`` overrides.
        packs: lengths in bytes of the packs that were deleted, or would be, by key.
        removed: whether it was removed.
        error: why it was not.
    """

    tier: str
    reasons: list[str] = field(default_factory=list)
    forced: list[str] = field(default_factory=list)
    packs: dict[str, int] = field(default_factory=dict)
    removed: bool = False
    error: str = ""


@dataclass
class TierRunRemoval(TierRemoval):
    """The removal of a run from one tier.

    Attributes:
        versions: how many there were, or went before the error.
        left: packs that no version has named, and that may be of a save under way: they stay for now.
    """

    versions: int = 0
    left: int = 0


@dataclass
class RunRemoval:
    """The removal of a run.

    Attributes:
        run: its name.
        dry_run: nothing was changed.
        tags: its tags, which go with it.
        tiers: those that have something of it.
        unreachable: tiers that could not be asked, and why: it may stay there.
        replaced: tiers that are not those which records name, and what that means: it may stay in the others.
    """

    run: str
    dry_run: bool
    tags: tuple[str, ...] = ()
    tiers: list[TierRunRemoval] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it is gone from all tiers; in a dry run: would be."""
        return not self.unreachable and all(not t.reasons if self.dry_run else t.removed for t in self.tiers)


@dataclass
class RemoveReport:
    """The removal of a version.

    Attributes:
        seq, step, id: of the version; step is None and id empty if no record of it can be read.
        dry_run: nothing was changed.
        tiers: those that have it.
        unreachable: tiers that could not be asked, and why: it may stay there.
        replaced: tiers that are not those which records name, and what that means: it may stay in the others.
    """

    seq: int
    step: int | None
    id: str
    dry_run: bool
    tiers: list[TierRemoval] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it is gone from all tiers that it was to go from; in a dry run: would be."""
        gone = all(not tier.reasons and not tier.forced if self.dry_run else tier.removed for tier in self.tiers)
        return gone and not self.unreachable


def remove_version(
    tier_runs: Sequence[TierRun],
    found: VersionCopies | int,
    tags: Collection[str],
    saving: PendingSaves | None = None,
    *,
    tier: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> RemoveReport:
    """Remove a version.

    Args:
        tier_runs: the run in each tier.
        found: the version, or the number of one of which no record can be read.
        tags: its tags.
        saving: the saves that this process has under way.
        tier: the only tier to remove it from; None: all.
        force: also the newest version, the only durable copy, one whose record cannot be read, and one that is still on
            its way to a tier.
        dry_run: change nothing; what stands in the way is in the report.

    Raises:
        NotFound: there is no such tier, or it does not have the version.
        TierstateError: it must stay; nothing was changed. The message has each tier's reasons.
    """
    one = None if isinstance(found, int) else found
    seq = found if isinstance(found, int) else found.version.head.seq
    head = None if one is None else one.version.head
    report = RemoveReport(seq, head.step if head else None, one.version.id if one else "", dry_run)
    coming = [] if saving is None else [t.name for t in tier_runs if seq in saving.coming(t.name)]
    removal = _Removal(tier_runs, one, seq, tags, tier, coming)
    removal.look(report)
    if dry_run:
        return report
    stay = [tier_text(t.tier, why) for t in report.tiers for why in (*t.reasons, *(() if force else t.forced))]
    if stay:
        remedy = "" if any(t.reasons for t in report.tiers) else "; say force=True to remove it all the same"
        told = f"{'; '.join(stay)}{_others(report)}"
        raise TierstateError(f"version {seq} of run {tier_runs[0].run!r} was not removed: {told}{remedy}")
    for one_tier in report.tiers:
        removal.carry_out(one_tier)
    return report


def _note_replaced(tier_run: TierRun, replaced: dict[str, str]) -> None:
    if id := tier_run.identity.replaced:
        replaced[tier_run.name] = (
            f"is not tier {id[:12]}, which records name: it is another host's, a new disk, or its folder was moved; "
            "what that one has stays, and is seen again with it"
        )


def _others(report: RemoveReport | RunRemoval) -> str:
    """The tiers that `report.replaced` names, for a message."""
    return "".join(f"; {tier_text(*one)}" for one in report.replaced.items())


class _Removal:
    """The removal of a version.

    Args:
        coming: tiers to which this process still saves it, and which have it afterwards.
    """

    def __init__(
        self,
        tier_runs: Sequence[TierRun],
        one: VersionCopies | None,
        seq: int,
        tags: Collection[str],
        tier: str | None,
        coming: Sequence[str],
    ) -> None:
        self._tier_runs, self._one, self._seq, self._tags, self._tier = tier_runs, one, seq, tags, tier
        self._coming = coming
        if tier is not None:
            tier_run_named(tier_runs, tier)

    def look(self, report: RemoveReport) -> None:
        """Find the tiers that have the version, and what stands in the way."""
        learn_newest([tier_run.identity for tier_run in self._tier_runs])
        going = []
        for tier_run in self._tier_runs:
            if self._tier not in (None, tier_run.name):
                continue
            try:
                tier_run.identity.ensure(create=False)  # a file system that is not mounted may have it
                _note_replaced(tier_run, report.replaced)
                if self._seq in tier_run.log.seqs() and not self._is_another(tier_run):
                    going.append(tier_run)
            except TierstateError as error:
                report.unreachable[tier_run.name] = str(error)
        if not going:
            where = self._tier or ", ".join(tier_run.name for tier_run in self._tier_runs)
            lost = "".join(f"; {name} cannot be asked: {why}" for name, why in report.unreachable.items())
            raise NotFound(f"version {self._seq} is not in {where}{lost}{_others(report)}")
        newest = max(RunCatalog(self._tier_runs).seqs(), default=self._seq)  # without a tier that does not answer
        for tier_run in going:
            report.tiers.append(self._look(tier_run, going, newest))

    def _is_another(self, tier_run: TierRun) -> bool:
        """Whether a tier has another version of this number, made where neither saw the other: that one stays."""
        if self._one is None or tier_run.name in self._one.tiers:
            return False
        try:
            return tier_run.log.read(self._seq).version.id != self._one.version.id
        except (FormatError, MediaError, NotFound):
            return False  # it cannot be read, and is told as that

    def _look(self, tier_run: TierRun, going: Sequence[TierRun], newest: int) -> TierRemoval:
        found = TierRemoval(tier_run.name)
        try:
            held = tier_run.leased().get(self._seq)
            found.reasons += [f"it is {held}"] if held else []
            found.packs = dict(sweep(tier_run, dry_run=True, dropped=[self._seq]).packs)
            last = tier_run.log.seqs()[-1]
        except TierstateError as error:
            found.reasons.append(str(error))
            return found
        kept = self._kept_elsewhere(tier_run, going)
        if self._tags and not kept:
            found.reasons.append(f"it has the tag {', '.join(self._tags)}: take that back first")
        if self._seq == last:
            found.forced.append("it is the newest version" + ("" if last == newest else " there"))
        if self._coming:
            found.forced.append(f"it is still being saved to {', '.join(self._coming)}, and will be there")
        if self._tier is not None and tier_run.tier.traits.persistent and not kept:
            found.forced.append("no other persistent tier has all that this one has of it")
        if self._one is None or tier_run.name not in self._one.tiers:
            found.forced.append("its record cannot be read there, and `tierstate doctor` may be able to repair it")
        return found

    def _kept_elsewhere(self, tier_run: TierRun, going: Sequence[TierRun]) -> bool:
        """Whether a persistent tier that keeps the version has every chunk of it that this tier has."""
        holdings = () if self._one is None else self._one.holdings
        mine = [h.layout.present for h in holdings if h.tier_run is tier_run]
        others = [h for h in holdings if h.tier_run not in going and h.tier_run.tier.traits.persistent]
        return bool(mine) and any((h.layout.present | ~mine[0]).all() for h in others)

    def carry_out(self, found: TierRemoval) -> None:
        """Remove it from one tier; an error goes to the report, and does not stop the others."""
        one, found.packs = self._one, {}
        going = _Going(self._seq, one.version.id, one.version.head) if one else _Going(self._seq)
        try:
            _drop(tier_run_named(self._tier_runs, found.tier), [going], found)
        except TierstateError as error:
            found.error = str(error)


class _Going(NamedTuple):
    """A version that goes; id and head only if a record of it can be read."""

    seq: int
    id: str = ""
    head: Head | None = None


def _drop(tier_run: TierRun, versions: Sequence[_Going], found: TierRemoval) -> None:
    """Remove versions from a tier; what was done goes to the report, also before an error.

    Raises:
        TierstateError: the tier failed.
    """
    unmarked = [one for one in versions if not _mark(tier_run, one)]
    there = tier_run.log.generations()
    records = {one.seq: there.get(one.seq, []) for one in versions}
    packs = _packs(tier_run, records)
    for seq, generations in records.items():
        tier_run.log.forget(seq, generations)
    found.removed = True
    unmarked = [one for one in unmarked if not _mark(tier_run, one)]  # at once, in the room of the records
    tier_run.look_again()
    unused = UnusedPacks(tier_run.tier, tier_run.run, tier_run.summaries).among(packs) or []
    tier_run.tier.discard(unused)
    found.packs |= {key: packs[key] for key in unused}
    for one in unmarked:
        _mark(tier_run, one, last=True)


def _mark(tier_run: TierRun, one: _Going, *, last: bool = False) -> bool:
    """Write the mark; False if there is no room for it before the version has gone.

    Args:
        last: the version has gone, and nothing else will make room.
    """
    try:
        mark_removed(tier_run.tier, tier_run.run, one.seq, one.id, one.head)
        return True
    except TierFull as error:
        if last:
            what = f"there is still no room for the mark that says so, and a repair may bring it back: {error}"
            raise TierFull(f"{tier_run.name}: it was removed, but {what}", tier=tier_run.name) from error
        return False


def _packs(tier_run: TierRun, records: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """The packs that records name, with their lengths; a record that cannot be read names none."""
    named: dict[str, int] = {}
    for seq, generations in records.items():
        for generation in generations:
            with suppress(TierstateError):
                named |= tier_run.log.read_generation(seq, generation).layout.pack_sizes
    return named


def remove_run(
    tier_runs: Sequence[TierRun],
    tags: Tags,
    logged: Logged,
    saving: PendingSaves | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> RunRemoval:
    """Remove a run from all tiers: its versions, what killed saves have left, its log of events, and last its tags. To
    do it again goes on from where an interruption has left it.

    Args:
        tier_runs: the run in each tier.
        tags: those of the run.
        logged: keys of its log of events in a tier, which goes with it.
        saving: the saves that this process has under way.
        force: remove it; without, the error says what there is.
        dry_run: change nothing; what stands in the way is in the report.

    Raises:
        NotFound: no tier has anything of it.
        TierstateError: it must stay, or ``force`` is not said; nothing was changed.
    """
    report = RunRemoval(tier_runs[0].run, dry_run, tuple(tags.names()))
    learn_newest([tier_run.identity for tier_run in tier_runs])
    for tier_run in tier_runs:
        try:
            tier_run.identity.ensure(create=False)  # a file system that is not mounted may have versions
            _note_replaced(tier_run, report.replaced)
            found = _look_at_run(tier_run, logged, saving)
        except TierstateError as error:
            report.unreachable[tier_run.name] = str(error)
        else:
            report.tiers += [found] if found is not None else []
    _check_removable(report, [tier_run.name for tier_run in tier_runs], force=force or dry_run)
    if dry_run:
        return report
    for found in report.tiers:
        _remove_in(tier_run_named(tier_runs, found.tier), logged, found)
    if report.ok:
        for name in report.tags:
            tags.give(name, None)
    return report


def _check_removable(report: RunRemoval, tiers: Sequence[str], *, force: bool) -> None:
    """Raises what `remove_run` raises before it changes anything."""
    run, away = f"run {report.run!r}", report.unreachable.items()
    if not (report.tiers or report.tags):
        lost = "".join(f"; {tier} cannot be asked: {why}" for tier, why in away)
        kind = NotFound if not away else Unreadable
        raise kind(f"{run} has nothing in {', '.join(tiers)}{lost}{_others(report)}")
    stay = [tier_text(found.tier, why) for found in report.tiers for why in found.reasons]
    if stay and not report.dry_run:
        raise TierstateError(f"{run} was not removed: {'; '.join(stay)}")
    if not force:
        there = [f"{n} version{'s' * (n != 1)} in {name}" for name, n in ((t.tier, t.versions) for t in report.tiers)]
        there += [f"the tags {', '.join(report.tags)}"] if report.tags else []
        what = f"it has {', '.join(there)}{_others(report)}"
        raise TierstateError(f"{run} was not removed: {what}; say force=True to remove all of it")


def _look_at_run(tier_run: TierRun, logged: Logged, saving: PendingSaves | None) -> TierRunRemoval | None:
    """What a tier has of a run, and what stands in the way; None if it has neither versions, packs nor events."""
    seqs, found = tier_run.log.seqs(), TierRunRemoval(tier_run.name)
    found.versions, unclear = len(seqs), _sweep(tier_run, found, dry_run=True, dropped=seqs)
    found.reasons += _in_use(tier_run)
    if saving is not None and (saving.coming(tier_run.name) or saving.pinned(tier_run.name)):
        found.reasons.append("this process has saves to it under way")
    there = seqs or found.packs or found.left or found.reasons or unclear or logged(tier_run.tier)
    return found if there else None


def _in_use(tier_run: TierRun) -> list[str]:
    """Which versions are read now or were forked, and whether the run is repaired, for messages."""
    held = sorted(tier_run.leased().items())
    return [f"it is {why}" if seq == WHOLE_RUN else f"version {seq} is {why}" for seq, why in held]


def _remove_in(tier_run: TierRun, logged: Logged, found: TierRunRemoval) -> None:
    """Remove a run from one tier; an error goes to the report, and does not stop the others."""
    found.packs, found.versions = {}, 0
    try:
        for some in batches(tier_run.log.seqs()):
            if why := _in_use(tier_run):
                raise TierstateError(f"{tier_run.name}: {'; '.join(why)}")
            records = [tier_run.log.look(seq).record for seq in some]
            _drop(tier_run, [_going(*one) for one in zip(some, records, strict=True)], found)
            found.versions += len(some)
        unclear = _sweep(tier_run, found)
        if unclear or tier_run.log.seqs():
            raise TierstateError(unclear or f"{tier_run.name}: somebody has saved to it meanwhile")
        tier_run.tier.discard(logged(tier_run.tier))
        found.removed = True
    except TierstateError as error:
        found.error, found.removed = str(error), False


def _sweep(tier_run: TierRun, found: TierRunRemoval, *, dry_run: bool = False, dropped: Collection[int] = ()) -> str:
    """Delete packs that no version names: at once those of removed versions, which an interruption has left, and others
    once they are old. Returns why that cannot be done; empty if it can."""
    removed = {seq for _, seq in removal_marks(tier_run.tier, tier_run.run)}

    def others() -> set[int | None]:
        return {seq_of(key) for key in tier_run.tier.list(pack_prefix(tier_run.run))} - removed

    left = sweep(tier_run, grace=0.0, dry_run=dry_run, busy=others, dropped=dropped) if removed else Swept()
    old = sweep(tier_run, dry_run=dry_run, dropped=dropped)
    found.packs |= {**left.packs, **old.packs}
    found.left = len({*old.young, *old.ageless} - found.packs.keys())
    return left.reason or old.reason


def _going(seq: int, record: Record | None) -> _Going:
    return _Going(seq) if record is None else _Going(seq, record.version.id, record.version.head)
