"""Events: what happens to saves, versions and tiers, in one vocabulary, for hooks, logs and metrics.

`EventBus` takes events from the threads of the engine and gives them to subscribers in a thread of its own, so that a
slow subscriber delays no save. What a person wants to know is logged at INFO at once, as one line per save and tier.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias

from tierstate.manifest.arguments import check_callable, short_repr
from tierstate.manifest.errors import FormatError
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.units import format_size, rough_duration

log = logging.getLogger("tierstate")


KINDS: Mapping[str, str] = MappingProxyType(
    {
        "saved": "`save` has returned; `seconds`: for how long it has blocked the caller",
        "captured": "every byte of a state is copied; `seconds`: since the call of `save`",
        "arena_full": "a save has waited for memory, since the arena was full, or was skipped; `seconds`: for how long",
        "skipped": "a save was not made, since the arena was full (`on_full: skip`)",
        "waited": "a step has waited for a capture (`guard`); `seconds`: for how long",
        "written": "the packs of a version are synced in a tier, and its record is next; `nbytes`: of them",
        "committed": "a version is in a tier; `seconds`: since the call of `save`; `nbytes`: written for it there",
        "cascaded": "as `committed`, by a copy from a faster tier; `seconds`: of the copy",
        "brought": "a version that had failed in a tier, or was owed to it, is there now",
        "owed": "a version has failed in a tier, and is brought later",
        "failed": "a version has failed in a tier; `reason`: the error",
        "left_out": "a tier leaves a version out; `reason`: why",
        "dropped": "retention has dropped a version from a tier",
        "mended": "damaged chunks were written again in a tier",
        "away": "calls of a tier fail; `reason`: the error",
        "back": "a tier that was away has taken a version",
        "interval": "`every: auto` of a tier has another interval; `seconds`: of it; `reason`: why",
        "alarm": "the statistics of a version are alarming (`alarms`); `reason`: the kind, and which leaves",
        "rank_silent": "a rank for which this one waits gives no sign of life; `reason`: which, and for how long",
        "rank_late": "in a restore a rank passes on too little, too late; `reason`: which, and if this one reads it",
        "restored": "a version was restored; `seconds`: for how long; `nbytes`: of its state",
    }
)
"""What each kind of event means. More kinds may come: ignore those that are not known."""


EVERY = "*"
"""Subscribes to events of all kinds."""


MAX_NUMBER = 1e12
"""No time or duration of an event is as long, in seconds."""


MAX_WAITING = 4096
"""Events that wait for subscribers, at most; further ones are dropped, and their number is told."""


CLOSE_WAIT = 5.0
"""Seconds that `EventBus.close` waits until subscribers have taken what is waiting."""


TICK = 10.0
"""Seconds without an event after which metrics and logs are brought up to date."""


class Event(NamedTuple):
    """Something that has happened.

    Attributes:
        kind: one of `KINDS`.
        time: when, in seconds since 1970.
        run: of which run.
        tier: in which tier; empty where it is about no tier.
        step, seq, version: of which version: its step, number, and id where it is known.
        rank: the rank that says so, if several save together.
        nbytes, seconds: as the kind says.
        reason: why.
        saved: when the version was saved, in seconds since 1970.
        raw: bytes of its state, of what of it rules send to the tier.
    """

    kind: str
    time: float
    run: str
    tier: str = ""
    step: int | None = None
    seq: int | None = None
    version: str = ""
    rank: int | None = None
    nbytes: int | None = None
    seconds: float | None = None
    reason: str = ""
    saved: float | None = None
    raw: int | None = None

    def encode(self) -> dict[str, Any]:
        """As JSON values, without what is not known."""
        return {name: value for name, value in self._asdict().items() if value not in (None, "")}

    @classmethod
    def decode(cls, encoded: Any) -> Self:
        """The event that `encode` has encoded, perhaps by a newer version of this package.

        Raises:
            FormatError: it is none.
        """
        if not isinstance(encoded, dict) or not encoded.keys() >= {"kind", "run", "time"}:
            raise FormatError(f"not an event: {str(encoded)[:100]}")
        known = {}
        for name, value in encoded.items():
            if (right := _RIGHT.get(name)) is not None:
                if type(value) not in right.types or (right.below and not right.least <= value < right.below):
                    raise FormatError(f"not an event: {str(encoded)[:100]}")
                known[name] = value
        return cls(**known)


class _Right(NamedTuple):
    """Which values an attribute can have; ``below`` is 0 for those that are no numbers."""

    types: tuple[type, ...]
    least: float = 0
    below: float = 0


_RIGHT: Mapping[str, _Right] = {
    **dict.fromkeys(("kind", "run", "tier", "version", "reason"), _Right((str,))),
    **dict.fromkeys(("time", "seconds", "saved"), _Right((int, float), 0, MAX_NUMBER)),
    **dict.fromkeys(("step", "seq", "rank", "nbytes", "raw"), _Right((int,), 1 - (1 << 63), 1 << 63)),
}


Subscriber: TypeAlias = Callable[[Event], object]


class _Lane:
    """A thread that gives events to its subscribers, one after the other."""

    def __init__(self, name: str) -> None:
        self.subscribers: list[tuple[str, Subscriber]] = []
        self.ticks: list[Callable[[], object]] = []
        self._name = name
        # Put to in C: an interrupt of the training thread leaves no lock behind.
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dropped, self._pid = 0, os.getpid()

    def put(self, event: Event) -> None:
        """Have an event given to the subscribers."""
        if not self.subscribers:
            return
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(event)
        else:
            self._dropped += 1

    def start(self) -> None:
        """Start the thread, unless it is."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Wait a bounded time until all that has happened is given, and end the thread."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        self._waiting.put(None)
        if thread is threading.current_thread():  # a hook closes: the thread ends after it
            return
        thread.join(CLOSE_WAIT)
        if thread.is_alive():
            log.warning("closed while %d events still wait for those who take them", self._waiting.qsize())

    def _run(self) -> None:
        while True:
            try:
                event = self._waiting.get(timeout=TICK)
            except Empty:
                for tick in list(self.ticks):
                    self._guarded(tick)
                continue
            if event is None:
                return
            dropped, self._dropped = self._dropped, 0
            if dropped:
                log.warning("%d events were dropped, since those who take them are too slow", dropped)
            for kind, call in self.subscribers:
                if kind in (EVERY, event.kind):
                    self._guarded(call, event)

    @staticmethod
    def _guarded(call: Callable[..., object], *events: Event) -> None:
        try:
            call(*events)
        except BaseException:  # also `sys.exit`, which would end only this thread, and so all other hooks
            log.exception("a hook for events has failed at %s", json.dumps([event.encode() for event in events]))


class EventBus:
    """The events of one run in this process.

    Args:
        run: its name.
        rank: of this process, if several save together.
    """

    def __init__(self, run: str, rank: int | None = None) -> None:
        self._run, self.rank = run, rank
        self._hooks, self._apart = _Lane("tierstate-events"), _Lane("tierstate-metrics")

    @property
    def ticks(self) -> list[Callable[[], object]]:
        """Called after `TICK` seconds without an event, in the thread of those who subscribe ``apart``."""
        return self._apart.ticks

    def emit(self, kind: str, **values: Any) -> None:
        """An event has happened now. ``values``: attributes of `Event`. Never raises what a subscriber does."""
        self.publish(Event(kind, time.time(), self._run, rank=self.rank, **values))

    def publish(self, event: Event) -> None:
        """As `emit`, for an event of this or another process."""
        if log.isEnabledFor(logging.INFO) and (text := describe(event)):
            log.info("%s", text)
        self._apart.put(event)
        self._hooks.put(event)

    def subscribe(self, kinds: str | Iterable[str], call: Subscriber, *, apart: bool = False) -> Callable[[], None]:
        """Have a function called with each event of some kinds, in a thread of this bus, one after the other.

        Args:
            kinds: one of `KINDS`, several, or ``"*"`` for all.
            call: what it raises is logged, and changes nothing.
            apart: in another thread than the hooks of users, which may be slow.

        Returns:
            Ends the subscription.

        Raises:
            ValueError: there is no such kind.
            TypeError: ``call`` cannot be called, or no kind is given.
        """
        # It would fail, and be logged, at each event.
        check_callable(call, "call", "give a function of an event, as print")
        if not isinstance(kinds, Iterable) or not kinds:
            raise TypeError(f"event {short_repr(kinds)}: name a kind of event, as 'committed', several, or {EVERY!r}")
        names = [kinds] if isinstance(kinds, str) else list(kinds)
        if wrong := [name for name in names if name != EVERY and name not in KINDS]:
            raise ValueError(f"{wrong[0]!r} is no kind of event; known are {', '.join(KINDS)}, and {EVERY!r} for all")
        lane, added = self._apart if apart else self._hooks, [(name, call) for name in names]
        lane.subscribers = [*lane.subscribers, *added]
        lane.start()

        def end() -> None:
            lane.subscribers = [one for one in lane.subscribers if one not in added]

        return end

    def close(self) -> None:
        """Wait a bounded time until all subscribers have what has happened, and end the threads."""
        self._apart.close()
        self._hooks.close()


def describe(event: Event) -> str:
    """The line of an event for a person; empty for those that are told elsewhere, or by another one."""
    step, tier = event.step, event.tier
    after = "" if event.seconds is None else f" after {event.seconds:.2f} s"
    size = "" if event.nbytes is None else f" ({format_size(event.nbytes)} written)"
    match event.kind:
        case "committed" | "brought":
            return f"run {event.run}: step {step} is on {tier}{after}{size}"
        case "cascaded":
            return f"run {event.run}: step {step} is on {tier}, copied in {event.seconds or 0.0:.2f} s{size}"
        case "interval":
            return f"run {event.run}: {tier} gets a save every {rough_duration(event.seconds or 0.0)}: {event.reason}"
        case "dropped":
            return f"run {event.run}: version {event.seq} was dropped from {tier}"
    return ""
