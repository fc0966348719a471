"""The ledger: the saves under way, and those that went wrong without anybody knowing yet."""

from __future__ import annotations

import threading
from collections.abc import Collection

from .ticket import Ticket

UNTOLD = 100
"""Failed saves that are remembered until somebody asks; a tier may fail for weeks."""


class Ledger:
    """Tickets of saves, in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """One more save; what is done, and told, is let go of."""
        with self._lock:
            under_way = [t for t in self._tickets if not t.settled()]
            untold = [t for t in self._tickets if t.settled() and any(t.error(n) and n not in t.told for n in t.tiers)]
            self._tickets = [*untold[-UNTOLD:], *under_way, ticket]

    def tickets(self) -> list[Ticket]:
        """Those that are remembered."""
        with self._lock:
            return list(self._tickets)

    def wanted(self, tier: str) -> set[int]:
        """Numbers of the saves that are on their way to a tier."""
        return {t.head.seq for t in self.tickets() if tier in t.tiers and not t.tiers[tier].done()}

    def brought(self, tier: str, seq: int) -> None:
        """A tier has got a version after all: nobody need be told that it did not arrive at first."""
        for ticket in self.tickets():
            if ticket.head.seq == seq:
                ticket.told.add(tier)

    def raise_if_lost(self, lasting: Collection[str]) -> None:
        """An earlier save that reached no persistent tier at all is told, once.

        Args:
            lasting: names of the tiers that persist.
        """
        for ticket in self.tickets():
            names = [n for n in ticket.tiers if n in lasting]
            failures = {n: f for n in names if (f := ticket.failure(n)) is not None}
            if failures and all(map(ticket.error, names)) and not ticket.told & set(failures):
                ticket.told |= set(ticket.tiers)
                error = next(iter(failures.values()))
                error.add_note(f"this is what became of the save of step {ticket.head.step}; it has no durable copy")
                raise error

    def failures(self) -> list[tuple[Ticket, str, BaseException]]:
        """What went wrong and has been told to nobody yet; it counts as told from now on."""
        found = []
        for ticket in self.tickets():
            for name in ticket.tiers:
                error = ticket.error(name)
                if error is not None and name not in ticket.told:
                    ticket.told.add(name)
                    found.append((ticket, name, error))
        return found

    def late(self) -> list[str]:
        """What is still under way, for messages."""
        return [f"step {t.head.step} to {n}" for t in self.tickets() for n, f in t.tiers.items() if not f.done()]

    def cancel(self) -> None:
        """Give up all that is under way."""
        for ticket in self.tickets():
            ticket.cancelled.set()
