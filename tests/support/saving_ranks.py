"""Ranks as threads that save together, the tiers that they see, and what becomes of their saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tierstate as ts
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import RankFailed
from tierstate.tiers.registry import open_tier

from .checkpointer_worlds import policy, tier
from .thread_teams import together

CALM = Timeouts(timeout=100.0, silence=20.0)


def ranks(size: int, function: Callable[[Team], Any], **more: Any) -> list[Any]:
    """What each rank gave; the first error of any is raised."""
    found = together(size, function, timeouts=CALM, **more)
    errors = [one for one in found if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, RankFailed)):  # which is what others caused
        raise error
    return found


def nvme(place: Path, host: int = 0, **tiers: Any) -> ts.Policy:
    """A disk per host, and a tier for all."""
    return policy({"nvme": tier("nvme", place / f"host{host}"), "lustre": tier("lustre", place, **tiers)})


def at(place: Path, kind: str = "lustre") -> Any:
    """A handle of its own on a tier."""
    keys = tier(kind, place)
    return open_tier(kind, keys.pop("type"), keys)


def told(save: ts.Save) -> str:
    """What becomes of a save: the name of the first tier's error; nothing where it arrived everywhere."""
    errors = []
    for name in save.tiers:
        try:
            save.wait(name)
        except ts.TierstateError as error:
            errors.append(type(error).__name__)
    return errors[0] if errors else ""


def saved_alike(place: Path, states: Callable[[int, int], dict[str, Any]], steps: int) -> list[list[str]]:
    """Save and wait, step by step; what each rank was told of each."""

    def rank(team: Team) -> list[str]:
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            return [told(ckpt.save(states(team.rank, step), step=step)) for step in range(steps)]

    return ranks(2, rank)
