"""Parts of a commit on their way to the coordinator: with votes, over connections, or through the tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.thread_teams import PATIENCE, Shared, World, check_commit, each, together

from tierstate.engine.ranks.save import commit, coordinator, relay
from tierstate.engine.ranks.save.commit import GroupCommit
from tierstate.engine.ranks.save.messages import Vote
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import (
    CommitUnknown,
    Damaged,
    FormatError,
    RankFailed,
    RankFull,
    TierFull,
    TierstateError,
    TierUnavailable,
    Unauthentic,
)
from tierstate.manifest.format.record import Record
from tierstate.manifest.sharded.part import encode_part

pytestmark = pytest.mark.usefixtures("relays_among_few")


def test_a_part_that_is_damaged_on_its_way_is_no_part() -> None:
    world = World("site", [0, 0])
    tier = world.tiers[0]

    def put(key: str) -> None:
        if "-1-part-" in key:
            tier._objects[key] = as_buffer(bytes(100_000))
            raise Damaged("as if it had been written")

    tier.failing = put
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    assert (type(found[0]), found[0].ranks) == (RankFailed, (1,))
    tier.failing = lambda key: None

    class Flipping(type(tier)):  # type: ignore[misc]
        def read(self, key: str, ranges: Any) -> None:
            super().read(key, ranges)
            if "-part-" in key:
                ranges[0].out[7] ^= 1

    tier.__class__ = Flipping
    found = each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 2)))
    assert [type(one) for one in found] == [Damaged] * 2
    assert "the part of rank 1" in str(found[0])


def test_short_parts_make_no_request_to_a_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    world, written = World("site", [0, 0, 1]), list[str]()
    world.tiers[0].failing = written.append
    length = max(len(encode_part(world.part(rank, 1))) for rank in range(3))
    for seq, (most, requests) in enumerate([(3 * length + 300, 0), (length, 2)], 1):
        written.clear()
        monkeypatch.setattr(commit, "PARTS_IN_STORE", most)
        found = each(world, lambda team, one, seq=seq: one.commit(world.part(team.rank, seq)))
        check_commit(world, found, seq)
        assert sum("-part-" in key for key in written) == requests


def requests(world: World, seq: int) -> list[tuple[str, str]]:
    """What a commit asks of a tier that all see: but for the packs, which the ranks have written before."""
    (tier,) = world.tiers.values()
    tier.requests.clear()
    check_commit(world, each(world, lambda team, one: one.commit(world.part(team.rank, seq))), seq)
    return [(what, key) for what, key in tier.requests if not key.startswith("packs/") or "-part-" in key]


@settings(max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_long_parts_make_no_more_requests_than_short_ones(ranks: list[int]) -> None:
    """Of hosts with so many ranks each."""
    world = World("site", [host for host, count in enumerate(ranks) for _ in range(count)], relay=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commit, "PARTS_IN_STORE", 1 << 30)
            short = requests(world, 1)
        long = requests(world, 2)
    finally:
        world.close()
    assert [what for what, _ in long] == [what for what, _ in short]
    assert not [key for _, key in long if "-part-" in key]


def listens_nowhere(one: relay.VersionRelay) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no port is free")

    one._listen = fails  # type: ignore[method-assign]


def cannot_be_reached(one: relay.VersionRelay) -> None:
    offer = one.offer
    one.offer = lambda part: None if (held := offer(part)) is None else {**held, "at": "127.0.0.1 9 of/nobody"}  # type: ignore[method-assign]


def is_nowhere(one: relay.VersionRelay) -> None:
    offer = one.offer
    one.offer = lambda part: None if (held := offer(part)) is None else {**held, "at": "127.0.0.1 99999 of/nobody"}  # type: ignore[method-assign]


def has_lost_it(one: relay.VersionRelay) -> None:
    offer = one.offer

    def lose(part: bytes) -> Any:
        held = offer(part)
        one.release(held)
        return held

    one.offer = lose  # type: ignore[method-assign]


def hangs(one: relay.VersionRelay) -> None:
    one._answer = lambda channel: (time.sleep(6), channel.close())  # type: ignore[assignment,method-assign,misc,return-value] # longer than the others wait


def closes(one: relay.VersionRelay) -> None:
    one._answer = lambda channel: channel.close()  # type: ignore[method-assign]


def sends_something_else(one: relay.VersionRelay) -> None:
    look = one._look
    one._look = lambda *about: None if (data := look(*about)) is None else data[:-1] + bytes([data[-1] ^ 1])  # type: ignore[method-assign]


def sends_half(one: relay.VersionRelay) -> None:
    look = one._look
    one._look = lambda *about: None if (data := look(*about)) is None else data[: len(data) // 2]  # type: ignore[method-assign]


def says_only_a_length(one: relay.VersionRelay, nbytes: int) -> None:
    def answer(channel: Any) -> None:
        with channel:
            channel.receive_exactly(relay.REQUEST.size)
            channel.send(relay.LENGTH.pack(nbytes))

    one._answer = answer  # type: ignore[method-assign]


def says_that_it_is_endless(one: relay.VersionRelay) -> None:
    """No process has so much memory: it must not be asked for."""
    says_only_a_length(one, 1 << 62)


def says_that_it_is_long(one: relay.VersionRelay) -> None:
    says_only_a_length(one, 1 << 20)


ILL = [
    *(listens_nowhere, cannot_be_reached, is_nowhere, has_lost_it, hangs, closes, sends_something_else, sends_half),
    *(says_that_it_is_long, says_that_it_is_endless),
]


def ailing(world: World, ill: dict[int, Callable[[relay.VersionRelay], None]], saves: int = 1) -> list[Any]:
    """Commits of a world in which some ranks do not give their parts to the coordinator."""

    def rank(team: Team) -> list[Record]:
        group_commit = world.group_commit(team)
        if team.rank in ill:
            ill[team.rank](world.merged[team.rank].relay)  # type: ignore[arg-type]
        return [group_commit.commit(world.part(team.rank, seq)) for seq in range(1, saves + 1)]

    try:
        return together(world.size, rank, hosts=world.hosts)
    finally:
        world.close()


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=5).map(sorted), st.data())
def test_parts_that_cannot_be_fetched_go_through_the_tier_and_no_others(hosts: list[int], data: st.DataObject) -> None:
    world = World("site", hosts, relay=True)
    ill = data.draw(st.dictionaries(st.integers(1, world.size - 1), st.sampled_from(ILL), min_size=1))
    found = ailing(world, ill, saves=2)
    assert all(isinstance(one, list) for one in found), found
    for seq in (1, 2):
        check_commit(world, [records[seq - 1] for records in found], seq)
    asked = [(what, int(key.split("-")[1])) for what, key in world.tiers[0].requests if "-part-" in key]
    each_way = [(what, rank) for rank in ill for what in ("put", "read", "delete")]
    assert sorted(asked) == sorted(each_way * 2)


def test_where_many_ranks_cannot_be_reached_no_more_of_them_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try may take ten seconds, and a network that lets no rank reach another lets none."""
    monkeypatch.setattr(coordinator, "PARTS_AT_ONCE", 1)
    world, asked = World("site", [0, 0, 1, 1, 2], relay=True), list[Any]()
    fetch = relay.VersionRelay.fetch_part
    monkeypatch.setattr(
        relay.VersionRelay, "fetch_part", lambda one, held, *more: (asked.append(held), fetch(one, held, *more))[1]
    )
    found = ailing(world, dict.fromkeys(range(1, 5), cannot_be_reached), saves=2)
    for seq in (1, 2):
        check_commit(world, [records[seq - 1] for records in found], seq)
    assert len(asked) == 1, "not again in the second save"
    assert sum(what == "put" and "-part-" in key for what, key in world.tiers[0].requests) == 2 * 4


def test_no_more_memory_is_taken_for_a_part_than_its_rank_has_voted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(relay, "bytearray", lambda nbytes: (taken.append(nbytes), bytearray(nbytes))[1], raising=False)
    world = World("site", [0, 0, 1], relay=True)
    found = ailing(world, {1: says_that_it_is_long})
    check_commit(world, [records[0] for records in found], 1)
    assert len(taken) == 1
    assert taken[0] < 1 << 20


@pytest.mark.parametrize("error", [TierFull("full"), TierUnavailable("away"), ValueError("a bug")], ids=repr)
def test_a_part_that_neither_way_takes_ends_it_for_all(error: Exception) -> None:
    world = World("site", [0, 0, 1], relay=True)
    world.tiers[0].failing = lambda key: error if "-part-" in key else None
    found = ailing(world, {1: cannot_be_reached})
    assert found[1] is error
    kind = RankFull if isinstance(error, TierFull) else RankFailed
    assert [(type(one), one.ranks) for one in (found[0], found[2])] == [(kind, (1,))] * 2
    assert not world.records(1)


def test_nobody_waits_for_the_part_of_a_rank_that_has_given_up() -> None:
    """Its part could not be fetched, and it does not stay to hear of it."""
    world = World("site", [0, 0, 1], relay=True)
    given_up = threading.Event()

    def rank(team: Team, group_commit: GroupCommit) -> Any:
        if team.rank == 2:
            given_up.wait(PATIENCE)  # before the coordinator has all votes, and says what it has fetched
        if team.rank != 1:
            return group_commit.commit(world.part(team.rank, 1))
        cannot_be_reached(world.merged[1].relay)  # type: ignore[arg-type]
        try:
            return group_commit.commit(world.part(1, 1), lambda: True)
        except TierstateError as error:
            given_up.set()
            team.receive(0, f"{group_commit._name}/1.1/decision")  # this process goes on
            return error

    found = each(world, rank)
    world.close()
    assert isinstance(found[1], CommitUnknown)
    assert [(type(one), one.ranks) for one in (found[0], found[2])] == [(RankFailed, (1,))] * 2
    assert "did not answer" not in str(found[0])


def test_parts_are_kept_no_longer_than_until_they_are_fetched() -> None:
    world = World("site", [0, 0, 1], relay=True)
    kept: list[int] = []

    def rank(team: Team, group_commit: GroupCommit) -> None:
        for seq in (1, 2):
            group_commit.commit(world.part(team.rank, seq))
            kept.append(len(world.merged[team.rank].relay._offered))  # type: ignore[union-attr]
        with suppress(TierstateError):
            group_commit.commit(world.part(team.rank, 3), lambda: True)
        kept.append(len(world.merged[team.rank].relay._offered))  # type: ignore[union-attr]

    assert each(world, rank) == [None] * 3
    world.close()
    assert kept == [0] * 9


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": -1},
        {"bytes": "1"},
        {"bytes": True},
        {"bytes": (4 << 30) + 1},
        {"sum": 7},
        {"at": None},
    ],
    ids=repr,
)
def test_what_a_vote_says_of_a_part_is_not_believed(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    world, encode = World("site", [0, 0], relay=True), Vote.encode
    monkeypatch.setattr(Vote, "encode", lambda vote: encode(replace(vote, held=vote.held and {**vote.held, **change})))
    found = each(world, lambda team, one: one.commit(world.part(team.rank, 1)))
    world.close()
    assert [type(one) for one in found] == [FormatError] * 2
    assert "the vote of rank 1" in str(found[0])


def test_a_part_is_taken_from_the_rank_only_that_has_voted_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to the store could name another part: that of another tier, or of another rank."""
    world, encode = World("site", [0, 0], relay=True), Vote.encode
    for seq, mac in enumerate(["", "00" * 32], 1):
        monkeypatch.setattr(Vote, "encode", lambda vote, mac=mac: encode(replace(vote, mac=mac)))
        found = each(world, lambda team, one, seq=seq: one.commit(world.part(team.rank, seq)))
        assert [type(one) for one in found] == [Unauthentic, Damaged], found
        assert not world.records(seq)
    world.close()


@pytest.mark.parametrize("shared", ["site", "host"])
def test_a_part_that_was_changed_in_the_store_is_no_part(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "PARTS_IN_STORE", 1 << 30)
    world, encode = World(shared, [0, 0]), Vote.encode
    for seq, change in enumerate(
        [
            lambda vote: replace(vote, part=encode_part(world.part(1, 9))),  # of another version
            lambda vote: replace(vote, mac=""),
            lambda vote: replace(vote, part=vote.part[:-1] + bytes([vote.part[-1] ^ 1])),
        ],
        1,
    ):
        monkeypatch.setattr(Vote, "encode", lambda vote, change=change: encode(change(vote)))
        found = each(world, lambda team, one, seq=seq: one.commit(world.part(team.rank, seq)))
        assert type(found[0]) is Unauthentic
        assert isinstance(found[1], TierstateError)
        assert not world.records(seq)
    monkeypatch.undo()
    check_commit(world, each(world, lambda team, one: one.commit(world.part(team.rank, 4))), 4)


def test_what_a_tier_encrypts_is_not_shown_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "layer_of", lambda asked, _kind: asked)
    for most, shared, requests in [(1 << 30, "site", 1), (0, "site", 1), (0, "host", 0)]:
        monkeypatch.setattr(commit, "PARTS_IN_STORE", most)
        world, written = World(shared, [0, 0], relay=True), list[str]()  # type: ignore[arg-type]
        world.tiers[0].failing = written.append
        check_commit(world, each(world, lambda team, one, world=world: one.commit(world.part(team.rank, 1))), 1)
        world.close()
        assert sum("-part-" in key for key in written) == requests
