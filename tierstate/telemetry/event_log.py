"""The log of a run's events in each of its tiers: JSON lines that another process reads on another day.

A process writes its events in pieces, objects of their own, as no object can be appended to everywhere:
``events/RUN/TIME-ID.jsonl``, with the milliseconds since 1970 of the first event, or the next number above those that
are there; its other events have happened within an hour after the first. The newest `PIECES` stay.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from typing import Any

from tierstate.engine.events import Event
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.errors import Damaged, FormatError, MediaError, NotFound, TierstateError
from tierstate.tiers.base import Tier, read_range
from tierstate.tiers.concurrency import run_concurrently

log = logging.getLogger("tierstate")


PIECES = 1440
"""Pieces of a run that stay in a tier: of a day, if there is one a minute."""


EVERYWHERE = ("failed", "away", "owed", "left_out", "restored")
"""Kinds of events that are logged in every tier."""


PIECE_EVENTS, PIECE_SECONDS = 512, 60.0
"""A piece is written when it has so many events, or its first one is so old."""


PIECE_SPAN = 3600.0
"""Seconds from the first event of a piece to the last one, at most. Where a tier was away for longer, its events are
several pieces, so that whoever wants the latest events need not read old pieces."""


MAX_PIECE, MAX_READ = 4 << 20, 64 << 20
"""Bytes of a piece, and of all pieces of a tier, that are read, at most: of the newest ones."""


LAST_NUMBER = 10**13 - 1
"""The highest number of a piece that a key has room for."""


WAITING = 4096
"""Events that wait for a tier that is away, at most; then the oldest are forgotten."""


_NAME = re.compile(r"events/([A-Za-z0-9][A-Za-z0-9._\-]*)/([0-9]{13})-[0-9a-f]{8}\.jsonl")


class EventLog:
    """Writes the events of one run to its persistent tiers; a rank writes to those of which it is the leader.

    Args:
        tier_runs: the run in each tier.
        run: its name.
    """

    def __init__(self, tier_runs: Sequence[TierRun], run: str) -> None:
        self._tiers = {s.name: s.tier for s in tier_runs if s.tier.traits.persistent and s.leads}
        self._run = run
        self._waiting: dict[str, list[Event]] = {name: [] for name in self._tiers}
        self._try_at: dict[str, float] = dict.fromkeys(self._tiers, 0.0)
        self._since: dict[str, float] = {}

    def event(self, event: Event) -> None:
        """Take an event. One of a tier is logged there, and in every tier if it may be of no use there, as the tier
        fails; one of the process in every tier."""
        names: Iterable[str] = [event.tier] if event.tier in self._tiers else ()
        if not event.tier or event.kind in EVERYWHERE:
            names = self._tiers
        for name in names:
            self._waiting[name].append(event)
            self._since.setdefault(name, time.monotonic())  # no time of an event: the clock may be set back
            del self._waiting[name][:-WAITING]
        self.tick()

    def tick(self) -> None:
        """Write what is due."""
        for name in self._tiers:
            self._write_if_due(name)

    def close(self) -> None:
        """Write what is left."""
        for name in self._tiers:
            if self._waiting[name]:
                self._write(name)

    def _write_if_due(self, name: str) -> None:
        events = self._waiting[name]
        if not events or time.monotonic() < self._try_at[name]:
            return
        if len(events) >= PIECE_EVENTS or time.monotonic() - self._since[name] >= PIECE_SECONDS:
            self._write(name)

    def _write(self, name: str) -> None:
        tier, events = self._tiers[name], self._waiting[name]
        if tier.trouble:
            return  # it hangs, and `close` is not to wait for it once more
        there: list[tuple[str, int]] = []
        try:
            there = sorted(_pieces(tier, self._run))
        except TierstateError as error:
            log.debug("%s: old events stay there: %s", name, error)
        try:
            while events:
                some = islice(events, PIECE_EVENTS)  # of more events it could be longer than what is read
                piece = list(takewhile(lambda event: 0 <= event.time - events[0].time <= PIECE_SPAN, some))
                text = "".join(json.dumps(event.encode(), separators=(",", ":")) + "\n" for event in piece)
                # Above all that are there: the clock may have been ahead when they were written, and the lowest go
                # first.
                number = min(max([int(1000 * piece[0].time), *(last + 1 for _, last in there[-1:])]), LAST_NUMBER)
                key = f"events/{self._run}/{number:013d}-{uuid.uuid4().hex[:8]}.jsonl"
                tier.put(key, as_buffer(text.encode()))
                there.append((key, number))
                del events[: len(piece)]
        except TierstateError as error:
            self._try_at[name] = time.monotonic() + PIECE_SECONDS
            log.debug("%s: events are logged there later: %s", name, error)
            return
        del self._since[name]
        try:
            tier.discard([key for key, _ in there[:-PIECES]])
        except TierstateError as error:
            log.debug("%s: old events stay there: %s", name, error)


def _pieces(tier: Tier, run: str) -> Iterator[tuple[str, int]]:
    """The keys of the pieces, each with its number: at least the milliseconds since 1970 of its first event."""
    return ((key, int(found[2])) for key in tier.list(f"events/{run}/") if (found := _NAME.fullmatch(key)))


def event_keys(tier: Tier, run: str) -> list[str]:
    """Keys of the log of a run in a tier."""
    return [key for key, _ in _pieces(tier, run)]


def read_events(tiers: Mapping[str, Tier], run: str, since: float = 0.0) -> list[Event]:
    """The events of a run that are logged in some tiers, each once, in the order of their times.

    Args:
        tiers: by name.
        since: seconds since 1970; older events are left out.

    Raises:
        TierstateError: no tier can be read; one of several is passed over with a warning.
    """
    found: dict[bytes, None] = {}  # what is of no tier is logged in all of them, in the same words
    failed: list[TierstateError] = []
    for name, tier in tiers.items():
        try:
            some = [line for piece in _logged(name, tier, run, since) for line in piece.splitlines()]
        except TierstateError as error:
            log.warning("%s: its log of events cannot be read: %s", name, error)
            failed.append(error)
        else:
            found |= dict.fromkeys(some)
    if failed and len(failed) == len(tiers):
        raise failed[0]
    return sorted((event for event in _decoded(list(found)) if event.time >= since), key=lambda event: event.time)


def _logged(name: str, tier: Tier, run: str, since: float) -> list[bytes]:
    """The pieces that may have events since a time, newest first; those that are damaged, or that no key of the policy
    opens, are passed over with a warning.

    Raises:
        TierstateError: the tier cannot be read, or no piece of it.
    """
    first = 1000 * (since - PIECE_SPAN)
    keys = [key for key, number in sorted(_pieces(tier, run), reverse=True)[:PIECES] if number >= first]
    chosen, left = list[tuple[str, int]](), MAX_READ
    for key, nbytes in zip(keys, run_concurrently(partial(_size, tier), keys), strict=True):
        left -= nbytes
        if left < 0:
            log.warning("%s: events before %s are left out: there are too many", name, key)
            break
        if nbytes > MAX_PIECE:
            log.warning("%s: %s is left out: %d bytes, where at most %d are right", name, key, nbytes, MAX_PIECE)
        else:
            chosen.append((key, nbytes))
    found = run_concurrently(lambda piece: _read(tier, *piece), chosen)
    failed = [error for error in found if isinstance(error, TierstateError)]
    if failed and len(failed) == len(found):
        raise failed[0]
    if failed:
        log.warning("%s: %d of %d pieces of its log cannot be read: %s", name, len(failed), len(found), failed[0])
    return [piece for piece in found if isinstance(piece, bytes)]


def _size(tier: Tier, key: str) -> int:
    with suppress(NotFound):  # the job goes on, and has deleted its oldest piece meanwhile
        return tier.size(key)
    return 0


def _read(tier: Tier, key: str, nbytes: int) -> bytes | TierstateError:
    try:
        return to_bytes(read_range(tier, key, 0, nbytes))
    except NotFound:
        return b""
    except (Damaged, FormatError, MediaError) as error:
        return error


def _decoded(lines: Sequence[bytes]) -> Iterator[Event]:
    for at in range(0, len(lines), PIECE_EVENTS):
        some = lines[at : at + PIECE_EVENTS]
        try:
            values = json.loads(b"[%s]" % b",".join(some))  # in one call, as there may be a hundred thousand
        except (ValueError, RecursionError):
            values = [value for line in some for value in _parsed(line)]
        for value in values:
            try:
                yield Event.decode(value)
            except FormatError as error:
                log.debug("a line of the log of events is left out: %s", error)


def _parsed(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError) as error:
        log.debug("a line of the log of events is left out: %s", error)
        return []
