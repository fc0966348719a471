"""Tier runs and catalogues: what can be built on, what is dropped, and whose version is the newer one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierstate.engine.packs.keys import is_mend
from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.repair.check_chunks import Depth
from tierstate.engine.repair.verify import Verifier
from tierstate.engine.restore.fetch import Fetch, RepairWriter
from tierstate.engine.store.catalog import Holding, RunCatalog
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array, digest_array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import AccessDenied, CommitUnknown, Damaged, FormatError, NotFound, TierUnavailable
from tierstate.manifest.format.layout import ChunkPlace, Layout, LayoutBuilder
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.retention import RetentionPolicy
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.testing import Fault, Faulty
from tierstate.tiers.testing.faulty import FaultyCall

CHUNK = 4096


def digests(*pieces: bytes) -> Array:
    return digest_array([checksum(piece) for piece in pieces])


def reusable(tier_run: TierRun, wanted: Array) -> list[ChunkPlace | None]:
    """Where the tier run has these chunks, if it does."""
    draft, rows = LayoutBuilder(len(wanted)), np.arange(len(wanted))
    found = tier_run.reuse(draft, rows, wanted)
    layout = draft.build(dict.fromkeys(draft.objects(), 1 << 40))
    assert layout.present.tolist() == found.tolist()
    return [layout.place(row) for row in rows.tolist()]


def record(tier: Tier, seq: int, pieces: dict[str, bytes | ChunkPlace], *, when: float = 1.0) -> Record:
    """A version of leaves of a few bytes each, in a pack of its own where no place is given."""
    writer, places, found = PackWriter(tier, "run", seq), [], []
    for piece in pieces.values():
        data = piece if isinstance(piece, bytes) else b"kept"
        place = (
            piece if isinstance(piece, ChunkPlace) else writer.add(as_buffer(data), checksum(data), len(data), "raw")
        )
        places.append(place)
        found.append(data)
    writer.close()
    sizes = {place.object: tier.size(place.object) for place in places}
    leaves = [Leaf((name,), Spec("bytes", shape=(len(d),))) for name, d in zip(pieces, found, strict=True)]
    shards = [ShardRow(i, 0, Box.whole((len(d),))) for i, d in enumerate(found)]
    head = Head("run", seq, 10 * seq, when, chunk=CHUNK)
    version = Version.build(head, leaves, shards, digests(*found))
    return Record(version, Layout.build(places, sizes), {"id": f"{seq}-{when}"})


def filled(tier: Tier, seqs: int, keep: RetentionPolicy | None = None) -> TierRun:
    tier_run = TierRun(tier, "run", keep)
    for seq in range(1, seqs + 1):
        tier_run.publish(record(tier, seq, {"a": b"a%d" % seq, "b": b"same"}))
    return tier_run


def names(tier: Tier, prefix: str = "packs/") -> list[str]:
    return list(tier.list(prefix))


# Reuse


def test_chunks_of_the_newest_record_are_found_and_no_others() -> None:
    tier = Memory()
    filled(tier, 2)
    for tier_run in (TierRun(tier, "run"), TierRun(tier, "run")):
        one, two, three = reusable(tier_run, digests(b"a2", b"a1", b"same"))
        assert one is not None
        assert two is None, "an older record may be dropped"
        assert three is not None
        out = tier.get(one.object)[one.offset : one.offset + one.stored]
        assert to_bytes(out) == b"a2"
    assert reusable(TierRun(tier, "other"), digests(b"a2")) == [None]
    assert reusable(TierRun(tier, "run"), digests()) == []


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_pack_that_is_gone_or_short_is_not_built_on(damage: str) -> None:
    tier = Memory()
    filled(tier, 1)
    (key,) = names(tier)
    data = tier.get(key)
    tier.delete(key)
    if damage == "truncate":
        tier.put(key, data[:-1])
    assert reusable(TierRun(tier, "run"), digests(b"a1", b"same")) == [None, None]


def test_a_pack_that_was_found_damaged_is_not_built_on() -> None:
    tier = Memory()
    tier_run = filled(tier, 1)
    tier_run.distrust(names(tier)[0])
    assert reusable(tier_run, digests(b"a1")) == [None]
    tier_run.look_again()
    assert reusable(tier_run, digests(b"a1")) == [None], "looking again does not make it whole"


def test_looking_again_finds_what_another_writer_did() -> None:
    tier = Memory()
    one, two = filled(tier, 1), TierRun(tier, "run", RetentionPolicy(last=1))
    two.publish(record(tier, 2, {"a": b"a2"}))
    two.retire()
    assert len(names(tier)) == 1
    assert reusable(one, digests(b"a1"))[0] is not None, "it does not know yet"
    one.look_again()
    assert reusable(one, digests(b"a1")) == [None]
    assert reusable(one, digests(b"a2"))[0] is not None


def test_an_unreadable_newest_record_is_passed_over_and_its_number_stays_taken() -> None:
    tier = Memory()
    filled(tier, 2)
    tier.put("versions/run/000000000003", as_buffer(b"not a record"))
    tier_run = TierRun(tier, "run")
    newest = tier_run.newest()
    assert newest is not None
    assert newest.version.head.seq == 2
    assert tier_run.highest_seq() == 3
    # Whose it is cannot be told, and is no reason to take it away.
    with pytest.raises(CommitUnknown):
        tier_run.publish(record(tier, 3, {"a": b"a3"}))
    assert to_bytes(tier.get("versions/run/000000000003")) == b"not a record"


def test_a_tier_that_does_not_answer_is_not_taken_for_an_empty_one() -> None:
    tier = Faulty(Memory())
    filled(tier, 1)
    tier.add(Fault("read", 0, TierUnavailable("no answer")))
    tier_run = TierRun(tier, "run")
    with pytest.raises(TierUnavailable):
        reusable(tier_run, digests(b"a1"))
    tier.heal()
    assert reusable(tier_run, digests(b"a1"))[0] is not None


def building_on_the_first(tier: Tier) -> tuple[TierRun, Record]:
    """A run whose newest version is the first, and a third one that names the first one's pack."""
    tier_run = TierRun(tier, "run")
    tier_run.publish(record(tier, 1, {"kept": b"kept"}))
    (shared,) = reusable(tier_run, digests(b"kept"))
    assert shared is not None
    return tier_run, record(tier, 3, {"a": b"a3", "kept": shared})


def test_a_version_is_taken_back_when_what_it_builds_on_was_dropped_meanwhile() -> None:
    tier = Memory()
    tier_run, coming = building_on_the_first(tier)
    other = TierRun(tier, "run", RetentionPolicy(last=1))
    other.publish(record(tier, 2, {"a": b"a2"}))
    assert other.retire().drop == (1,)
    with pytest.raises(NotFound, match="version 1, which this save builds on, was dropped by another process"):
        tier_run.publish(coming)
    assert tier_run.log.seqs() == [2]


@pytest.mark.parametrize(("operation", "at"), [("list", 2), ("delete", 1)])
def test_where_it_cannot_be_taken_back_its_packs_must_stay(operation: FaultyCall, at: int) -> None:
    tier = Faulty(Memory())
    tier_run, coming = building_on_the_first(tier)
    other = TierRun(tier, "run", RetentionPolicy(last=1))
    other.publish(record(tier, 2, {"a": b"a2"}))
    assert other.retire().drop == (1,)
    tier.add(Fault(operation, at, AccessDenied("no")))
    with pytest.raises(CommitUnknown, match="was dropped by another process, and the record of version 3 stays"):
        tier_run.publish(coming)


def test_a_version_stays_when_only_the_record_that_it_builds_on_was_dropped() -> None:
    tier = Memory()
    tier_run, coming = building_on_the_first(tier)
    tier_run.log.forget(1)
    tier_run.publish(coming)
    assert tier_run.log.seqs() == [3]


# Retention


def test_shared_packs_stay_as_long_as_anybody_names_them() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1))
    tier_run.publish(record(tier, 1, {"a": b"a1", "kept": b"kept"}))
    (shared,) = reusable(tier_run, digests(b"kept"))
    assert shared is not None
    tier_run.publish(record(tier, 2, {"a": b"a2", "kept": shared}))
    assert tier_run.retire().drop == (1,)
    assert len(names(tier)) == 2
    tier_run.publish(record(tier, 3, {"a": b"a3"}))
    assert tier_run.retire().drop == (2,)
    assert len(names(tier)) == 1
    assert tier_run.retire().drop == ()


def test_what_is_in_use_stays_for_now_and_one_place_can_be_kept_free() -> None:
    tier = Memory()
    tier_run = filled(tier, 3, RetentionPolicy(last=1))
    assert tier_run.retire(in_use={1}).drop == (2,)
    assert tier_run.retire().drop == (1,)
    tier_run = filled_more(tier_run, 4, 6, RetentionPolicy(last=3))
    assert tier_run.retire(room_for_one=True).drop == (3, 4)
    assert TierRun(tier, "run").retire().drop == ()
    assert TierRun(tier, "run", RetentionPolicy(all=True)).retire().drop == ()


def filled_more(tier_run: TierRun, first: int, last: int, keep: RetentionPolicy) -> TierRun:
    for seq in range(first, last + 1):
        tier_run.publish(record(tier_run.tier, seq, {"a": b"a%d" % seq}))
    return TierRun(tier_run.tier, "run", keep)


def test_a_failed_delete_is_made_up_for() -> None:
    tier = Faulty(Memory())
    tier_run = filled(tier, 2, RetentionPolicy(last=1))
    tier.add(Fault("delete", 2, TierUnavailable("no answer")))
    with pytest.raises(TierUnavailable):
        tier_run.retire()
    assert len(names(tier)) == 2
    tier_run.retire()
    assert len(names(tier)) == 1
    tier.add(Fault("delete", 1, TierUnavailable("no answer")))
    tier_run.publish(record(tier, 3, {"a": b"a3"}))
    with pytest.raises(TierUnavailable):
        tier_run.retire()
    assert tier_run.log.seqs() == [2, 3], "the record stayed, and so does its pack"
    assert tier_run.retire().drop == (2,)
    assert len(names(tier)) == 1


# Mends


def mended(tier: Tier) -> tuple[TierRun, Record]:
    """A tier run whose only pack is damaged, and mended from elsewhere."""
    tier_run = filled(tier, 1)
    found = tier_run.log.read(1)
    (key,) = names(tier)
    tier.delete(key)
    mender = RepairWriter(found.version, [Holding(tier_run, found.layout)])
    for row, piece in enumerate((b"a1", b"same")):
        mender(0, row, as_buffer(piece))
        mender(0, row, as_buffer(piece))
    assert mender.close() == {tier.name: 2}
    return tier_run, found


def test_a_mended_chunk_is_found_at_once_and_by_others() -> None:
    tier = Memory()
    first, found = mended(tier)
    (key,) = names(tier)
    assert is_mend(key)
    for tier_run in (first, TierRun(tier, "run")):
        got: dict[int, bytes] = {}
        arena = Arena(4 * PAGE, PAGE)
        fetch = Fetch(found.version, [Holding(tier_run, found.layout)], arena)
        fetch.run([0, 1], lambda row, raw, _slab, got=got: got.__setitem__(row, to_bytes(raw)))
        assert got == {0: b"a1", 1: b"same"}
        assert arena.in_flight == 0
        places = reusable(tier_run, digests(b"a1", b"same"))
        assert {p.object for p in places if p} == {key}


def test_mends_from_before_are_not_forgotten_over_new_ones() -> None:
    tier = Memory()
    _, found = mended(tier)
    tier_run = TierRun(tier, "run")
    mender = RepairWriter(found.version, [Holding(tier_run, found.layout)])
    mender(0, 0, as_buffer(b"a1"))
    mender.close()
    assert tier_run.mended(checksum(b"same")) is not None
    assert tier_run.mended(checksum(b"a1")) is not None


def test_a_damaged_mend_is_passed_over() -> None:
    tier = Memory()
    mended(tier)
    (key,) = names(tier)
    data = tier.get(key)
    tier.delete(key)
    tier.put(key, data[:-3])
    assert TierRun(tier, "run").mended(checksum(b"same")) is None


@pytest.mark.parametrize("operation", ["writer", "append", "close"])
def test_a_mender_that_cannot_write_gives_up_and_leaves_nothing(operation: Any) -> None:
    tier = Faulty(Memory())
    tier_run = filled(tier, 1)
    found, before = tier_run.log.read(1), names(tier)
    tier.add(Fault(operation, 0, TierUnavailable("no answer")))
    mender = RepairWriter(found.version, [Holding(tier_run, found.layout)])
    mender(0, 0, as_buffer(b"a1"))
    mender(0, 1, as_buffer(b"same"))
    assert mender.close() == {}
    assert names(tier) == before
    assert tier_run.mended(checksum(b"a1")) is None


# Catalogues


def test_two_versions_of_one_number_are_both_there_the_later_one_first() -> None:
    one, two = Memory(), Memory()
    one.name, two.name = "one", "two"
    tier_runs = [TierRun(one, "run"), TierRun(two, "run")]
    tier_runs[0].publish(record(one, 1, {"a": b"old"}, when=5.0))
    tier_runs[1].publish(record(two, 1, {"a": b"new"}, when=6.0))
    (place,) = RunCatalog(tier_runs).newest_first()
    assert [entry.tiers for entry in place.entries] == [("two",), ("one",)]
    assert place.problems == ()


def test_one_version_in_two_tiers_is_one_entry_nearest_first() -> None:
    one, two = Memory(), Memory()
    one.name, two.name = "one", "two"
    tier_runs = [TierRun(one, "run"), TierRun(two, "run")]
    for tier_run in tier_runs:
        tier_run.publish(record(tier_run.tier, 1, {"a": b"x"}))
    tier_runs[1].publish(record(two, 2, {"a": b"y"}))
    two.put("versions/run/000000000003", as_buffer(b"?"))
    places = list(RunCatalog(tier_runs).newest_first())
    assert [place.seq for place in places] == [3, 2, 1]
    assert [[entry.tiers for entry in place.entries] for place in places] == [[], [("two",)], [("one", "two")]]
    ((name, error),) = places[0].problems
    assert name == "two"
    assert isinstance(error, FormatError)


def test_a_tier_that_cannot_be_listed_is_said_to_be_unreachable() -> None:
    good, bad = Memory(), Faulty(Memory(), Fault("list", 0, TierUnavailable("gone")))
    good.name, bad.name = "good", "bad"
    tier_run = filled(good, 1)
    catalog = RunCatalog([TierRun(bad, "run"), tier_run])
    assert [place.seq for place in catalog.newest_first()] == [1]
    assert set(catalog.unreachable) == {"bad"}
    report = Verifier(catalog, Arena(4 * PAGE, PAGE)).run()
    assert not report.ok
    assert report.problems == []
    assert report.unreachable == {"bad": "gone"}


def test_verify_reads_a_shared_chunk_once_and_reports_progress() -> None:
    tier, seen = Memory(), []
    tier_run = TierRun(tier, "run")
    tier_run.publish(record(tier, 1, {"a": b"a1", "kept": b"kept"}))
    (shared,) = reusable(tier_run, digests(b"kept"))
    assert shared is not None
    tier_run.publish(record(tier, 2, {"a": b"a2", "kept": shared}))
    arena = Arena(4 * PAGE, PAGE)
    report = Verifier(RunCatalog([tier_run]), arena, Depth(data=True), progress=seen.append).run()
    assert (report.versions, report.chunks, report.nbytes, report.ok) == (2, 3, 8, True)
    assert sum(seen) == 8
    assert arena.in_flight == 0


# Fetching


def test_a_fetch_goes_from_tier_to_tier_chunk_by_chunk() -> None:
    """Each tier has another chunk damaged: together they have everything."""
    tiers, holdings = [Memory(), Memory(), Memory()], []
    pieces = {str(i): bytes([i]) * 100 for i in range(3)}
    made = None
    for i, tier in enumerate(tiers):
        tier.name = f"tier{i}"
        tier_run = TierRun(tier, "run")
        tier_run.publish(record(tier, 1, dict(pieces)))
        made = tier_run.log.read(1)
        (key,) = names(tier)
        data = tier.get(key)
        data = data.clone()
        for j in range(3):
            if j != i:
                data[100 * j + 50] ^= 1
        tier.delete(key)
        tier.put(key, data)
        holdings.append(Holding(tier_run, made.layout))
    assert made is not None
    got: dict[int, bytes] = {}
    mended: list[tuple[int, int]] = []
    arena = Arena(4 * PAGE, PAGE)
    fetch = Fetch(made.version, holdings, arena, workers=3, mended=lambda i, row, _raw: mended.append((i, row)))
    fetch.run([0, 1, 2], lambda row, raw, _slab: got.__setitem__(row, to_bytes(raw)))
    assert got == {i: bytes([i]) * 100 for i in range(3)}
    assert sorted(mended) == [(0, 1), (0, 2)], "the nearest tier is mended"
    assert arena.in_flight == 0
    with pytest.raises(Damaged, match=r'leaf "1" of version 1 .*tier0: .*digest'):
        Fetch(made.version, holdings[:1], arena).run([1], lambda *_: None)
    assert arena.in_flight == 0


def test_an_error_of_the_sink_stops_the_fetch_and_gives_the_slabs_back() -> None:
    tier = Memory()
    tier_run = TierRun(tier, "run")
    tier_run.publish(record(tier, 1, {str(i): bytes([i]) * 4000 for i in range(30)}))
    found, arena = tier_run.log.read(1), Arena(4 * PAGE, PAGE)

    def sink(row: int, _raw: torch.Tensor, _slab: Any) -> None:
        if row == 7:
            raise ZeroDivisionError

    for workers in (1, 4):
        with pytest.raises(ZeroDivisionError):
            Fetch(found.version, [Holding(tier_run, found.layout)], arena, workers=workers).run(list(range(30)), sink)
        assert arena.in_flight == 0
    assert np.asarray(found.layout.present).all()


def test_a_tier_is_looked_at_again_while_a_capture_looks_at_packs() -> None:
    """A capture notes what it finds of packs without a lock; if that ended the tier's thread, no save would go on."""
    tier_run = TierRun(Memory(), "run")

    class Growing(dict[str, bool]):
        def items(self) -> Any:
            for item in super().items():
                self[f"{item[0]}+"] = True
                yield item

    tier_run._sound = Growing(whole=True, damaged=False)
    tier_run.look_again()
    assert tier_run._sound == {"damaged": False}
