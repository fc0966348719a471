"""A shelf: one run in one tier, as this process knows it: its newest record, what can be reused, what was mended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from tierstate.manifest.errors import FormatError, NotFound
from tierstate.manifest.index import Array, DigestIndex
from tierstate.manifest.layout import ABSENT, DELTA, Draft, Layout, Place
from tierstate.manifest.leases import Leases
from tierstate.manifest.log import Log
from tierstate.manifest.record import Record
from tierstate.manifest.retention import Decision, Keep, Mark

from .base import Tier
from .choices import Choices
from .foundation import check_base, flaw_of
from .index import Summaries
from .packs import Row, is_mend, read_footer
from .retiring import Retiring

log = logging.getLogger("tierstate")

Stop: TypeAlias = Callable[[], bool]


class Shelf:
    """One run in one tier.

    Args:
        tier: the tier.
        run: the run.
        keep: its retention; None keeps everything.
        rules: by glob, the retention of the leaves that it is for, in place of ``keep``.

    Attributes:
        beside: the run in all tiers of the policy, in its order, where there are others.
        rank, together: of this process, where several commit together; and whether they do.
        leads: whether this rank drops what need not be kept there, for all that see the same objects.
        whole, alone: whether it finds all of a version there; and brings it there alone, if need be.
        retention: what it drops.
        choices: what `codec: auto` has learnt there.
    """

    rank, together = 0, False
    leads = whole = alone = True

    def __init__(
        self, tier: Tier, run: str, keep: Keep | None = None, rules: Mapping[str, Keep] = MappingProxyType({})
    ) -> None:
        self.tier, self.run, self.keep, self.rules = tier, run, keep, rules
        self.log = Log(tier, run)
        self.beside: Sequence[Shelf] = ()
        self.summaries = Summaries(tier, run)
        self.retention = Retiring(self, keep, rules)
        self._lock = threading.Lock()
        self._newest: Record | None = None
        self._opened = self._own = False
        self._mends: dict[bytes, Place] | None = None
        self._sound: dict[str, bool] = {}
        self._indexed: tuple[Record, DigestIndex] | None = None
        self.choices = Choices(tier)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def newest(self) -> Record | None:
        """The newest readable record; those behind an unreadable one are passed over with a warning.

        Raises:
            TierError: the tier could not be read.
        """
        with self._lock:
            if not self._opened:
                self._newest = self._find_newest()
                self._opened = True
            return self._newest

    def _find_newest(self) -> Record | None:
        for found in self.log.newest_first():
            if found.record is not None:
                return found.record
            if isinstance(found.error, (FormatError, NotFound)):
                log.warning("%s: version %d of run %s is passed over: %s", self.name, found.seq, self.run, found.error)
            elif found.error is not None:
                raise found.error
        return None

    def record(self, seq: int) -> Record:
        """One record; the newest one without asking the tier.

        Raises: as `Log.read`.
        """
        with self._lock:
            newest = self._newest
        return newest if newest is not None and newest.version.head.seq == seq else self.log.read(seq)

    def highest_seq(self) -> int:
        """The highest number taken in this tier, whether its record is readable or not; 0 for an empty log."""
        seqs = self.log.seqs()
        return seqs[-1] if seqs else 0

    @property
    def at_hand(self) -> bool:
        """Whether `reuse` can be answered without asking the tier: its newest record was committed from here."""
        return self._own and self._mends is not None

    def recall(self) -> None:
        """Ask the tier what `reuse` will have to know."""
        self._mended()

    def reuse(self, draft: Draft, rows: Array, digests: Array) -> Array:
        """Give the rows whose chunk this tier has by its newest record the places where it lies.

        Only the newest record counts: it is never dropped, so what it names stays. A pack that is gone or has another
        length is not relied upon; a chunk that was mended is found at its new place.

        Args:
            rows: ``(n,)`` rows of the draft.
            digests: ``(n, 2)``, their chunks' digests.

        Returns:
            ``(n,)`` of bool: which of them got a place.
        """
        found = np.zeros(len(rows), bool)
        record = None if self.tier.traits.scarce or not len(rows) else self.newest()
        if record is None:
            return found
        there = self._index_of(record).find(digests)
        if not (there >= 0).any():
            return found
        there = self._founded(record.layout, there)
        layout, mends = record.layout, self._mended()
        for i in np.flatnonzero(there >= 0).tolist() if mends else ():
            place = mends.get(digests[i].tobytes())
            if place is not None:
                draft.put(int(rows[i]), place)
                found[i] = True
        objects = layout.object[there]
        for number in np.unique(objects[(there >= 0) & ~found]).tolist():
            if self.is_sound(layout.objects[number], layout):
                here = (there >= 0) & (objects == number) & ~found
                draft.put_like(rows[here], layout, there[here])
                found |= here
        return found

    def _founded(self, layout: Layout, there: Array) -> Array:
        """Rows of a layout, with -1 for deltas whose base lies in a pack that is not relied upon."""
        based = np.where(there >= 0, layout.base_object[there], ABSENT)
        for number in np.unique(based[based != ABSENT]).tolist():
            if not self.is_sound(layout.objects[number], layout):
                there = np.where(based == number, -1, there)
        return there

    def _index_of(self, record: Record) -> DigestIndex:
        if self._indexed is None or self._indexed[0] is not record:
            # Absent rows get a digest that no chunk has, so that the index keeps the version's row numbers.
            digests = np.where(record.layout.present[:, None], record.version.digests, np.uint64(0))
            self._indexed = record, DigestIndex(digests)
        return self._indexed[1]

    def is_sound(self, key: str, layout: Layout) -> bool:
        """Whether a pack is there with its whole length, as safe as a new one; asked once per pack and process."""
        if key not in self._sound:
            flaw = flaw_of(self.tier, key, layout.size_of(key))
            self._sound[key] = not flaw
            if flaw:
                log.warning("%s: pack %s %s: its chunks are written again", self.name, key, flaw)
        return self._sound[key]

    def mended(self, digest: bytes) -> Place | None:
        """Where a chunk that had been damaged in this tier was written again, if it was."""
        return self._mended().get(digest)

    def _mended(self) -> dict[bytes, Place]:
        runs = self._packs_of() if self._mends is None else ()
        with self._lock:
            if self._mends is None:
                self._mends = self._load_mends(runs)
            return self._mends

    def _packs_of(self) -> list[str]:
        """Runs in whose packs chunks of this one lie: those that it was forked from, and itself as the last."""
        newest = self.newest()
        named = {key.split("/")[1] for key in newest.layout.objects} if newest is not None else set()
        return [*sorted(named - {self.run}), self.run]

    def _load_mends(self, runs: Sequence[str]) -> dict[bytes, Place]:
        found: dict[bytes, Place] = {}
        for key in [key for run in runs for key in self.tier.list(f"packs/{run}/")]:
            if is_mend(key):
                try:
                    rows = read_footer(self.tier, key)
                    found |= {row.digest: row.place for row in rows if row.place.codec != DELTA}
                except (FormatError, NotFound) as error:
                    log.warning("%s: a mended pack cannot be used: %s", self.name, error)
        return found

    def add_mends(self, rows: Collection[Row]) -> None:
        """Remember chunks that this process has just written again."""
        with self._lock:
            if self._mends is not None:  # otherwise they are found with all others when first asked for
                self._mends |= {row.digest: row.place for row in rows}

    def distrust(self, key: str) -> None:
        """A pack was found damaged: later saves must not build on it."""
        self._sound[key] = False

    def look_again(self) -> None:
        """Forget what is remembered of records and packs, because somebody else has been here; not what was damaged."""
        with self._lock:
            self._newest, self._opened, self._mends, self._own = None, False, None, False
            self._sound = {key: sound for key, sound in self._sound.items() if not sound}

    @property
    def earlier(self) -> Record | None:
        """The newest record, as far as it is of this rank. Raises: as `newest`."""
        return self.newest()

    def cut(self, record: Record) -> Record:
        """What of a record is of this rank."""
        return record

    def withdraw(self, seq: int, why: BaseException | str, *, left_out: bool = False) -> None:
        """This rank gives nothing to a version: whoever waits for it need wait no longer."""

    def publish(self, record: Record, stop: Stop | None = None) -> None:
        """Commit a record; from then on it is what later saves reuse chunks from.

        Args:
            stop: asked while other ranks are waited for; None: whatever others do, this rank brings it alone.

        Raises:
            NotFound: what it builds on was dropped by another process meanwhile; it was not committed.
            TierstateError: as `Log.commit`.
        """
        self.create(record)
        self.build_on(record)
        self.retention.add(record)

    def create(self, record: Record) -> None:
        """Commit a record, of which nothing is remembered yet. Raises: as `publish`."""
        base = self._newest
        self.summaries.expect(record.version.head.seq)
        self.log.commit(record)
        check_base(self, record, base)

    def build_on(self, record: Record) -> None:
        """From now on this is what later saves reuse chunks from."""
        with self._lock:
            if self._newest is None or record.version.head.seq > self._newest.version.head.seq:
                # Otherwise it was brought later than newer ones, which later saves still build on.
                self._newest, self._opened, self._own = record, True, True
            for key, size in zip(record.layout.objects, record.layout.object_sizes.tolist(), strict=True):
                self._sound.setdefault(key, bool(size))

    def decision(self, in_use: Collection[int] = (), now: float | None = None) -> Decision:
        """What `retire` would do now, and why each version stays. Changes nothing.

        Args:
            in_use: as for `retire`.
            now: seconds since 1970; by default the clock's.
        """
        return self.retention.decision(in_use, now)

    def retire(self, in_use: Collection[int] = (), *, room_for_one: bool = False) -> Decision:
        """Drop what the policy does not keep: first the records, then the packs that no other record names.

        Args:
            in_use: numbers that a cascade still reads from here, perhaps with the reason of each; they stay for now.
            room_for_one: the version that is about to come counts as one of the ``last``.
        """
        decision = self.retention.retire(in_use, room_for_one=room_for_one)
        self.summaries.keep()
        return decision

    def leased(self) -> dict[int, str]:
        """Versions that are read or forked, and why each must stay. Whoever drops one asks before its record goes, and
        once more before its packs do."""
        return Leases(self.tier, self.run).live(self.tier.age)

    @property
    def known(self) -> Collection[int]:
        """Numbers that this process knows to be here, without asking the tier."""
        return self.retention.known

    def worth_bringing(self, marks: Collection[Mark]) -> set[int]:
        """Those of the numbers, all yet to come, that the policy would keep here."""
        return self.retention.worth_bringing(marks)
