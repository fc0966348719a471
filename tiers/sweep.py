"""The sweep: what lies in a tier and belongs to no version is deleted, while others save, read and sweep beside it.

In this order: packs are listed; records are read; packs that none names are asked for their age; leases are looked at;
records are listed once more. Nothing is deleted unless the two lists of records are the same, every record could be
read, and every lease is of one of them. Why that is safe stands in ``docs/decisions/0009-sweeping.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from tierstate.manifest.errors import FormatError, NotFound, TierstateError
from tierstate.manifest.layout import is_pack
from tierstate.manifest.leases import FORK, Held, Lease, Leases
from tierstate.manifest.log import Log

from .abreast import READERS
from .census import Census, Changed, Named, Unclear
from .packs import is_mend, read_footer
from .shelf import Shelf

DAY = 24 * 3600.0
"""Seconds within which a pack's record comes, or never."""

ROUNDS = 8
"""How often it is begun anew because records change meanwhile."""

DELETED = 500
"""Objects that are deleted in one call."""


@dataclass(frozen=True)
class Swept:
    """What a sweep deleted, or would delete.

    Attributes:
        packs: their lengths in bytes, by key.
        leases: keys of the leases of the dead.
        young: packs that no record names, and that may be of a save under way.
        ageless: packs that no record names, of which the tier cannot tell how old they are; they go with a grace of 0.
        reason: why nothing was deleted; empty where all is well.
    """

    packs: Mapping[str, int] = field(default_factory=dict)
    leases: tuple[str, ...] = ()
    young: tuple[str, ...] = ()
    ageless: tuple[str, ...] = ()
    reason: str = ""


def sweep(
    shelf: Shelf,
    *,
    grace: float = DAY,
    dry_run: bool = False,
    busy: Callable[[], Collection[int]] = tuple,
    dropped: Collection[int] = (),
) -> Swept:
    """Delete the packs of a run that no record names, and the leases of the dead.

    Args:
        shelf: the run in the tier.
        grace: seconds since its creation for which such a pack stays: longer than any save takes from its first pack to
            its record. 0 is right only while no other process saves this run, forks it or repacks it.
        dry_run: only look.
        busy: numbers of the versions that this process is writing there, whose packs stay.
        dropped: versions that count as dropped, for a look at what would be; their packs have no grace.

    Raises:
        TierError: packs or leases could not be listed, or not all of it deleted. It can be done again.
    """
    packs = [key for key in shelf.tier.list(f"packs/{shelf.run}/") if is_pack(key)]
    own = frozenset(busy())  # asked after the list: what is on it and is not own by now has its record, or never will
    look = _Look(shelf, [key for key in packs if number_of(key) not in own], grace, frozenset(dropped))
    for _ in range(ROUNDS):
        try:
            found = look.run()
        except Changed:
            continue
        except Unclear as error:
            return Swept(reason=str(error))
        if not dry_run:
            discard(shelf, [*found.packs, *found.leases])
        return found
    return Swept(reason=f"{shelf.name}: the records of run {shelf.run!r} did not stay the same while they were read")


def discard(shelf: Shelf, keys: Iterable[str]) -> None:
    """Delete objects, some at a time."""
    every = list(keys)
    for at in range(0, len(every), DELETED):
        shelf.tier.discard(every[at : at + DELETED])


def number_of(key: str) -> int | None:
    """The number of the version that a pack was written for, by its name."""
    text = key.rpartition("/")[2].partition("-")[0]
    return int(text) if text.isascii() and text.isdigit() else None


class _Look:
    """Looks for what can go.

    Args:
        packs: keys of packs, listed before anything else was looked at.
        dropped: versions that count as dropped.
    """

    def __init__(self, shelf: Shelf, packs: Collection[str], grace: float, dropped: frozenset[int]) -> None:
        self._shelf, self._packs, self._grace, self._dropped = shelf, packs, grace, dropped
        self._mends = {key: found for key in packs if is_mend(key) and (found := self._digests(key)) is not None}
        self._census = Census(shelf.log, frozenset().union(*self._mends.values()))

    def run(self) -> Swept:
        """What can go by now.

        Raises:
            Changed: others came between.
            Unclear: nobody can tell.
        """
        keys = self._census.keys()
        records = self._census.take(keys)
        held = Leases(self._shelf.tier, self._shelf.run).look(self._shelf.tier.age)
        self._check(held, records)
        forks = self._named_by_forks(held)
        ages = self._aged(set(self._packs) - self._kept(records) - forks, self._doomed(records))
        if self._census.keys() != keys:
            raise Changed("the records changed while they were read")
        return Swept(ages.packs, held.gone, ages.young, ages.ageless)

    def _digests(self, key: str) -> frozenset[bytes] | None:
        """What a mend holds; None for one that nobody can use, since it cannot be told."""
        try:
            return frozenset(row.digest for row in read_footer(self._shelf.tier, key))
        except (FormatError, NotFound):
            return None

    def _kept(self, records: Iterable[Named]) -> set[str]:
        """Packs that records name, and mends that hold chunks of any."""
        kept: set[str] = set()
        mended: set[bytes] = set()
        for record in records:
            if record.seq not in self._dropped:
                kept.update(record.packs)
                mended |= record.mended
        # A mend stays while its chunk is wanted, sound or not: a living saver may put it into its next record.
        return kept | {key for key, digests in self._mends.items() if digests & mended}

    def _doomed(self, records: Iterable[Named]) -> dict[str, int]:
        """Packs that go with the versions which count as dropped, as retention deletes them."""
        dropped = [record for record in records if record.seq in self._dropped]
        return {key: n for record in dropped for key, n in record.packs.items() if not is_mend(key)}

    # Leases and forks

    def _check(self, held: Held, records: Collection[Named]) -> None:
        """Raises Unclear where somebody may read what no record names."""
        if held.odd:
            raise Unclear(f"{self._shelf.name}: {held.odd[0]}: is not a lease that this program knows")
        for lease in held.live:
            commits = [record.id for record in records if record.seq == lease.seq]
            if lease.kind != FORK and not lease.is_of(commits):
                raise Unclear(
                    f"{self._shelf.name}: {lease.key} ({lease.reason}) holds version {lease.seq} by a record that is "
                    "not there any more, so nobody can tell which packs it needs; it ends with its process, or in a day"
                )

    def _named_by_forks(self, held: Held) -> set[str]:
        """Packs that records of other runs name, as their pins say."""
        named: set[str] = set()
        for run in sorted({lease.by for lease in held.live if lease.kind == FORK}):
            pins = [lease for lease in held.live if (lease.kind, lease.by) == (FORK, run)]
            named |= self._fork(run, pins)
        return named

    def _fork(self, run: str, pins: Collection[Lease]) -> set[str]:
        """Packs of all other runs that a fork's records name. Those of a run that this one was forked from count too:
        that run keeps them for as long as records of this one name them, so a version here must stay for them."""
        census = Census(Log(self._shelf.tier, run))
        own = f"packs/{run}/"
        named = {key for record in census.take(census.keys()) for key in record.packs if not key.startswith(own)}
        for pin in pins if not named else ():
            if self._is_young(pin.key):
                raise Unclear(f"{self._shelf.name}: {pin.key}: run {run!r} is being forked, and has no record yet")
        return named

    def _is_young(self, key: str) -> bool:
        if not self._grace:
            return False
        try:
            age = self._shelf.tier.age(key)
        except NotFound:
            return False
        return age is None or age < self._grace

    # Ages

    def _aged(self, packs: Collection[str], doomed: Mapping[str, int]) -> Swept:
        """Parts packs into those that can go and those that must not yet."""
        go: dict[str, int] = {}
        young: list[str] = []
        ageless: list[str] = []
        asked = sorted(key for key in packs if key not in doomed)
        with ThreadPoolExecutor(READERS, thread_name_prefix="tierstate-sweep") as pool:
            for key, found in zip(asked, pool.map(partial(_seen, self._shelf, bool(self._grace)), asked), strict=True):
                if found is None:
                    continue  # another sweeper was quicker
                nbytes, age = found
                if not self._grace or (age is not None and age >= self._grace):
                    go[key] = nbytes
                else:
                    (ageless if age is None else young).append(key)
        go |= {key: doomed[key] for key in packs if key in doomed}
        return Swept(dict(sorted(go.items())), (), tuple(young), tuple(ageless))


def _seen(shelf: Shelf, asked: bool, key: str) -> tuple[int, float | None] | None:
    """Length and age of a pack; None where it is gone."""
    try:
        return shelf.tier.size(key), shelf.tier.age(key) if asked else None
    except NotFound:
        return None


def unneeded_pins(shelf: Shelf, grace: float) -> list[Lease]:
    """Pins of forks that rely on no other run's packs any more.

    A fork whose records cannot be read keeps its pins, and so does one that has just begun.
    """
    held = Leases(shelf.tier, shelf.run).look(shelf.tier.age)
    look = _Look(shelf, (), grace, frozenset())
    found = []
    for pin in held.live:
        if pin.kind == FORK:
            try:
                if not look._fork(pin.by, [pin]):
                    found.append(pin)
            except TierstateError:
                continue
    return found
