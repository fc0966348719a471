"""A publication: one version on its way into one tier, from the first pack to the record."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import CommitUnknown, NotFound, TierstateError, TierUnavailable
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.layout import RAW, Draft
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.log import commit_id
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .anchors import Anchors
from .arena import Slab
from .batch import Batch, breaks, names
from .coding import ChunkOf, Coding
from .encoding import Encoded
from .fetch import Fetch
from .packing import BIG, BLOCK
from .packs import PackWriter, Rows
from .route import Route
from .shelf import Shelf, Stop

WORTH_A_LOOK = 1024
"""Bytes of a chunk from which on it is looked for among those that this save has written already."""


LONG = 12 * 3600.0
"""Seconds from which on a save looks whether its own packs are there still: a sweep deletes those without a record that
are a day old."""


class Adopted(Protocol):
    """Chunks of a version that lie in the tier before it is known what they are.

    Attributes:
        rows: ``(n,)``: their rows.
        stored: bytes that they take.
    """

    rows: Array

    @property
    def stored(self) -> int: ...

    def place(self, version: Version, draft: Draft) -> None:
        """Make them visible, and say where they lie."""

    def discard(self) -> None:
        """Leave nothing of them behind."""


class Publication:
    """One version into one tier.

    Args:
        shelf: the run in that tier.
        head: the version's head.
        leaves: the version's leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        route: which leaves go there.
        faster: the run in the tiers before that one, nearest first.
    """

    def __init__(
        self,
        shelf: Shelf,
        head: Head,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        faster: Sequence[Shelf] = (),
    ) -> None:
        self.shelf = shelf
        self._leaves, self._row_leaves, self._route = leaves, row_leaves, route
        anchors = Anchors(shelf, head, leaves, row_leaves, faster)
        self._coding = Coding(shelf, leaves, row_leaves, route, anchors, self._put)
        self._packs = PackWriter(self._coding.tier, head.run, head.seq, shelf.rank)
        self._draft = Draft(len(row_leaves))
        self._written: dict[bytes, int] = {}
        self._twins: list[tuple[Array, Array]] = []
        self._sent, self._since = False, time.time()
        self._adopted: Adopted | None = None
        self._routed: Array = route.leaves[row_leaves]
        self._raw: Array = route.raw[row_leaves]

    @property
    def stored(self) -> int:
        """Bytes written so far; what was reused is not among them."""
        return self._packs.stored + (0 if self._adopted is None else self._adopted.stored)

    @property
    def plain(self) -> Array:
        """``(leaves,)`` of bool: which leaves go there, and are stored as they are."""
        found: Array = self._route.leaves & self._route.raw
        return found

    def adopt(self, chunks: Adopted) -> None:
        """These chunks lie in the tier already, and are not written."""
        self._adopted = chunks
        self._routed[chunks.rows] = False

    def standing(self, digests: Array) -> Array:
        """Which rows would need nothing if these, ``(chunks, 2)``, were their digests: they do not go to this tier, or
        it is known, without asking it, to have them already."""
        if not self.shelf.at_hand:
            return ~self._routed
        rows = np.flatnonzero(self._routed)
        found = ~self._routed
        found[rows] = self.shelf.reuse(Draft(len(digests)), rows, digests[rows])
        return found

    def missing(self, rows: Array, digests: Array) -> Array:
        """Indices into ``rows`` of the chunks that must be written; the others are found where they lie already."""
        wanted = np.flatnonzero(self._routed[rows])
        found = self.shelf.reuse(self._draft, rows[wanted], digests[wanted])
        left: Array = wanted[~found]
        return left

    def keep(self, rows: Array, digests: Array) -> bool:
        """Take note of chunks that were not copied because `standing` said so; whether they stand."""
        return not len(self.missing(rows, digests))

    def take(self, batch: Batch) -> None:
        """Write those of a slab's chunks that go to this tier and are not there yet: raw ones as they lie together."""
        missing = self.missing(batch.rows, batch.digests)
        raw = self._raw[batch.rows[missing]]
        for number in np.flatnonzero(~raw).tolist():
            i = int(missing[number])
            data = batch.slab.buffer[batch.at[i] : batch.at[i] + batch.nbytes[i]]
            codec = self._coding.codec(int(batch.rows[i]), data)
            raw[number] = codec == RAW
            if codec != RAW:
                self._write(int(batch.rows[i]), data, batch.digests[i].tobytes(), batch.slab, codec)
        plain, twins = self._part_twins(batch, missing[raw])
        for run in np.split(plain, breaks(batch, plain)):
            if len(run):
                self._write_run(batch, run)
        self._twins.append((batch.rows[twins], np.array([self._written[d] for d in names(batch.digests[twins])], "i8")))
        self._coding.workers.hand_on()

    def _part_twins(self, batch: Batch, which: Array) -> tuple[Array, Array]:
        """Parts chunks into those to be written, and those whose bytes this save writes already."""
        firsts, twins = [], []
        for i, name in zip(which.tolist(), names(batch.digests[which]), strict=True):
            if batch.nbytes[i] >= WORTH_A_LOOK and self._written.setdefault(name, int(batch.rows[i])) != batch.rows[i]:
                twins.append(i)
            else:
                firsts.append(i)
        return np.array(firsts, "i8"), np.array(twins, "i8")

    def _write_run(self, batch: Batch, run: Array) -> None:
        """Write chunks that follow each other in a slab in one piece, with what lies between them."""
        first, last = int(batch.at[run[0]]), int(batch.at[run[-1]] + batch.nbytes[run[-1]])
        if last - first >= BIG and run[-1] == len(batch.rows) - 1:
            last += -last % BLOCK  # to the end of the block, which is zeros: whole blocks go out without a copy
        offset, nbytes = batch.at[run] - first, batch.nbytes[run]
        rows = Rows(batch.digests[run], nbytes, offset, nbytes, RAW)
        batch.slab.lease()
        key, at = self._packs.add_run(batch.slab.buffer[first:last], rows, batch.slab.release)
        self._draft.put_run(batch.rows[run], key, offset + at, nbytes, RAW)

    def write(self, row: int, raw: Buffer, digest: bytes, slab: Slab | None) -> None:
        """Put one chunk into a pack, unless this save has put the same bytes already.

        Args:
            slab: the slab in which ``raw`` lies, leased until it is needed no longer; None for memory of its own.
        """
        self._write(row, raw, digest, slab, self._coding.codec(row, raw))

    def _write(self, row: int, raw: Buffer, digest: bytes, slab: Slab | None, codec: str) -> None:
        first = self._written.setdefault(digest, row)
        if first != row:
            self._twins.append((np.array([row]), np.array([first])))
            return
        chunk = ChunkOf(row, digest, len(raw))
        if codec != RAW and self._coding.takes(row):
            self._coding.add(chunk, raw, slab, codec)
            return
        if slab is not None:
            slab.lease()
        self._put(chunk, Encoded(RAW, raw), slab)

    def _put(self, chunk: ChunkOf, encoded: Encoded, slab: Slab | None = None) -> None:
        """Put a chunk into the open pack; the slab in which it lies is released when the tier needs it no longer.

        What lies in no slab is let go of as soon as nobody refers to it: the tier need not copy it or be waited for.
        """
        release = _let_go if slab is None else slab.release
        place = self._packs.add(encoded.stored, chunk.digest, chunk.nbytes, encoded.codec, release, encoded.base)
        self._draft.put(chunk.row, place)

    def copy(self, version: Version, fetch: Fetch) -> None:
        """Write what this tier lacks of a version that other tiers have, as they give it."""
        missing = self.missing(np.arange(len(version.digests)), version.digests)
        fetch.run(
            missing.tolist(),
            lambda row, raw, slab: self.write(row, raw, version.digests[row].tobytes(), slab),
        )

    def commit(self, version: Version, stop: Stop | None = None) -> Record:
        """Make packs durable, then create the record; see `Shelf.publish`."""
        self._coding.workers.finish()
        # A part of a version is none to be found when every record is lost.
        self._packs.close(*([] if self.shelf.together and stop is not None else [version.data]))
        for rows, firsts in self._twins:
            self._draft.put_twins(rows, firsts)
        if self._adopted is not None:
            self._adopted.place(version, self._draft)
        sizes = self._sizes()
        record = Record(version, self._draft.build(sizes), self._signature())
        self._sent = True
        self.shelf.publish(record, stop)
        return record

    def _sizes(self) -> dict[str, int]:
        """Lengths of all packs that the layout names: of those written here, and of those reused.

        Raises:
            NotFound: one is not there any more.
        """
        sizes = written = self._written_sizes()
        if not 0 <= time.time() - self._since < LONG:
            sizes = {}
        for key in self._draft.objects():
            if key not in sizes:
                sizes[key] = self._size(key, "this save wrote" if key in written else "this save builds on")
        return sizes

    def _size(self, key: str, which: str) -> int:
        try:
            return self.shelf.tier.size(key)
        except NotFound as error:
            text = f"{self.shelf.name}: {key}, which {which}, was deleted before its record was created"
            raise NotFound(text, tier=self.shelf.name) from error

    def _written_sizes(self) -> dict[str, int]:
        """Lengths of the objects written here."""
        return dict(self._packs.sizes)

    def _signature(self) -> dict[str, Any]:
        return {"id": commit_id(), "tier": self.shelf.name, "host": socket.gethostname(), "pid": os.getpid()}

    def abort(self, error: BaseException) -> None:
        """Leave nothing behind, unless the record may take effect yet: then its packs must stay.

        A create that was not answered may still be under way, even if reading back has found nothing so far.
        """
        self._coding.workers.abort()
        if isinstance(error, CommitUnknown) or (self._sent and isinstance(error, TierUnavailable)):
            return
        try:
            self._discard()
        except TierstateError as second:
            error.add_note(f"and clearing up after it failed too: {second}")

    def _discard(self) -> None:
        try:
            if self._adopted is not None:
                self._adopted.discard()
        finally:
            self._packs.abort()


def _let_go() -> None:
    """Nothing: the memory goes with its last view."""
