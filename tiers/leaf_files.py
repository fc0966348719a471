"""Leaf files: a save's way into files of whole leaves, of which those that did not change are not written again.

A file is laid out before its data is known, so what goes into it is decided by what the tier's newest record says, and
by nothing else:

* A big leaf that did not change in the last save most likely does not now: it is *frozen*. Nothing is written as long
  as its chunks are what they were. When one is not, a file is begun for that leaf and those behind it of its old file;
  what of them has passed by then is read again from where it lies.
* All other leaves are written as they come. Those of them that are big and turn out not to have changed keep their
  old place all the same, so that they are frozen from then on.

Files are cut at leaves, and each part of a capture, whose chunks come in order, has its own.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.layout import RAW, Draft
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.version import Version

from .arena import Slab
from .batch import Batch
from .earlier import Earlier
from .fetch import Fetch
from .formats import About, Blueprint, Format, Item
from .leaf_file import LeafFile, Piece
from .packing import BIG, in_order
from .shelf import Shelf

MAX_FILE = 4 << 30
"""Bytes of a file, unless a single leaf is longer."""

MAX_LEAVES = 16384
"""Leaves of a file: readers take in all names at once."""


@dataclass(eq=False)
class _Unit:
    """Leaves that are, or would be, one file.

    Attributes:
        leaves: their numbers, in the file's order.
        rows: the rows of their chunks.
        file: None as long as they are frozen.
        changed: whether a chunk came that is not as it was.
    """

    leaves: Array
    rows: Array
    file: LeafFile | None = None
    changed: bool = False


class LeafFiles:
    """The files of one save in one tier.

    Args:
        shelf: the run in that tier.
        head: the version's head.
        leaves: the version's leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        kind: of the files.
        stages: ``(leaves,)``: in which part of the capture each comes; -1 for those that go into no file.
    """

    def __init__(
        self, shelf: Shelf, head: Head, leaves: Sequence[Leaf], row_leaves: Array, kind: Format, stages: Array
    ) -> None:
        self._shelf, self._head, self._kind, self._stages = shelf, head, kind, stages
        self._leaves, self._row_leaves = leaves, row_leaves
        self._leaf_nbytes = np.array(
            [leaf.spec.nbytes if s >= 0 else 0 for leaf, s in zip(leaves, stages, strict=True)]
        )
        self._count = np.bincount(row_leaves, minlength=len(leaves))
        self._first = np.cumsum(self._count) - self._count
        self._lock = threading.Lock()
        self._planned = False
        self._units: list[_Unit] = []
        self._unit, self._index = np.full(len(row_leaves), -1), np.zeros(len(row_leaves), "i8")
        self._seen = np.zeros(len(row_leaves), bool)
        self._digests = np.zeros((len(row_leaves), 2), "<u8")
        self.sizes: dict[str, int] = {}

    @property
    def stored(self) -> int:
        """Bytes written so far."""
        return sum(unit.file.at for unit in self._units if unit.file is not None)

    # What goes where

    def _ready(self) -> None:
        """Decide what goes where: when the save before is through, and before the first chunk is looked at."""
        with self._lock:
            if not self._planned:
                self._earlier = self._look_back()
                big = self._leaf_nbytes >= BIG
                self._divide(self._earlier.old & big & (self._stages >= 0), self._stages)
                self._planned = True

    def _look_back(self) -> Earlier:
        return Earlier(self._shelf, self._head, self._leaves, self._row_leaves, self._kind.suffix)

    def _divide(self, frozen: Array, stages: Array) -> None:
        for stage in np.unique(stages[stages >= 0]).tolist():
            members = np.flatnonzero(stages == stage)
            itemsize = [self._leaves[leaf].spec.itemsize for leaf in members.tolist()]
            members = members[in_order(self._leaf_nbytes[members], itemsize.__getitem__)]
            source = np.where(frozen[members], self._earlier.object[members], -1)
            for one in np.unique(source).tolist():
                for leaves in self._cut(members[source == one]):
                    self._add(leaves, frozen=one >= 0)

    def _cut(self, leaves: Array) -> Iterator[Array]:
        first, size = 0, 0
        for i, nbytes in enumerate(self._leaf_nbytes[leaves].tolist()):
            if i > first and (size + nbytes > MAX_FILE or i - first == MAX_LEAVES):
                yield leaves[first:i]
                first, size = i, 0
            size += nbytes
        yield leaves[first:]

    def _add(self, leaves: Array, *, frozen: bool) -> _Unit:
        counts = self._count[leaves]
        owner = np.repeat(np.arange(len(leaves)), counts)
        rows = self._first[leaves][owner] + np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        unit = _Unit(leaves, rows)
        # In this order: the capture's thread may be asking what stands.
        self._units.append(unit)
        self._unit[rows], self._index[rows] = len(self._units) - 1, np.arange(len(rows))
        if not frozen:
            starts = (rows - self._first[leaves][owner]) * self._head.chunk
            nbytes = np.minimum(self._head.chunk, self._leaf_nbytes[leaves][owner] - starts)
            lay_out = partial(self._lay_out, leaves)
            unit.file = LeafFile(self._shelf.tier, self._key(), rows, starts, nbytes, owner, lay_out, self._again)
        return unit

    def _key(self) -> str:
        head, number = self._head, len(self._units) - 1
        return (
            f"packs/{head.run}/{head.seq:012d}-{self._shelf.rank}-{number}-{uuid.uuid4().hex[:12]}{self._kind.suffix}"
        )

    def _lay_out(self, leaves: Array) -> Blueprint:
        head = self._head
        metadata = json.dumps(dict(head.metadata))
        about = About(head.run, head.seq, head.step, head.time, metadata, head.chunk, head.digest)
        return self._kind.lay_out([Item(self._leaves[i], int(self._count[i])) for i in leaves.tolist()], about)

    def _again(self, row: int) -> Buffer | None:
        return self._earlier.read(row) if self._seen[row] else None

    def _thaw(self, unit: _Unit, index: int) -> _Unit:
        """Begin a file for the leaf of that chunk, and those behind it."""
        leaf = self._row_leaves[unit.rows[index]]
        at = int(np.flatnonzero(unit.leaves == leaf)[0])
        made = self._add(unit.leaves[at:], frozen=False)
        unit.leaves, unit.rows = unit.leaves[:at], unit.rows[: len(unit.rows) - len(made.rows)]
        return made

    # What comes

    def standing(self, digests: Array) -> Array:
        """``(chunks,)`` of bool: which rows would need nothing if these were their digests; known without asking the
        tier."""
        if not self._shelf.at_hand:
            return np.zeros(len(digests), bool)
        self._ready()
        # A leaf that thaws meanwhile may still count as frozen: what `keep` is told of it is then read again.
        numbers = self._unit.copy()
        frozen = np.array([unit.file is None for unit in self._units] or [False])
        found: Array = (numbers >= 0) & frozen[numbers]
        rows = np.flatnonzero(found)
        found[rows] = self._earlier.same(rows, digests[rows])
        return found

    def keep(self, rows: Array, digests: Array) -> bool:
        """Take note of chunks that were not copied; whether they are where `standing` said."""
        self._ready()
        mine = self._unit[rows] >= 0
        rows, digests = rows[mine], digests[mine]
        self._digests[rows], self._seen[rows] = digests, self._earlier.same(rows, digests)
        for number in np.unique(self._unit[rows]).tolist():
            self._go_on(self._units[number])
        return bool(self._seen[rows].all())

    def take(self, batch: Batch) -> None:
        """Write those of a slab's chunks that belong into files, as far as it is their turn."""
        self._ready()
        mine = np.flatnonzero(self._unit[batch.rows] >= 0)
        try:
            self._take(batch.rows[mine], batch.digests[mine], batch.at[mine], batch.slab)
        except BaseException:
            # Nothing more is written: the slabs that wait are not to hold up the capture.
            for unit in self._units:
                if unit.file is not None:
                    unit.file.let_go()
            raise

    def _take(self, rows: Array, digests: Array, at: Array, slab: Slab) -> None:
        self._digests[rows] = digests
        changed = rows[~self._earlier.same(rows, digests)]
        for number in np.unique(self._unit[changed]).tolist():
            unit = self._units[number]
            if unit.file is None:
                unit = self._thaw(unit, int(self._index[changed[self._unit[changed] == number]].min()))
            unit.changed = True
        for number in np.unique(self._unit[rows]).tolist():
            unit, which = self._units[number], np.flatnonzero(self._unit[rows] == number)
            if unit.file is None:
                self._seen[rows[which]] = True
                continue
            which = which[np.argsort(self._index[rows[which]])]
            index = self._index[rows[which]]
            for run in np.split(which, np.flatnonzero(np.diff(index) != 1) + 1):
                unit.file.take(int(self._index[rows[run[0]]]), Piece(slab.buffer, at[run], slab))
            self._go_on(unit)

    def _go_on(self, unit: _Unit) -> None:
        if unit.file is not None:
            unit.file.advance()
            if unit.changed and unit.file.complete:
                self._close(unit.file, unit.rows)

    def _close(self, file: LeafFile, rows: Array) -> None:
        if file.key not in self.sizes:
            self.sizes[file.key] = file.close(self._digests[rows])

    def copy(self, version: Version, fetch: Fetch) -> None:
        """Write what this tier lacks of a version that other tiers have; all is known of it, so nothing is guessed."""
        digests = self._digests = version.digests
        self._earlier, self._planned = self._look_back(), True
        same = self._earlier.same(np.arange(len(digests)), digests)
        whole = np.bincount(self._row_leaves[~same], minlength=len(self._leaves)) == 0
        frozen = self._earlier.usable & whole & (self._leaf_nbytes >= BIG)
        self._divide(frozen, np.minimum(self._stages, 0))
        for unit in self._units:
            unit.changed = not same[unit.rows].all()
            if unit.file is not None and unit.changed:
                for window in unit.file.windows(fetch.slab_size):
                    fetch.run(window.tolist(), partial(self._put, unit.file))
                self._go_on(unit)

    def _put(self, file: LeafFile, row: int, raw: Buffer, slab: Slab | None) -> None:
        """One chunk. Too early, it is copied: to hold its slab could mean to wait for ever for the next one."""
        index = int(self._index[row])
        at = np.zeros(1, "i8")
        file.take(index, Piece(raw, at, slab) if index == file.next else Piece(raw.clone(), at))

    # The end

    def finish(self, draft: Draft, version: Version) -> None:
        """Close what is still open, and say where everything lies."""
        self._ready()
        for unit in self._units:
            same = self._earlier.same(unit.rows, version.digests[unit.rows])
            if same.all():
                self._drop(unit)
                self._earlier.reuse(draft, unit.rows)
                continue
            if unit.file is None:
                raise RuntimeError("chunks have changed that did not come")
            self._close(unit.file, unit.rows)
            leaf = self._row_leaves[unit.rows]
            moved = np.bincount(leaf[~same], minlength=len(self._leaves)) > 0
            old = ~moved[leaf] & (self._leaf_nbytes[leaf] >= BIG)
            self._earlier.reuse(draft, unit.rows[old])
            file = unit.file
            draft.put_run(unit.rows[~old], file.key, file.offset[~old], file.nbytes[~old], RAW)

    @staticmethod
    def _drop(unit: _Unit) -> None:
        if unit.file is not None:
            unit.file.abort()

    def abort(self) -> None:
        """Leave nothing: open files are aborted, closed ones are deleted."""
        keys, self.sizes = list(self.sizes), {}
        errors = []
        for unit in self._units:
            try:
                self._drop(unit)
            except Exception as error:  # whatever it is: the others hold leases, too
                errors.append(error)
        for key in keys:
            self._shelf.tier.delete(key)
        if errors:
            raise errors[0]
