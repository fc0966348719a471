"""Retention keeps what it promised, and comes to the same end however often it is asked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierstate.manifest.history.retention import (
    OTHER_LEAVES,
    BestVersions,
    RetentionDecision,
    RetentionEntry,
    RetentionPolicy,
    decide_retention,
    format_duration,
    metric_value,
)

NAN = math.nan
RULE = "optimizer.**"

numbers = st.integers(-3, 3) | st.sampled_from([0.5, -0.0, NAN, math.inf, -math.inf, 10**400])
others = st.sampled_from([None, True, "low", [1.0], {}])
metrics = st.dictionaries(st.sampled_from(["loss", "eval.loss", "eval"]), numbers | others, max_size=2) | st.builds(
    lambda value: {"eval": {"loss": value}}, numbers | others
)
groups = st.sampled_from([(OTHER_LEAVES,), (RULE,), (RULE, OTHER_LEAVES)])
marks = st.builds(
    RetentionEntry,
    seq=st.just(0),
    step=st.integers(-5, 60),
    # A clock that stands, runs, falls back and jumps ahead.
    time=st.integers(0, 50).map(float),
    metrics=metrics,
    tags=st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True).map(tuple),
    groups=groups,
)
bests = st.builds(
    BestVersions, st.sampled_from(["loss", "eval.loss"]), st.sampled_from(["min", "max"]), st.integers(1, 3)
)
RULES: dict[str, st.SearchStrategy[Any]] = {
    "last": st.integers(1, 6),
    "every": st.integers(1, 20),
    "within": st.integers(1, 30).map(float),
    "best": bests,
    "tags": st.just(True),
    "all": st.just(True),
}
keeps = st.fixed_dictionaries({}, optional=RULES).filter(bool).map(lambda keys: RetentionPolicy(**keys))
ruled = st.dictionaries(st.just(RULE), keeps, max_size=1)
pins = st.dictionaries(st.integers(0, 14), st.sampled_from(["forked by b", "s3 has not got it yet"]), max_size=3)
clocks = st.integers(-10, 70).map(float) | st.just(math.inf)


def numbered(found: Iterable[RetentionEntry]) -> list[RetentionEntry]:
    """Versions of a run; numbers with gaps."""
    return [mark._replace(seq=seq + seq // 3) for seq, mark in enumerate(found)]


runs = st.lists(marks, max_size=12).map(numbered)


def after(versions: list[RetentionEntry], decision: RetentionDecision) -> list[RetentionEntry]:
    """The versions that are left, with the leaves that are left."""
    return [m._replace(groups=decision.thin.get(m.seq, m.groups)) for m in versions if m.seq in decision.keep]


def left(versions: list[RetentionEntry], decision: RetentionDecision) -> set[tuple[int, str]]:
    """Each group of leaves of each version that is left."""
    return {(m.seq, group) for m in after(versions, decision) for group in m.groups}


# What each rule means, told again in the plainest way.


def is_last(of: RetentionEntry, versions: list[RetentionEntry], keep: RetentionPolicy) -> bool:
    return sum(m.seq > of.seq for m in versions) < (keep.last or 0)


def is_first(of: RetentionEntry, versions: list[RetentionEntry], keep: RetentionPolicy) -> bool:
    every = keep.every
    earlier = [m for m in versions if (m.step, -m.seq) < (of.step, -of.seq)]
    return bool(every) and not any(m.step // every == of.step // every for m in earlier)


def is_lately(of: RetentionEntry, versions: list[RetentionEntry], keep: RetentionPolicy, now: float) -> bool:
    def saved(version: RetentionEntry) -> float:
        return max(m.time for m in versions if m.seq <= version.seq)

    newest = max(versions, key=lambda m: m.seq)
    return keep.within is not None and min(saved(newest), now) - saved(of) <= keep.within


def is_best(of: RetentionEntry, versions: list[RetentionEntry], keep: RetentionPolicy) -> bool:
    if keep.best is None or (mine := metric_value(of.metrics, keep.best.metric)) is None:
        return False
    better = 0
    for other in versions:
        value = metric_value(other.metrics, keep.best.metric)
        if value is not None and other.seq != of.seq:
            beats = value < mine if keep.best.mode == "min" else value > mine
            better += beats or (value == mine and other.seq > of.seq)
    return better < keep.best.count


def reasons_of(
    of: RetentionEntry, versions: list[RetentionEntry], keep: RetentionPolicy | None, now: float
) -> set[str]:
    if keep is None or keep.all:
        return {"all"}
    found = {f"tag {tag}" for tag in of.tags} if keep.tags else set()
    found |= {f"last {keep.last}"} if is_last(of, versions, keep) else set()
    found |= {f"every {keep.every}"} if is_first(of, versions, keep) else set()
    found |= {f"within {keep.within:.0f}s"} if is_lately(of, versions, keep, now) else set()
    if keep.best and is_best(of, versions, keep):
        found.add(f"best {keep.best.metric} ({keep.best.mode})")
    return found


def model(
    versions: list[RetentionEntry],
    keep: RetentionPolicy | None,
    pinned: dict[int, str],
    now: float,
    rules: dict[str, RetentionPolicy],
):
    """Per version that stays, its reasons and its groups."""
    newest = max((m.seq for m in versions), default=None)
    found: dict[int, tuple[set[str], set[str]]] = {}
    for mark in versions:
        why, stays = set(), set()
        if mark.seq == newest:
            why.add("newest")
        if mark.seq in pinned:
            why.add(pinned[mark.seq])
        if why:
            stays |= set(mark.groups)
        for group in mark.groups:
            here = [m for m in versions if group in m.groups]
            told = reasons_of(mark, here, rules.get(group, keep), now)
            told = told if group == OTHER_LEAVES else {f"{group}: {reason}" for reason in told}
            if mark.seq == max(m.seq for m in here) != newest:
                told.add(f"newest with {group}")
            why |= told
            stays |= {group} if told else set()
        if stays:
            found[mark.seq] = why, stays
    return found


@given(runs, keeps | st.none(), pins, clocks, ruled)
def test_what_stays_and_why_is_what_the_rules_say(versions, keep, pinned, now, rules):
    """Every reason that is given is true, and every true one is given."""
    decision, expected = decide_retention(versions, keep, pinned, now, rules), model(versions, keep, pinned, now, rules)
    assert {seq: set(why) for seq, why in decision.keep.items()} == {seq: why for seq, (why, _) in expected.items()}
    assert all(len(set(why)) == len(why) for why in decision.keep.values())
    assert decision.drop == tuple(m.seq for m in versions if m.seq not in expected)
    assert left(versions, decision) == {(seq, g) for seq, (_, stays) in expected.items() for g in stays}
    assert all(set(decision.thin[m.seq]) < set(m.groups) for m in versions if m.seq in decision.thin)
    assert list(decision.keep) == sorted(decision.keep)


@given(runs, keeps | st.none(), pins, clocks, ruled)
def test_the_newest_and_what_is_in_use_stay_whole(versions, keep, pinned, now, rules):
    decision = decide_retention(versions, keep, pinned, now, rules)
    for mark in versions:
        if mark.seq == versions[-1].seq or mark.seq in pinned:
            assert mark.seq in decision.keep
            assert mark.seq not in decision.thin


@given(runs, keeps, pins, clocks, ruled, st.randoms())
def test_the_order_of_versions_does_not_matter(versions, keep, pinned, now, rules, random):
    turned = random.sample(versions, len(versions))
    assert decide_retention(turned, keep, pinned, now, rules) == decide_retention(versions, keep, pinned, now, rules)


@given(runs, keeps, pins, clocks, ruled)
def test_deciding_again_drops_nothing_more(versions, keep, pinned, now, rules):
    first = decide_retention(versions, keep, pinned, now, rules)
    again = decide_retention(after(versions, first), keep, pinned, now, rules)
    assert (again.drop, again.thin) == ((), {})
    assert again.keep == first.keep


def wider(keep: RetentionPolicy) -> Iterable[RetentionPolicy]:
    """Policies that say more."""
    if keep.last:
        yield replace(keep, last=keep.last + 1)
    if keep.within:
        yield replace(keep, within=keep.within * 2)
    if keep.best:
        yield replace(keep, best=replace(keep.best, count=keep.best.count + 1))
    if keep.every and keep.every % 2 == 0:
        yield replace(keep, every=keep.every // 2)


@given(runs, keeps, keeps, pins, pins, clocks, ruled)
def test_a_wider_policy_keeps_no_less(versions, keep, other, pinned, more, now, rules):
    narrow = left(versions, decide_retention(versions, keep, pinned, now, rules))
    added = {f.name: getattr(other, f.name) for f in fields(RetentionPolicy) if not getattr(keep, f.name)}
    for wide in (replace(keep, **added), *wider(keep)):
        assert narrow <= left(versions, decide_retention(versions, wide, pinned, now, rules))
        if RULE in rules:
            thick = left(versions, decide_retention(versions, keep, pinned, now, {RULE: wide}))
            assert left(versions, decide_retention(versions, keep, pinned, now, {RULE: keep})) <= thick
    assert narrow <= left(versions, decide_retention(versions, keep, pinned | more, now, rules))


@given(runs, keeps, st.integers(0, 70), st.integers(0, 70))
def test_a_clock_that_falls_back_drops_no_more(versions, keep, one, other):
    early, late = sorted((one, other))
    dropped = set(decide_retention(versions, keep, now=float(late)).drop)
    assert (
        set(decide_retention(versions, keep, now=float(early)).drop)
        <= dropped
        <= set(decide_retention(versions, keep).drop)
    )


@given(st.lists(st.integers(0, 30).map(float), min_size=1, max_size=12), st.data(), st.integers(1, 30))
def test_within_holds_whatever_the_clock_said(true, data, within):
    """The clock may have been behind at any save, and may be behind now: what was saved so lately stays."""
    true = sorted(true)
    told = [time - data.draw(st.sampled_from([0.0, 0.0, 1e9])) for time in true]
    now = data.draw(st.sampled_from([true[-1], true[-1] - 1e9]))
    versions = [RetentionEntry(seq, seq, time) for seq, time in enumerate(told)]
    dropped = decide_retention(versions, RetentionPolicy(within=float(within)), now=now).drop
    # A version whose clock was behind counts as saved no earlier than those before it that were told the time.
    known = [max(told[: seq + 1]) for seq in range(len(true))]
    for seq in dropped:
        assert true[-1] - true[seq] > within or known[seq] < true[seq]
        assert not any(told[i] == true[i] and true[-1] - true[i] <= within for i in range(seq + 1))


@given(runs, st.builds(RetentionPolicy, last=st.integers(1, 6), every=st.none() | st.integers(1, 20)))
def test_dropping_after_each_save_ends_like_dropping_once(versions, keep):
    versions = [m._replace(groups=(OTHER_LEAVES,)) for m in versions]
    kept: list[RetentionEntry] = []
    for mark in versions:
        decision = decide_retention([*kept, mark], keep)
        kept = [m for m in [*kept, mark] if m.seq in decision.keep]
    assert {m.seq for m in kept} == set(decide_retention(versions, keep).keep)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 10), st.integers(1, 10), st.integers(1, 3))
def test_a_training_that_went_back_keeps_what_it_has_passed_again(back, more, every, save_every, last):
    """What is kept of the steps that it has passed twice is what it has passed last."""
    steps = [*range(0, 41, save_every), *(step for step in range(back, back + more) if step % save_every == 0)]
    versions = [RetentionEntry(seq, step) for seq, step in enumerate(steps)]
    went_back = len(range(0, 41, save_every))
    assume(versions[went_back:])
    kept = decide_retention(versions, RetentionPolicy(last=last, every=every)).keep
    again = {mark.step for mark in versions[went_back:]}
    old = [mark for mark in versions[:went_back] if f"every {every}" in kept.get(mark.seq, ())]
    assert not again & {mark.step for mark in old}


@given(runs, bests)
def test_dropping_after_each_save_ends_with_the_best_ones(versions, best):
    keep, kept = RetentionPolicy(best=best), []
    versions = [m._replace(groups=(OTHER_LEAVES,)) for m in versions]
    for mark in versions:
        kept = after([*kept, mark], decide_retention([*kept, mark], keep))
    assert {m.seq for m in kept} == set(decide_retention(versions, keep).keep)


def test_by_example():
    steps = [0, 4, 9, 12, 18, 31, 33]
    losses = [{"loss": 0.3}, {}, {"loss": NAN}, {"loss": 0.1}, {"loss": 0.1}, {"loss": "?"}, {"loss": 0.5}]
    versions = [
        RetentionEntry(i, step, 100.0 * step, losses[i], ("v1",) if i == 2 else ()) for i, step in enumerate(steps)
    ]
    keep = RetentionPolicy(last=2, every=10, within=300.0, best=BestVersions("loss", "min"), tags=True)
    decision = decide_retention(versions, keep, {1: "forked by b"}, 1e6, {RULE: RetentionPolicy(last=1)})
    assert decision.keep == {
        0: ("every 10",),
        1: ("forked by b",),
        2: ("tag v1",),
        3: ("every 10",),
        4: ("best loss (min)",),
        5: ("last 2", "every 10", "within 5min"),
        6: ("newest", "last 2", "within 5min"),
    }
    assert (decision.drop, decision.thin) == ((), {})
    versions = [m._replace(groups=(RULE, OTHER_LEAVES)) for m in versions]
    decision = decide_retention(
        versions, RetentionPolicy(last=3), {1: "forked by b"}, rules={RULE: RetentionPolicy(every=30)}
    )
    assert decision.keep == {
        0: (f"{RULE}: every 30",),
        1: ("forked by b",),
        4: ("last 3",),
        5: ("last 3", f"{RULE}: every 30"),
        6: ("newest", "last 3"),
    }
    assert decision.drop == (2, 3)
    assert decision.thin == {0: (RULE,), 4: (OTHER_LEAVES,)}


def test_a_rule_for_everything_takes_the_place_of_the_tiers_own_keep():
    versions = [RetentionEntry(i, i) for i in range(4)]
    assert decide_retention(versions, RetentionPolicy(last=1), rules={OTHER_LEAVES: RetentionPolicy(last=3)}).drop == (
        0,
    )


@pytest.mark.parametrize(
    ("said", "metric", "number"),
    [
        ({"loss": 2}, "loss", 2),
        ({"loss": 2.5, "eval.loss": 1}, "eval.loss", 1),
        ({"eval": {"loss": -1.0}}, "eval.loss", -1.0),
        ({"eval.loss": None, "eval": {"loss": 1}}, "eval.loss", None),
        ({"eval": [1]}, "eval.0", None),
        ({"loss": True}, "loss", None),
        ({"loss": "1"}, "loss", None),
        (json.loads('{"loss": NaN}'), "loss", None),
        (json.loads('{"loss": -Infinity}'), "loss", None),
        ({"loss": 10**400}, "loss", 10**400),
        ({}, "loss", None),
    ],
)
def test_what_measures_a_version(said, metric, number):
    assert metric_value(said, metric) == number


@pytest.mark.parametrize(
    ("seconds", "text"), [(172800.0, "2d"), (7200, "2h"), (5400.0, "90min"), (90, "90s"), (0.5, "0.5s"), (604800, "7d")]
)
def test_durations_are_told_as_a_policy_says_them(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize("wrong", [{}, {"last": 0}, {"every": 0}, {"last": 0, "every": 0}, {"tags": False}])
def test_an_empty_keep_is_refused(wrong):
    with pytest.raises(ValueError, match="would drop every version"):
        RetentionPolicy(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": -1},
        {"every": -5},
        {"last": 3, "every": -1},
        {"last": -1, "all": True},
        {"within": -1.0},
        {"within": NAN},
    ],
)
def test_numbers_below_zero_are_refused(wrong):
    with pytest.raises(ValueError, match="above zero"):
        RetentionPolicy(**wrong)


@pytest.mark.parametrize(("metric", "mode", "count"), [("", "min", 1), ("loss", "low", 1), ("loss", "min", 0)])
def test_a_best_that_says_nothing_is_refused(metric, mode, count):
    with pytest.raises(ValueError, match="right is a name, min or max, 1 or more"):
        BestVersions(metric, mode, count)


def test_a_version_that_is_exactly_as_old_as_within_is_kept():
    versions = [RetentionEntry(seq, seq, 10.0 * seq) for seq in range(4)]
    decision = decide_retention(versions, RetentionPolicy(within=20.0), {}, 30.0, {})
    assert (sorted(decision.keep), list(decision.drop)) == ([1, 2, 3], [0])
