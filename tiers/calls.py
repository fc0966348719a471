"""Calls in other threads, and what else is under way at a place that may hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierUnavailable

log = logging.getLogger("tierstate")

T = TypeVar("T")


class Hung(TierUnavailable):
    """A call has not come back in time, or is not begun since an earlier one has not come back yet."""


class Effort:
    """What makes progress as a whole: one call, or one writer with all that it has under way.

    Attributes:
        underway: how many of its calls and loans have not come back.
        last: when one came back, or when the first was begun, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.underway = 0
        self.last = 0.0


class Underway:
    """Something that has not come back yet.

    Attributes:
        what: what it is, for messages.
        given_up: nobody waits for it any more.
    """

    def __init__(self, what: str, effort: Effort) -> None:
        self.what, self.effort = what, effort
        self.given_up = False


class Loan(Underway):
    """A buffer that was handed over, until it is released."""

    def __init__(self, what: str, effort: Effort, buffer: Buffer) -> None:
        super().__init__(what, effort)
        self.buffer = buffer


class Call(Underway, Generic[T]):
    """A call in another thread.

    Attributes:
        refusal: what is raised in place of a result, once it was given up.
    """

    def __init__(self, what: str, effort: Effort, call: Callable[[], T], late: Callable[[T], object]) -> None:
        super().__init__(what, effort)
        self._call, self._late = call, late
        self._over = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.refusal: Hung | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it came back, sooner or later, without an error."""
        return bool(self._result)

    def run(self) -> None:
        """Make the call, whatever comes of it."""
        try:
            self._result.append(self._call())
        except BaseException as error:
            self._error = error
        del self._call

    def tell(self) -> None:
        """Wake who waits for it."""
        self._over.set()

    def discard(self) -> None:
        """Get rid of a result that nobody waits for any more."""
        if self._error is not None:
            log.info("%s came back after it was given up: %r", self.what, self._error)
            return
        try:
            self._late(self._result[0])
        except Exception as error:
            log.warning("%s came back after it was given up, and could not be undone: %r", self.what, error)

    def result(self) -> T:
        """What came of it.

        Raises:
            Hung: it has not come back in time.
            BaseException: what it raised.
        """
        try:
            self._over.wait()
        except BaseException:
            self.given_up = True  # interrupted: the result, when it comes, is nobody's
            raise
        if self.refusal is not None:
            raise self.refusal
        if self._error is not None:
            # Not kept here: its traceback holds on to this call, and that to the buffers of the caller.
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return self._result[0]
