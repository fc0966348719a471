"""How far durable copies are behind the training: the lag of a tier, its bound (``max_lag``), and ``on_failure``.

A `LagBound` lets `save` wait before a tier falls further behind than the policy allows. `FailurePolicy` decides whether
`save` raises for a save that reached no persistent tier, or warns.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from tierstate.engine.placement import is_too_far_behind
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest.errors import TierUnavailable
from tierstate.manifest.format.version import Head
from tierstate.tiers.policy.models import MaxLagKeys, OnFailureKeys

log = logging.getLogger("tierstate")


COUNTED = 1024
"""The number of newest saves that are remembered to count how many versions a tier is behind."""


class Lag(NamedTuple):
    """How far the newest version in a tier is behind the newest save: what would be lost if only that tier were left.

    Attributes:
        steps: steps between the two; negative if the newest version in the tier is from before a rollback.
        seconds: seconds between the calls of `save`.
        versions: saves of this process that are newer than the newest version in the tier; at most `COUNTED`.
    """

    steps: int
    seconds: float
    versions: int


class SaveHistory:
    """Step and time of the newest saves of this process, and of the newest version in each tier. For statistics."""

    def __init__(self) -> None:
        self._made: deque[PendingVersion] = deque(maxlen=COUNTED)
        self._there: dict[str, PendingVersion] = {}

    def made(self, due: PendingVersion) -> None:
        """A save was made, to any tier."""
        self._made.append(due)

    def latest(self) -> PendingVersion | None:
        """The newest save; None before the first one."""
        return self._made[-1] if self._made else None

    def arrived(self, tier: str, due: PendingVersion) -> None:
        """A version was committed to a tier, or found there; a late one does not make the newest older."""
        if due.seq >= self._there.get(tier, due).seq:
            self._there[tier] = due

    def newest(self, tier: str) -> PendingVersion | None:
        """The newest version in a tier, as far as this process knows."""
        return self._there.get(tier)

    def lag(self, tier: str) -> Lag | None:
        """How far a tier is behind; None if this process has not saved yet, or the tier has no version."""
        made, there = list(self._made), self._there.get(tier)
        if not made or there is None:
            return None
        newer = sum(due.seq > there.seq for due in made)
        return Lag(made[-1].step - there.step, max(0.0, made[-1].time - there.time), newer) if newer else Lag(0, 0.0, 0)


class LagBound:
    """The ``max_lag`` of one tier: `wait` returns when the tier is near enough to a save.

    Args:
        tier: the tier's name.
        bound: the policy's ``max_lag``.

    Attributes:
        waited: seconds for which saves have waited.
    """

    def __init__(self, tier: str, bound: MaxLagKeys) -> None:
        self._tier, self._bound = tier, bound
        self._sent: deque[SaveState] = deque()
        self._failure: BaseException | None = None
        self.waited = 0.0

    def sent(self, save_state: SaveState) -> None:
        """A save goes to the tier."""
        while self._sent and self._sent[0].tiers[self._tier].done():
            self._failure = self._sent.popleft().tiers[self._tier].exception()
        self._sent.append(save_state)

    def wait(self, save_state: SaveState, newest: PendingVersion | None) -> BaseException | None:
        """Wait until the tier has a version that is near enough to this save, or can have none any more.

        Only commits of this save and of older ones are waited for, so ranks that save together cannot wait for each
        other in a circle.

        Args:
            newest: the newest version in the tier by now.

        Returns:
            None, or why no version that would be near enough reached the tier.
        """
        start = time.monotonic()
        try:
            return None if self._near(newest, save_state.head) else self._wait(save_state)
        finally:
            self.waited += time.monotonic() - start

    def _wait(self, save_state: SaveState) -> BaseException | None:
        while self._sent:
            oldest = self._sent[0]
            if self._near(oldest.head, save_state.head):
                error = oldest.tiers[self._tier].exception()
                if error is None:
                    return None
                self._failure = error
            self._sent.popleft()
        return self._failure or TierUnavailable(f"no save has reached {self._tier}", tier=self._tier)

    def _near(self, version: PendingVersion | Head | None, head: Head) -> bool:
        place = None if version is None else (version.step, version.time)
        return not is_too_far_behind(self._bound, place, head.step, head.time)


class FailurePolicy:
    """Decides what becomes of the error of a save that reached no persistent tier, by the policy's ``on_failure``.

    Args:
        keys: the policy's ``on_failure``.

    Attributes:
        clock: returns seconds, never going back.
    """

    def __init__(self, keys: OnFailureKeys) -> None:
        self._keys, self.clock = keys, time.monotonic
        self._protected: float | None = None

    def began(self) -> None:
        """A save begins. The first one starts the time in which a persistent tier has to take one."""
        if self._protected is None:
            self._protected = self.clock()

    def taken(self) -> None:
        """A persistent tier has taken a save."""
        self._protected = self.clock()

    def tell(self, error: BaseException, what: str) -> None:
        """Raise the error of an earlier save, or log it as a warning where the policy says so.

        Args:
            what: what the error means, for the log, and as a note on the error.

        Raises:
            BaseException: the error.
        """
        alone = 0.0 if self._protected is None else self.clock() - self._protected
        if self._keys.action == "warn" and alone < self._keys.unprotected:
            log.warning("%s: %s (on_failure: warn)", what, error)
            return
        error.add_note(what)
        if self._keys.action == "warn":
            error.add_note(f"no persistent tier has taken a save for {alone:.0f} s (on_failure: unprotected)")
        raise error
