"""What lies beside records: leases, tags, indexes and footers of any bytes are taken or refused, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import json_values, small_record

from tierstate.engine.packs.pack import MAGIC, PackWriter
from tierstate.engine.repair.rebuild import rebuild
from tierstate.engine.store.index import Summaries
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.layout import DeltaBase
from tierstate.manifest.format.record import (
    MAX_INDEX_BYTES,
    Summary,
    decode_index,
    decode_sections,
    encode_index,
    encode_sections,
)
from tierstate.manifest.history.leases import MAX_LEASE_BYTES, Leases, this_process
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.tags import MAX_TAG_BYTES, TagReader, read_tag
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.policy.policy import Policy

LIMIT = 8 << 20
NESTS = st.integers(1, 5000).map(lambda n: b"[" * n)
bodies = st.one_of(
    st.binary(max_size=100),
    NESTS,
    json_values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"9" * 5000, b"1e999", b'{"seq":1e999,"id":"x"}', b'{"seq":true,"id":""}', b'{"seq":[],"id":1}']),
)
changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=9), st.integers(0, 9)), min_size=1, max_size=3)


@contextlib.contextmanager
def bounded(data: bytes) -> Iterator[None]:
    """Fails where more memory is taken than the bytes account for."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LIMIT + 40 * len(data)
    finally:
        tracemalloc.stop()


def changed(data: bytes, how: list[tuple[int, bytes, int]]) -> bytes:
    """The bytes with a few of them replaced."""
    found = bytearray(data)
    for at, new, old in how:
        at %= len(found) + 1
        found[at : at + old] = new
    return bytes(found)


class Unread(Memory):
    """A tier with an object that is said to be long, and must not be read."""

    def size(self, key: str) -> int:
        return 1 << 40

    def read(self, key: str, ranges: Any) -> None:
        raise AssertionError(f"{key} was read")

    def get(self, key: str) -> Buffer:
        raise AssertionError(f"{key} was read")


HOLDER = this_process()


@given(
    bodies
    | st.tuples(st.sampled_from([*HOLDER, "record"]), json_values).map(
        lambda said: json.dumps(HOLDER | {said[0]: said[1]}).encode()
    )
)
def test_a_lease_stands_or_does_not(data: bytes) -> None:
    tier = Memory()
    tier.put("leases/run/000000000003-read-abc", as_buffer(data))
    with bounded(data):
        held = Leases(tier, "run").look(lambda _key: None)
    assert len(held.live) + len(held.gone) == 1
    assert not held.odd
    assert all(len(lease.reason) < 300 for lease in held.live)


@given(st.from_regex(r"[0-9a-zA-Z_][0-9a-zA-Z._=+@,\-]{0,60}", fullmatch=True))
def test_a_key_among_leases_that_is_none_is_told(name: str) -> None:
    tier = Memory()
    tier.put(f"leases/run/{name}", as_buffer(b"{}"))
    held = Leases(tier, "run").look(lambda _key: None)
    assert len(held.live) + len(held.odd) == 1


def test_what_is_too_long_is_not_read() -> None:
    tier = Unread()
    for key in ("leases/run/000000000003-read-abc", "tags/run/best@000001", "index/run/000000000003-00000000"):
        tier.put(key, as_buffer(b"x"))
    (lease,) = Leases(tier, "run").look(lambda _key: None).live
    assert lease.record is None
    assert max(MAX_LEASE_BYTES, MAX_TAG_BYTES, MAX_INDEX_BYTES) < 1 << 40
    with pytest.raises(FormatError, match="too many for a tag"):
        read_tag(tier, "run", "best", 1)
    Summaries(tier, "run").write()  # which looks into those that are there


@given(bodies)
def test_a_tag_names_a_version_or_is_refused(data: bytes) -> None:
    tier = Memory()
    tier.put("tags/run/best@000001", as_buffer(data))
    with bounded(data), contextlib.suppress(FormatError):
        found = read_tag(tier, "run", "best", 1)
        named = TagReader(tier, "run").by_version()
        assert named == ({} if found is None else {found.seq: ("best",)})


WHOLE = bytes(
    decode_sections(memoryview(encode_index("run", [Summary.of(small_record(), n) for n in range(3)])))["index"]
)


@given(changes)
def test_an_index_that_was_changed_is_one_or_refused(how: list[tuple[int, bytes, int]]) -> None:
    data = changed(WHOLE, how)
    with bounded(data), contextlib.suppress(FormatError):
        for summary in decode_index(memoryview(encode_sections({"index": data})), "run"):
            assert json.dumps([summary.parent, summary.commit, dict(summary.metadata), summary.lossy])
            assert len({*summary.packs}) <= len(data)


RECORD = small_record()
RUN = RECORD.version.head.run
POLICY = Policy.parse("{version: 1, tiers: {memory: {type: memory}, disk: {type: nvme, path: /nowhere}}}")


def pack() -> tuple[str, bytes, bytes]:
    """A pack with a version's chunks, a delta and a copy of the version: its key, all before its footer, its footer."""
    tier = Memory()
    writer = PackWriter(tier, RUN, RECORD.version.head.seq)
    for digest, nbytes in zip(RECORD.version.digests, RECORD.version.chunk_nbytes.tolist(), strict=True):
        key, *_ = writer.add(as_buffer(bytes(nbytes)), digest.tobytes(), nbytes, "raw")
    writer.add(as_buffer(bytes(8)), bytes(16), 48, "delta", base=DeltaBase(key, 0, 48, "raw", bytes(15) + b"b"))
    writer.close(RECORD.version.data)
    (key,) = tier.list("packs/")
    data = to_bytes(tier.get(key))
    end = len(data) - 28 - int.from_bytes(data[-28:-24], "little")
    return key, data[:end], data[end:-28]


KEY, BODY, FOOTER = pack()


@given(changes | st.just([]))
def test_records_are_made_again_of_a_changed_footer_or_not(how: list[tuple[int, bytes, int]]) -> None:
    footer = changed(FOOTER, how)
    tier = Memory()
    tier.name = "memory"
    tier.put(KEY, as_buffer(BODY + footer + len(footer).to_bytes(4, "little") + checksum(footer) + MAGIC))
    with bounded(BODY + footer):
        found = rebuild([TierRun(tier, RUN)], "memory", POLICY, partial=True)
    made = [version for version in found.versions if version.rebuilt]
    log = Log(tier, RUN)
    assert log.seqs() == [version.seq for version in made]
    if how == []:
        assert made[0].found == made[0].chunks
    for seq in log.seqs():
        layout = log.read(seq).layout
        places = [place for row in range(len(layout.object)) if (place := layout.place(row))]
        assert all(place.offset + place.stored <= tier.size(place.object) for place in places)
