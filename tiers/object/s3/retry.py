"""Retries of S3 operations until a deadline, with back-off; errors that are not transient are raised at once.

A transfer that makes progress between failures continues with short pauses; one without progress is given up.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from tierstate.tiers.backoff import Backoff
from tierstate.tiers.latch import Latch
from tierstate.tiers.object.filesystem import store_error_class, store_error_code

from .http_session import Broken

REQUEST_BACKOFF = Backoff(first=0.1, longest=10.0)
"""Pauses between two attempts of one operation."""


COUNTED = 0.5
"""Share of the deadline that one attempt counts at most which lasted longer than it can be silent: bytes have moved, or
this process was stopped meanwhile (SIGSTOP, a frozen container)."""


MAX_USELESS = 4
"""After this many broken responses in a row without progress, the operation is given up."""


T = TypeVar("T")


class GaveUp(ConnectionError):
    """The deadline of an operation has passed, and every attempt failed."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return store_error_class(error).transient


class _Attempts:
    """The attempts of one operation, all of which failed so far.

    Attributes:
        reasons: how often each error occurred.
        since: failures since the last progress, with the attempt that made it.
        useless: broken responses after that attempt.
    """

    def __init__(self, moved: Callable[[], int]) -> None:
        self.reasons = Counter[str]()
        self.since = self.useless = 0
        self._moved, self._at, self._start = moved, moved(), time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the first attempt began, without those that do not count."""
        return time.monotonic() - self._start

    def failed(self, error: Exception, free: float) -> None:
        """Add a failed attempt, of which so many seconds do not count."""
        self._start += free
        self.reasons[store_error_code(error)] += 1
        at = self._moved()
        if at != self._at:
            self._at, self.since, self.useless = at, 1, 0
        else:
            self.since += 1
            self.useless += isinstance(error, Broken)

    def gave_up(self, error: Exception, deadline: float) -> GaveUp:
        """The error to raise in the end."""
        told = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return GaveUp(
            f"{type(error).__name__}: {error} (the last of {self.reasons.total()} attempts in {self.seconds:.1f} s of "
            f"a deadline of {deadline:g} s: {told})"
        )


class RetryUntilDeadline:
    """Repeats an operation while its errors are transient and its deadline has not passed, with `REQUEST_BACKOFF`.

    Args:
        deadline: seconds that one operation may take with all its attempts.
        draw: returns a random number from 0 to 1.
        silence: seconds for which one attempt waits for a server that does not answer, at most.
    """

    def __init__(
        self, deadline: float, draw: Callable[[], float] = random.random, silence: float = float("inf")
    ) -> None:
        self.deadline = deadline
        self._draw, self._silence = draw, silence

    def run(
        self,
        attempt: Callable[[float], T],
        again: Callable[[BaseException], bool] = is_transient,
        stop: Latch | None = None,
        moved: Callable[[], int] = int,
    ) -> T:
        """Retry until an attempt succeeds; returns its result.

        Args:
            attempt: called with the seconds that are left.
            again: whether an error is transient, so that another attempt makes sense.
            stop: once set, there are no more attempts.
            moved: returns the progress of the operation. After an attempt with progress, pauses are short again.

        Raises:
            GaveUp: after several failed attempts; the message has their number and reasons.
            Exception: the error of the only attempt, or one that is not transient.
        """
        stop, made = stop or Latch(), _Attempts(moved)
        while True:
            left, began = max(self.deadline - made.seconds, REQUEST_BACKOFF.first), time.monotonic()
            try:
                return attempt(left)
            except Exception as error:
                if not again(error):
                    raise
                made.failed(error, self._free(time.monotonic() - began, left))
                pause = REQUEST_BACKOFF.pause(made.since, self._draw)
                over = made.seconds + pause >= self.deadline or made.useless >= MAX_USELESS
                if over or stop.wait(pause):
                    if made.reasons.total() == 1:
                        raise
                    raise made.gave_up(error, self.deadline) from error

    def _free(self, lasted: float, left: float) -> float:
        """Seconds of an attempt that do not count. ``left``: as it was given; it has no longer timeouts."""
        return max(0.0, lasted - COUNTED * self.deadline) if lasted > min(self._silence, 2 * left) else 0.0
