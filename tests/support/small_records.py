"""Versions of a few bytes, built by hand in any tier."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from tierstate.engine.packs.pack import PackWriter
from tierstate.manifest.arrays import digest_array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.format.layout import ChunkPlace, Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.base import Range, Tier

CHUNK = 4096


def text(name: str, nbytes: int = 40) -> bytes:
    """Bytes that depend on a name alone."""
    return hashlib.shake_256(name.encode()).digest(nbytes)


def pack(
    tier: Tier, seq: int, pieces: Mapping[str, bytes], *, run: str = "run", label: str = ""
) -> dict[str, ChunkPlace]:
    """Write a pack; where each piece lies."""
    writer = PackWriter(tier, run, seq, label=label)
    places = {name: writer.add(as_buffer(d), checksum(d), len(d), "raw") for name, d in pieces.items()}
    writer.close()
    return places


def record(
    tier: Tier, seq: int, pieces: Mapping[str, bytes], places: Mapping[str, ChunkPlace], *, run: str = "run"
) -> Record:
    """A version of these leaves, which lie at those places."""
    sizes = {place.object: tier.size(place.object) for place in places.values()}
    leaves = [Leaf((name,), Spec("bytes", shape=(len(d),))) for name, d in pieces.items()]
    shards = [ShardRow(i, 0, Box.whole((len(d),))) for i, d in enumerate(pieces.values())]
    digests = digest_array([checksum(d) for d in pieces.values()])
    version = Version.build(Head(run, seq, 10 * seq, 1.0 + seq, chunk=CHUNK), leaves, shards, digests)
    return Record(version, Layout.build([places[name] for name in pieces], sizes), {"id": commit_id()})


def contents(tier: Tier, found: Record) -> dict[str, bytes]:
    """What a version's leaves hold, read from where its record says; each is verified."""
    held = {}
    for row, leaf in enumerate(found.version.leaves):
        place = found.layout.place(row)
        assert place is not None
        out = as_buffer(bytearray(place.stored))
        tier.read(place.object, [Range(place.offset, out)])
        assert checksum(to_bytes(out)) == found.version.digests[row].tobytes(), f"{leaf.name} is damaged"
        held[leaf.name] = to_bytes(out)
    return held


def whole(tier: Tier, run: str = "run") -> dict[int, dict[str, bytes]]:
    """Every version of a run, by any of its records, all of which must be whole and say the same."""
    log, found = Log(tier, run), {}
    for seq, generations in log.generations().items():
        held = [contents(tier, log.read_generation(seq, generation)) for generation in generations]
        assert all(one == held[0] for one in held), f"the records of version {seq} hold different things"
        assert contents(tier, log.read(seq)) == held[0]
        found[seq] = held[0]
    return found
