"""A small race: whether a store really creates an object only once."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tierstate.manifest.errors import AlreadyExists, TierError, TierUnavailable

RACERS = 8

MORE, SECONDS = 8, 10.0
"""Rounds that are run instead of those in which answers were lost, at most, and for how long new ones are begun."""

LATE = 2.0
"""Seconds that racers wait for each other."""

Start = Callable[[], None]

Create = Callable[[str, int, Start], None]
"""Creates an object of the given name under the condition that there is none, with bytes that tell the racer's number;
calls the last argument where all racers should be before any of them goes on."""


def one_winner(create: Create, delete: Callable[[str], None], rounds: int) -> bool:
    """Whether every round of several creates at once had one winner.

    A store that ignores the condition lets everybody win; one that checks it and then writes lets some. True proves
    nothing about a race to come: it says that none of these was lost. Who lost the answer may have won, so a round in
    which somebody did says nothing unless there are several winners without him.

    Raises:
        TierUnavailable: nobody got an answer, or some were lost in too many rounds.
        TierError: a create failed, for another reason than that the name was taken.
    """
    told, begun = 0, time.monotonic()
    outcomes: Sequence[TierError | None] = ()
    with ThreadPoolExecutor(RACERS) as pool:
        for n in range(rounds + MORE):
            if n >= rounds and time.monotonic() - begun > SECONDS:
                break
            outcomes = _run(pool, create, delete)
            if outcomes.count(None) > 1:
                return False
            told += outcomes.count(None) == 1 and not any(isinstance(one, TierUnavailable) for one in outcomes)
            if told == rounds:
                return True
    raise _why(outcomes)


def _run(pool: ThreadPoolExecutor, create: Create, delete: Callable[[str], None]) -> list[TierError | None]:
    """One round: what became of each racer, None where it won."""
    name, start = f".probe-{uuid.uuid4().hex}", _line()

    def enter(racer: int) -> TierError | None:
        try:
            create(name, racer, start)
        except TierError as error:
            return error
        return None

    outcomes = list(pool.map(enter, range(RACERS)))
    silent = all(isinstance(error, TierUnavailable) for error in outcomes)
    for error in outcomes:
        if error is not None and (silent or not isinstance(error, (AlreadyExists, TierUnavailable))):
            raise error
    delete(name)
    return outcomes


def _line() -> Start:
    """Where all racers wait for each other; who comes back later is not held up."""
    barrier, gone = threading.Barrier(RACERS, timeout=LATE), threading.Event()

    def wait() -> None:
        with suppress(threading.BrokenBarrierError):
            if not gone.is_set():
                barrier.wait()
        gone.set()

    return wait


def _why(outcomes: Sequence[TierError | None]) -> TierError:
    """The error to tell after the last of too many rounds that said nothing."""
    lost = next((error for error in outcomes if isinstance(error, TierUnavailable)), None)
    return lost or TierUnavailable("a race of creates had no winner, again and again")
