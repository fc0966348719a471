"""Shelves and catalogues: what can be built on, what is dropped, and whose version is the newer one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import CommitUnknown, Damaged, FormatError, TierUnavailable
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array, as_array
from tierstate.manifest.layout import Draft, Layout, Place
from tierstate.manifest.leaf import Leaf, Spec
from tierstate.manifest.record import Record
from tierstate.manifest.retention import Keep
from tierstate.manifest.version import ShardRow, Version
from tierstate.tiers.arena import PAGE, Arena
from tierstate.tiers.base import Tier
from tierstate.tiers.catalog import Catalog
from tierstate.tiers.fetch import Fetch, Holding
from tierstate.tiers.memory import Memory
from tierstate.tiers.mend import Mender
from tierstate.tiers.packs import PackWriter, is_mend
from tierstate.tiers.shelf import Shelf
from tierstate.tiers.testing import Fault, Faulty
from tierstate.tiers.verify import Depth, Verifier

CHUNK = 4096


def digests(*pieces: bytes) -> Array:
    return as_array([checksum(piece) for piece in pieces])


def reusable(shelf: Shelf, wanted: Array) -> list[Place | None]:
    """Where the shelf has these chunks, if it does."""
    draft, rows = Draft(len(wanted)), np.arange(len(wanted))
    found = shelf.reuse(draft, rows, wanted)
    layout = draft.build(dict.fromkeys(draft.objects(), 1 << 40))
    assert layout.present.tolist() == found.tolist()
    return [layout.place(row) for row in rows.tolist()]


def record(tier: Tier, seq: int, pieces: dict[str, bytes | Place], *, when: float = 1.0) -> Record:
    """A version of leaves of a few bytes each, in a pack of its own where no place is given."""
    writer, places, found = PackWriter(tier, "run", seq), [], []
    for piece in pieces.values():
        data = piece if isinstance(piece, bytes) else b"kept"
        place = piece if isinstance(piece, Place) else writer.add(as_buffer(data), checksum(data), len(data), "raw")
        places.append(place)
        found.append(data)
    writer.close()
    sizes = {place.object: tier.size(place.object) for place in places}
    leaves = [Leaf((name,), Spec("bytes", shape=(len(d),))) for name, d in zip(pieces, found, strict=True)]
    shards = [ShardRow(i, 0, Box.whole((len(d),))) for i, d in enumerate(found)]
    head = Head("run", seq, 10 * seq, when, chunk=CHUNK)
    version = Version.build(head, leaves, shards, digests(*found))
    return Record(version, Layout.build(places, sizes), {"id": f"{seq}-{when}"})


def filled(tier: Tier, seqs: int, keep: Keep | None = None) -> Shelf:
    shelf = Shelf(tier, "run", keep)
    for seq in range(1, seqs + 1):
        shelf.publish(record(tier, seq, {"a": b"a%d" % seq, "b": b"same"}))
    return shelf


def names(tier: Tier, prefix: str = "packs/") -> list[str]:
    return list(tier.list(prefix))


# Reuse


def test_chunks_of_the_newest_record_are_found_and_no_others() -> None:
    tier = Memory()
    filled(tier, 2)
    for shelf in (Shelf(tier, "run"), Shelf(tier, "run")):
        one, two, three = reusable(shelf, digests(b"a2", b"a1", b"same"))
        assert one is not None
        assert two is None, "an older record may be dropped"
        assert three is not None
        out = tier.get(one.object)[one.offset : one.offset + one.stored]
        assert to_bytes(out) == b"a2"
    assert reusable(Shelf(tier, "other"), digests(b"a2")) == [None]
    assert reusable(Shelf(tier, "run"), digests()) == []


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_pack_that_is_gone_or_short_is_not_built_on(damage: str) -> None:
    tier = Memory()
    filled(tier, 1)
    (key,) = names(tier)
    data = tier.get(key)
    tier.delete(key)
    if damage == "truncate":
        tier.put(key, data[:-1])
    assert reusable(Shelf(tier, "run"), digests(b"a1", b"same")) == [None, None]


def test_a_pack_that_was_found_damaged_is_not_built_on() -> None:
    tier = Memory()
    shelf = filled(tier, 1)
    shelf.distrust(names(tier)[0])
    assert reusable(shelf, digests(b"a1")) == [None]
    shelf.look_again()
    assert reusable(shelf, digests(b"a1")) == [None], "looking again does not make it whole"


def test_looking_again_finds_what_another_writer_did() -> None:
    tier = Memory()
    one, two = filled(tier, 1), Shelf(tier, "run", Keep(last=1))
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
    shelf = Shelf(tier, "run")
    newest = shelf.newest()
    assert newest is not None
    assert newest.version.head.seq == 2
    assert shelf.highest_seq() == 3
    # Whose it is cannot be told, and is no reason to take it away.
    with pytest.raises(CommitUnknown):
        shelf.publish(record(tier, 3, {"a": b"a3"}))
    assert to_bytes(tier.get("versions/run/000000000003")) == b"not a record"


def test_a_tier_that_does_not_answer_is_not_taken_for_an_empty_one() -> None:
    tier = Faulty(Memory())
    filled(tier, 1)
    tier.add(Fault("read", 0, TierUnavailable("no answer")))
    shelf = Shelf(tier, "run")
    with pytest.raises(TierUnavailable):
        reusable(shelf, digests(b"a1"))
    tier.heal()
    assert reusable(shelf, digests(b"a1"))[0] is not None


# Retention


def test_shared_packs_stay_as_long_as_anybody_names_them() -> None:
    tier = Memory()
    shelf = Shelf(tier, "run", Keep(last=1))
    shelf.publish(record(tier, 1, {"a": b"a1", "kept": b"kept"}))
    (shared,) = reusable(shelf, digests(b"kept"))
    assert shared is not None
    shelf.publish(record(tier, 2, {"a": b"a2", "kept": shared}))
    assert shelf.retire().drop == (1,)
    assert len(names(tier)) == 2
    shelf.publish(record(tier, 3, {"a": b"a3"}))
    assert shelf.retire().drop == (2,)
    assert len(names(tier)) == 1
    assert shelf.retire().drop == ()


def test_what_is_in_use_stays_for_now_and_one_place_can_be_kept_free() -> None:
    tier = Memory()
    shelf = filled(tier, 3, Keep(last=1))
    assert shelf.retire(in_use={1}).drop == (2,)
    assert shelf.retire().drop == (1,)
    shelf = filled_more(shelf, 4, 6, Keep(last=3))
    assert shelf.retire(room_for_one=True).drop == (3, 4)
    assert Shelf(tier, "run").retire().drop == ()
    assert Shelf(tier, "run", Keep(all=True)).retire().drop == ()


def filled_more(shelf: Shelf, first: int, last: int, keep: Keep) -> Shelf:
    for seq in range(first, last + 1):
        shelf.publish(record(shelf.tier, seq, {"a": b"a%d" % seq}))
    return Shelf(shelf.tier, "run", keep)


def test_a_failed_delete_is_made_up_for() -> None:
    tier = Faulty(Memory())
    shelf = filled(tier, 2, Keep(last=1))
    tier.add(Fault("delete", 2, TierUnavailable("no answer")))
    with pytest.raises(TierUnavailable):
        shelf.retire()
    assert len(names(tier)) == 2
    shelf.retire()
    assert len(names(tier)) == 1
    tier.add(Fault("delete", 1, TierUnavailable("no answer")))
    shelf.publish(record(tier, 3, {"a": b"a3"}))
    with pytest.raises(TierUnavailable):
        shelf.retire()
    assert shelf.log.seqs() == [2, 3], "the record stayed, and so does its pack"
    assert shelf.retire().drop == (2,)
    assert len(names(tier)) == 1


# Mends


def mended(tier: Tier) -> tuple[Shelf, Record]:
    """A shelf whose only pack is damaged, and mended from elsewhere."""
    shelf = filled(tier, 1)
    found = shelf.log.read(1)
    (key,) = names(tier)
    tier.delete(key)
    mender = Mender(found.version, [Holding(shelf, found.layout)])
    for row, piece in enumerate((b"a1", b"same")):
        mender(0, row, as_buffer(piece))
        mender(0, row, as_buffer(piece))
    assert mender.close() == {tier.name: 2}
    return shelf, found


def test_a_mended_chunk_is_found_at_once_and_by_others() -> None:
    tier = Memory()
    first, found = mended(tier)
    (key,) = names(tier)
    assert is_mend(key)
    for shelf in (first, Shelf(tier, "run")):
        got: dict[int, bytes] = {}
        arena = Arena(4 * PAGE, PAGE)
        fetch = Fetch(found.version, [Holding(shelf, found.layout)], arena)
        fetch.run([0, 1], lambda row, raw, _slab, got=got: got.__setitem__(row, to_bytes(raw)))
        assert got == {0: b"a1", 1: b"same"}
        assert arena.in_flight == 0
        places = reusable(shelf, digests(b"a1", b"same"))
        assert {p.object for p in places if p} == {key}


def test_mends_from_before_are_not_forgotten_over_new_ones() -> None:
    tier = Memory()
    _, found = mended(tier)
    shelf = Shelf(tier, "run")
    mender = Mender(found.version, [Holding(shelf, found.layout)])
    mender(0, 0, as_buffer(b"a1"))
    mender.close()
    assert shelf.mended(checksum(b"same")) is not None
    assert shelf.mended(checksum(b"a1")) is not None


def test_a_damaged_mend_is_passed_over() -> None:
    tier = Memory()
    mended(tier)
    (key,) = names(tier)
    data = tier.get(key)
    tier.delete(key)
    tier.put(key, data[:-3])
    assert Shelf(tier, "run").mended(checksum(b"same")) is None


@pytest.mark.parametrize("operation", ["writer", "append", "close"])
def test_a_mender_that_cannot_write_gives_up_and_leaves_nothing(operation: Any) -> None:
    tier = Faulty(Memory())
    shelf = filled(tier, 1)
    found, before = shelf.log.read(1), names(tier)
    tier.add(Fault(operation, 0, TierUnavailable("no answer")))
    mender = Mender(found.version, [Holding(shelf, found.layout)])
    mender(0, 0, as_buffer(b"a1"))
    mender(0, 1, as_buffer(b"same"))
    assert mender.close() == {}
    assert names(tier) == before
    assert shelf.mended(checksum(b"a1")) is None


# Catalogues


def test_two_versions_of_one_number_are_both_there_the_later_one_first() -> None:
    one, two = Memory(), Memory()
    one.name, two.name = "one", "two"
    shelves = [Shelf(one, "run"), Shelf(two, "run")]
    shelves[0].publish(record(one, 1, {"a": b"old"}, when=5.0))
    shelves[1].publish(record(two, 1, {"a": b"new"}, when=6.0))
    (place,) = Catalog(shelves).newest_first()
    assert [entry.tiers for entry in place.entries] == [("two",), ("one",)]
    assert place.problems == ()


def test_one_version_in_two_tiers_is_one_entry_nearest_first() -> None:
    one, two = Memory(), Memory()
    one.name, two.name = "one", "two"
    shelves = [Shelf(one, "run"), Shelf(two, "run")]
    for shelf in shelves:
        shelf.publish(record(shelf.tier, 1, {"a": b"x"}))
    shelves[1].publish(record(two, 2, {"a": b"y"}))
    two.put("versions/run/000000000003", as_buffer(b"?"))
    places = list(Catalog(shelves).newest_first())
    assert [place.seq for place in places] == [3, 2, 1]
    assert [[entry.tiers for entry in place.entries] for place in places] == [[], [("two",)], [("one", "two")]]
    ((name, error),) = places[0].problems
    assert name == "two"
    assert isinstance(error, FormatError)


def test_a_tier_that_cannot_be_listed_is_said_to_be_unreachable() -> None:
    good, bad = Memory(), Faulty(Memory(), Fault("list", 0, TierUnavailable("gone")))
    good.name, bad.name = "good", "bad"
    shelf = filled(good, 1)
    catalog = Catalog([Shelf(bad, "run"), shelf])
    assert [place.seq for place in catalog.newest_first()] == [1]
    assert set(catalog.unreachable) == {"bad"}
    report = Verifier(catalog, Arena(4 * PAGE, PAGE)).run()
    assert not report.ok
    assert report.problems == []
    assert report.unreachable == {"bad": "gone"}


def test_verify_reads_a_shared_chunk_once_and_reports_progress() -> None:
    tier, seen = Memory(), []
    shelf = Shelf(tier, "run")
    shelf.publish(record(tier, 1, {"a": b"a1", "kept": b"kept"}))
    (shared,) = reusable(shelf, digests(b"kept"))
    assert shared is not None
    shelf.publish(record(tier, 2, {"a": b"a2", "kept": shared}))
    arena = Arena(4 * PAGE, PAGE)
    report = Verifier(Catalog([shelf]), arena, Depth(data=True), progress=seen.append).run()
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
        shelf = Shelf(tier, "run")
        shelf.publish(record(tier, 1, dict(pieces)))
        made = shelf.log.read(1)
        (key,) = names(tier)
        data = tier.get(key)
        data = data.clone()
        for j in range(3):
            if j != i:
                data[100 * j + 50] ^= 1
        tier.delete(key)
        tier.put(key, data)
        holdings.append(Holding(shelf, made.layout))
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
    shelf = Shelf(tier, "run")
    shelf.publish(record(tier, 1, {str(i): bytes([i]) * 4000 for i in range(30)}))
    found, arena = shelf.log.read(1), Arena(4 * PAGE, PAGE)

    def sink(row: int, _raw: torch.Tensor, _slab: Any) -> None:
        if row == 7:
            raise ZeroDivisionError

    for workers in (1, 4):
        start = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            Fetch(found.version, [Holding(shelf, found.layout)], arena, workers=workers).run(list(range(30)), sink)
        assert time.monotonic() - start < 10
        assert arena.in_flight == 0
    assert np.asarray(found.layout.present).all()
