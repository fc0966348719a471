"""Repacking: what is still wanted of packs that are mostly dead is put into new ones, so that the old ones can go.

Chunks are copied as they are stored, and verified. Then each version that had some there gets its next record, and then
the one before is forgotten. At every moment each version has a record whose packs are there, so that an interruption
costs no more than what is copied again. The old packs are deleted by a later sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import AlreadyExists, Damaged, FormatError, NotFound
from tierstate.manifest.layout import Draft, Layout, Place
from tierstate.manifest.leases import REPACK, Leases
from tierstate.manifest.log import commit_id
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .base import Range
from .codecs import decode
from .leasing import let_go
from .liveness import Pack, liveness, mostly_dead
from .packs import PackWriter, read_footer, version_sections
from .shelf import Shelf

log = logging.getLogger("tierstate")

WIN = 4 << 20
"""Bytes that must be won by emptying a pack."""

ROUNDS = 8
"""How often it is begun anew because records go meanwhile."""

Spot = tuple[str, int]
"""Where a chunk lies: the pack, and the offset in it."""


class _Chunk(NamedTuple):
    """A chunk to be copied: where it lies, and what it is.

    Attributes:
        nbytes: its raw length.
        kind: how the digest is computed.
    """

    place: Place
    digest: bytes
    nbytes: int
    kind: str


@dataclass(frozen=True)
class Repacked:
    """What repacking did, or would do.

    Attributes:
        packs: those that no record names any more, and their lengths in bytes.
        versions: numbers of those that have a new record.
        copied: stored bytes that were copied.
        reason: why nothing was done; empty where all is well.
    """

    packs: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    copied: int = 0
    reason: str = ""


def repack(
    shelf: Shelf,
    *,
    dry_run: bool = False,
    in_use: Collection[int] = (),
    dropped: Collection[int] = (),
    win: int = WIN,
) -> Repacked:
    """Empty the packs that are mostly dead, of versions other than the newest and those that are held.

    Args:
        shelf: the run in the tier.
        dry_run: only look.
        in_use: versions that stay as they are.
        dropped: versions that count as dropped, for a look at what would be.
        win: bytes that must be won by emptying a pack.

    Raises:
        TierError: the tier failed; every version is whole all the same, and it can be done again.
    """
    work = _Repack(shelf, frozenset(in_use), win)
    for _ in range(ROUNDS):
        try:
            return work.look(frozenset(dropped)) if dry_run else work.run()
        except NotFound:
            continue  # a record was dropped or replaced meanwhile
        except FormatError as error:
            return Repacked(reason=f"a record cannot be read: {error}")
    return Repacked(reason="the records did not stay the same while they were read")


class _Repack:
    """One round of repacking."""

    def __init__(self, shelf: Shelf, in_use: frozenset[int], win: int) -> None:
        self._shelf, self._in_use, self._win = shelf, in_use, win
        self._leases = Leases(shelf.tier, shelf.run)

    def look(self, dropped: frozenset[int] = frozenset()) -> Repacked:
        """What there is to do."""
        held = self._in_use | set(self._shelf.leased())
        generations = {s: g for s, g in self._shelf.log.generations().items() if s not in dropped}
        generations |= {seq: generations[seq][-1:] for seq in _doubled(generations, held)}
        dead = self._dead(generations, held)
        versions = sorted({seq for pack in dead.values() for seq in pack.seqs})
        return Repacked({k: p.size for k, p in dead.items()}, tuple(versions), sum(p.live for p in dead.values()))

    def _dead(self, generations: Mapping[int, list[int]], held: Collection[int]) -> dict[str, Pack]:
        log_ = self._shelf.log
        packs = liveness(log_.read_generation(seq, g) for seq, found in generations.items() for g in found)
        return mostly_dead(packs, {*held, *list(generations)[-1:]}, self._shelf.run, self._win)

    def run(self) -> Repacked:
        """Do it."""
        self._finish()
        seqs = self.look().versions
        if not seqs:
            return Repacked()
        with ExitStack() as stack:
            mine = {self._take(seq, stack) for seq in seqs}
            # Whoever drops or rewrites versions sees the leases from now on; what came before is seen here.
            found = self._leases.look(self._shelf.tier.age)
            others = {lease.seq for lease in found.live if lease.key not in mine}
            generations = self._shelf.log.generations()
            dead = self._dead(generations, self._in_use | others)
            # A version that names one of them only since the leases were taken is not held: its packs stay.
            dead = {key: pack for key, pack in dead.items() if pack.seqs <= set(seqs)}
            return self._move(dead, generations)

    def _take(self, seq: int, stack: ExitStack) -> str:
        key = self._leases.take(seq, REPACK)
        stack.callback(let_go, self._leases, key)
        return key

    def _finish(self) -> None:
        """Forget records that have been replaced, where an interruption left them both."""
        log_ = self._shelf.log
        generations = log_.generations()
        doubled = _doubled(generations, self._in_use | set(self._shelf.leased()))
        for seq in doubled:
            log_.read_generation(seq, generations[seq][-1])  # raises unless it can stand for them
            log_.forget(seq, generations[seq][:-1])

    def _move(self, dead: Mapping[str, Pack], generations: Mapping[int, list[int]]) -> Repacked:
        if not dead:
            return Repacked()
        log_ = self._shelf.log
        seqs = sorted({seq for pack in dead.values() for seq in pack.seqs})
        records = {seq: log_.read_generation(seq, generations[seq][-1]) for seq in seqs}
        writer = PackWriter(self._shelf.tier, self._shelf.run, seqs[-1])
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
        self, dead: Mapping[str, Pack], records: Collection[Record], writer: PackWriter
    ) -> tuple[dict[Spot, Place], list[str]]:
        """Copy what is wanted of packs; the new places, and the packs of which every chunk could be copied."""
        moved: dict[Spot, Place] = {}
        emptied = []
        for key in dead:
            try:
                read_footer(self._shelf.tier, key)  # files of other programs have none, and stay as they are
                places = {(key, c.place.offset): self._copied(c, writer) for c in _wanted(key, records)}
            except (Damaged, FormatError, NotFound) as error:
                log.info("%s: %s is left as it is: %s", self._shelf.name, key, error)
                continue
            moved |= places
            emptied.append(key)
        return moved, emptied

    def _copies_of_versions(self, emptied: Iterable[str], generations: Collection[int]) -> list[bytes]:
        """Copies of versions that are still there and that would go with the packs; a rebuild looks for them."""
        found: dict[str, bytes] = {}
        for key in emptied:
            try:
                for section in version_sections(self._shelf.tier, key):
                    version = Version.decode(section)
                    if version.head.run == self._shelf.run and version.head.seq in generations:
                        found[version.id] = bytes(section)
            except (FormatError, NotFound) as error:
                log.info("%s: a copy of a version is of no use: %s", self._shelf.name, error)
        return list(found.values())

    def _copied(self, chunk: _Chunk, writer: PackWriter) -> Place:
        """One chunk, from its place or from where it was mended, as it is stored."""
        try:
            stored = self._read(chunk)
        except (Damaged, NotFound):
            mended = self._shelf.mended(chunk.digest)
            if mended is None or mended == chunk.place:
                raise
            chunk = chunk._replace(place=mended)
            stored = self._read(chunk)
        return writer.add(stored, chunk.digest, chunk.nbytes, chunk.place.codec)

    def _read(self, chunk: _Chunk) -> Buffer:
        place, stored = chunk.place, empty_buffer(chunk.place.stored)
        self._shelf.tier.read(place.object, [Range(place.offset, stored)])
        if algorithm(chunk.kind)(decode(place.codec, stored, chunk.nbytes)) != chunk.digest:
            raise Damaged(f"{place.object} at byte {place.offset}: the chunk's digest is another")
        return stored

    # Records

    def _replace(
        self, old: Record, generations: list[int], moved: Mapping[Spot, Place], sizes: Mapping[str, int]
    ) -> bool:
        """Commit a version's next record, and forget those before; whether it was done."""
        seq = old.version.head.seq
        layout = _relaid(old.layout, moved, sizes)
        if layout is None:
            return False
        try:
            new = replace(old, layout=layout, commit={**old.commit, "id": commit_id()})
            self._shelf.log.commit(new, generations[-1] + 1)
        except AlreadyExists as error:
            log.info("%s: version %d is left as it is: %s", self._shelf.name, seq, error)
            return False
        if self._is_read(seq):
            return False  # by the record before, perhaps, which is forgotten next time
        self._shelf.log.forget(seq, generations)
        return True

    def _is_read(self, seq: int) -> bool:
        held = self._leases.look(self._shelf.tier.age)
        return any(lease.seq == seq and lease.kind != REPACK for lease in held.live)


def _doubled(generations: Mapping[int, list[int]], held: Collection[int]) -> list[int]:
    """Versions with records that have been replaced; not the newest: a living saver may build on the one before."""
    return [seq for seq, found in list(generations.items())[:-1] if len(found) > 1 and seq not in held]


def _wanted(key: str, records: Iterable[Record]) -> Iterator[_Chunk]:
    """Chunks that records have in a pack, each once."""
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


def _relaid(layout: Layout, moved: Mapping[Spot, Place], sizes: Mapping[str, int]) -> Layout | None:
    """The layout with the new places; None where it has none of the chunks that moved."""
    draft, found = Draft(len(layout.object)), False
    rows = np.flatnonzero(layout.present)
    draft.put_like(rows, layout, rows)
    gone = {key for key, _ in moved}
    for number, key in enumerate(layout.objects):
        for row in np.flatnonzero(layout.object == number).tolist() if key in gone else ():
            draft.put(row, moved[key, int(layout.offset[row])])
            found = True
    lengths = dict(zip(layout.objects, layout.object_sizes.tolist(), strict=True))
    return draft.build({**lengths, **sizes}) if found else None
