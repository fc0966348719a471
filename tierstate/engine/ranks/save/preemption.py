"""Preemption of several ranks: a signal to one is one to all, and all of them see it at the same call of `preempted`.

If one rank left its training loop a step before another, they would wait for each other in the training's collectives.
So each rank counts its calls. When the ranks learn of a signal, each tells how many calls it has answered with no, and
answers no more until all have told: the first call after the highest of these counts is the first one answered with
yes. The counts are exchanged by threads that the training does not wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tierstate.engine.ranks.team.heartbeat import BEATS
from tierstate.engine.ranks.team.team import Team
from tierstate.engine.save.preemption import Hurried, Preemption
from tierstate.manifest.errors import RankFailed
from tierstate.tiers.latch import Latch
from tierstate.tiers.policy.models import PreemptionKeys

log = logging.getLogger("tierstate")


TOPIC = "preempted"
"""What a rank that got a signal announces, and under which the ranks exchange their counts."""


ASK_INTERVAL = 1.0
"""Seconds between two looks whether another rank is preempted, at least; more in large teams, which share the store."""


class SharedPreemption(Preemption):
    """Watches for signals to any rank of a team.

    Args:
        keys, saves, is_saving: as for `Preemption`.
        team: the ranks; each of them makes one of these.
    """

    def __init__(
        self, keys: PreemptionKeys, saves: Hurried, team: Team, is_saving: Callable[[], bool] = lambda: False
    ) -> None:
        self._team, self._interval = team, max(ASK_INTERVAL, team.size / BEATS)
        self._calls, self._first, self._known = 0, 0, False
        self._decided = Latch()
        super().__init__(keys, saves, is_saving)

    def preempted(self) -> bool:
        self.polled = True
        # The watching thread sets `_known` and then reads the count. So it counts this call, or this call waits.
        self._calls += 1
        call = self._calls
        if not self._known:
            return False
        self._saves.ending = not self._decided.wait(self.left) or call >= self._first
        return self._saves.ending

    def close_begins(self) -> None:
        super().close_begins()
        if self._saves.ending:  # so it is on all ranks, and they have made the same saves
            self._saves.bring_newest()

    def _is_signalled(self) -> bool:
        try:
            while not self._wake.acquire(timeout=self._interval):
                if self._team.announced(TOPIC):
                    break
        except RankFailed as error:
            log.debug("whether other ranks are preempted cannot be seen any more: %s", error)
            self._wake.acquire()
        if self._signal is None and self._closing:
            return False
        self._began = self._began or time.monotonic()
        self._known = True
        self._first = self._agree(self._calls) + 1
        self._decided.set()
        return True

    def _agree(self, calls: int) -> int:
        """The highest number of calls that a rank has answered with no."""
        try:
            if self._signal is not None:
                self._team.announce(TOPIC)
            return max(map(int, self._team.gather(TOPIC, str(calls).encode(), self.left)))
        except RankFailed as error:
            log.warning("not all ranks could agree when to end: %s", error)
            return calls
