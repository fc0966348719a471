"""Retention: which versions of a run a tier keeps, which of their leaves, and why. Pure: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

EVERYTHING = "**"
"""The group of the leaves that no rule's ``keep`` is for."""

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


class Mark(NamedTuple):
    """What retention needs to know of a version.

    Attributes:
        seq, step, time: its place in the run, the training step, and when it was saved, in seconds since 1970.
        metrics: what was saved with it: numbers by name, perhaps nested, and whatever else is there.
        tags: names given to it.
        groups: which groups of its leaves the tier has: the globs of rules with a ``keep``, and EVERYTHING.
    """

    seq: int
    step: int
    time: float = 0.0
    metrics: Mapping[str, Any] = MappingProxyType({})
    tags: tuple[str, ...] = ()
    groups: tuple[str, ...] = (EVERYTHING,)


@dataclass(frozen=True, slots=True)
class Best:
    """The best versions by a number that was saved with them.

    Attributes:
        metric: the number's name; dots lead into what is nested, unless the whole name is there.
        mode: whether less or more is better: ``min``, ``max``.
        count: how many versions; of equal ones the newer.
    """

    metric: str
    mode: Literal["min", "max"]
    count: int = 1

    def __post_init__(self) -> None:
        if not self.metric or self.mode not in ("min", "max") or self.count < 1:
            raise ValueError(
                f"best: {self.metric!r}, {self.mode!r}, {self.count}: right is a name, min or max, 1 or more"
            )


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep; a version is kept for any one of these reasons.

    Attributes:
        last: the newest so many versions.
        every: the first version at or after each multiple of so many steps.
        within: those saved in the last so many seconds; see `decide` for what that means under a clock that jumps.
        best: the best ones by a metric.
        tags: those that have a tag.
        all: everything.
    """

    last: int | None = None
    every: int | None = None
    within: float | None = None
    best: Best | None = None
    tags: bool = False
    all: bool = False

    def __post_init__(self) -> None:
        if not all(0 <= (n or 0) < math.inf for n in (self.last, self.every, self.within)):
            found = f"last {self.last}, every {self.every}, within {self.within}"
            raise ValueError(f"keep: {found}: right are numbers above zero")
        if not (self.last or self.every or self.within or self.best or self.tags or self.all):
            raise ValueError("an empty keep would drop every version; say last, every, within, best, tags or all")


@dataclass(frozen=True, slots=True)
class Decision:
    """Kept versions with their reasons, and those to drop, both by rising sequence number.

    Attributes:
        keep: the reasons of each. Those that hold for the leaves of a rule only begin with the rule's glob.
        drop: versions that go.
        thin: of those that stay, the ones that lose leaves, and the groups that they keep.
    """

    keep: dict[int, tuple[str, ...]]
    drop: tuple[int, ...]
    thin: dict[int, tuple[str, ...]] = field(default_factory=dict)


def decide(
    versions: Sequence[Mark],
    keep: Keep | None,
    pinned: Collection[int] = (),
    now: float = math.inf,
    rules: Mapping[str, Keep] = MappingProxyType({}),
) -> Decision:
    """Which versions stay, and which of their leaves.

    Args:
        versions: all versions of the run in the tier, in any order.
        keep: the policy; None keeps everything.
        pinned: sequence numbers that are in use and stay, whole, whatever the policy says; perhaps with the reason of
            each.
        now: seconds since 1970.
        rules: by glob, what is kept of the leaves that it is for, in place of ``keep``.

    The newest version always stays, and so does the newest one that has leaves of a group.

    ``within`` and the clock: a version counts as saved when its clock, or that of any version before it, said so,
    whichever is later. Its age is counted from the newest version, or from ``now`` if that is earlier. So a run that
    stands still loses nothing by that; a clock that falls back makes nothing older; and what seems to come from the
    future is new. A clock that jumps ahead cannot be told from a long pause.
    """
    ordered = sorted(versions, key=lambda mark: mark.seq)
    reasons: dict[int, list[str]] = {mark.seq: [] for mark in ordered}
    left: dict[int, set[str]] = {mark.seq: set() for mark in ordered}
    for mark in ordered:
        if why := _whole(mark, ordered[-1], pinned):
            reasons[mark.seq], left[mark.seq] = why, set(mark.groups)
    groups = dict.fromkeys((EVERYTHING, *(group for mark in ordered for group in mark.groups)), keep)
    for group, terms in {**groups, **rules}.items():
        here = [mark for mark in ordered if group in mark.groups]
        found = [(mark.seq, f"newest with {group}") for mark in here[-1:] if mark is not ordered[-1]]
        for seq, reason in _wanted(here, terms, now):
            found.append((seq, reason if group == EVERYTHING else f"{group}: {reason}"))
        for seq, reason in found:
            reasons[seq].append(reason)
            left[seq].add(group)
    return Decision(
        {seq: tuple(why) for seq, why in reasons.items() if why},
        tuple(seq for seq, why in reasons.items() if not why),
        {m.seq: g for m in ordered if left[m.seq] and (g := _still(m, left[m.seq])) != m.groups},
    )


def _whole(mark: Mark, newest: Mark, pinned: Collection[int]) -> list[str]:
    """Reasons for which all of a version stays."""
    found = ["newest"] if mark is newest else []
    if mark.seq in pinned:
        found.append(pinned[mark.seq] if isinstance(pinned, Mapping) else "in use")
    return found


def _still(mark: Mark, left: Collection[str]) -> tuple[str, ...]:
    return tuple(group for group in mark.groups if group in left)


def _wanted(here: Sequence[Mark], keep: Keep | None, now: float) -> Iterator[tuple[int, str]]:
    if keep is None or keep.all:
        yield from ((mark.seq, "all") for mark in here)
        return
    for rule in _RULES:
        yield from rule(here, keep, now)


def _last(here: Sequence[Mark], keep: Keep, _now: float) -> Iterator[tuple[int, str]]:
    if keep.last:
        yield from ((mark.seq, f"last {keep.last}") for mark in here[-keep.last :])


def _first_of_each(here: Sequence[Mark], keep: Keep, _now: float) -> Iterator[tuple[int, str]]:
    """The first version in each window of ``every`` steps; a step saved again later stands behind the first."""
    if keep.every:
        first: dict[int, int] = {}
        for mark in here:
            first.setdefault(mark.step // keep.every, mark.seq)
        yield from ((seq, f"every {keep.every}") for seq in first.values())


def _lately(here: Sequence[Mark], keep: Keep, now: float) -> Iterator[tuple[int, str]]:
    if keep.within and here:
        times = list(accumulate((mark.time for mark in here), max))
        since = min(now, times[-1]) - keep.within
        reason = f"within {duration(keep.within)}"
        yield from ((mark.seq, reason) for mark, time in zip(here, times, strict=True) if time >= since)


def _best(here: Sequence[Mark], keep: Keep, _now: float) -> Iterator[tuple[int, str]]:
    if (best := keep.best) is not None:
        measured = [(value, mark.seq) for mark in here if (value := measure(mark.metrics, best.metric)) is not None]
        measured.sort(key=lambda found: (found[0] if best.mode == "min" else -found[0], -found[1]))
        yield from ((seq, f"best {best.metric} ({best.mode})") for _, seq in measured[: best.count])


def _tagged(here: Sequence[Mark], keep: Keep, _now: float) -> Iterator[tuple[int, str]]:
    if keep.tags:
        yield from ((mark.seq, f"tag {tag}") for mark in here for tag in mark.tags)


_RULES: tuple[Callable[[Sequence[Mark], Keep, float], Iterator[tuple[int, str]]], ...] = (
    _last,
    _first_of_each,
    _lately,
    _best,
    _tagged,
)


def measure(metrics: Mapping[str, Any], metric: str) -> float | None:
    """The number of that name; None where there is none: text, a boolean, NaN and infinity measure nothing."""
    found: Any = metrics
    for key in (metric,) if metric in metrics else metric.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, (int, float)) and not isinstance(found, bool) and -math.inf < found < math.inf:
        return found
    return None


def duration(seconds: float) -> str:
    """Seconds as a policy says them, in the largest unit that fits."""
    for length, unit in _UNITS:
        if seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds}s"
