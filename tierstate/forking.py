"""Forking: a new run that begins with a version of another one, and shares its packs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tierstate.manifest.errors import AlreadyExists, CommitUnknown, NotFound, TierError, TierstateError
from tierstate.manifest.fork import forked, moved
from tierstate.manifest.layout import Layout
from tierstate.manifest.leases import pin, unpin
from tierstate.manifest.log import Log, check_run, commit_id
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Holding
from tierstate.tiers.shelf import Shelf

from .info import VersionInfo

log = logging.getLogger("tierstate")


def fork(entry: Entry, shelves: Sequence[Shelf], new_run: str) -> VersionInfo:
    """Make a version the first one of a new run, in every tier that lasts and has it.

    The new record names the packs of the old run. So the old version is pinned before, and stays for as long as the
    pin does.

    Args:
        entry: the version.
        shelves: the old run in all tiers.
        new_run: a run that has no version yet.

    Raises:
        ValueError: the new run's name can be none, or is the old one.
        AlreadyExists: the new run has versions. One that was interrupted between two tiers is finished instead.
        TierError: no tier that lasts has the version, or none took it.
    """
    old = entry.version.head
    if check_run(new_run) == old.run:
        raise ValueError(f"run {new_run!r} cannot be forked into itself; name another run")
    head = replace(old, run=new_run, seq=1, time=time.time(), parent=entry.version.id)
    version = _begun(shelves, new_run, entry.version) or forked(entry.version, head)
    made: list[tuple[Holding, Record]] = []
    failed: dict[str, TierstateError] = {}
    for shelf in (h.shelf for h in entry.holdings if h.shelf.tier.traits.persistent):
        try:
            record = _fork_in(shelf, entry.version, version)
        except TierstateError as error:
            failed[shelf.name] = error
        else:
            made.append((Holding(Shelf(shelf.tier, new_run), record.layout), record))
    if not made:
        told = "; ".join(f"{name}: {error}" for name, error in failed.items()) or "no tier that lasts has it"
        raise TierError(f"step {old.step} of run {old.run!r} was not forked: {told}")
    for name, reason in failed.items():
        log.warning("%s: step %d of run %s was not forked there: %s", name, old.step, old.run, reason)
    return VersionInfo.of(Entry(version, tuple(h for h, _ in made), tuple(r for _, r in made)))


def _begun(shelves: Sequence[Shelf], run: str, old: Version) -> Version | None:
    """The new run's only version, if it is this very fork, which was made in some tiers; None if it has none.

    Raises:
        AlreadyExists: it has others.
    """
    found: Version | None = None
    for shelf in shelves:
        into = Log(shelf.tier, run)
        try:
            seqs = into.seqs()
            first = into.read(1).version if seqs == [1] else None
        except TierstateError as error:
            log.warning("%s: what run %s has there cannot be told: %s", shelf.name, run, error)
            continue
        other = first is None or first.head.parent != old.id or (found is not None and found.id != first.id)
        if seqs and other:
            raise AlreadyExists(
                f"run {run!r} has versions in {shelf.name} already; fork into a run that has none", tier=shelf.name
            )
        found = first or found
    return found


def _fork_in(shelf: Shelf, old: Version, new: Version) -> Record:
    """Pin, commit, and look whether what was pinned is still there; whatever fails, nothing stays."""
    tier, head, into = shelf.tier, old.head, Log(shelf.tier, new.head.run)
    if into.seqs():
        return into.read(new.head.seq)  # from the time before it was interrupted
    pinned = pin(tier, head.run, head.seq, new.head.run)
    try:
        record = Record(new, _layout(shelf, old), {"id": commit_id()})
        into.commit(record)
        try:
            # The pin again, which a fork to the same run may have taken away when it failed.
            pin(tier, head.run, head.seq, new.head.run)
            _source(shelf, old)
        except BaseException:
            into.forget(new.head.seq)
            raise
    except CommitUnknown:
        raise  # perhaps it is there: the pin stays, and a prune removes it if it is not
    except BaseException:
        if pinned:
            _let_go(shelf, head.seq, into)
        raise
    return record


def _let_go(shelf: Shelf, seq: int, into: Log) -> None:
    try:
        unpin(shelf.tier, shelf.run, seq, into.run)
        if into.seqs():  # another fork's, which relies on it
            pin(shelf.tier, shelf.run, seq, into.run)
    except TierstateError as error:
        log.warning("%s: version %d of run %s stays pinned by run %s: %s", shelf.name, seq, shelf.run, into.run, error)


def _source(shelf: Shelf, old: Version) -> Record:
    """The version's record as it is now.

    Raises:
        NotFound: it has been dropped.
    """
    head = old.head
    record = shelf.log.read(head.seq)
    if record.version.id != old.id:
        raise NotFound(f"{shelf.name}: version {head.seq} of run {head.run!r} is another one by now", tier=shelf.name)
    return record


def _layout(shelf: Shelf, old: Version) -> Layout:
    """Where the version's chunks lie by its record as it is now; those that were mended where they lie since then."""
    layout = _source(shelf, old).layout
    places = {
        row: place
        for row in np.flatnonzero(layout.present).tolist()
        if (place := shelf.mended(old.digests[row].tobytes())) is not None
    }
    sizes = {place.object: shelf.tier.size(place.object) for place in places.values()}
    return moved(layout, places, sizes)
