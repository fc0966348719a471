"""`max_lag` and `on_failure`: when `save` waits, warns and raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import faulty, policy, tensors, tier, wrapped
from support.outcomes import in_function, until
from support.thread_ranks import as_ranks

import tierstate as ts
from tierstate.engine.placement import due_tiers, is_too_far_behind
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.save.protection import Lag, LagBound, SaveHistory
from tierstate.manifest.format.version import Head
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.policy.models import MaxLagKeys
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.testing import Fault

BOUNDS = st.builds(
    MaxLagKeys, steps=st.integers(0, 20), seconds=st.none() | st.sampled_from([0.5, 1.0, 7.0])
) | st.builds(MaxLagKeys, seconds=st.sampled_from([0.5, 3.0, 20.0]))


@given(BOUNDS, st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_too_far_behind_is_more_steps_or_seconds_than_allowed_or_not_known(bound, step, time, last_step, last_time):
    near = step - last_step >= 0 and (bound.steps is None or step - last_step <= bound.steps)
    near = near and (bound.seconds is None or 0 <= time - last_time <= bound.seconds)
    assert is_too_far_behind(bound, (last_step, last_time), step, time) is not near
    assert is_too_far_behind(bound, None, step, time), "nothing there is behind everything"
    assert not is_too_far_behind(None, None, step, time)


@given(st.integers(1, 50), st.integers(0, 30), st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_a_save_is_due_where_every_alone_would_let_the_tier_fall_behind(every: int, most: int, gaps: list[int]) -> None:
    spec = Policy.parse(f"tiers: {{t: {{type: nvme, path: p, every: {every}, max_lag: {{steps: {most}}}}}}}")
    step, last = 0, None
    for gap in gaps:
        step += gap
        if due_tiers(spec, step, {"t": last}, 0.0):
            last = (step, 0.0)
        assert last is not None
        assert step - last[0] <= most


OUTCOMES = st.sampled_from(["committed", "failed", "left out"])


@given(BOUNDS, st.lists(st.tuples(st.integers(0, 5), OUTCOMES), min_size=1, max_size=12), st.none() | st.integers(0, 5))
def test_a_save_waits_until_any_version_that_is_near_enough_is_there(
    bound: MaxLagKeys, saves: list[tuple[int, str]], found: int | None
) -> None:
    """All outcomes are known before they are waited for; `wait` says whether one of them is near enough."""
    lag, step = LagBound("t", bound), 5
    newest = None if found is None else PendingVersion(-1, found, float(found))
    near = []
    for seq, (gap, outcome) in enumerate(saves):
        step += gap
        save_state = SaveState(Head("run", seq, step, float(step)), 1, ["t"], {})
        lag.sent(save_state)
        if outcome == "committed":
            newest = PendingVersion.of(save_state)
            save_state.committed("t")
        elif outcome == "failed":
            save_state.failed("t", ts.TierFull("no room"))
        else:
            save_state.leave_out("t", "newer ones wait")
        place = None if newest is None else (newest.step, newest.time)
        near.append(not is_too_far_behind(bound, place, step, step))
        assert (lag.wait(save_state, newest) is None) is near[-1]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=20))
def test_the_lag_is_that_between_the_newest_save_and_the_newest_version_there(saves: list[tuple[int, bool]]) -> None:
    history, step, there = SaveHistory(), 0, None
    assert history.lag("t") is None
    for seq, (gap, arrives) in enumerate(saves):
        step += gap
        due = PendingVersion(seq, step, 2.0 * step)
        history.made(due)
        if arrives:
            history.arrived("t", due)
            there = due
        expected = None if there is None else Lag(step - there.step, 2.0 * (step - there.step), seq - there.seq)
        assert history.lag("t") == expected
    if there is not None:
        history.arrived("t", PendingVersion(there.seq - 1, 0, 0.0))
        assert history.newest("t") == there, "one that was brought later makes nothing older"


def test_a_save_does_not_return_before_the_tier_is_near_enough():
    with wrapped(Memory()) as slow:
        spec = policy({"slow": {**slow, "max_lag": {"steps": 2}}})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(100), step=1)
            gate, order = faulty(slow).shut("put"), []
            saves = [ckpt.save(tensors(100), step=step) for step in (2, 3)]
            assert not any(save.done("slow") for save in saves), "within the bound nothing waits"

            def open_gate(saving: int = threading.get_ident()) -> None:
                until(lambda: in_function(saving, "_wait"))
                order.append("opened")
                gate.set()

            opener = threading.Thread(target=open_gate)
            opener.start()
            ckpt.save(tensors(100), step=4)
            order.append("returned")
            assert order == ["opened", "returned"]
            assert saves[0].done("slow")
            stats = ckpt.stats()
            assert stats.tiers["slow"].waited > 0
            assert sum(stats.blocked) >= stats.tiers["slow"].waited, "it counts as blocked"
            assert stats.tiers["slow"].durable_lag.steps <= 2
            opener.join()


@pytest.fixture
def failing():
    """A policy of a tier that works, and of one that must not fall behind."""
    with wrapped(Memory()) as good, wrapped(Memory()) as bad:

        def made(**keys: Any) -> ts.Policy:
            return policy({"good": good, "bad": {**bad, "max_lag": {"steps": 1}}}, **keys)

        yield made, bad


def test_a_tier_that_fails_and_would_fall_behind_raises_and_the_save_is_made(failing):
    made, bad = failing
    with ts.Checkpointer(made(), "run") as ckpt:
        ckpt.save(tensors(100), step=1)
        faulty(bad).add(Fault("put", 0, ts.TierFull("no room at all")))
        with pytest.raises(ts.TierFull):
            ckpt.save(tensors(100), step=2).wait("bad")
        for step in (3, 4):
            with pytest.raises(ts.TierFull, match="no room at all") as caught:
                ckpt.save(tensors(100, seed=step), step=step)
            assert "bad has step 1 as its newest, which is further behind" in caught.value.__notes__[0]
        assert ckpt.load()["a"].equal(tensors(100, seed=4)["a"]), "the other tier has it"
        faulty(bad).heal()
        ckpt.save(tensors(100), step=5)
        assert ckpt.stats().tiers["bad"].durable_lag.steps <= 1


def test_a_tier_that_fails_and_would_fall_behind_warns_where_the_policy_says_so(failing, caplog):
    made, bad = failing
    with ts.Checkpointer(made(on_failure={"action": "warn"}), "run") as ckpt:
        ckpt.save(tensors(100), step=1)
        faulty(bad).add(Fault("put", 0, ts.TierFull("no room at all")))
        with pytest.raises(ts.TierFull):
            ckpt.save(tensors(100), step=2).wait("bad")
        for step in (3, 4):
            ckpt.save(tensors(100), step=step)
        faulty(bad).heal()
        ckpt.save(tensors(100), step=5)
    said = [r.message for r in caplog.records if "than its `max_lag` allows" in r.message]
    assert len(said) >= 2


def fails(keys: dict[str, Any]) -> None:
    faulty(keys).add(Fault("put", 0, ts.TierUnavailable("gone", tier="bad")))


def settled(save: ts.Save) -> None:
    """Wait without being told of errors."""
    for future in save._save_state.tiers.values():
        future.exception()


def saved(ckpt: ts.Checkpointer, step: int) -> bool:
    """Save, and wait for the outcome; whether the save raised for an earlier one instead."""
    try:
        settled(ckpt.save(tensors(100), step=step))
    except ts.TierUnavailable:
        return True
    return False


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([1.0, 20.0, 400.0, 1900.0])), min_size=1, max_size=8),
    st.sampled_from(["raise", "warn"]),
)
def test_training_goes_on_until_it_was_unprotected_for_too_long(saves: list[tuple[bool, float]], action: str) -> None:
    """Against the definition, with a clock of the test: saves arrive or fail, and some time passes after each."""
    with wrapped(Memory()) as keys:
        spec = policy({"bad": keys}, on_failure={"action": action, "unprotected": "30min"})
        ckpt, now = ts.Checkpointer(spec, "run"), 0.0
        ckpt._pipeline.on_failure.clock = lambda: now
        lost, protected = False, 0.0  # whether the last save is to be told of, and when one last arrived
        for step, (arrives, passes) in enumerate(saves):
            raises = lost and (action == "raise" or now - protected >= 1800)
            lost = False
            if not arrives:
                fails(keys)
            told = saved(ckpt, step)
            assert told is raises
            if not told:
                lost, protected = not arrives, now if arrives else protected
            faulty(keys).heal()
            now += passes
        if lost:
            with pytest.raises(ts.TierUnavailable):
                ckpt.close()
        else:
            ckpt.close()


def test_a_save_that_was_lost_is_told_in_the_log(caplog):
    with (
        wrapped(Memory()) as keys,
        ts.Checkpointer(policy({"bad": keys}, on_failure={"action": "warn"}), "run") as ckpt,
    ):
        ckpt.save(tensors(100), step=1).wait()
        fails(keys)
        settled(ckpt.save(tensors(100), step=2))
        faulty(keys).heal()
        ckpt.save(tensors(100), step=3).wait()
    assert any("the save of step 2; it has no durable copy: gone" in r.message for r in caplog.records)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.message.startswith("policy: ")]


def test_what_of_a_policy_does_nothing_is_told_once(place, caplog):
    tiers = {"near": tier("nvme", place), "far": {**tier("file", place), "every": 1000}}
    rules = [{"match": "optimzer.**", "tiers": ["near"]}]
    with ts.Checkpointer(policy(tiers, rules=rules), "run") as ckpt:
        for step in (100, 200, 300):
            ckpt.save({"optimizer": tensors(100)}, step=step)
        assert warnings_of(caplog) == [
            "policy: rules.0: 'optimzer.**' matches no leaf of the state; the state has optimizer"
        ]
    assert len(warnings_of(caplog)) == 2
    assert "far: but for the first, none of the 3 saves of this process, steps 100 to 300" in warnings_of(caplog)[1]
    assert "'every: 100'" in warnings_of(caplog)[1]


def test_a_save_that_is_due_before_the_first_one_has_arrived_counts(place, caplog, monkeypatch):
    """As where saves follow each other fast."""
    monkeypatch.setattr(SaveHistory, "newest", lambda history, tier: None)  # nothing has arrived yet
    tiers = {"near": tier("nvme", place), "far": {**tier("file", place), "every": 2}}
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": tensors(100)}, step=step)
    assert warnings_of(caplog) == []


def test_ranks_look_at_the_leaves_of_all_of_them(place, caplog):
    """A rule that matches a leaf of another rank is none that does nothing; the coordinator tells of the other one."""
    rules = [{"match": "of_1"}, {"match": "of_nobody"}]
    spec = policy({"near": tier("nvme", place)}, rules=[{**rule, "codec": "raw"} for rule in rules])

    def train(team: Any) -> None:
        with ts.Checkpointer(spec, "run", team) as ckpt:
            ckpt.save({f"of_{team.rank}": ts.PerRank(team.rank)}, step=1).wait()

    assert as_ranks([0, 0], train) == [None, None]
    (told,) = warnings_of(caplog)
    assert told.startswith("policy: rules.1: 'of_nobody' matches no leaf of the state; the state has of_0, of_1")


def test_ranks_wait_alike_and_never_for_each_other(place):
    """One rank is slower than the other, and the tier slower than both."""
    local = {"type": "nvme", "path": str(place / "near"), "keep": {"last": 2}}
    far = {**tier("lustre", place), "operations": "200/s", "keep": {"last": 2}}
    tiers = {"near": local, "far": {**far, "every": 3, "max_lag": {"steps": 2, "seconds": "1h"}}}

    def train(team: Any) -> list[int]:
        lags = []
        with ts.Checkpointer(policy(tiers), "run", team) as ckpt:
            for step in range(1, 13):
                if team.rank == step % 2:
                    threading.Event().wait(0.01)
                ckpt.save({"w": ts.PerRank(tensors(100, seed=step)["a"])}, step=step)
                lag = ckpt.stats().tiers["far"].durable_lag
                lags.append(99 if lag is None else lag.steps)
        return lags

    found = as_ranks([0, 0], train)
    assert all(isinstance(one, list) for one in found), found
    assert all(lag <= 2 for one in found for lag in one)
