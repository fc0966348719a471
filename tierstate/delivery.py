"""The delivery of one version to one rank of many: what it reads for all, what comes from others, what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.columns import Array
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import Damaged
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Entry
from tierstate.tiers.exchange import Exchange
from tierstate.tiers.fetch import Fetch
from tierstate.tiers.landing import Landing
from tierstate.tiers.leasing import Source, reading, sources
from tierstate.tiers.mend import Mender
from tierstate.tiers.offers import WANTED, kind_of
from tierstate.tiers.passing import Passing
from tierstate.tiers.team import Team
from tierstate.tiers.wires import Door

from .agreement import Accord
from .filling import WORKERS
from .rollback import roll_back


class Delivery:
    """The chunks of a version on their way to where they belong.

    Args:
        accord: the ranks.
        entry: the version, and what this rank has of it.
        landing: where chunks belong that this rank wants.
        arena: the memory that bytes pass through.

    Attributes:
        reach: by kind of tier, ``(rows,)`` of bool: the chunks that this rank may read; not those that it failed to.
        damage: why a chunk could not be read, once there was one.
        failure: why one could not be brought to its place.
    """

    def __init__(self, accord: Accord, entry: Entry, landing: Landing, arena: Arena) -> None:
        self._accord, self._entry, self._landing, self._arena = accord, entry, landing, arena
        version = entry.version
        self._digest, self._digests = algorithm(version.head.digest), version.digests.tobytes()
        self._nbytes = version.chunk_nbytes
        self._wants, self._got = np.zeros(len(version.digests), bool), np.zeros(len(version.digests), bool)
        self._wants[landing.rows] = True
        self.reach = _reach(entry, accord.team)
        self.damage: Damaged | None = None
        self.failure: Exception | None = None

    @property
    def missing(self) -> Array:
        """``(rows,)`` of bool: chunks that this rank wants and does not have."""
        found: Array = self._wants & ~self._got
        return found

    def exchange(self, plan: Exchange, wanted: Array, door: Door, doors: Sequence[str]) -> None:
        """Read and pass on what the plan says, and wait for what others pass on; all ranks call this together.

        Args:
            wanted: all rows that are wanted by any rank.
            door: where chunks arrive here.
            doors: where they arrive at each rank.

        Raises:
            Moved, RankFailed, TierstateError: as `Accord.ask`. What could not be read is `missing`.
        """
        team = self._accord.team
        passing = Passing(team.rank, plan, door, doors, self._nbytes, self._take, team.terms.silence, self._spot)

        def read() -> bytes:
            with reading(self._held(wanted), int(self._nbytes[wanted].sum(dtype="i8"))):
                self._read(plan.reads, passing)
            return json.dumps(passing.broken).encode()

        try:
            heard = self._accord.ask("passed", read)
            self.failure = passing.wait([rank for rank, said in enumerate(heard) if team.rank in json.loads(said)])
        finally:
            passing.close()

    def _held(self, rows: Array) -> list[Source]:
        """Where the version is held while it is read: in each tier by one of those who see the same."""
        leads = self._accord.team.leads
        return [source for source in sources(self._entry, rows) if leads(source[0].tier.traits.shared)]

    def _read(self, rows: Array, passing: Passing) -> None:
        lost: list[int] = []

        def lose(row: int, error: Damaged) -> None:
            lost.append(row)
            self.damage = self.damage or error
            passing.lose(row)

        def give(row: int, raw: Buffer, _slab: object) -> None:
            self._bring(row, raw)
            passing.give(row, raw)

        version, holdings = self._entry.version, self._entry.holdings
        mender = Mender(version, holdings)
        fetch = Fetch(version, holdings, self._arena, workers=WORKERS, mended=mender, lost=lose)
        for_others = passing.on(rows) | ~self._wants[rows]
        alone = rows[~for_others]
        try:
            fetch.run(rows[for_others].tolist(), give)  # first, as others wait for it
            fetch.fill(roll_back(self._entry, alone, self._landing), self._landing)
        finally:
            mender.close()
        self._got[np.setdiff1d(alone, lost)] = True
        for mask in self.reach:
            mask[lost] = False

    def _take(self, row: int, raw: Buffer) -> bool:
        """A chunk from another rank; whether it is what was saved."""
        if self._digest(raw) != self._digests[16 * row : 16 * row + 16]:
            return False
        if self._lands(row):
            self._got[row] = True  # where it lies
        else:
            self._bring(row, raw)
        return True

    def _lands(self, row: int) -> bool:
        """Whether all of a chunk has one place in memory."""
        return bool(self._wants[row]) and bool(self._landing.address[row])

    def _spot(self, row: int) -> Buffer | None:
        """That place."""
        if not self._lands(row):
            return None
        self._landing.touch(row)
        return self._landing.memory(row)

    def _bring(self, row: int, raw: Buffer) -> None:
        if self._wants[row]:
            event = self._landing.give(row, raw)
            if event is not None:
                event.synchronize()
            self._got[row] = True


def _reach(entry: Entry, team: Team) -> tuple[Array, ...]:
    """By kind, the rows that a rank reaches itself."""
    ranks = team.hosts.count(team.hosts[team.rank])
    found = tuple(np.zeros(len(entry.version.digests), bool) for _ in range(WANTED))
    for holding in entry.holdings:
        found[kind_of(holding.shelf.tier.traits, ranks)][holding.layout.present] = True
    return found
