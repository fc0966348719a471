"""Packs: what their footers say is what was put in, and an abort leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.engine.packs import pack
from tierstate.engine.packs.keys import MEND, is_mend
from tierstate.engine.packs.pack import FooterRow, FooterRows, PackWriter, read_footer
from tierstate.engine.packs.slab_layout import BIG, BLOCK
from tierstate.manifest.arrays import digest_array
from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import AlreadyExists, FormatError, MediaError, NotFound, TierUnavailable
from tierstate.manifest.format.layout import is_pack_key
from tierstate.tiers.base import Range, Tier, check_key
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty

CHUNKS = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=200), st.sampled_from([1, 1, 1, 40, 7000]), st.sampled_from(["raw", "blosc"])
    ),
    max_size=12,
)


def written(tier: Tier, chunks: list[tuple[bytes, int, str]]) -> list[FooterRow]:
    """A save's packs; what they should say they hold."""
    writer, rows = PackWriter(tier, "run", 7), []
    for i, (piece, times, codec) in enumerate(chunks):
        data = as_buffer(piece * times)
        if codec == "raw" and i % 2:
            rows += written_together(writer, data)
            continue
        place = writer.add(data, checksum(piece), 2 * len(data), codec)
        rows.append(FooterRow(checksum(piece), 2 * len(data), place))
    writer.close()
    gaps = sum(5 for i, (_, _, codec) in enumerate(chunks) if codec == "raw" and i % 2)
    assert writer.stored == sum(row.place.stored for row in rows) + gaps
    assert writer.sizes == {key: tier.size(key) for key in tier.list("packs/")}
    return rows


def written_together(writer: PackWriter, data: Buffer) -> list[FooterRow]:
    """Two chunks with a gap between them, written in one piece."""
    cut = len(data) // 2
    pieces = [data[:cut], data[cut:]]
    at, nbytes = np.array([0, cut + 5]), np.array([len(p) for p in pieces])
    run = torch.cat([pieces[0], torch.zeros(5, dtype=torch.uint8), pieces[1]])
    digests = [checksum(to_bytes(p)) for p in pieces]
    key, start = writer.add_run(run, FooterRows(digest_array(digests), nbytes, at, nbytes, "raw"))
    places = [pack.ChunkPlace(key, start + a, n, "raw") for a, n in zip(at.tolist(), nbytes.tolist(), strict=True)]
    return [FooterRow(d, n, place) for d, n, place in zip(digests, nbytes.tolist(), places, strict=True)]


@given(chunks=CHUNKS, limit=st.sampled_from([8192, 100_000, 4 << 30]))
def test_footers_say_what_lies_where(chunks: list[tuple[bytes, int, str]], limit: int) -> None:
    tier = Memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "MAX_PACK", limit)
        rows = written(tier, chunks)
    keys = list(tier.list(""))
    assert all(is_pack_key(key) and check_key(key) and not is_mend(key) for key in keys)
    assert sorted(keys) == sorted({row.place.object for row in rows}), "no chunk, no pack"
    assert [row for key in dict.fromkeys(r.place.object for r in rows) for row in read_footer(tier, key)] == rows
    found = []
    for row in rows:
        out = empty_buffer(row.place.stored)
        tier.read(row.place.object, [Range(row.place.offset, out)])
        found.append(to_bytes(out))
    assert b"".join(found) == b"".join(piece * times for piece, times, _ in chunks)


class BadSectors(Memory):
    """Has bad sectors in all but the last bytes of its objects.

    Args:
        good: by key, where the good bytes of an object begin.
    """

    def __init__(self, good: dict[str, int]) -> None:
        super().__init__()
        self.good, self.reads = good, 0

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.reads += 1
        if any(offset < self.good.get(key, 0) for offset, _ in ranges):
            raise MediaError(f"{key}: a bad sector")
        super().read(key, ranges)


@given(chunks=CHUNKS.filter(bool), ahead=st.sampled_from([28, 29, 100, 1000, 16 << 10]), bad=st.booleans())
def test_a_footer_is_read_by_one_request_or_two_and_needs_no_chunk(
    chunks: list[tuple[bytes, int, str]], ahead: int, bad: bool
) -> None:
    tier = BadSectors({})
    rows = written(tier, chunks)
    (key,) = tier.list("")
    table, size = tier.size(key) - max(row.place.offset + row.place.stored for row in rows), tier.size(key)
    tier.good = {key: size - table if bad else 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "FOOTER_AHEAD", ahead)
        tier.reads = 0
        assert read_footer(tier, key) == rows
    if not bad:
        assert tier.reads == (1 if min(size, ahead) >= table else 2)


@given(sizes=st.lists(st.sampled_from([1, 100, BLOCK, 3 * BLOCK, BIG, BIG + 1, 2 * BIG]), max_size=12))
@example(sizes=[3 * BLOCK, BIG - 2 * BLOCK, 1])
@example(sizes=[1, BIG, 2 * BIG, 1])
def test_a_pack_grows_as_far_as_its_limit_and_past_it_only_for_a_single_chunk(sizes: list[int]) -> None:
    limit = BIG + 2 * BLOCK
    writer = PackWriter(Memory(), "run", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "MAX_PACK", limit)
        places = [writer.add(as_buffer(bytes(n)), bytes([i]) * 16, n, "raw") for i, n in enumerate(sizes)]
        writer.close()
    packs = [list(chunks) for _, chunks in groupby(places, lambda place: place.object)]
    for chunks in packs:
        assert len(chunks) == 1 or chunks[-1].offset + chunks[-1].stored <= limit
    for one, other in pairwise(packs):
        assert one[-1].offset + one[-1].stored + BLOCK + other[0].stored > limit, "it had no room for the next chunk"


@given(sizes=st.lists(st.sampled_from([1, 100, 5000, BIG - 1, BIG, BIG + 1]), max_size=6))
def test_big_chunks_start_at_blocks_and_small_ones_follow_without_a_gap(sizes: list[int]) -> None:
    tier, at = Memory(), 0
    writer = PackWriter(tier, "run", 1)
    for i, size in enumerate(sizes):
        place = writer.add(as_buffer(bytes(size)), bytes([i]) * 16, size, "raw")
        at += -at % BLOCK if size >= BIG else 0
        assert place.offset == at
        at += size
    writer.close()


@given(chunks=CHUNKS.filter(bool), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.integers(0, 300))
def test_a_damaged_footer_is_told(chunks: list[tuple[bytes, int, str]], at: float, bit: int, cut: int) -> None:
    tier = Memory()
    rows = written(tier, chunks)
    (key,) = tier.list("")
    data = bytearray(to_bytes(tier.get(key)))
    end = max(row.place.offset + row.place.stored for row in rows)
    data[end + int(at * (len(data) - end))] ^= 1 << bit
    tier.put("packs/run/flipped", as_buffer(bytes(data)))
    with pytest.raises(FormatError, match="packs/run/flipped"):
        read_footer(tier, "packs/run/flipped")
    whole = to_bytes(tier.get(key))
    tier.put("packs/run/cut", as_buffer(whole[: max(0, len(whole) - 1 - cut)]))
    with pytest.raises(FormatError, match="packs/run/cut"):
        read_footer(tier, "packs/run/cut")


@given(data=st.binary(max_size=300), sound=st.booleans())
def test_no_bytes_are_a_pack_by_chance(data: bytes, sound: bool) -> None:
    tier = Memory()
    end = len(data).to_bytes(4, "little") + checksum(data) + pack.MAGIC if sound else b""
    tier.put("packs/run/x", as_buffer(data + end))
    with pytest.raises(FormatError):
        read_footer(tier, "packs/run/x")


def test_a_footer_that_points_outside_is_refused() -> None:
    tier = Memory()
    row = FooterRow(b"d" * 16, 5, pack.ChunkPlace("packs/run/x", 3, 8, "raw"))
    tier.put("packs/run/x", as_buffer(bytes(10) + pack.encode_footer([pack.FooterRows.of_one(row)])))
    with pytest.raises(FormatError, match="outside the pack"):
        read_footer(tier, "packs/run/x")
    with pytest.raises(NotFound):
        read_footer(tier, "packs/run/y")


def test_an_abort_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MAX_PACK", 3 * BLOCK)
    tier = Memory()
    writer = PackWriter(tier, "run", 1)
    for i in range(9):
        writer.add(as_buffer(bytes(2000)), bytes([i]) * 16, 2000, "raw")
    assert len(list(tier.list(""))) >= 1
    writer.abort()
    assert list(tier.list("")) == []
    writer.abort()


def test_an_abort_finds_a_pack_whose_close_was_not_answered() -> None:
    tier = Faulty(Memory(), Fault("close", 1, TierUnavailable("no answer"), after=True))
    writer = PackWriter(tier, "run", 1)
    writer.add(as_buffer(b"abc"), b"d" * 16, 3, "raw")
    with pytest.raises(TierUnavailable):
        writer.close()
    assert len(list(tier.inner.list(""))) == 1
    writer.abort()
    assert list(tier.inner.list("")) == []


def test_the_lease_is_given_back_when_no_pack_can_be_begun() -> None:
    tier = Faulty(Memory(), Fault("writer", 0, AlreadyExists("taken")))
    released: list[int] = []
    writer = PackWriter(tier, "run", 1)
    with pytest.raises(AlreadyExists):
        writer.add(as_buffer(b"abc"), b"d" * 16, 3, "raw", lambda: released.append(1))
    assert released == [1]


def test_mends_are_known_by_their_name_alone(tmp_path: Path) -> None:
    tier = Memory()
    for run in ("run", "a-mend-1", "mend"):
        plain, mend = PackWriter(tier, run, 1), PackWriter(tier, run, 1, label=MEND)
        for writer, expected in ((plain, False), (mend, True)):
            place = writer.add(as_buffer(b"x"), b"d" * 16, 1, "raw")
            writer.close()
            assert is_mend(place.object) == expected
