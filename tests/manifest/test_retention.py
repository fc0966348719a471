"""Retention keeps what it promised, and comes to the same end however often it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.retention import Keep, Mark, decide

steps = st.lists(st.integers(-5, 60), max_size=12)
rising = st.lists(st.integers(0, 60), max_size=12, unique=True).map(sorted)
keeps = st.one_of(
    st.builds(Keep, last=st.integers(1, 6)),
    st.builds(Keep, every=st.integers(1, 20)),
    st.builds(Keep, last=st.integers(1, 6), every=st.integers(1, 20)),
    st.builds(Keep, all=st.just(True)),
    st.none(),
)
pins = st.sets(st.integers(0, 14), max_size=3)


def marks(found):
    """Versions of a run that went through these steps; numbers with gaps."""
    return [Mark(seq + seq // 3, step) for seq, step in enumerate(found)]


@given(steps.map(marks), keeps, pins)
def test_every_version_is_kept_with_reasons_or_dropped(versions, keep, pinned):
    decision = decide(versions, keep, pinned)
    assert sorted([*decision.keep, *decision.drop]) == [m.seq for m in versions]
    assert list(decision.keep) == sorted(decision.keep)
    assert list(decision.drop) == sorted(decision.drop)
    assert all(decision.keep.values())


@given(steps.map(marks), keeps, pins)
def test_what_always_stays(versions, keep, pinned):
    decision = decide(versions, keep, pinned)
    seqs = [m.seq for m in versions]
    if seqs:
        assert "newest" in decision.keep[max(seqs)]
    for seq in pinned & set(seqs):
        assert "in use" in decision.keep[seq]
    if keep is None or keep.all:
        assert not decision.drop


@given(steps.map(marks), st.integers(1, 6))
def test_the_last_ones_stay_and_no_others(versions, last):
    decision = decide(versions, Keep(last=last))
    assert list(decision.keep) == [m.seq for m in versions][-last:]


@given(rising.map(marks), st.integers(1, 20))
def test_the_first_at_or_after_each_multiple_stays(versions, every):
    multiples = range(0, 61, every)
    first = {next((m.seq for m in versions if m.step >= multiple), None) for multiple in multiples} - {None}
    kept = {seq for seq, why in decide(versions, Keep(every=every)).keep.items() if f"every {every}" in why}
    assert kept == first


@given(steps.map(marks), st.integers(1, 20))
def test_of_steps_that_were_gone_through_twice_the_first_stands(versions, every):
    kept = [m for m in versions if f"every {every}" in decide(versions, Keep(every=every)).keep.get(m.seq, ())]
    windows = [m.step // every for m in kept]
    assert len(set(windows)) == len(windows)
    assert set(windows) == {m.step // every for m in versions}
    for mark in kept:
        assert not any(m.step // every == mark.step // every and m.seq < mark.seq for m in versions)


@given(steps.map(marks), keeps, pins, st.randoms())
def test_the_order_of_versions_does_not_matter(versions, keep, pinned, random):
    turned = random.sample(versions, len(versions))
    assert decide(turned, keep, pinned) == decide(versions, keep, pinned)


@given(steps.map(marks), keeps, pins)
def test_deciding_again_drops_nothing_more(versions, keep, pinned):
    first = decide(versions, keep, pinned)
    again = decide([m for m in versions if m.seq in first.keep], keep, pinned)
    assert again.drop == ()
    assert again.keep == first.keep


@given(steps.map(marks), keeps)
def test_dropping_after_each_save_ends_like_dropping_once(versions, keep):
    kept: list[Mark] = []
    for mark in versions:
        decision = decide([*kept, mark], keep)
        kept = [m for m in [*kept, mark] if m.seq in decision.keep]
    assert decide(kept, keep) == decide([m for m in versions if m in kept], keep)
    assert {m.seq for m in kept} == set(decide(versions, keep).keep)


@given(steps.map(marks), st.integers(1, 6), st.integers(0, 6), st.integers(1, 10), st.integers(1, 4))
def test_a_wider_policy_keeps_no_less(versions, last, more, every, times):
    narrow = set(decide(versions, Keep(last=last, every=every * times)).keep)
    assert narrow <= set(decide(versions, Keep(last=last + more, every=every * times)).keep)
    assert narrow <= set(decide(versions, Keep(last=last, every=every)).keep)
    assert set(decide(versions, Keep(last=last)).keep) <= narrow


@given(steps.map(marks), keeps, pins, pins)
def test_a_pin_more_keeps_no_less(versions, keep, some, more):
    assert set(decide(versions, keep, some).keep) <= set(decide(versions, keep, some | more).keep)


def test_by_example():
    versions = [Mark(i, step) for i, step in enumerate([0, 4, 9, 12, 18, 31, 33])]
    decision = decide(versions, Keep(last=2, every=10), pinned=[1])
    assert decision.keep == {
        0: ("every 10",),
        1: ("in use",),
        3: ("every 10",),
        5: ("last 2", "every 10"),
        6: ("newest", "last 2"),
    }
    assert decision.drop == (2, 4)


@pytest.mark.parametrize("wrong", [{}, {"last": 0}, {"every": 0}, {"last": 0, "every": 0}])
def test_an_empty_keep_is_refused(wrong):
    with pytest.raises(ValueError, match="would drop every version"):
        Keep(**wrong)


@pytest.mark.parametrize("wrong", [{"last": -1}, {"every": -5}, {"last": 3, "every": -1}, {"last": -1, "all": True}])
def test_numbers_below_zero_are_refused(wrong):
    with pytest.raises(ValueError, match="above zero"):
        Keep(**wrong)
