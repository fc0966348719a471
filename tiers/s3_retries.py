"""Retries: how often and how long an operation is tried before the store counts as unavailable."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from .object_errors import code_of, kind
from .s3_answers import Broken

FIRST, LONGEST = 0.1, 10.0
"""Seconds: before the second attempt at most, and before any."""

USELESS = 4
"""Answers in a row that broke off, or were to another question, and brought nothing: no other is asked for."""

T = TypeVar("T")


class GaveUp(ConnectionError):
    """The time for an operation is over, and every attempt failed."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return kind(error).transient


def longest_pause(attempts: int) -> float:
    """Seconds to wait at most after so many attempts: twice as long each time."""
    return min(LONGEST, FIRST * 2.0 ** min(attempts - 1, 30))


class _Attempts:
    """The attempts of one operation, all of which failed so far.

    Attributes:
        reasons: how often each failed.
        since: how many there were since something moved, with the one that moved it.
        useless: how many after that one were answered all the same.
    """

    def __init__(self, moved: Callable[[], int]) -> None:
        self.reasons = Counter[str]()
        self.since = self.useless = 0
        self._moved, self._at, self._start = moved, moved(), time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first one began."""
        return time.monotonic() - self._start

    def failed(self, error: Exception) -> None:
        """One more."""
        self.reasons[code_of(error)] += 1
        at = self._moved()
        if at != self._at:
            self._at, self.since, self.useless = at, 1, 0
        else:
            self.since += 1
            self.useless += isinstance(error, Broken)

    def gave_up(self, error: Exception, deadline: float) -> GaveUp:
        """What to say in the end."""
        told = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return GaveUp(
            f"{type(error).__name__}: {error} (the last of {self.reasons.total()} attempts in {self.seconds:.1f} s of "
            f"a deadline of {deadline:g} s: {told})"
        )


class Patience:
    """Tries operations again while their errors are transient, after pauses between none and twice the last longest.

    The pauses are drawn anew each time, so that many clients that failed together do not come back together (full
    jitter, as in the AWS Architecture Blog's "Exponential Backoff And Jitter").

    Args:
        deadline: seconds that one operation may take with all its attempts.
        draw: a number from 0 to 1.
    """

    def __init__(self, deadline: float, draw: Callable[[], float] = random.random) -> None:
        self.deadline = deadline
        self._draw = draw

    def run(
        self,
        attempt: Callable[[float], T],
        again: Callable[[BaseException], bool] = is_transient,
        stop: threading.Event | None = None,
        moved: Callable[[], int] = int,
    ) -> T:
        """What the first attempt gives that does not fail.

        Args:
            attempt: is told the seconds that are left.
            again: which errors it is worth trying again after.
            stop: once set, no attempt follows.
            moved: how far the operation is. After an attempt that took it further, pauses are short again.

        Raises:
            GaveUp: after the last of several attempts; says how many there were, and why they failed.
            whatever the only attempt raised, or one that is not worth another.
        """
        stop, made = stop or threading.Event(), _Attempts(moved)
        while True:
            try:
                return attempt(max(self.deadline - made.seconds, FIRST))
            except Exception as error:
                if not again(error):
                    raise
                made.failed(error)
                pause = self._draw() * longest_pause(made.since)
                over = made.seconds + pause >= self.deadline or made.useless >= USELESS
                if over or stop.wait(pause):
                    if made.reasons.total() == 1:
                        raise
                    raise made.gave_up(error, self.deadline) from error
