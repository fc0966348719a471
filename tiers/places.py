"""Two tiers in one place: each would delete what the other keeps, so they are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import combinations

from tierstate.manifest.errors import PolicyError, TierError

from .base import Place, Tier

log = logging.getLogger("tierstate")


def check_places(tiers: Sequence[Tier]) -> None:
    """Check that no two tiers lie in one place, and none within another, as far as their places are known.

    Reads no object. A tier that cannot be looked at now is left out.

    Raises:
        PolicyError: two do.
    """
    for (one, place), (other, its) in combinations(_places(tiers), 2):
        if place.overlaps(its):
            raise PolicyError(
                f"tiers.{one.name} and tiers.{other.name} lie in one place, or one within the other "
                f"({_shown(place)}, {_shown(its)}): each would delete what the other keeps; give each "
                "a place of its own"
            )


def _places(tiers: Sequence[Tier]) -> Iterator[tuple[Tier, Place]]:
    for tier in tiers:
        try:
            place = tier.place()
        except TierError as error:
            log.warning("%s: where it lies is not known: %s", tier.name, error)
            continue
        if place is not None:
            yield tier, place


def _shown(place: Place) -> str:
    kind, *names = place.paths[0]
    return "/" + "/".join(names) if kind == "path" else f"{kind}:{'/'.join(names)}"
