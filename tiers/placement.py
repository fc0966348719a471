"""Placement, decided purely: which tiers are due, which leaves go there and how encoded, which tiers a save enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstate.manifest.leaf import Path, matches

from .policy import Policy, Rule

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
    before that is entered too, so that it is tried again. If none is healthy, the first is entered alone.

    Args:
        due: the tiers, or their names, in the policy's order.
        persistent: for each, whether it survives the host.
        healthy: for each, whether its last save there went well.

    Returns:
        ``(entry, cascade)``, each in the given order.
    """
    lasting = [i for i, lasts in enumerate(persistent) if lasts]
    first = next((i for i in lasting if healthy[i]), lasting[0] if lasting else -1)
    enters = [not lasts or i <= first for i, lasts in enumerate(persistent)]
    pairs = list(zip(due, enters, strict=True))
    return tuple(tier for tier, now in pairs if now), tuple(tier for tier, now in pairs if not now)


def rule_for(policy: Policy, path: Path) -> Rule | None:
    """The first rule that matches a leaf: it alone decides; None where none does."""
    return next((rule for rule in policy.rules if matches(rule.match, path)), None)


def route(policy: Policy, paths: Sequence[Path]) -> dict[str, Mask]:
    """For each tier of the policy, whether each leaf goes there.

    Returns:
        masks of shape ``(len(paths),)``, by the tier's name.
    """
    rules = [rule_for(policy, path) for path in paths]
    return {
        tier.name: np.fromiter((_goes(rule, tier.name) for rule in rules), np.bool_, len(rules))
        for tier in policy.tiers
    }


def _goes(rule: Rule | None, tier: str) -> bool:
    return rule is None or rule.tiers is None or tier in rule.tiers


def codec_of(policy: Policy, tier: str, path: Path) -> str:
    """How a leaf is encoded on a tier: by its rule, or else as the tier says.

    Raises:
        NotFound: the policy has no tier of that name.
    """
    return codecs_of(policy, tier, [path])[0]


def codecs_of(policy: Policy, tier: str, paths: Sequence[Path]) -> list[str]:
    """`codec_of` for each leaf."""
    default = policy.tier(tier).codec
    rules = [rule_for(policy, path) for path in paths]
    return [rule.codec if rule and rule.codec else default for rule in rules]


def may_pickle(policy: Policy) -> Callable[[Path], bool]:
    """Whether an object of no known type may be pickled at a path: where its rule says ``pickle: true``."""

    def allowed(path: Path) -> bool:
        rule = rule_for(policy, path)
        return rule is not None and rule.pickle

    return allowed
