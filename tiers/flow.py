"""The flow: saves on their way from the captured state to every tier they are due in."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tierstate.manifest.errors import AlreadyExists, CaptureError, NotFound, TierstateError, TierUnavailable
from tierstate.manifest.head import Head
from tierstate.manifest.leaf import Leaf, encode_path

from .arena import Arena
from .capturing import Capturing, Work
from .lane import Copy, Intake, Job, Lane
from .placement import Last, able_to_cascade, codecs_of, due, entry_tiers, route
from .plan import Plan
from .policy import Policy
from .publication import Publication, Route
from .shelf import Shelf
from .ticket import Ticket

log = logging.getLogger("tierstate")


UNTOLD = 100
"""Failed saves that are remembered until somebody asks; a tier may fail for weeks."""


class Flow:
    """Carries saves to the tiers of a policy: one thread captures, one per tier publishes.

    Args:
        policy: where what goes.
        shelves: the run in each tier, in the policy's order.
        arena: the memory saves pass through.
    """

    def __init__(self, policy: Policy, shelves: Sequence[Shelf], arena: Arena) -> None:
        self._policy, self._arena = policy, arena
        self._shelves = {shelf.name: shelf for shelf in shelves}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._last: dict[str, Last | None] = {}
        self._routes: tuple[tuple[Leaf, ...], dict[str, Route]] | None = None
        self._tickets: list[Ticket] = []
        self._seq, self._look = 0, True
        self._parent = ""
        self.skipped = 0
        self.lanes: dict[str, Lane] = {}
        self._capturing: Capturing | None = None

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
        capturing = self._start()
        self._raise_if_lost()
        routes = self._route(plan.leaves)
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
        work = Work(ticket, plan, self._jobs(ticket, plan, names, routes))
        try:
            with self._lock:
                self._tickets = [*self._worth_keeping(), ticket]
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

    def _start(self) -> Capturing:
        if self._capturing is None:
            self.lanes = {n: Lane(s, self._in_use(n), self._settled) for n, s in self._shelves.items()}
            self._capturing = Capturing(self._arena, self._end_lanes)
            self._capturing.parent = self._parent
        return self._capturing

    def _end_lanes(self) -> None:
        for lane in self.lanes.values():
            lane.end()

    def _route(self, leaves: tuple[Leaf, ...]) -> dict[str, Route]:
        """Routes of these leaves, remembered while their paths stay."""
        if self._routes is None or not _same_paths(self._routes[0], leaves):
            paths = [leaf.path for leaf in leaves]
            masks = route(self._policy, paths)
            routes = {name: Route(mask, codecs_of(self._policy, name, paths)) for name, mask in masks.items()}
            self._routes = leaves, routes
        self._routes = leaves, self._routes[1]
        return self._routes[1]

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
        self, ticket: Ticket, plan: Plan, names: Sequence[str], routes: Mapping[str, Route]
    ) -> list[tuple[Lane, Job]]:
        """The save's way into each of its tiers: from slabs where it enters, from a faster tier elsewhere."""
        persistent = [self._shelves[n].tier.traits.persistent for n in names]
        wish = entry_tiers(names, persistent, [self.lanes[n].healthy for n in names])
        entry, cascade = able_to_cascade(*wish, {n: routes[n].leaves for n in names})
        rows = plan.row_leaves(self._policy.chunk)
        sources = [self._shelves[n] for n in entry]
        jobs: list[tuple[Lane, Job]] = []
        for name in names:
            publication = Publication(self._shelves[name], ticket.head, plan.leaves, rows, routes[name])
            copied = name in cascade
            job = Copy(ticket, publication, sources, self._arena) if copied else Intake(ticket, publication)
            jobs.append((self.lanes[name], job))
        return jobs

    def _in_use(self, name: str) -> Callable[[], set[int]]:
        """Numbers of saves that a slower tier has yet to read from this one."""
        slower = list(self._shelves)[list(self._shelves).index(name) + 1 :]

        def pinned() -> set[int]:
            with self._lock:
                return {t.head.seq for t in self._tickets for s in slower if s in t.tiers and not t.tiers[s].done()}

        return pinned

    def _settled(self, ticket: Ticket) -> None:
        ticket.forget_tables()
        for name in ticket.tiers:
            if ticket.error(name) is not None and self._last.get(name) == (ticket.head.step, ticket.head.time):
                # What did not arrive does not count for the cadence: the next save goes there instead.
                self._last[name] = None
            if isinstance(ticket.error(name), (AlreadyExists, NotFound)):
                # Another writer took the number, or dropped what this save built on: look before the next save.
                self._look = True

    def _worth_keeping(self) -> list[Ticket]:
        """Saves that are under way, and the newest of those with a failure that nobody has been told of."""
        under_way = [t for t in self._tickets if not t.settled()]
        untold = [t for t in self._tickets if t.settled() and any(t.error(n) and n not in t.told for n in t.tiers)]
        return untold[-UNTOLD:] + under_way

    def _raise_if_lost(self) -> None:
        """An earlier save that reached no persistent tier at all is told at the next one, once."""
        for ticket in list(self._tickets):
            lasting = [n for n in ticket.tiers if self._shelves[n].tier.traits.persistent]
            errors = [ticket.error(n) for n in lasting]
            if lasting and all(errors) and not ticket.told & set(lasting):
                ticket.told |= set(ticket.tiers)
                error = errors[0]
                assert error is not None
                error.add_note(f"this is what became of the save of step {ticket.head.step}; it has no durable copy")
                raise error

    def failures(self) -> list[tuple[Ticket, str, BaseException]]:
        """What went wrong and has been told to nobody yet; it counts as told from now on."""
        found = []
        for ticket in self._tickets:
            for name in ticket.tiers:
                error = ticket.error(name)
                if error is not None and name not in ticket.told:
                    ticket.told.add(name)
                    found.append((ticket, name, error))
        return found

    def close(self, timeout: float | None = None) -> None:
        """Bring what is under way to every tier, and end the threads.

        Raises:
            TierUnavailable: it was not done within ``timeout`` seconds; the message says what was not.
        """
        if self._capturing is None or os.getpid() != self._pid:
            return
        end = None if timeout is None else time.monotonic() + timeout
        self._capturing.end()
        self._capturing.join(timeout)
        lanes = list(self.lanes.values())
        ended = [lane for lane in lanes if lane.join(None if end is None else max(0.0, end - time.monotonic()))]
        late = [f"step {t.head.step} to {n}" for t in self._tickets for n, f in t.tiers.items() if not f.done()]
        if late:
            for ticket in self._tickets:
                ticket.cancelled.set()
            self._arena.wake()
            raise TierUnavailable(f"closed after {timeout} s while still under way: {', '.join(late)}")
        for lane in ended:
            # What a slower tier still had to read when its own turn came.
            lane.retire()
        self._capturing = None


def _same_paths(one: tuple[Leaf, ...], other: tuple[Leaf, ...]) -> bool:
    """Whether the paths are the same; as text, since 1 and True are equal, and rules tell them apart."""
    pairs = zip(one, other, strict=True)
    return one is other or (
        len(one) == len(other) and all(a is b or encode_path(a.path) == encode_path(b.path) for a, b in pairs)
    )
