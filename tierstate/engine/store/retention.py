"""Retention of one run in one tier: drops versions, then leaves of versions, then the packs that no record names.

The decision itself is a pure function (`manifest.history.retention`). This module collects its inputs (records, tags,
leases, copies in other tiers) and carries it out: it deletes records first and packs after them, so that an
interruption leaves unused packs and never missing ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from tierstate.engine.packs.keys import is_mend, pack_prefix
from tierstate.engine.progress import Progress, no_progress
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import FormatError, NotFound, TierFull, TierstateError
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leases import FORK, Leases
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.removals import removed_since
from tierstate.manifest.history.retention import (
    LeafGroups,
    RetentionDecision,
    RetentionEntry,
    RetentionPolicy,
    decide_retention,
)
from tierstate.manifest.history.tags import TagReader
from tierstate.tiers.base import Tier

from .index import SeqSummaries, Summaries

DROP_BATCH = 64
"""Versions that are dropped between two readings of leases and tags."""


DELETE_BATCH = 500
"""Objects that are deleted in one call."""


log = logging.getLogger("tierstate")


class UnusedPacks:
    """Finds the packs of dropped versions that a saver may delete at once; the rest is left to a sweep.

    Args:
        summaries: those of the run's records.
    """

    def __init__(self, tier: Tier, run: str, summaries: Summaries) -> None:
        self._tier, self._run, self._summaries = tier, run, summaries
        self._own = pack_prefix(run)
        self._forks: dict[str, Summaries] = {}

    def among(self, packs: Collection[str]) -> list[str] | None:
        """Those of the packs that no record of any generation and no fork names; None if it cannot be known now.

        Raises:
            TierError: the tier could not be read.
        """
        named = self._summaries.named()
        if named is None:
            return None
        # Leases are read last: a lease taken earlier, on a record that has since been deleted, is then seen.
        held = Leases(self._tier, self._run).look(self._tier.age)
        if held.odd or not all(
            lease.kind == FORK or lease.is_of(named.commits.get(lease.seq, ())) for lease in held.live
        ):
            return None
        used = set(named.packs)
        pins: dict[str, list[str]] = {}
        for lease in held.live:
            if lease.kind == FORK:
                pins.setdefault(lease.by, []).append(lease.key)
        for run, keys in sorted(pins.items()):
            theirs = self._named_by(run, keys)
            if theirs is None:
                return None
            used |= theirs
        # A fork's record names packs of its source run: only the source run deletes those.
        return [k for k in sorted(packs) if k not in used and k.startswith(self._own) and not is_mend(k)]

    def _named_by(self, run: str, pins: Collection[str]) -> set[str] | None:
        """Packs of this run that records of a fork name; none once that has dropped what it was forked from, or was
        removed, also while its pins are still there. None if it cannot be known: it is being forked now, and has no
        record yet, or it has one that cannot be read."""
        named = self._forks.setdefault(run, Summaries(self._tier, run)).named()
        if named is None:
            return None
        if not named.commits and not all(removed_since(self._tier, run, pin, self._tier.age) for pin in pins):
            return None
        return {key for key in named.packs if key.startswith(self._own)}


def discard(tier: Tier, keys: Iterable[str], progress: Progress = no_progress) -> None:
    """Delete objects in batches.

    Args:
        progress: called with the number of objects deleted since the last call.
    """
    every = list(keys)
    for at in range(0, len(every), DELETE_BATCH):
        batch = every[at : at + DELETE_BATCH]
        tier.discard(batch)
        progress(len(batch))


def batches(seqs: Collection[int]) -> list[list[int]]:
    """The numbers in batches of `DROP_BATCH`."""
    every = list(seqs)
    return [every[at : at + DROP_BATCH] for at in range(0, len(every), DROP_BATCH)]


def _less_one(keep: RetentionPolicy | None) -> RetentionPolicy | None:
    """The policy with ``last`` reduced by one, for a version that is about to be saved."""
    return replace(keep, last=max(1, keep.last - 1)) if keep is not None and keep.last else keep


def _add_reasons(pins: dict[int, str], more: Mapping[int, str]) -> None:
    """Add reasons why versions stay."""
    for seq, why in more.items():
        pins[seq] = f"{pins[seq]}; {why}" if seq in pins else why


class _Known(NamedTuple):
    """What retention needs to know about a committed version.

    Attributes:
        objects: packs that its last record names.
        generations: the records that it has.
        before: packs that only earlier records name, which remain after an interruption.
        commit: id of the last record's commit.
    """

    mark: RetentionEntry
    objects: frozenset[str]
    generations: tuple[int, ...] = (0,)
    before: frozenset[str] = frozenset()
    commit: str = ""


class RetainedRun(Protocol):
    """The part of `TierRun` that retention uses; a protocol, since `TierRun` imports this module."""

    tier: Tier
    run: str
    log: Log
    summaries: Summaries
    retention: Retention

    @property
    def name(self) -> str: ...
    @property
    def beside(self) -> Sequence[RetainedRun]: ...
    def leased(self) -> Mapping[int, str]: ...
    def record(self, seq: int) -> Record: ...


class Retention:
    """Retention of one run in one tier.

    Args:
        tier_run: the run in the tier.
        keep: what is kept; None: everything.
        rules: by glob of leaf paths, the policy of those leaves, in place of ``keep``.
    """

    def __init__(
        self, tier_run: RetainedRun, keep: RetentionPolicy | None, rules: Mapping[str, RetentionPolicy]
    ) -> None:
        self._tier_run, self._keep, self._rules = tier_run, keep, rules
        self._groups = LeafGroups(rules)
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._doomed: set[str] = set()
        self._left: dict[int, str] = {}  # why versions that cannot be read are left alone
        self._tags = TagReader(tier_run.tier, tier_run.run)
        self._unneeded = UnusedPacks(tier_run.tier, tier_run.run, tier_run.summaries)

    @property
    def known(self) -> Collection[int]:
        """Numbers of the versions that this process knows to be in the tier; does not access the tier."""
        return self._known.keys()

    @property
    def _terms(self) -> list[RetentionPolicy]:
        return [keep for keep in (self._keep, *self._rules.values()) if keep is not None and not keep.all]

    def holds(self, seq: int, *, slower: bool) -> bool:
        """Whether this tier has a tagged version and keeps it, so that another tier may drop its copy.

        Args:
            slower: this tier comes after the calling one in the policy, and so does not rely on it in turn.
        """
        known = not self._terms or seq in self._tags.by_version()
        return known and (slower or all(keep.tags for keep in self._terms))

    def add(self, record: Record) -> None:
        """Add a version that was just committed, so that it need not be read back."""
        with self._lock:
            self._known[record.version.head.seq] = self._of(self._tier_run.summaries.add(record), record)

    def decision(
        self, in_use: Collection[int], now: float | None, seen: Collection[int] | None = None
    ) -> RetentionDecision:
        """What `retire` would do, with all reasons."""
        with self._lock:
            self._learn()
            return self._decide(self._marks(), self._with_new(in_use, seen), now, self._keep, self._rules, ask=True)

    def _with_new(self, in_use: Collection[int], seen: Collection[int] | None) -> Collection[int]:
        """``in_use``, with the versions that have come since it was determined."""
        new = () if seen is None else self._known.keys() - set(seen)
        if not new:
            return in_use
        pins = dict(in_use) if isinstance(in_use, Mapping) else dict.fromkeys(in_use, "in use")
        return pins | dict.fromkeys(new, "came meanwhile")

    def retire(
        self,
        in_use: Collection[int],
        *,
        room_for_one: bool,
        seen: Collection[int] | None = None,
        progress: Progress = no_progress,
    ) -> RetentionDecision:
        """Drop versions, leaves and packs.

        Args:
            room_for_one: a version about to be saved counts among the ``last``.
            seen: as for `TierRun.retire`.
            progress: called with the number of records and packs deleted since the last call.
        """
        if not self._terms:
            return RetentionDecision({}, ())
        keep, rules = self._keep, dict(self._rules)
        if room_for_one:
            keep, rules = (
                _less_one(keep),
                {glob: _less_one(terms) or terms for glob, terms in rules.items()},
            )
        with self._lock:
            self._learn()
            self._finish()
            pinned = self._with_new(in_use, seen)
            decision = self._carry_out(lambda: self._decide(self._marks(), pinned, None, keep, rules), progress)
            self._sweep(progress)
        return decision

    def _carry_out(self, decide: Callable[[], RetentionDecision], progress: Progress) -> RetentionDecision:
        """Drop and thin in batches, so that versions tagged or leased meanwhile stay. What was done, with reasons."""
        first = now = decide()
        dropped: list[int] = []
        thinned: dict[int, tuple[str, ...]] = {}
        for some in batches(first.drop):
            now = decide() if dropped else now
            going = [seq for seq in some if seq in now.drop]
            self._drop(going)
            dropped += going
            progress(len(going))
        for some in batches(first.thin):
            now = decide() if dropped or thinned else now
            for seq in some:
                if seq in now.thin and self._thin(seq, now.thin[seq], progress):
                    thinned[seq] = now.thin[seq]
        keep = {seq: why for seq, why in (first.keep | now.keep).items() if seq not in dropped}
        return RetentionDecision(keep, tuple(dropped), thinned)

    def _drop(self, seqs: Collection[int]) -> None:
        """Delete the records of versions. Their packs are deleted later: an interruption leaves unused packs, never
        missing ones."""
        log_, known = self._tier_run.log, [self._known[seq] for seq in seqs]
        self._doomed |= {key for one in known for key in one.objects | one.before}
        keys = [log_.key(seq, g) for seq, one in zip(seqs, known, strict=True) for g in one.generations]
        if keys:
            self._tier_run.tier.discard(keys)
        for seq in seqs:
            del self._known[seq]

    def worth_bringing(self, marks: Collection[RetentionEntry], gone: Collection[RetentionEntry] = ()) -> set[int]:
        """The numbers, of versions that are not in the tier yet, that retention would keep there.

        Args:
            gone: versions that are no longer there, beside which they are judged as if these were.
        """
        seqs = {mark.seq for mark in marks}
        if self._terms:
            with self._lock:
                self._learn()
                beside = [mark for mark in gone if mark.seq not in self._known and mark.seq not in seqs]
                coming = [mark._replace(groups=self._groups.names) for mark in (*marks, *beside)]
                seqs -= set(self._decide([*self._marks(), *coming], (), None, self._keep, self._rules).drop)
        return seqs

    def thinned(self, version: Version, gone: Array) -> Array:
        """The leaves that rules have dropped here from a version that stays, if leaves are gone without a trace: these,
        as far as a rule may have dropped them, and what is kept as long as they are.

        Args:
            gone: ``(leaves,)`` of bool.

        Returns:
            ``(leaves,)`` of bool.
        """
        belongs = self._groups.of(version)
        terms = [self._rules.get(name, self._keep) for name in self._groups.names]
        mortal = np.array([keep is not None and not keep.all for keep in terms], bool)
        dropped: Array = np.any(belongs[gone], axis=0) & mortal
        if dropped.all():
            return np.zeros(len(gone), bool)  # then the version as a whole would have been dropped
        left: Array = np.any(belongs[:, ~dropped], axis=1)
        return ~left

    def _marks(self) -> list[RetentionEntry]:
        return [known.mark for known in self._known.values()]

    def _decide(
        self,
        marks: Sequence[RetentionEntry],
        in_use: Collection[int],
        now: float | None,
        keep: RetentionPolicy | None,
        rules: Mapping[str, RetentionPolicy],
        *,
        ask: bool = False,
    ) -> RetentionDecision:
        """Decide. Leases and tags are read only if something would be dropped without them, or with ``ask``."""
        now = time.time() if now is None else now
        pins = dict(in_use) if isinstance(in_use, Mapping) else dict.fromkeys(in_use, "in use")
        if not ask:
            decision = decide_retention(marks, keep, pins, now, rules)
            if not decision.drop and not decision.thin:
                return decision
        tags = self._tags.by_version()
        marks = [mark._replace(tags=tags.get(mark.seq, ())) for mark in marks]
        _add_reasons(pins, self._tier_run.leased())
        decision = decide_retention(marks, keep, pins, now, rules)
        goes = [seq for seq in (*decision.drop, *decision.thin) if seq in tags and seq in self._known]
        if alone := [seq for seq in goes if not self._is_elsewhere(seq)]:
            _add_reasons(pins, {seq: f"only durable copy of tag {', '.join(tags[seq])}" for seq in alone})
            decision = decide_retention(marks, keep, pins, now, rules)
        return decision

    def _is_elsewhere(self, seq: int) -> bool:
        """Whether this tier, if persistent, may drop a tagged version since another persistent tier has all of it.

        The other tier must know the tag, and either keep all tagged versions or be slower. Otherwise two tiers could
        each drop the version at the same time, because the other one has it.
        """
        if not self._tier_run.tier.traits.persistent:
            return True
        slower = False
        for other in self._tier_run.beside:
            if other is self._tier_run:
                slower = True
            elif other.tier.traits.persistent and self._is_safe_in(other, seq, slower):
                return True
        return False

    def _is_safe_in(self, other: RetainedRun, seq: int, slower: bool) -> bool:
        try:
            if not other.retention.holds(seq, slower=slower):
                return False
            there, here = other.record(seq), self._tier_run.record(seq)
        except TierstateError as error:
            log.debug("%s: whether %s has version %d cannot be told: %s", self._tier_run.name, other.name, seq, error)
            return False
        return there.version.id == here.version.id and bool((there.layout.present | ~here.layout.present).all())

    def _learn(self) -> None:
        """Update `_Known` from the log. Versions whose records cannot be read are left alone."""
        found: dict[int, _Known] = {}
        for seq, seen in self._tier_run.summaries.look().items():
            for error in seen.problems:
                self._leave(seq, error)
            if not seen.problems:
                known = self._known.get(seq)
                last = seen.summaries[-1].commit
                alike = known is not None and (known.generations, known.commit) == (seen.generations, last)
                try:
                    found[seq] = known if known is not None and alike else self._of(seen)
                except TierstateError as error:
                    self._leave(seq, error)
        self._known = found  # at once: `known` is read by other threads meanwhile

    def _of(self, seen: SeqSummaries, record: Record | None = None) -> _Known:
        *earlier, last = seen.summaries
        objects = frozenset(last.packs)
        # Summaries do not list leaves: the record is read only if the rules have groups of leaves.
        groups = self._groups.names
        if self._rules:
            groups = self._groups.present_in(record or self._tier_run.log.read_generation(last.seq, last.generation))
        mark = RetentionEntry(last.seq, last.step, last.time, last.metadata, groups=groups)
        before = frozenset(k for s in earlier for k in s.packs) - objects
        return _Known(mark, objects, seen.generations, before, last.commit)

    def _leave(self, seq: int, error: TierstateError) -> None:
        if isinstance(error, NotFound) and seq not in self._left:
            self._left[seq] = ""  # another process has just dropped it, unless it is so the next time, too
            return
        if self._left.get(seq) != str(error):  # told once, not again after each save
            self._left[seq] = str(error)
            run = self._tier_run.run
            log.warning("%s: version %d of run %s is left alone: %s", self._tier_run.name, seq, run, error)

    def _finish(self) -> None:
        """Delete replaced records that an interruption left, but not of the newest version, which savers build on."""
        for seq, known in list(self._known.items()):
            if len(known.generations) > 1 and seq != max(self._known):
                self._forget_before(seq)

    def _forget_before(self, seq: int) -> None:
        """Delete replaced records of a version, unless it is leased now (perhaps by such a record): then later."""
        if seq in self._tier_run.leased():
            return
        known = self._known[seq]
        self._doomed |= known.before
        self._tier_run.log.forget(seq, known.generations[:-1])
        self._known[seq] = known._replace(generations=known.generations[-1:], before=frozenset())

    def _thin(self, seq: int, groups: Collection[str], progress: Progress) -> bool:
        """Commit a record that names only the leaves of these groups, then delete the records before it. Returns
        whether it was committed."""
        known = self._known[seq]
        try:
            record = self._groups.thin(self._tier_run.log.read_generation(seq, known.generations[-1]), groups)
        except (FormatError, NotFound) as error:
            del self._known[seq]
            self._leave(seq, error)
            return False
        if record is None:
            return False
        generation = known.generations[-1] + 1
        try:
            self._tier_run.log.commit(record, generation)
        except TierFull:
            if not self._doomed:
                raise
            self._sweep(progress)  # the packs of what was dropped make room
            self._tier_run.log.commit(record, generation)
        less = self._tier_run.summaries.add(record, generation).summaries[-1]
        self._known[seq] = _Known(
            known.mark._replace(groups=self._groups.present_in(record)),
            frozenset(less.packs),
            (*known.generations, generation),
            (known.objects | known.before) - set(less.packs),
            less.commit,
        )
        self._forget_before(seq)
        return True

    def _sweep(self, progress: Progress) -> None:
        """Delete the packs of dropped versions that no record names; failures are tried again next time."""
        gone = self._unneeded.among(self._doomed) if self._doomed else None
        if gone is None:
            return
        discard(self._tier_run.tier, gone, progress)
        self._doomed.clear()
