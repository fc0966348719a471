"""Writes one rank's part of a DCP save: its bytes into packs of each tier, and its tables for the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.placement import Routes, is_due
from tierstate.engine.save.capture import Capture, CaptureSink
from tierstate.engine.save.plan import CapturePlan
from tierstate.engine.save.publish import DirectJob, tier_write_of
from tierstate.engine.save.save_state import SaveState
from tierstate.manifest.arrays import Array
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history.log import next_seq
from tierstate.manifest.sharded.part import encode_part
from tierstate.tiers.concurrency import Task, WorkerPool
from tierstate.tiers.places import check_places

from .engine import DcpEngine, PartTierRun
from .leaves import ListValues

log = logging.getLogger("tierstate")


class TierPart(NamedTuple):
    """One rank's part of a version in one tier.

    Attributes:
        tier: the tier's name.
        base: id of the commit whose packs the part may reuse.
        record: the encoded part.
    """

    tier: str
    base: str
    record: bytes


class RankPart(NamedTuple):
    """One rank's part of a version, as sent to the coordinator.

    Attributes:
        shares: the part in each tier.
        listed: the rank's list values, which the coordinator writes.
    """

    shares: list[TierPart]
    listed: ListValues


class SaveTargets(NamedTuple):
    """The tiers to which a save goes, and its number and step.

    Attributes:
        tier_runs: the run in each of those tiers, the durable tier first.
        seq: the version's number, higher than all numbers in those tiers.
        step: the training step.
    """

    tier_runs: list[PartTierRun]
    seq: int
    step: int


def save_targets(engine: DcpEngine, step: int | None, now: float, hosts: int, *, alone: bool) -> SaveTargets:
    """The tiers to which a save goes: always the durable one, and others that are due by their ``every``.

    Tiers in which not all ranks see the same objects, and tiers that do not answer, are left out.

    Args:
        engine: the run in its tiers.
        step: the step; None for one more than the newest version's.
        now: seconds since 1970.
        hosts: number of hosts of the ranks.
        alone: whether this is the only rank. Several ranks must get the same number without asking each other, so they
            do not read their clocks.

    Raises:
        PolicyError: two tiers lie in one place.
        TierstateError: the durable tier does not answer.
    """
    check_places([tier_run.tier for tier_run in engine.tier_runs])
    for tier_run in engine.tier_runs:
        tier_run.identity.prepare()
    durable = engine.tier_run(engine.policy.durable)
    highest = durable.refresh()
    newest = durable.newest()
    if step is None:
        step = 0 if newest is None else newest.version.head.step + 1
    tier_runs = [durable]
    for tier in engine.policy.tiers:
        tier_run = engine.tier_run(tier.name)
        if tier_run is durable or not {"process": False, "host": hosts == 1}.get(tier_run.tier.traits.shared, True):
            continue
        try:
            highest = max(highest, tier_run.refresh())
            newest = tier_run.newest()
        except TierstateError as error:
            log.error("step %d is not saved to %s: %s", step, tier_run.name, error)
            continue
        last = None if newest is None else (newest.version.head.step, newest.version.head.time)
        if is_due(tier.every, step, last, now):
            tier_runs.append(tier_run)
    return SaveTargets(tier_runs, next_seq(highest) if alone else highest + 1, step)


def write_part(
    engine: DcpEngine, plan: CapturePlan, head: Head, rank: int, tier_runs: Sequence[PartTierRun]
) -> list[TierPart]:
    """Capture what is planned, and write it to packs of all these tiers in parallel, from the same slabs.

    Returns:
        The part in each tier; tiers other than the durable one that failed are left out.

    Raises:
        CaptureError: a value could not be copied.
        TierstateError: the durable tier failed.
    """
    save_state = SaveState(head, plan.total, [tier_run.name for tier_run in tier_runs], {})
    for tier_run in tier_runs:
        tier_run.rank = rank  # the names of packs contain it
    direct_jobs = _direct_jobs(engine, plan, head, tier_runs, save_state)
    engine.arena.prepare(plan.total)
    running: list[Task[Record]] = []
    with WorkerPool(len(direct_jobs), "tierstate-dcp") as pool:
        outcome: Version | BaseException
        try:
            running += [pool.submit(job.run) for job in direct_jobs]
            outcome = _captured(engine, plan, head, rank, direct_jobs, save_state)
        except BaseException as error:
            save_state.cancelled.set()
            outcome = error
        for job in direct_jobs:
            job.feed(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return [
        share
        for tier_run, future in zip(tier_runs, running, strict=True)
        if (share := _share(engine, tier_run, future))
    ]


def _direct_jobs(
    engine: DcpEngine, plan: CapturePlan, head: Head, tier_runs: Sequence[PartTierRun], save_state: SaveState
) -> list[DirectJob]:
    routes, stages = Routes(engine.policy).of(plan.leaves), plan.without_memory().stages
    rows = plan.row_leaves(engine.policy.chunk)
    found = []
    for tier_run in tier_runs:
        faster = engine.tier_runs[: engine.tier_runs.index(tier_run)]
        publication = tier_write_of(tier_run, head, plan.leaves, rows, routes[tier_run.name], stages, faster)
        found.append(DirectJob(save_state, publication))
    return found


def _share(engine: DcpEngine, tier_run: PartTierRun, done: Task[Record]) -> TierPart | None:
    """The part in a tier; None if the tier failed and is not the durable one, whose error is raised."""
    failure = done.error
    if failure is None:
        part, tier_run.part = tier_run.part, None
        assert part is not None  # it was published without an error
        return TierPart(tier_run.name, tier_run.base, encode_part(part))
    if tier_run.name == engine.policy.durable or not isinstance(failure, TierstateError):
        raise failure
    log.error("a rank's part was not saved to %s: %s", tier_run.name, failure)
    return None


def _captured(
    engine: DcpEngine, plan: CapturePlan, head: Head, rank: int, direct_jobs: Sequence[DirectJob], save_state: SaveState
) -> Version:
    """Copy all planned values into slabs for all tiers; returns the version with this rank's shards only."""

    def dispatch(batch: SlabChunks) -> None:
        for job in direct_jobs:
            batch.slab.lease()
            job.feed(batch)
        batch.slab.release()

    outlet = CaptureSink(dispatch, stop=save_state.cancelled.is_set)
    captured = Capture(plan, head.chunk, engine.arena, digest_function(head.digest), outlet).run()
    return Version.build(head, plan.leaves, plan.shards(rank), _digests(captured.digests))


def _digests(found: Array) -> Array:
    return np.ascontiguousarray(found, "<u8")


def rank_parts(results: Sequence[Sequence[Any]]) -> list[RankPart]:
    """The parts that the ranks sent to the coordinator, by rank.

    Raises:
        FormatError: a rank sent no part; it may have used another storage writer.
    """
    found = [result[0].storage_data if len(result) == 1 else None for result in results]
    for rank, part in enumerate(found):
        if not isinstance(part, RankPart):
            raise FormatError(f"rank {rank} gave {part!r:.80} for its part; all ranks must save through a TierWriter")
    return [part for part in found if part is not None]
