"""Garbage collection of packs (the sweep): deletes what no record names, while others save, read and sweep.

In this order: list the packs; read all records; get the age of the packs that no record names; read the leases; list
the records again. Nothing is deleted unless both lists of records are equal, every record could be read, and every
lease is for one of them. ``docs/decisions/0009-sweeping.md`` says why this is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tierstate.engine.packs.keys import is_mend, pack_prefix, seq_of
from tierstate.engine.packs.pack import read_footer
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.store.retention import discard
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import digest_list
from tierstate.manifest.errors import FormatError, NotFound, TierstateError
from tierstate.manifest.format.layout import is_pack_key
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.leases import FORK, WHOLE_RUN, LeaseListing, Leases, VersionLease
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.removals import removed_since
from tierstate.tiers.concurrency import run_concurrently

DAY = 24 * 3600.0
"""Seconds after which a pack that no record names counts as garbage."""


MAX_SWEEP_ROUNDS = 8
"""How often the sweep starts again because records changed meanwhile."""


class Unclear(TierstateError):
    """What the records name cannot be determined, so nothing may be deleted."""


class Changed(TierstateError):
    """The records changed while they were read: start again."""


@dataclass(frozen=True)
class RecordPacks:
    """The packs that one record names.

    Attributes:
        seq, generation: which record.
        id: its commit id.
        packs: packs of its chunks and of their delta bases, and their lengths in bytes.
        mended: which of the wanted digests it has.
    """

    seq: int
    generation: int
    id: str
    packs: Mapping[str, int]
    mended: frozenset[bytes]


class RecordScan:
    """Reads the records of a run in a tier, each one once, since records never change.

    Args:
        log: of the run.
        wanted: digests of repaired chunks; each record says which of them it has.
    """

    def __init__(self, log: Log, wanted: Collection[bytes] = ()) -> None:
        self._log, self._wanted = log, frozenset(wanted)
        self._known: dict[str, RecordPacks] = {}

    def keys(self) -> frozenset[str]:
        """Keys of all records.

        Raises:
            Unclear: the log could not be listed, or has a key that cannot be parsed.
        """
        try:
            return frozenset(self._log.keys())
        except TierstateError as error:
            raise Unclear(str(error)) from error

    def take(self, keys: Collection[str]) -> list[RecordPacks]:
        """What these records name.

        Raises:
            Unclear: one cannot be read.
            Changed: one no longer exists.
        """
        new = sorted(set(keys) - set(self._known))
        self._known |= zip(new, run_concurrently(self._read, new), strict=True)
        return [self._known[key] for key in sorted(keys)]

    def _read(self, key: str) -> RecordPacks:
        seq, _, generation = key.rpartition("/")[2].partition(".")
        try:
            record = self._log.read_generation(int(seq), int(generation or 0))
        except NotFound as error:
            raise Changed(str(error)) from error
        except TierstateError as error:
            raise Unclear(str(error)) from error
        layout = record.layout
        packs = layout.pack_sizes
        return RecordPacks(int(seq), int(generation or 0), record.commit["id"], packs, self._mended(record))

    def _mended(self, record: Record) -> frozenset[bytes]:
        if not self._wanted:
            return frozenset()
        return self._wanted.intersection(digest_list(record.version.digests))


@dataclass(frozen=True)
class Swept:
    """What a sweep deleted, or would delete.

    Attributes:
        packs: their lengths in bytes, by key.
        leases: keys of leases whose processes have died.
        young: packs that no record names and that may belong to a save under way.
        ageless: packs that no record names and whose age the tier does not know; only a grace of 0 deletes them.
        reason: why nothing was deleted; empty if nothing failed.
    """

    packs: Mapping[str, int] = field(default_factory=dict)
    leases: tuple[str, ...] = ()
    young: tuple[str, ...] = ()
    ageless: tuple[str, ...] = ()
    reason: str = ""


def sweep(
    tier_run: TierRun,
    *,
    grace: float = DAY,
    dry_run: bool = False,
    busy: Callable[[], Collection[int | None]] = tuple,
    dropped: Collection[int] = (),
    progress: Progress = no_progress,
) -> Swept:
    """Delete the packs of a run that no record names, and the leases of dead processes.

    Args:
        tier_run: the run in the tier.
        grace: seconds since its creation for which such a pack stays: longer than any save takes from its first pack to
            its record. 0 is right only while no other process saves this run, forks it or repacks it.
        dry_run: change nothing.
        busy: numbers of the versions that this process is writing to the tier; their packs stay. None stands for packs
            whose keys cannot be parsed.
        dropped: versions that count as dropped, for a dry run; their packs have no grace.
        progress: called with the number of objects deleted since the last call.

    Raises:
        TierError: packs or leases could not be listed, or not all were deleted. The sweep can be run again.
    """
    packs = [key for key in tier_run.tier.list(pack_prefix(tier_run.run)) if is_pack_key(key)]
    own = frozenset(busy())  # after the listing: a listed pack that is not own by now has its record, or never gets one
    look = _Look(tier_run, [key for key in packs if seq_of(key) not in own], grace, frozenset(dropped))
    for _ in range(MAX_SWEEP_ROUNDS):
        try:
            found = look.run()
        except Changed:
            continue
        except Unclear as error:
            return Swept(reason=str(error))
        if not dry_run:
            discard(tier_run.tier, [*found.packs, *found.leases], progress)
        return found
    return Swept(
        reason=f"{tier_run.name}: the records of run {tier_run.run!r} did not stay the same while they were read"
    )


class _Look:
    """Finds what can be deleted.

    Args:
        packs: keys of packs, listed before anything else was read.
        dropped: versions that count as dropped.
    """

    def __init__(self, tier_run: TierRun, packs: Collection[str], grace: float, dropped: frozenset[int]) -> None:
        self._tier_run, self._packs, self._grace, self._dropped = tier_run, packs, grace, dropped
        self._mends = {key: found for key in packs if is_mend(key) and (found := self._digests(key)) is not None}
        self._scan = RecordScan(tier_run.log, frozenset().union(*self._mends.values()))

    def run(self) -> Swept:
        """Find what can be deleted now.

        Raises:
            Changed: the records changed meanwhile.
            Unclear: it cannot be determined.
        """
        keys = self._scan.keys()
        records = self._scan.take(keys)
        held = Leases(self._tier_run.tier, self._tier_run.run).look(self._tier_run.tier.age)
        try:
            self._check(held, records)
        except Unclear:
            self._check_same(keys)  # the lease may be of a version that was committed meanwhile
            raise
        forks = self._named_by_forks(held)
        ages = self._aged(set(self._packs) - self._kept(records) - forks, self._doomed(records))
        self._check_same(keys)
        return Swept(ages.packs, held.gone, ages.young, ages.ageless)

    def _check_same(self, keys: frozenset[str]) -> None:
        """Raise Changed if there are other records by now."""
        if self._scan.keys() != keys:
            raise Changed("the records changed while they were read")

    def _digests(self, key: str) -> frozenset[bytes] | None:
        """Digests of the chunks in a repair pack; None if it cannot be read, so that nothing can use it."""
        try:
            return frozenset(row.digest for row in read_footer(self._tier_run.tier, key))
        except (FormatError, NotFound):
            return None

    def _kept(self, records: Iterable[RecordPacks]) -> set[str]:
        """Packs that records name, and repair packs with chunks that records name."""
        kept: set[str] = set()
        mended: set[bytes] = set()
        for record in records:
            if record.seq not in self._dropped:
                kept.update(record.packs)
                mended |= record.mended
        # A repair pack stays while a record names its chunk, sound or not: a saver may put it into its next record.
        return kept | {key for key, digests in self._mends.items() if digests & mended}

    def _doomed(self, records: Iterable[RecordPacks]) -> dict[str, int]:
        """Packs that only the versions in ``dropped`` name, which retention deletes at once."""
        dropped = [record for record in records if record.seq in self._dropped]
        return {key: n for record in dropped for key, n in record.packs.items() if not is_mend(key)}

    # Leases and forks

    def _check(self, held: LeaseListing, records: Collection[RecordPacks]) -> None:
        """Raises Unclear if a lease shows that packs may be in use that no record names."""
        if held.odd:
            raise Unclear(f"{self._tier_run.name}: {held.odd[0]}: is not a lease that this program knows")
        for lease in held.live:
            if lease.seq == WHOLE_RUN:
                raise Unclear(
                    f"{self._tier_run.name}: {lease.key}: the run is {lease.reason}, and packs may be needed that no "
                    "record names yet; the lease ends with its process, or in a day"
                )
            commits = [record.id for record in records if record.seq == lease.seq]
            if lease.kind != FORK and not lease.is_of(commits):
                raise Unclear(
                    f"{self._tier_run.name}: {lease.key} ({lease.reason}) holds version {lease.seq} by a record that "
                    "is not there any more, so nobody can tell which packs it needs; it ends with its process, or in "
                    "a day"
                )

    def _named_by_forks(self, held: LeaseListing) -> set[str]:
        """Packs that records of forks name; the pins say which runs are forks."""
        named: set[str] = set()
        for run in sorted({lease.by for lease in held.live if lease.kind == FORK}):
            pins = [lease for lease in held.live if (lease.kind, lease.by) == (FORK, run)]
            named |= self._fork(run, pins)
        return named

    def _fork(self, run: str, pins: Collection[VersionLease]) -> set[str]:
        """Packs of all other runs that a fork's records name. Packs of a run that this one was itself forked from count
        too: that run keeps them only while records of this run name them, so a version of this run must stay."""
        scan = RecordScan(Log(self._tier_run.tier, run))
        own, records = pack_prefix(run), scan.take(scan.keys())
        named = {key for record in records for key in record.packs if not key.startswith(own)}
        for pin in pins if not records else ():
            if self._is_young(pin.key) and not removed_since(
                self._tier_run.tier, run, pin.key, self._tier_run.tier.age
            ):
                raise Unclear(f"{self._tier_run.name}: {pin.key}: run {run!r} is being forked, and has no record yet")
        return named

    def _is_young(self, key: str) -> bool:
        if not self._grace:
            return False
        try:
            age = self._tier_run.tier.age(key)
        except NotFound:
            return False
        return age is None or age < self._grace

    # Ages

    def _aged(self, packs: Collection[str], doomed: Mapping[str, int]) -> Swept:
        """Separate packs that can be deleted from those that are too young."""
        go: dict[str, int] = {}
        young: list[str] = []
        ageless: list[str] = []
        asked = sorted(key for key in packs if key not in doomed)
        seen = run_concurrently(partial(_seen, self._tier_run, bool(self._grace)), asked)
        for key, found in zip(asked, seen, strict=True):
            if found is None:
                continue  # another sweep has deleted it
            nbytes, age = found
            if not self._grace or (age is not None and age >= self._grace):
                go[key] = nbytes
            else:
                (ageless if age is None else young).append(key)
        go |= {key: doomed[key] for key in packs if key in doomed}
        return Swept(dict(sorted(go.items())), (), tuple(young), tuple(ageless))


def _seen(tier_run: TierRun, asked: bool, key: str) -> tuple[int, float | None] | None:
    """Length in bytes and age in seconds of a pack; None if it does not exist."""
    try:
        return tier_run.tier.size(key), tier_run.tier.age(key) if asked else None
    except NotFound:
        return None


def unneeded_fork_pins(tier_run: TierRun, grace: float) -> list[VersionLease]:
    """Pins of forks that no longer use packs of another run.

    A fork whose records cannot be read keeps its pins, and so does one that has just started.
    """
    held = Leases(tier_run.tier, tier_run.run).look(tier_run.tier.age)
    look = _Look(tier_run, (), grace, frozenset())
    found = []
    for pin in held.live:
        if pin.kind == FORK:
            try:
                # A young one may be of a fork that is under way beside a process that saves the new run already.
                if not look._fork(pin.by, [pin]) and not look._is_young(pin.key):
                    found.append(pin)
            except TierstateError:
                continue
    return found
