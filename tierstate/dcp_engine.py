"""The engine behind DCP's plug-ins: a run in the tiers of a policy, opened once per process."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
from contextlib import ExitStack

from tierstate.manifest.errors import TierstateError
from tierstate.manifest.log import check_run
from tierstate.manifest.record import Record
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog
from tierstate.tiers.opening import opened
from tierstate.tiers.policy import Policy
from tierstate.tiers.shelf import Shelf, Stop

from .planning import retention, rule_retention
from .run import Run
from .tagging import Tagged

log = logging.getLogger("tierstate")


class PartShelf(Shelf):
    """A shelf to which a rank publishes its part of a version, which is kept here: only the coordinator commits.

    Attributes:
        part: what was published last.
    """

    together = True  # also a single rank's part lacks the values in lists, so that no pack may call it the version
    part: Record | None = None

    def publish(self, record: Record, stop: Stop | None = None) -> None:
        """Keep a rank's part; or, without ``stop``, commit a whole record. Raises: as `Shelf.publish`."""
        if stop is None:
            super().publish(record)
        else:
            self.part = record

    def refresh(self) -> int:
        """Look again, if others have committed here since; the highest number taken."""
        newest, highest = self.newest(), self.highest_seq()
        if highest != (newest.version.head.seq if newest else 0):
            self.look_again()
        return highest

    @property
    def base(self) -> str:
        """The commit that a save builds on now; empty where there is none."""
        newest = self.newest()
        return "" if newest is None else str(newest.commit["id"])


class Engine(Run):
    """One run in the tiers of a policy, and the memory that its bytes pass through.

    Attributes:
        shelves: the run in each tier, in the policy's order.
        turn: held by who saves: saves of one process follow each other.
    """

    def __init__(self, policy: Policy, run: str) -> None:
        check_run(run)  # before any tier is opened
        self.arena = Arena(policy.arena.size, policy.chunk)
        self.shelves = [
            PartShelf(opened(tier, self.arena), run, retention(tier), rule_retention(policy, tier))
            for tier in policy.tiers
        ]
        super().__init__(policy, run, self.shelves, self.arena)
        self.turn = threading.Lock()

    def shelf(self, tier: str) -> PartShelf:
        """The run in the tier of that name."""
        return next(shelf for shelf in self.shelves if shelf.name == tier)

    def catalog(self) -> Catalog:
        """The versions of the run over all tiers."""
        return self._catalog()

    def tagged(self, tag: str | None) -> Tagged | None:
        """The version that a tag names, if one is given. Raises NotFound where none has it."""
        return self._tagged(tag, None, None)

    def close(self) -> None:
        """Let go of tiers and memory."""
        self._closed = True
        with ExitStack() as closing:  # each is closed, whatever happens to those before
            for close in (self.arena.close, *(shelf.tier.close for shelf in self.shelves)):
                closing.callback(close)


_OPEN: dict[tuple[int, str, bytes], Engine] = {}
_LOCK = threading.Lock()


def engine_of(policy: Policy, run: str) -> Engine:
    """The engine of a policy and a run in this process: opened when first asked for, and kept for those who come after,
    since a trainer makes a writer for each save, and DCP's process of its own unpickles one for each.

    Raises:
        TierstateError: a tier could not be opened.
    """
    key = os.getpid(), run, pickle.dumps(policy)
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = Engine(policy, run)
        return _OPEN[key]


def close() -> None:
    """Let go of all tiers and memory that writers and readers of DCP have opened in this process; the next save or load
    opens them anew. At the process's end it is done by itself.
    """
    with _LOCK:
        mine = [_OPEN.pop(key) for key in list(_OPEN) if key[0] == os.getpid()]
    for engine in mine:
        try:
            engine.close()
        except TierstateError as error:
            log.warning("run %s: could not be closed: %s", engine.run, error)


atexit.register(close)
