"""Teams: each message reaches its receiver exactly once, and no wait lasts forever."""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.thread_teams import Mortal, keys_in, tcp, together

from tierstate.engine.ranks.team import store as store_module
from tierstate.engine.ranks.team.heartbeat import HeartbeatMonitor, LifeCheck, Timeouts, has_dead, heartbeat_key
from tierstate.engine.ranks.team.store import BROKEN_OFF, CLOSED, StoreClient
from tierstate.engine.ranks.team.team import MAX_TOPICS, MESSAGE_PART, Team, unpack_answers
from tierstate.manifest.errors import FormatError, RankFailed, TierstateError, format_ranks

SOON = Timeouts(timeout=20.0, silence=0.3)
SLOW = Timeouts(timeout=1800.0, silence=20.0)


def test_what_was_gathered_long_ago_is_not_heard_again() -> None:
    """However many commits there were since."""

    def rank(team: Team) -> list[list[bytes]]:
        before = team.gather("restore", b"old")
        for number in range(MAX_TOPICS + 10):
            team.turn(f"tier/{number}")
        return [before, team.gather("restore", b"new")]

    assert together(2, rank) == [[[b"old"] * 2, [b"new"] * 2]] * 2


def test_what_all_say_alike_takes_little_room() -> None:
    stores: list[Any] = []
    said = bytes(range(256)) * 16

    def rank(team: Team) -> list[bytes]:
        found = team.gather("offer", said + bytes([team.rank]))
        if team.rank == 1:
            stores.append(team._client.look("said/0/gathered/offer/1"))
        team.gather("over", b"")
        return found

    assert together(4, rank) == [[said + bytes([r]) for r in range(4)]] * 4
    assert len(stores[0]) < len(said)


@given(st.binary(max_size=40), st.integers(0, 100))
def test_what_all_have_said_is_refused_where_it_was_changed(data: bytes, nbytes: int) -> None:
    head = json.dumps([nbytes]).encode()
    with contextlib.suppress(FormatError):
        assert [len(one) for one in unpack_answers(b"\2" + len(head).to_bytes(4, "little") + head + data)] == [nbytes]


@given(
    st.sampled_from([b"\0", b"\1", b"\2", b""]),
    st.lists(st.integers(-2, 40) | st.just(1 << 70), max_size=3)
    | st.dictionaries(st.just("ranks"), st.text(max_size=2)),
    st.binary(max_size=40),
)
def test_an_answer_of_another_kind_is_refused_and_takes_no_memory(kind: bytes, head: Any, data: bytes) -> None:
    """A length of -1 was no limit to what is unpacked."""
    text = json.dumps(head).encode()
    found: list[bytes] = []
    with contextlib.suppress(FormatError):
        found = unpack_answers(kind + len(text).to_bytes(4, "little") + text + data)
        assert [len(one) for one in found] == head
    bomb = zlib.compress(bytes(1 << 20), 9)
    with pytest.raises(FormatError, match="of no length"):
        unpack_answers(b"\2" + (4).to_bytes(4, "little") + b"[-1]" + bomb)


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=40)), max_size=6))
def test_what_all_give_is_gathered_by_all_in_order(size: int, rounds: list[tuple[str, bytes]]) -> None:
    def rank(team: Team) -> list[list[bytes]]:
        return [team.gather(topic, data + bytes([team.rank])) for topic, data in rounds]

    found = together(size, rank)
    assert found == [[[data + bytes([r]) for r in range(size)] for _, data in rounds]] * size


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.sampled_from(["process", "host", "site"]))
def test_who_sees_the_same_and_who_leads(hosts: list[int], shared: Any) -> None:
    teams = [Team(dist.HashStore(), rank, len(hosts), hosts) for rank in range(len(hosts))]
    sights = [team.ranks_sharing(shared) for team in teams]
    assert all(rank in sight and list(sight) == sorted(sight) for rank, sight in enumerate(sights))
    assert Counter(sight for sight in sights) == {sight: len(sight) for sight in set(sights)}
    leaders = tuple(sorted(sight[0] for sight in set(sights)))
    assert all(team.leaders(shared) == leaders for team in teams)
    assert tuple(team.rank for team in teams if team.leads(shared)) == leaders
    assert [team.coordinator for team in teams] == [rank == 0 for rank in range(len(hosts))]
    for team in teams:
        team.close()


@pytest.mark.parametrize("make", [dist.HashStore, tcp], ids=["threads", "tcp"])
@pytest.mark.parametrize("length", [0, 1, MESSAGE_PART, MESSAGE_PART + 1, 3 * MESSAGE_PART + 5, (8 << 20) + 1])
def test_messages_of_any_length_are_heard_and_forgotten(make: Any, length: int) -> None:
    store, data = make(), bytes(range(256)) * (length // 256 + 1)

    def rank(team: Team) -> bytes:
        if team.rank == 1:
            team.post("word", data[:length])
        found = team.receive(1, "word")
        team.gather("heard", b"")
        if team.rank == 1:
            team.forget(["word"])
        return found

    assert together(2, rank, store=store) == [data[:length]] * 2
    assert keys_in(store) <= 2 + 1 + 2  # beats, what was gathered last; a store may keep numbers of its own


def test_a_message_that_was_changed_is_not_heard() -> None:
    store = dist.HashStore()
    team = Team(store, 0, 1, [0])
    team.post("word", bytes(MESSAGE_PART + 1))
    store.set("said/0/word#1", b"x")
    with pytest.raises(FormatError, match="checksum differs"):
        team.receive(0, "word")
    store.set("said/0/word", b"\1nonsense")
    with pytest.raises(FormatError, match="rank 0"):
        team.receive(0, "word")
    store.set("said/0/word", b'\1{"bytes": 99999999999999, "sum": ""}')
    with pytest.raises(FormatError, match="99999999999999"):
        team.receive(0, "word")
    team.close()


def test_a_rank_that_says_nothing_in_time_is_named() -> None:
    def rank(team: Team) -> Any:
        if team.rank:
            return team.receive(0, "over")
        with pytest.raises(RankFailed, match=r"ranks 1, 2 did not answer within 0\.2 s") as failed:
            team.receive_all({1: "word", 2: "word"}, timeout=0.2)
        team.post("over", b"")
        return failed.value.ranks

    assert together(3, rank) == [(1, 2), b"", b""]


def test_whoever_waits_can_be_told_to_stop() -> None:
    asked = iter(range(3))
    team = Team(dist.HashStore(), 0, 2, [0, 0])
    with pytest.raises(RankFailed, match="rank 0 gave up"):
        team.receive(1, "word", stop=lambda: next(asked, None) is None)
    team.close()


def test_a_rank_that_closes_says_so_and_what_it_said_before_counts() -> None:
    gone = threading.Event()

    def rank(team: Team) -> Any:
        if team.rank == 1:
            team.post("word", b"last")
            team.close()
            gone.set()
            return None
        gone.wait()
        assert team.receive(1, "word") == b"last"
        with pytest.raises(RankFailed, match="rank 1 has closed its Checkpointer") as failed:
            team.receive(1, "another")
        return failed.value.ranks

    assert together(2, rank, timeouts=SOON) == [(1,), None]


@pytest.mark.slow
def test_a_dead_rank_is_named_and_those_who_live_are_waited_for() -> None:
    """Ranks 1 and 3 die; rank 2 has not said anything either, but lives."""

    def rank(team: Team) -> Any:
        if team.rank % 2:
            team._client.end()
            return None
        if team.rank == 2:
            return team.receive(0, "over")
        with pytest.raises(RankFailed, match=r"has given no sign of life for 2 s") as failed:
            team.receive_all({1: "word", 2: "word", 3: "word"})
        team.post("over", b"")
        return failed.value.ranks

    found = together(4, rank, timeouts=Timeouts(60.0, 2.0))
    assert found[1:] == [None, b"", None]
    assert found[0] in [(1,), (3,), (1, 3)]


@pytest.mark.slow
def test_a_failed_gathering_fails_on_all() -> None:
    def rank(team: Team) -> Any:
        if team.rank == 2:
            team._client.end()
            return None
        with pytest.raises(RankFailed) as failed:
            team.gather("plans", b"")
        return failed.value.ranks

    assert together(3, rank, timeouts=Timeouts(60.0, 2.0)) == [(2,), (2,), None]  # rank 1 lives, on a busy machine too


def test_a_coordinator_that_is_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    receive_all = Team.receive_all

    def interrupted(team: Team, *given: Any, **more: Any) -> Any:
        if team.coordinator:
            raise KeyboardInterrupt
        return receive_all(team, *given, **more)

    monkeypatch.setattr(Team, "receive_all", interrupted)

    def rank(team: Team) -> Any:
        with pytest.raises((KeyboardInterrupt, RankFailed)) as failed:
            team.gather("plans", b"")
        return str(failed.value), getattr(failed.value, "ranks", None)

    told = "rank 0 could not gather what all have: KeyboardInterrupt"
    assert together(3, rank, timeouts=SLOW) == [("", None), (told, (0,)), (told, (0,))]


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2), st.booleans())
@settings(max_examples=20)
def test_who_leaves_a_series_is_heard_in_it_and_in_step_with_the_next_one(
    rounds: list[int], who: int, under_way: bool
) -> None:
    """Of each series so many all-gathers, then a rank leaves it: before one, or when it has given its part."""

    def rank(team: Team) -> list[Any]:
        found: list[Any] = []
        for number, count in enumerate([*rounds, 1]):
            series = team.series("restore")
            found += [series.gather(f"{number}.{i}.{team.rank}".encode()) for i in range(count)]
            if team.rank == who:
                if under_way and not team.coordinator:
                    series._at = count + 1, True
                    team.post(f"gather/restore/{number + 1}/{count + 1}", b"early")
                series.leave(b"left", ValueError("here"))
            else:
                for _ in range(2):  # what was under way may be over for this rank, and not the next one
                    try:
                        left = series.gather(b"")[who] == b"left"
                    except RankFailed as error:
                        left = (who, error.ranks) == (0, (0,))
                    if left:
                        break
                else:
                    raise AssertionError("it was not told")
        return found

    right = [
        [f"{number}.{i}.{r}".encode() for r in range(3)]
        for number, count in enumerate([*rounds, 1])
        for i in range(count)
    ]
    found = together(3, rank, timeouts=SLOW)
    assert found == [right] * 3


def test_series_leave_little_in_the_store() -> None:
    store = dist.HashStore()

    def rank(team: Team) -> int:
        for _ in range(20):
            series = team.series("restore")
            series.gather(b"")
            series.gather(b"")
            series.leave(b"left", ValueError("here"))
        team.gather("over", b"")
        return keys_in(store)

    assert max(together(3, rank, store=store)) < 40


def test_a_rank_whose_message_is_damaged_keeps_nobody_waiting() -> None:
    """The coordinator cannot read it, and the others learn that at once, and not after an hour."""

    def rank(team: Team) -> Any:
        if team.rank == 2:
            team._client.set({"said/2/gather/plans/1": b"\1nonsense"})
            team.gather("over", b"")
            return None
        with pytest.raises(TierstateError, match="not one of ours") as failed:
            team.gather("plans", b"")
        team.gather("over", b"")
        return type(failed.value)

    assert together(3, rank, timeouts=SLOW) == [FormatError, RankFailed, None]


def test_a_rank_that_is_silent_is_told_once() -> None:
    told = list[str]()

    def rank(team: Team) -> None:
        if team.rank == 1:
            team._client.end()
            return
        team.on_silence(told.append)
        for _ in range(2):
            with pytest.raises(RankFailed):
                team.gather("plans", b"")

    together(2, rank, timeouts=SOON)
    assert told == ["rank 1 has given no sign of life for 0.3 s"]


def test_a_store_that_is_lost_names_no_rank() -> None:
    store = Mortal(dist.HashStore(), left=3)
    team = Team(store, 0, 2, [0, 0], timeouts=Timeouts(20.0, 0.3))
    with pytest.raises(RankFailed, match="has not answered for") as failed:
        team.receive(1, "word")
    assert failed.value.ranks == ()
    with pytest.raises(RankFailed, match="lost"):
        team.post("more", b"")
    store.over.set()
    team.close()

    class Refusing(Mortal):
        def clone(self) -> Any:
            return self

        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    team = Team(Refusing(dist.HashStore()), 0, 2, [0, 0], timeouts=SOON)
    with pytest.raises(RankFailed, match="is lost: Connection reset by peer") as failed:
        team.receive(1, "word")
    assert failed.value.ranks == ()
    team.close()


def test_a_pause_of_this_process_is_no_silence_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still while a question is under way; the answer is there as soon as the line's thread runs again."""
    clock = [0.0]

    class Late(Future[bytes]):
        looks = 0

        def result(self, timeout: float | None = None) -> bytes:
            self.looks += 1
            clock[0] += 1000.0
            if self.looks < 20:
                raise TimeoutError
            return b"here"

    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert store_module._within(Late(), 60.0) == b"here"
    with pytest.raises(TimeoutError):
        store_module._within(Late(), 30.0)


@given(st.lists(st.booleans(), min_size=3, max_size=9))
def test_only_looks_without_a_beat_count_as_silence(beats: list[bool]) -> None:
    store = dist.HashStore()
    line = StoreClient(store, 5.0)
    vigil = HeartbeatMonitor(line, Timeouts(60.0, 60.0), 2)
    number = silent = 0
    for beats_now in [True, *beats]:
        number += beats_now
        store.set(heartbeat_key(1), str(number))
        vigil._last -= 1000.0  # this process stood still for long: it counts as two intervals of 10 s
        dead = vigil.look([1])
        silent = 0 if beats_now else silent + 20
        assert (1 in dead) == (silent >= 60)
    line.end()


def test_who_was_found_dead_is_so_for_the_next_wait_until_it_beats() -> None:
    store = dist.HashStore()
    line, timeouts = StoreClient(store, 5.0), Timeouts(60.0, 60.0)
    store.set(heartbeat_key(1), "7")
    store.set(heartbeat_key(2), "7")
    assert HeartbeatMonitor(line, timeouts, 3).look([1, 2]) == {}
    first = HeartbeatMonitor(line, timeouts, 3)
    for _ in range(4):
        first._last -= 1000.0
        dead = first.look([1])
    assert set(dead) == {1}
    assert has_dead(line)
    later = HeartbeatMonitor(line, timeouts, 3)
    assert set(later.look([1, 2])) == {1}  # at once, as each save under way would wait for as long again
    store.set(heartbeat_key(1), "8")
    assert HeartbeatMonitor(line, timeouts, 3).look([1, 2]) == {}
    assert not has_dead(line)
    store.set(heartbeat_key(1), CLOSED)
    assert not has_dead(line)
    line.end()
    assert has_dead(line)  # nobody can be asked any more


def looked_at(check: LifeCheck) -> bool | None:
    """What a look says, however soon after the last one."""
    check._next = 0.0
    return check.look()


@given(st.lists(st.sets(st.integers(1, 3)), max_size=8), st.sets(st.integers(1, 3)))
def test_all_live_once_each_has_beaten_after_the_first_look(beats: list[set[int]], before: set[int]) -> None:
    store = dist.HashStore()
    line = StoreClient(store, 5.0)
    for rank in before:
        store.set(heartbeat_key(rank), "7")  # as all may have that are dead by now
    check = LifeCheck(line, Timeouts(60.0, 60.0), 0, 4)
    assert looked_at(check) is None
    number, beaten = 7, set[int]()
    for now in beats:
        number += 1
        beaten |= now
        for rank in now:
            store.set(heartbeat_key(rank), str(number))
        assert looked_at(check) is (True if beaten == {1, 2, 3} else None)
        if beaten == {1, 2, 3}:
            break
    line.end()


def test_not_all_live_if_one_has_broken_off_or_is_silent_or_nobody_can_be_asked() -> None:
    store = dist.HashStore()
    line, timeouts = StoreClient(store, 5.0), Timeouts(60.0, 60.0)
    for rank in (1, 2):
        store.set(heartbeat_key(rank), "7")
    check, other = LifeCheck(line, timeouts, 0, 3), LifeCheck(line, timeouts, 0, 3)
    assert looked_at(check) is looked_at(other) is None
    assert check.look() is None, "it is too soon to look again"
    store.set(heartbeat_key(1), "8")
    for _ in range(3):
        check._monitor._last -= 1000.0  # counts as 20 s
        found = looked_at(check)
    assert found is None
    check._monitor._last -= 1000.0
    assert looked_at(check) is False, "rank 2 is silent"
    assert looked_at(LifeCheck(line, timeouts, 0, 3)) is False, "as is known by now"
    store.set(heartbeat_key(2), CLOSED)
    assert looked_at(other) is True, "who has closed is not lost"
    store.set(heartbeat_key(2), BROKEN_OFF)
    assert looked_at(LifeCheck(line, timeouts, 0, 3)) is False
    line.end()
    assert looked_at(LifeCheck(line, timeouts, 0, 3)) is False


def test_beats_of_many_ranks_cost_the_store_little() -> None:
    timeouts = Timeouts()
    for size in (1, 100, 10_000, 100_000):
        assert size / timeouts.interval(size) <= 1000
        assert timeouts.quiet(size) >= 4 * timeouts.interval(size)
    assert (timeouts.quiet(1000), timeouts.quiet(10_000)) == (60.0, 100.0)


def test_ten_thousand_messages_take_few_questions() -> None:
    store, size = tcp(), 10_000
    for rank in range(1, size):
        store.set(f"said/{rank}/vote", b"\0yes")
    counted = Mortal(store)
    team = Team(counted, 0, size, [0] * size)
    assert set(team.receive_all({rank: "vote" for rank in range(1, size)}).values()) == {b"yes"}
    assert counted.calls < 600
    team.close()


def test_who_is_not_in_a_team() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Team(dist.HashStore(), 2, 2, [0, 0])
    assert format_ranks([5, 1]) == "ranks 1, 5"
    assert format_ranks(range(100)).endswith("15 and 84 more")
