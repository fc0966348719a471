"""Whether a tier is the one that is expected: its marker, and what records say of it.

The first save to a persistent tier creates its marker, and every record names the tiers of its policy by their markers'
ids. So it is noticed if a file system is not mounted, so that its mount point looks like an empty tier; if another one
is mounted; and if two tiers lie in one place. See docs/decisions/0017-identity-of-tiers.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    Damaged,
    FormatError,
    MediaError,
    NotFound,
    PolicyError,
    TierError,
    TierstateError,
    Unauthentic,
    WrongTier,
)
from tierstate.manifest.format.marker import MARKER_KEY, MAX_MARKER_BYTES, TierMarker, TierName, named_tiers
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log, list_runs
from tierstate.manifest.seal import sealed_with
from tierstate.tiers.base import Place, Tier, layer_of, outlast_race
from tierstate.tiers.latch import Latch
from tierstate.tiers.wrappers.encrypt import Encrypted
from tierstate.tiers.wrappers.keyring import RING_PREFIX

log = logging.getLogger("tierstate")


OTHERS_WAIT = 1.0
"""Seconds that the first record of a process waits at most until the markers of the other tiers are known, so that it
names them. A tier that hangs must not keep the others from what is saved; later records name it."""


LEADER_WAIT, LEADER_POLL = 10.0, 0.02
"""Seconds that a rank waits for the marker that another rank creates, and between two looks."""


RUNS_LOOKED_AT = 8
"""Other runs of a tier whose records are read before a run begins afresh: the last ones that were saved."""


UNKNOWN = TierMarker(id="", time=0.0)
"""Stands for a marker that is there and cannot be read: the tier is in its place, and may be any."""


def _encoded_marker(tier: Tier) -> bytes:
    return to_bytes(tier.get_within(MARKER_KEY, MAX_MARKER_BYTES, "a marker"))


def read_marker(tier: Tier) -> TierMarker | None:
    """The marker of a tier; None if it has none; `UNKNOWN`, with a warning, if it is damaged or in a bad sector.

    Raises:
        TierError: it could not be read.
    """
    what = f"{tier.name}: {MARKER_KEY}"
    try:
        return TierMarker.decode(_encoded_marker(tier), what)
    except NotFound:
        return None
    except (FormatError, Damaged, MediaError) as error:
        # As with a damaged record, a flaw in one small object must not keep the saves out of the tier.
        log.warning("%s; whether this is the expected tier is not checked. `tierstate adopt` writes a new one", error)
        return UNKNOWN


def write_marker(tier: Tier, marker: TierMarker) -> TierMarker:
    """Create the marker of a tier. Of processes that race one wins; returns the one that is there.

    Raises:
        TierError: it could not be created.
    """
    try:
        tier.put(MARKER_KEY, as_buffer(marker.encode()))
    except AlreadyExists:
        return read_marker(tier) or marker
    return marker


def check_key(tier: Tier) -> None:
    """Check that the marker of a tier does not need another key of seals or of encryption.

    Raises:
        Unauthentic: it does; the message names the key.
        AccessDenied: it cannot be read since the tier is encrypted, and the policy does not encrypt it.
        TierError: it could not be read.
    """
    try:
        TierMarker.decode(_encoded_marker(tier), MARKER_KEY)
        return
    except Unauthentic as error:
        if error.key_id:
            raise
    except (NotFound, MediaError):
        return
    except FormatError as error:
        log.debug("%s: %s", tier.name, error)
    if layer_of(tier, Encrypted) is None and (ring := next(iter(tier.list(RING_PREFIX)), None)) is not None:
        raise AccessDenied(
            f"{tier.name}: is encrypted (it has {ring}), and the policy has no `encrypt` for it: nothing is saved "
            "there in plain; write `encrypt` with the key of this tier, or use an empty place",
            tier=tier.name,
        )


def _check_seal(tier: Tier) -> None:
    """Check that the marker of a tier that is not sealed, by the policy, has no seal.

    Raises:
        AccessDenied: it has one.
        TierError: it could not be read.
    """
    try:
        id = sealed_with(memoryview(_encoded_marker(tier)))
    except (FormatError, NotFound, MediaError):
        return
    if id:
        raise AccessDenied(
            f"{tier.name}: is sealed with key {id}, and the policy has no `seal`: what is saved there without it would "
            f"be refused by all jobs that have it; write `seal`, or `tierstate adopt {tier.name}` to do without",
            tier=tier.name,
        )


class TierIdentity:
    """What this process knows of the identity of one tier.

    Args:
        tier: the tier.
        newest: reads the newest record of the run in that tier.

    Attributes:
        beside: the identities of all tiers of the policy, with this one.
        required: the policy says that the tier has a marker (``initialized: true``): it is never created by a save.
        authentic: whether the tier's objects are authenticated.
        leads: whether this process creates the marker; other ranks that see the same objects only read it.
        marker: the marker, once it was read or created.
        own: ids by which the records in this tier name it.
        settled: set, unless a thread is just about to look at the tier for the first time (`prepare`).
        named: by name, how the newest record that was read in this tier names the tiers, with its number.
    """

    leads, authentic = True, False

    def __init__(self, tier: Tier, newest: Callable[[], Record | None]) -> None:
        self.tier, self._newest = tier, newest
        self.beside: Sequence[TierIdentity] = (self,)
        self.required = False
        self.marker: TierMarker | None = None
        self.own: set[str] = set()
        self.named: dict[str, tuple[int, TierName]] = {}
        self.settled = Latch()
        self.settled.set()
        self._waited = False
        self._asked: TierMarker | None = None
        self._was: TierName | None = None
        self._by_others: dict[str, TierName] = {}
        self._noted: set[str] = set()
        self._place: Place | None = None
        self._stays = False
        self._lock, self._learning = threading.Lock(), threading.Lock()

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def learn(self, record: Record) -> None:
        """Remember how a record that was read in this tier names the tiers. Does no I/O."""
        seq = record.version.head.seq
        with self._learning:  # several records may be read at a time
            for name, one in named_tiers(record.commit).items():
                if seq >= self.named.get(name, (0, one))[0]:
                    self.named[name] = seq, one
        self.learn_own(record)

    def learn_own(self, record: Record) -> None:
        """Remember how a record that was read in this tier, of any run, names this tier."""
        if (one := named_tiers(record.commit).get(self.name)) is not None:
            self.own.add(one.id)

    @property
    def is_in_files(self) -> bool:
        """Whether it is known to lie in a file system, which can be not mounted."""
        return self._place is not None and bool(self._place.mount)

    @property
    def _is_new_here(self) -> bool:
        """Whether what lies here has no marker, or one that was made under another name and not asked about yet."""
        return self.marker is None or (self.marker.tier not in ("", self.name) and self.marker != self._asked)

    def names(self) -> dict[str, TierName]:
        """The tiers of the policy by their names, for a record, as far as they are known. Does no I/O.

        A tier that is missing now, or another one, is named as the newest records name it, so that it stays expected.
        """
        return {one.name: name for one in self.beside if (name := one._name_in_record()) is not None}

    def _name_in_record(self) -> TierName | None:
        try:
            self.check()
        except WrongTier:
            return self._expected() or self._was
        return self._own_name() or self._expected()

    def _own_name(self) -> TierName | None:
        marker, place = self.marker, self._place
        if marker is None or marker is UNKNOWN:
            return None
        return TierName(marker.id, place.mount if place is not None else "")

    def check_written_here(self, record: Record) -> None:
        """Check that a sealed record was written to this tier, and not to another one and then copied here.

        Raises:
            Unauthentic: it names another tier as its own, or none; or the marker needs another key.
            TierError: the marker could not be read.
        """
        marker = self.look()
        if marker is None:
            return  # not persistent, or the marker was lost: `initialized: true` makes it a condition
        own = named_tiers(record.commit).get(str(record.commit.get("tier")))
        if own is None or not marker.stands_for(own.id):
            if marker is UNKNOWN:
                check_key(self.tier)  # a marker that needs another key is not damaged
            where = f"to tier {own.id[:12]}" if own is not None else "to a tier that it does not name"
            here = f"tier {marker.id[:12]}" if marker.id else "not known to be that one, since its marker is damaged"
            raise Unauthentic(
                f"{self.name}: the record of version {record.version.head.seq} was written {where}, and this is {here}"
            )

    def look(self) -> TierMarker | None:
        """The marker, read again if something else may lie in the place since; None if there is none. Creates nothing.

        Raises:
            TierError: the tier could not be read.
        """
        if not self.tier.traits.persistent:
            return None
        with self._lock:
            place = self.tier.place()
            if self.marker is None or place != self._place:
                marker = read_marker(self.tier)
                if self._place is not None and place != self._place:
                    self._was = self._own_name() or self._was
                    self.own.clear()  # records that were read in what was there before
                self.marker, self._place = marker, place
            return self.marker

    def ensure(self, *, create: bool = True) -> None:
        """Check, before something is saved to the tier, that it is the expected one; create its marker if it has none.

        Reads nothing of the tier if its marker was read before and its directory is still the same one.

        Args:
            create: False before packs are written: a save that fails then leaves nothing behind.

        Raises:
            WrongTier: the tier is not the one that is expected.
            Unauthentic: the tier's objects are authenticated, and its marker is not authentic, or damaged.
            AccessDenied: the tier is encrypted or sealed, and by the policy it is not.
            PolicyError: another tier of the policy lies in the same place.
            TierError: the tier could not be read, or the marker not created.
        """
        if not self.tier.traits.persistent:
            return
        self.look()
        self._outlast_race()
        expected = self._ask_all() if self._is_new_here else None
        if self.marker is UNKNOWN and self._asked is not UNKNOWN:
            check_key(self.tier)
            if not self.authentic:
                _check_seal(self.tier)
        if self.authentic and self.marker is UNKNOWN:
            raise Unauthentic(
                f"{self.name}: {MARKER_KEY} is not authentic, so that no record could say which tier it is of; "
                f"`tierstate adopt {self.name}` writes it again"
            )
        self._check_with_others(expected)
        self._asked = self.marker
        if self.marker is None and create:
            self._create(expected) if self.leads else self._wait_for_leader()
            self._outlast_race()
        for other in self.beside:
            if other is not self and self.marker is not None and other.marker is not None:
                check_apart(self.name, self.marker, other.name, other.marker)

    def prepare(self) -> None:
        """As `ensure`, before the first save of a process and in a thread of the tier. What keeps saves from the tier
        is only logged: the saves will raise it."""
        try:
            self.ensure()
        except BaseException as error:
            # Whatever a tier raises: the thread must not end.
            log.debug("%s: its marker is looked at again by the first save: %s", self.name, error)
        finally:
            self.settled.set()

    def wait_for_others(self) -> None:
        """Before the first record: wait a little until the markers of the other tiers are known."""
        end = time.monotonic() + OTHERS_WAIT
        for other in () if self._waited else self.beside:
            other.settled.wait(max(0.0, end - time.monotonic()))
        self._waited = True

    def _check_with_others(self, expected: TierName | None) -> None:
        """As `check`; before it raises, it looks whether another tier of the policy is the expected one: they may have
        changed their names."""
        try:
            self.check(expected)
        except WrongTier:
            for other in self.beside:
                try:
                    other.look()
                except TierError as error:
                    log.debug("%s: its marker cannot be read: %s", other.name, error)
            self.check(expected)

    def _ask_all(self) -> TierName | None:
        """How the newest records in all tiers name this one, before something is saved to a tier that is new here.

        Records of the run count; of other runs, only for a tier of a file system, which can be not mounted.
        """
        said: list[tuple[int, str, TierName]] = []
        for one in self.beside:
            if not one.tier.traits.persistent:
                continue
            try:
                if (newest := one._newest()) is not None:
                    one.learn(newest)
                said += one.said_by_runs() if self.is_in_files else []
            except TierstateError as error:
                log.warning("%s: what its records say of %s is not known: %s", one.name, self.name, error)
        self.learn_of_others(said)
        return self._expected()

    def said_by_runs(self) -> Iterator[tuple[int, str, TierName]]:
        """How the newest records of the runs that were saved last in this tier name tiers, with their numbers.

        Raises:
            TierError: the tier could not be read.
        """
        for record in newest_records(self.tier, RUNS_LOOKED_AT):
            self.learn_own(record)
            for name, one in named_tiers(record.commit).items():
                yield record.version.head.seq, name, one

    def learn_of_others(self, said: Iterable[tuple[int, str, TierName]]) -> TierName | None:
        """Remember what other runs say of tiers, the newest last; returns what they say of this one.

        It is kept: the tier that says so may be gone, too, when the next save looks.
        """
        self._by_others |= {name: one for _, name, one in sorted(said)}
        return self._by_others.get(self.name)

    def _create(self, expected: TierName | None) -> None:
        # If its own records name it, only the marker was lost: the tier keeps its id.
        same = expected is not None and expected.id in self.own and self._holder(expected.id) is self
        made = TierMarker(expected.id, self.name) if expected is not None and same else TierMarker(tier=self.name)
        with self._lock:
            self.marker = write_marker(self.tier, made)
            self._place = self.tier.place()  # the directory may not have existed before

    def _outlast_race(self) -> None:
        """Make sure, once, that the marker is not one that another process is about to replace by its own."""
        if self._stays or self.marker is None:
            return
        if outlast_race(self.tier, MARKER_KEY):
            with self._lock:
                self.marker = read_marker(self.tier)
        self._stays = True

    def _wait_for_leader(self) -> None:
        """Wait for the marker that another rank creates at the same time: at the first save of all."""
        end = time.monotonic() + LEADER_WAIT
        while self.look() is None:
            if time.monotonic() > end:
                raise WrongTier(
                    f"{self.name}: has no marker ({MARKER_KEY}) for this rank, though another rank creates it: is its "
                    "file system not mounted on this host?",
                    tier=self.name,
                )
            time.sleep(LEADER_POLL)

    def _expected(self) -> TierName | None:
        """How the newest of the records that were read names this tier."""
        found = [one.named[self.name] for one in self.beside if self.name in one.named]
        return max(found)[1] if found else self._by_others.get(self.name)

    def _holder(self, id: str) -> TierIdentity | None:
        """The tier that has an id, or is used in place of the one that has it; for all we know."""
        for one in self.beside:
            if one.marker is UNKNOWN and one is not self:
                continue
            if one.marker is not None and (one.marker is UNKNOWN or one.marker.stands_for(id)):
                return one
        return next((one for one in self.beside if one.marker is None and id in one.own), None)

    def _is_in_its_place(self, by_others: Mapping[str, TierName], others: tuple[TierIdentity, ...]) -> bool:
        """Whether this tier is what records expect here, or tiers have changed their names among each other, as these
        others have. If not, a file system is mounted in the place of another one, and has no new name.

        Args:
            by_others: what records of other runs say.
        """
        expected = self._expected() or by_others.get(self.name)
        if expected is None or self.tier.traits.shared != "site":
            return True
        holder = self._holder(expected.id)
        return holder is self or (
            holder is not None and (holder in others or holder._is_in_its_place(by_others, (*others, self)))
        )

    def check(self, expected: TierName | None = None) -> None:
        """Check the marker that was read against what is expected. Does no I/O.

        Args:
            expected: the expected tier; by default what the records say that were read.

        Raises:
            WrongTier: the policy says that there is a marker, and there is none; or this process, or records, know
                another tier. Of tiers that each host has for itself another one is normal (the host is another one,
                or its disk a new one), unless the file system is not mounted in which it was.
        """
        self._compare(self._was, "this process has used it")
        self._compare(expected or self._expected(), "records name it")
        if self.required and self.marker is None:
            raise WrongTier(
                f"{self.name}: has no marker ({MARKER_KEY}), and the policy says `initialized: true`: is its file "
                "system not mounted? If this is its first use, run `tierstate init` once",
                tier=self.name,
            )

    @property
    def replaced(self) -> str:
        """Id of the tier that records name here, where another one lies in its place: another host's, a new disk, or a
        folder that was moved. What that one has is out of sight. Empty if this is it, as far as is known. Does no I/O.
        """
        expected = self._expected()
        return "" if expected is None or self._is_there(expected.id) else expected.id

    def _is_there(self, id: str) -> bool:
        """Whether this tier has an id, or another tier of the policy has it, and lies where it should."""
        holder = self._holder(id)
        return holder is not None and (holder is self or holder._is_in_its_place(self._by_others, (self,)))

    def _compare(self, expected: TierName | None, why: str) -> None:
        if expected is None or self._is_there(expected.id):
            return
        if self.tier.traits.shared == "site":
            raise self._wrong(expected.id, why)
        mount = self._place.mount if self._place is not None else ""
        if self.marker is None and expected.mount and mount and mount != expected.mount:
            raise self._wrong(expected.id, f"{why} in the file system at {expected.mount}, not in {mount}")
        if expected.id not in self._noted:
            self._noted.add(expected.id)
            log.info("%s: is not tier %s, though %s: another host's, or a new disk", self.name, expected.id[:12], why)

    def _wrong(self, id: str, why: str) -> WrongTier:
        found = f"the marker of another tier ({self.marker.id[:12]})" if self.marker is not None else "no marker"
        return WrongTier(
            f"{self.name}: tier {id[:12]} is expected here ({why}), and there is {found}: is its file system not "
            f"mounted? If this is to be used in its place from now on, run `tierstate adopt {self.name}`",
            tier=self.name,
        )


def check_apart(name: str, marker: TierMarker, other: str, its: TierMarker) -> None:
    """Raises PolicyError if two tiers have one id."""
    if marker.id and marker.id == its.id:
        raise PolicyError(
            f"tiers.{name} and tiers.{other} have the same marker ({marker.id[:12]}): they lie in one place, or one is "
            f"a copy of the other; give each a place of its own, or run `tierstate adopt` for the copy"
        )


def learn_newest(identities: Sequence[TierIdentity]) -> None:
    """Learn which tiers are expected from the newest record in each; one that cannot be read says nothing."""
    for one in identities:
        try:
            one._newest()
        except TierstateError as error:
            log.debug("%s: what its records say of tiers is not known: %s", one.name, error)


def check_tiers(identities: Sequence[TierIdentity]) -> None:
    """Check that each tier that can be read is the expected one, by what was learned from records. Creates nothing.

    Raises:
        WrongTier: one is not.
    """
    if any(one.required or one.named or one.marker for one in identities):
        for one in _look_at(identities):
            one.check()


def _look_at(identities: Sequence[TierIdentity]) -> list[TierIdentity]:
    """Read the markers of the persistent tiers; returns the tiers that answered."""
    looked = []
    for one in identities:
        try:
            one.look()
        except TierError as error:
            log.warning("%s: its marker cannot be read: %s", one.name, error)
        else:
            looked += [one] if one.tier.traits.persistent else []
    return looked


def check_nothing_missing(identities: Sequence[TierIdentity]) -> None:
    """Check, where a run has no version in any tier, that nothing says that a tier is missing: the run may be in there.

    Records of other runs count as well, for tiers of a file system: those can be not mounted.

    Raises:
        WrongTier: a tier is not the expected one.
        TierError: a tier could not be read.
    """
    looked = _look_at(identities)
    for one in looked:
        one.check()
    new = [one for one in looked if one._is_new_here and one.is_in_files]
    said = [item for other in looked for item in other.said_by_runs()] if new else []
    for one in new:
        one.check(one.learn_of_others(said))


def newest_records(tier: Tier, most: int | None = None) -> Iterator[Record]:
    """The newest readable record of each run in a tier, the run that was saved last first.

    Args:
        most: runs to look at; None: all.

    Raises:
        TierError: the tier could not be read.
    """
    logs = [Log(tier, run) for run in list_runs(tier)]
    last = sorted(((seqs[-1], i) for i, each in enumerate(logs) if (seqs := each.seqs())), reverse=True)
    for seq, i in last[:most]:
        try:
            yield logs[i].read(seq)
        except (FormatError, NotFound) as error:
            log.warning("%s: the newest record of run %s cannot be read: %s", tier.name, logs[i].run, error)
