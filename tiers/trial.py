"""The trial: which codec brings a tier's bytes there soonest, decided purely from what a sample has shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from tierstate.manifest.layout import RAW

CLEARLY = 0.9
"""A codec that costs more work is taken where it needs at most this part of the time of one that costs less: what is
measured on a sample is never exact, and the cores have other things to do."""

EFFORT = {RAW: 0, "fast": 1, "small": 2}
"""The codecs that are tried, by how much work they are."""


class Outcome(NamedTuple):
    """What a codec made of a sample.

    Attributes:
        ratio: stored bytes per raw byte.
        speed: raw bytes that one thread encodes in a second of a core.
        pace: and in a second of the clock, while others need the cores too; infinite where nobody knows yet.
    """

    ratio: float
    speed: float
    pace: float = math.inf


AS_IT_IS = Outcome(1.0, math.inf)
"""Raw bytes."""


def seconds(outcome: Outcome, bandwidth: float, workers: int) -> float:
    """Seconds per raw byte on the way to a tier: workers encode side by side while the tier writes, so the slower of
    the two counts. Where the cores are busy with other things the workers do part of the chunks, and the tier gets the
    others raw meanwhile.

    Args:
        bandwidth: stored bytes per second that the tier takes.
        workers: threads that encode.
    """
    saved = max(0.0, 1 - outcome.ratio)
    parted = 1 / (bandwidth + (saved * outcome.pace * workers if saved else 0.0))
    return max(1 / (outcome.speed * workers), outcome.ratio / bandwidth, parted)


def choose(outcomes: Mapping[str, Outcome], bandwidth: float, workers: int) -> str:
    """The codec to take: raw, unless another one is clearly faster by `seconds`.

    Args:
        outcomes: of `EFFORT`'s codecs but raw, as far as they were tried.
    """
    found = {RAW: AS_IT_IS, **outcomes}

    def judged(codec: str) -> tuple[float, int]:
        return seconds(found[codec], bandwidth, workers) / CLEARLY ** EFFORT[codec], EFFORT[codec]

    return min(found, key=judged)
