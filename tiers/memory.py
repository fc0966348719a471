"""The memory tier: copies in this process's memory, for tests and for what need not survive it."""

from __future__ import annotations

from tierstate.manifest.chunk import Buffer

from .base import Release
from .held import HeldTier, Piece
from .units import Size


class Memory(HeldTier):
    """Keeps a copy of every byte it is given, and nothing when the process ends.

    Args:
        capacity: bytes it may hold; None for as many as there is memory.
    """

    def __init__(self, *, capacity: Size | None = None) -> None:
        super().__init__(capacity)

    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> Piece:
        return self._hold_copy(key, buffer)
