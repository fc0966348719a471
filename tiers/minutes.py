"""Minutes: the whole versions that a process knows of, so that each is merged once, however many tiers it goes to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tierstate.manifest.columns import Array
from tierstate.manifest.merge import merge, placed
from tierstate.manifest.version import Version

KEPT = 4
"""Versions that are remembered; each may be some tens of MB long."""

NAMED = 1024
"""Versions of which at least the id is remembered, since the next one names it as its parent."""


class Minutes:
    """The versions that the councils of all tiers of a process have to do with.

    Args:
        kept: how many are remembered whole.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._versions: dict[int, Version] = {}
        self._ids: dict[int, str] = {}
        self._origin = ""

    def continue_from(self, version: str) -> None:
        """The next version's parent is the one of this id: it was restored, or is the newest of the run."""
        with self._lock:
            self._origin = version
            self._ids.clear()

    def learn(self, version: Version) -> None:
        """Take note of a whole version, as one that is copied from another tier: it is not merged again."""
        with self._lock:
            self._note(version)

    def known(self, seq: int) -> Version | None:
        """The whole version of a number, while it is remembered."""
        with self._lock:
            return self._versions.get(seq)

    def whole(self, seq: int, parts: Sequence[Version]) -> tuple[Version, Sequence[Array]]:
        """The version that these parts, one of each rank, make; and for each part the row of each of its chunks.

        Raises:
            StateMismatch: the parts do not go together, or are not of the version that is known by that number.
        """
        with self._lock:
            version = self._versions.get(seq)
            if version is None:
                merged = merge(parts, parent=self._parent(seq))
                self._note(merged.version)
                return merged.version, merged.rows
            self._note(version)
        return version, [placed(version, part) for part in parts]

    def _parent(self, seq: int) -> str:
        """The id of the version before, in this process."""
        before = [number for number in self._ids if number < seq]
        return self._ids[max(before)] if before else self._origin

    def _note(self, version: Version) -> None:
        seq = version.head.seq
        self._versions.pop(seq, None)
        self._versions[seq] = version
        self._ids[seq] = version.id
        for old in list(self._versions)[: -self._kept]:
            del self._versions[old]
        for old in sorted(self._ids)[:-NAMED]:
            del self._ids[old]
