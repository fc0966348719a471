"""What a tier owes, leaves out and waits for: the rules of the cascade, decided purely."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

from tierstate.manifest.head import Head

from .placement import Last, is_due

LIMIT = 64
"""Versions that wait for one tier at most, whatever its ``on_lag`` says: beyond that the oldest are left out."""


class Due(NamedTuple):
    """A version that is to come to a tier: all that is remembered of it there until its turn comes.

    Attributes:
        seq, step, time: its place in the run, the training step, and when it was saved, in seconds since 1970.
        nbytes: raw bytes of the state.
        metadata: what was saved with it, by which `keep` may judge it.
    """

    seq: int
    step: int
    time: float
    nbytes: int = 0
    metadata: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, head: Head, nbytes: int) -> Due:
        """What a version's head says."""
        return cls(head.seq, head.step, head.time, nbytes, head.metadata)


def missed(every: int | timedelta | None, last: Last | None, there: Iterable[Due]) -> list[Due]:
    """Those versions, of other tiers, that a tier of this cadence was to get after the newest that it has.

    Args:
        last: step and time of that newest one; None where it has none.
        there: newer versions, by rising number.
    """
    found = []
    for due in there:
        if is_due(every, due.step, last, due.time):
            found.append(due)
            last = due.step, due.time
    return found


def still_owed(every: int | timedelta | None, owed: Iterable[Due], arrived: Due) -> list[Due]:
    """What is owed once a save has arrived: it also stands for an older one after which it would not have been due."""
    return [
        due
        for due in owed
        if due.seq != arrived.seq
        and (due.seq > arrived.seq or is_due(every, arrived.step, (due.step, due.time), arrived.time))
    ]


def owes(every: int | timedelta | None, owed: Iterable[Due], failed: Due) -> bool:
    """Whether a save that failed is owed: not where an older one is that it would not have been due after."""
    older = (due for due in owed if due.seq < failed.seq)
    return all(is_due(every, failed.step, (due.step, due.time), failed.time) for due in older)


def left_out(on_lag: str, waiting: Sequence[tuple[int, bool]], limit: int = LIMIT) -> int:
    """How many of the versions that wait for a tier are left out, from the oldest on.

    Args:
        on_lag: ``skip`` leaves out all that are older than the newest that could be copied now.
        waiting: number of each, rising, and whether a faster tier has it already.
    """
    excess = max(0, len(waiting) - limit)
    ready = [i for i, (_, at_hand) in enumerate(waiting) if at_hand]
    return max(excess, ready[-1]) if on_lag == "skip" and ready else excess


def held(
    wanted: Mapping[str, Collection[int]], there: Mapping[str, Collection[int]], *, each: bool = False
) -> dict[int, str]:
    """Versions that a tier may not drop yet, and the first tier that waits for each.

    A version stays until a slower persistent tier has it before which no tier waits for it: those behind can copy it
    from there, those before cannot. A tier that no longer waits for a version, because it was left out or cannot be
    brought, holds nothing back.

    Args:
        wanted: by slower persistent tier, nearest first, the numbers it is to get.
        there: by slower persistent tier, the numbers it has.
        each: every tier that waits must have got it, since they hold different parts of the state.
    """
    found: dict[int, str] = {}
    nearer: list[Collection[int]] = []
    for tier, seqs in wanted.items():
        for seq in seqs:
            if each or not any(seq in have for have in nearer):
                found.setdefault(seq, tier)
        nearer.append(there.get(tier, ()))
    return found
