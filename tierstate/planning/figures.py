"""The figures that a plan is made from: of a state, of tiers, and of a run that has been saved before."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from tierstate.engine.cadence import Level
from tierstate.engine.events import Event
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.leaf_path import Path
from tierstate.run import Run
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.registry import open_tier
from tierstate.tiers.units import parse_rate, parse_size
from tierstate.tiers.wrappers.limit import BURST

from .model import TierModel

WEIGHTS = 2
"""Bytes for each parameter of a model: 16 bit."""


ADAM = 12
"""Bytes for each parameter in Adam's state: a copy in 32 bit, and two moments (MLPerf Storage counts so)."""


_COUNTS = {"m": 10**6, "b": 10**9, "t": 10**12}


_PARAMETERS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([mbt])", re.IGNORECASE)


_NEWEST = 64
"""Versions and events of a run that figures are medians of."""


class Speed(NamedTuple):
    """Bytes per second; of each host for a tier that hosts have to themselves, else of the whole job."""

    write: float
    read: float


@dataclass(frozen=True)
class RunFigures:
    """What is known of a run that has been saved before.

    Attributes:
        leaves: paths and bytes.
        step: seconds of a step; None if it has fewer than two versions.
        save_every: steps between two saves; None likewise.
        capture: bytes per second at which saves let the training go on; None if no event says.
        speeds: of tiers, for the whole job, as far as events say.
    """

    leaves: tuple[tuple[Path, int], ...]
    step: float | None
    save_every: int | None
    capture: float | None
    speeds: Mapping[str, Speed] = field(default_factory=dict)


def parse_state(text: str) -> tuple[tuple[Path, int], ...]:
    """The leaves of a state: of a model of so many parameters that Adam trains in mixed precision (``70b``), or of so
    many bytes in all, half model and half optimizer (``40GiB``).

    Raises:
        ValueError: it is neither.
    """
    found = _PARAMETERS.fullmatch(text.strip())
    if found:
        count = int(float(found[1]) * _COUNTS[found[2].lower()])
        weights, adam = count * WEIGHTS, count * ADAM
        nbytes = weights + adam
    else:
        try:
            nbytes = parse_size(text)
        except ValueError as error:
            raise ValueError(
                f"--state {text!r}: right are a number of parameters, as in 70b, or of bytes, as in 40GiB"
            ) from error
        weights = nbytes * WEIGHTS // (WEIGHTS + ADAM)
        adam = nbytes - weights
    if not nbytes:
        raise ValueError(f"--state {text!r} is nothing: right are a number of parameters, as in 70b, or of bytes")
    third = adam // 3
    return (
        (("model", "layers.0.weight"), weights),
        (("optimizer", "state", 0, "exp_avg"), third),
        (("optimizer", "state", 0, "exp_avg_sq"), third),
        (("optimizer", "state", 0, "master"), adam - 2 * third),
    )


def parse_speeds(texts: Iterable[str], policy: Policy) -> dict[str, Speed]:
    """``TIER=WRITE`` or ``TIER=WRITE:READ``, as in ``nvme=2GiB/s:3GiB/s``, by tier.

    Raises:
        ValueError: one is not so, or names no tier.
    """
    found = {}
    for text in texts:
        name, _, rates = text.partition("=")
        write, _, read = rates.partition(":")
        try:
            found[policy.tier(name).name] = Speed(parse_rate(write), parse_rate(read or write))
        except ValueError as error:
            raise ValueError(
                f"--speed {text!r}: {error}; right is TIER=WRITE:READ, as in nvme=2GiB/s:3GiB/s"
            ) from error
    return found


def levels_of(policy: Policy) -> dict[str, tuple[Level, bool]]:
    """What each tier survives, and whether it is scarce, as it says itself; its storage is not touched."""
    found = {}
    for tier in policy.tiers:
        found[tier.name] = Level(tier.name, tier.persistent, "site" if tier.persistent else "process"), False
        # Whatever a plug-in raises: its class has said whether it persists.
        with suppress(Exception), closing(open_tier(tier.name, tier.type, tier.options)) as opened:
            traits = opened.traits
            found[tier.name] = Level(tier.name, traits.persistent, traits.shared), traits.scarce
    return found


def tier_models(
    policy: Policy,
    hosts: int,
    processes: int,
    capture: float,
    speeds: Mapping[str, Speed],
    fixed: Mapping[str, float],
    whole: Collection[str] = (),
) -> list[TierModel]:
    """The policy's tiers as numbers for the whole job.

    Args:
        processes: of each host.
        capture: bytes per second of the whole job into memory, which tiers in memory are as fast as.
        speeds: by tier; without one, its ``bandwidth`` in the policy counts.
        fixed: seconds that each version takes besides its bytes, by tier.
        whole: tiers whose speed is of the whole job, though hosts have them to themselves.

    Raises:
        ValueError: of a tier no speed is known.
    """
    levels, models, unknown = levels_of(policy), [], []
    for tier in policy.tiers:
        level, scarce = levels[tier.name]
        speed = speeds.get(tier.name)
        if speed is None and not level.persistent:
            speed = Speed(capture, capture)
        elif speed is not None and level.shared != "site" and tier.name not in whole:
            speed = Speed(speed.write * hosts, speed.read * hosts)
        peak = math.inf if speed is None else min(speed)
        speed = _limited(tier, speed, hosts * processes)
        if speed is None:
            unknown.append(tier.name)
            continue
        models.append(
            TierModel(
                level,
                speed.write,
                speed.read,
                fixed.get(tier.name, 0.0),
                scarce,
                BURST if tier.bandwidth else 0.0,
                peak,
            )
        )
    if unknown:
        raise ValueError(
            f"the speed of {', '.join(unknown)} is not known: say --speed {unknown[0]}=WRITE:READ, as in 2GiB/s:3GiB/s "
            "(of each host, or of the whole job where all hosts share it), or --measure where the tiers can be reached"
        )
    return models


def _limited(tier: TierPolicy, speed: Speed | None, processes: int) -> Speed | None:
    """Within the tier's ``bandwidth``, which each process has."""
    if tier.bandwidth is None:
        return speed
    most = float(tier.bandwidth) * processes
    return Speed(most, most) if speed is None else Speed(min(most, speed.write), min(most, speed.read))


def figures_of(run: Run) -> RunFigures:
    """The figures of a run, from its newest versions and, if the policy has ``metrics: {events: true}``, its events.

    Raises:
        NotFound: it has no version.
    """
    versions = [one for one in run.versions() if not one.unreadable or one.id][-_NEWEST:]
    leaves = tuple((one.path, one.nbytes) for one in run.located() if one.nbytes)
    pairs = [
        (later.step - one.step, later.time - one.time)
        for one, later in pairwise(versions)
        if later.step > one.step and later.time > one.time
    ]
    events: Sequence[Event] = ()
    with suppress(TierstateError):  # no tier can be read: versions have said enough
        events = run.events()
    saved = [event for event in events if event.kind == "saved"]
    steps = [one.step for one in saved[-_NEWEST:] if one.step is not None]
    gaps = [b - a for a, b in pairwise(steps) if b > a] or [gap for gap, _ in pairs]
    # A save that is due in no tier copies nothing, and is over at once.
    copied = {event.seq for event in events if event.kind == "captured"}
    blocked = median([event.seconds or 0.0 for event in saved if event.seq in copied][-_NEWEST:] or [0.0])
    return RunFigures(
        leaves=leaves,
        step=median(seconds / gap for gap, seconds in pairs) if pairs else None,
        save_every=int(median(gaps)) if gaps else None,
        capture=sum(nbytes for _, nbytes in leaves) / blocked if blocked else None,
        speeds=_speeds(events),
    )


def _speeds(events: Iterable[Event]) -> dict[str, Speed]:
    """Of tiers to which versions were copied or written: bytes of the state that go there per second of a version."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event.kind in ("committed", "cascaded") and event.raw and event.seconds:
            found.setdefault(event.tier, []).append(event.raw / event.seconds)
    return {name: Speed(*2 * (median(rates[-_NEWEST:]),)) for name, rates in found.items()}
