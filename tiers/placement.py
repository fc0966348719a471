"""Placement, decided purely: which tiers are due, which leaves go there and how encoded, which tiers a save enters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstate.manifest.leaf import Path, matches

from .policy import Policy

T = TypeVar("T")

Last: TypeAlias = tuple[int, float]
"""Step and time (in seconds) of the newest save of this run that went to a tier."""

Mask: TypeAlias = npt.NDArray[np.bool_]


def due(policy: Policy, step: int, last: Mapping[str, Last | None], now: float) -> tuple[str, ...]:
    """Names of the tiers to which the save of this step goes, in the policy's order.

    Args:
        last: what went to each tier last; a tier that is not in it, or None, has had nothing of this run.
        now: seconds, of the clock that ``last`` was told by.
    """
    return tuple(tier.name for tier in policy.tiers if is_due(tier.every, step, last.get(tier.name), now))


def is_due(every: int | timedelta | None, step: int, last: Last | None, now: float) -> bool:
    """Whether a tier of this cadence takes the save of this step.

    By steps: the first save at or after each multiple; a step that fell back behind the last one's multiple, as after
    a rollback, counts as the first. By time: the first save so long after the last one; also when the clock was set
    back, as nobody knows then how long it was. The first save of a run is always due.
    """
    if every is None or last is None:
        return True
    last_step, last_time = last
    if isinstance(every, timedelta):
        return not 0 <= now - last_time < every.total_seconds()
    return step // every != last_step // every


def entry_tiers(
    due: Sequence[T], persistent: Sequence[bool], healthy: Sequence[bool]
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Parts the due tiers into those that are written from the captured state, and those that are copied to later.

    A save enters every tier that is not persistent, and the first persistent one that is healthy. An unhealthy one
    before that is entered too, so that it is tried again. If none is healthy, all are entered: nobody can tell which
    one is back, and a tier that is only ever copied to would wait for the others.

    Args:
        due: the tiers, or their names, in the policy's order.
        persistent: for each, whether it survives the host.
        healthy: for each, whether its last save there went well.

    Returns:
        ``(entry, cascade)``, each in the given order.
    """
    lasting = [i for i, lasts in enumerate(persistent) if lasts]
    first = next((i for i in lasting if healthy[i]), lasting[-1] if lasting else -1)
    enters = [not lasts or i <= first for i, lasts in enumerate(persistent)]
    pairs = list(zip(due, enters, strict=True))
    return tuple(tier for tier, now in pairs if now), tuple(tier for tier, now in pairs if not now)


def decided(policy: Policy, key: str, path: Path) -> Any:
    """What the first rule that matches a leaf and has this key says; None where none does.

    Rules are asked key by key, so that one rule may send the optimizer to fewer tiers and a later one choose the codec
    of some of its leaves.
    """
    number = deciding(policy, key, path)
    return None if number is None else getattr(policy.rules[number], key)


def deciding(policy: Policy, key: str, path: Path) -> int | None:
    """The number of the first rule that matches a leaf and has this key; None where there is none."""
    rules = enumerate(policy.rules)
    return next((i for i, rule in rules if getattr(rule, key) is not None and matches(rule.match, path)), None)


def route(policy: Policy, paths: Sequence[Path]) -> dict[str, Mask]:
    """For each tier of the policy, whether each leaf goes there.

    Returns:
        masks of shape ``(len(paths),)``, by the tier's name.
    """
    tiers = [decided(policy, "tiers", path) for path in paths]
    return {
        tier.name: np.fromiter((said is None or tier.name in said for said in tiers), np.bool_, len(tiers))
        for tier in policy.tiers
    }


def codecs_of(policy: Policy, tier: str, paths: Sequence[Path]) -> list[str]:
    """How each leaf is encoded on a tier: by the rules, or else as the tier says.

    Raises:
        NotFound: the policy has no tier of that name.
    """
    default = policy.tier(tier).codec
    return [decided(policy, "codec", path) or default for path in paths]


def may_pickle(policy: Policy) -> Callable[[Path], bool]:
    """Whether an object of no known type may be pickled at a path: where a rule says ``pickle: true``."""
    return lambda path: bool(decided(policy, "pickle", path))


def lossy_methods(policy: Policy) -> Callable[[Path], str]:
    """By which method the tensor at a path is saved with fewer bits, as the rules say; empty for none."""
    if all(rule.lossy is None for rule in policy.rules):
        return lambda _path: ""
    return lambda path: decided(policy, "lossy", path) or ""


def able_to_cascade(
    entry: Sequence[str], cascade: Sequence[str], masks: Mapping[str, Mask], sure: Collection[str]
) -> tuple[list[str], list[str]]:
    """A tier to which rules send leaves that no sure entry tier gets cannot be copied to: it is entered as well.

    Args:
        entry, cascade: as `entry_tiers` has them.
        masks: the leaves that go to each tier.
        sure: tiers that are likely to have what a save brings them: persistent, and healthy.
    """
    entered, copied = list(entry), []
    for name in cascade:
        there = np.any([masks[n] for n in entered if n in sure] or [np.zeros_like(masks[name])], axis=0)
        if np.any(masks[name] & ~there):
            entered.append(name)
        else:
            copied.append(name)
    return entered, copied
