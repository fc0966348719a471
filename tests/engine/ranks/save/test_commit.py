"""Commits of many ranks: together or not at all, and never without an end."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.thread_teams import Shared, World, check_commit, each, together

from tierstate.engine.ranks.save.commit import GroupCommit
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import (
    AlreadyExists,
    CommitUnknown,
    RankFailed,
    RankFull,
    SaveSkipped,
    StateMismatch,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
)
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.tiers.wrappers.breaker import Hung

pytestmark = pytest.mark.usefixtures("relays_among_few")

SHARED: list[Shared] = ["site", "host", "process"]
WORLDS = st.builds(
    World, st.sampled_from(SHARED), st.lists(st.integers(0, 2), min_size=1, max_size=4), relay=st.booleans()
)


@pytest.mark.slow
@settings(max_examples=25)
@given(WORLDS, st.integers(1, 3))
def test_what_all_vote_for_is_committed_on_all(world: World, saves: int) -> None:
    def rank(team: Team) -> list[Record]:
        group_commit = world.group_commit(team)
        return [group_commit.commit(world.part(team.rank, seq)) for seq in range(1, saves + 1)]

    found = together(world.size, rank, hosts=world.hosts)
    world.close()
    parent = ""
    for seq in range(1, saves + 1):
        check_commit(world, [records[seq - 1] for records in found], seq)
        assert len(world.records(seq)) == len(world.tiers)
        head = world.records(seq)[0].version.head
        assert (head.parent, head.world, head.metadata, head.time) == (parent, world.size, {"rank": 0}, 1000.0)
        parent = world.records(seq)[0].version.id
        for r, records in enumerate(found):
            mine = records[seq - 1]
            assert (mine.version.id == parent) == (r in world.leaders or world.size == 1)
            assert len(mine.version.boxes) == (world.size + 1 if r in world.leaders else 2)


WHAT = ["yes", "yes", "yes", "no", "left out", "no part", "stop", "full", "unavailable"]


@settings(max_examples=40)
@given(WORLDS, st.data())
def test_whoever_fails_fails_it_for_all(world: World, data: st.DataObject) -> None:
    plan = [data.draw(st.sampled_from(WHAT)) for _ in world.hosts]
    seed = data.draw(st.integers(0, 1 << 16))

    def rank(team: Team) -> Any:
        what, dice = plan[team.rank], random.Random(seed + team.rank)
        group_commit, tier = world.group_commit(team), world.tier_of[team.rank]
        time.sleep(dice.random() * 0.02)
        if what in ("no", "left out"):
            group_commit.withdraw(1, TierFull("no room"), left_out=what == "left out")
            return RankFailed("withdrew", (team.rank,))
        if what == "no part":
            group_commit.commit(damaged(world.part(team.rank, 1)))
        if what in ("full", "unavailable"):
            error = TierFull("full") if what == "full" else TierUnavailable("away")
            tier.failing = lambda key: error if key.startswith("versions/") else None
        asked = iter(range(dice.randrange(40)))
        return group_commit.commit(
            world.part(team.rank, 1), (lambda: next(asked, None) is None) if what == "stop" else never
        )

    found = together(world.size, rank, hosts=world.hosts)
    world.close()
    check_commit(world, found, 1)
    if set(plan) & {"no", "no part"}:
        failed = tuple(r for r, what in enumerate(plan) if what in ("no", "no part"))
        assert not any(isinstance(one, Record) for one in found)
        if not set(plan) & {"stop"} and 0 not in failed:
            told_to = [one for r, one in enumerate(found) if plan[r] not in ("no", "left out", "no part")]
            assert all(isinstance(one, RankFailed) and one.ranks in (failed, (0,)) for one in told_to), found


def never() -> bool:
    return False


def damaged(part: Record) -> Record:
    """A part that cannot be told to others."""
    return Record(part.version, part.layout, {})


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "relay"), [*((shared, False) for shared in SHARED), ("site", True)])
def test_the_store_does_not_grow_with_the_saves(shared: Shared, relay: bool) -> None:
    world, store, sizes = World(shared, [0, 0, 1], relay), dist.HashStore(), []

    def rank(team: Team, group_commit: GroupCommit) -> None:
        for seq in range(1, 120):
            if team.rank == seq % 7:
                group_commit.withdraw(seq, ValueError("nothing to save"))
            else:
                with suppress(RankFailed):
                    group_commit.commit(world.part(team.rank, seq))
            team.gather("step", b"")
            if not team.rank:
                sizes.append(store.num_keys())
            team.gather("counted", b"")

    assert each(world, rank, store=store) == [None] * 3
    world.close()
    assert max(sizes[60:]) <= max(sizes[:40]), "not one key more, however long it runs"
    assert max(sizes) < 60
    assert world.leftovers() == []


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(
    "error",
    [TierFull("full", tier="t", key="k"), TierUnavailable("away"), CommitUnknown("who knows"), ValueError("a bug")],
    ids=repr,
)
def test_what_keeps_the_coordinator_from_committing_is_told_to_all(shared: Shared, error: Exception) -> None:
    world = World(shared, [0, 1])
    world.tier_of[0].failing = lambda key: error if key.startswith("versions/") else None
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    if isinstance(error, ValueError):
        assert isinstance(found[0], ValueError)
        assert isinstance(found[1], RankFailed)
        assert (found[1].ranks, str(found[1])) == ((0,), "rank 0 failed: ValueError: a bug")
    else:
        assert [type(one) for one in found] == [type(error)] * 2
        assert str(error) in str(found[1])
    if isinstance(error, CommitUnknown) and shared != "site":
        assert world.records(1), "what one cannot tell of, nobody deletes"
    else:
        assert not world.records(1)
    assert not world.is_whole(1)


@pytest.mark.parametrize(("shared", "slow"), [("site", 0), ("host", 1)])
def test_after_a_create_that_hangs_no_rank_takes_it_for_failed(shared: Shared, slow: int) -> None:
    """It may take effect yet, so that all packs that its record names must stay: of whatever kind the error is."""
    world = World(shared, [0, 0, 1, 1])
    error = Hung("the put has not come back")
    world.tier_of[2 * slow].failing = lambda key: error if key.startswith("versions/") else None
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    assert found[2 * slow] is error
    assert isinstance(found[2 * slow + 1], (TierUnavailable, CommitUnknown))


def test_a_number_that_is_taken_is_told_as_that() -> None:
    world = World("site", [0, 0])
    each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    assert [type(one) for one in found] == [AlreadyExists] * 2
    assert found[1].key == "versions/run/000000000001"
    assert world.is_whole(1)


@pytest.mark.parametrize("error", [TierFull("full"), TierUnavailable("away"), CommitUnknown("who knows")], ids=repr)
def test_a_leader_that_cannot_create_its_record_undoes_those_of_all(error: TierstateError) -> None:
    """Rank 2 leads host 1, of which rank 3 is, too: those two cannot tell what is there where rank 2 cannot."""
    world = World("host", [0, 0, 1, 1, 2])
    world.tiers[1].failing = lambda key: error if key.startswith("versions/") else None
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    assert found[2] is error
    assert [found[r].ranks for r in (0, 1, 4)] == [(2,)] * 3
    assert str(found[4]) == f"rank 2 could not create the record: {type(error).__name__}: {error}"
    assert isinstance(found[3], RankFailed if isinstance(error, TierFull) else CommitUnknown)
    assert not world.records(1)


def test_an_error_that_other_ranks_do_not_know_names_its_rank_once() -> None:
    def told(failing: Sequence[int]) -> str:
        world = World("host", [0, 0, 0])

        def rank(team: Team, group_commit: GroupCommit) -> Any:
            if team.rank in failing:
                return group_commit.withdraw(1, ValueError("a bug"))
            return group_commit.commit(world.part(team.rank, 1))

        return str(each(world, rank)[0])

    assert told([1]) == "rank 1 failed: ValueError: a bug"
    assert told([1, 2]) == "ranks 1, 2 failed: rank 1: ValueError: a bug; rank 2: ValueError: a bug"


def test_what_a_record_names_that_cannot_be_undone_is_deleted_by_nobody() -> None:
    """Rank 2 cannot create its record, and rank 0 cannot remove its own: on that host all packs must stay."""
    world = World("host", [0, 0, 1])
    away = TierUnavailable("away")
    world.tiers[1].failing = lambda key: TierFull("full") if key.startswith("versions/") else None
    world.tiers[0].staying = lambda key: away if key.startswith("versions/") else None
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    assert isinstance(found[0], CommitUnknown)
    assert isinstance(found[1], CommitUnknown)
    assert "could not create the record" in str(found[1])
    assert isinstance(found[2], TierFull)
    assert len(world.records(1)) == 1
    assert not world.is_whole(1)


def test_parts_of_different_saves_make_no_version() -> None:
    world = World("site", [0, 0])

    def rank(team: Team, group_commit: GroupCommit) -> Any:
        found = world.part(team.rank, 1)
        head = replace(found.version.head, step=10 + team.rank)
        return group_commit.commit(replace(found, version=again(found.version, head)))

    found = each(world, rank)
    assert [type(one) for one in found] == [StateMismatch] * 2
    assert "rank 1 gave a part of step 11, where rank 0 saves step 10" in str(found[1])
    assert world.leftovers() == []


def again(version: Version, head: Head) -> Version:
    return version.again(head, version.digests)


def test_a_save_that_one_leaves_out_is_left_out_by_all() -> None:
    for who in (0, 1):
        world = World("host", [0, 1, 1])

        def rank(team: Team, group_commit: GroupCommit, who: int = who, world: World = world) -> Any:
            if team.rank == who:
                return group_commit.withdraw(1, RuntimeError("the arena is full"), left_out=True)
            return group_commit.commit(world.part(team.rank, 1))

        found = each(world, rank)
        others = [one for r, one in enumerate(found) if r != who]
        assert [(type(one), one.ranks) for one in others] == [(SaveSkipped, (who,))] * 2


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("error", [TierFull("no room"), TierUnavailable("away")])
def test_that_a_tier_has_no_room_for_the_part_of_one_rank_is_told_to_the_others(who: int, error: TierError) -> None:
    world = World("process", [0, 1, 2])

    def rank(team: Team, group_commit: GroupCommit) -> Any:
        if team.rank == who:
            return group_commit.withdraw(1, error)
        return group_commit.commit(world.part(team.rank, 1))

    others = [one for r, one in enumerate(each(world, rank)) if r != who]
    kind = RankFull if isinstance(error, TierFull) else RankFailed
    assert [(type(one), one.ranks) for one in others] == [(kind, (who,))] * 2


def cut_off(world: World, data: st.DataObject) -> None:
    """Ranks are cut off from the store at any of their calls, as if they had died there; the others go on."""
    ranks = data.draw(st.lists(st.integers(0, world.size - 1), min_size=1, max_size=2, unique=True))
    cut = {rank: data.draw(st.integers(1, 24)) for rank in ranks}

    def rank(team: Team) -> Any:
        return world.group_commit(team).commit(world.part(team.rank, 1))

    found = together(world.size, rank, hosts=world.hosts, cut=cut)
    world.close()
    assert all(isinstance(one, (Record, TierstateError)) for one in found), found
    definite = [one for r, one in enumerate(found) if not isinstance(one, CommitUnknown)]
    if any(isinstance(one, Record) for one in definite):
        assert world.is_whole(1), found
    for r, one in enumerate(found):
        if r not in cut and isinstance(one, RankFailed):
            assert not world.is_whole(1) or 0 in cut, found


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(WORLDS, st.data())
def test_a_rank_that_is_cut_off_at_any_call_ends_it_for_all(world: World, data: st.DataObject) -> None:
    cut_off(world, data)


@pytest.mark.soak
@settings(max_examples=300, deadline=None)
@given(WORLDS, st.data())
def test_many_ranks_that_are_cut_off_at_any_call(world: World, data: st.DataObject) -> None:
    cut_off(world, data)
