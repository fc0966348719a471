"""Ranks as processes, each a host of its own, that have nothing but peer memory: hosts and keepers that are lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Gang

from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.peer.host import wait_gone
from tierstate.tiers.peer.members import read_member
from tierstate.tiers.peer.tier import Peer

pytestmark = pytest.mark.slow

HOSTS = [{"TIERSTATE_HOST": f"host{rank}", "TIERSTATE_ADDRESS": "127.0.0.1"} for rank in range(2)]


def give_back(path: Path) -> None:
    """A host's memory is gone, and its keeper."""
    tier = Peer(path=path)
    tier.stop()
    tier.close()


@pytest.fixture
def hosts(place: Path) -> Iterator[Path]:
    """A folder for the memories of hosts, of which nothing is left at the end, whatever the test has come to."""
    yield place
    for path in [place / "host0", place / "host1"]:
        give_back(path)
        assert wait_gone(path, 30)


def pid_of(path: Path) -> int:
    card = read_member(path)
    assert card is not None
    tier = Peer(path=path)
    try:
        said = dict(tier.members())[card]
    finally:
        tier.close()
    assert not isinstance(said, TierUnavailable)
    return int(said["pid"])


@pytest.mark.soak
def test_a_lost_host_is_restored_from_the_other(hosts: Path) -> None:
    with Gang(2, "support.peer_jobs:save", hosts, per_rank=HOSTS) as gang:
        for rank in range(2):
            gang.hear(rank, "saved")
        gang.kill(1)
        os.kill(pid_of(hosts / "host1"), signal.SIGKILL)
        give_back(hosts / "host1")
    assert not (hosts / "host1").exists()
    with Gang(2, "support.peer_jobs:restore", hosts, per_rank=HOSTS) as gang:
        gang.wait()
    assert not list((hosts / "unused").rglob("packs/*/*"))
    records = [len(list((hosts / f"host{n}/objects/versions/run").iterdir())) for n in range(2)]
    assert records == [4, 1]


@pytest.mark.soak
def test_a_keeper_that_is_killed_is_started_again(hosts: Path) -> None:
    with Gang(2, "support.peer_jobs:keep_on", hosts, per_rank=HOSTS) as gang:
        for rank in range(2):
            gang.hear(rank, "saved")
        os.kill(pid_of(hosts / "host1"), signal.SIGKILL)
        (hosts / "killed").touch()
        gang.wait()
