"""The flow: saves on their way from the captured state to every tier they are due in."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from tierstate.manifest.errors import AlreadyExists, CaptureError, NotFound, TierstateError, TierUnavailable
from tierstate.manifest.head import Head

from .arena import Arena
from .capturing import Capturing, Work
from .cascade import Cascade
from .formatted import Stages, publication_of
from .jobs import Intake, Job
from .lane import Lane
from .ledger import Ledger
from .owing import Due
from .placement import Last, able_to_cascade, due, entry_tiers
from .plan import Plan
from .policy import Policy
from .route import Route
from .routes import Routes
from .shelf import Shelf
from .snapshot import snapped
from .ticket import Ticket

log = logging.getLogger("tierstate")

Watch: TypeAlias = Callable[[Mapping[str, int]], None]
"""Told how many bytes each tier is yet to get."""

WATCHED = 0.1
"""Seconds between two looks of whoever watches the drain."""

GRACE = 5.0
"""Seconds that threads have to end after an interrupt."""


class Flow:
    """Carries saves to the tiers of a policy: one thread captures, one per tier publishes.

    Args:
        policy: where what goes.
        shelves: the run in each tier, in the policy's order.
        arena: the memory saves pass through.
    """

    rank: int | None = None
    """Of this process, where several save together."""

    def __init__(self, policy: Policy, shelves: Sequence[Shelf], arena: Arena) -> None:
        self._policy, self._arena = policy, arena
        self._shelves = {shelf.name: shelf for shelf in shelves}
        self._pid = os.getpid()
        self._last: dict[str, Last | None] = {}
        self._routes = Routes(policy)
        self._ledger = Ledger()
        self._cascade = Cascade(policy, shelves, self._ledger, arena, self._settled, self._brought)
        self._seq, self._look = 0, True
        self._parent = ""
        self.skipped = 0
        self._capturing: Capturing | None = None

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The thread of each tier, by its name; none before the first save."""
        return self._cascade.lanes

    def continue_from(self, version: str) -> None:
        """The next version's parent is this one: it was restored."""
        self._parent = version
        if self._capturing is not None:
            self._capturing.parent = version

    def submit(self, plan: Plan, head: Head) -> Ticket:
        """Start a save. The state must hold still until ``ticket.captured`` is done.

        Args:
            plan: what to capture.
            head: of the version to be.
        """
        if os.getpid() != self._pid:
            raise CaptureError("this Checkpointer was made in another process; make one in the process that saves")
        capturing = self._start(head)
        self._tell_lost()
        routes = self._routes.of(plan.leaves)
        names, elsewhere = self._due(head, routes)
        ticket = Ticket(head, plan.total, names, elsewhere)
        if not names:
            ticket.nothing_to_do()
            return ticket
        if self._must_skip(plan):
            self.skipped += 1
            log.warning("step %d is not saved: the arena is full (on_full: skip)", head.step)
            ticket.skip()
            return ticket
        self._arena.prepare(plan.total)
        final = [plan.without_memory()]  # the plan by which it is captured in the end
        work = Work(ticket, plan, self._jobs(ticket, plan, names, routes, lambda: final[0].stages()))
        try:
            work = snapped(work)
            final[0] = work.plan.without_memory()
            self._ledger.add(ticket)
            self._last |= dict.fromkeys(names, (head.step, head.time))
            capturing.put(work)
        except BaseException:
            # Interrupted: have it end as cancelled, whether it was begun or not; the state must not be read any more.
            ticket.cancelled.set()
            ticket.told |= set(names)
            capturing.put(work)
            ticket.captured.exception()
            raise
        return ticket

    def _tell_lost(self) -> None:
        """Raise what an earlier save that reached no persistent tier met."""
        self._ledger.raise_if_lost([n for n, s in self._shelves.items() if s.tier.traits.persistent])

    def next_seq(self) -> int:
        """The number of the next version: above all that any tier has, as far as they can be read."""
        if self._look:
            self._look = False
            # Never below what this process has given out: such a save may still be under way.
            self._seq = max(self._seq, *map(self._highest, self._shelves.values()))
        self._seq += 1
        return self._seq

    @staticmethod
    def _highest(shelf: Shelf) -> int:
        try:
            return shelf.highest_seq()
        except TierstateError as error:
            log.warning("%s: its log cannot be listed: %s", shelf.name, error)
            return 0

    def _start(self, head: Head) -> Capturing:
        if self._capturing is None:
            self._cascade.start(head.seq)
            self._capturing = Capturing(self._arena, self._end_lanes, self.rank)
            self._capturing.parent = self._parent
        return self._capturing

    def _end_lanes(self) -> None:
        for lane in self.lanes.values():
            lane.end()

    def _due(self, head: Head, routes: Mapping[str, Route]) -> tuple[list[str], dict[str, str]]:
        last = {name: self._last_of(name) for name in self._shelves}
        names = set(due(self._policy, head.step, last, head.time))
        going, elsewhere = [], {}
        for tier in self._policy.tiers:
            if tier.name not in names:
                elsewhere[tier.name] = f"its `every: {tier.every}` is not due"
            elif not routes[tier.name].leaves.any():
                elsewhere[tier.name] = "no rule sends a leaf there"
            else:
                going.append(tier.name)
        return going, elsewhere

    def _last_of(self, name: str) -> Last | None:
        """Step and time of the newest save that went to a tier: by this process, or else by the tier's log."""
        if name not in self._last:
            try:
                newest = self._shelves[name].newest()
            except TierstateError as error:
                log.warning("%s: its log cannot be read, so this save is taken to be due there: %s", name, error)
                return None
            self._last[name] = (newest.version.head.step, newest.version.head.time) if newest else None
        return self._last[name]

    def _must_skip(self, plan: Plan) -> bool:
        return self._policy.arena.on_full == "skip" and self._arena.lacks(plan.total)

    def _jobs(
        self, ticket: Ticket, plan: Plan, names: Sequence[str], routes: Mapping[str, Route], stages: Stages
    ) -> list[tuple[Lane, Job]]:
        """The save's way into each of its tiers: from slabs where it enters, from a faster tier elsewhere."""
        persistent = [self._shelves[n].tier.traits.persistent for n in names]
        wish = entry_tiers(names, persistent, [self.lanes[n].healthy for n in names])
        sources = [n for n in names if not self._shelves[n].tier.traits.scarce]
        sure = {n for n, lasts in zip(names, persistent, strict=True) if lasts and self.lanes[n].healthy}
        entry, cascade = able_to_cascade(*wish, {n: routes[n].leaves for n in names}, sure)
        entries, rows = [n for n in entry if n in sources], plan.row_leaves(self._policy.chunk)

        def job(name: str) -> Job:
            if name in cascade:
                return self._cascade.copy(name, Due.of(ticket.head, ticket.nbytes), ticket, entries)
            shelf, faster = self._shelves[name], list(takewhile(lambda s: s.name != name, self._shelves.values()))
            return Intake(ticket, publication_of(shelf, ticket.head, plan.leaves, rows, routes[name], stages, faster))

        return [(self.lanes[name], job(name)) for name in names]

    def _settled(self, ticket: Ticket) -> None:
        for name in ticket.tiers:
            error = ticket.failure(name)
            if error is not None and self._last.get(name) == (ticket.head.step, ticket.head.time):
                # What did not arrive does not count for the cadence: the next save goes there instead.
                self._last[name] = None
            if isinstance(error, (AlreadyExists, NotFound)):
                # Another writer took the number, or dropped what this save built on: look before the next save.
                self._look = True

    def _brought(self, name: str, due: Due) -> None:
        """A version that had not arrived is there now: it counts for the cadence after all."""
        self._ledger.brought(name, due.seq)
        if self._last.get(name) is None:
            self._last[name] = due.step, due.time

    def pinned(self, tier: str) -> Mapping[int, str]:
        """Versions that a tier must keep for now, since slower ones are filled from there, and why."""
        return self._cascade.pinned(tier) if self.lanes else {}

    def coming(self, tier: str) -> set[int]:
        """Numbers of the versions that are being written to a tier, or will be."""
        return self._ledger.wanted(tier) | (self.lanes[tier].wanted() if self.lanes else set())

    def failures(self) -> list[tuple[Ticket, str, BaseException]]:
        """What went wrong and has been told to nobody yet; it counts as told from now on."""
        return self._ledger.failures()

    def close(self, timeout: float | None = None, watch: Watch | None = None) -> None:
        """Bring what is under way to every tier, try once more what is owed, and end the threads.

        Args:
            watch: called every now and then with the bytes of state that each tier is yet to get.

        Raises:
            TierUnavailable: it was not done within ``timeout`` seconds; the message says what was not.
        """
        if self._capturing is None or os.getpid() != self._pid:
            return
        self._capturing.end()
        try:
            self._drain(math.inf if timeout is None else timeout, watch)
        except BaseException as error:
            # Interrupted by the user: what runs is to let go of tiers and memory before those are closed.
            error.add_note(f"closed while still under way: {', '.join(self._ledger.late()) or 'nothing'}")
            self._give_up()
            self._drain(GRACE, None)
            raise
        late, owed = self._ledger.late(), self._still_owed()
        if owed:
            log.warning("closed while still owed, which the next process looks for: %s", owed)
        if late:
            self._give_up()
            told = f"; still owed: {owed}" if owed else ""
            raise TierUnavailable(f"closed after {timeout} s while still under way: {', '.join(late)}{told}")
        self._finish()

    def _finish(self) -> None:
        for lane in self.lanes.values():
            if lane.join(0.0):
                # What a slower tier still had to read when its own turn came.
                lane.retire()
            else:
                lane.stop()  # it is bringing what is owed, and that takes too long
        self._capturing = None

    def _drain(self, seconds: float, watch: Watch | None) -> None:
        """Wait until all threads have ended, or so many seconds are over."""
        end = time.monotonic() + seconds
        joins = [self._capturing.join, *(lane.join for lane in self.lanes.values())] if self._capturing else []
        while joins and (left := end - time.monotonic()) > 0:
            if watch is not None:
                watch({name: lane.left for name, lane in self.lanes.items()})
            if joins[0](min(left, WATCHED if watch else threading.TIMEOUT_MAX)):
                del joins[0]

    def _still_owed(self) -> str:
        return "; ".join(
            f"{name}: step {', '.join(str(due.step) for due in owed)}"
            for name, lane in self.lanes.items()
            if (owed := lane.owed())
        )

    def _give_up(self) -> None:
        self._ledger.cancel()
        for lane in self.lanes.values():
            lane.stop()
        self._arena.wake()
