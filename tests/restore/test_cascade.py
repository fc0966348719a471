"""The cascade while tiers lag or are full: which versions are copied, skipped, held back, and reported."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpointer_worlds import faulty, policy, tensors, tier, wrapped
from support.equality import difference
from support.outcomes import until
from support.slow_tiers import GONE, lingering, state, steps, tables
from support.storage_sites import tried

import tierstate as ts
from tierstate.engine.capture import plan
from tierstate.engine.publish import backlog
from tierstate.engine.restore import restore
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("fails", [False, True])
def test_close_waits_for_a_faster_tier_and_not_for_the_pause_of_the_slower_one(late, slow, fails):
    """What it failed to get may come from the faster one: the last try is made once that is known."""
    with wrapped(Memory()) as first:
        ckpt = ts.Checkpointer(policy({"first": first, "slow": slow}), "run")
        ckpt._pipeline.required = ("slow",)  # both are written from slabs
        gate = faulty(first).shut("writer")
        faulty(slow).add(Fault("writer", 0, GONE))
        save = ckpt.save(state(1), step=1)
        with pytest.raises(ts.TierUnavailable):
            save.wait("slow")
        faulty(slow).heal()
        outcome: list[Any] = []
        closing = threading.Thread(target=lambda: outcome.append(tried(ckpt.close)))
        closing.start()
        until(lambda: ckpt._pipeline.queues["slow"]._ended)
        if fails:
            faulty(first).add(Fault("writer", 0, GONE))
        gate.set()
        closing.join(60)
        assert outcome, "it still waits"
        with ts.Checkpointer(policy({"first": first, "slow": slow}), "run") as again:
            assert steps(again, "slow") == ([] if fails else [1])


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
