"""A backlog: the versions that are yet to be copied to one tier, those of saves under way and those it owes."""

from __future__ import annotations

from datetime import timedelta
from typing import Generic, Protocol, TypeVar

from .owing import LIMIT, Due, left_out, owes, still_owed
from .ticket import Ticket


class Copied(Protocol):
    """What a backlog needs of a copy that is to be made."""

    due: Due
    ticket: Ticket | None

    @property
    def at_hand(self) -> bool:
        """Whether a faster tier has it already."""


C = TypeVar("C", bound=Copied)


class Backlog(Generic[C]):
    """Copies that wait for one tier; numbers, and no tables. Whoever uses it holds a lock.

    Args:
        every: the tier's cadence.
        on_lag: what becomes of the older ones when several wait: ``skip`` or ``queue``.

    Attributes:
        owed: versions that the tier was to have and has not got, by number.
    """

    def __init__(self, every: int | timedelta | None = None, on_lag: str = "queue", limit: int = LIMIT) -> None:
        self._every, self._on_lag, self._limit = every, on_lag, limit
        self._waiting: dict[int, C] = {}
        self.owed: dict[int, C] = {}

    def put(self, copy: C) -> list[C]:
        """One more save that is under way. Returns those that are left out for it."""
        self._waiting[copy.due.seq] = copy
        return self.trim()

    def owe(self, copy: C) -> bool:
        """One more that failed, or was missed. Returns whether it is owed, as nothing stands for it."""
        due = owes(self._every, (c.due for c in self.owed.values()), copy.due)
        if due:
            self.owed[copy.due.seq] = copy
        return due

    def trim(self) -> list[C]:
        """Let go of what is left out by now, and return it."""
        ordered = self._ordered()
        gone = ordered[: left_out(self._on_lag, [(c.due.seq, c.at_hand) for c in ordered], self._limit)]
        for copy in gone:
            self._remove(copy)
        return gone

    @property
    def first(self) -> int | None:
        """Number of the oldest save that waits."""
        return min(self._waiting, default=None)

    def take(self, debts: bool) -> C | None:
        """Take out the next one, which is the oldest.

        Args:
            debts: what is owed may be tried now, too.
        """
        ordered = self._ordered() if debts else sorted(self._waiting.values(), key=_number)
        if not ordered:
            return None
        self._remove(ordered[0])
        return ordered[0]

    def arrived(self, due: Due) -> None:
        """The tier has got a version, which may stand for older ones."""
        left = {d.seq for d in still_owed(self._every, (c.due for c in self.owed.values()), due)}
        self.owed = {seq: copy for seq, copy in self.owed.items() if seq in left}

    def dues(self) -> list[Due]:
        """All that wait and all that are owed, oldest first."""
        return [copy.due for copy in self._ordered()]

    def __len__(self) -> int:
        """How many saves wait; what is owed is not counted."""
        return len(self._waiting)

    def _ordered(self) -> list[C]:
        return sorted([*self.owed.values(), *self._waiting.values()], key=_number)

    def _remove(self, copy: C) -> None:
        self._waiting.pop(copy.due.seq, None)
        self.owed.pop(copy.due.seq, None)


def _number(copy: Copied) -> int:
    return copy.due.seq
