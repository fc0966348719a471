"""The circuit breaker of a tier: a tier that hung is left alone, and asked again at intervals; other calls fail fast.

`Watchdog` has one for tiers whose calls cannot be interrupted. `Breaking` is a wrapper with one for tiers whose calls
end by themselves at a deadline, such as S3. While a breaker is open, `Tier.trouble` says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier
from tierstate.tiers.concurrency import start_thread

from .base import Wrapping, WrappingWriter

log = logging.getLogger("tierstate")


LONGEST_PAUSE = 60.0
"""Seconds after which a tier that hung is asked again at the latest; with a longer deadline, after that."""


SLOW = 0.5
"""A call that fails with `TierUnavailable` after this share of the deadline, or more, counts as hung."""


T = TypeVar("T")


class Hung(TierUnavailable):
    """A call has not returned in time, or was not made since the tier hangs."""


class Breaker:
    """Whether a tier may be asked. Thread-safe.

    It opens when a call hangs. Then `admit` raises, but for one call after each pause, which asks whether the tier
    answers again. The pauses begin with the deadline, and double: so at most half of the time is spent on waiting.

    Args:
        name: returns the tier's name, for messages.
        deadline: seconds after which a call counts as hung.
        clock: returns seconds, never going back.
        until_when: what ends that, for messages.

    Attributes:
        trouble: what hangs, and since when; empty while the tier is in use.
    """

    def __init__(
        self,
        name: Callable[[], str],
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        until_when: str = "it is asked again at intervals, and used again once it answers",
    ) -> None:
        self._name, self._clock, self._until_when = name, clock, until_when
        self._backoff = Backoff(first=deadline, longest=max(LONGEST_PAUSE, deadline), fixed=1.0)
        self._lock = threading.Lock()
        self._failures, self._until, self._asking = 0, 0.0, False
        self.trouble = ""

    def admit(self) -> bool:
        """Called before each call, which then reports its end: `answered`, or `silent`, or `undecided`.

        Returns:
            Whether this call asks if the tier answers again.

        Raises:
            Hung: the tier hangs, and is not asked now.
        """
        with self._lock:
            if not self.trouble:
                return False
            if self._asking or self._clock() < self._until:
                raise self.refusal()
            self._asking = True
            return True

    def silent(self, what: str, seconds: float, *, asks: bool = False) -> None:
        """A call hung: open the breaker. If it is open, what `admit` returned for the call counts: a call that was
        under way before says nothing new.

        Args:
            what: the call, and what became of it, for messages.
            seconds: for how long.
            asks: what `admit` returned.
        """
        with self._lock:
            first = not self.trouble
            if first:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
                self.trouble = f"hangs since {since}: {what}"
            if first or asks:
                self._failures += 1
                self._until = self._clock() + self._backoff.pause(self._failures)
                self._asking = False
        if first:
            log.error("%s: %s; %s", self._name(), self.trouble, self._until_when)

    def answered(self) -> None:
        """A call was answered, also by an error: close the breaker."""
        if not self.trouble:
            return
        with self._lock:
            was, self.trouble = self.trouble, ""
            self._failures, self._asking = 0, False
        if was:
            log.warning("%s: answers again", self._name())

    def undecided(self, *, asks: bool) -> None:
        """A call ended without saying whether the tier answers, as when it was interrupted."""
        with self._lock:
            self._asking = self._asking and not asks

    def refusal(self) -> Hung:
        """The error for calls that are not made."""
        return Hung(f"{self._name()}: {self.trouble}; {self._until_when}", tier=self._name())


class Breaking(Wrapping):
    """Another tier, which is left alone for a while after a call that failed with `TierUnavailable` at its deadline.

    Not for tiers whose calls may never return: those take a `Deadline`.

    Args:
        inner: the tier, whose calls all end by themselves.
        deadline: seconds after which they do.
        clock: as for `Breaker`.
    """

    def __init__(self, inner: Tier, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._deadline, self._clock = deadline, clock
        self._breaker = Breaker(lambda: inner.name, deadline, clock)

    @property
    def trouble(self) -> str:
        return self._breaker.trouble

    def admit(self) -> bool:
        """As `Breaker.admit`."""
        return self._breaker.admit()

    def call(self, what: str, call: Callable[[], T]) -> T:
        """Make a call, unless the tier hangs.

        Raises:
            Hung: the call was not made.
        """
        return self.made(what, call, asks=self.admit())

    def made(self, what: str, call: Callable[[], T], *, asks: bool) -> T:
        """Make a call that was admitted, and report its end. ``asks``: what `admit` returned."""
        start = self._clock()
        try:
            result = call()
        except TierUnavailable as error:
            took = self._clock() - start
            if asks or took >= SLOW * self._deadline:
                self._breaker.silent(f"{what} was given up after {took:.3g} s: {error}", took, asks=asks)
            raise
        except Exception:
            self._breaker.answered()
            raise
        except BaseException:
            self._breaker.undecided(asks=asks)
            raise
        self._breaker.answered()
        return result

    def aside(self, what: str, call: Callable[[], object]) -> None:
        """Clean up: at once, or in a thread of its own while the tier hangs, so that the caller need not wait."""
        if not self.trouble:
            call()
            return

        def run() -> None:
            try:
                call()
            except Exception as error:
                log.info("%s: %s while it hangs: %r", self.name, what, error)

        try:
            start_thread(threading.Thread(target=run, name="tierstate-aside", daemon=True))
        except RuntimeError:  # the interpreter ends
            run()

    def put(self, key: str, data: Buffer) -> None:
        self.call(f"put of {key}", lambda: self.inner.put(key, data))

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.call(f"read of {key}", lambda: self.inner.read(key, ranges))

    def get(self, key: str) -> Buffer:
        return self.call(f"read of {key}", lambda: self.inner.get(key))

    def get_within(self, key: str, most: int, what: str) -> Buffer:
        return self.call(f"read of {key}", lambda: self.inner.get_within(key, most, what))

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self.call(f"list of {prefix!r}", lambda: [*self.inner.list(prefix)]))

    def size(self, key: str) -> int:
        return self.call(f"size of {key}", lambda: self.inner.size(key))

    def delete(self, key: str) -> None:
        self.call(f"delete of {key}", lambda: self.inner.delete(key))

    def discard(self, keys: Iterable[str]) -> None:
        some = list(keys)
        self.call(f"delete of {len(some)} objects", lambda: self.inner.discard(some))

    def age(self, key: str) -> float | None:
        return self.call(f"age of {key}", lambda: self.inner.age(key))

    def room(self) -> int | None:
        return self.call("look at the room", self.inner.room)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        inner = self.call(f"beginning of {key}", lambda: self.inner.writer(key, size_hint))
        return BreakingWriter(self, key, inner)

    def close(self) -> None:
        self.aside("closing", self.inner.close)


class BreakingWriter(WrappingWriter):
    """Another writer, whose calls are made through a `Breaking` tier."""

    def __init__(self, tier: Breaking, key: str, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier, self._what = tier, f"writing of {key}"

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        try:
            asks = self._tier.admit()
        except Hung as error:
            if release is not None:  # the inner writer never gets the buffer
                release()
            self.give_up(error)
            raise
        self._tier.made(self._what, lambda: self.inner.append(buffer, release), asks=asks)

    def close(self) -> None:
        self.check()
        self._tier.call(self._what, self.inner.close)

    def abort(self) -> None:
        self._tier.aside(f"abort of {self._what}", self.inner.abort)

    def give_up(self, error: BaseException) -> None:
        self._failure = error
        self.abort()
