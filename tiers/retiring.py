"""Retiring: what retention drops of one run in one tier: records first, then leaves, then the packs nobody names."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from tierstate.manifest.errors import FormatError, NotFound, TierstateError
from tierstate.manifest.log import Log
from tierstate.manifest.record import Record
from tierstate.manifest.retention import Decision, Keep, Mark, decide
from tierstate.manifest.tags import tags_of
from tierstate.manifest.thinning import Groups

from .base import Tier
from .index import Seen, Summaries
from .terms import join, less, parts
from .unneeded import Unneeded

log = logging.getLogger("tierstate")


class _Known(NamedTuple):
    """What retention needs of a committed version.

    Attributes:
        objects: packs that its last record names.
        generations: the records that it has.
        before: packs that only records before the last name, which an interruption left.
        commit: id of the last record's commit.
    """

    mark: Mark
    objects: frozenset[str]
    generations: tuple[int, ...] = (0,)
    before: frozenset[str] = frozenset()
    commit: str = ""


class Shelved(Protocol):
    """What is asked of the run in the tier."""

    tier: Tier
    run: str
    log: Log
    summaries: Summaries
    retention: Retiring

    @property
    def name(self) -> str: ...
    @property
    def beside(self) -> Sequence[Shelved]: ...
    def leased(self) -> Mapping[int, str]: ...
    def record(self, seq: int) -> Record: ...


class Retiring:
    """Retention of one run in one tier.

    Args:
        shelf: the run in the tier.
        keep: what is kept; None: everything.
        rules: by glob, what is kept of the leaves that it is for, in place of ``keep``.
    """

    def __init__(self, shelf: Shelved, keep: Keep | None, rules: Mapping[str, Keep]) -> None:
        self._shelf, self._keep, self._rules = shelf, keep, rules
        self._groups = Groups(rules)
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._doomed: set[str] = set()
        self._unneeded = Unneeded(shelf.tier, shelf.run, shelf.summaries)

    @property
    def known(self) -> Collection[int]:
        """Numbers that this process knows to be there, without asking the tier."""
        return self._known.keys()

    @property
    def _terms(self) -> list[Keep]:
        return [keep for keep in (self._keep, *self._rules.values()) if keep is not None and not keep.all]

    def holds(self, seq: int, *, slower: bool) -> bool:
        """Whether a tagged version that is here stays here, so that another tier may let go of it.

        Args:
            slower: this tier stands behind the one that asks, and so does not rely on it in turn.
        """
        known = not self._terms or seq in tags_of(self._shelf.tier, self._shelf.run)
        return known and (slower or all(keep.tags for keep in self._terms))

    def add(self, record: Record) -> None:
        """A version was committed: so that it need not be read back."""
        with self._lock:
            self._known[record.version.head.seq] = self._of(self._shelf.summaries.add(record), record)

    def decision(self, in_use: Collection[int], now: float | None) -> Decision:
        """What `retire` would do, and all reasons."""
        with self._lock:
            self._learn()
            return self._decide(self._marks(), in_use, now, self._keep, self._rules, ask=True)

    def retire(self, in_use: Collection[int], *, room_for_one: bool) -> Decision:
        """Drop versions, leaves and packs; a version that is about to come may count as one of the ``last``."""
        if not self._terms:
            return Decision({}, ())
        keep, rules = self._keep, dict(self._rules)
        if room_for_one:
            keep, rules = less(keep), {glob: less(terms) or terms for glob, terms in rules.items()}
        with self._lock:
            self._learn()
            self._finish()
            decision = self._carry_out(lambda: self._decide(self._marks(), in_use, None, keep, rules))
            self._sweep()
        return decision

    def _carry_out(self, decide: Callable[[], Decision]) -> Decision:
        """Drop and thin, some at a time: what is tagged or held meanwhile stays. What was done, and why others stay."""
        first = now = decide()
        dropped: list[int] = []
        thinned: dict[int, tuple[str, ...]] = {}
        for some in parts(first.drop):
            now = decide() if dropped else now
            going = [seq for seq in some if seq in now.drop]
            self._drop(going)
            dropped += going
        for some in parts(first.thin):
            now = decide() if dropped or thinned else now
            for seq in some:
                if seq in now.thin and self._thin(seq, now.thin[seq]):
                    thinned[seq] = now.thin[seq]
        keep = {seq: why for seq, why in (first.keep | now.keep).items() if seq not in dropped}
        return Decision(keep, tuple(dropped), thinned)

    def _drop(self, seqs: Collection[int]) -> None:
        """Forget versions. Packs are judged after the records are gone: interrupted here, they are left over, never
        missing."""
        log_, known = self._shelf.log, [self._known[seq] for seq in seqs]
        self._doomed |= {key for one in known for key in one.objects | one.before}
        keys = [log_.key(seq, g) for seq, one in zip(seqs, known, strict=True) for g in one.generations]
        if keys:
            self._shelf.tier.discard(keys)
        for seq in seqs:
            del self._known[seq]

    def worth_bringing(self, marks: Collection[Mark]) -> set[int]:
        """Those of the numbers, all yet to come, that would stay here."""
        seqs = {mark.seq for mark in marks}
        if self._terms:
            with self._lock:
                self._learn()
                coming = [mark._replace(groups=self._groups.names) for mark in marks]
                seqs -= set(self._decide([*self._marks(), *coming], (), None, self._keep, self._rules).drop)
        return seqs

    def _marks(self) -> list[Mark]:
        return [known.mark for known in self._known.values()]

    def _decide(
        self,
        marks: Sequence[Mark],
        in_use: Collection[int],
        now: float | None,
        keep: Keep | None,
        rules: Mapping[str, Keep],
        *,
        ask: bool = False,
    ) -> Decision:
        """The tier is asked for leases and tags only where something would go without them, or ``ask`` says so."""
        now = time.time() if now is None else now
        pins = dict(in_use) if isinstance(in_use, Mapping) else dict.fromkeys(in_use, "in use")
        decision = decide(marks, keep, pins, now, rules)
        if not ask and not decision.drop and not decision.thin:
            return decision
        tags = tags_of(self._shelf.tier, self._shelf.run)
        marks = [mark._replace(tags=tags.get(mark.seq, ())) for mark in marks]
        join(pins, self._shelf.leased())
        decision = decide(marks, keep, pins, now, rules)
        goes = [seq for seq in (*decision.drop, *decision.thin) if seq in tags and seq in self._known]
        if alone := [seq for seq in goes if not self._is_elsewhere(seq)]:
            join(pins, {seq: f"only durable copy of tag {', '.join(tags[seq])}" for seq in alone})
            decision = decide(marks, keep, pins, now, rules)
        return decision

    def _is_elsewhere(self, seq: int) -> bool:
        """Whether this tier, if it lasts, may let go of a tagged version since another that lasts has all of it.

        Only those count that keep what is tagged, and those that are slower, so that no two tiers let go of it at once
        because the other has it; and only where they know of the tag.
        """
        if not self._shelf.tier.traits.persistent:
            return True
        slower = False
        for other in self._shelf.beside:
            if other is self._shelf:
                slower = True
            elif other.tier.traits.persistent and self._is_safe_in(other, seq, slower):
                return True
        return False

    def _is_safe_in(self, other: Shelved, seq: int, slower: bool) -> bool:
        try:
            if not other.retention.holds(seq, slower=slower):
                return False
            there, here = other.record(seq), self._shelf.record(seq)
        except TierstateError as error:
            log.debug("%s: whether %s has version %d cannot be told: %s", self._shelf.name, other.name, seq, error)
            return False
        return there.version.id == here.version.id and bool((there.layout.present | ~here.layout.present).all())

    def _learn(self) -> None:
        """Take in what the log lists; forget what is gone. Versions whose records cannot be read are left alone."""
        before, self._known = self._known, {}
        for seq, seen in self._shelf.summaries.look().items():
            for error in seen.problems:
                self._leave(seq, error)
            if not seen.problems:
                known = before.get(seq)
                last = seen.summaries[-1].commit
                alike = known is not None and (known.generations, known.commit) == (seen.generations, last)
                try:
                    self._known[seq] = known if known is not None and alike else self._of(seen)
                except TierstateError as error:
                    self._leave(seq, error)

    def _of(self, seen: Seen, record: Record | None = None) -> _Known:
        *earlier, last = seen.summaries
        objects = frozenset(last.packs)
        # Summaries do not know leaves: only where rules part them, a record is read for that.
        groups = self._groups.names
        if self._rules:
            groups = self._groups.here(record or self._shelf.log.read_generation(last.seq, last.generation))
        mark = Mark(last.seq, last.step, last.time, last.metadata, groups=groups)
        before = frozenset(k for s in earlier for k in s.packs) - objects
        return _Known(mark, objects, seen.generations, before, last.commit)

    def _leave(self, seq: int, error: TierstateError) -> None:
        log.warning("%s: version %d of run %s is left alone: %s", self._shelf.name, seq, self._shelf.run, error)

    def _finish(self) -> None:
        """Forget records that have been replaced, where an interruption left them; the newest is built on as it is."""
        for seq, known in list(self._known.items()):
            if len(known.generations) > 1 and seq != max(self._known):
                self._forget_before(seq)

    def _forget_before(self, seq: int) -> None:
        """Unless the version is held by now, perhaps by such a record: then it is done later."""
        if seq in self._shelf.leased():
            return
        known = self._known[seq]
        self._doomed |= known.before
        self._shelf.log.forget(seq, known.generations[:-1])
        self._known[seq] = known._replace(generations=known.generations[-1:], before=frozenset())

    def _thin(self, seq: int, groups: Collection[str]) -> bool:
        """Commit a record that names the leaves of these groups only, then forget those before it; whether there is
        one."""
        known = self._known[seq]
        try:
            record = self._groups.thin(self._shelf.log.read_generation(seq, known.generations[-1]), groups)
        except (FormatError, NotFound) as error:
            del self._known[seq]
            self._leave(seq, error)
            return False
        if record is None:
            return False
        generation = known.generations[-1] + 1
        self._shelf.log.commit(record, generation)
        less = self._shelf.summaries.add(record, generation).summaries[-1]
        self._known[seq] = _Known(
            known.mark._replace(groups=self._groups.here(record)),
            frozenset(less.packs),
            (*known.generations, generation),
            (known.objects | known.before) - set(less.packs),
            less.commit,
        )
        self._forget_before(seq)
        return True

    def _sweep(self) -> None:
        """Delete the packs of dropped versions that no record names; what fails is tried again next time."""
        gone = self._unneeded.among(self._doomed) if self._doomed else None
        if gone is None:
            return
        if gone:
            self._shelf.tier.discard(gone)
        self._doomed.clear()
