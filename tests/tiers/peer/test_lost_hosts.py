"""Hosts that are lost, come back, are slow or full: what is found then, and what nobody pretends."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, policy, tensors
from support.peer_hosts import Hosts, meet

import tierstate as ts
from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, NotFound, TierFull, TierUnavailable
from tierstate.tiers.peer import client
from tierstate.tiers.peer.client_session import ClientSession
from tierstate.tiers.peer.members import HostReport, Member, Membership, is_stale, merge_memberships
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.testing import Faulty, random_bytes
from tierstate.tiers.wrappers.limit import Limited
from tierstate.tiers.wrappers.measure import Measured
from tierstate.tiers.wrappers.retry import Retried


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")


@pytest.fixture
def two(place: Path) -> Iterator[Hosts]:
    with Hosts(place, 2) as hosts:
        yield hosts


def lose(hosts: Hosts, number: int) -> None:
    """A host is gone with all that it kept."""
    hosts.die(number)
    hosts.tiers[number].stop()


def test_a_replaced_host_finds_its_own_again(two: Hosts) -> None:
    data = random_bytes(3_000_000)
    two.tiers[1].put("packs/own", data)
    two.tiers[0].put("packs/other", data[:100])
    lose(two, 1)
    assert list(two.tier(0).list("")) == ["packs/other", "packs/own"]
    two.start(1)
    after = [two.tier(0), two.tier(1)]
    assert meet(after) == [None, None]
    assert list(after[1].list("packs/")) == ["packs/other", "packs/own"]
    assert after[1].get("packs/own").equal(data)
    assert any("a host has left" in note for note in after[1].traits.notes)
    # Each is with one host, so that versions to come share neither; what is written now is with two.
    after[0].put("packs/new", data[:10])
    for tier in after:
        assert [tier.firm(f"packs/{name}") for name in ("own", "other", "new")] == [False, False, True]
    # A host was lost, so what is there may lie with one that does not answer alone.
    two.die(0)
    with pytest.raises(TierUnavailable, match="may have the only copy"):
        after[1].list("")


def test_a_version_is_loaded_on_the_host_that_replaces_a_lost_one(two: Hosts, tmp_path: Path) -> None:
    ts.register_tier("peer", Peer)
    state = tensors(100_000, 5000)

    def of_host_1(disk: str) -> ts.Policy:
        keys = {"type": "peer", "path": str(two.path(1)), "capacity": "64MiB"}
        return policy({"peer": keys, "nvme": {"type": "nvme", "path": str(tmp_path / disk)}})

    with ts.Checkpointer(of_host_1("lost"), "run") as ckpt:
        ckpt.save(state, step=7).wait("peer")
    lose(two, 1)
    two.start(1)
    assert meet([two.tier(0), two.tier(1)]) == [None, None]
    with ts.Checkpointer(of_host_1("new"), "run") as ckpt:
        assert alike(ckpt.load(), state)
        # What it saves from now on has a copy again.
        ckpt.save(state, step=8).wait("peer")
    assert len(list(two.tiers[0]._kept.list("versions/run/"))) == 2


def test_a_host_whose_memory_was_freed_under_a_job_does_not_take_it_for_all_there_is(two: Hosts) -> None:
    """As by `tierstate peer stop`. Its copies are gone, so what one other host has may be the only one."""
    tier = two.tiers[1]
    tier.put("a", random_bytes(5))
    lose(two, 1)
    assert list(tier.list("")) == ["a"]
    two.die(0)
    for ask in (lambda: list(tier.list("")), lambda: tier.size("a"), lambda: tier.get("a")):
        with pytest.raises(TierUnavailable, match="may have the only copy"):
            ask()


def test_while_a_partner_does_not_answer_nothing_becomes_visible(two: Hosts) -> None:
    early = two.tiers[0].writer("a")
    early.append(random_bytes(100))
    two.die(1)
    with pytest.raises(TierUnavailable, match="does not answer"):
        early.close()
    with pytest.raises(TierUnavailable):
        two.tiers[0].put("b", random_bytes(10))
    with pytest.raises(TierUnavailable):
        two.tiers[0].delete("c")
    assert list(two.tiers[0].list("")) == []
    assert not list(two.place.rglob(".tmp*"))
    two.start(1)
    two.tiers[0].put("a", random_bytes(10))
    assert list(two.tiers[1].list("")) == ["a"]


def test_a_partner_that_is_lost_before_it_commits_leaves_nothing(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the object is visible on the writer's own host, which comes first; it is taken back."""

    def lost(desk: ClientSession, question: object) -> bytes:
        assert list(two.tiers[0]._kept.list("")) == ["a"]
        desk._line.channel.wire.close()
        raise OSError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(ClientSession, "_commit", lost)
        with pytest.raises(TierUnavailable):
            two.tiers[0].put("a", random_bytes(100))
    assert list(two.tiers[1].list("")) == []
    two.tiers[0].put("a", random_bytes(10))


def test_an_own_host_that_refuses_leaves_nothing(two: Hosts) -> None:
    """The partner comes first here, and has the object by then."""
    writer = two.tiers[1].writer("a")
    writer.append(random_bytes(100))
    two.tiers[1]._kept.put("a", bytes(5))
    with pytest.raises(AlreadyExists):
        writer.close()
    assert list(two.tiers[0]._kept.list("")) == []


def test_an_absent_object_and_hosts_that_do_not_answer(place: Path) -> None:
    """One of three away is covered by one copy; two are not, and an object that one of the others has is found."""
    with Hosts(place, 3) as hosts:
        hosts.tiers[0].put("a", random_bytes(5))
        keepers = [n for n in range(3) if (hosts.path(n) / "objects" / "a").exists()]
        assert len(keepers) == 2
        (without,) = {0, 1, 2} - set(keepers)
        hosts.die(keepers[1])
        reader = hosts.tier(without)
        assert reader.get("a").equal(random_bytes(5))
        assert list(reader.list("")) == ["a"]
        with pytest.raises(NotFound):
            reader.size("b")
        hosts.die(keepers[0])
        for ask in (lambda: reader.size("a"), lambda: reader.get("b"), lambda: list(reader.list(""))):
            with pytest.raises(TierUnavailable, match="2 of 3 hosts do not answer"):
                ask()


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_host(place: Path, full: int) -> None:
    with Hosts(place, 2) as hosts:
        hosts.tiers[full]._kept.capacity = hosts.keepers[full].kept.capacity = 10_000
        hosts.tiers[0].put("a", random_bytes(6_000))
        with pytest.raises(TierFull, match="no room for"):
            hosts.tiers[0].put("b", random_bytes(6_000))
        assert list(hosts.tiers[0].list("")) == ["a"]
        end = time.monotonic() + 30
        while list(place.rglob(".tmp*")):  # a keeper clears up once it has refused
            assert time.monotonic() < end
            time.sleep(0.01)
        hosts.tiers[0].delete("a")
        hosts.tiers[0].put("b", random_bytes(10_000))


def test_the_capacity_counts_what_all_processes_write(two: Hosts) -> None:
    one, other = (two.tier(0, capacity=100_000) for _ in range(2))
    with one.writer("a") as writer:
        writer.append(random_bytes(60_000))
        with pytest.raises(TierFull):
            other.put("b", random_bytes(60_000))
        other.put("c", random_bytes(40_000))
    assert one.room() == 0


def test_what_a_killed_writer_left_makes_room(two: Hosts) -> None:
    tier = two.tier(0, capacity=10_000)
    tier.put("a", random_bytes(1))
    (two.path(0) / "objects" / ".tmp-dead").write_bytes(bytes(9_000))
    tier.put("b", random_bytes(9_000))


def test_a_silent_host_is_given_up_and_not_waited_for_again(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, say: the connection is there, and no answer comes."""
    two.tiers[0].put("a", random_bytes(5))
    waiting, asked = threading.Event(), []

    def silent(session: ClientSession, *_: Any) -> bytes:
        asked.append(session)
        return bytes(8 * waiting.wait(30))

    monkeypatch.setattr(ClientSession, "_size", silent)
    tier = two.tier(0, deadline=0.2)
    far = tier._peers.all[0]
    far._spare += [far.connect() for _ in range(4)]  # as after requests of several threads
    try:
        with pytest.raises(NotFound):
            tier.size("b")  # one away is covered by one copy
        assert far._away > 0
        monkeypatch.setattr(client, "AGAIN", 3600.0)
        before = len(asked)
        for _ in range(50):
            with pytest.raises(NotFound):
                tier.size("b")
        assert len(asked) == before, "it is not asked at all"
    finally:
        waiting.set()


@pytest.mark.slow
def test_exchange_is_not_exceeded(place: Path) -> None:
    """Only the lower bound of a time can be relied upon on a busy machine."""
    with Hosts(place, 2, exchange=8 << 20) as hosts:
        data = random_bytes(8 << 20)
        start = time.monotonic()
        hosts.tiers[0].put("a", data)
        seconds = time.monotonic() - start
        # The first turns of a quarter of a second may be had at once: one that was saved up, and the one that begins.
        assert data.numel() / seconds <= 1.1 * (8 << 20) / 0.5
        assert hosts.tiers[1].get("a").equal(data)


def test_a_host_that_was_away_while_others_went_on_is_emptied(two: Hosts) -> None:
    two.tiers[0].put("versions/1", random_bytes(5, 1))
    alone = two.tier(0)
    assert meet([alone]) == [None]
    alone.delete("versions/1")
    alone.put("versions/1", random_bytes(5, 2))
    again = [two.tier(0), two.tier(1)]
    assert meet(again) == [None, None]
    assert again[1].get("versions/1").equal(random_bytes(5, 2))


def test_several_ranks_of_a_host(place: Path) -> None:
    with Hosts(place, 2) as hosts:
        ranks = [hosts.tier(0), hosts.tier(0), hosts.tier(1), hosts.tier(1)]
        assert meet(ranks, (0, 0, 1, 1)) == [None] * 4
        for number, rank in enumerate(ranks):
            rank.put(f"{number}", random_bytes(number))
        assert [list(rank.list("")) for rank in ranks] == [["0", "1", "2", "3"]] * 4
        assert all(len(rank._peers.partners) == 1 for rank in ranks)


def test_ranks_that_count_as_one_host_and_see_several_memories_are_told(two: Hosts) -> None:
    """As in containers with one host name and a /dev/shm each: what such a rank saved would have no copies."""
    ranks = [two.tier(0), Peer(path=two.place / "other"), two.tier(1)]
    errors = meet(ranks, (0, 0, 1))
    assert [type(error) for error in errors] == [TierUnavailable] * 3
    assert all(f"{two.place / 'other'} of this rank is another folder" in str(error) for error in errors)
    assert not (two.place / "other").exists()


def test_a_host_without_a_keeper_is_told_on_all(two: Hosts) -> None:
    good, bad = two.tier(0), Peer(path=two.place / "file")
    (two.place / "file").write_text("no folder")
    bad.name = "peer"
    errors = meet([good, bad])
    assert [type(error) for error in errors] == [TierUnavailable] * 2
    assert "is not a folder of this user's alone" in str(errors[0])
    (two.place / "file").unlink()


def test_a_folder_that_has_other_things_is_left_alone(place: Path) -> None:
    folder = place / "mine"
    folder.mkdir(mode=0o700)
    (folder / "thesis.tex").write_text("all of it")
    tier = Peer(path=folder)
    for do in (lambda: tier.put("a", random_bytes(1)), tier.stop):
        with pytest.raises(AccessDenied, match=r"used for something else \(thesis.tex\)"):
            do()
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    folder.chmod(0o755)
    with pytest.raises(AccessDenied, match="0700"):
        Peer(path=folder).put("a", random_bytes(1))


def test_a_keeper_that_was_replaced_ends_without_the_memory(two: Hosts) -> None:
    """It did not answer when a job looked for it, and another was started."""
    two.tiers[1].put("a", random_bytes(5))
    old, ended = two.keepers[1], two.threads[1]
    two.start(1)
    assert two.keepers[1]._listener.port != old._listener.port
    old.stop()
    ended.join()
    assert two.tiers[1].get("a").equal(random_bytes(5))


def test_wrappers_pass_a_meeting_on(two: Hosts) -> None:
    inner = two.tier(0)
    around = Measured(Limited(Retried(Faulty(inner), 1), bandwidth=1e9))
    errors = meet([around, two.tier(1)])  # type: ignore[list-item]
    assert errors == [None, None]
    assert inner.traits.shared == "site"


_IDS = [f"{n:032x}" for n in range(4)]


def _member(number: int) -> Member:
    return Member(_IDS[number], "127.0.0.1", 1 + number)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, unique=True), max_size=8), st.data())
def test_meetings_cut_short_never_empty_a_host_that_was_there(meetings: list[list[int]], data: st.DataObject) -> None:
    """Whatever hosts meet, and at whatever step a job dies: who took part in the last meeting that was confirmed by
    anybody, and so may have objects that nobody else has, is not taken for one that was away."""
    known = {n: Membership() for n in range(4)}
    for hosts in meetings:
        said = [HostReport(_member(n), known[n]) for n in hosts]
        group = merge_memberships(said)
        best = max(known[n].confirmed for n in hosts)
        for n in hosts:
            assert is_stale(said[hosts.index(n)], group.confirmed) == (0 < known[n].written < best)
        writes = data.draw(st.integers(0, len(hosts)))
        for n in hosts[:writes]:
            known[n] = group
        if writes == len(hosts):
            for n in hosts[: data.draw(st.integers(0, len(hosts)))]:
                known[n] = Membership(group.written, group.written, group.thin, group.members)
            again = merge_memberships([HostReport(_member(n), known[n]) for n in hosts])
            assert not any(is_stale(HostReport(_member(n), known[n]), again.confirmed) for n in hosts)


def test_threads_read_and_write_at_once(two: Hosts) -> None:
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            for number in range(8):
                two.tiers[rank].put(f"{rank}/{number}", random_bytes(50_000, number))
                out = empty_buffer(50_000)
                other = f"{1 - rank}/{number}"
                if other in list(two.tiers[rank].list("")):
                    two.tiers[rank]._kept.delete(other)  # so that it comes from the other host
                    out = two.tiers[rank].get(other)
                    assert torch.equal(out, random_bytes(50_000, number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
