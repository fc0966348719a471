"""Chunks that go from rank to rank by connections of our own."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.leaks import open_files

from tierstate.engine.ranks.restore import exchange_plan
from tierstate.engine.ranks.restore.exchange import CHUNK_HEADER, CHUNK_LOST, CLAIM, ChunkExchange, PeerListener
from tierstate.engine.ranks.restore.exchange_plan import NO_ROWS, ExchangePlan, RankRows, plan_exchange, runs_in
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.tiers.address import own_address
from tierstate.tiers.connections.channel import ChannelError
from tierstate.tiers.connections.channel import connect as connect_channel
from tierstate.tiers.connections.secret import JobSecret

SECRET = JobSecret.random()

NO = np.zeros(0, "i8")


def rows(*numbers):
    return np.array(numbers, "i8")


def content(row, nbytes):
    return np.random.default_rng(row).bytes(int(nbytes))


class Rank:
    """One rank, with what has arrived there."""

    def __init__(self, me, plan, doors, nbytes, patience=20.0, hosts=()):
        self.got, self.nbytes = {}, nbytes
        addresses = [door.address for door in doors]
        self.passing = ChunkExchange(
            me, plan, doors[me], SECRET, addresses, nbytes, self.take, patience, lambda _row: None, hosts
        )

    def read(self, plan, lost):
        for row in plan.reads.tolist():
            if row in lost:
                self.passing.lose(row)
            else:
                self.passing.give(row, as_buffer(content(row, self.nbytes[row])))

    def take(self, row, raw):
        self.got[row] = to_bytes(raw)
        return self.got[row] == content(row, self.nbytes[row])


@st.composite
def teams(draw):
    """Hosts of ranks, the lengths of chunks, what each wants, who has it, and which cannot be read."""
    hosts = sorted(draw(st.lists(st.integers(0, 2), min_size=2, max_size=5)))
    nbytes = np.array(draw(st.lists(st.sampled_from([1, 100, 70_000, 300_000]), min_size=1, max_size=8)))
    bools = st.lists(st.booleans(), min_size=len(nbytes), max_size=len(nbytes))
    wants = [np.array(draw(bools)) for _ in hosts]
    here = {host: np.array(draw(bools)) for host in set(hosts)}
    lost = draw(st.sets(st.integers(0, len(nbytes) - 1), max_size=2))
    return hosts, nbytes, wants, here, lost


@contextmanager
def exchanged(plans, nbytes, lost=(), **keys):
    """Ranks that have read and passed on everything, but for the lost chunks, which nobody can read."""
    with ExitStack() as closing:
        doors = [PeerListener(1, SECRET) for _ in plans]
        ranks = [Rank(me, plan, doors, nbytes, **keys) for me, plan in enumerate(plans)]
        for rank in ranks:
            closing.callback(rank.passing.close)
        threads = [threading.Thread(target=r.read, args=(p, lost)) for r, p in zip(ranks, plans, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [rank.passing.wait([]) for rank in ranks] == [None] * len(ranks)
        yield ranks


@settings(max_examples=25)
@given(teams())
def test_what_is_planned_arrives_and_what_is_lost_is_told(team):
    hosts, nbytes, wants, here, lost = team
    offers = [
        RankRows(runs_in(w), (NO_ROWS, runs_in(here[h]), NO_ROWS, NO_ROWS)) for w, h in zip(wants, hosts, strict=True)
    ]
    plans = [plan_exchange(offers, hosts, nbytes, me) for me in range(len(hosts))]
    with exchanged(plans, nbytes, lost) as ranks:
        assert all(rank.passing.broken == [] for rank in ranks)
    for plan, rank in zip(plans, ranks, strict=True):
        coming = {row for got in plan.receives.values() for row in got.tolist()}
        assert rank.got == {row: content(row, nbytes[row]) for row in coming - lost}


def test_along_the_rows_of_many_hosts_no_rank_waits_for_ever(monkeypatch):
    """More chunks than there is memory for are under way in all directions."""
    monkeypatch.setattr(exchange_plan, "DIRECT", 2)
    hosts, nbytes = [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8], np.full(36, 200_000)
    every = np.array([[0, len(nbytes)]])
    offers = [RankRows(every, (NO_ROWS, NO_ROWS, NO_ROWS, every)) for _ in hosts]
    plans = [plan_exchange(offers, hosts, nbytes, me) for me in range(len(hosts))]
    assert sum(len(plan.reads) for plan in plans) == len(nbytes)
    with exchanged(plans, nbytes, hosts=hosts) as ranks:
        pass
    for plan, rank in zip(plans, ranks, strict=True):
        assert sorted([*plan.reads.tolist(), *rank.got]) == list(range(len(nbytes)))


@contextmanager
def receiver(nbytes, sends=None, patience=20.0):
    """Three doors, and rank 0, which gets chunk 0 from rank 1."""
    with ExitStack() as closing:
        doors = [closing.enter_context(contextlib.closing(PeerListener(1, SECRET))) for _ in range(3)]
        rank = Rank(0, ExchangePlan(NO, sends or {}, {1: rows(0)}, {}), doors, np.array([nbytes]), patience)
        closing.callback(rank.passing.close)
        yield doors, rank


def connect(door, rank=1, secret=SECRET):
    host, port, service = door.address.split()
    return connect_channel(host, int(port), secret, service, seconds=20.0, claim=CLAIM.pack(rank))


def is_closed(line):
    return not line.wait(20) and line.ended


def sends_chunk(line, row, data):
    line.send(CHUNK_HEADER.pack(row, len(data)))
    line.send_long(memoryview(data))


@pytest.mark.parametrize("who", [{"secret": JobSecret.random()}, {"rank": 2}])
def test_strangers_are_turned_away_and_ranks_are_still_let_in(who):
    with receiver(3) as (doors, rank):
        if "secret" in who:
            with pytest.raises(ChannelError, match="refuses this process"):
                connect(doors[0], **who)
        else:
            with connect(doors[0], **who) as stranger:
                assert is_closed(stranger)
        with connect(doors[0]) as line:
            sends_chunk(line, 0, content(0, 3))
            assert rank.passing.wait([]) is None
        assert rank.got == {0: content(0, 3)}


@pytest.mark.parametrize("sent", [(5, 3), (0, 4), (0, CHUNK_LOST - 1)])
def test_what_was_not_to_come_ends_the_connection(sent):
    with receiver(3) as (doors, rank):
        with connect(doors[0]) as line:
            line.send(CHUNK_HEADER.pack(*sent))
            assert is_closed(line)
        assert rank.passing.wait([]) is None
        assert rank.got == {}


@pytest.mark.parametrize("sent", [bytes(10_000), b"some"])
def test_a_chunk_that_comes_damaged_or_cut_is_lost_for_those_behind_too(sent):
    with receiver(10_000, sends={2: rows(0)}) as (doors, relay):
        last = Rank(2, ExchangePlan(NO, {}, {0: rows(0)}, {}), doors, np.array([10_000]))
        with connect(doors[0]) as line:
            line.send(CHUNK_HEADER.pack(0, 10_000))
            line.send_long(memoryview(sent))
        assert relay.passing.wait([]) is None
        assert last.passing.wait([]) is None
        assert last.passing._over[0].is_set()  # it was told, and has not merely waited for as long as it would
        assert last.got == {}
        last.passing.close()


def test_who_passes_nothing_on_is_not_waited_for_longer_than_patience_lasts():
    with receiver(3, patience=0.2) as (doors, rank), connect(doors[0]):
        assert rank.passing.wait([]) is None
        assert rank.passing.wait([1]) is None


def test_who_is_dropped_is_told_and_what_it_sends_then_is_not_taken():
    nbytes = np.array([3, 4, 5])
    with ExitStack() as closing:
        doors = [PeerListener(1, SECRET) for _ in range(3)]
        # Rank 0 forwards one chunk of rank 1 to rank 2.
        waits = Rank(0, ExchangePlan(NO, {2: rows(2)}, {1: rows(0, 1, 2)}, {}), doors, nbytes)
        late = Rank(1, ExchangePlan(rows(0, 1, 2), {0: rows(0, 1, 2)}, {}, {}), doors, nbytes)
        last = Rank(2, ExchangePlan(NO, {}, {0: rows(2)}, {}), doors, nbytes)
        for rank in (waits, late, last):
            closing.callback(rank.passing.close)
        late.passing.give(0, as_buffer(content(0, 3)))
        while waits.passing.left(1) != [1, 2]:
            waits.passing.pause(1, 0.01)
        assert waits.passing.passed(1) == (3, 9)
        assert waits.passing.awaited() == [1]
        assert waits.passing.drop(1) == [1, 2]
        assert waits.passing.awaited() == []
        assert late.passing.relieved.wait(20)
        assert late.passing.broken == [0]
        assert not waits.passing.relieved.is_set()
        assert not last.passing._over[0].is_set()  # what is read in its place is still sent
        with connect(doors[0], rank=1) as line:
            assert is_closed(line)
        waits.passing.give(2, as_buffer(content(2, 5)))
        assert last.passing.wait([]) is None
        assert (waits.got, last.got) == ({0: content(0, 3)}, {2: content(2, 5)})


@pytest.mark.slow
def test_a_rank_that_takes_nothing_is_passed_over():
    nbytes = np.array([64 << 20])
    doors = [PeerListener(1, SECRET), PeerListener(1, SECRET)]  # nobody takes what lies behind the second one's
    rank = Rank(0, ExchangePlan(rows(0), {1: rows(0)}, {}, {}), doors, nbytes, patience=0.3)
    rank.passing.give(0, as_buffer(bytes(64 << 20)))
    assert rank.passing.broken == [1]
    rank.passing.give(0, as_buffer(bytes(64 << 20)))
    with doors[1].accept() as line:  # which goes on, as after a stop, and is not to wait for the rest
        line.receive_exactly(CHUNK_HEADER.size)
        with pytest.raises(ConnectionResetError):
            line.receive_long(memoryview(bytearray(64 << 20)))
    rank.passing.close()
    doors[1].close()


def test_without_more_threads_connections_are_served_one_after_the_other(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "tierstate-passing":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ExitStack() as closing:
        doors = [closing.enter_context(contextlib.closing(PeerListener(1, SECRET))) for _ in range(3)]
        plan = ExchangePlan(NO, {}, {1: rows(0), 2: rows(1)}, {})
        rank = Rank(0, plan, doors, np.array([3, 4]))
        closing.callback(rank.passing.close)
        lines = [closing.enter_context(connect(doors[0], rank=number)) for number in (1, 2)]
        for row, line in enumerate(lines):
            sends_chunk(line, row, content(row, 3 + row))
        assert rank.passing.wait([]) is None
        assert rank.got == {0: content(0, 3), 1: content(1, 4)}


def test_what_does_not_take_its_bytes_is_told():
    with receiver(3) as (doors, rank), connect(doors[0]) as line:
        rank.passing._take = lambda row, raw: 1 / 0
        sends_chunk(line, 0, content(0, 3))
        assert type(rank.passing.wait([])) is ZeroDivisionError


def test_the_address_is_that_of_the_named_interface_or_the_way_out(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert own_address(hosts=2) == "127.0.0.1"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo,nowhere0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address(hosts=1) == "127.0.0.1"
    assert socket.inet_aton(own_address(hosts=2))


def test_a_listener_that_can_start_no_thread_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gc.collect()
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="can't start new thread") as caught:
            PeerListener(1, SECRET)
    assert not open_files() - before, caught  # whose traceback keeps what was made
