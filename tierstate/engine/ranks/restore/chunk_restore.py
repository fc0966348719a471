"""One rank's part of a joint restore: the chunks that it reads, those that it sends, and those that it receives."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from tierstate.engine.ranks.team.team import Team
from tierstate.engine.restore.fetch import Fetch, RepairWriter
from tierstate.engine.restore.restore import READ_WORKERS
from tierstate.engine.restore.scatter import ScatterTargets
from tierstate.engine.restore.uploads import restore_from_memory
from tierstate.engine.store.catalog import Source, VersionCopies, lease_for_reading, read_sources
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import Damaged, Unreadable
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.units import format_size

from .agreement import GroupQuery
from .exchange import ChunkExchange, PeerListener
from .exchange_plan import WANTED, ExchangePlan, HostGrid, reach_kind
from .stragglers import Gate, ReadTime, Stops, StragglerWatch

log = logging.getLogger("tierstate")


GRACE = 1.0
"""Seconds for which reads that are under way are waited for once they are of no use."""


GLANCE = 0.1
"""Seconds between two looks at whether other ranks are late."""


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
