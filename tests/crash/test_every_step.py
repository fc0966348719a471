"""A crash at every step: of saves, cascades and retention, whatever was under way has taken effect or has not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, policy, tensors
from support.crash_checks import CHANCES, RUN, Past, State, opened

import tierstate as ts
from tierstate.tiers.testing import Crash, Recording

pytestmark = pytest.mark.slow

KEEPS: dict[str, dict[str, Any]] = {"fast": {"keep": {"last": 2}}, "slow": {"keep": {"last": 1, "every": 3}}}


def recorded(
    changes: Sequence[set[int]], waits: Sequence[bool], keys: Mapping[str, Mapping[str, Any]], linger: float = 0.0
) -> tuple[Recording, dict[int, State]]:
    """A run of saves, each of which changes some leaves; what was durable where is told as soon as it is known."""
    recording, state, truth = Recording(linger=linger), tensors(9000, 4096, 100), {}
    with ExitStack() as stack, ts.Checkpointer(policy(opened(stack, recording, keys)), RUN) as ckpt:
        saves: list[ts.Save] = []
        for step, (leaves, wait) in enumerate(zip(changes, waits, strict=True)):
            for leaf in leaves:
                state[chr(97 + leaf)] += 1.0
            truth[step] = {name: tensor.clone() for name, tensor in state.items()}
            saves.append(ckpt.save(state, step=step))
            for name in keys if wait else ():
                saves[-1].wait(name)
                recording.tell((name, step))
            for save in saves:
                for name in filter(save.done, keys):
                    recording.tell((name, save.step))
    return recording, truth


def check(crash: Crash, truth: Mapping[int, State], keys: Mapping[str, Mapping[str, Any]]) -> None:
    with ExitStack() as stack:
        tiers = opened(stack, crash.recording(), keys)
        Past(truth, crash.told).check_all(tiers, tensors(9000, 4096, 100, seed=9))


def restored(recording: Recording, *names: str) -> State:
    """The newest version, from these tiers together."""
    with ExitStack() as stack:
        tiers = policy(opened(stack, recording, {name: {} for name in names}))
        found: State = stack.enter_context(ts.Checkpointer(tiers, RUN)).load()
        return found


def check_each(recording: Recording, truth: Mapping[int, State], keys: Mapping[str, Mapping[str, Any]]) -> int:
    """Every state that a crash can leave; how many there are."""
    crashes = list(recording.crashes())
    for crash in crashes:
        check(crash, truth, keys)
    return len(crashes)


def test_saves_a_cascade_and_retention_cut_off_at_every_step() -> None:
    """Every state that a crash can leave, in one history in which versions share chunks and are dropped."""
    recording, truth = recorded([set(), {0}, {1}, {0, 2}], [True, False, True, False], KEEPS, linger=0.001)
    assert check_each(recording, truth, KEEPS) > 20


@given(
    history=st.lists(st.tuples(st.sets(st.integers(0, 2)), st.booleans()), min_size=1, max_size=5),
    tiers=st.sampled_from([("fast",), ("fast", "slow"), ("slow", "fast", "third")]),
    linger=st.sampled_from([0.0, 0.0005]),
    chances=st.lists(CHANCES, min_size=3, max_size=3),
)
@settings(max_examples=max(10, settings().max_examples // 5))
def test_any_history_cut_off_anywhere(
    history: list[tuple[set[int], bool]], tiers: tuple[str, ...], linger: float, chances: list[random.Random]
) -> None:
    """Saves overlap, so that several operations may be under way; a few crashes of each history are looked at."""
    keys = {name: KEEPS.get(name, {}) for name in tiers}
    recording, truth = recorded(*zip(*history, strict=True), keys, linger)  # type: ignore[arg-type]
    for chance in chances:
        at = chance.randint(0, len(recording.events))
        under_way = recording.under_way(at)
        check(recording.crash(at, [operation for operation in under_way if chance.random() < 0.5]), truth, keys)


def test_a_crash_of_the_process_that_goes_on_after_a_crash() -> None:
    """The second process is cut off too, at every step: what either was told still holds."""
    recording, truth = recorded([set(), {0}, {1}], [True, True, False], KEEPS)
    crashes = list(recording.crashes())
    for crash in crashes[len(crashes) // 2 :: 7]:
        again, past = crash.recording(), Past(truth, crash.told)
        with ExitStack() as stack:
            step = past.go_on(opened(stack, again, KEEPS), tensors(9000, 4096, 100, seed=9))
        told = past.told - {(name, step) for name in KEEPS}
        for second in list(again.crashes())[::3]:
            with ExitStack() as stack:
                tiers = opened(stack, second.recording(), KEEPS)
                Past(past.truth, told).check_all(tiers, tensors(9000, 4096, 100, seed=10))


def test_mending_cut_off_at_every_step() -> None:
    """A damaged chunk is read from the next tier and written again here; cut off, the next restore does so again."""
    whole, truth = recorded([set(), {0}], [True, True], {"fast": {}, "slow": {}})
    objects = {name: whole.tier(name).objects for name in ("fast", "slow")}
    for key, data in objects["fast"].items():
        if key.startswith("packs/"):
            objects["fast"][key] = bytes([data[0] ^ 1]) + data[1:]
    recording = Recording(objects)
    assert alike(restored(recording, "fast", "slow"), truth[1])
    mended = [event.subject for event in recording.events if event.what == "end"]
    assert mended, "what was damaged is written again"
    for crash in recording.crashes():
        found = crash.recording()
        assert alike(restored(found, "fast", "slow"), truth[1])
        assert alike(restored(found, "fast"), truth[1]), "mended by now"
        past = Past(truth, crash.told)
        with ExitStack() as stack:
            past.go_on(opened(stack, found, {"fast": {}, "slow": {}}), tensors(9000, 4096, 100, seed=9))
        assert alike(restored(found, "fast"), past.truth[2])


class Forgetful(Recording):
    """Tiers that say of an object that it is durable before it is."""

    def tell(self, what: object) -> None:
        for at, happened in enumerate(self.events):
            if happened.what == "begin":
                self.events.insert(at, happened._replace(what="told", subject=what))
                return


def test_the_check_would_see_a_loss() -> None:
    """Guards the guard: a promise that is made too early is found to be broken, and so is another state."""
    recording, truth = recorded([set(), {0}], [True, True], KEEPS)
    early = Forgetful()
    early.begun_with, early.events = recording.begun_with, list(recording.events)
    early.tell(("slow", 1))
    with pytest.raises(AssertionError, match="were durable and are lost"):
        check_each(early, truth, KEEPS)
    with pytest.raises(AssertionError, match="is not what was saved"):
        check(recording.crash(len(recording.events)), {**truth, 1: tensors(9000, 4096, 100, seed=5)}, KEEPS)


def test_records_without_their_packs_are_seen() -> None:
    """Guards the guard: were the record created first, some crash would find it alone."""
    recording, truth = recorded([set()], [False], {"fast": {}})
    swapped = Recording({"fast": {}})
    records = [e for e in recording.events if "versions/" in str(e.subject)]
    swapped.events = [*records, *(e for e in recording.events if e not in records)]
    with pytest.raises(AssertionError, match="missing"):
        check_each(swapped, truth, {"fast": {}})


def test_what_is_found_at_the_end_is_what_was_there() -> None:
    recording, truth = recorded([set(), {0}], [False, False], {"fast": {}})
    crash = recording.crash(len(recording.events))
    assert crash.objects["fast"] == recording.tier("fast").objects
    assert alike(restored(crash.recording(), "fast"), truth[1])
