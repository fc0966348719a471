"""A rank's part of a save through DCP: its bytes into packs, and what is to be said of them to the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.part import encode_part
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version
from tierstate.tiers.batch import Batch
from tierstate.tiers.capture import Capture, Outlet
from tierstate.tiers.formatted import publication_of
from tierstate.tiers.jobs import Intake
from tierstate.tiers.placement import is_due
from tierstate.tiers.plan import Plan
from tierstate.tiers.routes import Routes
from tierstate.tiers.ticket import Ticket

from .dcp_engine import Engine, PartShelf
from .dcp_lists import Listed

log = logging.getLogger("tierstate")


class Share(NamedTuple):
    """What one rank has put into one tier.

    Attributes:
        tier: its name.
        base: the commit that it builds on.
        record: the rank's part, as bytes.
    """

    tier: str
    base: str
    record: bytes


class Part(NamedTuple):
    """What one rank gives to a version.

    Attributes:
        shares: what it has put where.
        listed: values that the coordinator is to write.
    """

    shares: list[Share]
    listed: Listed


class Due(NamedTuple):
    """Where a save goes.

    Attributes:
        shelves: the run in those tiers.
        seq: the version's number, above all that they have.
        step: its step.
    """

    shelves: list[PartShelf]
    seq: int
    step: int


def due(engine: Engine, step: int | None, now: float, hosts: int) -> Due:
    """Where a save goes: to the durable tier always, since who calls save wants it there; to others as their `every`
    says. Left out are tiers that not all ranks see, and those that do not answer.

    Args:
        step: None for the one after the newest.
        now: seconds since 1970.
        hosts: on how many the ranks are.
    """
    durable = engine.shelf(engine.policy.durable)
    highest = durable.refresh()
    newest = durable.newest()
    if step is None:
        step = 0 if newest is None else newest.version.head.step + 1
    shelves = [durable]
    for tier in engine.policy.tiers:
        shelf = engine.shelf(tier.name)
        if shelf is durable or not {"process": False, "host": hosts == 1}.get(shelf.tier.traits.shared, True):
            continue
        try:
            highest = max(highest, shelf.refresh())
            newest = shelf.newest()
        except TierstateError as error:
            log.error("step %d is not saved to %s: %s", step, shelf.name, error)
            continue
        last = None if newest is None else (newest.version.head.step, newest.version.head.time)
        if is_due(tier.every, step, last, now):
            shelves.append(shelf)
    return Due(shelves, highest + 1, step)


def write(engine: Engine, plan: Plan, head: Head, rank: int, shelves: Sequence[PartShelf]) -> list[Share]:
    """Capture what is planned, and write it into packs of these tiers, all at once from the same slabs.

    Raises:
        CaptureError: something could not be copied out.
        TierstateError: the durable tier did not take it. Other tiers are left out where they fail.
    """
    ticket = Ticket(head, plan.total, [shelf.name for shelf in shelves], {})
    for shelf in shelves:
        shelf.rank = rank  # packs are named after it
    intakes = _intakes(engine, plan, head, shelves, ticket)
    engine.arena.prepare(plan.total)
    with ThreadPoolExecutor(len(intakes), thread_name_prefix="tierstate-dcp") as pool:
        running = [pool.submit(intake.run) for intake in intakes]
        outcome: Version | BaseException
        try:
            outcome = _captured(engine, plan, head, rank, intakes, ticket)
        except BaseException as error:
            ticket.cancelled.set()
            outcome = error
        for intake in intakes:
            intake.feed(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return [share for shelf, future in zip(shelves, running, strict=True) if (share := _share(engine, shelf, future))]


def _intakes(engine: Engine, plan: Plan, head: Head, shelves: Sequence[PartShelf], ticket: Ticket) -> list[Intake]:
    routes, stages = Routes(engine.policy).of(plan.leaves), plan.without_memory().stages
    rows = plan.row_leaves(engine.policy.chunk)
    found = []
    for shelf in shelves:
        faster = engine.shelves[: engine.shelves.index(shelf)]
        publication = publication_of(shelf, head, plan.leaves, rows, routes[shelf.name], stages, faster)
        found.append(Intake(ticket, publication))
    return found


def _share(engine: Engine, shelf: PartShelf, done: Future[Record]) -> Share | None:
    """What was put into a tier; None where that failed, and the tier is not the durable one."""
    failure = done.exception()
    if failure is None:
        part, shelf.part = shelf.part, None
        assert part is not None  # its publication has ended well
        return Share(shelf.name, shelf.base, encode_part(part))
    if shelf.name == engine.policy.durable or not isinstance(failure, TierstateError):
        raise failure
    log.error("a rank's part was not saved to %s: %s", shelf.name, failure)
    return None


def _captured(engine: Engine, plan: Plan, head: Head, rank: int, intakes: Sequence[Intake], ticket: Ticket) -> Version:
    """Copy everything out; the version that has this rank's shards alone."""

    def dispatch(batch: Batch) -> None:
        for intake in intakes:
            batch.slab.lease()
            intake.feed(batch)
        batch.slab.release()

    outlet = Outlet(dispatch, stop=ticket.cancelled.is_set)
    standing = Capture(plan, head.chunk, engine.arena, algorithm(head.digest), outlet).run()
    return Version.build(head, plan.leaves, plan.shards(rank), _digests(standing.digests))


def _digests(found: Array) -> Array:
    return np.ascontiguousarray(found, "<u8")


def checked(results: Sequence[Sequence[Any]]) -> list[Part]:
    """What each rank told the coordinator, by rank.

    Raises:
        FormatError: it is something else, as of another storage writer.
    """
    found = [result[0].storage_data if len(result) == 1 else None for result in results]
    for rank, part in enumerate(found):
        if not isinstance(part, Part):
            raise FormatError(f"rank {rank} gave {part!r:.80} for its part; all ranks must save through a TierWriter")
    return [part for part in found if part is not None]
