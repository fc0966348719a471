"""The peer tier on one, two and three hosts of the loopback: the contract, and what becomes of lost hosts."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from support.peer_hosts import Hosts

from tierstate.manifest.errors import AlreadyExists
from tierstate.tiers.base import Tier
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.testing import TierContract, random_bytes


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")


class PeerContract(TierContract):
    examples = 4
    count = 1
    keys: ClassVar[dict[str, int]] = {}

    @pytest.fixture
    def tier(self, place: Path) -> Iterator[Tier]:
        with Hosts(place, self.count, **self.keys) as self.hosts:
            yield self.hosts.tiers[0]
        assert list(place.iterdir()) == []

    def reopen(self, tier: Tier) -> Tier:
        return self.hosts.tier(self.count - 1)


class TestOneHost(PeerContract):
    pass


class TestTwoHosts(PeerContract):
    count = 2


class TestThreeHosts(PeerContract):
    """One copy among three, so that a host may have none."""

    count = 3


class TestThreeHostsWithTwoCopies(PeerContract):
    count = 3
    keys: ClassVar[dict[str, int]] = {"copies": 2}


class TestNobodyMet(TierContract):
    examples = 4

    @pytest.fixture
    def tier(self, place: Path) -> Iterator[Tier]:
        self.path = place / "memory"
        with_nobody = Peer(path=self.path)
        with_nobody.name = "alone"
        yield with_nobody
        with_nobody.stop()
        with_nobody.close()
        assert list(place.iterdir()) == []

    def reopen(self, tier: Tier) -> Tier:
        return Peer(path=self.path)


def test_a_name_is_taken_also_on_hosts_that_neither_have_the_object_nor_a_partner_that_has_it(place: Path) -> None:
    data, other = random_bytes(3000, 1), random_bytes(4000, 2)
    with Hosts(place, 4) as hosts:
        hosts.tiers[0].put("a", data)
        for tier in hosts.tiers:
            with pytest.raises(AlreadyExists):
                tier.put("a", other)
            assert tier.get("a").equal(data)
        assert [tier._kept.count() for tier in hosts.tiers].count(0) == 2, "nothing was left of what was refused"
