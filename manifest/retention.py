"""Retention: which versions of a run a tier keeps, and why. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Mark(NamedTuple):
    """What retention needs to know of a version."""

    seq: int
    step: int


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep; a version is kept for any one of these reasons.

    Attributes:
        last: the newest so many versions.
        every: the first version at or after each multiple of so many steps.
        all: everything.
    """

    last: int | None = None
    every: int | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if min(self.last or 0, self.every or 0) < 0:
            raise ValueError(f"keep: last {self.last}, every {self.every}: right are numbers above zero")
        if not (self.last or self.every or self.all):
            raise ValueError("an empty keep would drop every version; say last, every or all, or leave keep out")


@dataclass(frozen=True, slots=True)
class Decision:
    """Kept versions with their reasons, and those to drop, both by rising sequence number."""

    keep: dict[int, tuple[str, ...]]
    drop: tuple[int, ...]


def decide(versions: Sequence[Mark], keep: Keep | None, pinned: Collection[int] = ()) -> Decision:
    """Which versions stay.

    Args:
        versions: all versions of the run in the tier, in any order.
        keep: the policy; None keeps everything.
        pinned: sequence numbers that are in use and stay whatever the policy says; perhaps with the reason of each.

    The newest version always stays.
    """
    ordered = sorted(versions)
    reasons: dict[int, list[str]] = {mark.seq: [] for mark in ordered}
    for mark in ordered[-1:]:
        reasons[mark.seq].append("newest")
    for seq in pinned:
        if seq in reasons:
            reasons[seq].append(pinned[seq] if isinstance(pinned, Mapping) else "in use")
    for seq, reason in _wanted(ordered, keep):
        reasons[seq].append(reason)
    kept = {seq: tuple(why) for seq, why in reasons.items() if why}
    return Decision(kept, tuple(seq for seq in reasons if seq not in kept))


def _wanted(ordered: Sequence[Mark], keep: Keep | None) -> list[tuple[int, str]]:
    if keep is None or keep.all:
        return [(mark.seq, "all") for mark in ordered]
    found = [(mark.seq, f"last {keep.last}") for mark in ordered[-keep.last :]] if keep.last else []
    return found + (_first_of_each(ordered, keep.every) if keep.every else [])


def _first_of_each(ordered: Sequence[Mark], every: int) -> list[tuple[int, str]]:
    """The first version in each window of ``every`` steps; a step saved again later stands behind the first."""
    first: dict[int, int] = {}
    for mark in ordered:
        first.setdefault(mark.step // every, mark.seq)
    return [(seq, f"every {every}") for seq in first.values()]
