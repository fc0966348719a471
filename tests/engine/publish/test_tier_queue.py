"""Tier queues: whatever a tier does at whichever call, every slab comes back, and nothing durable is lost."""

from __future__ import annotations

import contextlib
import threading
from itertools import count
from typing import Any

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from support.checkpointer_worlds import (
    Wrapped,
    arena_of,
    engine_threads,
    faulty,
    opened,
    policy,
    scratch,
    tensors,
    unreferenced,
    wrapped,
)
from support.equality import difference
from support.outcomes import until

import tierstate as ts
from tierstate.engine.events import EventBus
from tierstate.engine.publish import tier_queue
from tierstate.engine.publish.backlog import Backlog
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_queue import Cascade, TierQueue
from tierstate.manifest.errors import TierFull, error_text
from tierstate.manifest.format.marker import MARKER_KEY
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier
from tierstate.tiers.latch import Completion, Latch
from tierstate.tiers.memory.host import Host, Memory
from tierstate.tiers.testing import Fault

OPERATIONS = st.sampled_from(["put", "read", "list", "size", "delete", "writer", "append", "close"])


class Unprintable(Exception):
    """An error that fails itself when it is put into a message."""

    def __str__(self) -> str:
        raise ValueError("not set")

    __repr__ = __str__


ERRORS = st.sampled_from(
    [
        ts.TierFull("full"),
        ts.TierUnavailable("gone"),
        ts.AccessDenied("no"),
        ts.AlreadyExists("taken"),
        ts.NotFound("lost"),
        ts.TierError("odd"),
        OSError(5, "foreign"),
        RuntimeError("a bug of theirs"),
        Unprintable(),
        SystemExit(3),
    ]
)
SIZES = (30_000, 500, 8192, 60)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """A call that fails, once or from then on; only an answer can be lost after the call took effect."""
    operation, at = draw(OPERATIONS), draw(st.integers(0, 12))
    after = draw(st.booleans())
    return Fault(operation, at, ts.TierUnavailable("no answer") if after else draw(ERRORS), after)


def keys_of(first: bool, host: bool, bad: dict[str, Any], good: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Tiers of a policy: the bad one first or second, perhaps with a host tier before both."""
    kept = {**bad, "keep": {"last": 2}}
    tiers = {"bad": kept, "good": good} if first else {"good": good, "bad": kept}
    return {**({"host": {"type": "host", "keep": {"last": 1}}} if host else {}), **tiers}


@pytest.mark.slow
# The tier fails when it is asked, after the commit, whether the version that was built on is still there.
@example(fault=Fault("size", 2, TierFull("full")), first=False, host=False, hostlike=False, changed={0})
# It cannot be said what the error is; and what no tier should raise, in the thread that looks for its marker first.
@example(fault=Fault("put", 0, Unprintable()), first=False, host=False, hostlike=False, changed={0})
@example(fault=Fault("put", 0, SystemExit(3)), first=False, host=False, hostlike=False, changed={0})
@given(
    fault=faults(), first=st.booleans(), host=st.booleans(), hostlike=st.booleans(), changed=st.sets(st.integers(0, 3))
)
def test_a_tier_that_fails_at_any_call_loses_nothing_and_keeps_no_slab(
    fault: Fault, first: bool, host: bool, hostlike: bool, changed: set[int]
) -> None:
    inner: Tier = Host() if hostlike else Memory()
    with wrapped(inner) as bad, wrapped(Memory()) as good:
        # A tier that keeps leases, and does not tell the arena so, needs room for all that it keeps.
        spec = policy(keys_of(first, host, bad, good), arena={"size": "2MiB" if hostlike else "32KiB"})
        states = [tensors(*SIZES)]
        for step in (1, 2):
            one = {n: t + step if i in changed or step == 2 else t for i, (n, t) in enumerate(states[-1].items())}
            states.append(one)
        ckpt = ts.Checkpointer(spec, "run")
        saved(ckpt.save(states[0], step=0), "bad")
        where = faulty(bad)
        where.add(fault)
        # Told at the second save if the first one reached no persistent tier at all: then it is not made.
        second = save(ckpt, states[1], 1)
        failed = "" if second is None else outcome(second, "bad")
        event(f"{fault.operation}: {'failed' if failed else 'saved'}")
        outcome(second, "good")
        where.heal()
        third = save(ckpt, states[2], 2) or save(ckpt, states[2], 2)
        assert third is not None
        # A tier that lied about what it has may be caught once more; then it is looked at again.
        if outcome(third, "bad"):
            third = save(ckpt, states[2], 2) or save(ckpt, states[2], 2)
            assert third is not None
            assert outcome(third, "bad") == ""
        ckpt._pipeline.close()
        check(ckpt, where, states, failed, fault)
        inner.close()
        assert arena_of(ckpt).in_flight == 0
        with contextlib.suppress(Exception):
            ckpt.close()
        assert engine_threads() == []


def save(ckpt: ts.Checkpointer, state: Any, step: int) -> ts.Save | None:
    """A save; None where it told of an earlier one instead."""
    try:
        return ckpt.save(state, step=step)
    except Exception:
        return None


def saved(made: ts.Save | None, tier: str) -> None:
    assert made is not None
    assert outcome(made, tier) == ""


def outcome(made: ts.Save | None, tier: str) -> str:
    """What became of a save on a tier; empty where all is well."""
    found: BaseException | None = None
    try:
        if made is not None:
            made.wait(tier, timeout=20)
    except BaseException as error:
        found = error
    assert found is None or isinstance(found, Exception), "it would end the program"
    text = error_text(found) if found is not None else ""
    assert "after 20 s" not in text, "it hangs"
    return text


def check(ckpt: ts.Checkpointer, where: Wrapped, states: list[Any], failed: str, fault: Fault) -> None:
    """All that the bad tier lists is whole in it alone; what failed is not listed, and left nothing."""
    report = ckpt.verify(deep=True)
    assert report.ok, report
    log = Log(where.inner, "run")
    steps = {log.read(seq).version.head.step for seq in log.seqs()}
    assert 2 in steps
    assert len(steps) <= 2, "old versions are dropped, if not at once"
    # A create that was not answered may take effect yet.
    unknown = "CommitUnknown" in failed or (fault.operation == "put" and "TierUnavailable" in failed)
    if failed and "CommitUnknown" not in failed:
        assert (1 in steps) == bool(ckpt.stats().tiers["bad"].brought)
    for version in ckpt.versions():
        assert difference(states[version.step], ckpt.load(version=version.id)) == ""
    # Nobody may delete what an unknown commit may name, nor can what the tier will not delete be deleted.
    if not unknown and not (failed and fault.operation in ("delete", "list")) and fault.at != 0:
        assert unreferenced(where.inner, "run") == set()


def test_packs_stay_while_a_record_that_was_not_answered_may_still_arrive() -> None:
    with wrapped(Memory()) as keys, ts.Checkpointer(policy({"bad": keys}), "run") as ckpt:
        faulty(keys).add(Fault("put", 2, ts.TierUnavailable("no answer")))  # the first one is of the marker
        made = ckpt.save(tensors(*SIZES), step=0)
        assert "no answer" in outcome(made, "bad")
        inner = faulty(keys).inner
        assert list(inner.list("versions/")) == []
        assert len(list(inner.list("packs/"))) == 1, "deleting it would make the record a lie, should it arrive"


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError("the answer was lost")])
def test_packs_stay_while_a_record_may_be_there_for_all_that_its_error_says(error: Exception) -> None:
    """It is no error of a tier, and it cannot be read back: the record is there, and so must be what it names."""
    with wrapped(Memory()) as keys, ts.Checkpointer(policy({"bad": keys}), "run") as ckpt:
        tier = faulty(keys)
        tier.add(Fault("put", 2, error, after=True))  # the first one is of the marker
        tier.add(Fault("read", 0, error))
        made = ckpt.save(tensors(*SIZES), step=0)
        assert "nothing was deleted" in outcome(made, "bad")
        tier.heal()
        assert ckpt.verify(deep=True).ok
        assert [version.step for version in ckpt.versions()] == [0]


@pytest.mark.parametrize("operation", ["put", "writer", "append", "close"])
def test_a_tier_that_always_fails_is_tried_at_every_save(operation: Any) -> None:
    with wrapped(Memory()) as bad, wrapped(Memory()) as good:
        spec = policy({"bad": bad, "good": good})
        with ts.Checkpointer(spec, "run") as ckpt:
            faulty(bad).add(Fault(operation, 0, ts.TierFull("full")))
            made = ckpt.save(tensors(*SIZES), step=0)
            assert outcome(made, "bad")
            outcome(made, "good")
            for step in range(1, 4):
                made = save(ckpt, tensors(*SIZES, seed=step), step) or save(ckpt, tensors(*SIZES, seed=step), step)
                assert "full" in outcome(made, "bad")
                assert outcome(made, "good") == "", "from the second on it is entered directly"
            assert ckpt.stats().tiers["bad"].failures >= 4
            assert set(faulty(bad).inner.list("")) <= {MARKER_KEY}
            assert arena_of(ckpt).in_flight == 0


def test_tiers_that_were_all_down_come_back_each_by_itself() -> None:
    with wrapped(Memory()) as one, wrapped(Memory()) as two, wrapped(Memory()) as three:
        spec = policy({"one": one, "two": two, "three": three})
        with ts.Checkpointer(spec, "run") as ckpt:
            made = ckpt.save(tensors(*SIZES), step=0)
            for name in ("one", "two", "three"):
                saved(made, name)
            for keys in (one, two, three):
                faulty(keys).add(Fault("writer", 0, ts.TierUnavailable("the power is out")))
            for step in range(1, 4):
                made = save(ckpt, tensors(*SIZES, seed=step), step)
                assert made is None or all(outcome(made, name) for name in ("one", "two", "three"))
            faulty(three).heal()
            made = save(ckpt, tensors(*SIZES, seed=8), 8) or save(ckpt, tensors(*SIZES, seed=8), 8)
            saved(made, "three")
            assert outcome(made, "one")
            assert outcome(made, "two")
            faulty(one).heal()
            faulty(two).heal()
            made = ckpt.save(tensors(*SIZES, seed=9), step=9)
            assert [outcome(made, name) for name in ("one", "two", "three")] == ["", "", ""]
            assert ckpt.verify(deep=True).ok


@pytest.mark.parametrize("ended", [False, True])
def test_a_save_that_fails_while_all_is_closed_is_tried_once_more_like_one_that_failed_before(*, ended: bool) -> None:
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        ckpt = ts.Checkpointer(policy({"near": near, "far": far}), "run")
        ckpt.save(tensors(*SIZES), step=0).wait("far")
        faulty(far).add(Fault("writer", 1, ts.TierUnavailable("no answer")))
        gate = faulty(far).shut("writer")
        save = ckpt.save(tensors(*SIZES, seed=1), step=1)
        closing = threading.Thread(target=ckpt.close)
        if not ended:
            gate.set()
            assert outcome(save, "far")
        closing.start()
        if ended:
            until(lambda: ckpt._pipeline.queues["far"]._ended)
            gate.set()
        closing.join()
        assert len(Log(opened(policy({"far": far}), "far"), "run").seqs()) == 2


class Tired(Memory):
    """A tier whose listings fail in a way that no tier should, once packs are asked for."""

    error: BaseException = RuntimeError("worn out")

    def list(self, prefix: str) -> Any:
        if prefix.startswith("packs/"):
            raise self.error
        return super().list(prefix)


@pytest.mark.parametrize("error", [RuntimeError("worn out"), SystemExit(3)])
def test_a_tier_that_fails_after_the_commit_does_not_stop_its_queue(error: BaseException) -> None:
    tired = Tired()
    tired.error = error
    with wrapped(tired) as keys:
        with ts.Checkpointer(policy({"only": {**keys, "keep": {"last": 1}}}), "run") as ckpt:
            for step in range(3):
                ckpt.save(tensors(*SIZES, seed=step), step=step).wait(timeout=30)
            assert difference(tensors(*SIZES, seed=2), ckpt.load()) == ""
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []


@pytest.mark.slow
@given(dropped=st.sets(st.sampled_from(["a", "b", "c"]), max_size=2), more=st.booleans())
def test_a_copy_is_made_from_any_tier_in_which_no_other_process_has_dropped_the_version(
    dropped: set[str], more: bool
) -> None:
    """As an agent does that still publishes what an earlier trainer has saved, beside the next one."""
    with scratch() as place:
        tiers = {name: {"type": "nvme", "path": str(place / name)} for name in ("a", "b", "c", "far")}
        with ts.Checkpointer(policy(tiers), "run") as ckpt, contextlib.ExitStack() as after:
            ckpt.save(tensors(*SIZES), step=0).wait("far")
            to_far = ckpt._pipeline.queues["far"]
            to_far.pause_copies(1000)
            after.callback(to_far.pause_copies, 0)  # whatever fails here: `close` would wait for it
            save = newest = ckpt.save(tensors(*SIZES, seed=1), step=1)
            if more:  # so that what was dropped is not the newest one
                newest = ckpt.save(tensors(*SIZES, seed=2), step=2)
            for name in ("a", "b", "c"):
                newest.wait(name)
            for name in dropped:
                log = Log(opened(policy({name: tiers[name]}), name), "run")
                log.forget(log.seqs()[1])
            to_far.pause_copies(0)
            save.wait("far", timeout=60)
        with ts.Checkpointer(policy({"far": tiers["far"]}), "run") as ckpt:
            assert difference(tensors(*SIZES, seed=1), ckpt.load(step=1)) == ""


@given(tagged=st.booleans(), waiting=st.booleans())
def test_retention_keeps_what_others_that_save_the_run_in_this_process_need(*, tagged: bool, waiting: bool) -> None:
    """As in an agent: the session of a trainer that was killed, and the one of the next trainer."""
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        spec = policy({"near": {**near, "keep": {"last": 1}}, "far": far})
        with ts.Checkpointer(spec, "run") as before, contextlib.ExitStack() as after:
            before.save(tensors(*SIZES), step=0).wait("far")
            gate = faulty(far).shut("writer")
            after.callback(gate.set)
            with ts.Checkpointer(spec, "run") as ckpt:
                ckpt._pipeline._seq = 100
                ckpt._pipeline._cascade.others = lambda: [before._pipeline._cascade]
                ckpt.save(tensors(*SIZES, seed=9), step=9).wait("far")  # it looks for what is owed, and finds nothing
                saves = [before.save(tensors(*SIZES, seed=step), step=step) for step in (1, 2, 3)]
                saves[-1].wait("near")
                log = Log(opened(spec, "near"), "run")
                first = [seq for seq in log.seqs() if seq < 100][-3:]
                if tagged:
                    before._pipeline.hold(first[0], end=False)
                if not waiting:
                    gate.set()
                    saves[-1].wait("far")
                ckpt.save(tensors(*SIZES, seed=10), step=10).wait("far")
                until(lambda: not ckpt._pipeline.queues["near"]._busy)  # it has retired what it may
                kept = first if waiting else first[:1] if tagged else []
                assert log.seqs()[: len(kept)] == kept
                gate.set()
                for save in saves:
                    save.wait("far")
        assert len(Log(opened(spec, "far"), "run").seqs()) == 6


def test_retention_keeps_what_a_save_of_another_one_builds_on() -> None:
    with wrapped(Memory()) as keys:
        spec, state = policy({"near": {**keys, "keep": {"last": 1}}}), tensors(*SIZES)
        with ts.Checkpointer(spec, "run") as before, contextlib.ExitStack() as after:
            before.save(state, step=0).wait("near")
            gate = faulty(keys).shut("put")
            after.callback(gate.set)
            late = before.save(state, step=1)  # every chunk is the one of step 0
            until(lambda: before._pipeline.queues["near"].waiting and before._pipeline.queues["near"]._running)
            with ts.Checkpointer(spec, "run") as ckpt:
                ckpt._pipeline._seq = 5  # the other one has taken a number that is not in the tier yet
                ckpt._pipeline._cascade.others = lambda: [before._pipeline._cascade]
                ckpt.save(tensors(*SIZES, seed=1), step=2).wait("near")
            gate.set()
            late.wait("near")


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, thread: str, at: int = 1) -> Latch:
    """Have a call of a method fail for lack of memory in a thread; returns what is set then."""
    inner, failed, calls = getattr(owner, name), Latch(), count(1)

    def failing(*args: Any, **values: Any) -> Any:
        if threading.current_thread().name == thread and not failed.is_set() and next(calls) == at:
            failed.set()
            raise MemoryError
        return inner(*args, **values)

    monkeypatch.setattr(owner, name, failing)
    return failed


def check_saves_go_on(ckpt: ts.Checkpointer, failed: Latch) -> None:
    """What fails once has failed within three saves, of which the last arrives in both tiers."""
    for step in range(3):
        made = save(ckpt, tensors(*SIZES, seed=step), step)
        told = [outcome(made, tier) for tier in ("near", "far")]
    assert failed.is_set()
    assert told == ["", ""]
    assert difference(tensors(*SIZES, seed=2), ckpt.load()) == ""


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (Backlog, "trim", 1),
        (Backlog, "trim", 2),
        (Backlog, "arrived", 1),
        (SaveState, "measured", 1),
        (Cascade, "pinned", 1),
        (TierQueue, "retire", 2),
        (tier_queue, "span", 1),
        (EventBus, "emit", 1),
        (EventBus, "emit", 2),
        (EventBus, "emit", 3),
    ],
)
@pytest.mark.parametrize("thread", ["tierstate-near", "tierstate-far"])
def test_a_lack_of_memory_in_a_thread_of_a_tier_ends_neither_the_thread_nor_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, thread: str
) -> None:
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        kept = {"keep": {"last": 1}}
        with ts.Checkpointer(policy({"near": {**near, **kept}, "far": {**far, **kept}}), "run") as ckpt:
            failed = fails_once(monkeypatch, owner, name, thread, at)
            check_saves_go_on(ckpt, failed)
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (TierQueue, "put", 1),
        (TierQueue, "put", 2),
        (EventBus, "emit", 1),
        (SaveState, "capture_ended", 1),
        (Completion, "done", 2),
        (Completion, "done", 3),
    ],
)
def test_a_lack_of_memory_in_the_thread_that_captures_fails_a_save_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int
) -> None:
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        with ts.Checkpointer(policy({"near": near, "far": far}), "run") as ckpt:
            failed = fails_once(monkeypatch, owner, name, "tierstate-capture", at)
            check_saves_go_on(ckpt, failed)
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []
