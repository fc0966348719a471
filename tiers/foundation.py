"""Foundation: whether what a version builds on is sound, and stands once its record is there."""

from __future__ import annotations

import logging
from typing import Protocol

from tierstate.manifest.errors import NotFound, TierUnavailable
from tierstate.manifest.log import Log
from tierstate.manifest.record import Record

from .base import Tier

log = logging.getLogger("tierstate")


class Shelved(Protocol):
    """What is asked of the run in the tier."""

    tier: Tier
    log: Log

    @property
    def name(self) -> str: ...
    def highest_seq(self) -> int: ...


def check_base(shelf: Shelved, record: Record, base: Record | None) -> None:
    """Whoever drops a version forgets its record first, and then deletes what no record names: so what a base that
    stands after the commit names is safe. If it does not, the record stays only where others may rely on it.

    Raises:
        NotFound: it did not stand; the record was forgotten again.
    """
    shared = set(base.layout.objects) & set(record.layout.objects) if base else set()
    try:
        if base is None or not shared or shelf.log.stands(base):
            return
    except TierUnavailable as error:
        # It is committed, and only another process that saves this run could have dropped the base.
        log.warning("%s: whether what a save builds on stands cannot be told: %s", shelf.name, error)
        return
    seq = record.version.head.seq
    if shelf.highest_seq() == seq and shared <= set(shelf.tier.list("packs/")):
        return
    shelf.log.forget(seq)
    text = f"version {base.version.head.seq}, which this save builds on, was dropped by another process meanwhile"
    raise NotFound(f"{shelf.name}: {text}", tier=shelf.name)


def flaw_of(tier: Tier, key: str, nbytes: int) -> str:
    """Why versions to come must not share a pack; empty where it is there, whole, and as safe as a new one."""
    try:
        if tier.size(key) != nbytes:
            return "is truncated"
    except NotFound:
        return "is missing"
    return "" if tier.firm(key) else "has fewer copies than it should"
