"""Remove one version from one tier or from all, by hand: for ``tierstate rm``. As careful as retention.

First a mark says that the version was removed, so that nothing takes it for lost; then its records are deleted, then
the packs that no other record and no fork names. An interruption leaves a version that can be removed again, or packs
for the next `prune`. In a full tier the mark comes last, as the version itself makes the room for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tierstate.engine.store.catalog import RunCatalog, VersionCopies
from tierstate.engine.store.retention import UnusedPacks
from tierstate.engine.store.run_in_tier import TierRun, tier_run_named
from tierstate.manifest.errors import FormatError, MediaError, NotFound, TierFull, TierstateError, tier_text
from tierstate.manifest.history.removals import mark_removed

from .sweep import sweep


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
class RemoveReport:
    """The removal of a version.

    Attributes:
        seq, step, id: of the version; step is None and id empty if no record of it can be read.
        dry_run: nothing was changed.
        tiers: those that have it.
        unreachable: tiers that could not be asked, and why: it may stay there.
    """

    seq: int
    step: int | None
    id: str
    dry_run: bool
    tiers: list[TierRemoval] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it is gone from all tiers that it was to go from; in a dry run: would be."""
        gone = all(not tier.reasons and not tier.forced if self.dry_run else tier.removed for tier in self.tiers)
        return gone and not self.unreachable


def remove_version(
    tier_runs: Sequence[TierRun],
    found: VersionCopies | int,
    tags: Collection[str],
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
        tier: the only tier to remove it from; None: all.
        force: also the newest version, the only durable copy, and one whose record cannot be read.
        dry_run: change nothing; what stands in the way is in the report.

    Raises:
        NotFound: there is no such tier, or it does not have the version.
        TierstateError: it must stay; nothing was changed. The message has each tier's reasons.
    """
    one = None if isinstance(found, int) else found
    seq = found if isinstance(found, int) else found.version.head.seq
    head = None if one is None else one.version.head
    report = RemoveReport(seq, head.step if head else None, one.version.id if one else "", dry_run)
    removal = _Removal(tier_runs, one, seq, tags, tier)
    removal.look(report)
    if dry_run:
        return report
    stay = [tier_text(t.tier, why) for t in report.tiers for why in (*t.reasons, *(() if force else t.forced))]
    if stay:
        remedy = "" if any(t.reasons for t in report.tiers) else "; say force=True to remove it all the same"
        raise TierstateError(f"version {seq} of run {tier_runs[0].run!r} was not removed: {'; '.join(stay)}{remedy}")
    for one_tier in report.tiers:
        removal.carry_out(one_tier)
    return report


class _Removal:
    def __init__(
        self, tier_runs: Sequence[TierRun], one: VersionCopies | None, seq: int, tags: Collection[str], tier: str | None
    ) -> None:
        self._tier_runs, self._one, self._seq, self._tags, self._tier = tier_runs, one, seq, tags, tier
        if tier is not None:
            tier_run_named(tier_runs, tier)

    def look(self, report: RemoveReport) -> None:
        """Find the tiers that have the version, and what stands in the way."""
        going = []
        for tier_run in self._tier_runs:
            if self._tier not in (None, tier_run.name):
                continue
            try:
                tier_run.identity.ensure(create=False)  # a file system that is not mounted may have it
                if self._seq in tier_run.log.seqs() and not self._is_another(tier_run):
                    going.append(tier_run)
            except TierstateError as error:
                report.unreachable[tier_run.name] = str(error)
        if not going:
            where = self._tier or ", ".join(tier_run.name for tier_run in self._tier_runs)
            lost = "".join(f"; {name} cannot be asked: {why}" for name, why in report.unreachable.items())
            raise NotFound(f"version {self._seq} is not in {where}{lost}")
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
        tier_run = tier_run_named(self._tier_runs, found.tier)
        found.packs, log = {}, tier_run.log
        try:
            marked = self._mark(tier_run)
            generations = log.generations().get(self._seq, [])
            packs = self._packs(tier_run, generations)
            log.forget(self._seq, generations)
            found.removed = True
            marked = marked or self._mark(tier_run)  # at once, in the room of the record
            tier_run.look_again()
            unused = UnusedPacks(tier_run.tier, tier_run.run, tier_run.summaries).among(packs) or []
            sizes = {key: packs[key] for key in unused}
            tier_run.tier.discard(unused)
            found.packs = sizes
            if not marked:
                self._mark(tier_run, last=True)
        except TierstateError as error:
            found.error = str(error)

    def _mark(self, tier_run: TierRun, *, last: bool = False) -> bool:
        """Write the mark; False if there is no room for it before the version has gone.

        Args:
            last: the version has gone, and nothing else will make room.
        """
        id, head = (self._one.version.id, self._one.version.head) if self._one else ("", None)
        try:
            mark_removed(tier_run.tier, tier_run.run, self._seq, id, head)
            return True
        except TierFull as error:
            if last:
                what = f"there is still no room for the mark that says so, and a repair may bring it back: {error}"
                raise TierFull(f"{tier_run.name}: it was removed, but {what}", tier=tier_run.name) from error
            return False

    def _packs(self, tier_run: TierRun, generations: Sequence[int]) -> dict[str, int]:
        """The packs that its records name, with their lengths; a record that cannot be read names none."""
        named: dict[str, int] = {}
        for generation in generations:
            try:
                layout = tier_run.log.read_generation(self._seq, generation).layout
            except TierstateError:
                continue
            named |= layout.pack_sizes
        return named
