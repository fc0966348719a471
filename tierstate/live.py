"""A look at a live tier: what it is, and which of its promises it keeps."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.policy import TierPolicy
from tierstate.tiers.registry import open_tier
from tierstate.tiers.testing import PROMISES

TRIAL = 32 << 20
"""Bytes written and read back for a rough bandwidth."""


@dataclass
class Finding:
    """What was found of one tier.

    Attributes:
        traits: what the tier says of itself, after it was used.
        kept, broken: promises of the contract that held, and those that did not with what happened.
        write, read: bytes per second of one object, durability included; None where it could not be tried.
        error: why the tier could not be looked at at all.
    """

    name: str
    type: str
    traits: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    write: float | None = None
    read: float | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the tier can be relied upon."""
        return not self.error and not self.broken


def look_at(spec: TierPolicy) -> Finding:
    """Open a tier, try its promises under a scratch prefix, measure it roughly, and remove what was written."""
    finding = Finding(spec.name, spec.type)
    try:
        tier = open_tier(spec.name, spec.type, spec.options)
    except (TierstateError, ImportError, ValueError) as error:
        finding.error = str(error)
        return finding
    prefix = f"scratch/{uuid.uuid4().hex[:12]}"
    try:
        list(tier.list(prefix))
        _try_promises(tier, prefix, finding)
        finding.write, finding.read = _bandwidth(tier, f"{prefix}/bandwidth")
    except TierstateError as error:
        finding.error = str(error)
    finally:
        _clear(tier, prefix, finding)
        finding.traits = asdict(tier.traits)
        tier.close()
    return finding


def _try_promises(tier: Tier, prefix: str, finding: Finding) -> None:
    for number, (name, check) in enumerate(PROMISES):
        try:
            check(tier, f"{prefix}/{number}")
        except (AssertionError, TierstateError, ValueError) as error:
            finding.broken[name] = str(error) or type(error).__name__
        else:
            finding.kept.append(name)


def _bandwidth(tier: Tier, key: str) -> tuple[float, float]:
    data = empty_buffer(TRIAL)
    data.random_()
    start = time.monotonic()
    tier.put(key, data)
    written = time.monotonic()
    tier.read(key, [Range(0, data)])
    return TRIAL / (written - start), TRIAL / (time.monotonic() - written)


def _clear(tier: Tier, prefix: str, finding: Finding) -> None:
    try:
        for key in list(tier.list(prefix)):
            tier.delete(key)
    except TierstateError as error:
        finding.error = finding.error or f"scratch objects under {prefix} could not be removed: {error}"
