"""Retries: how often and how long an operation is tried before the store counts as unavailable."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from .object_errors import code_of, kind

FIRST, LONGEST = 0.1, 10.0
"""Seconds: before the second attempt at most, and before any."""

T = TypeVar("T")


class GaveUp(ConnectionError):
    """The time for an operation is over, and every attempt failed."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return kind(error).transient


def longest_pause(attempts: int) -> float:
    """Seconds to wait at most after so many attempts: twice as long each time."""
    return min(LONGEST, FIRST * 2.0 ** min(attempts - 1, 30))


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
    ) -> T:
        """What the first attempt gives that does not fail.

        Args:
            attempt: is told the seconds that are left.
            again: which errors it is worth trying again after.
            stop: once set, no attempt follows.

        Raises:
            GaveUp: after the last of several attempts; says how many there were, and why they failed.
            whatever the only attempt raised, or one that is not worth another.
        """
        stop = stop or threading.Event()
        start, reasons = time.monotonic(), Counter[str]()
        while True:
            left = self.deadline - (time.monotonic() - start)
            try:
                return attempt(max(left, FIRST))
            except Exception as error:
                if not again(error):
                    raise
                reasons[code_of(error)] += 1
                pause = self._draw() * longest_pause(reasons.total())
                over = time.monotonic() + pause - start >= self.deadline
                if over or stop.wait(pause):
                    if reasons.total() == 1:
                        raise
                    raise self._given_up(error, reasons, time.monotonic() - start) from error

    def _given_up(self, error: Exception, reasons: Counter[str], seconds: float) -> GaveUp:
        told = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        return GaveUp(
            f"{type(error).__name__}: {error} (the last of {reasons.total()} attempts in {seconds:.1f} s of a deadline "
            f"of {self.deadline:g} s: {told})"
        )
