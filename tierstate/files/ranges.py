"""Reads any range of bytes of a version's leaves, from any tier: only the chunks that it overlaps, each verified.

A `VirtualFile` says which bytes a file has that exists nowhere: some that were made for it, and those of leaves.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.restore.restore import (
    MAX_RESTARTS,
    READ_WORKERS,
    VersionDropped,
    check_leaves_whole,
    may_be_whole,
    name_version,
    raise_if_dropped,
)
from tierstate.engine.restore.scatter import Destination, ScatterTargets
from tierstate.engine.store.catalog import VersionCopies, VersionMoved
from tierstate.manifest.boxes import row_major_runs
from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, to_bytes
from tierstate.manifest.errors import Damaged, Unreadable
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.version import Version
from tierstate.tiers.memory.arena import Arena

from .export import FilePlace

T = TypeVar("T")


KEPT_CHUNKS = 64 << 20
"""Bytes of chunks that are kept of reads that wanted only a part of them: the next read mostly wants the rest."""


log = logging.getLogger("tierstate")


class LeafRange(NamedTuple):
    """Wanted bytes of a leaf, in row-major order.

    Attributes:
        leaf: index of the leaf.
        start: offset of the first byte in the leaf.
        out: the host memory for the bytes; its length says how many there are.
    """

    leaf: int
    start: int
    out: Buffer


class ChunkCache:
    """The verified bytes of the chunks that were used last, up to a number of bytes. Thread-safe.

    Chunks are found by their digests, so that versions share them.
    """

    def __init__(self, limit: int = KEPT_CHUNKS) -> None:
        self._limit, self._nbytes = limit, 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[str, int, bytes], Buffer] = OrderedDict()

    def get(self, version: Version, row: int) -> Buffer | None:
        """The bytes of a chunk, if they are here."""
        key = _key(version, row)
        with self._lock:
            if key not in self._chunks:
                return None
            self._chunks.move_to_end(key)
            return self._chunks[key]

    def put(self, version: Version, row: int, raw: Buffer) -> None:
        """Keep a copy of a chunk's bytes, unless it is longer than all that may be kept."""
        key = _key(version, row)
        with self._lock:
            if key in self._chunks or raw.numel() > self._limit:
                return
            self._chunks[key] = raw.clone()
            self._nbytes += raw.numel()
            while self._nbytes > self._limit:
                self._nbytes -= self._chunks.popitem(last=False)[1].numel()


def _key(version: Version, row: int) -> tuple[str, int, bytes]:
    return version.head.digest, int(version.chunk_nbytes[row]), version.digests[row].tobytes()


class RangeReader:
    """Reads bytes of one version's leaves. Thread-safe; writes nothing to a tier, neither leases nor repairs.

    A chunk that is missing or damaged in one tier is read from the next one.

    Args:
        find: looks the version up, anew each time: another process may move or drop it while it is read.
        arena: host memory for the reads.
        cache: keeps chunks of which only a part was wanted.

    Attributes:
        entry: the version and its copies, as found last.

    Raises: as ``find``.
    """

    def __init__(self, find: Callable[[], VersionCopies], arena: Arena, cache: ChunkCache) -> None:
        self._find, self._arena, self._cache = find, arena, cache
        self._whole: set[int] = set()
        self.entry = find()

    @property
    def arena(self) -> Arena:
        """The host memory for the reads."""
        return self._arena

    def read(self, wanted: Sequence[LeafRange]) -> None:
        """Read these ranges into their memory.

        Raises:
            NotFound: the version was dropped meanwhile.
            Damaged: a chunk is missing or damaged in every tier.
            Unreadable: a tier that has a chunk cannot be asked now, and no other tier has it undamaged.
            FormatError: the shards do not hold each element of these leaves once.
        """
        self._check({want.leaf for want in wanted})
        self.use(lambda entry: self._read(entry, wanted))

    def use(self, read: Callable[[VersionCopies], T]) -> T:
        """Call a function that reads the version; again with new copies where these were moved or dropped meanwhile.

        Raises: as `read`, and what the function raises.
        """
        for _ in range(MAX_RESTARTS):
            try:
                return self._once(self.entry, read)
            except (VersionMoved, VersionDropped) as error:  # also where a tier got it after it was looked up
                log.info("%s", error)
                self.entry = self._find()
        return self._once(self.entry, read)

    @staticmethod
    def _once(entry: VersionCopies, read: Callable[[VersionCopies], T]) -> T:
        try:
            return read(entry)
        except (Damaged, Unreadable) as error:
            raise_if_dropped(entry, error)
            if entry.away and isinstance(error, Damaged):
                raise may_be_whole(entry, error) from error
            raise

    def _check(self, leaves: set[int]) -> None:
        if new := sorted(leaves - self._whole):
            check_leaves_whole(self.entry.version, new)
            self._whole.update(new)

    def _read(self, entry: VersionCopies, wanted: Sequence[LeafRange]) -> None:
        version = entry.version
        pieces = [piece for want in wanted for piece in _whole_elements(version.leaves[want.leaf].spec, want)]
        places = [place for piece in pieces for place in piece.places(version)]
        targets = ScatterTargets(version, places, what=name_version(version))
        self._fill(entry, targets)
        for piece in pieces:
            piece.finish()

    def _fill(self, entry: VersionCopies, targets: ScatterTargets) -> None:
        version, rows = entry.version, targets.rows
        # Chunks of which all bytes are wanted, at one place, are read there; the caller has them then.
        whole = targets.address[rows] > 0
        fetch = Fetch(version, entry.holdings, self._arena, workers=READ_WORKERS)
        left = []
        for row in rows[~whole].tolist():
            raw = self._cache.get(version, row)
            if raw is None:
                left.append(row)
            else:
                targets.give(row, raw)

        def keep(row: int, raw: Buffer, _slab: object) -> None:
            self._cache.put(version, row, raw)
            targets.give(row, raw)

        if left:
            fetch.run(left, keep)
        if whole.any():
            fetch.fill(rows[whole], targets)


@dataclass(frozen=True)
class VirtualFile:
    """The content of a file: bytes that were made here, and leaves.

    Attributes:
        pieces: one after the other, bytes, or the index of a leaf for its bytes.
        offsets: offset of each piece in the file, and last its size.
    """

    pieces: tuple[bytes | int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, *pieces: bytes | tuple[int, int]) -> VirtualFile:
        """The file of these pieces; a leaf is given with its length."""
        kept = [piece for piece in pieces if isinstance(piece, tuple) or piece]
        lengths = [piece[1] if isinstance(piece, tuple) else len(piece) for piece in kept]
        inside = (piece[0] if isinstance(piece, tuple) else piece for piece in kept)
        return cls(tuple(inside), tuple(accumulate(lengths, initial=0)))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offsets[-1]

    def read(self, reader: RangeReader, start: int, stop: int) -> bytes:
        """The bytes ``start:stop``, of which as many are given as the file has.

        Raises: as `RangeReader.read`.
        """
        start, stop = max(0, start), min(stop, self.size)
        if start >= stop:
            return b""
        out, wanted = empty_buffer(stop - start), []
        for i in range(bisect_right(self.offsets, start) - 1, len(self.pieces)):
            piece, at, end = self.pieces[i], self.offsets[i], self.offsets[i + 1]
            if at >= stop:
                break
            first, last = max(at, start), min(end, stop)
            into = out[first - start : last - start]
            if isinstance(piece, int):
                wanted.append(LeafRange(piece, first - at, into))
            else:
                into.copy_(as_buffer(piece[first - at : last - at]))
        reader.read([want for want in wanted if want.out.numel()])
        return to_bytes(out)


class _Elements(NamedTuple):
    """Whole elements of a leaf that are read together, and the bytes of them that are wanted.

    Attributes:
        leaf: index of the leaf.
        start: offset in the leaf, in bytes.
        memory: gets the elements.
        skip, out: ``out`` gets the bytes of ``memory`` from ``skip`` on; None if they are wanted where they are.
    """

    leaf: int
    start: int
    memory: Buffer
    skip: int = 0
    out: Buffer | None = None

    def places(self, version: Version) -> Iterator[Destination]:
        """The boxes of these elements. Each is contiguous in the memory."""
        spec = version.leaves[self.leaf].spec
        size, first = spec.itemsize, self.start // spec.itemsize
        # Only for pieces of chunks that are not contiguous in the leaf, as shards by columns have them.
        place = FilePlace(self._write, -self.start, spec.shape, size)
        for at, box in row_major_runs(spec.shape, first, first + self.memory.numel() // size):
            begin = at * size - self.start
            yield Destination(self.leaf, box, place, self.memory[begin : begin + box.volume * size])

    def _write(self, at: int, data: Buffer) -> None:
        self.memory[at : at + data.numel()].copy_(data)

    def finish(self) -> None:
        """Copy what is wanted, once the elements are there."""
        if self.out is not None:
            self.out.copy_(self.memory[self.skip : self.skip + self.out.numel()])


def _whole_elements(spec: Spec, want: LeafRange) -> Iterator[_Elements]:
    """Cut a range at the borders of elements: what lies between is read in place, an element of which only some bytes
    are wanted is read as a whole beside."""
    size, start, stop = spec.itemsize, want.start, want.start + want.out.numel()
    while start < stop:
        first = start // size * size
        end = stop // size * size
        if first == start and end > start:
            yield _Elements(want.leaf, start, want.out[start - want.start : end - want.start])
            start = end
            continue
        upto = min(first + size, stop)
        out = want.out[start - want.start : upto - want.start]
        yield _Elements(want.leaf, first, empty_buffer(size), start - first, out)
        start = upto
