"""Keepers as threads of a process that outlives jobs: they take the place of processes, and give it back."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.leaks import open_files
from support.peer_hosts import Hosts, meet

from tierstate.manifest.errors import TierError, TierUnavailable
from tierstate.tiers.peer.host import HostMemory
from tierstate.tiers.peer.launch import KeeperSettings
from tierstate.tiers.peer.local import keeper_lives, wait_until
from tierstate.tiers.peer.threads import KeeperThreads
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.testing import random_bytes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeeperThreads]:
    """Where keepers start, once a test says so."""
    found = KeeperThreads()
    yield found
    monkeypatch.undo()
    found.hand_over()


@pytest.fixture
def tier(place: Path) -> Iterator[Peer]:
    """A host whose keeper is a process."""
    found = Peer(path=place / "host0", idle=120, deadline=20)
    found.name = "peer"
    assert meet([found]) == [None]
    yield found
    found.stop()
    found.close()
    assert list(place.iterdir()) == []


def taken_over(tier: Peer, threads: KeeperThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "keepers", threads)
    assert meet([tier]) == [None]
    assert threads.serves(tier._kept.root)


def told(tier: Peer) -> tuple[bool, int]:
    """Whether the keeper says that it is here, and its port."""
    member, said = tier.members()[0]
    assert isinstance(said, dict)
    assert said["in_agent"] == (said["pid"] == os.getpid())
    return said["in_agent"], member.port


def test_a_thread_takes_the_place_of_a_process_and_gives_it_back(
    tier: Peer, threads: KeeperThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_bytes(1 << 20)
    tier.put("a", data)
    here, port = told(tier)
    assert not here
    taken_over(tier, threads, monkeypatch)
    assert told(tier) == (True, port)
    assert [one["objects"] for one in threads.status()] == [1]
    assert tier.get("a").equal(data)
    monkeypatch.undo()
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")
    threads.hand_over()
    assert not threads.serves(tier._kept.root)
    assert told(tier) == (False, port)
    assert tier.get("a").equal(data)
    with pytest.raises(TierUnavailable):
        threads.start(tier._kept.root, KeeperSettings("127.0.0.1", 0, 60.0, None))


def test_an_object_that_is_being_sent_arrives_although_the_keeper_is_replaced(place: Path) -> None:
    with Hosts(place, 2, deadline=20) as hosts:
        data = random_bytes(3 << 20)
        far = hosts.tiers[0]._peers.partners[0]
        with closing(far.stage("a", data.numel())) as staging:
            staging.send(memoryview(data.numpy())[: 1 << 20])
            keeper = hosts.keepers.pop(1)
            keeper.stop(keep=True)
            assert not wait_until(lambda: not hosts.threads[1].is_alive(), 0.3)
            staging.send(memoryview(data.numpy())[1 << 20 :])
            staging.commit()
        hosts.threads.pop(1).join(20)
        assert hosts.tiers[1]._kept.size("a") == data.numel()
        hosts.start(1)  # nothing was freed
        assert hosts.tiers[1].get("a").equal(data)


def test_a_memory_that_is_full_leaves_nothing_open_and_is_named(
    place: Path, threads: KeeperThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper listens already when it writes where: the agent in which it would live goes on."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(HostMemory, "keepers", threads)
    monkeypatch.setattr("tierstate.tiers.peer.server.write_membership", full)
    found = Peer(path=place / "host0")
    for _ in range(2):
        before = open_files()
        (error,) = meet([found])
        assert isinstance(error, TierUnavailable)
        assert f"{socket.gethostname()}: peer: {place / 'host0'}: [Errno 28] No space left" in str(error)
        found._home.release()
        assert not open_files() - before
        assert not keeper_lives(place / "host0")
    assert found.stop()
    found.close()


def test_no_other_keeper_takes_the_place_of_one_in_an_agent(
    tier: Peer, threads: KeeperThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over(tier, threads, monkeypatch)
    other = KeeperThreads()
    monkeypatch.setattr(HostMemory, "keepers", other)
    assert meet([tier]) == [None]
    assert not other.serves(tier._kept.root)
    assert told(tier)[0]
    card = tier._home.card()
    assert card is not None
    with closing(tier._memory_of(card)) as far, pytest.raises(TierError, match="part of an agent"):
        far.hand_over()
    assert threads.serves(tier._kept.root)


def test_a_memory_that_is_freed_ends_its_thread(
    tier: Peer, threads: KeeperThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over(tier, threads, monkeypatch)
    assert tier.stop()
    assert wait_until(lambda: not threads.busy, 20)
    assert threads.status() == []
