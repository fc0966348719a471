"""The progress of each asynchronous save, tier by tier: captured, committed, failed or left out.

Callers wait on a `SaveState`. `SavesUnderWay` has all saves of this process that are not done, or whose failures have
not been reported to the caller yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tierstate.manifest.chunk import StreamEvent
from tierstate.manifest.errors import CaptureError, NotFound, TierUnavailable
from tierstate.manifest.format.version import Head
from tierstate.tiers.latch import Completion, Latch

MAX_UNREPORTED = 100
"""The most failed saves that are remembered until they are reported; a tier may fail for weeks."""


class Skipped(NotFound):
    """A save was left out on a tier that lags, since newer saves were waiting for it (``on_lag``)."""


class QueuedCopies:
    """The copies from devices that are under way when all of them are queued; a step need not wait longer on the host.

    It goes on once `release` was called: then its kernels run after the copies, by the order of streams. That also
    decides what was changed before: after the step everything has.

    Args:
        changed: returns the leaves that were changed since `save` was called.
        events: one for each device, after the last copy.
    """

    def __init__(self, changed: Callable[[], set[int]], events: Sequence[StreamEvent]) -> None:
        self._changed, self._events = changed, events
        self._lock = threading.RLock()
        self._found: set[int] | None = None

    def changed(self) -> set[int]:
        """Leaves that were changed between the call of `save` and the first call of this."""
        with self._lock:
            if self._found is None:
                self._found = self._changed()
            return self._found

    def release(self) -> None:
        """Let the state change: what this thread queues on its current streams from now on runs after the copies."""
        self.changed()
        for event in self._events:
            event.wait()


class SaveState:
    """The progress of one save.

    Attributes:
        head: the version's head, without the values that are known only after the capture.
        nbytes: raw bytes of the state.
        freed: done when all sources that are not guarded have been copied; then `save` returns.
        queued: done when copies from devices are all that is left of the capture, or it has ended.
        captured: done when every byte has been copied, or the capture has failed.
        tiers: for each tier that gets this save, done when it is committed or has failed there.
        elsewhere: for each tier that does not get this save, the reason.
        skipped: nothing was saved, since the arena was full and the policy has ``on_full: skip``.
        begun: whether the capture thread has taken it from its queue.
        lost: the capture failed, so there is no version.
        version: the version's id, once it is committed on a tier by this rank; empty before.
        seconds: seconds from the call of `save` to the commit, by tier.
        cancelled: set to cancel the save.
        told: tiers whose failure was reported, or needs no report.
        when_captured: called once, when the capture is complete, with the seconds since the call of `save`.
        when_full: called after the capture, if it has waited for slabs, with the seconds for which it did.
    """

    def __init__(self, head: Head, nbytes: int, tiers: Sequence[str], elsewhere: Mapping[str, str]) -> None:
        self.head, self.nbytes = head, nbytes
        self.freed = Latch()
        self.queued = Latch()
        self.captured = Completion()
        self._copies: QueuedCopies | None = None
        self.tiers = {name: Completion() for name in tiers}
        self.elsewhere = dict(elsewhere)
        self.skipped = self.begun = self.lost = False
        self.version = ""
        self.seconds: dict[str, float] = {}
        self.cancelled = Latch()
        self.told: set[str] = set()
        self.when_captured: Callable[[float], None] | None = None
        self.when_full: Callable[[float], None] | None = None
        self._start = time.monotonic()

    def nothing_to_do(self) -> None:
        """End the save at once: no tier is due, so nothing is copied."""
        self.capture_ended(None)

    def copies_queued(self, copies: QueuedCopies) -> None:
        """Only these copies from devices are left of the capture."""
        self._copies = copies
        self.queued.set()

    def release_state(self) -> None:
        """Wait until this thread may change what is still to be captured, in host memory or by work on its streams."""
        self.queued.wait()
        copies = self._copies
        if copies is not None and not self.captured.done():
            copies.release()

    def capture_ended(self, error: BaseException | None) -> None:
        """The capture is complete (``error`` is None), or has failed."""
        try:
            if self.captured.done():
                pass  # a snapshot has everything; later reads are from the snapshot and not from the state
            elif error is not None:
                self.captured.set_exception(error)
            else:
                self.captured.set_result(None)
                if self.when_captured is not None:
                    self.when_captured(time.monotonic() - self._start)
        finally:
            self._copies = None  # it refers to the state's memory, which must not stay for as long as somebody has this
            self.freed.set()
            self.queued.set()

    def measured(self, tier: str) -> float:
        """Record the time of the commit on a tier, before `committed`. Returns the seconds since the call of `save`."""
        self.seconds[tier] = time.monotonic() - self._start
        return self.seconds[tier]

    def goes_also(self, tier: str) -> None:
        """The save goes to one more tier, which it was not due in."""
        # New dicts: other threads may be reading these.
        self.tiers = {**self.tiers, tier: Completion()}
        self.elsewhere = {name: why for name, why in self.elsewhere.items() if name != tier}

    def committed(self, tier: str) -> None:
        """The version is committed on a tier: callers that wait for it return."""
        self.tiers[tier].set_result(None)

    def failed(self, tier: str, error: BaseException) -> None:
        """The save failed on a tier: callers that wait for it get the error."""
        self.tiers[tier].set_exception(error)

    def leave_out(self, tier: str, why: str) -> None:
        """The tier leaves the save out. That is no failure to report; only a caller that waits for the tier gets it."""
        self.elsewhere[tier] = why
        self.told.add(tier)
        text = f"the save of step {self.head.step} does not go to tier {tier!r}: {why}"
        self.tiers[tier].set_exception(Skipped(text, tier=tier))

    def skip(self) -> None:
        """Save nothing, since the arena is full (``on_full: skip``)."""
        self.skipped = True
        error = CaptureError(f"the save of step {self.head.step} was skipped: the arena was full (on_full: skip)")
        self.capture_ended(error)
        for future in self.tiers.values():
            future.set_exception(error)

    def error(self, tier: str) -> BaseException | None:
        """The error on a tier, including that it left the save out; None if there is none so far."""
        future = self.tiers[tier]
        return future.exception() if future.done() else None

    def failure(self, tier: str) -> BaseException | None:
        """The error on a tier, but None if the tier left the save out, or if there is no error so far."""
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
            TierUnavailable: not done within ``timeout`` seconds; the save continues.
            TierstateError: the save failed on that tier.
        """
        if tier not in self.tiers:
            self.check_tier(tier)
            why = self.elsewhere[tier]
            raise NotFound(f"the save of step {self.head.step} does not go to tier {tier!r}: {why}", tier=tier)
        try:
            self.tiers[tier].result(timeout)
        except BaseException as error:
            if isinstance(error, TimeoutError) and not self.tiers[tier].done():
                text = f"step {self.head.step} is not on {tier} after {timeout} s yet"
                raise TierUnavailable(text, tier=tier) from None
            if self.tiers[tier].done():
                self.told.add(tier)
            raise

    def check_tier(self, tier: str) -> None:
        """Raise NotFound if the policy has no such tier."""
        if tier not in self.tiers and tier not in self.elsewhere:
            names = ", ".join([*self.tiers, *self.elsewhere])
            raise NotFound(f"tier {tier!r}: the policy has no such tier; it has {names}", tier=tier)

    def settled(self) -> bool:
        """Whether the save has ended: captured, and committed or failed on every tier."""
        return self.captured.done() and all(f.done() for f in self.tiers.values())


class SavesUnderWay:
    """The saves of this process that are in progress or have unreported failures, oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._save_states: list[SaveState] = []

    def add(self, save_state: SaveState) -> None:
        """Add a save, and forget those that have ended and have nothing to report."""
        with self._lock:
            under_way = [t for t in self._save_states if not t.settled()]
            untold = [
                t for t in self._save_states if t.settled() and any(t.error(n) and n not in t.told for n in t.tiers)
            ]
            self._save_states = [*untold[-MAX_UNREPORTED:], *under_way, save_state]

    def save_states(self) -> list[SaveState]:
        """A copy of the list, oldest first."""
        with self._lock:
            return list(self._save_states)

    def wanted(self, tier: str) -> set[int]:
        """Numbers of the saves that are neither committed nor failed on a tier."""
        return {t.head.seq for t in self.save_states() if tier in t.tiers and not t.tiers[tier].done()}

    def brought(self, tier: str, seq: int) -> None:
        """A failed version was copied to the tier later: its failure needs no report any more."""
        for save_state in self.save_states():
            if save_state.head.seq == seq:
                save_state.told.add(tier)

    def lost(self, lasting: Collection[str], before: int) -> list[tuple[SaveState, BaseException]]:
        """The earlier saves that failed on all their persistent tiers, each once, with the first error.

        Args:
            lasting: names of the persistent tiers.
            before: only saves of versions with lower numbers. The newest save may have failed before the caller has
                its handle, and that failure is told by the handle.
        """
        found = []
        for save_state in self.save_states():
            if save_state.head.seq >= before:
                continue
            names = [n for n in save_state.tiers if n in lasting]
            failures = {n: f for n in names if (f := save_state.failure(n)) is not None}
            if failures and all(map(save_state.error, names)) and not save_state.told & set(failures):
                found.append((save_state, next(iter(failures.values()))))
        return found

    def failures(self) -> list[tuple[SaveState, str, BaseException]]:
        """The failures that were not reported yet: save, tier, error. They count as reported from now on."""
        found = []
        for save_state in self.save_states():
            for name in save_state.tiers:
                error = save_state.error(name)
                if error is not None and name not in save_state.told:
                    save_state.told.add(name)
                    found.append((save_state, name, error))
        return found

    def late(self, until: int | None = None) -> list[str]:
        """The saves still in progress, with their tiers, as texts for messages.

        Args:
            until: only versions up to this number; None for all.
        """
        save_states = [t for t in self.save_states() if until is None or t.head.seq <= until]
        return [f"step {t.head.step} to {n}" for t in save_states for n, f in t.tiers.items() if not f.done()]

    def find(self, seq: int) -> SaveState | None:
        """The save of a version; None if it has ended, and was forgotten."""
        return next((save_state for save_state in self.save_states() if save_state.head.seq == seq), None)

    def cancel(self) -> None:
        """Cancel all saves."""
        for save_state in self.save_states():
            save_state.cancelled.set()
