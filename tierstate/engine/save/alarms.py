"""Alarms: what the statistics of a save say is wrong with a state: NaN, leaves that stand still, norms that jump.

`LeafAlarms` compares each version with the one that this process saved before it (policy ``alarms``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import StateAlarm
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leaf_statistics import LeafColumns, changed_share, leaf_columns
from tierstate.tiers.policy.models import AlarmsKeys

MOVED = 3
"""Saves in a row in which a leaf has changed, before it is expected to change, and its norm to be steady."""


NAMED = 5
"""Leaves that the text of an alarm names."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong with a version.

    Attributes:
        kind: ``nonfinite``: NaN or infinities have entered; ``frozen``: leaves that have changed in every save before
            are now the same to the last bit; ``jump``: the norm of leaves is many times what it was, or a fraction.
        step, seq: of the version.
        leaves: paths of all leaves concerned, in the order of the state.
        text: what is wrong, and where.
    """

    kind: Literal["nonfinite", "frozen", "jump"]
    step: int
    seq: int
    leaves: tuple[str, ...]
    text: str


class LeafAlarms:
    """Looks at the versions that this process saves, in their order.

    Args:
        keys: the policy's ``alarms``.
    """

    def __init__(self, keys: AlarmsKeys) -> None:
        self._keys = keys
        self._last: tuple[Version, LeafColumns] | None = None
        self._moved: Array = np.zeros(0, "i8")
        self._untold: StateAlarm | None = None

    def look(self, version: Version) -> list[Alarm]:
        """What is wrong with a version, compared with the one before."""
        if self._keys.action == "off" or (now := leaf_columns(version)) is None:
            return []
        last, self._last = self._last, (version, now)
        share = None if last is None else changed_share(version, last[0])
        if last is None or share is None:
            self._moved = np.zeros(len(version.leaves), "i8")
            found = list(self._nonfinite(version, now, None))
        else:
            found = [
                *self._nonfinite(version, now, last[1]),
                *self._frozen(version, now, share),
                *self._jumps(version, now, last[1]),
            ]
            self._moved = np.where(share > 0, self._moved + 1, 0)
        if found and self._keys.action == "raise":
            head = version.head
            self._untold = StateAlarm(f"step {head.step} was saved, but {'; '.join(one.text for one in found)}")
        return found

    def tell(self) -> None:
        """Raise what was found since the last call, if the policy says so.

        Raises:
            StateAlarm: once for what was found.
        """
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    def _nonfinite(self, version: Version, now: LeafColumns, before: LeafColumns | None) -> Iterator[Alarm]:
        if not self._keys.nonfinite:
            return
        # Before the first save of a process nothing is known: infinities may be meant, as in the mask of an attention.
        bad = now.nan if before is None else now.nan + now.infinite
        was = np.zeros(len(bad), "i8") if before is None else before.nan + before.infinite
        if (rows := np.flatnonzero((bad > 0) & (was == 0))).size:
            first = int(rows[0])
            counts = f"{now.nan[first]} NaN and {now.infinite[first]} infinite of {now.elements[first]} elements"
            yield _alarm("nonfinite", version, rows, f"is not finite: {counts}")

    def _frozen(self, version: Version, now: LeafColumns, share: Array) -> Iterator[Alarm]:
        if not self._keys.frozen:
            return
        # Only floats: counters and masks may well stand still. NaN in `squares`: no float.
        rows = np.flatnonzero((share == 0) & (self._moved >= MOVED) & (now.squares == now.squares))
        if rows.size:
            yield _alarm("frozen", version, rows, "has not changed at all, as it had in each save before")

    def _jumps(self, version: Version, now: LeafColumns, before: LeafColumns) -> Iterator[Alarm]:
        if (jump := self._keys.jump) is None:
            return
        with np.errstate(all="ignore"):
            norm, was = np.sqrt(now.squares), np.sqrt(before.squares)
            finite = now.nan + now.infinite + before.nan + before.infinite == 0
            usual = finite & (self._moved >= MOVED) & (was > 0)
            rows = np.flatnonzero(usual & ((norm > jump * was) | (norm * jump < was)))
        if rows.size:
            first = int(rows[0])
            yield _alarm("jump", version, rows, f"has a norm of {norm[first]:.4g} after {was[first]:.4g}")


def _alarm(kind: Literal["nonfinite", "frozen", "jump"], version: Version, rows: Array, what: str) -> Alarm:
    names = tuple(version.leaves[row].name for row in rows.tolist())
    more = ", ".join(names[1:NAMED])
    if len(names) > NAMED:
        more += f" and {len(names) - NAMED} more"
    text = f"{names[0]} {what}" + (f" (so is {more})" if more else "")
    return Alarm(kind, version.head.step, version.head.seq, names, text)
