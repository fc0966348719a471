"""Repacking (compaction): copies live chunks out of packs that are mostly dead, so that a sweep can delete those.

Chunks are copied in their stored encoding, and verified. Then each version that uses them gets a record of the next
generation, and its previous record is deleted. At every moment each version has a record whose packs exist; after an
interruption, only the copying is repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tierstate.engine.codecs.codecs import decompress
from tierstate.engine.packs.keys import pack_prefix
from tierstate.engine.packs.pack import PackWriter, read_footer, version_sections
from tierstate.engine.progress import Pace, no_progress
from tierstate.engine.store.catalog import release_lease
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import AlreadyExists, Damaged, FormatError, NotFound
from tierstate.manifest.format.layout import DELTA, ChunkPlace, Layout, LayoutBuilder
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.leases import REPACK, Leases
from tierstate.manifest.history.log import commit_id
from tierstate.tiers.base import read_range
from tierstate.tiers.concurrency import run_concurrently

log = logging.getLogger("tierstate")


MIN_GAIN = 4 << 20
"""A pack is emptied only if that frees more than this many bytes."""


MAX_REPACK_ROUNDS = 8
"""How often repacking starts again because records were deleted meanwhile."""


Spot = tuple[str, int]
"""Key of a pack, and the offset of a chunk in it."""


@dataclass(frozen=True)
class LivePack:
    """One pack, and how much of it is live.

    Attributes:
        size: its length in bytes.
        live: bytes of its chunks that a record names.
        seqs: versions that name it.
        movable: whether its chunks can be moved; not if some are deltas or delta bases.
    """

    size: int
    live: int
    seqs: frozenset[int]
    movable: bool


class LiveBytes:
    """Sums the live bytes of each pack over records that are added one by one, by any threads; a shared chunk counts
    once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._seqs: dict[str, set[int]] = {}
        self._chunks: dict[str, Array] = {}
        self._fixed: set[str] = set()

    def add(self, record: Record) -> None:
        """Add the packs of a record."""
        with self._lock:
            self._add(record)

    def _add(self, record: Record) -> None:
        layout, seq = record.layout, record.version.head.seq
        for number, (key, size) in enumerate(layout.pack_sizes.items()):
            self._sizes[key] = max(size, self._sizes.get(key, 0))
            self._seqs.setdefault(key, set()).add(seq)
            rows = np.flatnonzero(layout.object == number)
            if not len(rows) or _is_fixed(layout, number, rows):
                self._fixed.add(key)
            found = np.column_stack([layout.offset[rows].astype("u8"), layout.stored[rows].astype("u8")])
            before = self._chunks.get(key)
            self._chunks[key] = np.unique(found if before is None else np.concatenate([before, found]), axis=0)

    def packs(self) -> dict[str, LivePack]:
        """All packs that the records name."""
        return {
            key: LivePack(
                size, int(self._chunks[key][:, 1].sum()), frozenset(self._seqs[key]), movable=key not in self._fixed
            )
            for key, size in sorted(self._sizes.items())
        }


def _is_fixed(layout: Layout, number: int, rows: Array) -> bool:
    """Whether a layout has a delta or a delta base in a pack, which then cannot be moved."""
    deltas = np.array([codec == DELTA for codec in layout.codecs], bool)[layout.codec[rows]]
    bases = getattr(layout, "base_object", None)
    return bool(deltas.any()) or (bases is not None and bool((bases == number).any()))


def mostly_dead(packs: Mapping[str, LivePack], untouched: Collection[int], run: str, win: int) -> dict[str, LivePack]:
    """Packs of the run that are less than half live, where emptying them frees more than ``win`` bytes.

    Args:
        untouched: versions whose packs are not changed.
    """
    return {
        key: pack
        for key, pack in packs.items()
        if pack.movable
        and key.startswith(pack_prefix(run))
        and 2 * pack.live < pack.size
        and pack.size - pack.live > win
        and not pack.seqs & set(untouched)
    }


class _Chunk(NamedTuple):
    """A chunk to be copied: its place and its digest.

    Attributes:
        nbytes: its raw length.
        kind: how the digest is computed.
    """

    place: ChunkPlace
    digest: bytes
    nbytes: int
    kind: str


@dataclass(frozen=True)
class Repacked:
    """What repacking did, or would do.

    Attributes:
        packs: packs that no record names any more, and their lengths in bytes.
        versions: numbers of the versions with a new record.
        copied: stored bytes that were copied.
        reason: why nothing was done; empty if nothing failed.
    """

    packs: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    copied: int = 0
    reason: str = ""


def repack(
    tier_run: TierRun,
    *,
    dry_run: bool = False,
    in_use: Collection[int] = (),
    dropped: Collection[int] = (),
    win: int = MIN_GAIN,
    progress: Callable[[str], object] = no_progress,
) -> Repacked:
    """Empty packs that are mostly dead, but none that the newest version or a leased one uses.

    Args:
        tier_run: the run in the tier.
        dry_run: change nothing.
        in_use: versions that are not changed.
        dropped: versions that count as dropped, for a dry run.
        win: emptying a pack must free more than this many bytes.
        progress: called with a text that says how much is copied, how fast and for how long yet.

    Raises:
        TierError: the tier failed; every version is still whole, and repacking can be run again.
    """
    work = _Repack(tier_run, frozenset(in_use), win, progress)
    for _ in range(MAX_REPACK_ROUNDS):
        try:
            return work.look(frozenset(dropped)) if dry_run else work.run()
        except NotFound:
            continue  # a record was dropped or replaced meanwhile
        except FormatError as error:
            return Repacked(reason=f"a record cannot be read: {error}")
    return Repacked(reason="the records did not stay the same while they were read")


class _Repack:
    """One round of repacking."""

    def __init__(self, tier_run: TierRun, in_use: frozenset[int], win: int, progress: Callable[[str], object]) -> None:
        self._tier_run, self._in_use, self._win, self._progress = tier_run, in_use, win, progress
        self._leases = Leases(tier_run.tier, tier_run.run)

    def look(self, dropped: frozenset[int] = frozenset()) -> Repacked:
        """What `run` would do."""
        held = self._in_use | set(self._tier_run.leased())
        generations = {s: g for s, g in self._tier_run.log.generations().items() if s not in dropped}
        generations |= {seq: generations[seq][-1:] for seq in _doubled(generations, held)}
        dead = self._dead(generations, held)
        versions = sorted({seq for pack in dead.values() for seq in pack.seqs})
        return Repacked({k: p.size for k, p in dead.items()}, tuple(versions), sum(p.live for p in dead.values()))

    def _dead(self, generations: Mapping[int, list[int]], held: Collection[int]) -> dict[str, LivePack]:
        log_, live = self._tier_run.log, LiveBytes()
        # Each record is read, added and let go in one thread, as all of them would be too much for the memory.
        keys = [(seq, generation) for seq, found in generations.items() for generation in found]
        run_concurrently(lambda key: live.add(log_.read_generation(*key)), keys)
        return mostly_dead(live.packs(), {*held, *list(generations)[-1:]}, self._tier_run.run, self._win)

    def run(self) -> Repacked:
        """Repack once."""
        self._finish()
        seqs = self.look().versions
        if not seqs:
            return Repacked()
        with ExitStack() as stack:
            mine = {self._take(seq, stack) for seq in seqs}
            # Other processes that drop or rewrite versions see our leases from now on; earlier changes are seen here.
            found = self._leases.look(self._tier_run.tier.age)
            others = {lease.seq for lease in found.live if lease.key not in mine}
            generations = self._tier_run.log.generations()
            dead = self._dead(generations, self._in_use | others)
            # A version that has named one of them only since the leases were taken has no lease: its packs stay.
            dead = {key: pack for key, pack in dead.items() if pack.seqs <= set(seqs)}
            return self._move(dead, generations)

    def _take(self, seq: int, stack: ExitStack) -> str:
        key = self._leases.take(seq, REPACK)
        stack.callback(release_lease, self._leases, key)
        return key

    def _finish(self) -> None:
        """Delete replaced records that an interruption left beside the new ones."""
        log_ = self._tier_run.log
        generations = log_.generations()
        doubled = _doubled(generations, self._in_use | set(self._tier_run.leased()))
        for seq in doubled:
            log_.read_generation(seq, generations[seq][-1])  # raises unless it can replace them
            log_.forget(seq, generations[seq][:-1])

    def _move(self, dead: Mapping[str, LivePack], generations: Mapping[int, list[int]]) -> Repacked:
        if not dead:
            return Repacked()
        log_ = self._tier_run.log
        seqs = sorted({seq for pack in dead.values() for seq in pack.seqs})
        records = {seq: log_.read_generation(seq, generations[seq][-1]) for seq in seqs}
        writer = PackWriter(self._tier_run.tier, self._tier_run.run, seqs[-1])
        try:
            moved, emptied = self._copy(dead, list(records.values()), writer)
            sizes = writer.close(*self._copies_of_versions(emptied, generations))
        except BaseException:
            writer.abort()
            raise
        done = tuple(seq for seq in seqs if self._replace(records[seq], generations[seq], moved, sizes))
        missed = {seq for key in emptied for seq in dead[key].seqs} - set(done)
        packs = {key: dead[key].size for key in emptied if not dead[key].seqs & missed}
        return Repacked(packs, done, writer.stored)

    # Chunks

    def _copy(
        self, dead: Mapping[str, LivePack], records: Collection[Record], writer: PackWriter
    ) -> tuple[dict[Spot, ChunkPlace], list[str]]:
        """Copy live chunks out of packs; the new places, and the packs of which every live chunk was copied."""
        moved: dict[Spot, ChunkPlace] = {}
        emptied = []
        pace = Pace(f"{self._tier_run.name}: repacking", self._progress, sum(pack.live for pack in dead.values()))
        for key in dead:
            try:
                read_footer(self._tier_run.tier, key)  # raises for files of other formats: they stay as they are
                places = {(key, c.place.offset): self._copied(c, writer, pace) for c in _wanted(key, records)}
            except (Damaged, FormatError, NotFound) as error:
                log.info("%s: %s is left as it is: %s", self._tier_run.name, key, error)
                continue
            moved |= places
            emptied.append(key)
        return moved, emptied

    def _copies_of_versions(self, emptied: Iterable[str], generations: Collection[int]) -> list[bytes]:
        """The copies of existing versions inside these packs; they are copied too, since `rebuild` uses them."""
        found: dict[str, bytes] = {}
        for key in emptied:
            try:
                for section in version_sections(self._tier_run.tier, key):
                    version = Version.decode(section)
                    if version.head.run == self._tier_run.run and version.head.seq in generations:
                        found[version.id] = bytes(section)
            except (FormatError, NotFound) as error:
                log.info("%s: a copy of a version is of no use: %s", self._tier_run.name, error)
        return list(found.values())

    def _copied(self, chunk: _Chunk, writer: PackWriter, pace: Pace) -> ChunkPlace:
        """Copy one chunk in its stored encoding, from its place or from its repaired copy."""
        try:
            stored = self._read(chunk)
        except (Damaged, NotFound):
            mended = self._tier_run.mended(chunk.digest)
            if mended is None or mended == chunk.place:
                raise
            chunk = chunk._replace(place=mended)
            stored = self._read(chunk)
        pace(stored.numel())
        return writer.add(stored, chunk.digest, chunk.nbytes, chunk.place.codec)

    def _read(self, chunk: _Chunk) -> Buffer:
        place = chunk.place
        stored = read_range(self._tier_run.tier, place.object, place.offset, place.stored)
        if digest_function(chunk.kind)(decompress(place.codec, stored, chunk.nbytes)) != chunk.digest:
            raise Damaged(f"{place.object} at byte {place.offset}: the chunk's digest is another")
        return stored

    # Records

    def _replace(
        self, old: Record, generations: list[int], moved: Mapping[Spot, ChunkPlace], sizes: Mapping[str, int]
    ) -> bool:
        """Commit a version's next record, and delete the previous ones; returns whether that was done."""
        seq = old.version.head.seq
        layout = _relaid(old.layout, moved, sizes)
        if layout is None:
            return False
        try:
            new = replace(old, layout=layout, commit={**old.commit, "id": commit_id()})
            self._tier_run.log.commit(new, generations[-1] + 1)
        except AlreadyExists as error:
            log.info("%s: version %d is left as it is: %s", self._tier_run.name, seq, error)
            return False
        if self._is_read(seq):
            return False  # perhaps by the previous record, which is deleted next time
        self._tier_run.log.forget(seq, generations)
        return True

    def _is_read(self, seq: int) -> bool:
        held = self._leases.look(self._tier_run.tier.age)
        return any(lease.seq == seq and lease.kind != REPACK for lease in held.live)


def _doubled(generations: Mapping[int, list[int]], held: Collection[int]) -> list[int]:
    """Versions with replaced records; not the newest version: a running saver may build on its previous record."""
    return [seq for seq, found in list(generations.items())[:-1] if len(found) > 1 and seq not in held]


def _wanted(key: str, records: Iterable[Record]) -> Iterator[_Chunk]:
    """Chunks that records name in a pack, each once."""
    seen: set[int] = set()
    for record in records:
        layout, version = record.layout, record.version
        if key not in layout.objects:
            continue
        for row in np.flatnonzero(layout.object == layout.objects.index(key)).tolist():
            place = layout.place(row)
            if place is not None and place.offset not in seen:
                seen.add(place.offset)
                nbytes = int(version.chunk_nbytes[row])
                yield _Chunk(place, version.digests[row].tobytes(), nbytes, version.head.digest)


def _relaid(layout: Layout, moved: Mapping[Spot, ChunkPlace], sizes: Mapping[str, int]) -> Layout | None:
    """The layout with the new places; None if it has no moved chunk."""
    draft, found = LayoutBuilder(len(layout.object)), False
    rows = np.flatnonzero(layout.present)
    draft.put_like(rows, layout, rows)
    gone = {key for key, _ in moved}
    for number, key in enumerate(layout.objects):
        for row in np.flatnonzero(layout.object == number).tolist() if key in gone else ():
            draft.put(row, moved[key, int(layout.offset[row])])
            found = True
    return draft.build({**layout.pack_sizes, **sizes}) if found else None
