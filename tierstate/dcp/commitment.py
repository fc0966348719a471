"""What follows the commit of a version, on each host: its tag, and the marker in the folder that DCP was given.

DCP ends a save on the coordinator alone, whose files and tiers the other hosts may not see. So the lowest rank of each
host does it there, and tells the coordinator.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from tierstate.checkpointer import Save
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import TierstateError, error_text

from .engine import DcpEngine
from .marker import write_marker

log = logging.getLogger("tierstate")


TOLD_KEPT = 16
"""Messages to the coordinator that are kept: it may not have read the last ones yet."""


class Commitment:
    """One rank's side of the commit of a version.

    All ranks give a tag, or none, and likewise a folder.

    Args:
        engine: the run in its tiers.
        save: the save of this rank's part.
        tag: the tag that the version gets.
        folder: where the marker is written.
    """

    def __init__(self, engine: DcpEngine, save: Save, tag: str | None, folder: Path | None) -> None:
        self._engine, self._save, self._tag, self._folder = engine, save, tag, folder
        self._key = f"committed/{save.seq}"
        team = engine.team
        if team is not None and not team.coordinator and team.leads("host") and self._asked:
            threading.Thread(target=self._follow, args=(team,), name="tierstate-committed", daemon=True).start()

    @property
    def _asked(self) -> bool:
        return self._tag is not None or self._folder is not None

    def finish(self) -> None:
        """Wait until the version is committed in the durable tier, and marked on all hosts. Called on the coordinator.

        Raises:
            TierstateError: the durable tier failed, so nothing is saved; or a tag or a marker could not be written.
            RankFailed: a rank could not write its part, or has died.
            OSError: the marker could not be written here.
        """
        self._wait()
        save = self._save
        log.info("saved step %d of run %s through DCP as version %d", save.step, self._engine.run, save.seq)
        team = self._engine.team
        others = [] if team is None or not self._asked else [rank for rank in team.leaders("host") if rank]
        told = team.receive_all(dict.fromkeys(others, self._key)) if team is not None and others else {}
        if wrong := [f"rank {rank}: {said.decode()}" for rank, said in told.items() if said]:
            raise TierstateError(f"version {save.seq} is saved, and not marked everywhere: {'; '.join(wrong)}")
        self._mark()  # last: a tool that finds the marker here finds it on the other hosts, too

    def _wait(self) -> None:
        policy, save = self._engine.policy, self._save
        lasting = [tier.name for tier in policy.tiers if tier.persistent and tier.name in save.tiers]
        save.wait(policy.durable if policy.durable in save.tiers or not lasting else lasting[0])

    def _mark(self) -> None:
        if self._tag is not None:
            self._engine.tag(self._tag, self._save.seq)
        if self._folder is not None:
            facts = {"run": self._engine.run, "step": self._save.step, "version": self._save.seq}
            write_marker(self._folder, facts)

    def _follow(self, team: Team) -> None:
        said = b""
        try:
            self._wait()
            self._mark()
        except BaseException as error:  # the coordinator, which waits for this, raises it
            said = error_text(error).encode(errors="replace")[:4000]
        try:
            self._engine.told.append(self._key)
            team.forget(self._engine.told[:-TOLD_KEPT])
            del self._engine.told[:-TOLD_KEPT]
            team.post(self._key, said)
        except TierstateError as error:
            log.warning("what became of version %d here could not be told: %s", self._save.seq, error)
