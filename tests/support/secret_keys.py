"""Keys of seals and of encrypted tiers for tests, and policies that use them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import tierstate as ts

from .checkpointer_worlds import policy

STATE = (20_000, 300, 5000, 40)


def key_file(place: Path, name: str = "key") -> str:
    """A new key in a file of its own, as users make one."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / name
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return str(path)


def sealed(place: Path, *keys: str, **tier: Any) -> ts.Policy:
    """A policy over one tier, sealed with these keys."""
    return policy({"disk": {"type": "nvme", "path": str(place / "disk"), **tier}}, seal={"file": list(keys)})


def objects(place: Path, prefix: str = "") -> list[Path]:
    """The files of the objects of the tier ``disk``, below a prefix."""
    root = place / "disk" / prefix
    return sorted(p for p in root.rglob("*") if p.is_file())


def write(path: Path, data: bytes) -> None:
    """Put other bytes in the place of an object, as somebody who can write to the tier does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def encrypted(place: Path, *keys: str, seal: str = "", **tier: Any) -> ts.Policy:
    """A policy over one tier that is encrypted with these keys; with none, with the key of the seal."""
    how = {"file": list(keys)} if keys else True
    top = {"seal": {"file": seal}} if seal else {}
    return policy({"disk": {"type": "nvme", "path": str(place / "disk"), "encrypt": how, **tier}}, **top)
