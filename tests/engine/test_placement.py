"""Placement: cadences, routes and the parting into entry and cascade, against their definitions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.engine.placement import (
    CadenceCount,
    Routes,
    due_tiers,
    entry_tiers,
    is_due,
    leaf_codecs,
    may_pickle,
    route_masks,
    rule_warnings,
)
from tierstate.manifest.errors import NotFound
from tierstate.manifest.format.globs import matches
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.tiers.policy.policy import Policy

POLICY = Policy.parse(
    """
    tiers:
      host: {type: host}
      nvme: {type: nvme, path: a, codec: fast}
      lustre: {type: lustre, path: b, every: 10}
      far: {type: nvme, path: c, every: 30min}
    rules:
      - {match: "optimizer.**", tiers: [host, nvme]}
      - {match: "**.bias", codec: small}
      - {match: "extra.*", pickle: true}
      - {match: "**", codec: auto}
    """
)
KEYS = st.sampled_from(["model", "optimizer", "extra", "bias", "weight", 0, 1])
PATHS = st.lists(st.lists(KEYS, max_size=4).map(tuple), max_size=8)


@given(st.integers(1, 50), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_every_n_takes_the_first_save_at_or_after_each_multiple(every: int, gaps: list[int]) -> None:
    steps = np.cumsum(gaps).tolist()
    last = None
    taken = []
    for step in steps:
        if is_due(every, step, last, 0.0):
            taken.append(step)
            last = (step, 0.0)
    windows: dict[int, int] = {}
    for step in steps:
        windows.setdefault(step // every, step)
    assert taken == list(windows.values())


@given(st.integers(1, 100), st.integers(0, 1000), st.integers(0, 1000))
def test_after_a_rollback_the_next_save_is_due(every: int, step: int, last_step: int) -> None:
    later = step // every > last_step // every
    assert is_due(every, step, (last_step, 0.0), 0.0) == (later or step <= last_step)


@given(st.floats(0.001, 1e6), st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_every_time_takes_the_first_save_after_that_time(seconds: float, gaps: list[float]) -> None:
    every = timedelta(seconds=seconds)
    last = None
    for step, now in enumerate(np.cumsum(gaps).tolist()):
        waited = last is None or now - last[1] >= every.total_seconds()
        assert is_due(every, step, last, now) == waited
        if waited:
            last = (step, now)


def test_a_clock_set_back_does_not_stop_the_saves() -> None:
    assert is_due(timedelta(minutes=30), 7, (6, 1000.0), 999.0)
    assert not is_due(timedelta(minutes=30), 7, (6, 1000.0), 1000.0)


def test_due_goes_by_each_tiers_own_cadence_in_the_policys_order() -> None:
    assert due_tiers(POLICY, 3, {}, 0.0) == ("host", "nvme", "lustre", "far")
    last = {"host": (9, 100.0), "nvme": (9, 100.0), "lustre": (3, 40.0), "far": (3, 40.0)}
    assert due_tiers(POLICY, 9, last, 100.0) == ("host", "nvme")
    assert due_tiers(POLICY, 12, last, 100.0) == ("host", "nvme", "lustre")
    assert due_tiers(POLICY, 9, last, 40.0 + 1800) == ("host", "nvme", "far")
    assert due_tiers(POLICY, 9, {**last, "lustre": None}, 100.0) == ("host", "nvme", "lustre")


FLAGS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=7)


def _part(flags: Sequence[tuple[bool, bool]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return entry_tiers(range(len(flags)), [p for p, _ in flags], [h for _, h in flags])


@given(FLAGS)
def test_every_due_tier_is_in_one_part_and_order_is_kept(flags: list[tuple[bool, bool]]) -> None:
    entry, cascade = _part(flags)
    assert sorted(entry + cascade) == list(range(len(flags)))
    assert list(entry) == sorted(entry)
    assert list(cascade) == sorted(cascade)


@given(FLAGS)
def test_a_save_enters_what_is_not_persistent_and_down_to_the_first_healthy(flags: list[tuple[bool, bool]]) -> None:
    entry, cascade = _part(flags)
    lasting = [i for i, (persistent, _) in enumerate(flags) if persistent]
    healthy = [i for i in lasting if flags[i][1]]
    entered = [i for i in entry if i in lasting]
    assert all(i in entry for i in range(len(flags)) if i not in lasting)
    assert set(cascade) <= set(lasting)
    if healthy:
        assert entered == [i for i in lasting if i <= healthy[0]]
    else:
        assert entered == lasting


def test_flags_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        entry_tiers(["a", "b"], [False], [True])


@given(PATHS)
def test_masks_and_codecs_follow_the_first_rule_that_matches(paths: list[tuple[str | int, ...]]) -> None:
    masks = route_masks(POLICY, paths)
    assert list(masks) == [tier.name for tier in POLICY.tiers]
    for tier, mask in masks.items():
        assert mask.dtype == np.bool_
        assert mask.shape == (len(paths),)
        codecs = leaf_codecs(POLICY, tier, paths)
        for path, goes, codec in zip(paths, mask, codecs, strict=True):
            rules = [rule for rule in POLICY.rules if matches(rule.match, path)]
            tiers = next((rule.tiers for rule in rules if rule.tiers is not None), None)
            assert goes == (tiers is None or tier in tiers)
            assert codec == next((rule.codec for rule in rules if rule.codec), POLICY.tier(tier).codec)


@given(st.lists(PATHS, max_size=4))
@example([[("model", "weight")], [("optimizer", "weight")], [("model", "bias")]])
@example([[("extra", "bias"), ("optimizer",)], [("optimizer",), ("extra", "bias")]])
def test_the_routes_of_a_state_do_not_depend_on_the_states_before(states: list[list[tuple[str | int, ...]]]) -> None:
    routes = Routes(POLICY)
    for paths in states:
        found = routes.of(tuple(Leaf(path, Spec("bytes", shape=(1,))) for path in paths))
        for name, mask in route_masks(POLICY, paths).items():
            assert found[name].leaves.tolist() == mask.tolist()
            assert list(found[name].codecs) == leaf_codecs(POLICY, name, paths)


def test_each_key_is_decided_by_the_first_rule_that_has_it() -> None:
    policy = Policy.parse(
        """
version: 1
tiers:
  nvme: {type: nvme, path: a, codec: fast}
  lustre: {type: lustre, path: b}
rules:
  - {match: "optimizer.**", tiers: [nvme]}
  - {match: "**.exp_avg*", codec: raw, tiers: [lustre]}
  - {match: "**", codec: small}
"""
    )
    paths = [("optimizer", "exp_avg"), ("optimizer", "step"), ("model", "exp_avg_sq"), ("model", "weight")]
    assert {name: mask.tolist() for name, mask in route_masks(policy, paths).items()} == {
        "nvme": [True, True, False, True],
        "lustre": [False, False, True, True],
    }
    assert leaf_codecs(policy, "nvme", paths) == ["raw", "small", "raw", "small"]


def test_without_rules_everything_goes_everywhere() -> None:
    policy = Policy.default("ckpt")
    assert {name: mask.tolist() for name, mask in route_masks(policy, [("a",), ()]).items()} == {
        "host": [True, True],
        "nvme": [True, True],
    }
    assert not may_pickle(policy)(("a",))


def test_pickle_is_allowed_only_where_a_rule_says_so() -> None:
    allowed = may_pickle(POLICY)
    assert allowed(("extra", "thing"))
    assert allowed(("extra", "bias"))
    assert not allowed(("extra", "deeper", "thing"))
    assert not allowed(("model", "weight"))


def test_an_unknown_tier_has_no_codec() -> None:
    with pytest.raises(NotFound, match="'nvm' is no tier of this policy; did you mean 'nvme'"):
        leaf_codecs(POLICY, "nvm", [("a",)])


@given(st.lists(st.sampled_from(["optimizer.**", "optimzer.**", "model.*", "**", "nothing"]), max_size=4), PATHS)
def test_rules_without_a_leaf_and_tiers_without_one_are_told(
    globs: list[str], paths: list[tuple[str | int, ...]]
) -> None:
    rules = [{"match": glob, "tiers": ["a"]} for glob in globs]
    spec = Policy.parse(
        json.dumps({"tiers": {n: {"type": "nvme", "path": n} for n in ("a", "b")}, "rules": rules}), "p.yaml"
    )
    found = rule_warnings(spec, paths)
    idle = [i for i, glob in enumerate(globs) if paths and not any(matches(glob, path) for path in paths)]
    assert [text.partition(":")[0] for text in found if text.startswith("rules.")] == [f"rules.{i}" for i in idle]
    goes = any(not any(matches(glob, path) for glob in globs) for path in paths)
    assert any(text.startswith("b: the rules send no leaf there") for text in found) is (bool(paths) and not goes)


@given(st.integers(1, 30), st.lists(st.integers(0, 12), min_size=1, max_size=20), st.booleans())
def test_a_cadence_is_told_where_several_saves_were_made_and_none_was_due(
    every: int, gaps: list[int], there: bool
) -> None:
    count, last = CadenceCount("far", every), (5, 0.0) if there else None
    step, due = 5, 0
    for gap in gaps:
        step += gap
        first = last is None
        if goes := is_due(every, step, last, 0.0):
            last = (step, 0.0)
        count.add(step, 0.0, due=goes, first=first)
        due += goes and not first
    told = count.warning()
    assert bool(told) is (len(gaps) >= 2 and not due)
    if told:
        assert f"none of the {len(gaps)} saves" in told
        assert ("but for the first" in told) is not there
        assert "write a shorter one, as 'every: " in told
