"""Ranges: the one check that every tier makes before it fills them."""

from __future__ import annotations

from collections.abc import Sequence

from tierstate.manifest.errors import Damaged

from .base import Range


def check_ranges(place: str, size: int, ranges: Sequence[Range]) -> None:
    """Nothing, if every range lies within an object of ``size`` bytes.

    Raises:
        Damaged: one does not; ``place`` (tier and key) says where.
    """
    for offset, out in ranges:
        if offset < 0 or offset + out.numel() > size:
            raise Damaged(f"{place}: bytes {offset} to {offset + out.numel()} are wanted, the object has {size}")
