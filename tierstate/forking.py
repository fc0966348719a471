"""Forking: a new run that begins with a version of another one, and shares its packs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tierstate.manifest.errors import AlreadyExists, CommitUnknown, NotFound, TierError, TierstateError
from tierstate.manifest.fork import forked, moved
from tierstate.manifest.layout import Layout
from tierstate.manifest.leases import pin
from tierstate.manifest.log import RACES, Log, check_run, commit_id
from tierstate.manifest.record import Record
from tierstate.manifest.thinning import thinned
from tierstate.manifest.version import Version
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Holding
from tierstate.tiers.shelf import Shelf

from .info import VersionInfo

log = logging.getLogger("tierstate")


class _Made(NamedTuple):
    """The fork in one tier.

    Attributes:
        shelf: the old run there.
        record: the new run's.
        pin: key of the old version's; None where all was done before, by a fork that was interrupted.
    """

    shelf: Shelf
    record: Record
    pin: str | None


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
        NotFound: retention has dropped leaves of the version that no tier which lasts has.
        TierError: no tier that lasts has the version, or none took it, or a tier cannot be asked for the new run.
    """
    old = entry.version.head
    if check_run(new_run) == old.run:
        raise ValueError(f"run {new_run!r} cannot be forked into itself; name another run")
    head = replace(old, run=new_run, seq=1, time=time.time(), parent=entry.version.id)
    version = _begun(shelves, new_run, entry.version) or forked(entry.version, head)
    there = zip(entry.holdings, entry.records, strict=True)
    lasting = {h.shelf: record for h, record in there if h.shelf.tier.traits.persistent}
    _check_whole(entry.version, {shelf.name: record for shelf, record in lasting.items()})
    made: list[_Made] = []
    failed: dict[str, TierstateError] = {}
    for shelf in lasting:
        try:
            made.append(_fork_in(shelf, entry.version, version))
        except TierstateError as error:
            failed[shelf.name] = error
    if not made:
        told = "; ".join(f"{name}: {error}" for name, error in failed.items()) or "no tier that lasts has it"
        raise TierError(f"step {old.step} of run {old.run!r} was not forked: {told}")
    for name, reason in failed.items():
        log.warning("%s: step %d of run %s was not forked there: %s", name, old.step, old.run, reason)
    _keep_whole(entry.version, made)
    holdings = tuple(Holding(Shelf(m.shelf.tier, new_run), m.record.layout) for m in made)
    return VersionInfo.of(Entry(version, holdings, tuple(m.record for m in made)))


def _begun(shelves: Sequence[Shelf], run: str, old: Version) -> Version | None:
    """The new run's only version, if it is this very fork, which was made in some tiers; None if it has none.

    Raises:
        AlreadyExists: it has others.
        TierError: a tier cannot tell, and so may have others.
    """
    found: Version | None = None
    silent: dict[str, TierstateError] = {}
    for shelf in shelves:
        into = Log(shelf.tier, run)
        try:
            seqs = into.seqs()
            first = into.read(1).version if seqs == [1] else None
        except TierstateError as error:
            silent[shelf.name] = error
            continue
        other = first is None or first.head.parent != old.id or (found is not None and found.id != first.id)
        if seqs and other:
            raise AlreadyExists(
                f"run {run!r} has versions in {shelf.name} already; fork into a run that has none", tier=shelf.name
            )
        found = first or found
    # A run that began once must not begin anew elsewhere: its numbers would mean two versions each.
    if silent and found is None:
        told = "; ".join(f"{name}: {error}" for name, error in silent.items())
        raise TierError(f"whether run {run!r} has versions already cannot be told: {told}", tier=next(iter(silent)))
    for name, reason in silent.items():
        log.warning("%s: what run %s has there cannot be told: %s", name, run, reason)
    return found


def _check_whole(version: Version, records: Mapping[str, Record]) -> None:
    """Raises NotFound where leaves that retention has dropped are in none of these tiers.

    Leaves that no rule sends to a tier that lasts are told by a warning.
    """
    if not records:
        return
    absent = ~np.logical_or.reduce([record.layout.present for record in records.values()])
    if not absent.any():
        return
    leaves = np.unique(version.chunk_leaf[absent])
    what = (
        f"step {version.head.step} of run {version.head.run!r} is not whole in {', '.join(records)}: {len(leaves)} "
        f"leaves are in none of them, {version.leaves[int(leaves[0])].name} the first"
    )
    gone = [f"{glob} from {name}" for name, record in records.items() for glob in thinned(record.commit)]
    if gone:
        raise NotFound(f"{what}; `keep` has dropped leaves of it ({', '.join(gone)}): fork another version")
    log.warning("%s; a fork of it begins without them", what)


def _keep_whole(version: Version, made: Sequence[_Made]) -> None:
    """Once more, by what is there now; what was made of a version that is not whole any more is undone."""
    try:
        _check_whole(version, {m.shelf.name: m.record for m in made})
    except NotFound:
        for shelf, record, pinned in made:
            if pinned is not None:
                into = Log(shelf.tier, record.version.head.run)
                into.forget(record.version.head.seq)
                _let_go(shelf, pinned, into)
        raise


def _fork_in(shelf: Shelf, old: Version, new: Version) -> _Made:
    """Pin, commit, and look whether what was pinned is still there; whatever fails, nothing stays."""
    into = Log(shelf.tier, new.head.run)
    if into.seqs():
        return _Made(shelf, _check_packs(shelf, into.read(new.head.seq)), None)
    pinned = pin(shelf.tier, old.head.run, old.head.seq, into.run)
    try:
        return _Made(shelf, _commit(shelf, old, new, into), pinned)
    except CommitUnknown:
        raise  # perhaps it is there: the pin stays, and a prune removes it if it is not
    except BaseException:
        _let_go(shelf, pinned, into)
        raise


def _commit(shelf: Shelf, old: Version, new: Version, into: Log) -> Record:
    """Commit a record that names what the old version's record names; that record is still there afterwards.

    Whoever drops, thins or repacks a version looks for pins before its record goes. So while that stands beside the
    pin, nobody deletes what it names.
    """
    for _ in range(RACES):
        source = _source(shelf, old)
        gone = thinned(source.commit)
        said = {"id": commit_id(), **({"thinned": list(gone)} if gone else {})}
        record = Record(new, _layout(shelf, old, source), said)
        into.commit(record)
        try:
            if shelf.log.holds(source):
                return record
        except BaseException:
            into.forget(new.head.seq)
            raise
        into.forget(new.head.seq)
    raise NotFound(f"{shelf.name}: the record of version {old.head.seq} is being replaced; try again", tier=shelf.name)


def _let_go(shelf: Shelf, pinned: str, into: Log) -> None:
    """Take our pin away, unless a record may be there that needs it: ours, or that of another fork to the same run."""
    try:
        if not into.seqs():
            shelf.tier.delete(pinned)
    except TierstateError as error:
        log.warning("%s: %s stays until a prune takes it away: %s", shelf.name, pinned, error)


def _check_packs(shelf: Shelf, record: Record) -> Record:
    """The record itself, if what it names is there: whoever made it may have been interrupted before it looked.

    Raises:
        NotFound: a pack is not there.
    """
    for key in record.layout.objects:
        shelf.tier.size(key)
    return record


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


def _layout(shelf: Shelf, old: Version, source: Record) -> Layout:
    """Where a record says that the version's chunks lie; those that were mended, where they lie since then."""
    layout = source.layout
    places = {
        row: place
        for row in np.flatnonzero(layout.present).tolist()
        if (place := shelf.mended(old.digests[row].tobytes())) is not None
    }
    sizes = {place.object: shelf.tier.size(place.object) for place in places.values()}
    return moved(layout, places, sizes)
