"""Sweeping: what belongs to no version goes, and nothing else, whatever the history and whatever fails on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.clock_tiers import Aged
from support.small_records import contents, pack, record, text, whole

from tierstate.engine.maintain.sweep import DAY, sweep, unneeded_fork_pins
from tierstate.engine.packs.keys import MEND, is_mend
from tierstate.engine.packs.pack import PackScan
from tierstate.engine.store.catalog import VersionMoved, lease_for_reading
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import AccessDenied, TierUnavailable
from tierstate.manifest.history.leases import (
    LEASE_SECONDS,
    WHOLE_RUN,
    Leases,
    is_dead,
    pin_version,
    this_process,
)
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.retention import RetentionPolicy
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty, Interleaved, Turns
from tierstate.tiers.testing.faulty import FaultyCall

GRACE = 100.0


def dead_process() -> dict[str, Any]:
    """A process of this host that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pid = child.pid
    return {**this_process(), "pid": pid, "start": "1"}


DEAD = dead_process()


def saved(tier: Tier, seq: int, fresh: set[str], shared: dict[str, Any] | None = None) -> dict[str, Any]:
    """Commit a version whose pieces ``fresh`` are in a new pack, and others where they lie already."""
    pieces = {name: text(f"{name}{seq}") for name in sorted(fresh)}
    places = pack(tier, seq, pieces) if pieces else {}
    for name, (data, place) in (shared or {}).items():
        if name not in pieces:
            pieces[name], places[name] = data, place
    Log(tier, "run").commit(record(tier, seq, pieces, places))
    return {name: (pieces[name], places[name]) for name in pieces}


def packs(tier: Tier, run: str = "run") -> set[str]:
    return set(tier.list(f"packs/{run}/"))


def lease(tier: Tier, seq: int, holder: dict[str, Any], record: str = "") -> str:
    key = f"leases/run/{seq:012d}-read-{len(list(tier.list('leases/')))}"
    tier.put(key, as_buffer(json.dumps({**holder, "record": record}).encode()))
    return key


STEP = st.sampled_from(["save", "orphan", "drop", "mend", "stray mend", "dead lease", "lease", "wait", "fork"])


class History:
    """What happened to a run, step by step, and what its versions need."""

    def __init__(self, tier: Aged) -> None:
        self.tier, self.log = tier, Log(tier, "run")
        self.live: dict[int, dict[str, Any]] = {}
        self.forks: list[str] = []

    def play(self, steps: list[str]) -> None:
        for seq, step in enumerate(steps, 1):
            getattr(self, step.replace(" ", "_"))(seq)

    def save(self, seq: int) -> None:
        before = self.live[max(self.live)] if self.live else {}
        self.live[seq] = saved(self.tier, seq, {"abc"[seq % 3]}, before)

    def orphan(self, seq: int) -> None:
        pack(self.tier, seq, {"x": text(f"orphan{seq}")})

    def drop(self, _seq: int) -> None:
        """Records only, as by a process that is killed before it comes to the packs."""
        if len(self.live) > 1:
            gone = min(self.live)
            self.log.forget(gone)
            del self.live[gone]

    def mend(self, seq: int) -> None:
        for name, (data, _) in list(self.live.get(max(self.live, default=0), {}).items())[:1]:
            pack(self.tier, seq, {name: data}, label=MEND)

    def stray_mend(self, seq: int) -> None:
        pack(self.tier, seq, {"x": text(f"stray{seq}")}, label=MEND)

    def dead_lease(self, seq: int) -> None:
        lease(self.tier, seq, DEAD)

    def lease(self, _seq: int) -> None:
        if self.live:
            seq = min(self.live)
            lease(self.tier, seq, this_process(), self.log.read(seq).commit["id"])

    def wait(self, _seq: int) -> None:
        self.tier.clock += GRACE

    def fork(self, seq: int) -> None:
        if self.live:
            self.forks.append(f"fork{seq}")
            pin_version(self.tier, "run", min(self.live), self.forks[-1])
            what = self.live[min(self.live)]
            pieces, places = {n: d for n, (d, _) in what.items()}, {n: p for n, (_, p) in what.items()}
            Log(self.tier, self.forks[-1]).commit(record(self.tier, 1, pieces, places, run=self.forks[-1]))

    @property
    def blocked(self) -> bool:
        """Whether somebody reads what has no record."""
        held = Leases(self.tier, "run").look(self.tier.age).live
        return any(one.kind == "read" and one.seq not in self.live for one in held)

    def garbage(self) -> set[str]:
        """Packs that nothing needs, and that are old."""
        chunks = [chunk for version in self.live.values() for chunk in version.values()]
        needed = {place.object for _, place in chunks}
        for run in self.forks:
            needed |= set(Log(self.tier, run).read(1).layout.objects)
        for key in filter(is_mend, packs(self.tier)):
            held = bytes(self.tier.get(key).numpy())
            needed |= {key for data, _ in chunks if held.startswith(data)}
        old = {key for key in packs(self.tier) if self.tier.clock - self.tier.born[key] >= GRACE}
        return old - needed


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=14))
@example(["save", "orphan", "drop", "wait", "save", "drop", "wait"])
@example(["save", "fork", "save", "drop", "wait", "wait"])
@example(["save", "lease", "save", "drop", "wait"])
@example(["save", "mend", "stray mend", "wait", "save", "drop"])
def test_what_belongs_to_no_version_goes_and_nothing_else(steps: list[str]) -> None:
    tier = Aged(Memory())
    history = History(tier)
    history.play(steps)
    garbage, blocked = history.garbage(), history.blocked
    before, everything, versions = packs(tier), list(tier.list("")), whole(tier)
    tier_run = TierRun(tier, "run")
    plan = sweep(tier_run, grace=GRACE, dry_run=True)
    assert list(tier.list("")) == everything, "a dry run changes nothing"
    done = sweep(tier_run, grace=GRACE)
    assert done == plan
    assert bool(done.reason) == blocked
    assert packs(tier) == before - (set() if blocked else garbage)
    assert whole(tier) == versions
    if not blocked:
        assert done.packs == {key: done.packs[key] for key in sorted(garbage)}
        assert not [key for key in tier.list("leases/") if key in done.leases]
        assert sweep(tier_run, grace=GRACE) == type(done)(young=done.young), "there is nothing left to do"


FAULTS: tuple[FaultyCall, ...] = ("list", "read", "size", "age", "delete")


@pytest.mark.slow
@pytest.mark.parametrize("operation", FAULTS)
@pytest.mark.parametrize("after", [False, True])
def test_a_failure_at_any_call_leaves_what_another_sweep_completes(operation: FaultyCall, after: bool) -> None:
    steps = ["save", "orphan", "save", "drop", "stray mend", "save", "mend", "dead lease", "fork", "drop", "orphan"]
    steps += ["wait", "wait", "orphan"]
    number = 1
    while True:
        tier = Aged(Memory())
        history = History(tier)
        history.play(steps)
        versions, wanted = whole(tier), packs(tier) - history.garbage()
        flawed = Faulty(tier)
        flawed.add(Fault(operation, number, TierUnavailable("away for a moment"), after=after))
        try:
            found = sweep(TierRun(flawed, "run"), grace=GRACE)
            clean = flawed.calls[operation] < number
            assert clean or found.reason
        except TierUnavailable:
            clean = False
        assert whole(tier) == versions
        again = sweep(TierRun(tier, "run"), grace=GRACE)
        assert not again.reason
        assert packs(tier) == wanted
        assert whole(tier) == versions
        if clean:
            break
        number += 1
    assert number > 1, "the call was made"


@pytest.mark.parametrize("damage", ["record", "strange record", "strange lease", "fork"])
def test_what_is_not_understood_stops_it(damage: str) -> None:
    tier = Aged(Memory())
    state = saved(tier, 1, {"a"})
    saved(tier, 2, {"a"}, state)
    pack(tier, 3, {"x": b"orphan"})
    if damage == "fork":
        pin_version(tier, "run", 1, "other")
    tier.clock = 2 * DAY
    key = {
        "record": "versions/run/000000000001.1",
        "strange record": "versions/run/000000000001+new",
        "strange lease": "leases/run/all",
        "fork": "versions/other/000000000001",
    }[damage]
    tier.put(key, as_buffer(b"what is this"))
    before = list(tier.list(""))
    found = sweep(TierRun(tier, "run"))
    assert key in found.reason
    assert list(tier.list("")) == before
    tier.delete(key)
    assert len(sweep(TierRun(tier, "run")).packs) == 1


def test_what_is_of_unknown_age_goes_only_without_grace() -> None:
    tier = Aged(Memory(), tells=False)
    saved(tier, 1, {"a"})
    (orphan,) = {p.object for p in pack(tier, 2, {"x": b"orphan"}).values()}
    assert sweep(TierRun(tier, "run")).ageless == (orphan,)
    assert orphan in packs(tier)
    assert list(sweep(TierRun(tier, "run"), grace=0).packs) == [orphan]
    assert packs(tier) == set(whole_packs(tier))


def whole_packs(tier: Tier) -> list[str]:
    log = Log(tier, "run")
    return [key for seq in log.seqs() for key in log.read(seq).layout.objects]


def test_packs_of_saves_that_this_process_has_under_way_stay_whatever_the_grace() -> None:
    tier = Memory()
    saved(tier, 1, {"a"})
    pack(tier, 2, {"x": b"being saved"})
    before = packs(tier)
    assert not sweep(TierRun(tier, "run"), grace=0, busy=lambda: {2}).packs
    assert packs(tier) == before


class Changing(Faulty):
    """Another saver commits a version whenever the log has been listed, and maybe a reader takes a lease of it."""

    more = 0
    leased = False

    def list(self, prefix: str) -> Any:
        found = list(super().list(prefix))
        if prefix == "versions/run/" and self.more:
            self.more -= 1
            seq = 2_000 - self.more
            saved(self.inner, seq, {"a"})
            if self.leased:
                lease(self.inner, seq, this_process(), Log(self.inner, "run").read(seq).commit["id"])
        return iter(found)


@pytest.mark.parametrize("leased", [False, True])
def test_it_begins_anew_when_records_come_meanwhile_and_gives_up_when_they_do_not_cease(leased: bool) -> None:
    tier = Changing(Memory())
    tier.leased = leased
    saved(tier.inner, 1, {"a"})
    pack(tier.inner, 2, {"x": b"orphan"})
    tier.more = 1_000
    found = sweep(TierRun(tier, "run"), grace=0)
    assert "did not stay the same" in found.reason
    assert len(packs(tier)) == 2 + 1_000 - tier.more, "nothing was deleted"
    tier.more = 3
    before = len(packs(tier))
    assert len(sweep(TierRun(tier, "run"), grace=0).packs) == 1
    assert len(packs(tier)) == before + 3 - 1


# Leases


def test_a_lease_holds_until_it_is_released_its_process_is_dead_or_a_day_is_over() -> None:
    tier = Aged(Memory())
    leases = Leases(tier, "run")
    mine, dead = leases.take(1), lease(tier, 2, DEAD)
    elsewhere = lease(tier, 3, {**DEAD, "boot": "another host"})
    in_a_container = lease(tier, 4, {**DEAD, "pids": "pid:[1]"})
    tier.put("leases/run/000000000005-read-torn", as_buffer(b"{"))
    pinned = pin_version(tier, "run", 6, "fork")
    assert set(leases.live(tier.age)) == {1, 3, 4, 5, 6}
    assert leases.look(tier.age).gone == (dead,)
    assert leases.live(tier.age)[6] == "forked by fork"
    tier.clock = LEASE_SECONDS + 1
    assert set(leases.live(tier.age)) == {6}, "only pins do not end"
    leases.release(mine)
    leases.release(pinned)
    assert leases.live(tier.age) == {}
    assert {elsewhere, in_a_container} < set(tier.list("leases/"))


def test_every_fork_has_its_own_pin() -> None:
    tier = Aged(Memory())
    tier.put("leases/run/000000000001-fork-fork", as_buffer(b"{}"))  # as programs before this one wrote it
    tier.clock = 2 * GRACE
    pinned = pin_version(tier, "run", 1, "fork")
    assert re.fullmatch("leases/run/000000000001-fork-fork@[0-9a-f]{32}", pinned)
    found = Leases(tier, "run").look(tier.age)
    assert [(lease.seq, lease.kind, lease.by) for lease in found.live] == [(1, "fork", "fork")] * 2
    assert [lease.key for lease in unneeded_fork_pins(TierRun(tier, "run"), GRACE)] == [
        "leases/run/000000000001-fork-fork"
    ]


def test_a_fork_of_a_fork_holds_what_it_is_made_of() -> None:
    """The last of three runs names a pack of the first alone: the one between stays, with its pin there."""
    tier = Aged(Memory())
    saved(tier, 1, {"a"})
    found = Log(tier, "run").read(1)
    pieces = contents(tier, found)
    (place,) = (found.layout.place(0),)
    assert place is not None
    for run, by in (("run", "between"), ("between", "last")):
        pin_version(tier, run, 1, by)
        Log(tier, by).commit(record(tier, 1, pieces, {"a": place}, run=by))
    assert not sweep(TierRun(tier, "between")).reason, "it has a record, and so is not just being forked"
    tier.clock = 2 * GRACE
    assert unneeded_fork_pins(TierRun(tier, "between"), GRACE) == unneeded_fork_pins(TierRun(tier, "run"), GRACE) == []
    assert PackScan(tier, "last").place(found.version.digests[0].tobytes(), len(pieces["a"])) == place
    Log(tier, "last").forget(1)
    assert [pin.by for pin in unneeded_fork_pins(TierRun(tier, "between"), GRACE)] == ["last"]


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    me = this_process()
    assert not is_dead(me)
    assert is_dead({**me, "start": "1"})
    assert is_dead(DEAD)
    assert not is_dead({})
    assert not is_dead({**DEAD, "boot": None})
    assert not is_dead({**me, "pid": -1})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        alive = {**me, "pid": child.pid, "start": _start_of(child.pid)}
        assert not is_dead(alive)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(alive), "dead, though nobody has asked for its status yet"
        child.wait()
    assert is_dead(alive)


def _start_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


class Site(Aged):
    """A tier that other processes see."""

    @property
    def traits(self) -> Any:
        from dataclasses import replace

        return replace(self.inner.traits, shared="site")


def test_what_is_read_is_not_dropped_and_what_was_dropped_before_is_told() -> None:
    tier = Site(Memory())
    tier_run = TierRun(tier, "run", RetentionPolicy(last=1))
    state = saved(tier, 1, {"a", "b"})
    saved(tier, 2, {"a"}, state)
    old = tier_run.log.read(1)
    with lease_for_reading([(tier_run, old)]):
        assert tier_run.leased().keys() == {1}
        assert tier_run.retire().drop == ()
        assert contents(tier, old)
    assert list(tier.list("leases/")) == []
    assert tier_run.retire().drop == (1,)
    with pytest.raises(VersionMoved), lease_for_reading([(tier_run, old)]):
        raise AssertionError("it was dropped")
    assert list(tier.list("leases/")) == []


@given(st.lists(st.integers(0, 20), max_size=8), st.booleans())
@example([0], False)
@example([1], False)
@example([1], True)
@example([2], True)
def test_either_a_reader_sees_that_a_version_is_gone_or_it_stays(stretches: list[int], swept: bool) -> None:
    """One process takes a lease, another one drops the version; each looks at what the other did, in any order."""
    place, turns = Site(Memory()), Turns(stretches)
    saved(place, 1, {"a"})
    saved(place, 2, {"a"})
    mine, others = Interleaved(place, turns, "reader"), Interleaved(place, turns, "dropper")
    old = Log(place, "run").read(1)
    wanted = contents(place, old)

    def read() -> dict[str, bytes] | None:
        try:
            with lease_for_reading([(TierRun(mine, "run"), old)]):
                return contents(mine, old)
        except VersionMoved:
            return None

    def drop() -> None:
        tier_run = TierRun(others, "run", RetentionPolicy(last=1))
        tier_run.retire()
        if swept:
            sweep(tier_run, grace=0)

    said = turns.run({"reader": read, "dropper": drop})
    assert not said.errors
    assert said.results["reader"] in (wanted, None)
    assert list(place.list("leases/")) == []
    assert said.results["reader"] is not None or Log(place, "run").seqs() == [2], "it was not refused for nothing"


@pytest.mark.parametrize("error", [AccessDenied("read-only"), TierUnavailable("away")])
def test_a_tier_that_takes_no_lease_is_read_without(error: Exception) -> None:
    tier = Faulty(Site(Memory()))
    saved(tier, 1, {"a"})
    tier.add(Fault("put", 0, error))
    with lease_for_reading([(TierRun(tier, "run"), Log(tier, "run").read(1))]):
        assert not list(tier.list("leases/"))


def test_a_lease_that_cannot_be_deleted_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tier = Faulty(Site(Memory()))
    saved(tier, 1, {"a"})
    tier.add(Fault("delete", 0, AccessDenied("append only")))
    with lease_for_reading([(TierRun(tier, "run"), Log(tier, "run").read(1))]):
        (key,) = tier.list("leases/")
    assert f"{key} stays, and may keep packs until" in caplog.text
    assert "append only" in caplog.text


@pytest.mark.parametrize("kind", ["doctor", "rebuild"])
def test_while_a_run_is_repaired_no_pack_goes(kind: str) -> None:
    tier = Aged(Memory())
    saved(tier, 1, {"a"})
    pack(tier, 2, {"x": b"orphan"})
    tier.clock = 2 * DAY
    leases = Leases(tier, "run")
    key = leases.take(WHOLE_RUN, kind)
    assert f"{key}: the run is repaired by " in sweep(TierRun(tier, "run")).reason
    leases.release(key)
    assert len(sweep(TierRun(tier, "run")).packs) == 1


def test_a_reader_who_comes_while_a_version_is_dropped_keeps_its_packs_until_he_is_gone() -> None:
    """Retention has looked for leases; then comes a reader, and sees the record; then it goes."""
    tier = Site(Memory())
    saved(tier, 1, {"a"})
    saved(tier, 2, {"a"})
    tier_run, log = TierRun(tier, "run", RetentionPolicy(last=1)), Log(tier, "run")
    old = log.read(1)
    with lease_for_reading([(tier_run, old)]):
        log.forget(1)
        found = sweep(tier_run, grace=0)
        assert "nobody can tell which packs it needs" in found.reason
        assert contents(tier, old)
    assert len(sweep(tier_run, grace=0).packs) == 1


def test_a_fork_that_has_records_is_not_just_being_forked() -> None:
    """The sweep goes on at once; its pin goes when it is old."""
    tier = Aged(Memory())
    saved(tier, 1, {"a"})
    tier.clock = 2 * GRACE
    pin_version(tier, "run", 1, "other")
    assert sweep(TierRun(tier, "run"), grace=GRACE).reason
    own = pack(tier, 2, {"a": b"its own"}, run="other")
    Log(tier, "other").commit(record(tier, 2, {"a": b"its own"}, own, run="other"))
    assert not sweep(TierRun(tier, "run"), grace=GRACE).reason
    assert unneeded_fork_pins(TierRun(tier, "run"), GRACE) == []
    tier.clock = 4 * GRACE
    assert [pin.by for pin in unneeded_fork_pins(TierRun(tier, "run"), GRACE)] == ["other"]


def test_pins_that_no_fork_needs_are_found() -> None:
    tier = Aged(Memory())
    saved(tier, 1, {"a"})
    tier_run = TierRun(tier, "run")
    found = Log(tier, "run").read(1)
    pieces = contents(tier, found)
    (place,) = (found.layout.place(0),)
    assert place is not None
    pin_version(tier, "run", 1, "other")
    assert unneeded_fork_pins(tier_run, GRACE) == [], "the fork has just begun"
    Log(tier, "other").commit(record(tier, 1, pieces, {"a": place}, run="other"))
    tier.clock = 2 * GRACE
    assert unneeded_fork_pins(tier_run, GRACE) == []
    own = pack(tier, 2, {"a": b"its own"}, run="other")
    Log(tier, "other").commit(record(tier, 2, {"a": b"its own"}, own, run="other"))
    assert unneeded_fork_pins(tier_run, GRACE) == []
    Log(tier, "other").forget(1)
    assert [(lease.seq, lease.by) for lease in unneeded_fork_pins(tier_run, GRACE)] == [(1, "other")]
    tier.put("versions/other/000000000003", as_buffer(b"unreadable"))
    assert unneeded_fork_pins(tier_run, GRACE) == [], "nobody can tell"
