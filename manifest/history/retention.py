"""Retention: which versions of a run a tier keeps, which of their leaves, and why. Pure functions without I/O.

A policy keeps the last N versions, one every N steps, those within a time, the best by a metric, and those with tags.
Rules may keep groups of leaves for another time than the rest (`LeafGroups`). Then a version stays with fewer of its
leaves: its record in that tier is replaced by one without the dropped leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstate.manifest.arrays import Array
from tierstate.manifest.format.globs import matches
from tierstate.manifest.format.layout import LayoutBuilder
from tierstate.manifest.format.leaf import TIED
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version

from .log import commit_id

OTHER_LEAVES = "**"
"""The group of the leaves that no rule with a ``keep`` matches."""


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


GroupMask: TypeAlias = NDArray[np.bool_]


class RetentionEntry(NamedTuple):
    """The facts about a version that retention uses.

    Attributes:
        seq, step, time: sequence number in the run, training step, and time of the save in seconds since 1970.
        metrics: its metadata: numbers by name, perhaps nested, and other values.
        tags: its tags.
        groups: which groups of its leaves the tier has: globs of rules with a ``keep``, and `OTHER_LEAVES`.
    """

    seq: int
    step: int
    time: float = 0.0
    metrics: Mapping[str, Any] = MappingProxyType({})
    tags: tuple[str, ...] = ()
    groups: tuple[str, ...] = (OTHER_LEAVES,)


@dataclass(frozen=True, slots=True)
class BestVersions:
    """Keep the best versions by a number in their metadata.

    Attributes:
        metric: the number's name. A name with dots is first looked up as a whole, then as keys of nested dicts.
        mode: ``min`` or ``max``: whether the lowest or the highest number is the best.
        count: how many versions to keep; of equal ones the newer.
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
class RetentionPolicy:
    """Which versions to keep; a version is kept if one of these conditions holds.

    Attributes:
        last: it is among the newest ``last`` versions.
        every: its step is the first at or after a multiple of ``every``; of two versions of that step the newer.
        within: it was saved in the last ``within`` seconds; see `decide_retention` for clocks that jump.
        best: it is among the best by a metric.
        tags: it has a tag.
        all: always.
    """

    last: int | None = None
    every: int | None = None
    within: float | None = None
    best: BestVersions | None = None
    tags: bool = False
    all: bool = False

    def __post_init__(self) -> None:
        if not all(0 <= (n or 0) < math.inf for n in (self.last, self.every, self.within)):
            found = f"last {self.last}, every {self.every}, within {self.within}"
            raise ValueError(f"keep: {found}: right are numbers above zero")
        if not (self.last or self.every or self.within or self.best or self.tags or self.all):
            raise ValueError("an empty keep would drop every version; say last, every, within, best, tags or all")


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Versions to keep with the reasons, and versions to drop, both by ascending sequence number.

    Attributes:
        keep: sequence number -> reasons. A reason that holds only for the leaves of a rule begins with the rule's glob.
        drop: sequence numbers of the versions to drop.
        thin: sequence number of a kept version that loses leaves -> the groups of leaves that it keeps.
    """

    keep: dict[int, tuple[str, ...]]
    drop: tuple[int, ...]
    thin: dict[int, tuple[str, ...]] = field(default_factory=dict)


def decide_retention(
    versions: Sequence[RetentionEntry],
    keep: RetentionPolicy | None,
    pinned: Collection[int] = (),
    now: float = math.inf,
    rules: Mapping[str, RetentionPolicy] = MappingProxyType({}),
) -> RetentionDecision:
    """Decide which versions a tier keeps, and which of their leaves.

    Args:
        versions: all versions of the run in the tier, in any order.
        keep: the policy; None keeps everything.
        pinned: sequence numbers of versions in use, which are always kept whole; or a mapping to the reasons.
        now: seconds since 1970.
        rules: glob -> the policy for the leaves that it matches, instead of ``keep``.

    The newest version is always kept, and so is the newest one that has leaves of a group.

    ``within`` and the clock: the time of a version is the latest time of it and of all versions before it. Its age is
    counted from the newest version, or from ``now`` if that is earlier. So a run that is paused loses no versions by
    age, a clock that is set back makes no version older, and a version with a time in the future counts as new. A clock
    that jumps ahead cannot be distinguished from a long pause.
    """
    ordered = sorted(versions, key=lambda mark: mark.seq)
    reasons: dict[int, list[str]] = {mark.seq: [] for mark in ordered}
    left: dict[int, set[str]] = {mark.seq: set() for mark in ordered}
    for mark in ordered:
        if why := _whole(mark, ordered[-1], pinned):
            reasons[mark.seq], left[mark.seq] = why, set(mark.groups)
    groups = dict.fromkeys((OTHER_LEAVES, *(group for mark in ordered for group in mark.groups)), keep)
    for group, terms in {**groups, **rules}.items():
        here = [mark for mark in ordered if group in mark.groups]
        found = [(mark.seq, f"newest with {group}") for mark in here[-1:] if mark is not ordered[-1]]
        for seq, reason in _wanted(here, terms, now):
            found.append((seq, reason if group == OTHER_LEAVES else f"{group}: {reason}"))
        for seq, reason in found:
            reasons[seq].append(reason)
            left[seq].add(group)
    return RetentionDecision(
        {seq: tuple(why) for seq, why in reasons.items() if why},
        tuple(seq for seq, why in reasons.items() if not why),
        {m.seq: g for m in ordered if left[m.seq] and (g := _still(m, left[m.seq])) != m.groups},
    )


def _whole(mark: RetentionEntry, newest: RetentionEntry, pinned: Collection[int]) -> list[str]:
    """Reasons to keep a version with all its leaves."""
    found = ["newest"] if mark is newest else []
    if mark.seq in pinned:
        found.append(pinned[mark.seq] if isinstance(pinned, Mapping) else "in use")
    return found


def _still(mark: RetentionEntry, left: Collection[str]) -> tuple[str, ...]:
    return tuple(group for group in mark.groups if group in left)


def _wanted(here: Sequence[RetentionEntry], keep: RetentionPolicy | None, now: float) -> Iterator[tuple[int, str]]:
    if keep is None or keep.all:
        yield from ((mark.seq, "all") for mark in here)
        return
    for rule in _RULES:
        yield from rule(here, keep, now)


def _last(here: Sequence[RetentionEntry], keep: RetentionPolicy, _now: float) -> Iterator[tuple[int, str]]:
    if keep.last:
        yield from ((mark.seq, f"last {keep.last}") for mark in here[-keep.last :])


def _first_of_each(here: Sequence[RetentionEntry], keep: RetentionPolicy, _now: float) -> Iterator[tuple[int, str]]:
    """The version with the lowest step in each window of ``every`` steps; of a step that was saved twice, the newer.

    The first that was saved would be wrong: where a training goes back and passes the same steps again, or begins anew,
    each window would keep what the training has abandoned, and drop what it has now.
    """
    if keep.every:
        first: dict[int, RetentionEntry] = {}
        for mark in here:
            found = first.setdefault(mark.step // keep.every, mark)
            if mark.step <= found.step:
                first[mark.step // keep.every] = mark
        yield from ((mark.seq, f"every {keep.every}") for mark in first.values())


def _lately(here: Sequence[RetentionEntry], keep: RetentionPolicy, now: float) -> Iterator[tuple[int, str]]:
    if keep.within and here:
        times = list(accumulate((mark.time for mark in here), max))
        since = min(now, times[-1]) - keep.within
        reason = f"within {format_duration(keep.within)}"
        yield from ((mark.seq, reason) for mark, time in zip(here, times, strict=True) if time >= since)


def _best(here: Sequence[RetentionEntry], keep: RetentionPolicy, _now: float) -> Iterator[tuple[int, str]]:
    if (best := keep.best) is not None:
        measured = [
            (value, mark.seq) for mark in here if (value := metric_value(mark.metrics, best.metric)) is not None
        ]
        measured.sort(key=lambda found: (found[0] if best.mode == "min" else -found[0], -found[1]))
        yield from ((seq, f"best {best.metric} ({best.mode})") for _, seq in measured[: best.count])


def _tagged(here: Sequence[RetentionEntry], keep: RetentionPolicy, _now: float) -> Iterator[tuple[int, str]]:
    if keep.tags:
        yield from ((mark.seq, f"tag {tag}") for mark in here for tag in mark.tags)


_RULES: tuple[Callable[[Sequence[RetentionEntry], RetentionPolicy, float], Iterator[tuple[int, str]]], ...] = (
    _last,
    _first_of_each,
    _lately,
    _best,
    _tagged,
)


def metric_value(metrics: Mapping[str, Any], metric: str) -> float | None:
    """The number with this name; None if there is none, or if it is text, a boolean, NaN or infinite."""
    found: Any = metrics
    for key in (metric,) if metric in metrics else metric.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, (int, float)) and not isinstance(found, bool) and -math.inf < found < math.inf:
        return found
    return None


def format_duration(seconds: float) -> str:
    """Seconds in the notation of a policy, in the largest unit that divides them."""
    for length, unit in _UNITS:
        if seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds}s"


class LeafGroups:
    """Groups leaves by the rule that says how long they are kept.

    Args:
        globs: globs of the rules, in the order in which they are tried. Leaves that none matches are in `OTHER_LEAVES`.

    Attributes:
        names: names of the groups, in that order.
    """

    def __init__(self, globs: Iterable[str] = ()) -> None:
        self.names = tuple(dict.fromkeys([*globs, OTHER_LEAVES]))
        self._last: tuple[tuple[str, ...], Array] | None = None

    def of(self, version: Version) -> GroupMask:
        """``(leaves, groups)`` of bool: the groups of each leaf; several if leaves of other groups are tied to it."""
        found: GroupMask = np.zeros((len(version.leaves), len(self.names)), bool)
        found[np.arange(len(version.leaves)), self._first(version)] = True
        for i, leaf in enumerate(version.leaves):
            root = version.leaf_index.get(str(leaf.spec.attrs.get("to"))) if leaf.spec.kind == TIED else None
            if root is not None:
                found[root] |= found[i]
        return found

    def _first(self, version: Version) -> Array:
        """``(leaves,)``: index of the first group that each leaf matches; cached while the paths stay the same."""
        paths = tuple(version.leaf_index)
        if self._last is None or self._last[0] != paths:
            self._last = paths, np.array([self._number(leaf.path) for leaf in version.leaves], "i8")
        return self._last[1]

    def _number(self, path: tuple[Any, ...]) -> int:
        others = self.names[:-1]
        return next((i for i, glob in enumerate(others) if matches(glob, path)), len(others))

    def present_in(self, record: Record) -> tuple[str, ...]:
        """Groups of which the record's tier has leaves; `OTHER_LEAVES` if no leaf has bytes."""
        if len(self.names) == 1:
            return self.names
        version, gone = record.version, dropped_groups(record.commit)
        present = np.zeros(len(version.leaves), bool)
        present[version.chunk_leaf[record.layout.present]] = True
        belongs = self.of(version)[present]
        # A leaf that is kept only for a tied leaf of another group does not count for its own, dropped group.
        own = np.flatnonzero(np.any(belongs[belongs.sum(axis=1) == 1], axis=0))
        shared = np.flatnonzero(np.any(belongs, axis=0))
        there = [n for i, n in enumerate(self.names) if i in own or (i in shared and n not in gone)]
        return tuple(there) or (OTHER_LEAVES,)

    def thin(self, record: Record, kept: Collection[str]) -> Record | None:
        """The record with only the leaves of the kept groups; None if there is nothing to remove."""
        version, layout = record.version, record.layout
        stays = np.flatnonzero(np.any(self.of(version)[:, [name in kept for name in self.names]], axis=1))
        rows = np.flatnonzero(layout.present & np.isin(version.chunk_leaf, stays))
        if len(rows) == int(layout.present.sum()):
            return None
        draft = LayoutBuilder(len(version.digests))
        draft.put_like(rows, layout, rows)
        gone = [*dropped_groups(record.commit), *(name for name in self.present_in(record) if name not in kept)]
        commit = {**record.commit, "id": commit_id(), "thinned": list(dict.fromkeys(gone))}
        return Record(version, draft.build(layout.pack_sizes), commit)


def dropped_groups(commit: Mapping[str, Any]) -> tuple[str, ...]:
    """Groups of leaves that retention has dropped from a version in a tier, from its commit section; often none."""
    found = commit.get("thinned")
    return tuple(str(name) for name in found) if isinstance(found, list) else ()
