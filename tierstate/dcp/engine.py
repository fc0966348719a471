"""The run that the DCP plug-ins use: a policy's tiers, opened once per process and shared by writers and readers."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
from contextlib import ExitStack

from tierstate.engine.save.plan import retention_of, rule_retention_of
from tierstate.engine.store.catalog import RunCatalog
from tierstate.engine.store.run_in_tier import Stop, TierRun
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import check_run
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.run import Run
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy, open_policy_tier

log = logging.getLogger("tierstate")


class PartTierRun(TierRun):
    """The run in one tier, for one rank's part of a version: `publish` only keeps the part; the coordinator commits.

    Attributes:
        part: the part that was published last.
    """

    together = True  # even a single rank's part lacks the list values, so no pack may name it as the whole version
    part: Record | None = None

    def publish(self, record: Record, stop: Stop | None = None) -> None:
        """Keep a rank's part in `part`; without ``stop``, commit a whole record. Raises: as `TierRun.publish`."""
        if stop is None:
            super().publish(record)
        else:
            self.part = record

    def refresh(self) -> int:
        """Read the log again if other processes have committed; returns the highest number in use."""
        newest, highest = self.newest(), self.highest_seq()
        if highest != (newest.version.head.seq if newest else 0):
            self.look_again()
        return highest

    @property
    def base(self) -> str:
        """Id of the newest commit, whose packs a save may reuse; empty if there is none."""
        newest = self.newest()
        return "" if newest is None else str(newest.commit["id"])


class DcpEngine(Run):
    """One run in the tiers of a policy, and the memory that its bytes pass through.

    Attributes:
        tier_runs: the run in each tier, in the policy's order.
        turn: lock that a save holds: the saves of one process run one after the other.
    """

    def __init__(self, policy: Policy, run: str) -> None:
        check_run(run)  # before any tier is opened
        self.arena = Arena(policy.arena.size, policy.chunk)
        self.tier_runs = [
            PartTierRun(open_policy_tier(tier, self.arena), run, retention_of(tier), rule_retention_of(policy, tier))
            for tier in policy.tiers
        ]
        super().__init__(policy, run, self.tier_runs, self.arena)
        self.turn = threading.Lock()

    def tier_run(self, tier: str) -> PartTierRun:
        """The run in the tier with this name."""
        return next(tier_run for tier_run in self.tier_runs if tier_run.name == tier)

    def catalog(self) -> RunCatalog:
        """The versions of the run in all tiers."""
        return self._catalog()

    def tagged(self, tag: str | None) -> TaggedVersion | None:
        """The version of a tag; None without a tag. Raises NotFound if no version has it."""
        return self._tagged(tag, None, None)

    def close(self) -> None:
        """Close the tiers and free the memory."""
        self._closed = True
        with ExitStack() as closing:  # each one is closed, even if closing another one raises
            for close in (self.arena.close, *(tier_run.tier.close for tier_run in self.tier_runs)):
                closing.callback(close)


_OPEN: dict[tuple[int, str, bytes], DcpEngine] = {}


_LOCK = threading.Lock()


def engine_of(policy: Policy, run: str) -> DcpEngine:
    """The engine of a policy and a run in this process: opened at the first call, then shared.

    It is kept because a trainer may make a new writer for each save, and DCP's save process unpickles one for each.

    Raises:
        TierstateError: a tier could not be opened.
    """
    key = os.getpid(), run, pickle.dumps(policy)
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = DcpEngine(policy, run)
        return _OPEN[key]


def close() -> None:
    """Close the tiers and free the memory of all DCP writers and readers in this process.

    The next save or load opens them again. Called automatically at the end of the process.
    """
    with _LOCK:
        mine = [_OPEN.pop(key) for key in list(_OPEN) if key[0] == os.getpid()]
    for engine in mine:
        try:
            engine.close()
        except TierstateError as error:
            log.warning("run %s: could not be closed: %s", engine.run, error)


atexit.register(close)
