"""Ranges: the one check that every tier makes before it fills them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierstate.manifest.errors import Damaged

from .base import Range


def check_ranges(place: str, size: int, ranges: Sequence[Range]) -> None:
    """Nothing, if every range lies within an object of ``size`` bytes.

    Raises:
        Damaged: one does not; ``place`` (tier and key) says where.
    """
    check_spans(place, size, ((offset, out.numel()) for offset, out in ranges))


def check_spans(place: str, size: int, spans: Iterable[tuple[int, int]]) -> None:
    """As `check_ranges`, of offsets and lengths."""
    for offset, nbytes in spans:
        if offset < 0 or offset + nbytes > size:
            raise Damaged(f"{place}: bytes {offset} to {offset + nbytes} are wanted, the object has {size}")
