"""The recorded tier: a tier like any other, and what a crash leaves of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import Background

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists
from tierstate.tiers.base import Tier
from tierstate.tiers.testing import Operation, Recorded, Recording, TierContract


class TestRecorded(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return Recording().tier("tier")

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, Recorded)
        return tier.again()


def some(text: str) -> Buffer:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def found(recording: Recording) -> list[tuple[dict[str, bytes], tuple[object, ...]]]:
    """What each crash leaves in the only tier, and what had been told."""
    return [(dict(crash.objects["t"]), crash.told) for crash in recording.crashes()]


def test_one_thread_leaves_what_it_had_done_and_perhaps_what_it_was_doing():
    recording = Recording()
    tier = recording.tier("t")
    tier.put("a", some("one"))
    recording.tell("a is there")
    with tier.writer("b") as writer:
        writer.append(some("tw"))
        writer.append(some("o"))
    tier.delete("a")
    recording.tell("a is gone")
    told = ("a is there",)
    assert found(recording) == [
        ({}, ()),
        ({"a": b"one"}, told),
        ({"a": b"one", "b": b"two"}, told),
        ({"b": b"two"}, (*told, "a is gone")),
    ]


def test_a_writer_that_is_not_closed_leaves_nothing():
    recording = Recording()
    tier = recording.tier("t")
    writer = tier.writer("a")
    writer.append(some("one"))
    writer.abort()
    assert recording.events == []


def test_what_fails_changes_nothing():
    recording = Recording({"t": {"a": b"one"}})
    with pytest.raises(AlreadyExists):
        recording.tier("t").put("a", some("two"))
    assert found(recording) == [({"a": b"one"}, ())]


def test_an_empty_object_is_created_once():
    tier = Recording().tier("t")
    tier.put("a", some(""))
    with pytest.raises(AlreadyExists):
        tier.put("a", some(""))


def test_operations_of_two_threads_may_each_have_taken_effect():
    recording = Recording(linger=0.05)
    tier = recording.tier("t")
    calls = [Background(lambda key=key: tier.put(key, some(key))) for key in "ab"]
    assert [call.outcome() for call in calls] == [None, None]
    assert len(recording.under_way(2)) == 2
    left = [frozenset(objects) for objects, _ in found(recording)]
    assert len(left) == 4
    assert set(left) == {frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")}


def test_of_two_that_create_one_object_at_once_either_may_have_won():
    """Also the one that failed in the end, by a crash before that; and never both."""
    recording = Recording()
    tier = recording.tier("t")
    tier.put("a", some("one"))
    with pytest.raises(AlreadyExists):
        tier.put("a", some("two"))
    recording.events.sort(key=lambda event: event.what)  # as if both had begun before either ended
    assert [event.what for event in recording.events] == ["begin", "begin", "end", "fail"]
    assert {objects.get("a") for objects, _ in found(recording)} == {None, b"one", b"two"}
    both = recording.crash(2, recording.under_way(2))
    assert both.took_effect == recording.under_way(2)[:1]
    assert both.objects["t"] == {"a": b"one"}


def test_what_was_found_can_be_used_and_crash_again():
    recording = Recording()
    recording.tier("t").put("a", some("one"))
    *_, last = recording.crashes()
    again = last.recording()
    again.tier("t").delete("a")
    assert [objects for objects, _ in found(again)] == [{"a": b"one"}, {}]
    assert recording.tier("t").objects == {"a": b"one"}, "each has its own"


def test_two_tiers_crash_at_the_same_moment():
    recording = Recording()
    for name in ("one", "two"):
        recording.tier(name).put("k", some(name))
    left = [{name: set(objects) for name, objects in crash.objects.items()} for crash in recording.crashes()]
    assert left == [{"one": set(), "two": set()}, {"one": {"k"}, "two": set()}, {"one": {"k"}, "two": {"k"}}]


def test_too_many_at_once_are_not_tried_in_every_combination():
    recording = Recording()
    tier = recording.tier("t")
    for i in range(12):
        tier.put(f"k{i}", some("x"))
    recording.events.sort(key=lambda event: event.what)
    with pytest.raises(ValueError, match="12 operations under way at once"):
        recording.crashes()
    at = len(recording.events) // 2
    half = recording.under_way(at)[::2]
    assert recording.crash(at, half).took_effect == half


@given(st.lists(st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from("abc")), max_size=12))
def test_each_crash_of_one_thread_is_a_prefix_of_what_it_did(calls: Sequence[tuple[str, str]]) -> None:
    recording, model = Recording(), [dict[str, bytes]()]
    tier = recording.tier("t")
    for number, (call, key) in enumerate(calls):
        now = dict(model[-1])
        if call == "delete":
            tier.delete(key)
            now.pop(key, None)
        elif key in now:
            with pytest.raises(AlreadyExists):
                tier.put(key, some(str(number)))
        else:
            tier.put(key, some(str(number)))
            now[key] = str(number).encode()
        model.append(now)
    left = [objects for objects, _ in found(recording)]
    assert all(objects in model for objects in left)
    assert all(objects in left for objects in model)
    ends = [event for event in recording.events if event.what != "begin"]
    assert all(isinstance(event.subject, Operation) for event in ends)
