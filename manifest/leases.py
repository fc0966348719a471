"""Leases: what keeps a version of a run in a tier from being dropped."""

from __future__ import annotations

import json
import re
import time

from .chunk import as_buffer
from .errors import AlreadyExists
from .log import Objects, check_run

_PIN = re.compile(r"([0-9]{12})-fork-(.{1,100})")


def pin(tier: Objects, run: str, seq: int, by: str) -> bool:
    """Keep a version in a tier, because a fork shares its packs; whether it was not pinned by it before.

    Raises:
        TierError: it could not be pinned.
    """
    data = json.dumps({"by": by, "time": time.time()}, sort_keys=True).encode()
    try:
        tier.put(_pin(run, seq, by), as_buffer(data))
    except AlreadyExists:
        return False
    return True


def unpin(tier: Objects, run: str, seq: int, by: str) -> None:
    """Let go of a version that was pinned. One that was not is no error."""
    tier.delete(_pin(run, seq, by))


def pins(tier: Objects, run: str) -> dict[int, str]:
    """Versions of the run that are pinned in a tier, and why."""
    prefix = f"leases/{run}/"
    found = (_PIN.fullmatch(key.removeprefix(prefix)) for key in tier.list(prefix))
    return {int(match[1]): f"forked by {match[2]}" for match in found if match}


def _pin(run: str, seq: int, by: str) -> str:
    return f"leases/{check_run(run)}/{seq:012d}-fork-{check_run(by)}"
