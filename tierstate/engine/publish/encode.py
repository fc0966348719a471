"""Encode the chunks of a save for one tier: compressed, or as a delta (XOR) against a chunk of an earlier version.

`DeltaBases` finds the delta base of a chunk and decides by a sample whether a delta is worth it. `ChunkEncoder` chooses
the codec of each chunk and encodes in worker threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tierstate.engine.codecs.codecs import AUTO, BLOSC, STANDALONE_CODECS, compress
from tierstate.engine.codecs.pool import Encoded, EncoderPool
from tierstate.engine.packs.keys import pack_prefix, seq_of
from tierstate.engine.placement import Route
from tierstate.engine.store.delta_base import read_base, read_chunk, xor
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array, digest_array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import DigestIndex, digest_function
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.layout import DELTA, RAW, ChunkPlace, DeltaBase, Layout
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.diff import rows_in_earlier
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import LeasedSlab

log = logging.getLogger("tierstate")


LEAST = 4096
"""Bytes of the shortest chunk that is stored as a delta: for a shorter one the second read costs more than it saves."""


MAX_DELTA_SHARE = 0.9
"""The largest length of a delta, by the sample, as a share of the length without a delta."""


MAX_BASE_USES = 32
"""The most deltas against one base. A new base then costs a thirtieth of a version each, and packs that are kept only
for their bases are deleted at some time."""


SAMPLE, PIECES = 256 << 10, 4
"""Bytes of a sample, and the number of pieces in which they are taken from a chunk."""


MAX_TABLES = 4
"""Versions per faster tier whose tables are cached, to find bases there."""


class DeltaBases:
    """The delta base in one tier for each chunk of a version that is being saved. Thread-safe.

    The base is the chunk at the same position of the same leaf in the tier's newest version, or, if that chunk is a
    delta itself, its base: so a restore reads at most one base per chunk. A chunk whose delta is not worth it is stored
    without a base, and becomes the base of later deltas.

    Args:
        tier_run: the run in the tier.
        head: the head of the version that is being saved.
        leaves: its leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        faster: the run in faster tiers, nearest first; the bytes of bases are read from them if they have them.
    """

    def __init__(
        self, tier_run: TierRun, head: Head, leaves: Sequence[Leaf], row_leaves: Array, faster: Sequence[TierRun] = ()
    ) -> None:
        self._tier_run, self._head, self._leaves, self._row_leaves = tier_run, head, leaves, row_leaves
        self._faster = [other for other in faster if not other.tier.traits.scarce]
        self._digest = digest_function(head.digest)
        self._lock = threading.Lock()
        self._record: Record | None = None
        self._there: Array | None = None
        self._tables: dict[tuple[str, int], tuple[Layout, DigestIndex] | None] = {}
        self._told = False

    def encode(self, row: int, raw: Buffer, itemsize: int) -> Encoded:
        """Encode a chunk in the form that is shortest according to a sample: as a delta, compressed, or raw.

        Args:
            row: its row in the version.
            raw: its bytes.
            itemsize: bytes per element.
        """
        codec, share = best_codec(raw, itemsize)
        base = self.base(row, len(raw))
        known = None if base is None else self._read(base, len(raw))
        if base is not None and known is not None:
            delta = self._delta(base, xor(known, raw), itemsize, share)
            if delta is not None:
                return delta
        return Encoded(*compress(codec, raw, itemsize))

    @staticmethod
    def _delta(base: DeltaBase, data: Buffer, itemsize: int, alone: float) -> Encoded | None:
        """Encode as a delta; None if that is not worth it.

        Two conditions: the delta must be shorter than MAX_DELTA_SHARE of the chunk without a base; and not longer than
        the average of the base and its deltas so far. The second gives the best time for a new base where deltas grow
        from version to version.

        Args:
            data: the chunk XOR the base.
            alone: stored/raw of the chunk without a base, by its sample.
        """
        codec, share = best_codec(data, itemsize)
        if share > MAX_DELTA_SHARE * alone or (base.spent and share * len(data) * (base.uses + 1) > base.spent):
            return None
        name, stored = compress(codec, data, itemsize)
        if name != BLOSC:
            return None
        return Encoded(DELTA, stored, base._replace(uses=base.uses + 1, spent=base.spent and base.spent + len(stored)))

    def base(self, row: int, nbytes: int) -> DeltaBase | None:
        """The delta base for a chunk of ``nbytes`` bytes, with its counters from before this save, or None."""
        with self._lock:
            there = self._find()[row]
        if there < 0 or nbytes < LEAST:
            return None
        assert self._record is not None
        version, layout = self._record.version, self._record.layout
        place = layout.place(there)
        if place is None or version.chunk_nbytes[there] != nbytes:
            return None
        digest = version.digests[there].tobytes()
        base = place.base or DeltaBase(*place[:4], digest, uses=0, spent=place.stored)
        return base if base.uses < MAX_BASE_USES and self._usable(base.object, layout) else None

    def _usable(self, key: str, layout: Layout) -> bool:
        """Whether bases in a pack may be used: it is undamaged, and of this run: a fork needs no foreign packs."""
        return key.startswith(pack_prefix(self._head.run)) and self._tier_run.is_sound(key, layout)

    def _find(self) -> Array:
        """``(chunks,)``: the row of each chunk in the tier's newest version, or -1. Computed at the first call."""
        if self._there is None:
            self._record = record = self._tier_run.earlier
            then = None if record is None else record.version.head
            if record is None or then is None or (then.chunk, then.digest) != (self._head.chunk, self._head.digest):
                self._there = np.full(len(self._row_leaves), -1)
            else:
                self._there = rows_in_earlier(record.version, self._leaves, self._row_leaves)
        return self._there

    def _read(self, base: DeltaBase, nbytes: int) -> Buffer | None:
        """The raw bytes of a base, verified, from the nearest tier that has it; None if no tier can read it."""
        for tier_run, place in self._nearer(base):
            try:
                return read_chunk(tier_run, place, nbytes, base.digest, self._digest)
            except TierstateError as error:
                log.debug("%s: %s is no source of a base: %s", tier_run.name, place.object, error)
        try:
            return read_base(self._tier_run, base, nbytes, self._digest)
        except TierstateError as error:
            told, self._told = self._told, True
            level = logging.DEBUG if told else logging.WARNING
            log.log(level, "%s: chunks are stored whole, and not as deltas: %s", self._tier_run.name, error)
            return None

    def _nearer(self, base: DeltaBase) -> Iterator[tuple[TierRun, ChunkPlace]]:
        """Where faster tiers have a base. Looks in their records of the version with which the base was written."""
        seq = seq_of(base.object)
        if seq is None:
            return
        for tier_run in self._faster:
            found = self._table(tier_run, seq)
            row = -1 if found is None else int(found[1].find(digest_array([base.digest]))[0])
            place = found[0].place(row) if found is not None and row >= 0 else None
            if place is not None:
                yield tier_run, place

    def _table(self, tier_run: TierRun, seq: int) -> tuple[Layout, DigestIndex] | None:
        """A version's layout in a faster tier, and an index of its digests; None if it cannot be read there. Cached."""
        with self._lock:
            if (tier_run.name, seq) not in self._tables:
                found = None
                if len(self._tables) < MAX_TABLES * len(self._faster):
                    try:
                        record = tier_run.record(seq)
                        found = record.layout, DigestIndex(record.version.digests)
                    except TierstateError as error:
                        log.debug("%s: version %d is no source of bases: %s", tier_run.name, seq, error)
                self._tables[tier_run.name, seq] = found
            return self._tables[tier_run.name, seq]


def best_codec(data: Buffer, itemsize: int) -> tuple[str, float]:
    """The codec that compresses a sample best, and the ratio stored/raw of the sample."""
    # lz4 after a bit shuffle is best for most floats, zstd after a byte shuffle for most differences: 0.22 and 0.10 for
    # the difference of bf16 weights one step apart.
    part = codec_sample(data, itemsize)
    lengths = {codec: len(compress(codec, part, itemsize)[1]) for codec in STANDALONE_CODECS}
    codec = min(lengths, key=lambda name: lengths[name])
    return (codec, lengths[codec] / len(part)) if len(part) and lengths[codec] < len(part) else (RAW, 1.0)


def codec_sample(data: Buffer, itemsize: int) -> Buffer:
    """A sample of a chunk: PIECES pieces spread over it, SAMPLE bytes in all; a chunk that is not longer, whole."""
    if len(data) <= SAMPLE:
        return data
    size = SAMPLE // PIECES
    starts = [(len(data) - size) * i // (PIECES - 1) // itemsize * itemsize for i in range(PIECES)]
    return torch.cat([data[at : at + size] for at in starts])


class VersionChunk(NamedTuple):
    """A chunk of a version: its row, its digest and its raw length."""

    row: int
    digest: bytes
    nbytes: int


class ChunkEncoder:
    """Chooses the codec of each chunk of one save on one tier, and encodes in worker threads. Used by `TierWrite`.

    Args:
        tier_run: the run in that tier.
        leaves, row_leaves, route: as for `TierWrite`.
        delta_bases: the delta bases.
        put: called with each added chunk and its encoded form, in the thread that adds chunks.

    Attributes:
        tier: the tier to write to; with codec `auto` a wrapper that measures the speed of the tier.
        workers: the threads that encode.
    """

    def __init__(
        self,
        tier_run: TierRun,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        delta_bases: DeltaBases,
        put: Callable[[VersionChunk, Encoded], None],
    ) -> None:
        self._leaves, self._row_leaves, self._route = leaves, row_leaves, route
        self._choices, self._delta_bases = tier_run.choices, delta_bases
        self.tier: Tier = tier_run.tier
        stirred = None
        if AUTO in route.codecs:
            self._choices.begin()
            self.tier, stirred = self._choices.timed, self._choices.timed.speed.idled
        self.workers: EncoderPool[VersionChunk] = EncoderPool(put, stirred)

    def codec(self, row: int, raw: Buffer) -> str:
        """The codec for a chunk."""
        leaf = int(self._row_leaves[row])
        asked = self._route.codecs[leaf]
        return asked if asked != AUTO else self._choices.codec(self._kind(leaf), raw, self._itemsize(leaf))

    def _kind(self, leaf: int) -> tuple[str, int | None]:
        """The key under which `auto` learns: leaves of one dtype under one codec rule compress alike."""
        return self._leaves[leaf].spec.dtype, self._route.rules[leaf]

    def _itemsize(self, leaf: int) -> int:
        return self._leaves[leaf].spec.itemsize

    def takes(self, row: int) -> bool:
        """Whether to encode the chunk. May wait for a free worker. With codec `auto` returns False if all workers are
        busy and the tier is idle: the chunk is then stored raw."""
        auto = self._route.codecs[int(self._row_leaves[row])] == AUTO
        return not auto or not self.workers.behind(lambda: self._choices.timed.speed.idle)

    def add(self, chunk: VersionChunk, raw: Buffer, slab: LeasedSlab | None, codec: str) -> None:
        """Give a chunk to the workers; see `EncoderPool.add`."""
        self.workers.add(chunk, partial(self._encoded, chunk.row, raw, codec), slab)

    def _encoded(self, row: int, raw: Buffer, codec: str) -> Encoded:
        """Encode a chunk. Called in the worker threads."""
        if codec == DELTA:
            return self._delta_bases.encode(row, raw, self._itemsize(int(self._row_leaves[row])))
        began, start, leaf = time.thread_time(), time.perf_counter(), int(self._row_leaves[row])
        found = Encoded(*compress(codec, raw, self._itemsize(leaf)))
        if self._route.codecs[leaf] == AUTO:
            spent, passed = time.thread_time() - began, time.perf_counter() - start
            self._choices.learn(self._kind(leaf), codec, len(raw), len(found.stored), spent, passed)
        return found
