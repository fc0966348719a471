"""Write one version to one tier: packs, synced, and then the record, whose creation is the commit.

`TierWrite` writes native packs, `FormattedTierWrite` files of another format (safetensors, HDF5).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tierstate.engine.codecs.pool import Encoded
from tierstate.engine.packs.formats import FileFormat, format_of
from tierstate.engine.packs.pack import FooterRows, PackWriter
from tierstate.engine.packs.slab_layout import BIG, BLOCK, SlabChunks, run_ends
from tierstate.engine.placement import Route
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.run_in_tier import BaseDropped, Stop, TierRun
from tierstate.manifest.arrays import Array, digest_list
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists, CommitUnknown, NotFound, TierstateError, TierUnavailable
from tierstate.manifest.format.layout import RAW, LayoutBuilder
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.tiers.memory.arena import LeasedSlab
from tierstate.tiers.trace import span

from .encode import ChunkEncoder, DeltaBases, VersionChunk
from .leaf_files import LeafFiles

_FIRST = np.zeros(1, "i8")
"""The index of the only chunk of a slab."""


LONG_SAVE = 12 * 3600.0
"""Seconds after which a save checks before its commit that its own packs still exist: a sweep of another process
deletes packs that are a day old and have no record."""


MIN_DEDUPLICATED = 1024
"""Bytes of the shortest chunk for which duplicates within one save are looked for."""


Stages = Callable[[], Array]
"""Returns ``(leaves,)``: the stage of the capture in which each leaf comes whole, or -1; see `CapturePlan.stages`."""


class AdoptedChunks(Protocol):
    """Chunks of a version that are in the tier's memory before their digests are known; implemented by `Snapshot`.

    Attributes:
        rows: ``(n,)``: their rows.
        stored: bytes that they take.
    """

    rows: Array

    @property
    def stored(self) -> int: ...

    def place(self, version: Version, draft: LayoutBuilder) -> None:
        """Make them visible as an object, and put their places into the layout ``draft``."""

    def discard(self) -> None:
        """Delete them or free their memory."""


class TierWrite:
    """Writes one version to one tier, in native packs.

    Args:
        tier_run: the run in that tier.
        head: the version's head.
        leaves: the version's leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        route: which leaves go to the tier, and their codecs.
        faster: the run in the faster tiers, nearest first; delta bases may be read from them.

    Attributes:
        committed: the version's id after `commit`; empty before, and where another rank created the record.
    """

    def __init__(
        self,
        tier_run: TierRun,
        head: Head,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        faster: Sequence[TierRun] = (),
    ) -> None:
        self.tier_run, self.committed = tier_run, ""
        self._leaves, self._row_leaves, self._route = leaves, row_leaves, route
        delta_bases = DeltaBases(tier_run, head, leaves, row_leaves, faster)
        self._encoder = ChunkEncoder(tier_run, leaves, row_leaves, route, delta_bases, self._put)
        self._packs = PackWriter(self._encoder.tier, head.run, head.seq, tier_run.rank)
        self._draft = LayoutBuilder(len(row_leaves))
        self._written: dict[bytes, int] = {}
        self._twins: list[tuple[Array, Array]] = []
        self._sent, self._since = False, time.time()
        self._adopted: AdoptedChunks | None = None
        self._routed: Array = route.leaves[row_leaves]
        self._raw: Array = route.raw[row_leaves]

    @property
    def stored(self) -> int:
        """Bytes written so far, without reused chunks."""
        return self._packs.stored + (0 if self._adopted is None else self._adopted.stored)

    @property
    def plain(self) -> Array:
        """``(leaves,)`` of bool: which leaves go to the tier and are stored raw."""
        found: Array = self._route.leaves & self._route.raw
        return found

    def adopt(self, chunks: AdoptedChunks) -> None:
        """Use chunks that are in the tier's memory already instead of writing them."""
        self._adopted = chunks
        self._routed[chunks.rows] = False

    def needless(self, digests: Array) -> Array:
        """``(chunks,)`` of bool: the rows for which nothing need be written if these, ``(chunks, 2)``, are their
        digests: they do not go to this tier, or it has them. Does no I/O."""
        if not self.tier_run.at_hand:
            return ~self._routed
        rows = np.flatnonzero(self._routed)
        found = ~self._routed
        found[rows] = self.tier_run.reuse(LayoutBuilder(len(digests)), rows, digests[rows])
        return found

    def missing(self, rows: Array, digests: Array) -> Array:
        """Indices into ``rows`` of the chunks that must be written; for all others the layout gets their old place."""
        wanted = np.flatnonzero(self._routed[rows])
        found = self.tier_run.reuse(self._draft, rows[wanted], digests[wanted])
        left: Array = wanted[~found]
        return left

    def keep(self, rows: Array, digests: Array) -> bool:
        """Note chunks that were not copied, since `needless` was true for them. Returns whether the tier has all."""
        return not len(self.missing(rows, digests))

    def take(self, batches: Sequence[SlabChunks]) -> None:
        """Write the chunks of slabs that the tier needs and lacks, and end a lease of each slab, also on an error.

        What the tier lacks of them is looked up for all at once: that takes as long as it does for one.
        """
        left = deque(batches)
        try:
            for missing in self._missing_of(batches):
                self._take(left[0], missing)
                left.popleft().slab.release()
                self._encoder.workers.hand_on()
        finally:
            for batch in left:
                batch.slab.release()

    def _missing_of(self, batches: Sequence[SlabChunks]) -> list[Array]:
        """For each slab what `missing` returns."""
        if len(batches) == 1:
            return [self.missing(batches[0].rows, batches[0].digests)]
        rows = np.concatenate([batch.rows for batch in batches])
        missing = self.missing(rows, np.concatenate([batch.digests for batch in batches]))
        ends = np.cumsum([len(batch.rows) for batch in batches])
        parts = np.split(missing, np.searchsorted(missing, ends[:-1]))
        return [part - end + len(batch.rows) for part, end, batch in zip(parts, ends, batches, strict=True)]

    def _take(self, batch: SlabChunks, missing: Array) -> None:
        """Write those chunks of a slab that are missing. Contiguous raw chunks are written as one run."""
        if len(batch.rows) == 1 and self._raw[batch.rows[0]]:
            if len(missing):
                self._take_raw(batch)
            return
        raw = self._raw[batch.rows[missing]]
        for number in np.flatnonzero(~raw).tolist():
            i = int(missing[number])
            data = batch.slab.buffer[batch.at[i] : batch.at[i] + batch.nbytes[i]]
            codec = self._encoder.codec(int(batch.rows[i]), data)
            raw[number] = codec == RAW
            if codec != RAW:
                self._write(int(batch.rows[i]), data, batch.digests[i].tobytes(), batch.slab, codec)
        plain, twins = self._part_twins(batch, missing[raw])
        for run in np.split(plain, run_ends(batch, plain)):
            if len(run):
                self._write_run(batch, run)
        self._note_twins(batch, twins)

    def _take_raw(self, batch: SlabChunks) -> None:
        """As `_take`, for the one chunk of a slab, which is missing: as for all long leaves, where this takes most of a
        save's Python."""
        if self._is_twin(batch, 0, batch.digests.tobytes()):
            self._note_twins(batch, _FIRST)
            return
        first, nbytes = int(batch.at[0]), int(batch.nbytes[0])
        key, at = self._add_run(batch, first, first + nbytes, batch.digests, batch.nbytes, _FIRST)
        self._draft.put_run(int(batch.rows[0]), key, at, nbytes, RAW)

    def _part_twins(self, batch: SlabChunks, which: Array) -> tuple[Array, Array]:
        """Split chunks into those to write and duplicates of chunks that this save has written."""
        firsts: list[int] = []
        twins: list[int] = []
        for i, name in zip(which.tolist(), digest_list(batch.digests[which]), strict=True):
            (twins if self._is_twin(batch, i, name) else firsts).append(i)
        return np.array(firsts, "i8"), np.array(twins, "i8")

    def _is_twin(self, batch: SlabChunks, i: int, name: bytes) -> bool:
        """Whether this save has written the same bytes as those of a chunk; if not, it counts as written now."""
        row = int(batch.rows[i])
        return bool(batch.nbytes[i] >= MIN_DEDUPLICATED) and self._written.setdefault(name, row) != row

    def _note_twins(self, batch: SlabChunks, twins: Array) -> None:
        firsts = [self._written[name] for name in digest_list(batch.digests[twins])]
        self._twins.append((batch.rows[twins], np.array(firsts, "i8")))

    def _write_run(self, batch: SlabChunks, run: Array) -> None:
        """Write contiguous chunks of a slab as one piece, with the gaps between them."""
        first, last = int(batch.at[run[0]]), int(batch.at[run[-1]] + batch.nbytes[run[-1]])
        offset, nbytes = batch.at[run] - first, batch.nbytes[run]
        whole = run[-1] == len(batch.rows) - 1
        key, at = self._add_run(batch, first, last, batch.digests[run], nbytes, offset, whole=whole)
        self._draft.put_run(batch.rows[run], key, offset + at, nbytes, RAW)

    def _add_run(
        self, batch: SlabChunks, first: int, last: int, digests: Array, nbytes: Array, offset: Array, whole: bool = True
    ) -> tuple[str, int]:
        """Append the bytes ``first`` to ``last`` of a slab to the open pack, with their chunks.

        Args:
            offset: of the chunks, from ``first`` on.
            whole: whether no chunk follows in the slab.

        Returns:
            The pack's key, and the offset of these bytes in it.
        """
        if whole and last - first >= BIG:
            last += -last % BLOCK  # to the end of the block, which is zeros: whole blocks go out without a copy
        batch.slab.lease()
        rows = FooterRows(digests, nbytes, offset, nbytes, RAW)
        return self._packs.add_run(batch.slab.buffer[first:last], rows, batch.slab.release)

    def write(self, row: int, raw: Buffer, digest: bytes, slab: LeasedSlab | None) -> None:
        """Write one chunk to a pack, unless this save has written the same bytes already.

        Args:
            slab: the slab with ``raw``, which is leased until the tier has written it; None if it is in no slab.
        """
        self._write(row, raw, digest, slab, self._encoder.codec(row, raw))

    def _write(self, row: int, raw: Buffer, digest: bytes, slab: LeasedSlab | None, codec: str) -> None:
        first = self._written.setdefault(digest, row)
        if first != row:
            self._twins.append((np.array([row]), np.array([first])))
            return
        chunk = VersionChunk(row, digest, len(raw))
        if codec != RAW and self._encoder.takes(row):
            self._encoder.add(chunk, raw, slab, codec)
            return
        if slab is not None:
            slab.lease()
        self._put(chunk, Encoded(RAW, raw), slab)

    def _put(self, chunk: VersionChunk, encoded: Encoded, slab: LeasedSlab | None = None) -> None:
        """Append a chunk to the open pack. Its slab is released when the tier has written it.

        Memory outside slabs gets a release callback that does nothing, so that the tier need not copy it or wait.
        """
        release = _let_go if slab is None else slab.release
        place = self._packs.add(encoded.stored, chunk.digest, chunk.nbytes, encoded.codec, release, encoded.base)
        self._draft.put(chunk.row, place)

    def copy(self, version: Version, fetch: Fetch) -> None:
        """Write what this tier lacks of a version that faster tiers have, in the order in which chunks are read."""
        missing = self.missing(np.arange(len(version.digests)), version.digests)
        fetch.run(
            missing.tolist(),
            lambda row, raw, slab: self.write(row, raw, version.digests[row].tobytes(), slab),
        )

    def commit(self, version: Version, stop: Stop | None = None) -> Record:
        """Make packs durable, then create the record; see `TierRun.publish`.

        Returns:
            The record. If another process has committed this very version meanwhile, as an agent may in the moment in
            which it is lost, its record.
        """
        with span("commit", tier=self.tier_run.name, step=version.head.step):
            try:
                return self._commit(version, stop)
            except AlreadyExists as error:
                if (there := self._found(version)) is None:
                    raise
                self.abort(error)
                self.committed = version.id
                return there

    def _found(self, version: Version) -> Record | None:
        """The record that the tier has of this very version; None if there is none."""
        self.tier_run.look_again()
        try:
            there = self.tier_run.record(version.head.seq)
        except TierstateError:
            return None
        return there if there.version.id == version.id else None

    def _commit(self, version: Version, stop: Stop | None) -> Record:
        self._encoder.workers.finish()
        # A pack of one rank's part does not get the version: it is not the whole one, which `rebuild` looks for.
        self._packs.close(*([] if self.tier_run.together and stop is not None else [version.data]))
        for rows, firsts in self._twins:
            self._draft.put_twins(rows, firsts)
        if self._adopted is not None:
            self._adopted.place(version, self._draft)
        sizes, written = self._sizes(), sum(self._written_sizes().values())
        head = version.head
        self.tier_run.events.emit("written", tier=self.tier_run.name, step=head.step, seq=head.seq, nbytes=written)
        self.tier_run.identity.wait_for_others()  # the record names the tiers by their markers
        self.tier_run.identity.ensure()
        record = Record(version, self._draft.build(sizes), self.tier_run.signature())
        self._sent = True
        self.committed = self.tier_run.publish(record, stop)
        return record

    def _sizes(self) -> dict[str, int]:
        """Lengths of all packs that the layout names, both written and reused.

        Raises:
            BaseDropped: a pack was deleted meanwhile.
        """
        sizes = written = self._written_sizes()
        if not 0 <= time.time() - self._since < LONG_SAVE:
            sizes = {}
        for key in self._draft.objects():
            if key not in sizes:
                sizes[key] = self._size(key, "this save wrote" if key in written else "this save builds on")
        return sizes

    def _size(self, key: str, which: str) -> int:
        try:
            return self.tier_run.tier.size(key)
        except NotFound as error:
            text = f"{self.tier_run.name}: {key}, which {which}, was deleted before its record was created"
            raise BaseDropped(text, tier=self.tier_run.name) from error

    def _written_sizes(self) -> dict[str, int]:
        """Lengths of the objects written here."""
        return dict(self._packs.sizes)

    def abort(self, error: BaseException) -> None:
        """Delete what was written, unless the record may still be created: then its packs must stay.

        A create request without an answer may still take effect later, even if no record could be read back; and what
        is no error of ours (no memory, an interrupt) says nothing of how far the commit came.
        """
        self._encoder.workers.abort()
        settled = isinstance(error, TierstateError) and not isinstance(error, TierUnavailable)
        if isinstance(error, CommitUnknown) or (self._sent and not settled):
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
    """Do nothing: memory outside slabs is freed with its last reference."""


def tier_write_of(
    tier_run: TierRun,
    head: Head,
    leaves: Sequence[Leaf],
    row_leaves: Array,
    route: Route,
    stages: Stages,
    faster: Sequence[TierRun] = (),
) -> TierWrite:
    """The `TierWrite` for the route's file format.

    Args:
        tier_run, head, leaves, row_leaves, route: as for `TierWrite`.
        stages: called once, before the first bytes are written, and only if the format is not native.
        faster: as for `TierWrite`.
    """
    kind = format_of(route.format)
    if kind is None:
        return TierWrite(tier_run, head, leaves, row_leaves, route, faster)
    return FormattedTierWrite(tier_run, head, leaves, row_leaves, route, kind, stages, faster)


class FormattedTierWrite(TierWrite):
    """Writes one version to one tier as files of another format, and what they cannot express to native packs.

    Args:
        tier_run, head, leaves, row_leaves, route: as for `TierWrite`.
        kind: the file format.
        stages, faster: as for `tier_write_of`.
    """

    def __init__(
        self,
        tier_run: TierRun,
        head: Head,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        kind: FileFormat,
        stages: Stages,
        faster: Sequence[TierRun] = (),
    ) -> None:
        super().__init__(tier_run, head, leaves, row_leaves, route, faster)
        self._head, self._kind, self._stages = head, kind, stages
        self._begin = threading.Lock()
        self._begun: LeafFiles | None = None

    def _leaf_files(self) -> LeafFiles:
        """The files. Planned at the first use and not in the constructor, for which the training has to wait."""
        with self._begin:
            if self._begun is None:
                leaves, rows = self._leaves, self._row_leaves
                here = self._route.leaves & np.fromiter(map(self._kind.expresses, leaves), bool, len(leaves))
                stages = np.where(here, self._stages(), -1)
                self._elsewhere, self._beside = ~self._routed, self._routed & (stages < 0)[rows]
                self._routed = self._beside
                self._begun = LeafFiles(self.tier_run, self._head, leaves, rows, self._kind, stages)
            return self._begun

    @property
    def stored(self) -> int:
        return super().stored + self._leaf_files().stored

    @property
    def plain(self) -> Array:
        """No leaf: a snapshot on the device cannot have the layout of a file."""
        return np.zeros(len(self._leaves), bool)

    def needless(self, digests: Array) -> Array:
        in_files = self._leaf_files().needless(digests)
        # For the base class, rows that go into files do not go to this tier.
        found: Array = in_files | (super().needless(digests) & (self._elsewhere | self._beside))
        return found

    def keep(self, rows: Array, digests: Array) -> bool:
        in_files = self._leaf_files().keep(rows, digests)
        return super().keep(rows, digests) and in_files

    def missing(self, rows: Array, digests: Array) -> Array:
        self._leaf_files()  # what goes into files is not missing in packs
        return super().missing(rows, digests)

    def _take(self, batch: SlabChunks, missing: Array) -> None:
        super()._take(batch, missing)
        self._leaf_files().take(batch)

    def copy(self, version: Version, fetch: Fetch) -> None:
        self._leaf_files().copy(version, fetch)
        super().copy(version, fetch)

    def commit(self, version: Version, stop: Stop | None = None) -> Record:
        self._leaf_files().finish(self._draft, version)
        return super().commit(version, stop)

    def _written_sizes(self) -> dict[str, int]:
        return super()._written_sizes() | self._leaf_files().sizes

    def _discard(self) -> None:
        try:
            if self._begun is not None:
                self._begun.abort()
        finally:
            super()._discard()
