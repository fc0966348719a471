"""Liveness: how much of each pack any record still names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tierstate.manifest.index import Array
from tierstate.manifest.layout import Layout
from tierstate.manifest.record import Record

DELTA = "delta"
"""Codec of chunks that are stored as a difference from others."""


@dataclass(frozen=True)
class Pack:
    """One pack, and what of it is wanted.

    Attributes:
        size: its length in bytes.
        live: bytes of its chunks that a record names.
        seqs: versions that name it.
        movable: whether its chunks can be put elsewhere; not so where deltas are among them, or were made from them.
    """

    size: int
    live: int
    seqs: frozenset[int]
    movable: bool


class Liveness:
    """Takes records one by one; keeps numbers alone, each chunk once."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._seqs: dict[str, set[int]] = {}
        self._chunks: dict[str, Array] = {}
        self._fixed: set[str] = set()

    def add(self, record: Record) -> None:
        """One more record."""
        layout, seq = record.layout, record.version.head.seq
        for number, (key, size) in enumerate(zip(layout.objects, layout.object_sizes.tolist(), strict=True)):
            self._sizes[key] = max(size, self._sizes.get(key, 0))
            self._seqs.setdefault(key, set()).add(seq)
            rows = np.flatnonzero(layout.object == number)
            if not len(rows) or _is_fixed(layout, number, rows):
                self._fixed.add(key)
            found = np.column_stack([layout.offset[rows].astype("u8"), layout.stored[rows].astype("u8")])
            before = self._chunks.get(key)
            self._chunks[key] = np.unique(found if before is None else np.concatenate([before, found]), axis=0)

    def packs(self) -> dict[str, Pack]:
        """All packs that were named."""
        return {
            key: Pack(
                size, int(self._chunks[key][:, 1].sum()), frozenset(self._seqs[key]), movable=key not in self._fixed
            )
            for key, size in sorted(self._sizes.items())
        }


def _is_fixed(layout: Layout, number: int, rows: Array) -> bool:
    """Whether what a layout has in a pack must stay where it is."""
    deltas = np.array([codec == DELTA for codec in layout.codecs], bool)[layout.codec[rows]]
    bases = getattr(layout, "base_object", None)
    return bool(deltas.any()) or (bases is not None and bool((bases == number).any()))


def mostly_dead(packs: Mapping[str, Pack], untouched: Collection[int], run: str, win: int) -> dict[str, Pack]:
    """Packs of the run less than half of which is wanted, where emptying them wins more than so many bytes.

    Args:
        untouched: versions whose packs stay as they are.
    """
    return {
        key: pack
        for key, pack in packs.items()
        if pack.movable
        and key.startswith(f"packs/{run}/")
        and 2 * pack.live < pack.size
        and pack.size - pack.live > win
        and not pack.seqs & set(untouched)
    }


def liveness(records: Iterable[Record]) -> dict[str, Pack]:
    """All packs that these records name."""
    found = Liveness()
    for record in records:
        found.add(record)
    return found.packs()
