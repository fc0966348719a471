"""Counting the bytes that a tier holds against its capacity (the policy key ``capacity``)."""

from __future__ import annotations

import threading

from tierstate.manifest.errors import TierFull

from .units import format_size


class CapacityCounter:
    """Counts the bytes that a tier holds, and refuses what would exceed its capacity. Safe to use from many threads.

    Args:
        capacity: bytes that may be in use at once; None counts and never refuses.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, tier: str, key: str) -> None:
        """Count ``nbytes`` more.

        Raises:
            TierFull: that would be more than the capacity; nothing was counted.
        """
        with self._lock:
            if nbytes > 0 and self.capacity is not None and self.used + nbytes > self.capacity:
                raise TierFull(
                    f"{tier}: {key}: no room for {format_size(nbytes)} more: {format_size(self.used)} of the capacity "
                    f"of {format_size(self.capacity)} are in use; raise the tier's 'capacity' or keep fewer versions",
                    tier=tier,
                    key=key,
                )
            self.used += nbytes

    @property
    def left(self) -> int | None:
        """Bytes that may still be added; None without a capacity."""
        return None if self.capacity is None else max(0, self.capacity - self.used)

    def give_back(self, nbytes: int) -> None:
        """Count ``nbytes`` less, but never below 0: an object that another process wrote was not counted here."""
        with self._lock:
            self.used = max(0, self.used - nbytes)
