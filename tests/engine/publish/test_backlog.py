"""What a tier owes, leaves out and waits for, against the definitions; and the backlog that goes by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.placement import is_due
from tierstate.engine.publish import backlog
from tierstate.engine.publish.backlog import (
    TIER_BACKOFF,
    Backlog,
    PendingVersion,
    RetryTimer,
    becomes_pending,
    count_left_out,
    held_versions,
    missed_versions,
    still_pending,
)

EVERY = st.one_of(st.none(), st.integers(1, 9), st.integers(1, 90).map(lambda s: timedelta(seconds=s)))


@st.composite
def versions(draw: st.DrawFn) -> list[PendingVersion]:
    """Versions of a run, whose step and time rise with their number."""
    gaps = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(0, 60)), max_size=12))
    found, seq, step, time = [], 0, 0, 1000
    for more, steps, seconds in gaps:
        seq, step, time = seq + more, step + steps, time + seconds
        found.append(PendingVersion(seq, step, float(time), 10))
    return found


@given(EVERY, versions(), st.integers(0, 12))
def test_what_a_tier_missed_is_what_it_would_have_got(
    every: int | timedelta | None, runs: list[PendingVersion], have: int
) -> None:
    """Wherever a tier stopped, what it got before and what it is owed are together its cadence."""
    whole = missed_versions(every, None, runs)
    have = min(have, len(whole))
    newest = whole[have - 1] if have else None
    last = (newest.step, newest.time) if newest else None
    after = [due for due in runs if newest is None or due.seq > newest.seq]
    assert whole[:have] + missed_versions(every, last, after) == whole
    assert all(is_due(every, b.step, (a.step, a.time), b.time) for a, b in pairwise(whole))


@given(EVERY, versions())
def test_a_save_that_arrives_stands_for_those_of_its_own_window(
    every: int | timedelta | None, runs: list[PendingVersion]
) -> None:
    owed = missed_versions(every, None, runs)
    for arrived in runs:
        left = still_pending(every, owed, arrived)
        assert arrived not in left
        for due in owed:
            if due.seq > arrived.seq:
                assert due in left
            elif due != arrived:
                assert (due in left) == is_due(every, arrived.step, (due.step, due.time), arrived.time)
    if every is None and owed:
        assert still_pending(every, owed, owed[-1]) == owed[:-1]


@given(EVERY, versions())
def test_of_saves_that_fail_one_of_each_window_is_owed(
    every: int | timedelta | None, runs: list[PendingVersion]
) -> None:
    owed: list[PendingVersion] = []
    for due in runs:
        if becomes_pending(every, owed, due):
            owed.append(due)
    if not isinstance(every, int):
        assert owed == missed_versions(every, None, runs)
    else:
        assert [due.step // every for due in owed] == sorted({due.step // every for due in runs})


WAITING = st.lists(st.booleans(), max_size=10).map(lambda flags: list(enumerate(flags)))


@given(st.sampled_from(["skip", "queue"]), WAITING, st.integers(1, 12))
def test_what_is_left_out_is_old_and_the_newest_at_hand_never_is(
    on_lag: str, waiting: Sequence[tuple[int, bool]], limit: int
) -> None:
    gone = count_left_out(on_lag, waiting, limit)
    stays = waiting[gone:]
    assert 0 <= gone <= len(waiting)
    assert len(stays) <= limit
    if on_lag == "queue":
        assert gone == max(0, len(waiting) - limit), "nothing is left out but what is too many"
    elif any(ready for _, ready in stays):
        assert stays[0][1], "the oldest that stays is the newest that can be copied now"
        assert not any(ready for _, ready in stays[1:])
    if waiting:
        assert waiting[-1] in stays


SEQS = st.sets(st.integers(0, 8))
TIERS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(SEQS, SEQS))


@given(TIERS, st.booleans())
def test_a_version_is_held_until_a_slower_tier_has_it(tiers: dict[str, tuple[set[int], set[int]]], each: bool) -> None:
    wanted = {name: wants for name, (wants, _) in tiers.items()}
    there = {name: has for name, (_, has) in tiers.items()}
    found = held_versions(wanted, there, each=each)
    for seq in range(9):
        waits = [name for name in wanted if seq in wanted[name]]
        # Only a tier before the first that waits can be copied from.
        nearer = list(there)[: list(there).index(waits[0])] if waits else []
        assert (seq in found) == bool(waits and (each or not any(seq in there[name] for name in nearer)))
        if seq in found:
            assert found[seq] == waits[0]


# The backlog


@dataclass(eq=False)
class Waiting:
    due: PendingVersion
    save_state: Any
    at_hand: bool = True
    too_early: bool = False


def waiting(seq: int, *, owed: bool = False, at_hand: bool = True, too_early: bool = False) -> Waiting:
    return Waiting(PendingVersion(seq, 10 * seq, float(seq)), None if owed else "a save state", at_hand, too_early)


def numbers(copies: Sequence[Waiting]) -> list[int]:
    return [copy.due.seq for copy in copies]


def test_a_queue_gives_the_oldest_first_and_debts_only_when_they_may_be_tried() -> None:
    backlog: Backlog[Waiting] = Backlog()
    for copy in (waiting(3), waiting(4)):
        assert backlog.put(copy) == []
    for copy in (waiting(1, owed=True), waiting(2, owed=True)):
        assert backlog.owe(copy)
    assert len(backlog) == 2
    assert backlog.take(missing=False) is not None
    assert [d.seq for d in backlog.dues()] == [1, 2, 4]
    taken = [backlog.take(missing=True) for _ in range(4)]
    assert numbers([copy for copy in taken if copy]) == [1, 2, 4]
    assert taken[-1] is None


NUMBERS = st.sets(st.integers(0, 9))


@given(saves=NUMBERS, owed=NUMBERS, elsewhere=NUMBERS, early=NUMBERS, urgent=st.none() | st.integers(0, 9))
def test_what_others_are_about_to_bring_or_no_tier_has_yet_is_not_taken_but_stays_owed(
    saves: set[int], owed: set[int], elsewhere: set[int], early: set[int], urgent: int | None
) -> None:
    """The urgent one is the first of all others."""
    backlog: Backlog[Waiting] = Backlog()
    for seq in sorted(saves):
        backlog.put(waiting(seq))
    for seq in sorted(owed - saves):
        assert backlog.owe(waiting(seq, owed=True, too_early=seq in early))
    backlog.urgent = urgent
    taken = []
    while (copy := backlog.take(missing=True, but=elsewhere)) is not None:
        taken.append(copy.due.seq)
    assert taken == sorted(saves | (owed - elsewhere - early), key=lambda seq: (seq != urgent, seq))
    assert [due.seq for due in backlog.dues()] == sorted((owed & (elsewhere | early)) - saves)
    assert backlog.too_early == bool((owed & early) - saves)


def test_skipping_leaves_out_what_is_older_than_the_newest_at_hand() -> None:
    backlog: Backlog[Waiting] = Backlog(None, "skip")
    assert backlog.owe(waiting(1, owed=True))
    assert numbers(backlog.put(waiting(2))) == [1]
    late = waiting(3, at_hand=False)
    assert backlog.put(late) == []
    late.at_hand = True
    assert numbers(backlog.trim()) == [2]
    assert backlog.take(missing=True) is late


def test_what_waits_is_bounded() -> None:
    backlog: Backlog[Waiting] = Backlog(limit=3)
    gone = [backlog.owe(waiting(seq, owed=True)) and numbers(backlog.trim()) for seq in range(3)]
    gone += [numbers(backlog.put(waiting(seq))) for seq in range(3, 6)]
    assert gone == [[], [], [], [0], [1], [2]]


def test_what_arrives_stands_for_what_is_owed_of_its_window() -> None:
    backlog: Backlog[Waiting] = Backlog(100)
    assert [backlog.owe(waiting(seq, owed=True)) for seq in (8, 11, 12)] == [True, True, False]
    backlog.arrived(PendingVersion(13, 130, 13.0))
    assert list(backlog.owed) == [8]


def test_a_timer_waits_longer_after_each_failure_until_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog.time, "monotonic", lambda: 100.0)
    one = RetryTimer()
    assert one.left == 0
    expected = TIER_BACKOFF.first
    for _ in range(12):
        one.failed()
        assert expected / 2 <= one.left <= expected
        expected = min(TIER_BACKOFF.longest, 2 * expected)
    assert expected == TIER_BACKOFF.longest
    one.succeeded()
    assert one.left == 0
    one.failed()
    assert one.left <= TIER_BACKOFF.first
