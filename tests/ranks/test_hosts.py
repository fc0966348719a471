"""Two hosts, each with a disk of its own beside one that both share, of which one is lost at any moment."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.network_hosts import Hosts, reason
from support.processes import Gang
from support.rank_jobs import FAILED

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
]

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 1MiB}}
durable: {durable}
ranks: {{timeout: 30s, silence: 2s}}
tiers:
"""
NVME = '  nvme: {{type: nvme, path: "{place}/disk-${{TIERSTATE_HOST}}", keep: {{last: 3}}}}\n'
SHARED = '  shared: {{type: lustre, path: "{place}/shared", keep: {{last: 4}}, every: {every}}}\n'
PEER = (
    '  peer: {{type: peer, path: "{place}/memory-${{TIERSTATE_HOST}}", keep: {{last: 3}}, deadline: 5s, idle: 10min}}\n'
)

ROUNDS = int(os.environ.get("TIERSTATE_ROUNDS", "4"))
"""Of each test; more of them with TIERSTATE_ROUNDS."""


def durable(gang: Gang, tier: str) -> int:
    """The highest step that any rank has said to be durable there; 0 where none has."""
    found = [0]
    for rank in range(gang.size):
        lines = [line.split() for line in gang.said(rank).splitlines() if line.startswith(f"durable {tier} ")]
        found += [int(words[2]) for words in lines if len(words) == 3]
    return max(found)


def ready(gang: Gang) -> int:
    """The step at which all ranks agree to begin."""
    steps = {int(gang.hear(rank, "ready")) for rank in range(gang.size)}
    assert len(steps) == 1, f"ranks begin at different steps: {steps}"
    return steps.pop()


@pytest.fixture
def hosts(root: None) -> Iterator[Hosts]:
    """Two of them; nothing of them is left afterwards."""
    if why := reason():
        pytest.skip(why)
    with Hosts() as made:
        yield made


class Site:
    """Two hosts, their disks below ``place``, and one policy.

    Args:
        tiers: of the policy, with places for ``place`` and ``every``.
        last: the tier that is to be durable.
        every: saves of which one goes to the shared tier.
    """

    def __init__(self, hosts: Hosts, place: Path, seed: int, tiers: str, last: str, every: int = 1) -> None:
        self.hosts, self.place, self.chance = hosts, place, random.Random(seed)
        self.policy = place / "policy.yaml"
        self.policy.write_text((POLICY + tiers).format(place=place, durable=last, every=every))

    def begin(self, homes: list[int]) -> Gang:
        """The job, each rank on one of the hosts."""
        return Gang(
            len(homes),
            "support.rank_jobs:job",
            self.policy,
            per_rank=[self.hosts.environment(host) for host in homes],
            inside=[self.hosts.inside(host) for host in homes],
        )

    def homes(self) -> list[int]:
        """Any few ranks, on both hosts."""
        return self.chance.choice([[0, 1], [0, 1], [0, 0, 1, 1], [0, 1, 1]])

    def lose_one(self, gang: Gang, homes: list[int]) -> int:
        """Lose a host at any moment, and await that the other's ranks give up; which host it was.

        The first has the coordinator, and the store by which ranks speak.
        """
        time.sleep(self.chance.uniform(0.0, 2.5))
        lost, silently = self.chance.choice([0, 1]), self.chance.random() < 0.5
        if silently:
            self.hosts.silence(lost)
        self.hosts.lose(lost)
        begun = time.monotonic()
        codes = gang.codes(60)
        seconds = time.monotonic() - begun
        # Whoever is left learns of it in the next saves, and hangs in none.
        left = [code for code, home in zip(codes, homes, strict=True) if home != lost]
        assert left == [FAILED] * len(left), "\n".join(map(gang.said, range(gang.size)))
        if silently:
            self.hosts.mend(lost)
        reached = {tier: durable(gang, tier) for tier in ("peer", "nvme", "shared")}
        how = f"host {lost} lost{' silently' * silently} at {reached}"
        print(f"ranks on {homes}, {how}: left after {seconds:.1f} s by {self._last_words(gang, homes, lost)}")
        return lost

    def _last_words(self, gang: Gang, homes: list[int], lost: int) -> set[str]:
        return {gang.hear(rank, "failed").split()[0] for rank, home in enumerate(homes) if home != lost}

    def wipe(self, host: int) -> None:
        """Another host, with an empty disk and empty memory, takes this one's place."""
        for kind in ("disk", "memory"):
            shutil.rmtree(self.place / f"{kind}-{self.hosts.names[host]}", ignore_errors=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_host_is_lost_at_any_moment(place: Path, hosts: Hosts, seed: int) -> None:
    promised = 0
    site = Site(hosts, place, seed, NVME + SHARED, "shared")
    for round in range(ROUNDS):
        homes = site.homes()
        with site.begin(homes) as gang:
            at = ready(gang)
            assert at >= promised, f"round {round}: step {promised} was durable, and the job began at {at}"
            lost = site.lose_one(gang, homes)
            promised = max(promised, durable(gang, "shared"))
        if site.chance.random() < 0.5:
            site.wipe(lost)
    with site.begin([0]) as gang:
        assert ready(gang) >= promised
        gang.kill(0)
        gang.codes()


@pytest.mark.parametrize("seed", range(2))
def test_hosts_whose_disks_survive_go_on_from_them(place: Path, hosts: Hosts, seed: int) -> None:
    """The shared tier lags behind: what is newer lies on both disks together."""
    shared = local = 0
    site = Site(hosts, place, seed, NVME + SHARED, "nvme", every=5)
    for round in range(ROUNDS):
        homes = site.homes()
        with site.begin(homes) as gang:
            at = ready(gang)
            assert at >= max(shared, local), f"round {round}: {shared}, {local} were promised, and it began at {at}"
            lost = site.lose_one(gang, homes)
            shared, local = max(shared, durable(gang, "shared")), max(local, durable(gang, "nvme"))
        if site.chance.random() < 0.3:
            site.wipe(lost)
            local = 0


@pytest.mark.parametrize("seed", range(2))
def test_a_lost_host_is_found_again_in_the_memory_of_the_other(place: Path, hosts: Hosts, seed: int) -> None:
    """Without any tier that both see: whoever takes the lost host's place has neither its disk nor its memory.

    After that the other one may be lost as soon as another version was saved: what was there before has one copy only.
    """
    promised, thin = 0, -1
    site = Site(hosts, place, seed, PEER + NVME, "nvme")
    for round in range(ROUNDS):
        homes = site.homes()
        with site.begin(homes) as gang:
            at = ready(gang)
            assert at >= promised, f"round {round}: step {promised} was promised, and the job began at {at}"
            if not promised:
                gang.hear(0, "durable peer")
            lost = site.lose_one(gang, homes)
            saved = durable(gang, "peer")
            promised = max(promised, saved)
        if saved > at or thin in (-1, lost):
            site.wipe(lost)
            thin = lost
