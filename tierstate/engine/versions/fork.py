"""Fork: start a new run from a version of another run, in every tier that has it, without copying its packs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tierstate.engine.info import VersionInfo
from tierstate.engine.store.catalog import Holding, VersionCopies
from tierstate.engine.store.index import Summaries
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import AlreadyExists, CommitUnknown, NotFound, TierError, TierstateError, tier_text
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leases import pin_version
from tierstate.manifest.history.log import RACE_RETRIES, Log, check_run
from tierstate.manifest.history.retention import dropped_groups
from tierstate.manifest.history.tags import fork_version, move_rows

log = logging.getLogger("tierstate")


class _Made(NamedTuple):
    """The fork in one tier.

    Attributes:
        tier_run: the old run there.
        record: the record in the new run.
        pin: key of the pin on the old version; None if an earlier, interrupted fork had done this tier.
    """

    tier_run: TierRun
    record: Record
    pin: str | None


def fork(entry: VersionCopies, tier_runs: Sequence[TierRun], new_run: str) -> VersionInfo:
    """Make a version the first one of a new run, in every persistent tier that has it.

    The new record names packs of the old run. So the old version is pinned first, and is kept while the pin exists.

    Args:
        entry: the version.
        tier_runs: the old run in all tiers.
        new_run: a run that has no version yet.

    Raises:
        ValueError: the new run's name is invalid, or is the old one.
        AlreadyExists: the new run has versions. (If they are of this same fork, interrupted, it is finished.)
        NotFound: retention has dropped leaves of the version that no persistent tier has.
        TierError: no persistent tier has the version or could store the fork, or a tier cannot be listed.
    """
    old, new_run = entry.version.head, check_run(new_run)
    if new_run == old.run:
        raise ValueError(f"run {new_run!r} cannot be forked into itself; name another run")
    head = replace(old, run=new_run, seq=1, time=time.time(), parent=entry.version.id)
    version = _begun(tier_runs, new_run, entry.version) or fork_version(entry.version, head)
    there = zip(entry.holdings, entry.records, strict=True)
    lasting = {h.tier_run: record for h, record in there if h.tier_run.tier.traits.persistent}
    _check_whole(entry.version, {tier_run.name: record for tier_run, record in lasting.items()})
    made: list[_Made] = []
    failed: dict[str, TierstateError] = {}
    for tier_run in lasting:
        try:
            made.append(_fork_in(tier_run, entry.version, version))
        except TierstateError as error:
            failed[tier_run.name] = error
    if not made:
        told = "; ".join(tier_text(*one) for one in failed.items()) or "no tier that lasts has it"
        raise TierError(f"step {old.step} of run {old.run!r} was not forked: {told}")
    for name, reason in failed.items():
        log.warning("%s: step %d of run %s was not forked there: %s", name, old.step, old.run, reason)
    _keep_whole(entry.version, made)
    holdings = tuple(Holding(TierRun(m.tier_run.tier, new_run), m.record.layout) for m in made)
    return VersionInfo.of(VersionCopies(version, holdings, tuple(m.record for m in made)))


def _begun(tier_runs: Sequence[TierRun], run: str, old: Version) -> Version | None:
    """The new run's only version, if an interrupted fork of the same version made it; None if the run has none.

    Raises:
        AlreadyExists: the new run has other versions.
        TierError: a tier cannot be listed, and so may have other versions.
    """
    found: Version | None = None
    silent: dict[str, TierstateError] = {}
    for tier_run in tier_runs:
        into = Log(tier_run.tier, run)
        try:
            tier_run.identity.ensure(create=False)  # a file system that is not mounted may have versions as well
            seqs = into.seqs()
            first = into.read(1).version if seqs == [1] else None
        except TierstateError as error:
            silent[tier_run.name] = error
            continue
        other = first is None or first.head.parent != old.id or (found is not None and found.id != first.id)
        if seqs and other:
            raise AlreadyExists(
                f"run {run!r} has versions in {tier_run.name} already; fork into a run that has none",
                tier=tier_run.name,
            )
        found = first or found
    # A run must not be started twice in different tiers: each number would mean two versions.
    if silent and found is None:
        told = "; ".join(tier_text(*one) for one in silent.items())
        raise TierError(f"whether run {run!r} has versions already cannot be told: {told}", tier=next(iter(silent)))
    for name, reason in silent.items():
        log.warning("%s: what run %s has there cannot be told: %s", name, run, reason)
    return found


def _check_whole(version: Version, records: Mapping[str, Record]) -> None:
    """Raises NotFound where leaves that retention has dropped are in none of these tiers.

    For leaves that no rule sends to a persistent tier it only logs a warning.
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
    gone = [f"{glob} from {name}" for name, record in records.items() for glob in dropped_groups(record.commit)]
    if gone:
        raise NotFound(f"{what}; `keep` has dropped leaves of it ({', '.join(gone)}): fork another version")
    log.warning("%s; a fork of it begins without them", what)


def _keep_whole(version: Version, made: Sequence[_Made]) -> None:
    """Check again with the present records; if the version is not whole any more, undo the fork."""
    try:
        _check_whole(version, {m.tier_run.name: m.record for m in made})
    except NotFound:
        for tier_run, record, pinned in made:
            if pinned is not None:
                into = Log(tier_run.tier, record.version.head.run)
                into.forget(record.version.head.seq)
                _let_go(tier_run, pinned, into)
        raise


def _fork_in(tier_run: TierRun, old: Version, new: Version) -> _Made:
    """Pin the old version, commit, and check that the old version still exists; undo all on failure."""
    into = Log(tier_run.tier, new.head.run)
    if into.seqs():
        return _Made(tier_run, _check_packs(tier_run, into.read(new.head.seq)), None)
    pinned = pin_version(tier_run.tier, old.head.run, old.head.seq, into.run)
    try:
        return _Made(tier_run, _commit(tier_run, old, new, into), pinned)
    except CommitUnknown:
        raise  # the record may exist: the pin stays, and a prune removes it if the record does not
    except BaseException:
        _let_go(tier_run, pinned, into)
        raise


def _commit(tier_run: TierRun, old: Version, new: Version, into: Log) -> Record:
    """Commit a record that names the packs of the old version's record; that record still exists afterwards.

    Retention, thinning and repacking look for pins before they delete a record. So if the old record exists after the
    pin was written, nothing deletes the packs that it names.
    """
    for _ in range(RACE_RETRIES):
        source = _source(tier_run, old)
        gone = dropped_groups(source.commit)
        said = tier_run.signature() | ({"thinned": list(gone)} if gone else {})
        record = Record(new, _layout(tier_run, old, source), said)
        # A run of this name may have been removed, version by version, and have left an index with this number.
        Summaries(tier_run.tier, into.run).expect(new.head.seq)
        into.commit(record)
        try:
            if tier_run.log.holds(source):
                return record
        except BaseException:
            into.forget(new.head.seq)
            raise
        into.forget(new.head.seq)
    raise NotFound(
        f"{tier_run.name}: the record of version {old.head.seq} is being replaced; try again", tier=tier_run.name
    )


def _let_go(tier_run: TierRun, pinned: str, into: Log) -> None:
    """Remove our pin, unless a record may exist that needs it: ours, or that of another fork to the same run."""
    try:
        if not into.seqs():
            tier_run.tier.delete(pinned)
    except TierstateError as error:
        log.warning("%s: %s stays until a prune takes it away: %s", tier_run.name, pinned, error)


def _check_packs(tier_run: TierRun, record: Record) -> Record:
    """Return the record if its packs exist: the fork that made it may have been interrupted before its own check.

    Raises:
        NotFound: a pack does not exist.
    """
    for key in record.layout.objects:
        tier_run.tier.size(key)
    return record


def _source(tier_run: TierRun, old: Version) -> Record:
    """The version's present record.

    Raises:
        NotFound: it has been dropped.
    """
    head = old.head
    record = tier_run.log.read(head.seq)
    if record.version.id != old.id:
        raise NotFound(
            f"{tier_run.name}: version {head.seq} of run {head.run!r} is another one by now", tier=tier_run.name
        )
    return record


def _layout(tier_run: TierRun, old: Version, source: Record) -> Layout:
    """The layout of the version by this record; repaired chunks at their new places."""
    layout = source.layout
    places = {
        row: place
        for row in np.flatnonzero(layout.present).tolist()
        if (place := tier_run.mended(old.digests[row].tobytes())) is not None
    }
    sizes = {place.object: tier_run.tier.size(place.object) for place in places.values()}
    return move_rows(layout, places, sizes)
