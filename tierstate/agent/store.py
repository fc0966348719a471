"""What an agent keeps in memory: the newest captured versions of each run, in the slabs in which they came.

It is one `Host` tier for all runs of a policy. Trainers read it over their sockets, from the slabs' files themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace

from tierstate.manifest.history.log import list_runs
from tierstate.tiers.base import Tier, Traits
from tierstate.tiers.memory.host import Host
from tierstate.tiers.memory.limits import MemoryLimits

from .received import MEMORY
from .shared_slabs import AllSlabs

log = logging.getLogger("tierstate")


def memory_limit(wanted: int) -> int:
    """Bytes of versions that an agent may keep: what the policy says, and half of this host's memory at most."""
    limits = MemoryLimits.of_process()
    there = [n for n in (limits.container, limits.total) if n is not None]
    return min([wanted, *(n // 2 for n in there)])


class SharedHost(Host):
    """A `Host` tier that all trainers of this host use."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, shared="host")


class VersionsInMemory:
    """The agent's memory.

    Args:
        capacity: bytes of versions at most.
        slab_size: bytes of the slabs of this policy.

    Attributes:
        tier: keeps the objects.
        slabs: finds the slab in which a buffer lies.
    """

    def __init__(self, capacity: int, slab_size: int) -> None:
        self.capacity = capacity
        self.slabs = AllSlabs(slab_size)
        self.tier = SharedHost(capacity=capacity, arena=self.slabs)
        self.tier.name = MEMORY
        self.tier.copies_short = False  # trainers count on slabs that are kept, in case this process dies
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    def begin(self, run: str) -> None:
        """A trainer saves this run from now on."""
        with self._lock:
            self._users[run] += 1

    def end(self, run: str) -> None:
        """A trainer of this run has gone, and all that it has handed over was published."""
        with self._lock:
            self._users[run] -= 1

    def make_room(self, nbytes: int) -> bool:
        """Drop versions of runs that nobody saves now, if there is no room for so many bytes. Returns whether there
        is."""
        if nbytes > self.capacity:
            return False
        for run in list_runs(self.tier):
            if (self.tier.room() or 0) >= nbytes:
                break
            with self._lock:
                idle = not self._users[run]
            if idle:
                log.info("run %s is dropped from memory, which another run needs", run)
                drop_run(self.tier, run)
        return (self.tier.room() or 0) >= nbytes


def drop_run(tier: Tier, run: str) -> None:
    """Delete all objects of a run: first its records."""
    records = [key for key in tier.list("versions/") if key.split("/")[1] == run]
    tier.discard(records)
    tier.discard([key for key in tier.list("") if len(names := key.split("/")) > 2 and names[1] == run])
