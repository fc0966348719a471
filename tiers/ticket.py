"""A ticket: one save under way, and what became of it in each tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from tierstate.manifest.errors import CaptureError, NotFound, TierUnavailable
from tierstate.manifest.head import Head


class Skipped(NotFound):
    """A save was left out on a tier that lags, since newer ones wait for it."""


class Ticket:
    """One save under way.

    Attributes:
        head: the version's head, without what is known only when all is captured.
        nbytes: raw bytes of the state.
        freed: done once all that is not guarded has been copied out.
        captured: done once every byte has been copied out.
        tiers: per tier that this save goes to, done once it is committed there.
        elsewhere: per tier that this save does not go to, why not.
        skipped: the arena was full and the policy says skip: nothing was saved.
        begun: its capture has begun, or has ended without.
        lost: there will be no version, as what was to be captured could not be.
        seconds: time from the call to each tier's commit.
    """

    def __init__(self, head: Head, nbytes: int, tiers: Sequence[str], elsewhere: Mapping[str, str]) -> None:
        self.head, self.nbytes = head, nbytes
        self.freed = threading.Event()
        self.captured: Future[None] = Future()
        self.tiers: dict[str, Future[None]] = {name: Future() for name in tiers}
        self.elsewhere = dict(elsewhere)
        self.skipped = self.begun = self.lost = False
        self.seconds: dict[str, float] = {}
        self.cancelled = threading.Event()
        self.told: set[str] = set()
        self._start = time.monotonic()

    def nothing_to_do(self) -> None:
        """No tier is due, so that nothing is copied."""
        self.capture_ended(None)

    def capture_ended(self, error: BaseException | None) -> None:
        """All is copied out, or will never be."""
        if self.captured.done():
            pass  # by a snapshot; what is read from that is no part of the state any more
        elif error is not None:
            self.captured.set_exception(error)
        else:
            self.captured.set_result(None)
        self.freed.set()

    def committed(self, tier: str) -> float:
        """The version is committed to a tier. Returns the seconds since the call of save."""
        self.seconds[tier] = time.monotonic() - self._start
        self.tiers[tier].set_result(None)
        return self.seconds[tier]

    def failed(self, tier: str, error: BaseException) -> None:
        """The version will not come to be on a tier."""
        self.tiers[tier].set_exception(error)

    def leave_out(self, tier: str, why: str) -> None:
        """The version does not go to a tier after all; nobody need be told, unless they ask."""
        self.elsewhere[tier] = why
        self.told.add(tier)
        text = f"the save of step {self.head.step} does not go to tier {tier!r}: {why}"
        self.tiers[tier].set_exception(Skipped(text, tier=tier))

    def skip(self) -> None:
        """Nothing is saved this time."""
        self.skipped = True
        error = CaptureError(f"the save of step {self.head.step} was skipped: the arena was full (on_full: skip)")
        self.capture_ended(error)
        for future in self.tiers.values():
            future.set_exception(error)

    def error(self, tier: str) -> BaseException | None:
        """What went wrong on a tier, if it is known by now."""
        future = self.tiers[tier]
        return future.exception() if future.done() else None

    def failure(self, tier: str) -> BaseException | None:
        """What went wrong on a tier; not that it was left out there."""
        error = self.error(tier)
        return None if isinstance(error, Skipped) else error

    def done(self, tier: str) -> bool:
        """Whether the version is committed on a tier by now."""
        future = self.tiers.get(tier)
        return future is not None and future.done() and future.exception() is None

    def wait(self, tier: str, timeout: float | None = None) -> None:
        """Wait until the version is committed on a tier.

        Raises:
            NotFound: this save does not go to that tier.
            TierUnavailable: it was not done within ``timeout`` seconds; it goes on.
            TierstateError: what went wrong.
        """
        if tier not in self.tiers:
            why = self.elsewhere.get(tier, "the policy has no such tier")
            raise NotFound(f"the save of step {self.head.step} does not go to tier {tier!r}: {why}", tier=tier)
        try:
            self.tiers[tier].result(timeout)
        except BaseException as error:
            if isinstance(error, FutureTimeout) and not self.tiers[tier].done():
                text = f"step {self.head.step} is not on {tier} after {timeout} s yet"
                raise TierUnavailable(text, tier=tier) from None
            if self.tiers[tier].done():
                self.told.add(tier)
            raise

    def settled(self) -> bool:
        """Whether nothing of this save is under way any more."""
        return self.captured.done() and all(f.done() for f in self.tiers.values())
