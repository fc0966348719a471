"""One run in one tier, as this process knows it: the newest record, reusable chunks, repaired chunks."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np

from tierstate.engine.codecs.adaptive import CodecChooser
from tierstate.engine.events import EventBus
from tierstate.engine.packs.keys import PACKS, is_mend, pack_prefix, run_of
from tierstate.engine.packs.pack import FooterRow, read_footer
from tierstate.engine.progress import Progress, no_progress
from tierstate.manifest.arrays import Array
from tierstate.manifest.digest import UNFORGEABLE, DigestIndex
from tierstate.manifest.errors import CommitUnknown, FormatError, MediaError, NotFound, TierstateError, Unauthentic
from tierstate.manifest.format.layout import ABSENT, DELTA, ChunkPlace, Layout, LayoutBuilder
from tierstate.manifest.format.marker import names_tiers
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.leases import Leases
from tierstate.manifest.history.log import Log, commit_id
from tierstate.manifest.history.removals import Removal, is_removed, removals, was_removed
from tierstate.manifest.history.retention import RetentionDecision, RetentionEntry, RetentionPolicy
from tierstate.tiers.base import Tier, layer_of
from tierstate.tiers.concurrency import results_ahead
from tierstate.tiers.memory.gpu import Gpu
from tierstate.tiers.wrappers.encrypt import Encrypted
from tierstate.tiers.wrappers.seal import Sealed

from .identity import TierIdentity
from .index import Summaries
from .retention import Retention

log = logging.getLogger("tierstate")


Stop: TypeAlias = Callable[[], bool]


class BaseDropped(NotFound):
    """What a save builds on was dropped by another process. A copy of it from a faster tier may still succeed."""

    transient: ClassVar[bool] = True


def check_base(tier_run: TierRun, record: Record, base: Record | None) -> None:
    """After a commit, check that the version whose packs the new record reuses (``base``) still exists.

    Retention deletes a record first and then the packs that no record names. So if the base still has its record after
    the commit, its packs are safe. If not, the new record is deleted again, unless others may already rely on it.

    Raises:
        BaseDropped: the base no longer exists; the new record was deleted again.
        CommitUnknown: it could not be deleted, so the packs that it names must stay.
    """
    shared = set(base.layout.objects) & set(record.layout.objects) if base else set()
    try:
        if base is None or not shared or tier_run.log.stands(base):
            return
    except Exception as error:
        # Whatever the tier raises: the record is committed, so the save must not fail and delete the packs that it
        # names. Only another process that saves this run could have dropped the base.
        log.warning("%s: whether what a save builds on stands cannot be told: %s", tier_run.name, error)
        return
    seq = record.version.head.seq
    text = (
        f"{tier_run.name}: version {base.version.head.seq}, which this save builds on, was dropped by another process"
    )
    try:
        if tier_run.highest_seq() == seq and shared <= set(tier_run.tier.list(PACKS)):
            return
        tier_run.log.forget(seq)
    except Exception as error:
        raise CommitUnknown(f"{text}, and the record of version {seq} stays: {error}; nothing was deleted") from error
    raise BaseDropped(f"{text} meanwhile", tier=tier_run.name)


def pack_flaw(tier: Tier, key: str, nbytes: int) -> str:
    """Why later versions must not reuse a pack; empty if it has its whole length and is as safe as a new one."""
    try:
        if tier.size(key) != nbytes:
            return "is truncated"
    except NotFound:
        return "is missing"
    return "" if tier.firm(key) else "has fewer copies than it should"


def tier_run_named(tier_runs: Sequence[TierRun], name: str) -> TierRun:
    """The run in the tier of that name.

    Raises:
        NotFound: there is no such tier.
    """
    for tier_run in tier_runs:
        if tier_run.name == name:
            return tier_run
    names = ", ".join(tier_run.name for tier_run in tier_runs)
    raise NotFound(f"the policy has no tier {name!r}; it has {names}", tier=name)


class TierRun:
    """One run in one tier.

    Args:
        tier: the tier.
        run: the run.
        keep: its retention; None keeps everything.
        rules: by glob of leaf paths, the retention of those leaves, in place of ``keep``.

    Attributes:
        identity: whether this is the expected tier.
        beside: the run in all tiers of the policy, in their order, if there are several.
        rank, together: rank of this process, and whether several ranks commit together.
        leads: whether this rank is the host leader: it drops versions for all ranks that see the same objects.
        whole, alone: whether this rank sees all of a version in the tier; whether it can commit one there alone.
        retention: decides and drops versions.
        choices: codecs that `codec: auto` has chosen in this tier.
        held: numbers of versions that stay although nothing keeps them: they are about to get a tag.
        authentic: whether the tier's objects are authenticated: they are sealed or encrypted.
        gpu: the `gpu` tier below its wrappers, which copies within the device bypass; None for other tiers.
        events: takes what happens to versions in the tier; a `Run` has one for all its tiers.
        before_commit: called when everything else of a version is written; raises if it is not to be committed.
    """

    rank, together = 0, False
    leads = whole = alone = True

    def __init__(
        self,
        tier: Tier,
        run: str,
        keep: RetentionPolicy | None = None,
        rules: Mapping[str, RetentionPolicy] = MappingProxyType({}),
    ) -> None:
        self.tier, self.run, self.keep, self.rules = tier, run, keep, rules
        self._sealed = layer_of(tier, Sealed) is not None
        self.authentic = self._sealed or layer_of(tier, Encrypted) is not None
        self.log = Log(tier, run, self._accept)
        self.identity = TierIdentity(tier, self._find_newest)
        self.identity.authentic = self.authentic
        self.beside: Sequence[TierRun] = ()
        self.held: set[int] = set()
        self.summaries = Summaries(tier, run)
        self.retention = Retention(self, keep, rules)
        self._lock = threading.Lock()
        self._newest: Record | None = None
        self._opened = self._own = False
        self._saved = 0
        self._mends: dict[bytes, ChunkPlace] | None = None
        self._sound: dict[str, bool] = {}
        self._indexed: tuple[Record, DigestIndex] | None = None
        self.choices = CodecChooser(tier)
        self.gpu = layer_of(tier, Gpu)  # without the wrappers: copies within the device bypass them
        self.before_commit: Callable[[], None] = lambda: None
        self.events = EventBus(run)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def _accept(self, record: Record) -> None:
        """Check a record that was read, beyond its seal.

        Raises:
            Unauthentic: its chunks could be forged, or it was written to another tier.
        """
        self._check_digest(record)
        if self.authentic:
            self.identity.check_written_here(record)

    def _check_digest(self, record: Record) -> None:
        digest = record.version.head.digest
        if self._sealed and digest not in UNFORGEABLE:
            raise Unauthentic(
                f"{self.name}: version {record.version.head.seq} has digests of {digest}, which can be forged; "
                "`tierstate copy --into` makes a version that can be sealed"
            )

    def check_not_turned_back(self) -> None:
        """Check that the newest version that this process saved is still there, where objects are authenticated.

        Retention never drops the newest version. So if it is gone, and nobody has removed it by hand, somebody has put
        back an older state of the tier.

        Raises:
            Unauthentic: it is gone.
            TierError: the tier could not be read.
        """
        kept = self.authentic and self.tier.traits.persistent
        if not kept or not self._saved or self.highest_seq() >= self._saved:
            return
        if not is_removed(self.tier, self.run, self._saved):
            raise Unauthentic(
                f"{self.name}: version {self._saved} of run {self.run!r}, which this process has saved, is gone, and "
                "nobody has removed it: an older state of the tier was put back; name the version that you trust"
            )

    def newest(self) -> Record | None:
        """The newest readable record; damaged newer ones, and those in bad sectors, are skipped with a warning.

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
                self.identity.learn(found.record)
                return found.record
            if isinstance(found.error, (FormatError, NotFound, MediaError)):
                log.warning("%s: version %d of run %s is passed over: %s", self.name, found.seq, self.run, found.error)
            elif found.error is not None:
                raise found.error
        return None

    def record(self, seq: int) -> Record:
        """One record; the newest one is cached.

        Raises: as `Log.read`.
        """
        with self._lock:
            newest = self._newest
        return newest if newest is not None and newest.version.head.seq == seq else self.log.read(seq)

    @property
    def base(self) -> int | None:
        """Number of the version whose chunks the next save reuses, as far as it is known without access to the tier."""
        newest = self._newest
        return None if newest is None else newest.version.head.seq

    def has(self, head: Head) -> bool:
        """Whether a version of this number, run and step is there; False if it cannot be read."""
        try:
            there = self.record(head.seq).version.head
        except TierstateError as error:
            log.debug("%s: version %d is not there: %s", self.name, head.seq, error)
            return False
        return (there.run, there.step) == (head.run, head.step)

    def highest_seq(self) -> int:
        """The highest number taken in this tier, whether its record is readable or not; 0 for an empty log."""
        seqs = self.log.seqs()
        return seqs[-1] if seqs else 0

    @property
    def at_hand(self) -> bool:
        """Whether `reuse` needs no access to the tier: this process committed its newest record."""
        return self._own and self._mends is not None

    def recall(self) -> None:
        """Read from the tier what `reuse` will need."""
        self._mended()

    def reuse(self, draft: LayoutBuilder, rows: Array, digests: Array) -> Array:
        """Enter into the draft the places of the chunks that the newest record of this tier already has.

        Only the newest record is used: it is never dropped, so its packs stay. Packs that are missing or have another
        length are not used; a repaired chunk is used at its new place.

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
        """The rows ``there``, with -1 in place of deltas whose base is in a pack that is not sound."""
        based = np.where(there >= 0, layout.base_object[there], ABSENT)
        for number in np.unique(based[based != ABSENT]).tolist():
            if not self.is_sound(layout.objects[number], layout):
                there = np.where(based == number, -1, there)
        return there

    def _index_of(self, record: Record) -> DigestIndex:
        if self._indexed is None or self._indexed[0] is not record:
            # Absent rows get a digest that no chunk has, so that row numbers of index and version agree.
            digests = np.where(record.layout.present[:, None], record.version.digests, np.uint64(0))
            self._indexed = record, DigestIndex(digests)
        return self._indexed[1]

    def is_sound(self, key: str, layout: Layout) -> bool:
        """Whether a pack exists with its whole length, as safe as a new one; checked once per pack and process."""
        if key not in self._sound:
            flaw = pack_flaw(self.tier, key, layout.size_of(key))
            self._sound[key] = not flaw
            if flaw:
                log.warning("%s: pack %s %s: its chunks are written again", self.name, key, flaw)
        return self._sound[key]

    def mended(self, digest: bytes) -> ChunkPlace | None:
        """Where the repaired copy of a chunk is, if it was damaged in this tier and repaired."""
        return self._mended().get(digest)

    def _mended(self) -> dict[bytes, ChunkPlace]:
        runs = self.pack_runs(self.newest()) if self._mends is None else ()
        with self._lock:
            if self._mends is None:
                self._mends = self._load_mends(runs)
            return self._mends

    def pack_runs(self, newest: Record | None) -> list[str]:
        """Runs whose packs have chunks of this run, as its newest record says: those that it was forked from, and last
        itself. Readers look for repaired copies in their packs."""
        named = {run_of(key) for key in newest.layout.objects} if newest is not None else set()
        return [*sorted(named - {self.run}), self.run]

    def _load_mends(self, runs: Sequence[str]) -> dict[bytes, ChunkPlace]:
        found: dict[bytes, ChunkPlace] = {}
        for key in [key for run in runs for key in self.tier.list(pack_prefix(run))]:
            if is_mend(key):
                try:
                    rows = read_footer(self.tier, key)
                    found |= {row.digest: row.place for row in rows if row.place.codec != DELTA}
                except (FormatError, NotFound, MediaError) as error:
                    log.warning("%s: a mended pack cannot be used: %s", self.name, error)
        return found

    def add_mends(self, rows: Collection[FooterRow]) -> None:
        """Add chunks that this process has just repaired."""
        with self._lock:
            if self._mends is not None:  # otherwise all are listed at the first use
                self._mends |= {row.digest: row.place for row in rows}

    def distrust(self, key: str) -> None:
        """Mark a pack as damaged: later saves do not reuse its chunks."""
        self._sound[key] = False

    def look_again(self) -> None:
        """Clear the cache of records and packs after another process changed them; damaged packs stay marked."""
        with self._lock:
            self._newest, self._opened, self._mends, self._own = None, False, None, False
            # Of a copy, which is made at once: captures and restores look at packs without the lock.
            self._sound = {key: sound for key, sound in self._sound.copy().items() if not sound}

    def apart(self) -> TierRun:
        """The same run in the same tier for a copy beside the saver of this process, which shares nothing cached.

        It is written only if this is the expected tier, and its records name the other tiers of the policy too.
        """
        made = TierRun(self.tier, self.run)
        made.identity.required = self.identity.required
        made.identity.beside = [made.identity if one is self.identity else one for one in self.identity.beside]
        return made

    def forsaken(self) -> bool:
        """Whether other ranks that commit together with this one are known to be dead."""
        return False

    @property
    def earlier(self) -> Record | None:
        """The part of the newest record that belongs to this rank. Raises: as `newest`."""
        return self.newest()

    def cut(self, record: Record) -> Record:
        """The part of a record that belongs to this rank."""
        return record

    def withdraw(self, seq: int, why: BaseException | str, *, left_out: bool = False) -> None:
        """This rank will not take part in the commit of a version; other ranks stop waiting for it."""

    def publish(self, record: Record, stop: Stop | None = None) -> str:
        """Commit a record; later saves reuse its chunks.

        Args:
            stop: polled while waiting for other ranks; None: this rank commits alone, whatever others do.

        Returns:
            The version's id; empty where another rank created the record, so that this one has a part of it only.

        Raises:
            BaseDropped: another process dropped the version that it builds on; it was not committed.
            TierstateError: as `Log.commit`, and `TierIdentity.ensure`.
        """
        self.create(record)
        self.build_on(record)
        self.retention.add(record)
        return record.version.id

    def signature(self) -> dict[str, Any]:
        """The commit data of a new record: a new id, the writer, and the tiers of the policy as far as known."""
        if self.authentic:
            self.identity.look()  # an authentic record that does not name its tier is refused
        writer = {"id": commit_id(), "tier": self.name, "host": socket.gethostname(), "pid": os.getpid()}
        return writer | names_tiers(self.identity.names())

    def create(self, record: Record) -> None:
        """Commit a record without adding it to the cache. Raises: as `publish`."""
        self._check_digest(record)
        self.identity.ensure()  # once more: a file system may have been unmounted while the packs were written
        base = self._newest
        self.summaries.expect(record.version.head.seq)
        self.before_commit()
        self.log.commit(record)
        check_base(self, record, base)

    def replace(self, record: Record, generations: Sequence[int]) -> None:
        """Commit a record, with a new id, in the place of others of its version. Keys are create-only: it is a new
        generation.

        Args:
            generations: all that the number has in the tier now; they are deleted after the commit.
        """
        seq = record.version.head.seq
        self.summaries.renew(seq)
        commit = {**record.commit, "id": commit_id()}
        self.log.commit(Record(record.version, record.layout, commit), max(generations, default=-1) + 1)
        self.log.forget(seq, generations)

    def build_on(self, record: Record) -> None:
        """Make this the record whose chunks later saves reuse."""
        with self._lock:
            self._saved = max(self._saved, record.version.head.seq)
            if self._newest is None or record.version.head.seq > self._newest.version.head.seq:
                # Otherwise it was committed after newer ones (late), and later saves still build on those.
                self._newest, self._opened, self._own = record, True, True
            for key, size in record.layout.pack_sizes.items():
                self._sound.setdefault(key, bool(size))

    def decision(
        self, in_use: Collection[int] = (), now: float | None = None, seen: Collection[int] | None = None
    ) -> RetentionDecision:
        """What `retire` would do now, and why each version stays. Changes nothing.

        Args:
            in_use, seen: as for `retire`.
            now: seconds since 1970; by default the clock's.
        """
        return self.retention.decision(in_use, now, seen)

    def retire(
        self,
        in_use: Collection[int] = (),
        *,
        room_for_one: bool = False,
        seen: Collection[int] | None = None,
        progress: Progress = no_progress,
    ) -> RetentionDecision:
        """Drop what the policy does not keep: first the records, then the packs that no other record names.

        Args:
            in_use: numbers that a cascade still reads from this tier, perhaps with reasons; they stay for now.
            room_for_one: the version that is about to be saved counts as one of the ``last``.
            seen: numbers of the versions from which ``in_use`` was determined, where others may save meanwhile: later
                ones stay, since slower tiers may not have them yet. None: no others save.
            progress: called with the number of records and packs deleted since the last call.
        """
        decision = self.retention.retire(in_use, room_for_one=room_for_one, seen=seen, progress=progress)
        self.summaries.keep()
        return decision

    def leased(self) -> dict[int, str]:
        """Versions that are being read or were forked, and why each must stay. Retention calls this before it deletes a
        record, and again before it deletes the packs."""
        return Leases(self.tier, self.run).live(self.tier.age)

    def removals(self, seqs: Collection[int] | None = None) -> list[Removal]:
        """The versions that were removed from the tier by hand: all, or those with these numbers."""
        return removals(self.tier, self.run, seqs, results_ahead)

    @property
    def known(self) -> Collection[int]:
        """Numbers of the versions that this process knows to be in the tier; does not access the tier."""
        return self.retention.known

    def worth_bringing(self, marks: Collection[RetentionEntry]) -> set[int]:
        """The numbers, of versions that are not in the tier yet, that the policy would keep there; not those that were
        removed by hand."""
        gone = self.removals({mark.seq for mark in marks}) if marks else ()
        return self.retention.worth_bringing(_not_removed(marks, gone))

    def worth_repairing(self, marks: Collection[RetentionEntry]) -> set[int]:
        """The numbers, of versions that were in the tier, that the policy has not dropped there.

        Versions that were removed by hand count beside those that are there: what was dropped on account of them must
        not come back because they were removed later.
        """
        gone = self.removals() if marks else ()
        return self.retention.worth_bringing(_not_removed(marks, gone), [removal.entry for removal in gone])


def _not_removed(marks: Collection[RetentionEntry], gone: Collection[Removal]) -> list[RetentionEntry]:
    return [mark for mark in marks if not was_removed(gone, *mark[:3])]
