"""The cascade: how versions come from the faster tiers of a policy to the slower ones, and what is held for that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tierstate.manifest.errors import TierstateError

from .arena import Arena
from .backlog import Backlog
from .jobs import Copy
from .lane import Lane
from .ledger import Ledger
from .owing import LIMIT, Due, held, missed
from .placement import Last
from .policy import Policy
from .routes import Routes
from .shelf import Shelf
from .ticket import Ticket
from .ties import Ties

log = logging.getLogger("tierstate")


class Cascade:
    """The lanes of a policy's tiers, and what each has to do with the others.

    Args:
        policy: cadences, and what becomes of a tier that lags.
        shelves: the run in each tier, in the policy's order.
        ledger: the saves under way.
        arena: the memory that copies pass through.
        settled: called with a save that is done with a tier.
        brought: called with a tier's name and a version that came to it later than it should have.
    """

    def __init__(
        self,
        policy: Policy,
        shelves: Sequence[Shelf],
        ledger: Ledger,
        arena: Arena,
        settled: Callable[[Ticket], None],
        brought: Callable[[str, Due], None],
    ) -> None:
        self._shelves = {shelf.name: shelf for shelf in shelves}
        self._policy, self._ledger, self._arena = policy, ledger, arena
        self._settled, self._brought = settled, brought
        self._routes = Routes(policy)
        # Where rules part a state, what one tier has may not be all that another one is to get.
        self._parted = any(rule.tiers is not None for rule in policy.rules)
        self._before = 0
        self._told: set[str] = set()
        self.lanes: dict[str, Lane] = {}

    def start(self, seq: int) -> None:
        """Begin.

        Args:
            seq: number of the first version that this process saves.
        """
        self._before = seq
        self.lanes = {name: self._lane(name) for name in self._shelves}
        for lane in self.lanes.values():
            lane.start()

    def _lane(self, name: str) -> Lane:
        ties = Ties(
            pinned=lambda: self.pinned(name),
            missed=lambda: self.missed(name),
            debt=lambda ticket: self.debt(name, ticket),
            settled=self._settled,
            brought=lambda due: self._brought(name, due),
        )
        tier = self._policy.tier(name)
        return Lane(self._shelves[name], ties, Backlog(tier.every, tier.on_lag))

    def copy(
        self,
        name: str,
        due: Due,
        ticket: Ticket | None = None,
        entries: Sequence[str] = (),
        coming: Callable[[], bool] = lambda: False,
    ) -> Copy:
        """A version's way into a tier from those before it; see `Copy`."""
        faster = self._faster(name) if ticket is not None else self._whole(name)
        return Copy(due, self._shelves[name], faster, self._routes, self._arena, ticket, entries, coming)

    def debt(self, name: str, ticket: Ticket) -> Copy | None:
        """The copy by which a save that failed on a tier may yet come; None where no faster one can have it."""
        if not self._lasts(name) or not self._brings(name):
            return None
        faster = [shelf.name for shelf in self._whole(name) if shelf.name in ticket.tiers]
        if all(ticket.error(n) is not None for n in faster):
            return None
        return self.copy(
            name, Due.of(ticket.head, ticket.nbytes), coming=lambda: any(not ticket.tiers[n].done() for n in faster)
        )

    def pinned(self, name: str) -> Mapping[int, str]:
        """Versions that a tier must not drop now, and why."""
        if self._shelves[name].tier.traits.scarce:
            return {}
        slower = [n for n in list(self._shelves)[list(self._shelves).index(name) + 1 :] if self._lasts(n)]
        lanes = {n: self.lanes[n] for n in slower}
        wanted = {n: self._ledger.wanted(n) | lane.wanted() for n, lane in lanes.items()}
        found = held(wanted, {n: self._shelves[n].known for n in slower}, each=self._parted)
        if self._lasts(name):
            for n, lane in lanes.items():
                if (seq := lane.copying()) is not None:
                    found.setdefault(seq, n)
                if not lane.looked:
                    # Nobody knows yet what it lacks of what was there before this process.
                    found |= {s: n for s in self._shelves[name].log.seqs() if s < self._before}
        return {seq: f"{n} has not got it yet" for seq, n in found.items()}

    def missed(self, name: str) -> list[Copy]:
        """What should have come to a tier before this process began, and is still in a faster one."""
        faster = [shelf for shelf in self._whole(name) if self._lasts(shelf.name)]
        if not faster or not self._lasts(name) or not self._brings(name):
            return []
        there = self._seqs(faster)
        try:
            newest = self._shelves[name].newest()
        except TierstateError as error:
            log.warning("%s: its log cannot be read, so the newest version there is may be owed: %s", name, error)
            last: Last | None = None
            seqs = sorted(there)[-1:]
        else:
            head = newest.version.head if newest else None
            last = (head.step, head.time) if head else None
            seqs = [seq for seq in sorted(there) if head is None or seq > head.seq][-LIMIT:]
        dues = [due for seq in seqs if (due := self._due(name, there[seq], seq)) is not None]
        return [self.copy(name, due) for due in missed(self._policy.tier(name).every, last, dues)]

    def _seqs(self, shelves: Sequence[Shelf]) -> dict[int, Shelf]:
        """Numbers of the versions before this process, and the nearest of these tiers that has each."""
        found: dict[int, Shelf] = {}
        for shelf in reversed(shelves):
            try:
                found |= dict.fromkeys(shelf.log.seqs(), shelf)
            except TierstateError as error:
                log.warning("%s: its log cannot be listed: %s", shelf.name, error)
        return {seq: shelf for seq, shelf in found.items() if seq < self._before}

    def _due(self, name: str, shelf: Shelf, seq: int) -> Due | None:
        try:
            version = shelf.record(seq).version
        except TierstateError as error:
            log.warning("%s: version %d cannot be read: %s", shelf.name, seq, error)
            return None
        here = self._routes.of(version.leaves)[name].leaves.any()
        return Due.of(version.head, version.nbytes) if here else None

    def _faster(self, name: str) -> list[Shelf]:
        faster = list(self._shelves.values())[: list(self._shelves).index(name)]
        return [shelf for shelf in faster if not shelf.tier.traits.scarce]

    def _whole(self, name: str) -> list[Shelf]:
        """Those of the faster tiers where one rank finds all of a version."""
        return [shelf for shelf in self._faster(name) if shelf.whole]

    def _brings(self, name: str) -> bool:
        """Whether this process brings there, by itself, what did not arrive; who could and does not, says so once."""
        shelf = self._shelves[name]
        if shelf.alone and self._faster(name) and not self._whole(name) and name not in self._told:
            self._told.add(name)
            log.warning("%s: what does not arrive is not brought later: no rank finds whole versions before it", name)
        return shelf.alone

    def _lasts(self, name: str) -> bool:
        return self._shelves[name].tier.traits.persistent
