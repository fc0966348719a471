"""Placement: which tiers are due for a save, which leaves go to which tier, how each leaf is encoded, and what is kept.

Pure functions of the policy, the steps and the times of earlier saves; no I/O. `Routes` caches the results for as long
as a state keeps its paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstate.engine.packs.formats import NATIVE
from tierstate.manifest.arrays import Array
from tierstate.manifest.format.globs import matches, matches_any
from tierstate.manifest.format.layout import RAW
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.leaf_path import Path, encode_path, format_path
from tierstate.manifest.history.retention import BestVersions, RetentionPolicy
from tierstate.tiers.policy.models import AutoEvery, KeepKeys, MaxLagKeys
from tierstate.tiers.policy.policy import Policy, TierPolicy

T = TypeVar("T")


LastSave: TypeAlias = tuple[int, float]
"""Step, and time in seconds since 1970, of the newest save of this run that went to a tier."""


Cadence: TypeAlias = int | timedelta | AutoEvery | None
"""A tier's ``every``: steps, a time, a time that is chosen at run time, or every save."""


Mask: TypeAlias = npt.NDArray[np.bool_]


def due_tiers(
    policy: Policy,
    step: int,
    last: Mapping[str, LastSave | None],
    now: float,
    intervals: Mapping[str, timedelta] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Names of the tiers to which the save of this step goes, in the policy's order.

    A tier is due by its ``every``, and also where it would otherwise be further behind this save than its ``max_lag``.

    Args:
        last: the last save of this run to each tier, by the tier's name; None or no entry if there was none.
        now: the time in seconds, of the same clock as the times in ``last``.
        intervals: by tier with ``every: auto``, what was chosen for it.
    """
    return tuple(
        tier.name
        for tier in policy.tiers
        if is_due(intervals.get(tier.name, tier.every), step, last.get(tier.name), now)
        or is_too_far_behind(tier.max_lag, last.get(tier.name), step, now)
    )


def is_too_far_behind(bound: MaxLagKeys | None, last: LastSave | None, step: int, now: float) -> bool:
    """Whether a version is further behind the save of this step than a tier's ``max_lag`` allows.

    A version of a later step or time is from before a rollback, or from before the clock was set back. How far it is
    behind is not known, so it is too far.

    Args:
        bound: ``max_lag``; None allows everything.
        last: step and time of the version; None for no version, which is too far behind every save.
        now: the time of the save in seconds, of the same clock as that of ``last``.
    """
    if bound is None or last is None:
        return bound is not None
    steps, seconds = step - last[0], now - last[1]
    within = 0 <= steps <= (math.inf if bound.steps is None else bound.steps)
    within = within and (bound.seconds is None or 0 <= seconds <= bound.seconds)
    return not within


def is_due(every: Cadence, step: int, last: LastSave | None, now: float) -> bool:
    """Whether a tier with this interval (``every`` in the policy) takes the save of this step.

    By steps: the first save at or after each multiple of ``every``, and one whose step is not above that of the last,
    as after a rollback: without it the newest version there would be one that the training has abandoned, until the
    next multiple. By time: the first save at least ``every`` after the last one; also if the clock was set back,
    since the time between is then unknown. The first save of a run is always due. Of ``auto`` only a bound is known
    here: after ``max`` at the latest.
    """
    if every is None or last is None:
        return True
    if isinstance(every, AutoEvery):
        every = timedelta(seconds=every.max)
    last_step, last_time = last
    if isinstance(every, timedelta):
        return not 0 <= now - last_time < every.total_seconds()
    return step // every != last_step // every or step <= last_step


def entry_tiers(
    due: Sequence[T], persistent: Sequence[bool], healthy: Sequence[bool]
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Split the due tiers into entry tiers, written from the captured state, and cascade tiers, copied to later.

    Entry tiers are all tiers that are not persistent, and the first persistent one that is healthy. Unhealthy
    persistent tiers before that one are entry tiers too, so that they are tried again. If no persistent tier is
    healthy, all are entry tiers: which of them works again is unknown, and a cascade tier would have to wait for the
    entry tiers.

    Args:
        due: the tiers, or their names, in the policy's order.
        persistent: for each tier, whether its data survive the death of the host.
        healthy: for each tier, whether the last save to it succeeded.

    Returns:
        ``(entry, cascade)``, each in the given order.
    """
    lasting = [i for i, lasts in enumerate(persistent) if lasts]
    first = next((i for i in lasting if healthy[i]), lasting[-1] if lasting else -1)
    enters = [not lasts or i <= first for i, lasts in enumerate(persistent)]
    pairs = list(zip(due, enters, strict=True))
    return tuple(tier for tier, now in pairs if now), tuple(tier for tier, now in pairs if not now)


def rule_value(policy: Policy, key: str, path: Path) -> Any:
    """The value of a key in the first rule that matches a leaf and has that key; None if there is no such rule.

    Each key is looked up by itself, so that one rule may send the optimizer to fewer tiers and a later rule choose the
    codec of some of its leaves.
    """
    number = rule_index(policy, key, path)
    return None if number is None else getattr(policy.rules[number], key)


def rule_index(policy: Policy, key: str, path: Path) -> int | None:
    """The index of the first rule that matches a leaf and has this key; None if there is none."""
    rules = enumerate(policy.rules)
    return next((i for i, rule in rules if getattr(rule, key) is not None and matches(rule.match, path)), None)


def route_masks(policy: Policy, paths: Sequence[Path]) -> dict[str, Mask]:
    """Which leaves go to which tier.

    Returns:
        for each tier's name a bool mask of shape ``(len(paths),)``.
    """
    tiers = [rule_value(policy, "tiers", path) for path in paths]
    return {
        tier.name: np.fromiter((said is None or tier.name in said for said in tiers), np.bool_, len(tiers))
        for tier in policy.tiers
    }


def leaf_codecs(policy: Policy, tier: str, paths: Sequence[Path]) -> list[str]:
    """The codec of each leaf on a tier: from the rules, or else the tier's own.

    Raises:
        NotFound: the policy has no tier of that name.
    """
    default = policy.tier(tier).codec
    return [rule_value(policy, "codec", path) or default for path in paths]


def may_pickle(policy: Policy, globs: Sequence[str] = ()) -> Callable[[Path], bool]:
    """Returns a function: whether an object of unknown type may be pickled at a path, as a rule (``pickle: true``) or
    one of the globs says."""
    return lambda path: bool(rule_value(policy, "pickle", path)) or matches_any(globs, path)


def lossy_rules(policy: Policy) -> Callable[[Path], str]:
    """Returns a function: the lossy method for the tensor at a path, from the rules; an empty string for none."""
    if all(rule.lossy is None for rule in policy.rules):
        return lambda _path: ""
    return lambda path: rule_value(policy, "lossy", path) or ""


def retention_of(tier: TierPolicy) -> RetentionPolicy:
    """The retention policy of a tier (`keep`)."""
    return _keep(tier.keep, tier)


def rule_retention_of(policy: Policy, tier: TierPolicy) -> dict[str, RetentionPolicy]:
    """The retention policies that rules give for some leaves (`keep` in a rule), by glob, in the order of the rules."""
    found: dict[str, RetentionPolicy] = {}
    for rule in policy.rules:
        if rule.keep is not None:
            found.setdefault(rule.match, _keep(rule.keep, tier))
    return found


def _keep(said: KeepKeys, tier: TierPolicy) -> RetentionPolicy:
    tags = tier.persistent if said.tags is None else said.tags
    best = BestVersions(said.best.metric, said.best.mode, said.best.count) if said.best else None
    return RetentionPolicy(said.last, said.every, said.within, best, tags, said.all)


def rule_warnings(policy: Policy, paths: Sequence[Path]) -> list[str]:
    """What of a policy's rules has no effect on a state: rules that match no leaf, tiers to which no leaf goes.

    Args:
        paths: of all leaves of the state.
    """
    if not paths:
        return []
    tops = sorted({format_path(path[:1]) for path in paths if path})
    has = f"the state has {', '.join(tops[:8])}{' and more' if len(tops) > 8 else ''}"
    found = [
        f"rules.{i}: {rule.match!r} matches no leaf of the state; {has}"
        for i, rule in enumerate(policy.rules)
        if not any(matches(rule.match, path) for path in paths)
    ]
    empty = [name for name, mask in route_masks(policy, paths).items() if not mask.any()]
    return [*found, *(f"{name}: the rules send no leaf there, so it gets no save; {has}" for name in empty)]


class CadenceCount:
    """Counts the saves of a process that went to a tier with ``every``, to tell when it hardly ever is due.

    Args:
        tier: the tier's name.
        every: its ``every``.
    """

    def __init__(self, tier: str, every: int | timedelta) -> None:
        self._tier, self._every = tier, every
        self._made = self._due = self._firsts = 0
        self._first: LastSave | None = None
        self._last: LastSave = (0, 0.0)

    def add(self, step: int, time: float, *, due: bool, first: bool) -> None:
        """Count a save. ``due``: it goes to the tier; ``first``: only because the tier has no version yet."""
        self._first, self._last = self._first or (step, time), (step, time)
        self._made += 1
        self._due += due and not first
        self._firsts += due and first

    def warning(self) -> str:
        """What is wrong, and what to write: none of several saves was due. Empty if nothing is wrong."""
        if self._made < 2 or self._due or self._first is None:
            return ""
        steps, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        if isinstance(self._every, int):
            said, most = f"{self._every}", f"{max(1, steps // max(1, self._made - 1))}"
        else:
            said, most = f"{self._every.total_seconds():g}s", f"{max(1, int(seconds))}s"
        return (
            f"{self._tier}: {'but for the first, ' if self._firsts else ''}none of the {self._made} saves of this "
            f"process, steps {self._first[0]} to {self._last[0]} in {seconds:.3g} s, was due there by 'every: {said}'; "
            f"write a shorter one, as 'every: {most}', or 'max_lag: {{steps: N}}', if it should have had one"
        )


def enter_without_source(
    entry: Sequence[str], cascade: Sequence[str], masks: Mapping[str, Mask], sure: Collection[str]
) -> tuple[list[str], list[str]]:
    """Make a cascade tier an entry tier if it gets leaves that no reliable entry tier has to copy from.

    Args:
        entry, cascade: as returned by `entry_tiers`.
        masks: the leaves that go to each tier, from `route_masks`.
        sure: names of the tiers that most likely complete this save: persistent and healthy.

    Returns:
        ``(entry, cascade)`` after the change.
    """
    entered, copied = list(entry), []
    for name in cascade:
        there = np.any([masks[n] for n in entered if n in sure] or [np.zeros_like(masks[name])], axis=0)
        if np.any(masks[name] & ~there):
            entered.append(name)
        else:
            copied.append(name)
    return entered, copied


@dataclass(frozen=True, eq=False)
class Route:
    """Which leaves go to a tier, and how each is encoded.

    Attributes:
        leaves: ``(leaves,)`` of bool: which leaves go to the tier.
        codecs: for each leaf, the codec of the policy.
        format: the file format of the tier's packs, as named in the policy.
        rules: for each leaf, the index of the rule that gives its codec; None if the tier's default applies.
    """

    leaves: Array
    codecs: Sequence[str]
    format: str = NATIVE
    rules: Sequence[int | None] = ()

    @cached_property
    def raw(self) -> Array:
        """``(leaves,)`` of bool: which leaves are stored raw."""
        return np.array([codec == RAW for codec in self.codecs], bool)


class Routes:
    """The routes of a policy, cached for the last paths. Threads that share it must save states of the same paths.

    Args:
        policy: the policy with the rules.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: tuple[tuple[Leaf, ...], Mapping[str, Route]] | None = None

    def of(self, leaves: tuple[Leaf, ...]) -> Mapping[str, Route]:
        """The route to each tier of the policy."""
        last = self._last
        if last is not None and _same_paths(last[0], leaves):
            found = last[1]
        else:
            paths = [leaf.path for leaf in leaves]
            masks = route_masks(self._policy, paths)
            rules = [rule_index(self._policy, "codec", path) for path in paths]
            found = {
                name: Route(mask, leaf_codecs(self._policy, name, paths), self._policy.tier(name).format, rules)
                for name, mask in masks.items()
            }
        self._last = leaves, found
        return found


def _same_paths(one: tuple[Leaf, ...], other: tuple[Leaf, ...]) -> bool:
    """Whether the paths are the same. Compares encoded paths: 1 and True are equal to Python, but not to the rules."""
    pairs = zip(one, other, strict=True)
    return one is other or (
        len(one) == len(other) and all(a is b or encode_path(a.path) == encode_path(b.path) for a, b in pairs)
    )
