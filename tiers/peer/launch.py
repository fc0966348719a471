"""Start the server process of a host's memory (the keeper)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.connections.secret import FILE_VARIABLE, VARIABLE
from tierstate.tiers.interpreter import same_modules, same_python

STARTING = 60.0
"""Timeout in seconds for starting a keeper."""


class KeeperSettings(NamedTuple):
    """How a keeper serves a memory.

    Attributes:
        address, port: where it listens; port 0 for that of the keeper before, or any.
        idle: seconds without use after which it ends.
        capacity: bytes of objects, at most; None for no limit.
    """

    address: str
    port: int
    idle: float
    capacity: int | None


def start_process(root: Path, settings: KeeperSettings, tier: str) -> None:
    """Start a keeper as a process of its own; returns when it listens.

    Args:
        root: the folder of the memory.
        tier: the tier's name, for messages.

    Raises:
        TierUnavailable: it cannot be started; the message says why.
    """
    address, port, idle, capacity = settings
    command = same_python("-m", "tierstate.tiers.peer.server", "--path", str(root), "--address", address)
    command += ["--port", str(port), "--idle", str(idle)]
    if capacity is not None:
        command += ["--capacity", str(capacity)]
    environment = {name: value for name, value in same_modules().items() if name not in (VARIABLE, FILE_VARIABLE)}
    try:
        done = subprocess.run(
            command,
            env=environment,  # without the job's secret: the keeper is told one that is derived from it
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STARTING,
            check=False,
        )
        trouble = done.stderr.strip()[-400:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        trouble = f"it did not listen within {STARTING:g} s"
    if trouble:
        raise TierUnavailable(
            f"{tier}: no keeper could be started at {address}:{port} for {root}: {trouble}",
            tier=tier,
        )
