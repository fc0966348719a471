"""Repacking: every version stays whole, whatever fails on the way, and what is mostly dead can be swept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock_tiers import Aged
from support.small_records import contents, pack, record, text, whole

from tierstate.engine.maintain.repack import repack
from tierstate.engine.maintain.sweep import sweep
from tierstate.engine.packs.keys import MEND
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import TierUnavailable
from tierstate.manifest.format.layout import ChunkPlace, DeltaBase
from tierstate.manifest.history.leases import Leases, pin_version
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.retention import RetentionPolicy
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty
from tierstate.tiers.testing.faulty import FaultyCall

WIN = 1_000
BIG, SMALL = 4_000, 100


def filled(tier: Tier, versions: int = 4) -> dict[int, dict[str, bytes]]:
    """Version 1 has a big leaf and a small one, all in one pack; later ones share the small one until the newest,
    which shares nothing; 1 itself is gone, as retention drops it."""
    log = Log(tier, "run")
    first = {"big": text("big1", BIG), "small": text("small", SMALL)}
    places = pack(tier, 1, first)
    log.commit(record(tier, 1, first, places))
    for seq in range(2, versions):
        pieces = {"big": text(f"big{seq}", BIG), "small": first["small"]}
        own = pack(tier, seq, {"big": pieces["big"]})
        log.commit(record(tier, seq, pieces, {**own, "small": places["small"]}))
    last = {"big": text("last", BIG), "small": text("another", SMALL)}
    log.commit(record(tier, versions, last, pack(tier, versions, last)))
    log.forget(1)
    return whole(tier)


def packs(tier: Tier) -> list[str]:
    return list(tier.list("packs/"))


def dead_bytes(tier: Tier) -> int:
    """Bytes of packs that no record names."""
    return sum(sweep(TierRun(tier, "run"), grace=0, dry_run=True).packs.values())


def test_chunks_of_a_pack_that_is_mostly_dead_are_put_elsewhere_and_it_can_be_swept() -> None:
    tier = Memory()
    versions = filled(tier)
    (old,) = (key for key in packs(tier) if key.startswith("packs/run/000000000001-"))
    size, before = tier.size(old), list(tier.list(""))
    tier_run = TierRun(tier, "run")
    plan = repack(tier_run, dry_run=True, win=WIN)
    assert list(tier.list("")) == before, "a dry run changes nothing"
    done = repack(tier_run, win=WIN)
    assert (done.packs, done.versions, done.copied) == ({old: size}, (2, 3), SMALL)
    assert done == plan
    assert whole(tier) == versions
    assert Log(tier, "run").generations() == {2: [1], 3: [1], 4: [0]}
    assert list(tier.list("leases/")) == []
    assert sweep(tier_run, grace=0).packs == {old: size}
    assert whole(tier) == versions
    assert repack(tier_run, win=WIN) == type(done)(), "there is nothing left to do"
    assert len(packs(tier)) == 4, "two of their own, the newest, and one for what they share"


def test_several_records_are_read_at_once() -> None:
    """Each is a request, of which a run may need ten thousand."""
    both = threading.Barrier(2)

    class Slow(Memory):
        def read(self, key: str, ranges: Sequence[Range]) -> None:
            if key.startswith("versions/") and asked:
                both.wait(20)
            super().read(key, ranges)

    asked, tier = False, Slow()
    filled(tier, 5)
    asked = True
    assert len(repack(TierRun(tier, "run"), dry_run=True, win=WIN).packs) == 1


def test_what_retention_drops_afterwards_is_judged_by_the_new_records() -> None:
    tier = Memory()
    versions = filled(tier)
    tier_run = TierRun(tier, "run", RetentionPolicy(last=2))
    tier_run.decision()  # it knows the old records
    repack(tier_run, win=WIN)
    tier_run.keep = RetentionPolicy(last=1)
    other = TierRun(tier, "run", RetentionPolicy(last=2))
    other.retire()
    assert whole(tier) == {seq: versions[seq] for seq in (3, 4)}
    sweep(other, grace=0)
    assert whole(tier) == {seq: versions[seq] for seq in (3, 4)}


def test_a_pack_in_which_the_base_of_a_delta_lies_stays_as_it_is() -> None:
    tier = Memory()
    filled(tier)
    log, known = Log(tier, "run"), pack(tier, 5, {"big": text("big5", BIG), "base": text("base", SMALL)})
    # A delta, and what it is made against, of which another version has a part as it is.
    delta = pack(tier, 6, {"delta": text("delta", SMALL)})["delta"]
    base = DeltaBase(*known["base"][:4], checksum(text("base", SMALL)))
    places = {"base": known["base"], "delta": delta._replace(codec="delta", base=base)}
    for seq in (6, 7):
        log.commit(record(tier, seq, {"base": text("base", SMALL), "delta": text(f"new{seq}", SMALL)}, places))
    last = pack(tier, 8, {"last": text("last", BIG)})
    log.commit(record(tier, 8, {"last": text("last", BIG)}, last))
    tier_run = TierRun(tier, "run")
    for _ in range(2):
        plan = repack(tier_run, dry_run=True, win=WIN)
        assert plan == repack(tier_run, win=WIN)
        assert known["base"].object not in plan.packs
    assert log.generations()[7] == [0]


@pytest.mark.parametrize("holder", ["reader", "pin", "user", "newest"])
def test_what_is_held_stays_as_it_is(holder: str) -> None:
    tier = Memory()
    versions = filled(tier, 4 if holder != "newest" else 3)
    if holder == "newest":
        Log(tier, "run").forget(3)
        versions = whole(tier)
    if holder == "reader":
        Leases(tier, "run").take(2, record=Log(tier, "run").read(2).commit["id"])
    if holder == "pin":
        pin_version(tier, "run", 3, "fork")
    before = [key for key in tier.list("") if not key.startswith("leases/")]
    found = repack(TierRun(tier, "run"), in_use={2} if holder == "user" else (), win=WIN)
    assert not found.packs
    assert [key for key in tier.list("") if not key.startswith("leases/")] == before
    assert whole(tier) == versions


def test_a_reader_who_comes_meanwhile_keeps_the_record_that_he_reads() -> None:
    class Visited(Memory):
        visitor = ""

        def put(self, key: str, data: object) -> None:
            super().put(key, data)  # type: ignore[arg-type]
            if key.startswith("versions/run/000000000002.1"):
                self.visitor = Leases(self, "run").take(2, record=Log(self, "run").read(2).commit["id"])

    tier = Visited()
    versions = filled(tier)
    tier_run, old = TierRun(tier, "run"), Log(tier, "run").read(2)
    done = repack(tier_run, win=WIN)
    assert done.versions == (3,)
    assert not done.packs, "the old pack is still named"
    assert Log(tier, "run").generations() == {2: [0, 1], 3: [1], 4: [0]}
    assert not sweep(tier_run, grace=0).packs
    assert contents(tier, old) == versions[2]
    Leases(tier, "run").release(tier.visitor)
    repack(tier_run, win=WIN)
    assert Log(tier, "run").generations() == {2: [1], 3: [1], 4: [0]}
    assert len(sweep(tier_run, grace=0).packs) == 1
    assert whole(tier) == versions


def test_a_damaged_chunk_is_taken_from_where_it_was_mended_or_left_where_it_is() -> None:
    tier = Memory()
    versions = filled(tier)
    (old,) = (key for key in packs(tier) if key.startswith("packs/run/000000000001-"))
    data = tier.get(old)
    data[BIG + 10] ^= 1
    tier.delete(old)
    tier.put(old, data)
    assert not repack(TierRun(tier, "run"), win=WIN).packs
    pack(tier, 2, {"small": text("small", SMALL)}, label=MEND)
    assert list(repack(TierRun(tier, "run"), win=WIN).packs) == [old]
    assert whole(tier) == versions


def test_files_without_a_footer_are_left_alone() -> None:
    tier = Memory()
    big, small = text("big", BIG), text("small", SMALL)
    key = "packs/run/000000000001-0-0-file.safetensors"
    tier.put(key, as_buffer(big + small))
    log = Log(tier, "run")
    log.commit(record(tier, 1, {"small": small}, {"small": ChunkPlace(key, BIG, SMALL, "raw")}))
    last = {"a": b"last"}
    log.commit(record(tier, 2, last, pack(tier, 2, last)))
    versions, before = whole(tier), [k for k in tier.list("") if k.startswith("versions/")]
    assert not repack(TierRun(tier, "run"), win=WIN).packs
    assert [k for k in tier.list("") if k.startswith("versions/")] == before
    assert whole(tier) == versions


def test_an_unreadable_record_stops_it() -> None:
    tier = Memory()
    filled(tier)
    tier.put("versions/run/000000000003.1", as_buffer(b"what is this"))
    before = list(tier.list(""))
    assert "cannot be read" in repack(TierRun(tier, "run"), win=WIN).reason
    assert list(tier.list("")) == before


OPERATIONS: tuple[FaultyCall, ...] = ("list", "read", "size", "put", "writer", "append", "close", "delete", "age")


@pytest.mark.slow
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("after", [False, True])
def test_a_failure_at_any_call_leaves_all_whole_and_another_round_completes_it(
    operation: FaultyCall, after: bool, stride: int
) -> None:
    for number in range(1, 1_000, stride):
        tier = Memory()
        versions = filled(tier)
        flawed = Faulty(tier, Fault(operation, number, TierUnavailable("away for a moment"), after=after))
        with suppress(TierUnavailable):
            repack(TierRun(flawed, "run"), win=WIN)
        met = flawed.calls[operation] >= number
        assert whole(tier) == versions
        dead = [key for key in tier.list("leases/")]
        for key in dead:  # of this process, which lives; were it dead, they would be gone
            tier.delete(key)
        tier_run = TierRun(tier, "run")
        repack(tier_run, win=WIN)
        sweep(tier_run, grace=0)
        assert whole(tier) == versions
        assert not repack(tier_run, dry_run=True, win=WIN).packs
        assert [g for _, g in sorted(Log(tier, "run").generations().items())][-1] == [0]
        assert all(len(g) == 1 for g in Log(tier, "run").generations().values())
        assert not [key for key in packs(tier) if key.startswith("packs/run/000000000001-")]
        assert dead_bytes(tier) == 0
        if not met:
            break
    assert number > 1 or operation == "age", "the call was made"
    assert not met, "every call was made to fail"


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_history_stays_whole_when_it_is_repacked_and_swept(data: st.DataObject) -> None:
    tier, names = Aged(Memory()), ["a", "b", "c", "d"]
    log, state = Log(tier, "run"), {}
    for seq in range(1, data.draw(st.integers(2, 8)) + 1):
        fresh = data.draw(st.sets(st.sampled_from(names), min_size=1 if state else 4))
        new = {n: text(f"{n}{seq}", data.draw(st.sampled_from([50, 3_000]))) for n in sorted(fresh)}
        places = pack(tier, seq, new)
        state = {**state, **{n: (new[n], places[n]) for n in new}}
        pieces, where = {n: d for n, (d, _) in state.items()}, {n: p for n, (_, p) in state.items()}
        log.commit(record(tier, seq, pieces, where))
    for seq in sorted(data.draw(st.sets(st.sampled_from(log.seqs()[:-1])))) if log.seqs()[1:] else ():
        log.forget(seq)
    versions = whole(tier)
    for _ in range(2):
        newest = log.read(log.seqs()[-1]).commit["id"]
        plan = repack(TierRun(tier, "run"), dry_run=True, win=WIN)
        assert repack(TierRun(tier, "run"), win=WIN) == plan
        assert whole(tier) == versions
        assert log.read(log.seqs()[-1]).commit["id"] == newest
        gone = sweep(TierRun(tier, "run"), grace=0)
        assert set(plan.packs) <= set(gone.packs)
        assert whole(tier) == versions
    assert not plan.packs, "it comes to an end"


def test_two_at_once_leave_each_others_versions_alone() -> None:
    """One begins while the other holds its leases; what it finds held, it leaves."""

    class Nested(Memory):
        inside = False

        def writer(self, key: str, size_hint: int | None = None) -> object:  # type: ignore[override]
            if key.startswith("packs/") and not self.inside:
                self.inside = True
                assert not repack(TierRun(self, "run"), win=WIN).packs
                self.beaten = True
            return super().writer(key, size_hint)

    tier = Memory()
    versions = filled(tier)
    nested = Nested()
    for key in tier.list(""):
        nested.inside = True
        nested.put(key, tier.get(key))
    nested.inside = False
    assert len(repack(TierRun(nested, "run"), win=WIN).packs) == 1
    assert nested.beaten
    assert whole(nested) == versions
