"""Which chunk has which digest: a search among a million digests without a Python object for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class DigestIndex:
    """The rows of a digest table by digest.

    Args:
        digests: ``(n, 2)`` of uint64.
    """

    def __init__(self, digests: Array) -> None:
        self._order = np.lexsort((digests[:, 1], digests[:, 0]))
        ordered = digests[self._order]
        self._high, self._low = np.ascontiguousarray(ordered[:, 0]), np.ascontiguousarray(ordered[:, 1])

    def find(self, digests: Array) -> Array:
        """The row of each of ``(m, 2)`` digests, the lowest where several are equal; -1 where there is none."""
        if not len(self._order) or not len(digests):
            return np.full(len(digests), -1, "i8")
        high, low = digests[:, 0], digests[:, 1]
        at, end = np.searchsorted(self._high, high), np.searchsorted(self._high, high, "right")
        last, stop = len(self._order) - 1, end
        # Bisect the second half among equal first ones: one round as a rule, and never more than 64, so that a table
        # made to collide cannot hold us up.
        for _ in range(int((end - at).max()).bit_length()):
            middle = (at + stop) // 2
            below = (at < stop) & (self._low[np.minimum(middle, last)] < low)
            at, stop = np.where(below, middle + 1, at), np.where(below, stop, middle)
        spot = np.minimum(at, last)
        return np.where((at < end) & (self._low[spot] == low), self._order[spot], -1)


def as_array(digests: list[bytes]) -> Array:
    """Digests of 16 bytes as ``(n, 2)`` of uint64."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
