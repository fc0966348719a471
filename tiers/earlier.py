"""Earlier: what a tier's newest record says of the leaves that are saved now, leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import Damaged
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.layout import RAW, Draft
from tierstate.manifest.leaf import Leaf, encode_path
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .base import Range
from .shelf import Shelf


class Earlier:
    """Leaves that the tier's newest version has whole in one file of a kind, by the rows of the version to be.

    Args:
        shelf: the run in that tier.
        head: of the version to be.
        leaves: its leaves.
        row_leaves: ``(chunks,)``: the leaf of each of its rows.
        suffix: how the names of such files end.

    Attributes:
        usable: ``(leaves,)`` of bool: which lie there so, as far as that is known without reading them.
        object: ``(leaves,)``: number of the file; -1 for those that are not usable.
        old: ``(leaves,)`` of bool: which have lain there since before the newest version.
    """

    def __init__(self, shelf: Shelf, head: Head, leaves: Sequence[Leaf], row_leaves: Array, suffix: str) -> None:
        self._shelf, self._rows = shelf, row_leaves
        self.usable = np.zeros(len(leaves), bool)
        self.object = np.full(len(leaves), -1)
        self.old = np.zeros(len(leaves), bool)
        self._there = np.zeros(len(row_leaves), "i8")
        record = shelf.earlier
        if record is None or not len(record.version.digests) or not len(row_leaves):
            return
        self._record = record
        then = record.version.head
        if (then.chunk, then.digest) == (head.chunk, head.digest):
            self._match(record.version, leaves)
            self._look(record, suffix)

    def _match(self, version: Version, leaves: Sequence[Leaf]) -> None:
        """Find each leaf, and each of its rows, in the version that was."""
        there, rows = rows_then(version, leaves, self._rows), self._rows
        once = np.bincount(version.shard_leaf, minlength=len(version.leaves)) == 1
        found = there >= 0
        self.usable[rows[found]] = once[version.chunk_leaf[there[found]]]
        self._there = np.where(self.usable[rows], there, 0)

    def _look(self, record: Record, suffix: str) -> None:
        """Leave those that lie whole and raw in one sound file."""
        layout, rows, there = record.layout, self._rows, self._there
        here = np.flatnonzero(self.usable[rows] & layout.present[there])
        objects = np.full(len(rows), -1)
        objects[here] = layout.object[there[here]]
        mine = [key.endswith(suffix) and self._shelf.is_sound(key, layout) for key in layout.objects]
        good = np.zeros(len(rows), bool)
        good[here] = np.array(mine, bool)[objects[here]]
        good[here] &= np.array([codec == RAW for codec in layout.codecs], bool)[layout.codec[there[here]]]
        offset = layout.offset[there].astype("i8")
        apart = (np.diff(offset) != layout.stored[there][:-1]) | (np.diff(objects) != 0)
        good[1:] &= ~(apart & (np.diff(rows) == 0))
        for row in np.flatnonzero(good).tolist():
            good[row] = self._shelf.mended(record.version.digests[there[row]].tobytes()) is None
        self.usable[rows[~good]] = False
        self.object[rows] = np.where(self.usable[rows], objects, -1)
        since = f"/{record.version.head.seq:012d}-"
        old = np.array([since not in key for key in layout.objects] or [False], bool)
        self.old = self.usable & old[self.object]

    def same(self, rows: Array, digests: Array) -> Array:
        """``(n,)`` of bool: which of these rows are usable, and have the same bytes as then."""
        found: Array = self.usable[self._rows[rows]]
        here = np.flatnonzero(found)
        if len(here):
            found[here] = (self._record.version.digests[self._there[rows[here]]] == digests[here]).all(axis=1)
        return found

    def reuse(self, draft: Draft, rows: Array) -> None:
        """Give rows the places they had."""
        if len(rows):
            draft.put_like(rows, self._record.layout, self._there[rows])

    def read(self, row: int) -> Buffer:
        """The bytes of a row, as they lie in the tier, verified.

        Raises:
            Damaged: they are not what they were.
        """
        there = int(self._there[row])
        place = self._record.layout.place(there)
        assert place is not None
        out = empty_buffer(place.stored)
        self._shelf.tier.read(place.object, [Range(place.offset, out)])
        version = self._record.version
        if algorithm(version.head.digest)(out) != version.digests[there].tobytes():
            self._shelf.distrust(place.object)
            raise Damaged(
                f"{self._shelf.name}: {place.object} is damaged at {place.offset}, and this save relies on it; "
                "the next save writes its leaves again"
            )
        return out


def rows_then(version: Version, leaves: Sequence[Leaf], rows: Array) -> Array:
    """The row in an earlier version of each chunk of one to be: -1 where its leaf is not the same apart from its bytes,
    or was cut into more or fewer chunks.

    Args:
        version: the earlier one.
        leaves: those of the one to be.
        rows: ``(chunks,)``: the leaf of each of its rows, rising.
    """
    index = _index(version, leaves)
    chunks = np.bincount(rows, minlength=len(leaves))
    chunks_then = np.bincount(version.chunk_leaf, minlength=len(version.leaves))
    same = (index >= 0) & (chunks > 0) & (chunks_then[index] == chunks)
    move = (np.cumsum(chunks_then) - chunks_then)[index] - (np.cumsum(chunks) - chunks)
    found: Array = np.where(same[rows], np.arange(len(rows)) + move[rows], -1)
    return found


def _index(version: Version, leaves: Sequence[Leaf]) -> Array:
    """``(leaves,)``: the number that each leaf had, if it was the same apart from its bytes; or -1."""
    if version.leaves is leaves:
        return np.arange(len(leaves))
    found = [version.leaf_index.get(encode_path(leaf.path), -1) for leaf in leaves]
    pairs = zip(found, leaves, strict=True)
    return np.array([i if i >= 0 and version.leaves[i].spec == leaf.spec else -1 for i, leaf in pairs], "i8")
