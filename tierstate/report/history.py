"""The versions of a run as columns: what its records and its events say of each, in each tier. Pure functions.

Groups of consecutive versions make series of bounded length from columns of any length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tierstate.engine.events import Event
from tierstate.engine.info import VersionInfo
from tierstate.manifest.arrays import Array

from .data import STATES, Axis, Durations, Series

ARRIVED = ("committed", "cascaded", "brought")
"""Events that say that a version is in a tier."""


_STATE_OF = {"failed": "failed", "left_out": "left out", "dropped": "dropped", **dict.fromkeys(ARRIVED, "dropped")}
"""How a version stands in a tier that does not have it now, by the last event about it there. One that has arrived and
is gone was dropped, by whom ever."""


@dataclass(frozen=True, slots=True)
class TierColumns:
    """One tier, a row for each version.

    Attributes:
        state: number of the state in `STATES`.
        stored, written, raw: bytes; NaN where they are not known.
        arrived: when it was in the tier, in seconds since 1970; NaN where that is not known.
    """

    state: Array
    stored: Array
    written: Array
    raw: Array
    arrived: Array


@dataclass(frozen=True, slots=True)
class History:
    """A run, a row for each version by rising number.

    Attributes:
        time: of the save; NaN where it is not known.
        blocked, captured: seconds for which the save blocked the training, and after which all was copied; NaN where
            they are not known.
    """

    seq: Array
    step: Array
    time: Array
    blocked: Array
    captured: Array
    tiers: dict[str, TierColumns]


def history_of(versions: Sequence[VersionInfo], events: Sequence[Event], tiers: Sequence[str]) -> History:
    """The columns of a run.

    Args:
        versions: those that are there now.
        events: what is logged of the run, oldest first.
        tiers: names of the tiers.
    """
    about = [event for event in events if event.seq is not None and event.kind != "restored"]
    seq = np.unique(np.array([v.seq for v in versions] + [int(event.seq or 0) for event in about], "i8"))
    row = {number: i for i, number in enumerate(seq.tolist())}
    columns = {name: _no_columns(seq) for name in tiers}
    found = History(seq, np.zeros(len(seq), "i8"), _unknown(seq), _unknown(seq), _unknown(seq), columns)
    _fill_events(found, row, about)
    _fill_versions(found, row, versions)
    return found


def _unknown(like: Array) -> Array:
    return np.full(len(like), math.nan)


def _no_columns(seq: Array) -> TierColumns:
    return TierColumns(np.zeros(len(seq), "i1"), *(_unknown(seq) for _ in range(4)))


def _fill_events(found: History, row: dict[int, int], events: Iterable[Event]) -> None:
    for event in events:
        i = row[int(event.seq or 0)]
        if event.step is not None:
            found.step[i] = event.step
        if event.kind == "saved":
            found.blocked[i] = event.seconds or 0.0
        elif event.kind == "captured":
            found.captured[i] = event.seconds or 0.0
            found.time[i] = event.time - (event.seconds or 0.0)
        elif (tier := found.tiers.get(event.tier)) is not None:
            _fill_tier(tier, i, event)


def _fill_tier(tier: TierColumns, i: int, event: Event) -> None:
    if (state := _STATE_OF.get(event.kind)) is not None:
        tier.state[i] = STATES.index(state)
    if event.kind in ARRIVED:
        tier.arrived[i] = event.time
        if event.nbytes is not None and event.raw is not None:
            tier.written[i], tier.raw[i] = event.nbytes, event.raw


def _fill_versions(found: History, row: dict[int, int], versions: Iterable[VersionInfo]) -> None:
    number = {state: i for i, state in enumerate(STATES)}
    for version in versions:
        i = row[version.seq]
        if version.id:
            found.step[i], found.time[i] = version.step, version.time
        for names, state in ((version.late, "owed"), (version.tiers, "whole"), (version.partial, "in part")):
            for name in names:
                found.tiers[name].state[i] = number[state]
        for name in version.unreadable:
            found.tiers[name].state[i] = number["unreadable"]
        for name, stored in version.stored.items():
            found.tiers[name].stored[i] = stored


def exposures(history: History, name: str) -> Array:
    """For each version, the age of the newest version that the tier had just before this one was there: what would have
    been lost at that moment if only this tier had been left. NaN for the first one.

    Where it is not known when a version was there, it counts as there when it was saved, so that the result is too
    small rather than too large.
    """
    tier, found = history.tiers[name], _unknown(history.seq)
    there = np.where(np.isnan(tier.arrived), np.where(np.isnan(tier.stored), math.nan, history.time), tier.arrived)
    rows = np.flatnonzero(~np.isnan(there) & ~np.isnan(history.time))
    rows = rows[np.argsort(there[rows], kind="stable")]
    if len(rows):
        newest = np.maximum.accumulate(history.time[rows])
        found[rows[1:]] = np.maximum(0.0, there[rows[1:]] - newest[:-1])
    return found


class Groups:
    """Groups of so many consecutive rows.

    Args:
        count: rows.
        points: groups, at most.
    """

    def __init__(self, count: int, points: int) -> None:
        self.size = max(1, math.ceil(count / points))
        self._starts = np.arange(0, count, self.size)
        self._count = count

    def axis(self, history: History) -> Axis:
        """The axis of a run."""
        ends = np.minimum(self._starts + self.size, self._count) - 1
        time = np.nan_to_num(np.maximum.accumulate(np.nan_to_num(history.time)))[ends] if self._count else ends
        return Axis(self.size, history.step[self._starts].tolist(), history.step[ends].tolist(), time.tolist())

    def sums(self, values: Array) -> Series:
        """The sum of each group; None where no value of it is known."""
        return [None if total is None else int(total) for total in self._reduced(np.add, np.nan_to_num(values), values)]

    def longest(self, values: Array) -> Series:
        """The largest value of each group; None where none is known."""
        return self._reduced(np.fmax, values, values)

    def means(self, values: Array) -> Series:
        """The mean of each group; None where no value is known."""
        known = self._reduced(np.add, (~np.isnan(values)).astype("f8"), values)
        total = self._reduced(np.add, np.nan_to_num(values), values)
        return [None if a is None or not b else a / b for a, b in zip(total, known, strict=True)]

    def counts(self, where: Array) -> Sequence[int]:
        """How many rows of each group are true."""
        found: list[int] = np.add.reduceat(where.astype("i8"), self._starts).tolist() if self._count else []
        return found

    def durations(self, values: Array) -> Durations:
        """What a column of seconds says."""
        known = values[~np.isnan(values)]
        total, some = float(known.sum()), bool(len(known))
        return Durations(
            self.means(values), self.longest(values), len(known), total,
            total / len(known) if some else None, float(known.max()) if some else None,
        )  # fmt: skip

    def _reduced(self, how: np.ufunc, values: Array, known: Array) -> list[float | None]:
        if not self._count:
            return []
        there = np.add.reduceat(~np.isnan(known), self._starts)
        found = how.reduceat(values, self._starts)
        return [value if some else None for value, some in zip(found.tolist(), there.tolist(), strict=True)]
