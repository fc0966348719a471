"""Keepers as real processes: they outlive jobs, are killed at any moment, come back, and end when nobody needs them."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.outcomes import until
from support.peer_hosts import Hosts, meet

import tierstate as ts
from tierstate.manifest.errors import NotFound, TierUnavailable
from tierstate.tiers.address import own_address
from tierstate.tiers.base import Range
from tierstate.tiers.peer.host import make_folder, wait_gone
from tierstate.tiers.peer.launch import KeeperSettings, start_process
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.testing import random_bytes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")
    ts.register_tier("peer", Peer)


@pytest.fixture
def two(place: Path) -> Iterator[list[Peer]]:
    """Two hosts that have met; the keeper of the second is a process, that of the first a thread."""
    with Hosts(place, 1, deadline=20) as hosts:
        tiers = [hosts.tier(0), opened(place, 1)]
        try:
            assert meet(tiers) == [None, None]
            yield tiers
        finally:
            tiers[1].stop()
            tiers[1].close()
    assert list(place.glob("host*")) == list(place.glob(".host*")) == []


def opened(place: Path, number: int, **keys: float) -> Peer:
    tier = Peer(path=place / f"host{number}", **{"deadline": 20, "idle": 120, **keys})  # type: ignore[arg-type]
    tier.name = "peer"
    return tier


def pid_of(tier: Peer, number: int) -> int:
    said = tier.members()[number][1]
    assert isinstance(said, dict)
    return int(said["pid"])


def test_a_keeper_imports_nothing_of_the_working_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "queue.py").write_text("raise SystemExit('this is no module of Python')")
    monkeypatch.chdir(place)
    path = place / "host0"
    make_folder(path, "peer")
    start_process(path, KeeperSettings("127.0.0.1", 0, 60, None), "peer")
    tier = opened(place, 0)
    tier.stop()
    tier.close()


def test_killed_while_it_is_sent_an_object_and_back_again(two: list[Peer], place: Path) -> None:
    """Whenever the kill comes: the object is on both hosts or on none, whole; a keeper that is back has what it had."""
    big = random_bytes(64 << 20)
    two[0].put("before", big[:1000])
    pid = pid_of(two[0], 1)
    killer = threading.Timer(0.02, os.kill, (pid, signal.SIGKILL))
    killer.start()
    number = 0
    try:
        while True:
            two[0].put(f"big/{number}", big)
            two[0].delete(f"big/{number - 1}")
            number += 1
    except TierUnavailable:
        pass
    killer.join()
    again = opened(place, 1)
    assert meet([two[0], again]) == [None, None]
    assert pid_of(again, 1) != pid
    there = list(again.list(""))
    assert "before" in there
    for key in there:
        assert again.get(key).equal(big[: again.size(key)])
    assert f"big/{number}" not in there
    # What was being written is swept, by the keeper or whoever needs the room.
    assert not list((place / "host1").rglob(".tmp*"))
    again.close()


def test_keepers_that_died_come_back_though_nobody_asks_for_anything(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have nothing to write or to list in a save; and with more hosts away than there are copies, a save
    fails when it lists what is there."""
    monkeypatch.setattr("tierstate.tiers.peer.tier.WATCH", 0.05)
    tiers = [opened(place, number) for number in range(3)]
    try:
        assert meet(tiers) == [None] * 3
        tiers[0].put("a", random_bytes(1000))
        dead = {pid_of(tiers[0], number) for number in range(3)}
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        until(lambda: {said["pid"] for _, said in tiers[0].members() if isinstance(said, dict)}.isdisjoint(dead))
        until(lambda: all(isinstance(said, dict) for _, said in tiers[0].members()))
        assert [list(tier.list("")) for tier in tiers] == [["a"]] * 3
    finally:
        for tier in tiers:
            tier.stop()
            tier.close()


def test_memory_that_was_freed_under_a_job_is_made_again_for_this_user_alone(two: list[Peer], place: Path) -> None:
    """`tierstate peer stop` on one host, while the job there goes on."""
    two[1].put("before", random_bytes(1000))
    assert opened(place, 1).stop()
    with suppress(TierUnavailable):  # its keeper is gone, too
        two[1].put("after", random_bytes(1000))
    assert stat.S_IMODE((place / "host1").stat().st_mode) == 0o700
    assert meet(two) == [None, None]
    two[1].put("again", random_bytes(1000))
    assert two[0].get("again").equal(random_bytes(1000))


@pytest.mark.soak
def test_killed_while_it_is_read(two: list[Peer]) -> None:
    data = random_bytes(64 << 20)
    two[1].put("a", data)
    two[0]._kept.delete("a")
    killer = threading.Timer(0.02, os.kill, (pid_of(two[0], 1), signal.SIGKILL))
    killer.start()
    out = data.clone()

    def read_on() -> None:
        while True:
            out.zero_()
            two[0].read("a", [Range(0, out)])
            assert out.equal(data)

    with pytest.raises((TierUnavailable, NotFound)):  # with one copy, one host away is covered
        read_on()
    killer.join()
    assert two[1].get("a").equal(data)


def test_it_ends_when_nobody_needs_it(place: Path) -> None:
    hosts = Hosts(place, 1, idle=0.2)
    (tier,) = hosts.tiers
    tier.put("a", random_bytes(10))
    time.sleep(0.6)
    assert list(tier.list("")) == ["a"]  # in use by this process
    tier.close()
    assert wait_gone(place / "host0", 30)
    assert list(place.iterdir()) == []


@pytest.mark.soak
def test_a_job_that_ends_leaves_it_running(place: Path) -> None:
    code = (
        "import sys; from support import peer_hosts as peers; from tierstate.tiers.peer.tier import Peer\n"
        "from tierstate.tiers.testing import random_bytes\n"
        "from pathlib import Path; tier = Peer(path=Path(sys.argv[1])); tier.name = 'peer'\n"
        "assert peers.meet([tier]) == [None]; tier.put('a', random_bytes(10)); import os; os._exit(1)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code, place / "host0"], env=environment, check=False, timeout=60)
    assert done.returncode == 1
    tier = opened(place, 0)
    try:
        assert tier.get("a").equal(random_bytes(10))
        assert pid_of(tier, 0) > 1
    finally:
        tier.stop()
        tier.close()
    assert list(place.iterdir()) == []


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address() == "127.0.0.1"
    monkeypatch.delenv("TIERSTATE_ADDRESS")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(OSError, match="GLOO_SOCKET_IFNAME"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"


@pytest.mark.soak
def test_a_port_that_is_taken_is_told(place: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        tier = opened(place, 0, port=taken.getsockname()[1])
        (error,) = meet([tier])
    assert isinstance(error, TierUnavailable)
    assert "no keeper could be started" in str(error)
    assert "in use" in str(error)
    tier.stop()
    tier.close()
