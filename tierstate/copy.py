"""Copies a version of a run to another tier of its policy, or into the tiers of another policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from tierstate.engine.capture.plan import CapturePlan, CaptureSource
from tierstate.engine.info import VersionInfo
from tierstate.engine.placement import Routes
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.restore.fetch import Fetch, RepairWriter
from tierstate.engine.restore.restore import READ_WORKERS, RestoreSpec, find_version, reading, restarting
from tierstate.engine.store.catalog import LOOK_FURTHER, VersionCopies, VersionMoved
from tierstate.engine.store.run_in_tier import TierRun, tier_run_named
from tierstate.engine.versions.copy import copy_version
from tierstate.manifest.arguments import check_callable
from tierstate.manifest.arrays import Array, starts_of
from tierstate.manifest.chunk import Buffer, Chunk, empty_buffer, spans
from tierstate.manifest.digest import DIGEST_SIZE, digest_function
from tierstate.manifest.errors import AlreadyExists, NotFound, StateMismatch, TierError, TierFull
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import check_run
from tierstate.manifest.history.removals import removal_key
from tierstate.manifest.history.retention import RetentionEntry
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .run import Run

OpenRun: TypeAlias = Callable[[Policy, str], AbstractContextManager[Any]]
"""Opens a run by its policy and name, as a `Checkpointer` (not named in the type, since it imports this module)."""

READ_AHEAD = 64 << 20
"""Bytes that are read together and kept in memory until the save has copied them; at least one chunk."""


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy.

    Attributes:
        version: the version in the target.
        tiers: names of the tiers to which it was copied; empty if the target had it already.
    """

    version: VersionInfo
    tiers: tuple[str, ...]


def copy(
    run: Run,
    open_run: OpenRun,
    *,
    step: int | None = None,
    version: str | None = None,
    to: str | None = None,
    into: Policy | str | os.PathLike[str] | None = None,
    into_run: str | None = None,
    progress: Progress = no_progress,
) -> CopyResult:
    """Copy a version of a run, as `Checkpointer.copy` says.

    Args:
        run: the run that has the version.
        open_run: opens the run of the other policy.
        step, version, to, into, progress: as for `Checkpointer.copy`.
        into_run: as its ``run``.

    Raises: as `Checkpointer.copy`.
    """
    if (to is None) == (into is None):
        raise ValueError("a copy goes either to a tier (to=) or into another policy (into=); name one of them")
    check_callable(progress, "progress", "give a function of the bytes read since its last call")
    if into_run is not None and into is None:
        raise ValueError("a run's name (into_run=) goes with into=; a copy to a tier stays in its run")
    wanted, name = RestoreSpec(step, version), run.run if into_run is None else check_run(into_run)

    def made() -> CopyResult:
        entry = find_version(run._catalog(), run.run, wanted)
        with reading(entry):
            if into is not None:
                return _copy_into(open_run, entry, run._arena, into, name, progress)
            return _copy_to(run, entry, str(to), progress)

    return restarting(made, newest=wanted.newest)


def _copy_to(run: Run, entry: VersionCopies, name: str, progress: Progress) -> CopyResult:
    tier_run = tier_run_named(run._tier_runs, name)
    if name not in entry.tiers:
        _bring(run, entry, tier_run, progress)
    elif not _mend(run, entry, tier_run, progress):
        return _result(run, entry, ())
    return _result(run, entry, (name,))


def _mend(run: Run, entry: VersionCopies, tier_run: TierRun, progress: Progress) -> bool:
    """Write what a tier lacks of a version, although it has a record of it: chunks in packs that are missing or cut
    off. Whether there were any.

    Raises:
        VersionMoved: the version was dropped or moved meanwhile.
        Damaged: no tier has a chunk.
        TierError: they could not be written.
    """
    # Not by its name, which a tier of the policy that is copied from may have too.
    at = next(at for at, holding in enumerate(entry.holdings) if holding.tier_run is tier_run)
    layout, record = entry.holdings[at].layout, entry.records[at]
    packs = enumerate(layout.pack_sizes.items())
    lacking = [number for number, pack in packs if not _is_there(tier_run.tier, *pack)]
    rows = np.flatnonzero(np.isin(layout.object, lacking) | np.isin(layout.base_object, lacking))
    if not len(rows):
        return False
    if not tier_run.log.stands(record):
        raise VersionMoved(f"{tier_run.name}: step {entry.version.head.step} was dropped or moved just now")
    holdings = [entry.holdings[at], *entry.holdings[:at], *entry.holdings[at + 1 :]]
    repairs = RepairWriter(entry.version, holdings)
    fetch = Fetch(entry.version, holdings, run._arena, workers=READ_WORKERS, mended=repairs, progress=progress)
    try:
        fetch.run(rows.tolist(), lambda _row, _raw, _slab: None)
    finally:  # a chunk that no tier has ends it, and what was found by then is good
        written = repairs.close().get(tier_run.name, 0)
    digests = {row: entry.version.digests[row].tobytes() for name, row, _ in fetch.troubles if name == tier_run.name}
    if any(tier_run.mended(digest) is None for digest in digests.values()):
        why = next(trouble.error for trouble in fetch.troubles if trouble.tier == tier_run.name)
        what = f"has not all of step {entry.version.head.step}, and it could not be written there"
        raise TierError(f"{tier_run.name} {what}: {why}", tier=tier_run.name)
    return bool(written)


def _is_there(tier: Tier, key: str, nbytes: int) -> bool:
    try:
        return tier.size(key) == nbytes
    except NotFound:
        return False


def _bring(run: Run, entry: VersionCopies, tier_run: TierRun, progress: Progress) -> None:
    """Copy a version of a run to one of its tiers that lacks it."""
    name, head = tier_run.name, entry.version.head
    if head.seq in tier_run.log.seqs():
        raise AlreadyExists(f"{name} has a record of number {head.seq} that is another version, or damaged", tier=name)
    routed: Array = Routes(run.policy).of(entry.version.leaves)[name].leaves[entry.version.chunk_leaf]
    _check_there(entry, np.flatnonzero(routed))
    copy_version(entry, tier_run.apart(), run.policy, run._arena, progress)
    for id in (entry.version.id, ""):  # it may have been removed there once, perhaps when no record could be read
        tier_run.tier.delete(removal_key(run.run, head.seq, id))
    tier_run.look_again()


def _result(run: Run, entry: VersionCopies, done: tuple[str, ...]) -> CopyResult:
    return CopyResult(run.info(version=entry.version.id), done)


def _copy_into(
    open_run: OpenRun, entry: VersionCopies, arena: Arena, into: Any, name: str, progress: Progress
) -> CopyResult:
    policy = into if isinstance(into, Policy) else Policy.load(into)
    # Every tier gets the copy, also one for which a save of this step would not be due.
    tiers = tuple(tier.model_copy(update={"every": None}) for tier in policy.tiers)
    with open_run(policy.model_copy(update={"tiers": tiers}), name) as there:
        known = _known(there, entry, arena, progress)
        if known is not None:
            return _complete(there, known, entry, progress)
        head = entry.version.head
        save = there._submit(_plan(entry, arena, progress), head.step, head.metadata)
        save.wait_captured()
        if save.skipped:
            raise TierFull("nothing was copied: the arena was full, and the policy says on_full: skip")
        if not save.tiers:
            raise NotFound(f"no rule of that policy sends a leaf of step {head.step} to any of its tiers")
        for tier in save.tiers:
            save.wait(tier)
        return CopyResult(there.info(version=save.version), save.tiers)


def _complete(there: Run, known: VersionCopies, entry: VersionCopies, progress: Progress) -> CopyResult:
    """Copy a version that the other run has to those of its tiers that lack it: an interrupted copy has reached only
    some, or the policy has got another tier since."""
    copies = known
    if _cut(known.version) == _cut(entry.version):
        # Both have the same rows: what no tier of the other run has can be read where it came from.
        holdings, records = (*entry.holdings, *known.holdings), (*entry.records, *known.records)
        copies = VersionCopies(known.version, holdings, records, known.away)
    head, routes, done = known.version.head, Routes(there.policy).of(known.version.leaves), []
    mark = RetentionEntry(head.seq, head.step, head.time, head.metadata)
    for tier_run in there._tier_runs:
        due = tier_run.tier.traits.persistent and routes[tier_run.name].leaves.any()
        # One that retention has dropped there, or somebody by hand, does not come back.
        if tier_run.name in known.tiers:
            if _mend(there, copies, tier_run, progress):
                done.append(tier_run.name)
        elif due and tier_run.worth_bringing([mark]):
            _bring(there, copies, tier_run, progress)
            done.append(tier_run.name)
    return _result(there, known, tuple(done))


def _known(there: Run, entry: VersionCopies, arena: Arena, progress: Progress) -> VersionCopies | None:
    """The version of the other run with the same step, leaves and bytes, if there is one."""
    version = entry.version
    for place in there._catalog().newest_first(fits=lambda one: one.step == version.head.step):
        for found in place.entries:
            other = found.version
            if (
                other.head.step == version.head.step
                and other.leaves == version.leaves
                and np.array_equal(other.shard_leaf, version.shard_leaf)
                and other.boxes == version.boxes
                and _has_bytes_of(other, entry, arena, progress)
            ):
                return found
    return None


def _cut(version: Version) -> tuple[int, str]:
    return version.head.chunk, version.head.digest


def _has_bytes_of(other: Version, entry: VersionCopies, arena: Arena, progress: Progress) -> bool:
    """Whether a version with the same shards has the same bytes. If it has other chunks or another digest function,
    its digests are computed from the stored bytes, up to the first that differs."""
    version = entry.version
    if _cut(other) == _cut(version):
        return np.array_equal(other.digests, version.digests)
    _check_there(entry, np.arange(len(version.digests)))
    ahead, digest = _Ahead(entry, arena, progress), digest_function(other.head.digest)
    ahead.order(np.arange(len(version.digests)))
    firsts, digests, row = starts_of(version.chunk_end).tolist(), other.digests.tobytes(), 0
    for first, nbytes in zip(firsts, version.shard_nbytes.tolist(), strict=True):
        for chunk in ahead.chunks(first, nbytes, other.head.chunk):
            raw = empty_buffer(chunk.nbytes)
            chunk.fill(raw)
            if digest(raw) != digests[DIGEST_SIZE * row : DIGEST_SIZE * (row + 1)]:
                return False
            row += 1
    return True


def _check_there(entry: VersionCopies, rows: Array) -> None:
    """Raises StateMismatch if one of these chunks of a version is in no tier."""
    version, absent = entry.version, entry.absent(rows)
    if len(absent):
        name = version.leaves[int(version.chunk_leaf[absent[0]])].name
        why = f" ({entry.thinned})" if entry.thinned else f"; {LOOK_FURTHER}"
        raise StateMismatch(
            f"leaf {name} of step {version.head.step} is in none of the tiers that have a record of it{why}"
        )


def _plan(entry: VersionCopies, arena: Arena, progress: Progress) -> CapturePlan:
    """A capture plan whose sources read the stored version. Raises StateMismatch if a chunk is in no tier."""
    version = entry.version
    _check_there(entry, np.arange(len(version.digests)))
    ahead = _Ahead(entry, arena, progress)
    ends = version.chunk_end.tolist()
    shards = zip(version.shard_leaf.tolist(), version.boxes, version.shard_nbytes.tolist(), [0, *ends], strict=False)
    sources = [CaptureSource(leaf, box, n, partial(ahead.chunks, first, n)) for leaf, box, n, first in shards]
    plan = CapturePlan.of(version.leaves, sources)
    runs = [np.arange(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    order = plan.in_order(np.arange(len(plan.leaf))).tolist()
    ahead.order(np.concatenate([*(runs[source] for source in order), np.zeros(0, "i8")]).astype("i8"))
    return plan


class _Ahead:
    """Read-ahead: reads the chunks of a version in batches, for what asks for one chunk after the other.

    Args:
        entry: the version and where each tier has it.
        arena: the memory for the reads; another arena than that of a save that asks.
    """

    def __init__(self, entry: VersionCopies, arena: Arena, progress: Progress) -> None:
        self._version = entry.version
        self._fetch = Fetch(entry.version, entry.holdings, arena, workers=READ_WORKERS, progress=progress)
        self._rows: Array = np.zeros(0, "i8")
        self._place: Array = np.zeros(0, "i8")
        self._held: dict[int, Buffer] = {}

    def order(self, rows: Array) -> None:
        """Set the order in which the chunks will be asked for: all rows."""
        self._rows, self._place = rows, np.argsort(rows)

    def chunks(self, first: int, nbytes: int, size: int) -> Iterator[Chunk]:
        """The chunks of the shard that begins at row ``first``, in the save's chunk length."""
        for start, length in spans(nbytes, size):
            yield Chunk(start, length, partial(self._fill, first, start))

    def _fill(self, first: int, start: int, out: Buffer) -> None:
        chunk, at = self._version.head.chunk, 0
        while at < out.numel():
            row, offset = divmod(start + at, chunk)
            piece = self._chunk(first + row)[offset : offset + out.numel() - at]
            out[at : at + piece.numel()].copy_(piece)
            at += piece.numel()

    def _chunk(self, row: int) -> Buffer:
        if row not in self._held:
            place = int(self._place[row])
            nbytes = np.cumsum(self._version.chunk_nbytes[self._rows[place : place + 4096]])
            count = max(1, int(np.searchsorted(nbytes, READ_AHEAD, "right")))
            self._held = {}
            self._fetch.run(self._rows[place : place + count].tolist(), self._hold)
        return self._held[row]

    def _hold(self, row: int, raw: Buffer, _slab: object) -> None:
        self._held[row] = raw.clone()
