"""Tiers that fail, and two writers: what is reported, what is lost (nothing durable), and how a run goes on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.checkpointer_worlds import arena_of, faulty, names, opened, policy, tensors, tier, unreferenced, wrapped
from support.equality import difference
from support.leaks import nothing_left

import tierstate as ts
from tierstate import checkpointer
from tierstate.engine.publish import backlog
from tierstate.manifest.format.marker import MARKER_KEY
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault


def test_a_tier_that_fails_does_not_hold_up_the_others_and_recovers(place, monkeypatch):
    monkeypatch.setattr(
        backlog, "TIER_BACKOFF", Backoff(600.0, 600.0, 0.5)
    )  # the next save comes before the tier is tried by itself
    with wrapped(Memory()) as keys:
        spec = policy({"nvme": tier("nvme", place), "bad": {**keys, "every": 10}, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            bad = faulty(keys)
            bad.add(Fault("writer", 0, ts.TierUnavailable("the switch is gone", tier="bad")))
            save = ckpt.save(tensors(9000), step=0)
            save.wait()
            save.wait("file")
            with pytest.raises(ts.TierUnavailable, match="the switch is gone"):
                save.wait("bad")
            assert set(save.errors()) == {"bad"}
            assert not ckpt.stats().tiers["bad"].healthy
            assert ckpt.stats().tiers["bad"].failures == 1
            bad.heal()
            # Not due by its cadence, but it has nothing of this multiple of ten yet.
            ckpt.save(tensors(9000, seed=1), step=1).wait("bad")
            assert ckpt.stats().tiers["bad"].healthy
            last = ckpt.save(tensors(9000, seed=2), step=2)
            assert last.tiers == ("nvme", "file")
            last.wait("file")
            assert [v.step for v in ckpt.versions() if "bad" in v.tiers] == [1]
            assert ckpt.verify(deep=True).ok
            assert arena_of(ckpt).in_flight == 0


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_a_memory_tier_without_room_beside_a_durable_tier_is_told_and_ends_no_job(place, kind):
    seen = []
    spec = policy({"small": tier(kind, place, capacity="8KiB"), "nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.on("failed", lambda event: seen.append((event.tier, event.step)))
        for step in range(3):
            save = ckpt.save(tensors(40_000, seed=step), step=step)
            save.wait()
        with pytest.raises(ts.TierFull):
            save.wait("small")
        assert ckpt.stats().tiers["small"].failures == 3
    assert seen == [("small", step) for step in range(3)]


def test_a_memory_tier_without_room_for_what_no_durable_tier_has_is_raised_at_the_end(place):
    with wrapped(Memory()) as keys:
        spec = policy({"small": tier("host", place, capacity="8KiB"), "bad": keys})
        ckpt = ts.Checkpointer(spec, "run")
        faulty(keys).add(Fault("writer", 0, ts.AccessDenied("no")))
        lost = ckpt.save(tensors(40_000), step=0)
        while len(lost.errors()) < 2:
            pass
        with pytest.raises(ts.TierstateError) as caught:
            ckpt.close()
        assert {note.split(":")[0] for note in caught.value.__notes__} == {
            "step 0 did not arrive at small",
            "step 0 did not arrive at bad",
        }


def test_a_slower_tier_gets_the_save_although_the_first_durable_one_fails(place):
    with wrapped(Memory()) as keys:
        spec = policy({"host": tier("host", place), "bad": keys, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            faulty(keys).add(Fault("append", 0, ts.TierFull("full", tier="bad")))
            for step in range(3):
                save = ckpt.save(tensors(40_000, seed=step), step=step)
                save.wait("file")
                with pytest.raises(ts.TierFull):
                    save.wait()
            assert names(faulty(keys).inner) == [MARKER_KEY]
        with ts.Checkpointer(spec, "run") as ckpt:
            assert difference(tensors(40_000, seed=2), ckpt.load()) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [OSError(5, "input/output error"), ValueError("a bug of theirs"), TimeoutError("late")]
)
@pytest.mark.parametrize("operation", ["writer", "append", "close", "put", "list", "delete", "size"])
def test_errors_that_no_tier_should_raise_are_told_and_stop_nothing(place, error, operation):
    """Somebody's backend raises what it likes; the tier queue's thread lives on, and so do the other tiers."""
    with wrapped(Memory()) as keys:
        spec = policy({"nvme": tier("nvme", place), "bad": {**keys, "keep": {"last": 1}}, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in range(2):
                ckpt.save(tensors(9000, seed=step), step=step).wait("bad")
            bad = faulty(keys)
            bad.add(Fault(operation, 0, error))
            save = ckpt.save({**tensors(9000, seed=1), "new": torch.ones(9)}, step=2)
            save.wait("file")
            if operation in ("writer", "append", "close", "put"):
                with pytest.raises(type(error)):
                    save.wait("bad")
            with contextlib.suppress(type(error)):
                save.wait("bad", timeout=60)
            bad.heal()
            ckpt.save(tensors(9000, seed=3), step=3).wait("bad")
            assert difference(tensors(9000, seed=3), ckpt.load()) == ""


def test_two_writers_of_one_run_are_told_and_both_go_on(place):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as one, ts.Checkpointer(spec, "run") as two:
        one.save(tensors(20_000, 5000), step=1).wait("file")
        two.save(tensors(20_000, 5000), step=2).wait("file")
        with pytest.raises(ts.AlreadyExists, match="versions/run/000000000002"):
            one.save(tensors(20_000, 5000), step=2).wait()
        # The other one's packs are dropped: what it remembers of them is wrong by now.
        for step in range(3, 6):
            one.save(tensors(20_000, 5000, seed=step), step=step).wait("file")
        with pytest.raises((ts.AlreadyExists, ts.NotFound)):
            two.save(tensors(20_000, 5000), step=3).wait()
        save = two.save(tensors(20_000, 5000), step=10)
        save.wait()
        save.wait("file")
        assert difference(tensors(20_000, 5000), one.load()) == ""
        assert one.verify(deep=True).ok
        for ckpt in (one, two):
            with pytest.raises(ts.TierUnavailable, match="no faster tier has it"):
                ckpt.close()
    assert unreferenced(opened(spec, "nvme"), "run") == set()


def test_a_conflict_while_a_later_save_is_under_way(place):
    """The number of the later save is not given out a second time."""
    with wrapped(Memory()) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            where = faulty(keys)
            gate = where.shut("put")
            first = ckpt.save(tensors(100), step=1)
            second = ckpt.save(tensors(200), step=2)
            where.inner.put("versions/run/000000000001", torch.zeros(5, dtype=torch.uint8))
            del where.gates["put"]
            gate.set()
            with pytest.raises((ts.AlreadyExists, ts.CommitUnknown)):
                first.wait()
            third = ckpt.save(tensors(300), step=3)
            second.wait()
            third.wait()
            assert third.seq == 3


BEGINNING = ("open_policy_tier", "pipeline_of", "auto_cadence", "FlattenCache", "Planner", "AlarmTags", "Telemetry")
"""What the constructor of a `Checkpointer` calls, in this order."""


@pytest.mark.parametrize("fails", BEGINNING)
def test_a_checkpointer_that_could_not_be_made_leaves_nothing_open(place, monkeypatch, fails):
    """A tier that is not mounted yet, say, and a program that tries again."""
    keys = {"statistics": True, "alarms": {"action": "tag"}, "metrics": {"events": True}}
    spec = policy({"nvme": tier("nvme", place), "file": tier("file", place)}, **keys)
    found, closed = [], []

    def fail(*_args, **_more):
        raise ts.TierUnavailable("not now")

    def open_one(*args, usual=checkpointer.open_policy_tier):
        if fails == "open_policy_tier" and found:
            fail()
        one = usual(*args)
        found.append(one.name)
        monkeypatch.setattr(one, "close", lambda close=one.close: [closed.append(one.name), close()])
        return one

    monkeypatch.setattr(checkpointer, fails, fail)
    monkeypatch.setattr(checkpointer, "open_policy_tier", open_one)
    with nothing_left(place):
        with pytest.raises(ts.TierUnavailable, match="not now"):
            ts.Checkpointer(spec, "run")
        assert closed == found[::-1] == (["nvme"] if fails == "open_policy_tier" else ["file", "nvme"])
