"""Search for undamaged chunks in all packs of all tiers, whether a record names them or not; for ``tierstate doctor``.

Places come from the layouts of records, from the footers of packs, and from the headers of packs that are files of
another format. Each is read and compared with the digest that is wanted, so a wrong place does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierstate.engine.codecs.codecs import BLOSC, decompress
from tierstate.engine.packs.formats import format_of_key
from tierstate.engine.packs.keys import has_footer, is_mend, run_of
from tierstate.engine.packs.pack import PackScan
from tierstate.engine.store.delta_base import SLACK, xor
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import digest_list
from tierstate.manifest.chunk import Buffer, empty_buffer, spans
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import Damaged, FormatError, MediaError, NotFound, TierstateError, cannot_be_asked
from tierstate.manifest.format.layout import DELTA, RAW, ChunkPlace, DeltaBase, Layout
from tierstate.manifest.format.version import Version
from tierstate.tiers.base import Range, read_range
from tierstate.tiers.concurrency import run_concurrently

READ_TOGETHER = 16 << 20
"""Stored bytes of chunks that are read in one call, or one chunk if that is more."""


class ChunkId(NamedTuple):
    """What is wanted: the digest of a chunk's raw bytes, their length, and the name of the digest function."""

    digest: bytes
    nbytes: int
    function: str


class Found(NamedTuple):
    """A place where a chunk may be: the tier's name, the place without a delta base, and the digest of its base."""

    tier: str
    place: ChunkPlace
    base: bytes = b""


def chunk_ids(version: Version) -> list[ChunkId]:
    """The chunks of a version, by row."""
    digests, lengths = digest_list(version.digests), version.chunk_nbytes.tolist()
    return [ChunkId(digest, n, version.head.digest) for digest, n in zip(digests, lengths, strict=True)]


@dataclass
class _Pack:
    """What is known of a pack: its length, or None if it is missing; why its footer cannot be read."""

    nbytes: int | None
    flaw: str = ""


@dataclass
class _Tier:
    tier_run: TierRun
    scan: PackScan
    lasts: Callable[[str], bool]
    mending: Collection[str]
    packs: dict[str, _Pack] = field(default_factory=dict)
    mends: dict[bytes, list[ChunkPlace]] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)


class ChunkSearch:
    """Which of the wanted chunks exist undamaged, and where.

    Args:
        scans: the tiers that can be read, nearest first, with the footers of their packs, a function that says of the
            key of a pack whether it stays for a record of the run that names it, and the runs in whose packs readers
            look for repaired copies: another run that has repaired a chunk has not done so for this one.
        progress: called with the stored bytes read since the last call.

    Attributes:
        unasked: tiers in which a place could not be read for a passing reason, with the reason: what is wanted may be
            there.
    """

    def __init__(
        self,
        scans: Sequence[tuple[TierRun, PackScan, Callable[[str], bool], Collection[str]]],
        progress: Callable[[int], object],
    ) -> None:
        self._tiers = {tier_run.name: _Tier(tier_run, scan, lasts, runs) for tier_run, scan, lasts, runs in scans}
        self._progress = progress
        self._wanted: set[ChunkId] = set()
        self._places: dict[bytes, dict[Found, None]] = {}
        self._good: dict[ChunkId, list[Found]] = {}
        self._asked: dict[tuple[ChunkId, Found], bool | None] = {}
        self._filed = False
        self.unasked: dict[str, str] = {}
        for tier in self._tiers.values():
            for row in tier.scan.rows:
                self._add(row.digest, Found(tier.tier_run.name, row.place, row.base))
                key = row.place.object
                if is_mend(key) and not row.base and run_of(key) in tier.mending:
                    tier.mends.setdefault(row.digest, []).append(row.place)

    def want(self, version: Version) -> None:
        """Add the chunks of a version to those that are wanted."""
        self._wanted.update(chunk_ids(version))

    def add_layout(self, tier: str, version: Version, layout: Layout) -> None:
        """Add the places that a record names, and those of the bases of its deltas."""
        self._tiers[tier].said |= layout.pack_sizes
        for row, digest in enumerate(digest_list(version.digests)):
            if (place := layout.place(row)) is not None:
                base = place.base
                where = Found(tier, place._replace(base=None), b"" if base is None else base.digest)
                self._add(digest, where)
                if base is not None:
                    self._add(base.digest, Found(tier, ChunkPlace(*base[:4])))

    def _add(self, digest: bytes, found: Found) -> None:
        self._places.setdefault(digest, {})[found] = None

    # Reading

    def run(self, cuts: Iterable[tuple[int, str]]) -> None:
        """Read every place of what is wanted. Called again, it reads those that were added since.

        Args:
            cuts: lengths of chunks and digest functions of the versions, by which files of other formats, whose
                headers say where leaves are but not chunks, are cut.
        """
        deltas: dict[ChunkId, None] = {}
        plain: list[tuple[ChunkId, Found]] = []
        for one in self._wanted:
            for found in self._places.get(one.digest, ()):
                if found.base:
                    base = ChunkId(found.base, one.nbytes, one.function)
                    deltas[one] = None
                    plain += [(base, there) for there in self._places.get(base.digest, ()) if not there.base]
                else:
                    plain.append((one, found))
        self._read_all(place for place in dict.fromkeys(plain) if place not in self._asked)
        for tier in () if self._filed else self._tiers.values():
            self._read_files(tier, set(cuts))
        self._filed = True
        run_concurrently(self._undo, list(deltas))

    def _read_all(self, places: Iterable[tuple[ChunkId, Found]]) -> None:
        ordered = sorted(places, key=lambda p: (p[1].tier, p[1].place.object, p[1].place.offset))
        self._asked |= dict.fromkeys(ordered, False)
        packs = dict.fromkeys((found.tier, found.place.object) for _, found in ordered)
        run_concurrently(lambda pack: self.size(*pack), packs)
        batches: list[list[tuple[ChunkId, Found]]] = []
        filled = 0
        for one, found in ordered:
            if not self._fits(one, found):
                continue
            before = batches[-1][-1][1] if batches else None
            same = before is not None and (before.tier, before.place.object) == (found.tier, found.place.object)
            if not same or filled + found.place.stored > READ_TOGETHER:
                batches.append([])
                filled = 0
            batches[-1].append((one, found))
            filled += found.place.stored
        run_concurrently(self._read_batch, batches)

    def _fits(self, one: ChunkId, found: Found) -> bool:
        """Whether a place lies in its pack; a place that claims more is not believed, and no memory is taken for it."""
        size = self.size(found.tier, found.place.object)
        if size is None and (found.tier in self.unasked):
            self._asked[one, found] = None
        at, stored = found.place.offset, found.place.stored
        return size is not None and at + stored <= size and stored <= one.nbytes + SLACK

    def _read_batch(self, batch: Sequence[tuple[ChunkId, Found]]) -> None:
        buffers = [empty_buffer(found.place.stored) for _, found in batch]
        tier = self._tiers[batch[0][1].tier].tier_run.tier
        try:
            ranges = [Range(found.place.offset, out) for (_, found), out in zip(batch, buffers, strict=True)]
            tier.read(batch[0][1].place.object, ranges)
            whole = True
        except TierstateError:
            whole = False  # one bad part makes the whole call fail
        for (one, found), out in zip(batch, buffers, strict=True):
            good = whole and self._is(one, found.place, out)
            # Again, by itself: a byte may have been flipped on the way.
            self._note(one, found, good or self._alone(one, found))
            self._progress(found.place.stored)

    def _alone(self, one: ChunkId, found: Found) -> bool | None:
        """Whether a place has the chunk, read by itself; None if it cannot be asked now."""
        try:
            out = self._stored(found)
        except TierstateError as error:
            if cannot_be_asked(error) and not isinstance(error, MediaError):
                self.unasked[found.tier] = str(error)
                return None
            return False
        return self._is(one, found.place, out)

    def _stored(self, found: Found) -> Buffer:
        """The stored bytes at a place, in a new buffer."""
        place = found.place
        return read_range(self._tiers[found.tier].tier_run.tier, place.object, place.offset, place.stored)

    @staticmethod
    def _is(one: ChunkId, place: ChunkPlace, stored: Buffer) -> bool:
        try:
            return digest_function(one.function)(decompress(place.codec, stored, one.nbytes)) == one.digest
        except (Damaged, FormatError):
            return False

    def _note(self, one: ChunkId, found: Found, good: bool | None) -> None:
        self._asked[one, found] = good
        if good:
            self._good.setdefault(one, []).append(found)

    def _read_files(self, tier: _Tier, cuts: set[tuple[int, str]]) -> None:
        """Look into files of other formats for chunks that were found nowhere else in this tier."""
        name = tier.tier_run.name
        good = [found for places in self._good.values() for found in places if found.tier == name]
        known = {(found.place.object, found.place.offset) for found in good}
        here = {one for one, places in self._good.items() if any(found.tier == name for found in places)}
        if here >= self._wanted:
            return
        for key in [key for key in tier.scan.unread if not has_footer(key)]:
            fmt = format_of_key(key)
            try:
                leaves = [] if fmt is None else fmt.spans(tier.tier_run.tier, key)
            except TierstateError as error:
                if cannot_be_asked(error) and not isinstance(error, MediaError):
                    self.unasked[name] = str(error)
                continue
            for chunk, function in cuts:
                for at, nbytes in leaves:
                    parts = [part for part in spans(nbytes, chunk) if (key, at + part[0]) not in known]
                    self._read_leaf(tier, key, at, parts, function)

    def _read_leaf(self, tier: _Tier, key: str, at: int, parts: Iterable[tuple[int, int]], function: str) -> None:
        for start, nbytes in parts:
            try:
                out = read_range(tier.tier_run.tier, key, at + start, nbytes)
            except TierstateError:
                continue
            one = ChunkId(digest_function(function)(out), nbytes, function)
            self._progress(nbytes)
            if one in self._wanted:
                found = Found(tier.tier_run.name, ChunkPlace(key, at + start, nbytes, RAW))
                self._add(one.digest, found)
                self._note(one, found, True)

    def _undo(self, one: ChunkId) -> None:
        """Read the deltas of a chunk, each against its base, wherever that is undamaged."""
        for found in [found for found in self._places[one.digest] if found.base and (one, found) not in self._asked]:
            good: bool | None = False
            if self._fits(one, found):
                base = self._standalone(ChunkId(found.base, one.nbytes, one.function))
                good = self._delta(one, found, base) is not None if base is not None else self._doubt(one, found)
            self._note(one, found, good)
            self._progress(found.place.stored)

    def _doubt(self, one: ChunkId, found: Found) -> bool | None:
        base = ChunkId(found.base, one.nbytes, one.function)
        unasked = any(self._asked.get((base, there), False) is None for there in self._places.get(base.digest, ()))
        return None if unasked else False

    def _delta(self, one: ChunkId, found: Found, base: Buffer) -> Buffer | None:
        """The raw bytes of a delta; None if it is damaged."""
        try:
            raw = xor(base, decompress(BLOSC, self._stored(found), one.nbytes))
        except TierstateError:
            return None
        return raw if digest_function(one.function)(raw) == one.digest else None

    def _standalone(self, one: ChunkId) -> Buffer | None:
        """The raw bytes of a chunk from a place that needs no base, in a new buffer."""
        for found in self._good.get(one, ()):
            if found.base:
                continue
            try:
                raw = decompress(found.place.codec, self._stored(found), one.nbytes)
            except TierstateError:
                continue
            if digest_function(one.function)(raw) == one.digest:
                return raw
        return None

    # What was found

    def size(self, tier: str, key: str) -> int | None:
        """Length of a pack; None if it is missing or cannot be asked for."""
        packs = self._tiers[tier].packs
        if key not in packs:
            scan, nbytes = self._tiers[tier].scan, None
            try:
                nbytes = self._tiers[tier].tier_run.tier.size(key)
            except NotFound:
                pass
            except TierstateError as error:
                if not isinstance(error, MediaError):
                    self.unasked[tier] = str(error)
            packs[key] = _Pack(nbytes, scan.unread.get(key, "") if has_footer(key) else "")
        return packs[key].nbytes

    def sizes(self, tier: str) -> Mapping[str, int]:
        """Lengths of the packs of a tier that exist, as far as they were asked for."""
        return {key: pack.nbytes for key, pack in self._tiers[tier].packs.items() if pack.nbytes is not None}

    def add_good(self, tier: str, one: ChunkId, place: ChunkPlace, nbytes: int) -> None:
        """Add a chunk that was just written, in a pack of this length."""
        found = Found(tier, place)
        self._add(one.digest, found)
        self._note(one, found, True)
        self._tiers[tier].packs[place.object] = _Pack(nbytes)

    def exists(self, one: ChunkId) -> bool:
        """Whether a chunk is undamaged anywhere."""
        return bool(self._good.get(one))

    def tiers_with(self, one: ChunkId) -> list[str]:
        """Names of the tiers that have a chunk undamaged."""
        return list(dict.fromkeys(found.tier for found in self._good.get(one, ())))

    def is_gone(self, one: ChunkId) -> bool:
        """Whether a chunk has gone without a trace, as if its pack was deleted since no record needed it: no record and
        no footer has a place of it, but for deltas whose base has gone so."""
        places = self._places.get(one.digest, ())
        return all(found.base and self.is_gone(one._replace(digest=found.base)) for found in places)

    def in_doubt(self, one: ChunkId) -> bool:
        """Whether a chunk was found nowhere, and a place of it cannot be asked now."""
        places = self._places.get(one.digest, ())
        return not self.exists(one) and any(self._asked.get((one, found), False) is None for found in places)

    def read(self, one: ChunkId) -> Buffer:
        """The verified raw bytes of a chunk, from wherever it is undamaged.

        Raises:
            Damaged: it is undamaged nowhere any more.
        """
        raw = self._standalone(one)
        for found in self._good.get(one, ()) if raw is None else ():
            base = self._standalone(ChunkId(found.base, one.nbytes, one.function)) if found.base else None
            if base is not None and (raw := self._delta(one, found, base)) is not None:
                break
        if raw is None:
            raise Damaged(f"chunk {one.digest.hex()[:16]} is undamaged in no pack of any tier any more")
        return raw

    def serves(self, tier: str, one: ChunkId, place: ChunkPlace, nbytes: Mapping[str, int]) -> bool:
        """Whether a restore gets a chunk from the place that a record names, or from its repaired copy in the tier.

        Args:
            nbytes: the lengths of packs that the record names.
        """
        base, found = place.base, Found(tier, place._replace(base=None), place.base.digest if place.base else b"")
        if self._asked.get((one, found)) and self._is_kept(tier, place.object, nbytes):
            under = base and ChunkId(base.digest, one.nbytes, one.function)
            if base is None or under is None or self._serves_base(tier, under, base, nbytes):
                return True
        return self._is_mended(tier, one)

    def _serves_base(self, tier: str, one: ChunkId, base: DeltaBase, nbytes: Mapping[str, int]) -> bool:
        kept = self._asked.get((one, Found(tier, ChunkPlace(*base[:4])))) and self._is_kept(tier, base.object, nbytes)
        return bool(kept) or self._is_mended(tier, one)

    def _is_kept(self, tier: str, key: str, nbytes: Mapping[str, int]) -> bool:
        """Whether a pack has the length that a record says, and a footer that can be read."""
        size = self.size(tier, key)
        return size is not None and size == nbytes.get(key) and not self._tiers[tier].packs[key].flaw

    def _is_mended(self, tier: str, one: ChunkId) -> bool:
        """Whether a tier has repaired copies of a chunk, all of them undamaged: a reader may take any."""
        mends = self._tiers[tier].mends.get(one.digest, ())
        return bool(mends) and all(self._asked.get((one, Found(tier, place))) for place in mends)

    def asked(self, tier: str, one: ChunkId, place: ChunkPlace) -> bool:
        """Whether it is known if a place has a chunk; False if it cannot be asked now."""
        found = Found(tier, place._replace(base=None), place.base.digest if place.base else b"")
        return self._asked.get((one, found), False) is not None

    def place(self, tier: str, one: ChunkId) -> ChunkPlace | None:
        """A place of a chunk in a tier that a new record may name; None if there is none."""
        for found in sorted(self._good.get(one, ()), key=lambda found: bool(found.base)):
            if found.tier == tier and (place := self._with_base(one, found)) is not None:
                return place
        return None

    def _with_base(self, one: ChunkId, found: Found) -> ChunkPlace | None:
        """A place with its base in the same tier; None if its pack is damaged otherwise or may be deleted for all that
        this run needs it, or there is no such base."""
        key = found.place.object
        if not self._tiers[found.tier].lasts(key):
            return None
        said = self._tiers[found.tier].said.get(key, self.size(found.tier, key))
        if said is None or not self._is_kept(found.tier, key, {key: said}):
            return None
        if not found.base:
            return found.place if found.place.codec != DELTA else None
        under = ChunkId(found.base, one.nbytes, one.function)
        for there in self._good.get(under, ()):
            if there.tier == found.tier and not there.base and (place := self._with_base(under, there)) is not None:
                return found.place._replace(base=DeltaBase(*place[:4], found.base))
        return None
