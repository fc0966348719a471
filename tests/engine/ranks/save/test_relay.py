"""Merged versions that leaders pass on to each other: who sends how much, and what goes wrong on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import engine_threads
from support.thread_teams import PATIENCE, World, together

from tierstate.engine.ranks.save import relay
from tierstate.engine.ranks.save.leader import HostLeader, MergedVersions
from tierstate.engine.ranks.save.messages import CommitMessages
from tierstate.engine.ranks.save.relay import FANOUT, VersionRelay, above
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.memory.host import Memory

LEADERS = 13


@given(st.integers(1, 10_000))
def test_the_tree_is_shallow_and_no_place_has_more_than_a_few_below_it(place: int) -> None:
    way = list(above(place))
    assert way[-1] == 0
    assert all(a > b for a, b in zip([place, *way], way, strict=False))
    assert FANOUT ** (len(way) - 1) <= place
    first = next(above(place)) * FANOUT + 1
    assert first <= place < first + FANOUT


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "FANOUT", 2)
    monkeypatch.setattr(relay, "PATIENCE", 30.0)  # where all are well, nobody is given up on a busy machine


@pytest.fixture
def impatient(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE", 0.5)


def saved(world: World, ill: Callable[[Team, VersionRelay], None] = lambda _team, _relay: None) -> list[Any]:
    """What each rank has of two saves, one after the other."""

    def rank(team: Team) -> list[Record]:
        group_commit = world.group_commit(team)
        mine = world.merged[team.rank].relay
        if mine is not None:
            ill(team, mine)
        found = [group_commit.commit(world.part(team.rank, seq)) for seq in (1, 2)]
        team.gather("end", b"")
        return found

    try:
        return together(world.size, rank, hosts=world.hosts)
    finally:
        world.close()


def sent(world: World) -> list[int]:
    """How many versions each rank has passed on."""
    long = len(world.records(1)[0].version.data)
    return [0 if merged.relay is None else round(merged.relay.sent / long) for merged in world.merged]


def is_whole(world: World, found: list[Any]) -> bool:
    records = [len(world.records(seq)) == world.size and world.is_whole(seq) for seq in (1, 2)]
    return all(records) and all(isinstance(one, list) for one in found)


@pytest.mark.parametrize("shared", ["process", "host"])
def test_every_leader_gets_each_version_once_and_none_sends_it_to_more_than_a_few(narrow: None, shared: Any) -> None:
    world = World(shared, list(range(LEADERS)), relay=True)
    assert is_whole(world, saved(world))
    assert sum(sent(world)) == 2 * (LEADERS - 1), "nobody got it by the store"
    assert max(sent(world)) == 2 * 2


def test_commits_to_several_tiers_begin_to_listen_once(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[relay.PeerListener] = []
    both = threading.Barrier(4)

    class Slow(relay.PeerListener):
        def __init__(self, hosts: int, secret: JobSecret) -> None:
            time.sleep(0.1)  # in which another commit comes
            super().__init__(hosts, secret)
            made.append(self)

    monkeypatch.setattr(relay, "PeerListener", Slow)
    team = Team(dist.HashStore(), 0, 4, range(4), secret=JobSecret.random())
    one = VersionRelay(team, lambda *_: None)

    def commit() -> None:
        both.wait()
        one.serve(range(4))

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    team.close()
    assert len(made) == 1
    assert not {"tierstate-accept", "tierstate-relay"} & set(engine_threads())


def test_a_commit_that_is_later_than_close_begins_to_listen_no_more(narrow: None) -> None:
    team = Team(dist.HashStore(), 0, 4, range(4), secret=JobSecret.random())
    one = VersionRelay(team, lambda *_: None)
    one.close()
    assert one.offer(b"a part") is None
    one.serve(range(4))
    team.close()
    assert not {"tierstate-accept", "tierstate-relay"} & set(engine_threads())


def test_few_leaders_get_it_by_the_store(narrow: None) -> None:
    world = World("host", [0, 1, 2], relay=True)
    assert is_whole(world, saved(world))
    assert sent(world) == [0, 0, 0]


def hangs(team: Team, one: VersionRelay) -> None:
    one._find = lambda *_: time.sleep(2)  # longer than the others wait


def sends_something_else(team: Team, one: VersionRelay) -> None:
    find = one._find

    class Other:
        def __init__(self, data: bytes) -> None:
            self.data = data[:-1] + bytes([data[-1] ^ 1])

    one._find = lambda *about: None if (found := find(*about)) is None else Other(found.data)  # type: ignore[assignment,return-value]


def closes(team: Team, one: VersionRelay) -> None:
    def find(*_: Any) -> Any:
        raise ConnectionError("as if the rank had died")

    one._find = find


def cannot_be_reached(team: Team, one: VersionRelay) -> None:
    team.post(relay.ADDRESS, b"127.0.0.1 9 relay/of-nobody")
    one.serve = lambda _leaders: None  # type: ignore[method-assign]


def listens_nowhere(team: Team, one: VersionRelay) -> None:
    one.serve = lambda _leaders: None  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("how", [hangs, sends_something_else, closes, cannot_be_reached, listens_nowhere])
@pytest.mark.parametrize("who", [{0}, {1}, {1, 2}, set(range(LEADERS))], ids=str)
def test_a_leader_that_passes_nothing_on_costs_time_and_no_version(
    impatient: None, how: Callable[[Team, VersionRelay], None], who: set[int]
) -> None:
    world = World("process", list(range(LEADERS)), relay=True)
    found = saved(world, lambda team, one: how(team, one) if team.rank in who else None)
    assert is_whole(world, found), found


@pytest.mark.slow
def test_a_leader_that_never_gets_it_is_not_waited_for_for_ever(impatient: None) -> None:
    """It goes on to give signs of life, and the coordinator is dead, so that no decision ends the wait."""
    ended = threading.Event()

    def rank(team: Team) -> bytes:
        keys = CommitMessages(team, "there").next(1)
        merged = MergedVersions()
        merged.relay = VersionRelay(team, merged.wait_for)
        leader = HostLeader(team, Log(Memory(), "run"), merged, "process", lambda: False)
        found = b""
        if team.rank == 0:
            team.post(keys.version, b"the version")
        elif team.rank == 1:
            team.post("there", b"")
            ended.wait(PATIENCE)
        elif team.rank == 3:
            team.receive(1, "there")
            found = bytes(leader._received(keys, "00" * 16))
            ended.set()
        merged.relay.close()
        return found

    found = together(4, rank, hosts=range(4), timeouts=Timeouts(timeout=1.0, silence=10.0))
    assert found[3] == b"the version", found


@pytest.mark.slow
def test_a_leader_that_is_slow_is_waited_for(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than one is waited for that gives no sign of life."""
    monkeypatch.setattr(relay, "PATIENCE", 3.0)
    world, began = World("process", list(range(LEADERS)), relay=True), time.monotonic()

    def slow(team: Team, one: VersionRelay) -> None:
        find = one._find
        if team.rank == 1:
            one._find = lambda *about: find(*about) if time.monotonic() - began > 4 else time.sleep(about[2])

    assert is_whole(world, saved(world, slow))
    assert sum(sent(world)) == 2 * (LEADERS - 1)
    assert max(sent(world)) == 2 * 2
