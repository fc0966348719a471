"""A look at a live tier: what it is, which of its promises it keeps, how fast it is, and what should be done."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import AccessDenied, TierError, TierFull, TierstateError, TierUnavailable
from tierstate.manifest.log import runs
from tierstate.tiers.base import Tier
from tierstate.tiers.limited import Limited
from tierstate.tiers.object_errors import scrub, secrets_in
from tierstate.tiers.policy import TierPolicy
from tierstate.tiers.registry import open_tier
from tierstate.tiers.testing import PROMISES

from .trial import MOST, latency, speed

Told = Callable[[str], None]
"""Takes what is being done now."""

SPEED = "moves long objects"
"""What is broken where the trial of speed fails."""

REFUSALS = (TierFull, AccessDenied, TierUnavailable)
"""Errors that say nothing about a promise, but that it could not be tried; what is broken begins with their name."""


@dataclass
class Finding:
    """What was found of one tier.

    Attributes:
        name, type: as in the policy.
        reached: whether the tier could be opened, and one object put, listed, read and deleted.
        traits: what the tier says of itself, after it was used.
        kept, broken: promises of the contract that held, and those that did not with what happened.
        put_seconds, list_seconds: of putting a small object, and of listing a few.
        write, read: bytes per second of one long object, durability included; None where it could not be tried.
        moved: bytes of that object.
        room: bytes that may still be put there; None where nobody knows.
        occupied: whether it holds versions already.
        limits: what the policy bounds: ``bandwidth``, ``operations``, ``retries``.
        error: why the tier could not be looked at, or not to the end.
        hung: whether it did not come to an end in the time given.
        problems: what must be mended, with how.
        notes: what is worth knowing.
    """

    name: str
    type: str
    reached: bool = False
    traits: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    put_seconds: float | None = None
    list_seconds: float | None = None
    write: float | None = None
    read: float | None = None
    moved: int = 0
    room: int | None = None
    occupied: bool = False
    limits: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    hung: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the tier can be relied upon."""
        return not (self.error or self.broken or self.problems)


def look_at(spec: TierPolicy, told: Told = lambda _doing: None) -> Finding:
    """Open a tier, try its promises under a scratch prefix, measure it, and remove what was written.

    Promises are tried on the tier itself, without the policy's limits and retries, which would hide what it does; its
    speed is measured within them.
    """
    finding = Finding(spec.name, spec.type)
    finding.limits = {name: found for name in ("bandwidth", "operations", "retries") if (found := getattr(spec, name))}
    told("open")
    try:
        tier = open_tier(spec.name, spec.type, spec.options)
    except TierstateError as error:
        finding.error = str(error)
        return finding
    except Exception as error:
        # Whatever a stranger's constructor raises, which may say what it was given.
        finding.error = scrub(f"{type(error).__name__}: {error}", _secrets(spec))
        return finding
    prefix = f"scratch/{uuid.uuid4().hex[:12]}"
    try:
        told("reach")
        _reach(tier, prefix)
        finding.reached = True
        _try_promises(tier, prefix, finding, told)
        told("measure")
        _measure(tier, spec, prefix, finding)
    except (TierstateError, OSError) as error:
        finding.error = str(error)
    finally:
        with suppress(BrokenPipeError):  # whoever was told may be gone: what was written goes all the same
            told("clear")
        _clear(tier, prefix, finding)
        finding.traits = asdict(tier.traits)
        tier.close()
    return finding


def _secrets(spec: TierPolicy) -> frozenset[str]:
    """What was given to a tier and must not be shown: all but the place, of which only names and passwords."""
    places = ("url", "path")
    return secrets_in(
        str(spec.options.get("url", "")), {key: value for key, value in spec.options.items() if key not in places}
    )


def _reach(tier: Tier, prefix: str) -> None:
    """One object there and back: what is wrong with the place itself is told once, and not by every promise."""
    key = f"{prefix}/first"
    tier.put(key, as_buffer(b"tierstate"))
    list(tier.list(prefix))
    tier.get(key)
    tier.delete(key)


def _try_promises(tier: Tier, prefix: str, finding: Finding, told: Told) -> None:
    for number, (name, check) in enumerate(PROMISES):
        told(name)
        try:
            check(tier, f"{prefix}/{number}")
        except Exception as error:
            # Whatever a stranger's tier raises: that is what was found.
            plain = isinstance(error, (AssertionError, TierError)) and not isinstance(error, REFUSALS)
            kind = "" if plain else f"{type(error).__name__}: "
            finding.broken[name] = kind + (str(error) or "nothing said")
        else:
            finding.kept.append(name)


def _measure(tier: Tier, spec: TierPolicy, prefix: str, finding: Finding) -> None:
    finding.room = tier.room()
    finding.occupied = bool(runs(tier))
    paced = Limited(tier, bandwidth=spec.bandwidth, operations=spec.operations)
    try:
        calls = latency(paced, f"{prefix}/trial")
        finding.put_seconds, finding.list_seconds = calls.put, calls.list
        # A quarter at most: others may be writing there too.
        moved = speed(paced, f"{prefix}/trial", MOST if finding.room is None else min(MOST, finding.room // 4))
    except Exception as error:
        finding.broken[SPEED] = str(error) or type(error).__name__
        return
    finding.write, finding.read, finding.moved = moved.write, moved.read, moved.nbytes


def _clear(tier: Tier, prefix: str, finding: Finding) -> None:
    try:
        for key in list(tier.list(prefix)):
            tier.delete(key)
    except TierstateError as error:
        finding.error = finding.error or f"scratch objects under {prefix} could not be removed: {error}"
