"""Clocks: what time it is for whoever keeps the objects, since hosts disagree."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from .files import create_temp

AGAIN = 60.0
"""Seconds for which a look at another's clock is relied upon."""

_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DistantClock:
    """A clock that costs something to look at: it is looked at now and then, and ours tells how long ago that was.

    Args:
        look: the time there, in seconds; None where it cannot be told.
    """

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._seen: tuple[float, float] | None = None

    def now(self) -> float | None:
        """The time there, in seconds; None where it cannot be told."""
        with self._lock:
            here = time.monotonic()
            if self._seen is None or here - self._seen[0] > AGAIN:
                there = self._look()
                self._seen = None if there is None else (here, there)
            return None if self._seen is None else self._seen[1] + here - self._seen[0]


class FolderClock(DistantClock):
    """The clock of a file system, by what it says of a file that was just made. It cannot be told where none can be.

    Args:
        folder: one that is there when the clock is asked.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(self._touch)
        self._folder = folder

    def _touch(self) -> float | None:
        try:
            with closing(create_temp(self._folder)) as made:
                os.unlink(made.path)
                return made.status().st_mtime
        except OSError as error:
            if error.errno in _FULL:  # when what is old is to go: no room is needed for this
                os.utime(self._folder)
                return os.stat(self._folder).st_mtime
            if error.errno in _READ_ONLY:
                return None
            raise
