"""Loads by ranks that see different objects: they agree on a version, and pass its chunks on to each other."""

from __future__ import annotations

import numpy as np

from tierstate.engine.ranks.restore.restore import IncompleteVersion, SharedReads, restore_together
from tierstate.engine.restore.restore import RestoreSpec
from tierstate.engine.restore.scatter import ScatterTargets
from tierstate.manifest.arrays import Array
from tierstate.manifest.format.version import Version

from .engine import DcpEngine
from .read import VersionLoad, Wants, targets_of


def load_together(engine: DcpEngine, wanted: RestoreSpec, tag: str | None) -> tuple[VersionLoad, Version]:
    """The load of the requested version, by default the newest that the ranks have whole between them. All call it.

    All ranks then serve their plans by it, or none does.

    Raises:
        NotFound: there is no such version.
        Damaged: chunks of it are in no tier of any rank.
        ValueError: ranks ask for different versions.
        RankFailed: another rank failed, is dead or is late.
    """
    assert engine.team is not None
    found = restore_together(engine.team, engine.catalog(), engine.arena, wanted, tag, engine.tagged, _PlannedReads)
    assert found is not None  # it is not optional
    return found.state, found.entry.version


class _PlannedReads(SharedReads):
    """The reads of one version: plain values ahead, on which DCP's keys depend, and then what DCP's plans want."""

    _calls = 0

    def restore(self) -> VersionLoad:
        return VersionLoad(self._version, self._wanted.allow_pickle, self._read, self._wanted.rename)

    def _read(self, wants: Wants) -> None:
        self._wants, self._chunks = wants, None
        self._calls += 1
        try:
            self._fetch(ahead=self._calls == 1)
        except IncompleteVersion as error:
            if self._calls == 1:
                raise  # so that an older version may be tried
            raise error.error_for(self._team.rank) from None
        except BaseException as error:  # after the first call nobody else tells the ranks that wait for this one
            self._query.leave(error)
            raise

    def _targets(self, *, ahead: bool) -> ScatterTargets:
        return targets_of(self._version, self._wants())

    def _later(self) -> Array:
        return np.arange(len(self._version.digests))  # as each rank would require that reads alone
