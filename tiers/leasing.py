"""Leasing: versions are held in the tiers that they are read from, so that no other process drops them meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from tierstate.manifest.errors import NotFound, TierError
from tierstate.manifest.index import Array
from tierstate.manifest.leases import Leases
from tierstate.manifest.record import Record

from .catalog import Entry
from .shelf import Shelf

log = logging.getLogger("tierstate")

LONG = 64 << 20
"""Bytes from which on a restore is worth a lease. A shorter one is over before anybody has dropped what it reads, and
begins anew otherwise; three syncs of a disk would be most of its time."""

Source: TypeAlias = tuple[Shelf, Record]
"""A run in a tier, and the record by which a version is read there."""


class Moved(NotFound):
    """A version was dropped, or got another record, before it could be held: look for it again."""


@contextmanager
def reading(sources: Sequence[Source], nbytes: int | None = None) -> Iterator[None]:
    """Hold a version in these tiers for as long as the block reads it there.

    Args:
        nbytes: how much will be read, where it may be so little that the version need not be held.

    Tiers that only this process sees need no lease, and a tier that takes none, as it is read-only or full, is read
    without one.

    Raises:
        Moved: before the block is entered: a record is not there any more.
    """
    with ExitStack() as held:
        for shelf, record in sources:
            if shelf.tier.traits.shared != "process" and (nbytes is None or nbytes >= LONG):
                _hold(shelf, record, held)
        yield


@contextmanager
def building_on(shelf: Shelf) -> Iterator[None]:
    """Hold the newest version of a run in a tier while a copy of an older one is made, whose record may name its packs:
    a saver may commit the next one meanwhile, and drop this.

    Raises:
        Moved: before the block is entered: it was dropped just now.
    """
    with ExitStack() as held:
        if (record := shelf.newest()) is not None:
            _hold(shelf, record, held)
        yield


def sources(entry: Entry, rows: Array) -> list[Source]:
    """Where these rows of a version will be read, while nothing is damaged: each in the first copy that has it."""
    found, left = [], rows
    for holding, record in zip(entry.holdings, entry.records, strict=True):
        here = holding.layout.present[left]
        if here.any():
            found.append((holding.shelf, record))
        left = left[~here]
    return found


def _hold(shelf: Shelf, record: Record, held: ExitStack) -> None:
    leases, seq = Leases(shelf.tier, shelf.run), record.version.head.seq
    try:
        key = leases.take(seq, record=record.commit["id"])
    except TierError as error:
        log.debug("%s: version %d is read without a lease: %s", shelf.name, seq, error)
        return
    held.callback(let_go, leases, key)
    try:
        there = shelf.log.holds(record)
    except TierError as error:
        log.debug("%s: whether version %d is still there cannot be told: %s", shelf.name, seq, error)
        return
    if not there:
        raise Moved(f"{shelf.name}: version {seq} of run {shelf.run!r} was dropped or moved just now", tier=shelf.name)


def let_go(leases: Leases, key: str) -> None:
    """Release a lease; if that fails it is left behind, and ends with this process."""
    try:
        leases.release(key)
    except TierError as error:
        log.debug("%s: a lease is left behind: %s", leases.tier.name, error)
