"""The cascade when tiers lag, fail and come back: which versions are copied, skipped, held back, and reported."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpointer_worlds import (
    arena_of,
    engine_threads,
    faulty,
    names,
    opened,
    policy,
    tensors,
    tier,
    unreferenced,
    wrapped,
)
from support.equality import difference
from support.outcomes import until

import tierstate as ts
from tierstate.engine.capture import plan
from tierstate.engine.publish import backlog
from tierstate.engine.publish.backlog import MAX_WAITING
from tierstate.engine.restore import restore
from tierstate.manifest.format.version import Version
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.latch import Completion
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

pytestmark = pytest.mark.slow

GONE = ts.TierUnavailable("the switch is gone", tier="slow")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is down is tried again soon."""
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(0.02, 0.1, 0.5))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is down is not tried again by itself while a test runs."""
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(600.0, 600.0, 0.5))


@pytest.fixture
def slow() -> Iterator[dict[str, Any]]:
    """The keys of a tier that a test can break and mend."""
    with wrapped(Memory()) as keys:
        yield keys


def steps(ckpt: ts.Checkpointer, name: str) -> list[int]:
    return [v.step for v in ckpt.versions() if name in v.tiers]


def failed(save: ts.Save, name: str = "slow") -> None:
    with pytest.raises(ts.TierUnavailable, match="gone"):
        save.wait(name)


def state(step: int) -> dict[str, Any]:
    return tensors(9000, 4096, seed=step)


# Catching up after an outage


@pytest.mark.usefixtures("soon")
def test_what_was_missed_in_an_outage_comes_when_the_tier_is_back(place, slow, caplog):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(0), step=0).wait("slow")
        where = faulty(slow)
        where.add(Fault("writer", 0, GONE))
        where.add(Fault("list", 0, GONE))
        saves = [ckpt.save(state(step), step=step) for step in (1, 2, 3)]
        for save in saves:
            failed(save)
        stats = ckpt.stats().tiers["slow"]
        assert (stats.owed, stats.failures, stats.healthy) == (3, 3, False)
        assert stats.waiting > 0
        assert stats.behind > 0
        assert steps(ckpt, "nvme") == [0, 1, 2, 3] or steps(ckpt, "nvme") == [1, 2, 3], "held for the slow tier"
        where.heal()
        until(lambda: ckpt.stats().tiers["slow"].brought == 3)
        assert steps(ckpt, "slow") == [0, 1, 2, 3]
        stats = ckpt.stats().tiers["slow"]
        assert (stats.owed, stats.waiting, stats.behind, stats.healthy) == (0, 0, 0.0, True)
        assert stats.speed > 0
        assert stats.expected == 0
        assert set(saves[0].errors()) == {"slow"}, "what was told stays told"
        assert "step 2, which had not arrived at slow, is there now" in caplog.text
        ckpt.save(state(4), step=4).wait("slow")
        ckpt._pipeline.close()
        assert steps(ckpt, "nvme") == [4], "nothing is held any more"
        assert ckpt.verify(deep=True).ok
        for step in range(5):
            assert difference(state(step), ckpt.load(step=step)) == ""
        assert unreferenced(where.inner, "run") == set()
        assert arena_of(ckpt).in_flight == 0


# A full tier


def fill(ckpt: ts.Checkpointer, step: int) -> None:
    """Save until the tier ``nvme`` is full; of the others it is known what became of each save."""
    while True:
        save, errors = ckpt.save(state(step), step=step), []
        for name in save.tiers:
            try:
                save.wait(name)
            except ts.TierstateError as error:
                errors.append(error)
        if any(isinstance(error, ts.TierFull) for error in errors):
            return
        step += 1


@pytest.mark.usefixtures("soon")
def test_a_tier_that_is_full_of_what_was_held_takes_the_next_save_once_that_has_arrived(place, slow):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}, capacity="64KiB"), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(0), step=0).wait("slow")
        faulty(slow).add(Fault("writer", 0, GONE))
        faulty(slow).add(Fault("list", 0, GONE))
        fill(ckpt, 1)
        faulty(slow).heal()
        until(lambda: not ckpt.stats().tiers["slow"].owed)
        for step in (20, 21):
            ckpt.save(state(step), step=step).wait("nvme")
            assert difference(state(step), ckpt.load(step=step)) == ""


def test_a_keep_that_became_shorter_makes_room_in_a_full_tier(place):
    def spec(keep: int) -> ts.Policy:
        return policy({"nvme": tier("nvme", place, keep={"last": keep}, capacity="64KiB")})

    with ts.Checkpointer(spec(100), "run") as ckpt:
        fill(ckpt, 0)
    with ts.Checkpointer(spec(1), "run") as ckpt:
        with pytest.raises(ts.TierFull):
            ckpt.save(state(20), step=20).wait()
        for step in (21, 22, 23, 24):
            ckpt.save(state(step), step=step).wait()


def test_what_could_not_be_dropped_is_dropped_before_the_next_save():
    with wrapped(Memory(capacity=84 << 10)) as keys:
        spec = policy({"only": {**keys, "keep": {"last": 2}}})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in (0, 1):
                ckpt.save(state(step), step=step).wait()
            faulty(keys).add(Fault("delete", 0, GONE))
            for step in (2, 3):
                ckpt.save(state(step), step=step).wait()
            until(lambda: ckpt._pipeline.queues["only"].at_rest)
            faulty(keys).heal()
            for step in (4, 5, 6):
                ckpt.save(state(step), step=step).wait()


@pytest.mark.usefixtures("late")
def test_debts_are_brought_after_the_next_save_that_arrives(place, slow):
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        faulty(slow).add(Fault("put", 0, GONE))
        failed(ckpt.save(state(1), step=1))
        faulty(slow).heal()
        ckpt.save(state(2), step=2).wait("slow")
        until(lambda: ckpt.stats().tiers["slow"].brought == 1)
        assert steps(ckpt, "slow") == [1, 2]
        # What came late did not become what later saves build on.
        ckpt.save(state(2), step=3).wait("slow")
        assert difference(state(2), ckpt.load(step=3)) == ""
        assert ckpt.verify(deep=True).ok


@pytest.mark.usefixtures("late")
def test_close_tries_once_more_and_does_not_tell_of_what_came_then(place, slow):
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        faulty(slow).add(Fault("append", 0, GONE))
        save = ckpt.save(state(1), step=1)
        until(lambda: save._save_state.tiers["slow"].done())
        faulty(slow).heal()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") == [1]
    assert engine_threads() == []


@pytest.mark.usefixtures("late")
def test_close_says_what_is_still_owed(place, slow, caplog):
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    ckpt = ts.Checkpointer(spec, "run")
    faulty(slow).add(Fault("writer", 0, GONE))
    for step in (1, 2):
        failed(ckpt.save(state(step), step=step))
    ckpt.close()
    assert "still owed, which the next process looks for: slow: step 1, 2" in caplog.text
    ckpt = ts.Checkpointer(spec, "run")
    faulty(slow).add(Fault("writer", 0, GONE))
    ckpt.save(state(3), step=3)
    with pytest.raises(ts.TierUnavailable) as caught:
        ckpt.close()
    first, last = caught.value.__notes__
    assert first == "step 3 did not arrive at slow: the switch is gone"
    fate = "a faster tier has it, from which the next process that saves this run copies it"
    assert last == f"still owed: slow: step 1, 2, 3 ({fate})"


@pytest.mark.usefixtures("late")
def test_only_one_save_of_each_window_is_owed(place, slow):
    spec = policy({"nvme": tier("nvme", place), "slow": {**slow, "every": 10}})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(0), step=0).wait("slow")
        faulty(slow).add(Fault("writer", 0, GONE))
        for step in (10, 11, 20):
            failed(ckpt.save(state(step), step=step))
        faulty(slow).heal()
        save = ckpt.save(state(21), step=21)
        assert "slow" in save.tiers, "what failed does not count for the cadence"
        save.wait("slow")
        assert ckpt.save(state(22), step=22).tiers == ("nvme",)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") == [0, 10, 21], "11 was tried in place of 10, and 21 stands for 20"


@pytest.mark.usefixtures("soon")
def test_what_no_faster_tier_has_any_more_is_given_up(place, slow, caplog):
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        faulty(slow).add(Fault("writer", 0, GONE))
        faulty(slow).add(Fault("list", 0, GONE))
        failed(ckpt.save(state(1), step=1))
        opened(spec, "nvme").delete("versions/run/000000000001")
        ckpt._tier_runs[0].look_again()  # as after a conflict: it is not the newest that nvme remembers any more
        faulty(slow).heal()
        until(lambda: ckpt.stats().tiers["slow"].owed == 0)
        assert "cannot be brought to slow: step 1 cannot go on to slow: no faster tier has it" in caplog.text
        assert ckpt.stats().tiers["slow"].brought == 0
        ckpt.save(state(2), step=2).wait("slow")
        assert steps(ckpt, "slow") == [2]


@pytest.mark.usefixtures("late")
def test_what_retention_would_drop_at_once_is_not_brought(place, slow):
    spec = policy({"nvme": tier("nvme", place), "slow": {**slow, "keep": {"last": 2}}})
    with ts.Checkpointer(spec, "run") as ckpt:
        faulty(slow).add(Fault("writer", 0, GONE))
        for step in range(4):
            failed(ckpt.save(state(step), step=step))
        faulty(slow).heal()
        ckpt.save(state(4), step=4).wait("slow")
        until(lambda: ckpt.stats().tiers["slow"].owed == 0)
        assert ckpt.stats().tiers["slow"].brought == 1
        assert steps(ckpt, "slow") == [3, 4]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("error", [ts.TierFull("full", tier="slow"), ts.AccessDenied("no", tier="slow")])
def test_what_somebody_must_mend_is_not_owed(place, slow, error):
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        faulty(slow).add(Fault("writer", 0, error))
        with pytest.raises(type(error)):
            ckpt.save(state(1), step=1).wait("slow")
        assert ckpt.stats().tiers["slow"].owed == 0
        faulty(slow).heal()
        ckpt.save(state(2), step=2).wait("slow")
        assert steps(ckpt, "slow") == [2]


@pytest.mark.usefixtures("soon")
def test_an_outage_of_the_source_while_it_is_read_is_made_up_for(slow):
    with wrapped(Memory()) as first:
        spec = policy({"first": first, "slow": slow})
        with ts.Checkpointer(spec, "run") as ckpt:
            faulty(first).add(Fault("read", 0, ts.TierUnavailable("first is gone")))
            with pytest.raises(ts.Unreadable, match="cannot be read now"):
                ckpt.save(state(1), step=1).wait("slow")
            assert ckpt.stats().tiers["slow"].owed == 1
            faulty(first).heal()
            until(lambda: ckpt.stats().tiers["slow"].brought == 1)
            assert steps(ckpt, "slow") == [1]
            assert ckpt.verify(deep=True).ok


# After a restart


def closed(spec: ts.Policy, slow: dict[str, Any], saves: list[int]) -> None:
    """A process whose slow tier was down all the time."""
    ckpt = ts.Checkpointer(spec, "run")
    faulty(slow).add(Fault("writer", 0, GONE))
    for step in saves:
        save = ckpt.save(state(step), step=step)
        if "slow" in save.tiers:
            failed(save)
    ckpt.close()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [[0, 1, 2, 3, 4, 9]]),
        ({"every": 2}, [[0, 2, 4, 9]]),
        # With `skip`, step 4 is left out, too, if step 9 is on the faster tier before its copy begins.
        ({"on_lag": "skip"}, [[0, 4, 9], [0, 9]]),
    ],
)
@pytest.mark.usefixtures("late")
def test_what_an_earlier_process_owed_is_brought_from_the_first_save_on(place, slow, keys, expected):
    spec = policy({"nvme": tier("nvme", place), "slow": {**slow, **keys}})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(0), step=0).wait("slow")
    closed(spec, slow, [1, 2, 3, 4])
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.load()
        assert steps(ckpt, "slow") == [0], "who only reads brings nothing"
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(9), step=9)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") in expected
        assert ckpt.verify(deep=True).ok


@pytest.mark.usefixtures("late")
def test_nothing_is_dropped_before_it_is_known_what_a_slower_tier_lacks(place, slow):
    """The faster tier's retention does not run ahead of the look into the slower one."""
    spec = policy({"nvme": tier("nvme", place, keep={"last": 3}), "slow": slow})
    closed(spec, slow, [1, 2, 3])
    with ts.Checkpointer(spec, "run") as ckpt:
        gate = faulty(slow).shut("list")
        ckpt._pipeline._look = False  # the numbers are known: only the tier queue lists the slow tier
        ckpt._pipeline._seq = 3
        ckpt._pipeline._last["slow"] = None
        for step in range(4, 8):
            ckpt.save(state(step), step=step).wait("nvme")
        assert steps_of(spec, "nvme") == [1, 2, 3, 4, 5, 6, 7]
        gate.set()
    assert steps_of(spec, "nvme") == [5, 6, 7]
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") == [1, 2, 3, 4, 5, 6, 7]


def steps_of(spec: ts.Policy, name: str) -> list[int]:
    where = opened(spec, name)
    return [int(key.rsplit("/", 1)[1]) for key in where.list("versions/run/")]


@pytest.mark.usefixtures("late")
def test_a_tier_that_cannot_be_asked_at_the_start_gets_at_least_the_newest(place, slow):
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    closed(spec, slow, [1, 2, 3])
    ckpt = ts.Checkpointer(spec, "run")
    faulty(slow).add(Fault("list", 0, GONE))
    faulty(slow).add(Fault("writer", 0, GONE))
    failed(ckpt.save(state(4), step=4))
    faulty(slow).heal()
    ckpt.close()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") == [3, 4]


def test_cadence_by_time_goes_on_after_a_restart_and_a_failed_save_does_not_count(place, slow, monkeypatch):
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(600.0, 600.0, 0.5))
    now = [1_700_000_000.0]
    clock = SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr(plan, "time", clock)
    spec = policy({"nvme": tier("nvme", place), "slow": {**slow, "every": "30min"}})
    went, step = [], 0
    for _ in range(3):
        with ts.Checkpointer(spec, "run") as ckpt:
            for minutes in (0, 10, 10, 10, 10):
                now[0] += 60 * minutes
                save = ckpt.save(state(step), step=step)
                if "slow" in save.tiers:
                    went.append(step)
                    save.wait("slow")
                step += 1
    assert went == [0, 3, 7, 11, 14]
    with ts.Checkpointer(spec, "run") as ckpt:
        now[0] += 3600
        faulty(slow).add(Fault("writer", 0, ts.TierFull("full", tier="slow")))
        with pytest.raises(ts.TierFull):
            ckpt.save(state(20), step=20).wait("slow")
        faulty(slow).heal()
        save = ckpt.save(state(21), step=21)
        assert "slow" in save.tiers
        save.wait("slow")
        assert "slow" not in ckpt.save(state(22), step=22).tiers


# A tier that lags


def test_a_slow_tier_may_skip_and_says_so(place, slow, caplog):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": {**slow, "on_lag": "skip"}})
    with ts.Checkpointer(spec, "run") as ckpt:
        gate = faulty(slow).shut("writer")
        saves = [ckpt.save(state(0), step=0)]
        until(lambda: ckpt._pipeline.queues["slow"].copying() == 1)
        for step in range(1, 6):
            saves.append(ckpt.save(state(step), step=step))
            saves[-1].wait("nvme")
        until(lambda: ckpt.stats().tiers["slow"].skipped >= 3)
        assert len(steps(ckpt, "nvme")) <= 4, "what was left out is held no longer"
        gate.set()
        saves[5].wait("slow")
        for save in saves[1:5]:
            with pytest.raises(ts.NotFound, match=r"does not go to tier 'slow': slow lags behind.*on_lag"):
                save.wait("slow")
            assert not save.done("slow")
            assert save.errors() == {}
        stats = ckpt.stats().tiers["slow"]
        assert (stats.skipped, stats.saves, stats.failures) == (4, 2, 0)
        assert "step 3 is left out on slow" in caplog.text
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") == [0, 5]


def tables(run: str) -> int:
    """Versions of a run that are in memory."""
    gc.collect()
    return sum(type(o) is Version and o.head.run == run for o in gc.get_objects())


def test_a_queue_brings_all_and_holds_only_numbers(place, slow):
    """However far a tier lags: the arena stays as it is, and of the versions that wait no tables are there."""
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    with ts.Checkpointer(spec, "lagging") as ckpt:
        gate = faulty(slow).shut("writer")
        for step in range(30):
            ckpt.save(state(step), step=step).wait("nvme")
        assert tables("lagging") <= 4
        stats = ckpt.stats()
        assert stats.arena_peak <= 256 << 10
        assert stats.tiers["slow"].lag == 30
        assert stats.tiers["slow"].waiting == 30 * (9000 + 4096)
        gate.set()
    with ts.Checkpointer(spec, "lagging") as ckpt:
        assert steps(ckpt, "slow") == list(range(30))


@pytest.mark.usefixtures("late")
def test_an_outage_of_many_saves_holds_only_numbers(place, slow):
    """Nor do the errors that are kept until somebody asks for them hold tables, or versions beyond a bound."""
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow})
    ckpt = ts.Checkpointer(spec, "down")
    faulty(slow).add(Fault("append", 0, GONE))
    saves = []
    for step in range(MAX_WAITING + 20):
        saves.append(ckpt.save(tensors(100, seed=step), step=step))
        failed(saves[-1])  # one by one: of many that wait at once, the oldest would be left out instead
    assert tables("down") <= 4
    assert ckpt.stats().tiers["slow"].owed == MAX_WAITING
    faulty(slow).heal()
    ckpt.close()
    assert len(names(faulty(slow).inner, "versions/")) == MAX_WAITING
    assert len(names(opened(spec, "nvme"), "versions/")) == 1


@pytest.mark.usefixtures("soon")
def test_a_save_that_reached_no_tier_that_lasts_is_told_although_another_one_left_it_out(slow):
    with wrapped(Memory()) as first:
        spec = policy({"first": first, "slow": {**slow, "on_lag": "skip"}})
        ckpt = ts.Checkpointer(spec, "run")
        save_state = ckpt.save(state(0), step=0)._save_state
        until(save_state.settled)
        save_state.tiers = {name: type(future)() for name, future in save_state.tiers.items()}
        save_state.failed("first", ts.TierFull("full"))
        save_state.leave_out("slow", "it lags")
        ckpt._pipeline._saves.add(save_state)
        with pytest.raises(ts.TierFull) as caught:
            ckpt.save(state(1), step=1)
        assert "no durable copy" in caught.value.__notes__[0]
        ckpt.close()


# What retention holds back


def test_a_host_tier_lets_go_of_what_one_lasting_tier_has(place, slow):
    spec = policy({"host": tier("host", place, keep={"last": 1}), "nvme": tier("nvme", place), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        gate = faulty(slow).shut("writer")
        for step in range(5):
            save = ckpt.save(state(step), step=step)
            save.wait("host")
            save.wait("nvme")
        until(lambda: steps(ckpt, "host") == [4])
        assert ckpt.stats().tiers["slow"].lag == 5
        gate.set()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert steps(ckpt, "slow") == [0, 1, 2, 3, 4]


def test_a_version_stays_until_one_slower_tier_has_it_and_that_is_told(place, slow, caplog):
    caplog.set_level(logging.WARNING)
    with wrapped(Memory()) as last:
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow, "last": last})
        with ts.Checkpointer(spec, "run") as ckpt:
            gates = [faulty(keys).shut("writer") for keys in (slow, last)]
            for step in range(5):
                ckpt.save(state(step), step=step).wait("nvme")
            until(lambda: len(ckpt.stats().tiers["nvme"].held) == 4)
            held = ckpt.stats().tiers["nvme"].held
            assert held == dict.fromkeys(range(1, 5), "slow has not got it yet")
            assert caplog.text.count("nvme keeps 3 versions longer than `keep` says") == 1
            gates[0].set()
            del faulty(slow).gates["writer"]
            until(lambda: steps(ckpt, "slow") == [0, 1, 2, 3, 4])
            ckpt.save(state(5), step=5).wait("slow")
            ckpt.save(state(6), step=6).wait("nvme")
            # `last` is stuck with the first of all, which nobody takes away under its hands.
            until(lambda: set(steps(ckpt, "nvme")) <= {0, 5, 6})
            gates[1].set()
        with ts.Checkpointer(spec, "run") as ckpt:
            assert steps(ckpt, "last") == list(range(7))
            assert steps(ckpt, "nvme") == [6]
            assert ckpt.verify(deep=True).ok


def test_where_rules_part_a_state_each_tier_that_waits_counts(place, slow):
    """What the first slower tier has is not all that the second one is to get."""
    rules = [{"match": "model.**", "tiers": ["nvme", "file", "slow"]}, {"match": "**", "tiers": ["nvme", "slow"]}]
    tiers = {"nvme": tier("nvme", place, keep={"last": 1}), "file": tier("file", place), "slow": slow}
    with ts.Checkpointer(policy(tiers, rules=rules), "run") as ckpt:
        gate = faulty(slow).shut("writer")
        for step in range(3):
            ckpt.save({"model": state(step), "rest": state(step + 50)}, step=step).wait("file")
        assert steps(ckpt, "nvme") == [0, 1, 2]
        gate.set()
    with ts.Checkpointer(policy(tiers, rules=rules), "run") as ckpt:
        assert steps(ckpt, "slow") == [0, 1, 2]
        assert steps(ckpt, "nvme") == [2]
        assert difference({"model": state(0), "rest": state(50)}, ckpt.load(step=0)) == ""


# What is known by the time that somebody is told


class Lingering(Completion):
    """An outcome after which the thread that tells it does nothing more for now."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def _set(self, error: BaseException | None) -> None:
        super()._set(error)
        assert self._gate.wait(120)


def lingering(ckpt: ts.Checkpointer, slow: dict[str, Any], step: int) -> tuple[ts.Save, threading.Event]:
    """A save after whose outcome the slow tier's thread lingers, until the event that is returned is set."""
    begin, go_on = faulty(slow).shut("writer"), threading.Event()
    save = ckpt.save(state(step), step=step)
    save._save_state.tiers["slow"] = Lingering(go_on)
    faulty(slow).gates.clear()
    begin.set()
    return save, go_on


def test_what_has_arrived_holds_nothing_back(place, slow):
    """Not even as long as the thread that told it is not done with it."""
    spec = policy({"host": tier("host", place, keep={"last": 1}), "slow": slow})
    with ts.Checkpointer(spec, "run") as ckpt:
        save, go_on = lingering(ckpt, slow, 1)
        save.wait("slow")
        stats = ckpt.stats().tiers["slow"]
        assert (stats.lag, stats.waiting, stats.behind, len(stats.seconds)) == (0, 0, 0.0, 1)
        ckpt.save(state(2), step=2).wait("host")
        until(lambda: steps(ckpt, "host") == [2])
        go_on.set()


@pytest.mark.parametrize("error", [GONE, ts.TierFull("full", tier="slow")])
@pytest.mark.usefixtures("late")
def test_a_save_that_failed_does_not_count_as_soon_as_that_is_told(place, slow, error):
    spec = policy({"nvme": tier("nvme", place), "slow": {**slow, "every": 10}})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state(0), step=0).wait("slow")
        faulty(slow).add(Fault("append", 0, error))
        save, go_on = lingering(ckpt, slow, 10)
        with pytest.raises(type(error)):
            save.wait("slow")
        stats = ckpt.stats().tiers["slow"]
        assert (stats.lag, stats.owed, stats.failures) == (0, error is GONE, 1)
        faulty(slow).heal()
        save = ckpt.save(state(11), step=11)
        go_on.set()
        assert "slow" in save.tiers
        save.wait("slow")


@pytest.mark.usefixtures("soon")
def test_what_is_owed_counts_once_and_no_longer_when_it_is_there(place, slow, caplog):
    caplog.set_level(logging.INFO, "tierstate")
    spec = policy({"nvme": tier("nvme", place), "slow": slow})
    owed: dict[str, set[int]] = {"is still owed": set(), "is there now": set()}

    class Counts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for text, found in owed.items():
                if text in record.getMessage():
                    found.add(ckpt.stats().tiers["slow"].owed)

    with ts.Checkpointer(spec, "run") as ckpt:
        handler = Counts()
        logging.getLogger("tierstate").addHandler(handler)
        try:
            faulty(slow).add(Fault("append", 0, GONE))
            failed(ckpt.save(state(1), step=1))
            until(lambda: owed["is still owed"])
            faulty(slow).heal()
            until(lambda: ckpt.stats().tiers["slow"].brought == 1)
            assert owed == {"is still owed": {1}, "is there now": {0}}
        finally:
            logging.getLogger("tierstate").removeHandler(handler)


# What review found


def test_leaves_that_only_an_ailing_tier_was_to_get_first_go_elsewhere_themselves(slow):
    with wrapped(Memory()) as first, wrapped(Memory()) as second:
        spec = policy(
            {"first": first, "slow": slow, "second": second}, rules=[{"match": "b", "tiers": ["first", "second"]}]
        )
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000, 4096), step=0).wait("second")
            faulty(first).add(Fault("writer", 0, GONE))
            saves = []
            for step in (1, 2):
                saves.append(ckpt.save(tensors(9000, 4096, seed=step), step=step))
                with pytest.raises(ts.TierUnavailable):
                    saves[-1].wait("first")
            saves[1].wait("second")  # from then on it is known that nothing can be had of the first one
            assert 2 in steps(ckpt, "second")
            faulty(first).heal()
            with pytest.raises(ts.TierUnavailable):  # what writes from slabs goes before this copy
                saves[0].wait("second")
            for save in saves:
                save._save_state.tiers["slow"].exception()
            ckpt._pipeline.failures()


def test_a_version_is_held_for_a_tier_before_the_one_that_has_it(slow):
    with wrapped(Memory()) as first, wrapped(Memory()) as last:
        spec = policy({"first": {**first, "keep": {"last": 1}}, "slow": slow, "last": last})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000), step=0).wait("last")
            gate = faulty(slow).shut("writer")
            saves = [ckpt.save(tensors(9000, seed=step), step=step) for step in (1, 2, 3)]
            for save in saves:
                save.wait("last")
            faulty(slow).gates.clear()
            gate.set()
            for save in saves:
                save.wait("slow")
            assert steps(ckpt, "slow") == [0, 1, 2, 3]


@pytest.mark.usefixtures("soon")
def test_a_debt_waits_for_a_source_that_is_still_writing(slow):
    with wrapped(Memory()) as first, ts.Checkpointer(policy({"first": first, "slow": slow}), "run") as ckpt:
        ckpt.save(tensors(9000), step=0).wait("slow")
        faulty(first).add(Fault("writer", 1, GONE))
        failed(ckpt.save(tensors(9000, seed=1), step=1), "first")
        # It answers again, slowly; and the other one fails once.
        gate = faulty(first).shut("close")
        faulty(slow).add(Fault("writer", 1, GONE))
        save = ckpt.save(tensors(9000, seed=2), step=2)
        failed(save)
        time.sleep(0.3)  # for some attempts
        gate.set()
        save.wait("first")
        until(lambda: 2 in steps(ckpt, "slow"))
        ckpt._pipeline.failures()


def test_the_newest_is_looked_for_again_when_it_is_dropped_while_it_is_read(place, monkeypatch):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1})})
    with ts.Checkpointer(spec, "run") as saver, ts.Checkpointer(spec, "run") as reader:
        saver.save(tensors(9000, seed=1), step=1).wait()
        fill, states = restore.fill_target, [tensors(9000, seed=2)]

        def save_both() -> None:
            saver.save(states[0], step=2).wait()
            saver.save(states.pop(), step=3)
            saver.close()

        def saved_meanwhile(*args: Any) -> Any:
            if states:
                other = threading.Thread(target=save_both)
                other.start()
                other.join()
            return fill(*args)

        monkeypatch.setattr(restore, "fill_target", saved_meanwhile)
        assert difference(tensors(9000, seed=2), reader.load()) == ""
