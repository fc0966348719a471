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
        found = np.full(len(digests), -1, "i8")
        if not len(self._order) or not len(digests):
            return found
        at = np.searchsorted(self._high, digests[:, 0])
        pending = np.arange(len(digests))
        # Two digests agree in their first half once in 2^64, so that a second round is as good as never needed.
        while len(pending):
            spot = at[pending]
            inside = spot < len(self._high)
            pending, spot = pending[inside], spot[inside]
            same = self._high[spot] == digests[pending, 0]
            pending, spot = pending[same], spot[same]
            hit = self._low[spot] == digests[pending, 1]
            found[pending[hit]] = self._order[spot[hit]]
            pending = pending[~hit]
            at[pending] += 1
        return found


def as_array(digests: list[bytes]) -> Array:
    """Digests of 16 bytes as ``(n, 2)`` of uint64."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
