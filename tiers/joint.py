"""The joint flow: saves of one rank of a team, in step with those of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tierstate.manifest.errors import RankFailed, StateMismatch
from tierstate.manifest.head import Head

from .agreeing import Dues, agree, head_for
from .arena import Arena
from .flow import Flow
from .minutes import Minutes
from .owing import Due
from .plan import Plan
from .policy import Policy
from .route import Route
from .shelf import Shelf
from .team import Team
from .ticket import Ticket

log = logging.getLogger("tierstate")


class JointFlow(Flow):
    """Carries one rank's part of each save. Numbers and due tiers are counted alike on all ranks.

    Args:
        team: the ranks; all of them make their flows together.
        minutes: what the councils of all tiers share.
        policy, shelves, arena: as for `Flow`.
        mismatched: called with the number of a version whose parts did not fit together.

    Raises:
        RankFailed: not all ranks answer.
    """

    def __init__(
        self,
        team: Team,
        minutes: Minutes,
        policy: Policy,
        shelves: Sequence[Shelf],
        arena: Arena,
        mismatched: Callable[[int], None],
    ) -> None:
        super().__init__(policy, shelves, arena)
        self._team, self._minutes, self._mismatched = team, minutes, mismatched
        self.rank = team.rank
        agreed = agree(team, shelves, self._highest)
        self._seq, self._look = agreed.seq, False
        self._dues = Dues(team, policy, agreed.last)

    def continue_from(self, version: str) -> None:
        super().continue_from(version)
        self._minutes.continue_from(version)

    def submit(self, plan: Plan, head: Head) -> Ticket:
        """As `Flow.submit`. Whatever keeps this rank from it is told to the others, which wait for it otherwise."""
        try:
            ticket = super().submit(plan, head_for(self._team, head))
        except BaseException as error:
            self.withdraw(head.seq, error, self._missed(head.seq))
            raise
        if ticket.skipped:
            why = f"rank {self.rank} skipped the save of step {head.step}: its arena was full (on_full: skip)"
            self.withdraw(head.seq, why, tuple(ticket.tiers), left_out=True)
        return ticket

    def withdraw(
        self, seq: int, why: BaseException | str, names: Sequence[str] | None = None, *, left_out: bool = False
    ) -> None:
        """This rank gives nothing to a version.

        Args:
            names: of the tiers; by default all.
        """
        for name, shelf in self._shelves.items():
            if names is None or name in names:
                shelf.withdraw(seq, why, left_out=left_out)

    def miss(self, seq: int, step: int | None, time: float, why: BaseException) -> None:
        """This rank gives nothing to a save that it could not even plan; for the cadence it counts as on all others.

        Args:
            step: None where it is none.
        """
        names = self._missed(seq) if step is None else None
        if step is not None:
            try:
                names = self._dues.of(seq, step, time)
            except RankFailed as error:
                log.debug("which tiers save %d goes to is not known: %s", seq, error)
        self.withdraw(seq, why, names)

    def _missed(self, seq: int) -> Sequence[str] | None:
        try:
            return self._dues.missed(seq)
        except RankFailed as error:
            log.debug("which tiers save %d goes to could not be said: %s", seq, error)
            return None

    def tell_lost(self) -> None:
        """Raise what an earlier save that reached no persistent tier met; the ranks learn of it at different times, so
        that it must not keep one from a save which the others make."""
        super()._tell_lost()

    def _tell_lost(self) -> None:
        pass

    def _due(self, head: Head, routes: Mapping[str, Route]) -> tuple[list[str], dict[str, str]]:
        # Where this rank has no leaf for a tier, others may have some.
        names = list(self._dues.of(head.seq, head.step, head.time))
        others = [tier for tier in self._policy.tiers if tier.name not in names]
        return names, {tier.name: f"its `every: {tier.every}` is not due" for tier in others}

    def _settled(self, ticket: Ticket) -> None:
        # What did not arrive counts for the cadence, and numbers go on: the ranks learn of it at different times.
        if any(isinstance(ticket.failure(name), StateMismatch) for name in ticket.tiers):
            self._mismatched(ticket.head.seq)

    def _brought(self, name: str, due: Due) -> None:
        self._ledger.brought(name, due.seq)
