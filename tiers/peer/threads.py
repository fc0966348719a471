"""Keepers that are threads of a process which outlives jobs, an agent, in place of processes of their own.

Such a process takes over the keeper that a job has started before; when it ends, it starts one again, at the same port,
so that other hosts still reach what this host keeps.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

from tierstate.manifest.errors import TierstateError, TierUnavailable

from .launch import KeeperSettings, start_process
from .server import PeerServer, start_server

log = logging.getLogger("tierstate")


class KeeperThread(NamedTuple):
    """A keeper, its settings, and the thread that runs it."""

    server: PeerServer
    settings: KeeperSettings
    thread: threading.Thread


class KeeperThreads:
    """The keepers of this process, one for each memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[Path, KeeperThread] = {}
        self._ended = False

    def start(self, root: Path, settings: KeeperSettings) -> None:
        """Start a keeper; returns when it listens.

        Raises:
            TierUnavailable, OSError: it cannot be started.
        """
        with self._lock:
            if self._ended:
                raise TierUnavailable(f"{root}: no keeper can be started in a process that ends")
            if (before := self._started.get(root)) is not None:
                before.server.stop(keep=True)  # it does not answer any more
            server = start_server(root, settings, in_agent=True)
            thread = threading.Thread(target=server.run, name="tierstate-keeper", daemon=True)
            self._started[root] = KeeperThread(server, settings, thread)
            thread.start()

    def serves(self, root: Path) -> bool:
        """Whether the keeper of a memory runs here."""
        return root in self._alive()

    @property
    def busy(self) -> bool:
        """Whether any keeper runs here."""
        return bool(self._alive())

    def _alive(self) -> dict[Path, KeeperThread]:
        with self._lock:
            self._started = {root: one for root, one in self._started.items() if one.thread.is_alive()}
            return dict(self._started)

    def status(self) -> list[dict[str, Any]]:
        """What each keeper says of itself."""
        return [one.server.status() for one in self._alive().values()]

    def hand_over(self) -> None:
        """End all keepers, and start a process for each memory that is still there."""
        with self._lock:
            self._ended = True
        for root, one in self._alive().items():
            one.server.stop(keep=True)
            one.thread.join()
            if root.exists():
                try:
                    start_process(root, one.settings, "peer")
                except TierstateError as error:
                    log.warning("%s is not served to other hosts until a job starts: %s", root, error)
