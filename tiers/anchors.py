"""Anchors: what the chunks of a version to be can be stored as differences from, and whether that pays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tierstate.manifest.bases import Base
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array, DigestIndex, as_array
from tierstate.manifest.layout import DELTA, RAW, Layout, Place
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.record import Record

from .codecs import BLOSC, encode
from .deltas import read_base, read_chunk, xor
from .earlier import rows_then
from .encoding import Encoded
from .shelf import Shelf

log = logging.getLogger("tierstate")

STANDALONE = ("fast", "small")
"""What a sample is tried with. lz4 on bits of like weight does better on most floats, zstd on bytes of like weight on
differences: 0.22 and 0.10 of bf16 weights one step apart."""

LEAST = 4096
"""Bytes from which on a chunk is worth a delta: what is saved of a shorter one does not pay for the second read."""

SAVES = 0.9
"""Stored length by the sample, as a share of what the chunk takes by itself, that a delta may have at most."""

USES = 32
"""Versions in a row that may have deltas against one chunk. By then a new one costs a thirtieth of a version, and packs
that are only kept for their bases do not live for ever."""

SAMPLE, PIECES = 256 << 10, 4
EARLIER = 4
"""Versions whose tables are remembered to find bases in faster tiers."""


class Anchors:
    """For each chunk of a version to be, the chunk that it can be a delta against in one tier.

    That is the chunk at the same place of the same leaf in the tier's newest version, or, where that is a delta itself,
    the base of that one: so a restore never reads more than one base. A chunk whose delta does not pay is stored by
    itself, and is what later ones are made against. Any thread may ask.

    Args:
        shelf: the run in the tier.
        head: of the version to be.
        leaves: its leaves.
        row_leaves: ``(chunks,)``: the leaf of each of its rows.
        faster: the run in tiers that are read rather than this one for the bases' bytes, nearest first.
    """

    def __init__(
        self, shelf: Shelf, head: Head, leaves: Sequence[Leaf], row_leaves: Array, faster: Sequence[Shelf] = ()
    ) -> None:
        self._shelf, self._head, self._leaves, self._row_leaves = shelf, head, leaves, row_leaves
        self._faster = [other for other in faster if not other.tier.traits.scarce]
        self._digest = algorithm(head.digest)
        self._lock = threading.Lock()
        self._record: Record | None = None
        self._there: Array | None = None
        self._tables: dict[tuple[str, int], tuple[Layout, DigestIndex] | None] = {}
        self._told = False

    def encode(self, row: int, raw: Buffer, itemsize: int) -> Encoded:
        """The stored form of a chunk that takes least, as far as a sample shows it.

        Args:
            raw: its bytes.
            itemsize: bytes per element.
        """
        codec, share = best(raw, itemsize)
        base = self.base(row, len(raw))
        known = None if base is None else self._read(base, len(raw))
        if base is not None and known is not None:
            delta = self._delta(base, xor(known, raw), itemsize, share)
            if delta is not None:
                return delta
        return Encoded(*encode(codec, raw, itemsize))

    @staticmethod
    def _delta(base: Base, data: Buffer, itemsize: int, alone: float) -> Encoded | None:
        """A delta, if it pays: compared with the chunk by itself, and with what versions on this base took so far.

        The second is how often it is best to begin anew where deltas grow from version to version: as soon as the next
        one is longer than their average, the base itself among them.
        """
        codec, share = best(data, itemsize)
        if share > SAVES * alone or (base.spent and share * len(data) * (base.uses + 1) > base.spent):
            return None
        name, stored = encode(codec, data, itemsize)
        if name != BLOSC:
            return None
        return Encoded(DELTA, stored, base._replace(uses=base.uses + 1, spent=base.spent and base.spent + len(stored)))

    def base(self, row: int, nbytes: int) -> Base | None:
        """What a chunk of so many bytes can be a delta against, as if none had been made for it yet; or None."""
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
        base = place.base or Base(*place[:4], digest, uses=0, spent=place.stored)
        return base if base.uses < USES and self._usable(base.object, layout) else None

    def _usable(self, key: str, layout: Layout) -> bool:
        """Whether to build on a pack: it is there, and of this run, so that what a fork came from need not stay."""
        return key.startswith(f"packs/{self._head.run}/") and self._shelf.is_sound(key, layout)

    def _find(self) -> Array:
        """``(chunks,)``: the row of each chunk in the newest version, or -1; looked up when first asked for."""
        if self._there is None:
            self._record = record = self._shelf.earlier
            then = None if record is None else record.version.head
            if record is None or then is None or (then.chunk, then.digest) != (self._head.chunk, self._head.digest):
                self._there = np.full(len(self._row_leaves), -1)
            else:
                self._there = rows_then(record.version, self._leaves, self._row_leaves)
        return self._there

    def _read(self, base: Base, nbytes: int) -> Buffer | None:
        """A base's raw bytes, verified, from the nearest tier that has them; None if it cannot be read."""
        for shelf, place in self._nearer(base):
            try:
                return read_chunk(shelf, place, nbytes, base.digest, self._digest)
            except TierstateError as error:
                log.debug("%s: %s is no source of a base: %s", shelf.name, place.object, error)
        try:
            return read_base(self._shelf, base, nbytes, self._digest)
        except TierstateError as error:
            told, self._told = self._told, True
            level = logging.DEBUG if told else logging.WARNING
            log.log(level, "%s: chunks are stored whole, and not as deltas: %s", self._shelf.name, error)
            return None

    def _nearer(self, base: Base) -> Iterator[tuple[Shelf, Place]]:
        """Where faster tiers have a base: they are asked for the version with which it was written."""
        seq = base.object.rpartition("/")[2].partition("-")[0]
        for shelf in self._faster if seq.isdecimal() else ():
            found = self._table(shelf, int(seq))
            row = -1 if found is None else int(found[1].find(as_array([base.digest]))[0])
            place = found[0].place(row) if found is not None and row >= 0 else None
            if place is not None:
                yield shelf, place

    def _table(self, shelf: Shelf, seq: int) -> tuple[Layout, DigestIndex] | None:
        """A version's layout in a faster tier, and its chunks by their digests; None where it is not there."""
        with self._lock:
            if (shelf.name, seq) not in self._tables:
                found = None
                if len(self._tables) < EARLIER * len(self._faster):
                    try:
                        record = shelf.record(seq)
                        found = record.layout, DigestIndex(record.version.digests)
                    except TierstateError as error:
                        log.debug("%s: version %d is no source of bases: %s", shelf.name, seq, error)
                self._tables[shelf.name, seq] = found
            return self._tables[shelf.name, seq]


def best(data: Buffer, itemsize: int) -> tuple[str, float]:
    """The codec that does best on a sample, and stored/raw by it."""
    part = sample(data, itemsize)
    lengths = {codec: len(encode(codec, part, itemsize)[1]) for codec in STANDALONE}
    codec = min(lengths, key=lambda name: lengths[name])
    return (codec, lengths[codec] / len(part)) if len(part) and lengths[codec] < len(part) else (RAW, 1.0)


def sample(data: Buffer, itemsize: int) -> Buffer:
    """Pieces of a chunk from all over it; all of one that is short."""
    if len(data) <= SAMPLE:
        return data
    size = SAMPLE // PIECES
    starts = [(len(data) - size) * i // (PIECES - 1) // itemsize * itemsize for i in range(PIECES)]
    return torch.cat([data[at : at + size] for at in starts])
