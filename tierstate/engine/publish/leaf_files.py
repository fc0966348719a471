"""Write a version as files of whole leaves (safetensors, HDF5), without writing unchanged leaves again.

The header of a file is written before its data is known. So which leaves go into a file is decided from the tier's
newest record only:

* A big leaf that did not change in the last save will most likely not change in this one: it is *frozen*. Nothing is
  written for it as long as its chunks are the same. When a chunk has changed, a new file is begun for that leaf and the
  leaves after it in the old file; chunks of them that have passed already are read again from the old file.
* All other leaves are written when their chunks come. If a big one of them turns out to be unchanged, the record names
  its old file all the same, so that it is frozen in the next save.

A leaf is never split over files, and each stage of a capture, whose chunks come in order, has its own files.

`LeafFile` writes one file from chunks that come nearly in its order. `PreviousLeaves` finds the leaves in the tier's
newest version. `LeafFiles` has all files of one save.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from tierstate.engine.packs.formats import FileFormat, FileInfo, FileLayout, FileLeaf
from tierstate.engine.packs.keys import PackKey
from tierstate.engine.packs.slab_layout import BIG, SlabChunks, capture_order
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, as_buffer, view
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import Damaged
from tierstate.manifest.format.layout import RAW, LayoutBuilder, stored_as
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history.diff import rows_in_earlier
from tierstate.tiers.base import ObjectWriter, Tier, read_range
from tierstate.tiers.memory.arena import LeasedSlab

AGAIN = "the next save writes its leaves again"
"""The end of error messages about damaged files."""


MAX_FILE = 4 << 30
"""The largest file in bytes, unless a single leaf is larger."""


MAX_LEAVES = 16384
"""The most leaves of a file: readers load all names at once."""


class PreviousLeaves:
    """The leaves that the tier's newest version has whole in one file, addressed by the rows of the new version.

    Args:
        tier_run: the run in that tier.
        head: the head of the new version.
        leaves: its leaves.
        row_leaves: ``(chunks,)``: the leaf of each of its rows.
        suffix: the suffix of the names of such files.

    Attributes:
        usable: ``(leaves,)`` of bool: which leaves are whole and raw in one undamaged file, as far as records say.
        object: ``(leaves,)``: index of the file in the record; -1 if not usable.
        old: ``(leaves,)`` of bool: which are in a file that is older than the newest version.
    """

    def __init__(self, tier_run: TierRun, head: Head, leaves: Sequence[Leaf], row_leaves: Array, suffix: str) -> None:
        self._tier_run, self._rows = tier_run, row_leaves
        self.usable = np.zeros(len(leaves), bool)
        self.object = np.full(len(leaves), -1)
        self.old = np.zeros(len(leaves), bool)
        self._there = np.zeros(len(row_leaves), "i8")
        record = tier_run.earlier
        if record is None or not len(record.version.digests) or not len(row_leaves):
            return
        self._record = record
        then = record.version.head
        if (then.chunk, then.digest) == (head.chunk, head.digest):
            self._match(record.version, leaves)
            self._look(record, suffix)

    def _match(self, version: Version, leaves: Sequence[Leaf]) -> None:
        """Find each leaf and each of its rows in the tier's newest version."""
        there, rows = rows_in_earlier(version, leaves, self._rows), self._rows
        once = np.bincount(version.shard_leaf, minlength=len(version.leaves)) == 1
        found = there >= 0
        self.usable[rows[found]] = once[version.chunk_leaf[there[found]]]
        self._there = np.where(self.usable[rows], there, 0)

    def _look(self, record: Record, suffix: str) -> None:
        """Keep as usable only the leaves that are whole, raw and contiguous in one undamaged file."""
        layout, rows, there = record.layout, self._rows, self._there
        here = np.flatnonzero(self.usable[rows] & layout.present[there])
        objects = np.full(len(rows), -1)
        objects[here] = layout.object[there[here]]
        mine = [key.endswith(suffix) and self._tier_run.is_sound(key, layout) for key in layout.objects]
        good = np.zeros(len(rows), bool)
        good[here] = np.array(mine, bool)[objects[here]]
        good[here] &= stored_as(RAW, layout.codecs)[layout.codec[there[here]]]
        offset = layout.offset[there].astype("i8")
        apart = (np.diff(offset) != layout.stored[there][:-1]) | (np.diff(objects) != 0)
        good[1:] &= ~(apart & (np.diff(rows) == 0))
        for row in np.flatnonzero(good).tolist():
            good[row] = self._tier_run.mended(record.version.digests[there[row]].tobytes()) is None
        self.usable[rows[~good]] = False
        self.object[rows] = np.where(self.usable[rows], objects, -1)
        since = f"/{record.version.head.seq:012d}-"
        old = np.array([since not in key for key in layout.objects] or [False], bool)
        self.old = self.usable & old[self.object]

    def same(self, rows: Array, digests: Array) -> Array:
        """``(n,)`` of bool: which of these rows are usable, have the same digest as in the newest version, and are in a
        file that was not found damaged since."""
        found: Array = self.usable[self._rows[rows]] & self.sound(rows)
        here = np.flatnonzero(found)
        if len(here):
            found[here] = (self._record.version.digests[self._there[rows[here]]] == digests[here]).all(axis=1)
        return found

    def sound(self, rows: Array) -> Array:
        """``(n,)`` of bool: false for the rows in a file that was found damaged, true for all others."""
        objects = self.object[self._rows[rows]]
        found = np.ones(len(rows), bool)
        for number in np.unique(objects[objects >= 0]).tolist():
            layout = self._record.layout
            if not self._tier_run.is_sound(layout.objects[number], layout):
                found[objects == number] = False
        return found

    def reuse(self, draft: LayoutBuilder, rows: Array) -> None:
        """Put the old places of these rows into the new layout."""
        if len(rows):
            draft.put_like(rows, self._record.layout, self._there[rows])

    def gone(self, rows: Array) -> Exception:
        """The error for frozen rows that are not `same` at the end: their file was found damaged meanwhile."""
        if self.sound(rows).all():
            return RuntimeError("chunks have changed that did not come")
        return Damaged(f"{self._tier_run.name}: a file was found damaged, and this save relies on it; {AGAIN}")

    def read(self, row: int) -> Buffer:
        """Read the bytes of a row from its old file and verify them.

        Raises:
            Damaged: the digest is wrong.
        """
        there = int(self._there[row])
        place = self._record.layout.place(there)
        assert place is not None
        out = read_range(self._tier_run.tier, place.object, place.offset, place.stored)
        version = self._record.version
        if digest_function(version.head.digest)(out) != version.digests[there].tobytes():
            self._tier_run.distrust(place.object)
            raise Damaged(
                f"{self._tier_run.name}: {place.object} is damaged at {place.offset}, and this save relies on it; "
                f"{AGAIN}"
            )
        return out


class ChunkRun(NamedTuple):
    """Chunks that follow each other in the file.

    Attributes:
        buffer: the memory with their bytes.
        at: ``(n,)``: byte offset of each in the buffer.
        slab: the slab to lease while the buffer is needed; None if the buffer is not in a slab.
    """

    buffer: Buffer
    at: Array
    slab: LeasedSlab | None = None


class LeafFile:
    """One file, written strictly in its order. Chunks that come too early wait for those before them; they hold a lease
    on their slab.

    Args:
        tier, key: the tier, and the key of the object.
        rows: ``(n,)``: the version's row of each chunk of the file, in order.
        starts: ``(n,)``: byte offset of each chunk in its leaf.
        nbytes: ``(n,)``: their lengths in bytes.
        leaf: ``(n,)``: index of the chunk's leaf among the leaves of the file.
        lay_out: called when the file is begun; returns its layout.
        again: returns the bytes of a row that has passed already and will not come; None for a row that will come.
    """

    def __init__(
        self,
        tier: Tier,
        key: str,
        rows: Array,
        starts: Array,
        nbytes: Array,
        leaf: Array,
        lay_out: Callable[[], FileLayout],
        again: Callable[[int], Buffer | None] = lambda _row: None,
    ) -> None:
        self._tier, self.key = tier, key
        self.rows, self._starts, self.nbytes, self._leaf = rows, starts, nbytes, leaf
        self._lay_out, self._again = lay_out, again
        self._blueprint: FileLayout | None = None
        self._writer: ObjectWriter | None = None
        self._held: dict[int, ChunkRun] = {}
        self.offset = np.zeros(len(rows), "i8")
        self.next = 0
        self.at = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is written."""
        return self.next == len(self.rows)

    def windows(self, size: int) -> Iterator[Array]:
        """All rows in order, in groups of at most ``size`` bytes, but at least one row."""
        ends, first = np.cumsum(self.nbytes), 0
        while first < len(self.rows):
            before = int(ends[first] - self.nbytes[first])
            stop = max(first + 1, int(np.searchsorted(ends, before + size, "right")))
            yield self.rows[first:stop]
            first = stop

    def take(self, first: int, piece: ChunkRun) -> None:
        """Write chunks that begin at index ``first`` of the file: now, or when all chunks before them are written."""
        if first == self.next:
            self._write(piece)
        else:
            if piece.slab is not None:
                piece.slab.lease()
            self._held[first] = piece
        self.advance()

    def advance(self) -> None:
        """Write all waiting chunks whose turn has come, and those that `again` returns."""
        while not self.complete:
            held = self._held.pop(self.next, None)
            if held is not None:
                try:
                    self._write(held)
                finally:
                    if held.slab is not None:
                        held.slab.release()
                continue
            memory = self._again(int(self.rows[self.next]))
            if memory is None:
                return
            self._write(ChunkRun(memory, np.zeros(1, "i8")))

    def _write(self, piece: ChunkRun) -> None:
        """Append chunks: long runs without a copy, short ones gathered in one buffer."""
        self._begin()
        part, memory = slice(self.next, self.next + len(piece.at)), view(piece.buffer)
        short: list[memoryview] = []
        for offset, start, end in _runs(self.offset[part], self.nbytes[part], piece.at):
            gap = offset - self.at - sum(map(len, short))
            if end - start < BIG:
                short += [memoryview(bytes(gap)), memory[start:end]]
                continue
            self._gather([*short, memoryview(bytes(gap))])
            short = []
            self._append(piece.buffer[start:end], piece.slab)
        self._gather(short)
        self.next += len(piece.at)

    def _begin(self) -> None:
        if self._writer is None:
            self._blueprint = self._lay_out()
            self.offset = np.array(self._blueprint.offsets, "i8")[self._leaf] + self._starts
            self._writer = self._tier.writer(self.key, self._blueprint.size)
            self._append(as_buffer(self._blueprint.head))

    def _gather(self, pieces: Sequence[memoryview]) -> None:
        if gathered := bytearray().join(pieces):
            self._append(as_buffer(gathered))

    def _append(self, buffer: Buffer, slab: LeasedSlab | None = None) -> None:
        assert self._writer is not None
        self.at += buffer.numel()
        if slab is None:
            self._writer.append(buffer)
        else:
            slab.lease()
            self._writer.append(buffer, slab.release)

    def close(self, digests: Array) -> int:
        """Make the file visible and durable. Returns its length in bytes.

        Args:
            digests: ``(n, 2)``: the digests of its chunks.
        """
        if not self.complete:
            raise RuntimeError(f"{self.key}: chunk {self.next} of {len(self.rows)} did not come")
        self._begin()
        assert self._blueprint is not None
        assert self._writer is not None
        size, table = self._blueprint.size, self._blueprint.digests
        if table >= 0:
            self._gather([memoryview(bytes(table - self.at)), memoryview(digests.astype("<u8").tobytes())])
        self._gather([memoryview(bytes(size - self.at))])
        # Forget the writer only once it closed: after an error, abort() must still reach it.
        self._writer.close()
        self._writer = None
        return size

    def let_go(self) -> None:
        """Release the slabs of the chunks that wait for their turn."""
        held, self._held = self._held, {}
        for piece in held.values():
            if piece.slab is not None:
                piece.slab.release()

    def abort(self) -> None:
        """Abort and delete the file: a failed close may still have made it visible."""
        self.let_go()
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
            self._tier.delete(self.key)
            self.at = 0


def _runs(offset: Array, nbytes: Array, at: Array) -> Iterator[tuple[int, int, int]]:
    """Merge chunks that are contiguous in memory and in the file: offset in the file, start and end in memory."""
    apart = (at[1:] != at[:-1] + nbytes[:-1]) | (offset[1:] != offset[:-1] + nbytes[:-1])
    firsts = np.flatnonzero(np.append(True, apart))
    lasts = np.append(firsts[1:], len(at)) - 1
    columns = offset[firsts], at[firsts], at[lasts] + nbytes[lasts]
    return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(eq=False)
class _Unit:
    """A group of leaves that go into one file, or are frozen in one.

    Attributes:
        leaves: their indices, in the file's order.
        rows: the rows of their chunks.
        file: the new file; None as long as they are frozen.
        changed: whether one of their chunks has changed.
    """

    leaves: Array
    rows: Array
    file: LeafFile | None = None
    changed: bool = False


class LeafFiles:
    """The files of one save in one tier; used by `FormattedTierWrite`.

    Args:
        tier_run: the run in that tier.
        head: the version's head.
        leaves: the version's leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        kind: the file format.
        stages: ``(leaves,)``: the stage of the capture in which each leaf comes; -1 for leaves that go into no file.
    """

    def __init__(
        self, tier_run: TierRun, head: Head, leaves: Sequence[Leaf], row_leaves: Array, kind: FileFormat, stages: Array
    ) -> None:
        self._tier_run, self._head, self._kind, self._stages = tier_run, head, kind, stages
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

    # Which leaves go into which file

    def _ready(self) -> None:
        """Assign leaves to files, once: after the save before is committed, and before the first chunk is written."""
        with self._lock:
            if not self._planned:
                self._earlier = self._look_back()
                big = self._leaf_nbytes >= BIG
                self._divide(self._earlier.old & big & (self._stages >= 0), self._stages)
                self._planned = True

    def _look_back(self) -> PreviousLeaves:
        return PreviousLeaves(self._tier_run, self._head, self._leaves, self._row_leaves, self._kind.suffix)

    def _divide(self, frozen: Array, stages: Array) -> None:
        for stage in np.unique(stages[stages >= 0]).tolist():
            members = np.flatnonzero(stages == stage)
            itemsize = [self._leaves[leaf].spec.itemsize for leaf in members.tolist()]
            members = members[capture_order(self._leaf_nbytes[members], itemsize.__getitem__)]
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
        # In this order: the capture thread may be calling `needless`.
        self._units.append(unit)
        self._unit[rows], self._index[rows] = len(self._units) - 1, np.arange(len(rows))
        if not frozen:
            starts = (rows - self._first[leaves][owner]) * self._head.chunk
            nbytes = np.minimum(self._head.chunk, self._leaf_nbytes[leaves][owner] - starts)
            lay_out = partial(self._lay_out, leaves)
            unit.file = LeafFile(self._tier_run.tier, self._key(), rows, starts, nbytes, owner, lay_out, self._again)
        return unit

    def _key(self) -> str:
        head, number = self._head, len(self._units) - 1
        return str(PackKey.new(head.run, head.seq, self._tier_run.rank, number, self._kind.suffix))

    def _lay_out(self, leaves: Array) -> FileLayout:
        head = self._head
        metadata = json.dumps(dict(head.metadata))
        about = FileInfo(head.run, head.seq, head.step, head.time, metadata, head.chunk, head.digest)
        return self._kind.lay_out([FileLeaf(self._leaves[i], int(self._count[i])) for i in leaves.tolist()], about)

    def _again(self, row: int) -> Buffer | None:
        return self._earlier.read(row) if self._seen[row] else None

    def _thaw(self, unit: _Unit, index: int) -> _Unit:
        """Begin a new file for the leaf of that chunk and the leaves after it."""
        leaf = self._row_leaves[unit.rows[index]]
        at = int(np.flatnonzero(unit.leaves == leaf)[0])
        made = self._add(unit.leaves[at:], frozen=False)
        unit.leaves, unit.rows = unit.leaves[:at], unit.rows[: len(unit.rows) - len(made.rows)]
        return made

    # Chunks from the capture, or from faster tiers

    def needless(self, digests: Array) -> Array:
        """``(chunks,)`` of bool: the rows for which nothing need be written if these are their digests. Does no I/O."""
        if not self._tier_run.at_hand:
            return np.zeros(len(digests), bool)
        self._ready()
        # A leaf that gets a new file meanwhile may still count as frozen: rows that `keep` gets are then read again.
        numbers = self._unit.copy()
        frozen = np.array([unit.file is None for unit in self._units] or [False])
        found: Array = (numbers >= 0) & frozen[numbers]
        rows = np.flatnonzero(found)
        found[rows] = self._earlier.same(rows, digests[rows])
        return found

    def keep(self, rows: Array, digests: Array) -> bool:
        """Note chunks that were not copied, since `needless` was true for them. Returns whether all are `same`."""
        self._ready()
        mine = self._unit[rows] >= 0
        rows, digests = rows[mine], digests[mine]
        self._digests[rows], self._seen[rows] = digests, self._earlier.same(rows, digests)
        for number in np.unique(self._unit[rows]).tolist():
            self._go_on(self._units[number])
        return bool(self._seen[rows].all())

    def take(self, batch: SlabChunks) -> None:
        """Write those chunks of a slab that belong into files; chunks that come too early wait."""
        self._ready()
        mine = np.flatnonzero(self._unit[batch.rows] >= 0)
        try:
            self._take(batch.rows[mine], batch.digests[mine], batch.at[mine], batch.slab)
        except BaseException:
            # Nothing more is written: release the slabs that wait, since the capture may need them.
            for unit in self._units:
                if unit.file is not None:
                    unit.file.let_go()
            raise

    def _take(self, rows: Array, digests: Array, at: Array, slab: LeasedSlab) -> None:
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
                unit.file.take(int(self._index[rows[run[0]]]), ChunkRun(slab.buffer, at[run], slab))
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
        """Write what this tier lacks of a version that faster tiers have. All digests are known before."""
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

    def _put(self, file: LeafFile, row: int, raw: Buffer, slab: LeasedSlab | None) -> None:
        """Write one chunk. If it comes too early, copy it: keeping its slab could be a deadlock with the next read."""
        index = int(self._index[row])
        at = np.zeros(1, "i8")
        file.take(index, ChunkRun(raw, at, slab) if index == file.next else ChunkRun(raw.clone(), at))

    # Commit and abort

    def finish(self, draft: LayoutBuilder, version: Version) -> None:
        """Close the open files, and put the place of every chunk into the layout ``draft``."""
        self._ready()
        for unit in self._units:
            same = self._earlier.same(unit.rows, version.digests[unit.rows])
            if same.all():
                self._drop(unit)
                self._earlier.reuse(draft, unit.rows)
                continue
            if unit.file is None:
                raise self._earlier.gone(unit.rows)
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
        """Abort open files and delete closed ones."""
        keys, self.sizes = list(self.sizes), {}
        errors = []
        for unit in self._units:
            try:
                self._drop(unit)
            except Exception as error:  # of any type: the other files hold leases, too
                errors.append(error)
        for key in keys:
            self._tier_run.tier.delete(key)
        if errors:
            raise errors[0]
