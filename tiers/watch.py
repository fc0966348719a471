"""A watch: calls that may hang, each in a thread that is given up when nothing has come of it for too long."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tierstate.manifest.chunk import Buffer

from .base import Release
from .calls import Call, Effort, Hung, Loan, Underway
from .crew import Crew
from .host import KeepingArena

log = logging.getLogger("tierstate")

T = TypeVar("T")

LINGER = 1.0
"""Seconds for which the watching thread stays when there is nothing to watch."""

PATIENCE = 1.0
"""Seconds that closing waits for a thread that is about to end."""


class Watch:
    """Runs calls, and gives them up when nothing has come of them for too long.

    Then the place counts as hung: who waits is told so, and nothing more is begun until all that was given up has come
    back. After that what was put off is done, and then the place is as good as before.

    Args:
        seconds: without progress, after which a call is given up.
        arena: where buffers that are on loan meanwhile leave the budget of what is in flight.
        name: asked for what the place is called in messages.

    Attributes:
        trouble: what it hangs at; empty while it does not.
    """

    def __init__(self, seconds: float, arena: KeepingArena | None, name: Callable[[], str]) -> None:
        self.seconds, self._arena, self._name = seconds, arena, name
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._crew = Crew()
        self._underway: set[Underway] = set()
        self._put_off: list[Callable[[], object]] = []
        self._watching: threading.Thread | None = None
        self._closed = False
        self.trouble = ""

    # Calls and loans

    def begin(
        self,
        what: str,
        call: Callable[[], T],
        effort: Effort | None = None,
        late: Callable[[T], object] = lambda _result: None,
    ) -> Call[T]:
        """Begin a call.

        Args:
            what: what it is, for messages.
            effort: whose progress counts as this call's; by default it stands alone.
            late: given the result if it comes when nobody waits for it any more.

        Raises:
            Hung: it was not begun, since the place hangs.
        """
        if os.getpid() != self._pid:
            self._start_over()  # a forked child has none of its parent's threads, and waits for none of its calls
        made = Call(what, effort or Effort(), call, late)
        with self._changed:
            if self.trouble:
                raise self._refusal()
            self._add(made)
        try:
            self._crew.run(lambda: self._run(made))
        except BaseException:
            self._remove(made)
            raise
        return made

    def run(self, what: str, call: Callable[[], T], late: Callable[[T], object] = lambda _result: None) -> T:
        """Make a call and wait for what comes of it.

        Raises:
            Hung: the place hangs; the call was not begun, or was given up.
            BaseException: what the call raised.
        """
        return self.begin(what, call, late=late).result()

    def lend(self, what: str, effort: Effort, buffer: Buffer, release: Release) -> Release:
        """Watch a buffer that is about to be handed over. Returns what is to be called in place of ``release``."""
        loan = Loan(what, effort, buffer)
        with self._changed:
            self._add(loan)

        def let_go() -> None:
            try:
                release()
            finally:
                self._remove(loan)

        return let_go

    def _add(self, one: Underway) -> None:
        if self._watching is None and not self._closed:
            watching = threading.Thread(target=self._look, name="tierstate-watch", daemon=True)
            watching.start()  # it waits for the lock that we hold
            self._watching = watching
        if not one.effort.underway:
            one.effort.last = time.monotonic()
        one.effort.underway += 1
        self._underway.add(one)

    def _remove(self, one: Underway) -> None:
        with self._changed:
            self._drop(one)
            back = one.given_up and not self._misses_some()
        if back:
            self._clear_up()

    def _drop(self, one: Underway) -> None:
        self._underway.discard(one)
        one.effort.underway -= 1
        one.effort.last = time.monotonic()

    def _run(self, call: Call[Any]) -> None:
        call.run()
        with self._changed:
            in_time = not call.given_up
            if in_time:
                self._drop(call)
        if in_time:
            call.tell()
        else:
            call.discard()
            self._remove(call)

    # Giving up, and coming back

    def _look(self) -> None:
        """The watching thread: sleeps until the first moment at which something may be overdue."""
        with self._changed:
            while not self._closed and (self._waited() or self._lingered()):
                waited = self._waited()
                left = min((one.effort.last for one in waited), default=time.monotonic()) + self.seconds
                left -= time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._give_up(waited)
            self._watching = None

    def _lingered(self) -> bool:
        """Wait for as long as nothing can be overdue; whether there is something to watch again."""
        self._changed.wait(min(self.seconds, LINGER))
        return bool(self._waited())

    def _waited(self) -> list[Underway]:
        return [one for one in self._underway if not one.given_up]

    def _misses_some(self) -> bool:
        return any(one.given_up for one in self._underway)

    def _give_up(self, waited: list[Underway]) -> None:
        """Nothing is waited for any more: what was begun later will hardly come back sooner."""
        slowest = min(waited, key=lambda one: one.effort.last)
        silence = time.monotonic() - slowest.effort.last
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silence))
        self.trouble = f"hangs since {since}: {slowest.what} has not come back in {self.seconds:g} s"
        log.error("%s: %s; it is not used until that has come back", self._name(), self.trouble)
        for one in waited:
            one.given_up = True
            if isinstance(one, Loan) and self._arena is not None:
                self._arena.keep(one.buffer)
        for one in waited:
            if isinstance(one, Call):
                one.refusal = self._refusal()
                one.tell()

    def _refusal(self) -> Hung:
        return Hung(f"{self._name()}: {self.trouble}; it is used again once that has come back", tier=self._name())

    def afterwards(self, call: Callable[[], object]) -> None:
        """Have something done when all that was given up has come back; soon, if nothing is given up."""
        with self._changed:
            self._put_off.append(call)
            ready = not self._misses_some()
        if ready:
            self._clear_up()

    def _clear_up(self) -> None:
        """Do what was put off, in a thread of its own; until that is over the place counts as hung."""
        with self._changed:
            calls, self._put_off = self._put_off, []
            if calls:
                clearing = Call("clearing up", Effort(), lambda: _all(calls), lambda _result: None)
                clearing.given_up = True
                self._add(clearing)
            elif self.trouble and not self._misses_some():
                self.trouble = ""
                log.warning("%s: answers again", self._name())
        if calls:
            self._crew.run(lambda: self._run(clearing))

    def close(self, last: Callable[[], object]) -> None:
        """Have ``last`` done when all else is, and end the threads. What hangs is not waited for."""
        try:
            self._finally(last)
        finally:
            self.end(0.0 if self.trouble else PATIENCE)

    def end(self, patience: float = 0.0) -> None:
        """End the threads, as soon as they have nothing to do; they are waited for so many seconds at most."""
        if os.getpid() != self._pid:
            return  # a forked child has none of them, and may never get the lock
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            watching = self._watching
        self._crew.end(patience)
        if watching is not None and patience:
            watching.join(patience)

    def _finally(self, last: Callable[[], object]) -> None:
        try:
            call = self.begin("closing", last)
        except Hung:
            self.afterwards(last)
            return
        try:
            call.result()
        except Hung as error:
            log.warning("%s", error)


def _all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:
            log.warning("clearing up after what was given up failed: %r", error)
