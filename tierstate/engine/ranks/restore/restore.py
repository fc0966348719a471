"""Restore by many ranks together (reshard): one version for all ranks, and each chunk read as few times as possible.

Each rank gathers to all ranks which chunks it wants and which it can read (*reaches*). All compute the same exchange
plan. Each rank then reads its chunks and sends them to the ranks that want them. What a late rank was to send is read
by those who wait for it, if they can, and it then stops reading (`stragglers`). Chunks that did not arrive are planned
again, a few times (`ROUNDS`). Either all ranks get what they want of a version, or none takes
it, and an older version may be tried.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np

from tierstate.engine.ranks.team.team import Team
from tierstate.engine.restore.fetch import Fetch, RepairWriter
from tierstate.engine.restore.restore import (
    MAX_RESTARTS,
    PASSED_OVER,
    READ_WORKERS,
    Restored,
    RestorePlan,
    RestoreSpec,
    VersionDropped,
    content_of,
    describe_version,
    none_found,
    plan_scatter,
    raise_if_dropped,
)
from tierstate.engine.restore.scatter import ScatterTargets
from tierstate.engine.restore.uploads import restore_from_memory
from tierstate.engine.store.catalog import (
    LOOK_FURTHER,
    RunCatalog,
    Source,
    VersionCopies,
    VersionMoved,
    lease_for_reading,
    read_sources,
)
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import (
    Damaged,
    RankFailed,
    StateMismatch,
    TierstateError,
    Unreadable,
    format_ranks,
    untrusted,
)
from tierstate.manifest.format import table as col
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.providers.tree.target import Target
from tierstate.providers.tree.unflatten import NEW, plan_restore
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.units import format_size

from .agreement import GroupQuery, VersionAgreement
from .exchange import ChunkExchange, PeerListener
from .exchange_plan import (
    WANTED,
    ExchangePlan,
    HostGrid,
    RankRows,
    decode_runs,
    encode_runs,
    plan_exchange,
    reach_kind,
    runs_in,
    sets_with,
)
from .stragglers import Gate, ReadTime, Stops, StragglerWatch

ROUNDS = 4
"""Exchanges of one restore, at most. In later ones other ranks try to read the chunks that one rank could not read."""


WHAT = "what another rank wants"
"""Names the offer of another rank in error messages."""


GLANCE = 0.1
"""Seconds between two looks at whether other ranks are late."""


GRACE = 1.0
"""Seconds for which reads that are under way are waited for once they are of no use."""


_USABLE, _UNUSABLE = b"+", b"-"
"""First byte of an answer: the rank can use what the version holds, or it cannot, and says why."""


log = logging.getLogger("tierstate")


class ChunkRestore:
    """One rank's chunks of a version: what it reads, what it receives, and what is still missing.

    Args:
        query: the ranks.
        entry: the version, and what this rank has of it.
        targets: the scatter targets: where the bytes of each wanted chunk go.
        arena: the memory that bytes pass through.

    Attributes:
        reach: by kind of tier, ``(rows,)`` of bool: the chunks that this rank can read; without those that it failed
            to read.
        damage: the error of the first chunk that is damaged or missing; None if there was none.
        unreadable: the error of the first chunk that a tier has which cannot be asked now; None if there was none.
        away: ``(rows,)`` of bool: all those chunks. They may be whole.
        entry, arena: as given.
        failure: the error of a chunk that could not be copied into the state; None if there was none.
        stops: for how long this process was stopped during the exchange.
    """

    def __init__(self, query: GroupQuery, entry: VersionCopies, targets: ScatterTargets, arena: Arena) -> None:
        self._query, self.entry, self._targets, self.arena = query, entry, targets, arena
        version = entry.version
        self._digest, self._digests = digest_function(version.head.digest), version.digests.tobytes()
        self._nbytes = version.chunk_nbytes
        self._wants, self._got = np.zeros(len(version.digests), bool), np.zeros(len(version.digests), bool)
        self._wants[targets.rows] = True
        self.reach = _reach(entry, query.team)
        self.damage: Damaged | None = None
        self.unreadable: Unreadable | None = None
        self.away = np.zeros(len(version.digests), bool)
        self._elsewhere = np.zeros(len(version.digests), bool)
        self.failure: Exception | None = None
        self.stops = Stops()

    @property
    def missing(self) -> Array:
        """``(rows,)`` of bool: chunks that this rank wants and does not have."""
        found: Array = self._wants & ~self._got
        return found

    def exchange(
        self,
        plan: ExchangePlan,
        wanted: Array,
        elsewhere: Array,
        listener: PeerListener,
        addresses: Sequence[str],
    ) -> None:
        """Read and send chunks as planned, and wait for those of other ranks. All ranks call this together.

        Args:
            plan: this rank's exchange plan.
            wanted: all rows that at least one rank wants.
            elsewhere: ``(rows,)`` of bool: the chunks that another rank can read.
            listener: this rank's listening socket.
            addresses: by rank, the address of its listening socket.

        Raises:
            VersionMoved, RankFailed, TierstateError: as `GroupQuery.ask`. Chunks that did not come are `missing`.
        """
        team, self._elsewhere, self.stops = self._query.team, elsewhere, Stops()
        made: list[ChunkExchange] = []

        def read() -> bytes:
            # Made here, within the all-gather, so that the other ranks get an error if it fails.
            passing = ChunkExchange(
                team.rank,
                plan,
                listener,
                team.secret,
                addresses,
                self._nbytes,
                self._take,
                team.timeouts.silence,
                self._spot,
                team.hosts,
            )
            made.append(passing)
            with lease_for_reading(self._held(wanted), int(self._nbytes[wanted].sum(dtype="i8"))):
                began = time.monotonic()
                self._read(plan.reads, passing)
                # Not the time for which a rank has held up this one: that may be the late one.
                took = time.monotonic() - began - self.stops.seconds
                held = max(0.0, min(passing.held - self.stops.seconds, took))
                read = ReadTime(took - held, int(self._nbytes[plan.reads].sum(dtype="i8")))
                self._watch(passing, read, held)
            return json.dumps(passing.broken).encode()

        try:
            answers = self._query.ask("passed", read)
            self.failure = made[0].wait([rank for rank, said in enumerate(answers) if team.rank in json.loads(said)])
        finally:
            for passing in made:
                passing.close()

    def _held(self, rows: Array) -> list[Source]:
        """The sources in which this rank holds a lease during the read: one rank per set that sees the same objects."""
        leads = self._query.team.leads
        return [source for source in read_sources(self.entry, rows) if leads(source[0].tier.traits.shared)]

    def _read(self, rows: Array, passing: ChunkExchange) -> None:
        reads = RankReads(self, passing)
        for_others = passing.on(rows) | ~self._wants[rows]
        alone = rows[~for_others]
        try:
            reads.run(rows[for_others])  # first, since other ranks wait for them
            if not passing.relieved.is_set():
                reads.fetch.fill(restore_from_memory(self.entry, alone, self._targets), self._targets)
                self._got[np.setdiff1d(alone, reads.lost)] = True
        finally:
            reads.close()
        self._give_up(reads.lost)
        if passing.relieved.is_set():
            self._leave_to_others(rows[~(self._got | reads.settled)[rows]], passing)

    def _give_up(self, rows: Array | Sequence[int]) -> None:
        """Tell in later exchanges that this rank cannot read these rows."""
        for mask in self.reach:
            mask[rows] = False

    def _leave_to_others(self, rows: Array, passing: ChunkExchange) -> None:
        """Read no more of these rows, if another rank can: nobody waits for them any longer, and others are faster."""
        if not len(rows):
            return
        log.warning(
            "rank %d reads so slowly that others read in its place: %d chunks", self._query.team.rank, len(rows)
        )
        for row in rows.tolist():
            passing.lose(row)
        there = rows[self._elsewhere[rows]]
        self._give_up(there)
        self.away[there] = True  # if the others cannot read them either, this is no damage

    def _watch(self, passing: ChunkExchange, read: ReadTime, held: float) -> None:
        """Wait for what other ranks pass on, and read what is still to come from one that is late.

        Args:
            read: how long this rank has read its own share.
            held: for how long it was held up then.
        """
        grid, me = HostGrid(self._query.team.hosts), self._query.team.rank
        steps = {rank: grid.steps(rank, me) for rank in passing.awaited()}
        watch, given_up = StragglerWatch(read, steps, self.stops, held), set[int]()
        while waiting := [rank for rank in passing.awaited() if rank not in given_up]:
            with self.stops.looking(GLANCE):
                passing.pause(waiting[0], GLANCE)
            for rank in waiting:
                if watch.is_late(rank, passing.passed(rank)):
                    given_up.add(rank)
                    self._hedge(rank, passing, watch.waited)

    def _hedge(self, rank: int, passing: ChunkExchange, waited: float) -> None:
        """Name a rank that is late, and read in its place, if this rank can."""
        reach = np.logical_or.reduce(self.reach)
        can = bool(reach[passing.left(rank)].all())
        left = passing.passed(rank).left
        what = "it is read here" if can else "this rank cannot read it, and waits"
        self._name(rank, f"{format_size(left)} have not come from it {waited:.1f} s after the rest; {what}")
        if can and (rows := passing.drop(rank)):
            reads = RankReads(self, passing)
            try:
                reads.run(np.array(sorted(rows), "i8"))
            finally:
                reads.close()
            self._give_up(reads.lost)
            for row in rows:
                if not reads.settled[row]:  # this rank is late itself
                    passing.lose(row)

    def _name(self, rank: int, what: str) -> None:
        """Tell that a rank is late; or that this one is, if it was stopped: then others do not wait for it any more."""
        me, stopped = self._query.team.rank, self.stops.seconds
        if stopped:
            log.warning("rank %d was stopped for %.1f s, so rank %d has given it up: %s", me, stopped, rank, what)
            return
        log.warning("rank %d: rank %d is late: %s", me, rank, what)
        for holding in self.entry.holdings[:1]:
            reason = f"rank {rank} is late: {what}"
            holding.tier_run.events.emit("rank_late", seq=self.entry.version.head.seq, reason=reason)

    def _take(self, row: int, raw: Buffer) -> bool:
        """Take a chunk from another rank; returns whether it is what was saved, by its digest."""
        if self._digest(raw) != self._digests[16 * row : 16 * row + 16]:
            return False
        if self._lands(row):
            self._got[row] = True  # it was received directly into its place
        else:
            self.bring(row, raw)
        return True

    def _lands(self, row: int) -> bool:
        """Whether this rank wants the chunk and all of it goes to one contiguous place in memory."""
        return bool(self._wants[row]) and bool(self._targets.address[row])

    def _spot(self, row: int) -> Buffer | None:
        """That place, into which the chunk is received directly; None if there is none."""
        if not self._lands(row):
            return None
        self._targets.touch(row)
        return self._targets.memory(row)

    def note(self, row: int, error: Damaged | Unreadable) -> None:
        """Note why a chunk could be read from no tier of this rank."""
        if isinstance(error, Unreadable):
            self.away[row], self.unreadable = True, self.unreadable or error
        else:
            self.damage = self.damage or error

    def bring(self, row: int, raw: Buffer) -> None:
        """Copy the verified bytes of a chunk into the state, if this rank wants it."""
        if self._wants[row]:
            event = self._targets.give(row, raw)
            if event is not None:
                event.synchronize()
            self._got[row] = True


class RankReads:
    """Reads chunks, keeps those that this rank wants, and sends those that others are to get from it.

    Args:
        restore: of this rank.
        passing: the exchange.

    Attributes:
        fetch: reads from the tiers.
        lost: rows that could not be read.
        settled: ``(rows,)`` of bool: those that were read or are lost.
    """

    def __init__(self, restore: ChunkRestore, passing: ChunkExchange) -> None:
        self._restore, self._passing, self._gate = restore, passing, Gate()
        version, holdings = restore.entry.version, restore.entry.holdings
        self._mender = RepairWriter(version, holdings)
        self.lost: list[int] = []
        self.settled = np.zeros(len(version.digests), bool)
        self._stopped = False
        self.fetch = Fetch(
            version,
            holdings,
            restore.arena,
            workers=READ_WORKERS,
            mended=self._mend,
            lost=self._lose,
            stop=lambda: self._stopped,
        )

    def run(self, rows: Array) -> None:
        """Read rows of which some are for others. Ends early if no rank waits for them any longer.

        A read that hangs is left alone then: it has memory of its own, and what it brings later is ignored.
        """
        if not len(rows):
            return
        over, failed = Latch(), list[BaseException]()

        def run() -> None:
            try:
                self.fetch.run(rows.tolist(), self._give)
            except BaseException as error:
                failed.append(error)
            finally:
                over.set()

        start_thread(threading.Thread(target=run, name="tierstate-reads", daemon=True))
        try:
            while not (over.is_set() or self._passing.relieved.is_set()):
                with self._restore.stops.looking(GLANCE):
                    over.wait(GLANCE)
        except BaseException:  # an interrupt: raised when nothing of this reads any more
            self._stopped = True
            over.wait()
            raise
        self._stopped = not over.is_set()
        if self._stopped and not over.wait(GRACE):
            log.warning("a read of a tier is not waited for any longer: it hangs")
        if failed and not self._stopped:
            raise failed[0]

    def close(self) -> None:
        """Ignore what comes from now on, and finish the repair of what was damaged."""
        self._stopped = True
        self._gate.close()
        self._mender.close()

    def _give(self, row: int, raw: Buffer, _slab: object) -> None:
        with self._gate.entered() as may:
            if may:
                self._restore.bring(row, raw)
                self.settled[row] = True
        if may:
            self._passing.give(row, raw)

    def _lose(self, row: int, error: Damaged | Unreadable) -> None:
        with self._gate.entered() as may:
            if may:
                self.lost.append(row)
                self.settled[row] = True
                self._restore.note(row, error)
        if may:
            self._passing.lose(row)

    def _mend(self, holding: int, row: int, raw: Buffer) -> None:
        with self._gate.entered() as may:
            if may:
                self._mender(holding, row, raw)


def _reach(entry: VersionCopies, team: Team) -> tuple[Array, ...]:
    """By kind of tier, ``(rows,)`` of bool: the chunks that this rank can read itself."""
    ranks = team.hosts.count(team.hosts[team.rank])
    found = tuple(np.zeros(len(entry.version.digests), bool) for _ in range(WANTED))
    for holding in entry.holdings:
        found[reach_kind(holding.tier_run.tier.traits, ranks)][holding.layout.present] = True
    return found


def encode_offer(address: str, sets: Mapping[str, Array]) -> bytes:
    """What one rank wants and reaches, by name as runs, with the address of its listening socket; as bytes."""
    columns = {name: encode_runs(runs) for name, runs in sets.items()}
    return col.encode_table({"address": address}, {name: np.frombuffer(d, "<u1") for name, d in columns.items()})


class SaidOffers(NamedTuple):
    """What all ranks want and reach; each a list by rank.

    Attributes:
        offers: the rows that they still want now, and what they reach.
        later: the same for all that they want in all.
        addresses: of their listening sockets.
        away: the rows in tiers that they could not ask.
        elsewhere: the leaves that their states do not have.
    """

    offers: list[RankRows]
    later: list[RankRows]
    addresses: list[str]
    away: list[Array]
    elsewhere: list[Array]


def decode_offers(answers: Sequence[bytes], rows: int, leaves: int) -> SaidOffers:
    """The offers that `encode_offer` has encoded.

    Args:
        rows, leaves: how many chunks and leaves the version has.

    Raises:
        FormatError: one of them is no offer.
    """
    found, known = SaidOffers([], [], [], [], []), dict[tuple[bytes, int], Array]()

    def runs(columns: col.Columns, name: str, count: int) -> Array:
        data = _column(columns, name)
        if (data, count) not in known:  # many ranks say the same
            known[data, count] = decode_runs(data, count)
        return known[data, count]

    for said in answers:
        head, columns = col.decode_table(memoryview(said), WHAT)
        sets = [runs(columns, f"rows.{i}", rows) for i in range(WANTED + 1)]
        reach = (sets[0], sets[1], sets[2], sets[3])
        found.offers.append(RankRows(sets[WANTED], reach))
        found.later.append(RankRows(runs(columns, "rows.all", rows), reach))
        found.addresses.append(col.json_field(head, "address", str, WHAT))
        found.away.append(runs(columns, "rows.away", rows))
        found.elsewhere.append(runs(columns, "elsewhere", leaves))
    return found


class IncompleteVersion(Exception):
    """Some ranks cannot get all that they want of a version; raised on all ranks.

    Args:
        text: which ranks lack which leaves.
        ranks: those ranks.
        own: the error that this rank met; None if it met none.

    Attributes:
        begun: whether chunks were read before this was known.
        unusable: whether the version has all chunks, and a rank can make no state of them.
    """

    def __init__(
        self, text: str, ranks: Sequence[int], own: TierstateError | None, *, begun: bool, unusable: bool = False
    ) -> None:
        super().__init__(text)
        self.begun, self.unusable, self._ranks, self._own = begun, unusable, ranks, own

    def error_for(self, rank: int) -> TierstateError:
        """The error for the user of one rank."""
        if (self.begun or self.unusable) and rank not in self._ranks:
            return RankFailed(str(self), self._ranks)
        return self._own or Damaged(str(self))


class SharedReads:
    """Reads of all ranks together from one version: first what each wants ahead, then the rest.

    Args:
        query: the all-gather.
        entry: the version, and what this rank has of it.
        wanted: which version is asked for, and what this rank wants of it.
        arena: the memory that bytes pass through.

    Attributes:
        changed: whether the given state may have been changed.
    """

    def __init__(self, query: GroupQuery, entry: VersionCopies, wanted: RestoreSpec, arena: Arena) -> None:
        self._query, self._entry, self._wanted, self._arena = query, entry, wanted, arena
        self._team, self._version = query.team, entry.version
        self._chunks: ChunkRestore | None = None
        self._listener: PeerListener | None = None
        self._begun = False
        self._unusable: TierstateError | None = None
        self.changed = False

    def restore(self) -> Any:
        """What is restored. Raises: as `RestoreAttempt.restore`."""
        raise NotImplementedError

    def _targets(self, *, ahead: bool) -> ScatterTargets:
        """Where the chunks go that this rank wants ahead, or then; called within an all-gather, once for each."""
        raise NotImplementedError

    def _later(self) -> Array:
        """The rows that this rank may want after those that it wants ahead."""
        raise NotImplementedError

    def _elsewhere(self) -> Collection[int]:
        """Leaves of the version that this rank's state does not have."""
        return ()

    def _fetch(self, *, ahead: bool) -> None:
        """Load what all ranks want before, or after, the stateful objects are set."""
        hosts, nbytes = self._team.hosts, self._version.chunk_nbytes
        for number in range(ROUNDS + 1):
            with ExitStack() as opened:
                offers, later, addresses, away = self._ask(opened, ahead=ahead)
                wanted = np.flatnonzero(sets_with([offer.wants for offer in offers], len(nbytes)))
                if ahead and number == 0:
                    # Nothing is begun unless all that is wanted can be had, also what comes later.
                    plan = plan_exchange(later, hosts, nbytes, self._team.rank)
                    if plan.lacking:
                        break
                if not len(wanted):
                    return
                plan = plan_exchange(offers, hosts, nbytes, self._team.rank, apart=number > 0)
                if plan.lacking or number == ROUNDS:
                    break
                self._begun = True
                self.changed = self.changed or not ahead
                assert self._chunks is not None
                assert self._listener is not None
                others = [runs for rank, one in enumerate(offers) if rank != self._team.rank for runs in one.reach]
                elsewhere = sets_with(others, len(nbytes)) > 0
                self._chunks.exchange(plan, wanted, elsewhere, self._listener, addresses)
        lacking = plan.lacking or {rank: _rows(offer.wants) for rank, offer in enumerate(offers) if len(offer.wants)}
        incomplete = self._not_whole(lacking)
        if away[np.concatenate(list(lacking.values()))].all():
            # The version may be whole, and is not passed over: a tier that has these chunks could not be asked.
            raise Unreadable(f"cannot be read now: {incomplete}") from (
                self._chunks.unreadable if self._chunks is not None else None
            )
        raise incomplete

    def _ask(self, opened: ExitStack, *, ahead: bool) -> tuple[list[RankRows], list[RankRows], list[str], Array]:
        """Gather what all ranks still want now, and in all, with what they reach, the addresses of their listening
        sockets, and as ``(rows,)`` of bool the chunks in tiers that some rank could not ask."""
        rows, leaves = len(self._version.digests), len(self._version.leaves)
        said = decode_offers(self._usable("offer", lambda: self._offer(opened, ahead=ahead)), rows, leaves)
        self._check_wanted(np.flatnonzero(sets_with(said.elsewhere, leaves) == len(said.offers)).tolist())
        return said.offers, said.later, said.addresses, sets_with(said.away, rows) > 0

    def _offer(self, opened: ExitStack, *, ahead: bool) -> bytes:
        # Opened here, within the all-gather, so that the other ranks get an error if it fails.
        listener = self._listener = opened.enter_context(
            closing(PeerListener(len(set(self._team.hosts)), self._team.secret))
        )
        if self._chunks is None:
            self._chunks = ChunkRestore(self._query, self._entry, self._targets(ahead=ahead), self._arena)
        chunks = self._chunks
        if chunks.failure is not None:
            with untrusted(describe_version(self._entry), named=False):
                raise chunks.failure
        self.check_still_there(chunks.damage or chunks.unreadable)
        elsewhere = np.isin(np.arange(len(self._version.leaves)), list(self._elsewhere()))
        sets = {f"rows.{i}": mask for i, mask in enumerate([*chunks.reach, chunks.missing])}
        sets |= {"rows.all": chunks.missing | _mask(self._later(), len(chunks.missing)), "elsewhere": elsewhere}
        # A tier that has a record of this number may have any chunk, as long as the record cannot be read.
        sets["rows.away"] = chunks.away | bool(self._entry.away)
        return encode_offer(listener.address, {name: runs_in(mask) for name, mask in sets.items()})

    def _usable(self, topic: str, answer: Callable[[], bytes]) -> list[bytes]:
        """The answers of all ranks, if all of them can use what the version holds.

        Raises:
            IncompleteVersion: some cannot; raised on all ranks, which then go on to an older version, or do not.
        """

        def said() -> bytes:
            try:
                return _USABLE + answer()
            except PASSED_OVER as error:
                self._unusable = error
                return _UNUSABLE + str(error).encode(errors="replace")[:4000]

        answers = self._query.ask(topic, said)
        wrong = {r: one[1:].decode(errors="replace") for r, one in enumerate(answers) if one[:1] == _UNUSABLE}
        if wrong:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in list(wrong.items())[:8])
            text = f"{describe_version(self._entry)} cannot be used by {format_ranks(list(wrong))}: {told}"
            raise IncompleteVersion(text, list(wrong), self._unusable, begun=self._begun, unusable=True)
        return [one[1:] for one in answers]

    def _check_wanted(self, nowhere: Sequence[int]) -> None:
        """Raise StateMismatch, on all ranks, if no rank's state has some leaves of the version."""
        if nowhere:
            names = [self._version.leaves[i].name for i in nowhere[:20]]
            more = f"\n  and {len(nowhere) - 20} more" if len(nowhere) > 20 else ""
            raise StateMismatch(
                f"{describe_version(self._entry)} has leaves that are missing in the states of all ranks; "
                "name what is to be restored by `only`:\n  " + "\n  ".join(names) + more
            )

    def check_still_there(self, damage: Damaged | Unreadable | None) -> None:
        """Raise if chunks could not be read because the version has changed meanwhile.

        Raises:
            VersionMoved: its chunks were moved; or it was deleted, and the newest version was asked for. The restore
                starts again.
            VersionDropped: it was deleted by retention, and this version was asked for.
        """
        if damage is not None:
            try:
                raise_if_dropped(self._entry, damage)
            except VersionDropped as error:
                raise VersionMoved(str(error)) if self._wanted.newest else error from error

    def _not_whole(self, found: Mapping[int, Array]) -> IncompleteVersion:
        told = "; ".join(self._lacks(rank, rows) for rank, rows in list(found.items())[:8])
        more = f"; and {len(found) - 8} more ranks" if len(found) > 8 else ""
        gone = f"; {self._entry.thinned or LOOK_FURTHER}"
        name, ranks = describe_version(self._entry), format_ranks(list(found))
        text = f"{name} is not whole for {ranks}, in no tier of any rank: {told}"
        own = self._chunks.damage if self._chunks is not None else None
        return IncompleteVersion(text + more + gone, list(found), own, begun=self._begun)

    def _lacks(self, rank: int, rows: Array) -> str:
        leaves = np.unique(self._version.chunk_leaf[rows])
        return f"rank {rank} lacks {len(leaves)} leaves, {self._version.leaves[int(leaves[0])].name} the first"


class RestoreAttempt(SharedReads):
    """One attempt of all ranks to restore one version."""

    def __init__(self, query: GroupQuery, entry: VersionCopies, wanted: RestoreSpec, arena: Arena) -> None:
        super().__init__(query, entry, wanted, arena)
        self._target: Target | None = None
        self._plan: RestorePlan | None = None

    def restore(self) -> Any:
        """The restored state.

        Raises:
            IncompleteVersion: some ranks cannot get all chunks that they want, or cannot use them.
            Unreadable: so it is, and each of these chunks is in a tier that some rank cannot ask now.
            StateMismatch: the version does not fit some state.
            RankFailed: another rank failed.
        """
        try:
            self._fetch(ahead=True)
            self._settle()
            self._chunks = None
            self._fetch(ahead=False)
            return self._finish()
        except BaseException:
            if self._target is not None:
                self._target.undo()
                self.changed = self.changed or self._target.changed
            raise

    def _targets(self, *, ahead: bool) -> ScatterTargets:
        plan = self._plan = self._plan or self._plan_restore()
        return plan.ahead if ahead else plan.wanted

    def _later(self) -> Array:
        assert self._plan is not None
        return self._plan.wanted.rows

    def _elsewhere(self) -> Collection[int]:
        assert self._target is not None
        return self._target.elsewhere

    def _plan_restore(self) -> RestorePlan:
        """Plan what this rank restores; done once per attempt."""
        wanted = self._wanted
        self._target = plan_restore(
            self._version.leaves,
            into=wanted.into,
            only=wanted.only,
            device=wanted.device,
            allow_pickle=wanted.allow_pickle,
            allow_lossy=wanted.allow_lossy,
            elsewhere=True,
            rank=self._team.rank,
            content=content_of(self._version),
            rename=wanted.rename,
        )
        return plan_scatter(self._version, self._target)

    def _settle(self) -> None:
        """Set the stateful objects of all ranks; if one of them refuses, no rank's state is changed."""

        def settle() -> bytes:
            assert self._target is not None
            self._target.settle()
            return b""

        self._usable("settle", settle)

    def _finish(self) -> Any:
        found = []

        def finish() -> bytes:
            assert self._target is not None
            found.append(self._target.finish())
            return b""

        self._usable("finish", finish)
        return found[0]


def _mask(rows: Array, count: int) -> Array:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def _rows(runs: Array) -> Array:
    return np.concatenate([np.arange(start, stop) for start, stop in runs.tolist()])


def _column(columns: col.Columns, name: str) -> bytes:
    return col.column(columns, name, "<u1", WHAT).tobytes()


def restore_together(
    team: Team,
    catalog: RunCatalog,
    arena: Arena,
    wanted: RestoreSpec,
    tag: str | None,
    resolve: Callable[[str], TaggedVersion | None],
    attempt: type[SharedReads] = RestoreAttempt,
) -> Restored | None:
    """Restore the asked version, by default the newest that all ranks can get completely.

    All ranks call this together. Each gets what its own state wants, or an error.

    Args:
        team: the ranks.
        catalog: the versions of the run that this rank sees.
        wanted: which version, and what this rank wants of it.
        tag: the version's tag; None if it is not asked for by tag.
        resolve: finds the version that has a tag.
        attempt: restores one version.

    Raises:
        ValueError: the ranks ask for different versions.
        RankFailed: another rank, which is named, failed, is dead or is late.
        NotFound, StateMismatch, Damaged, Unsafe: as for one rank.
    """
    query = GroupQuery(team, "restore")
    try:
        for _ in range(MAX_RESTARTS):
            try:
                return _restore(query, VersionAgreement(query, catalog, wanted, tag, resolve), arena, attempt)
            except VersionMoved as error:
                log.info("%s", error)
        return _restore(query, VersionAgreement(query, catalog, wanted, tag, resolve), arena, attempt)
    except BaseException as error:  # of this rank alone, as an interrupt at any moment: the others wait for it
        query.leave(error)
        raise


def _restore(
    query: GroupQuery, agreement: VersionAgreement, arena: Arena, attempt: type[SharedReads]
) -> Restored | None:
    wanted, catalog = agreement.wanted, agreement.catalog
    agreement.compare_arguments()
    changed = False
    try:
        for entry in agreement.candidates(agreement.look()):
            reads = attempt(query, entry, wanted, arena)
            try:
                return Restored(reads.restore(), entry)
            except IncompleteVersion as error:
                if wanted.on_damage == "raise" and (error.begun or error.unusable or not agreement.newest):
                    raise error.error_for(query.team.rank) from None
                agreement.pass_over(describe_version(entry), error)
            finally:
                changed = changed or reads.changed
        agreement.check_missing()
        none_found(catalog.tier_runs[0].run, wanted, catalog, agreement.passed)
        return None
    except BaseException as error:
        if changed and wanted.into is not NEW:
            error.add_note("the given state may be overwritten in part: do not train on from it")
        raise
