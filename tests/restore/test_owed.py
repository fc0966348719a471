"""Saves that a tier of a cascade owes after it failed: what is brought afterwards, when, and what is said of it."""

from __future__ import annotations

import logging
import time
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
from support.slow_tiers import GONE, failed, lingering, state, steps, tables

import tierstate as ts
from tierstate.engine.publish.backlog import MAX_WAITING
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

pytestmark = pytest.mark.slow


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


# What is known by the time that somebody is told


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
