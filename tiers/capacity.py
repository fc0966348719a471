"""Counting the bytes that a tier holds against its capacity (the policy key ``capacity``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakMethod

from tierstate.manifest.errors import TierFull

from .units import format_size


class CapacityCounter:
    """Counts the bytes that a tier holds, and refuses what would exceed its capacity. Safe to use from many threads.

    Args:
        capacity: bytes that may be in use at once; None counts and never refuses.
        count: method of the tier that returns the bytes of all objects that are there, if other processes change it
            too. It is called before anything is refused: others may have deleted what was counted here, as one rank
            does for all.
    """

    def __init__(self, capacity: int | None = None, count: Callable[[], int] | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        self._count = None if count is None else WeakMethod(count)  # a tier that is dropped is gone at once
        self._begun = 0  # bytes that were taken for objects that are not there yet
        self._lock = threading.Lock()

    def look(self) -> None:
        """Count what is there."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        count = None if self._count is None else self._count()
        if self.capacity is not None and count is not None:
            self.used = count() + self._begun

    def _exceeded_by(self, nbytes: int) -> bool:
        return nbytes > 0 and self.capacity is not None and self.used + nbytes > self.capacity

    def take(self, nbytes: int, tier: str, key: str) -> None:
        """Count ``nbytes`` more, of an object that is being written: `made` or `give_up` follows, if there is a count.

        Raises:
            TierFull: that would be more than the capacity; nothing was counted.
        """
        with self._lock:
            if self._exceeded_by(nbytes):
                self._look()
            if self.capacity is not None and self._exceeded_by(nbytes):
                raise TierFull(
                    f"{tier}: {key}: no room for {format_size(nbytes)} more: {format_size(self.used)} of the capacity "
                    f"of {format_size(self.capacity)} are in use; raise the tier's 'capacity' or keep fewer versions",
                    tier=tier,
                    key=key,
                )
            self.used += nbytes
            self._begun += nbytes

    def made(self, nbytes: int) -> None:
        """What was taken is an object now."""
        with self._lock:
            self._begun -= nbytes

    def give_up(self, nbytes: int) -> None:
        """What was taken becomes no object: count it less."""
        self.made(nbytes)
        self.give_back(nbytes)

    @property
    def left(self) -> int | None:
        """Bytes that may still be added; None without a capacity."""
        return None if self.capacity is None else max(0, self.capacity - self.used)

    def give_back(self, nbytes: int) -> None:
        """Count ``nbytes`` less, but never below 0: an object that another process wrote was not counted here."""
        with self._lock:
            self.used = max(0, self.used - nbytes)
