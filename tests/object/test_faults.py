"""Requests to a real server that fail on the way: retried, and reported with the right error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.outcomes import is_there, tried, write
from support.servers.buckets import fresh_prefix, open_tier, uploads
from support.servers.ceph import Ceph
from support.servers.faults import Fault, Kind
from support.servers.proxy import Proxy

from tierstate.manifest.errors import Damaged, TierUnavailable
from tierstate.tiers.base import Tier
from tierstate.tiers.testing import Lease, random_bytes

SMALL, LONG = random_bytes((1 << 20) + 1, 1), random_bytes((24 << 20) + 12_345, 2)
"""One that goes in one request, and one that goes in parts."""

PART, COMPLETE, BEGIN = "partNumber=", r"uploadId=[^&]+$|^(?!.*partNumber).*uploadId=", r"[?&]uploads"
"""Targets of the requests of an upload in parts."""


class World:
    """A tier behind a proxy, in which one object was put before anything went wrong.

    Opening a client and finding out what the server does takes most of a second, so all tests share it.

    Attributes:
        tier, impatient: of the same place; the second one gives up after five seconds.
        new: a key that no other test has.
    """

    def __init__(self, ceph: Ceph, proxy: Proxy) -> None:
        self.server, self.proxy, self.prefix = ceph, proxy, fresh_prefix()
        self.tier, self.impatient = open_tier(proxy, self.prefix), open_tier(proxy, self.prefix, deadline="5s")
        self._observer = open_tier(ceph, self.prefix)
        self.tier.put("small", SMALL)
        self.impatient.put("ready", SMALL[:1])
        self.new = ""

    def hit(self, kind: Kind, method: str = "", target: str = "", **keys: Any) -> Fault:
        """Let something happen to requests of these tiers."""
        return self.proxy.add(Fault(kind, method, f"{self.prefix}.*{target}" if target else self.prefix, **keys))

    def there(self, key: str, data: torch.Tensor) -> bool:
        """As `is_there`, for a client that meets no faults."""
        return is_there(self._observer, key, data)

    def ask_again(self) -> None:
        """Let the impatient tier, which leaves alone a store that hung, ask it again at once."""
        self.impatient._outer._breaker.answered()

    def close(self) -> None:
        """Close the tiers."""
        for tier in (self.tier, self.impatient, self._observer):
            tier.close()


@pytest.fixture(scope="module")
def world_once(ceph_once: Ceph) -> Iterator[World]:
    ceph_once.start()
    with Proxy(ceph_once) as proxy:
        world = World(ceph_once, proxy)
        yield world
        world.close()


@pytest.fixture
def world(world_once: World, ceph: Ceph) -> Iterator[World]:
    """The shared tiers, with a key of this test's own; whatever it broke is mended afterwards."""
    world_once.new = f"new-{fresh_prefix()}"
    world_once.ask_again()
    yield world_once
    world_once.proxy.mend()


def check_get(tier: Tier) -> None:
    assert tier.get("small").equal(SMALL)


def check_size(tier: Tier) -> None:
    assert tier.size("small") == SMALL.numel()


def check_list(tier: Tier) -> None:
    assert "small" in list(tier.list(""))


def put(tier: Tier, key: str) -> None:
    tier.put(key, SMALL)


def write_long(tier: Tier, key: str) -> None:
    write(tier, key, LONG)


READS: dict[str, Callable[[Tier], None]] = {"get": check_get, "size": check_size, "list": check_list}
WRITES: dict[str, tuple[Callable[[Tier, str], None], torch.Tensor]] = {"put": (put, SMALL), "write": (write_long, LONG)}


# What passes is tried again


@pytest.mark.parametrize("name", READS)
def test_a_throttled_read_is_sent_again(world: World, name: str) -> None:
    """The server says SlowDown to the first two requests."""
    fault = world.hit("status", count=2)
    READS[name](world.tier)
    assert fault.hits == 2


@pytest.mark.parametrize("name", WRITES)
def test_a_throttled_write_is_sent_again(world: World, name: str) -> None:
    fault = world.hit("status", count=2)
    do, data = WRITES[name]
    do(world.tier, world.new)
    assert fault.hits == 2
    assert world.there(world.new, data)


@pytest.mark.parametrize("kind", ["reset_up", "reset_down", "cut_down", "lost"])
@pytest.mark.parametrize("name", READS)
def test_a_broken_read_is_sent_again(world: World, name: str, kind: Kind) -> None:
    fault = world.hit(kind, at=1000)
    READS[name](world.tier)
    assert fault.hits == 1


@pytest.mark.parametrize("kind", ["status", "reset_up", "reset_down", "cut_down", "lost"])
def test_a_broken_deletion_is_sent_again(world: World, kind: Kind) -> None:
    world.tier.put(world.new, SMALL)
    fault = world.hit(kind, count=2)
    world.tier.delete(world.new)
    assert fault.hits == 2
    assert not world.there(world.new, SMALL)


@pytest.mark.parametrize("kind", ["status", "reset_up", "reset_down", "lost"])
@pytest.mark.parametrize(("method", "target"), [("POST", BEGIN), ("PUT", PART)], ids=["begin", "part"])
def test_an_upload_goes_on_after_a_broken_request(world: World, method: str, target: str, kind: Kind) -> None:
    fault = world.hit(kind, method, target, at=100_000)
    write(world.tier, world.new, LONG)
    assert fault.hits == 1
    assert world.there(world.new, LONG)


@pytest.mark.parametrize("at", [0, 65_536, SMALL.numel() - 1])
@pytest.mark.parametrize("kind", ["reset_down", "cut_down", "short"])
def test_a_truncated_answer_is_no_answer(world: World, kind: Kind, at: int) -> None:
    """Every byte is read, or the error is typed; the rest of the buffer is never what was there before."""
    fault = world.hit(kind, "GET", "small", at=at)
    failure = tried(lambda: check_get(world.tier))
    assert fault.hits == 1
    assert failure is None or isinstance(failure, TierUnavailable)


# Creates whose answers are lost


@pytest.mark.parametrize("kind", ["reset_up", "reset_down", "lost"])
def test_a_create_without_an_answer_is_never_a_conflict_with_itself(world: World, kind: Kind) -> None:
    fault = world.hit(kind, "PUT", world.new, at=100_000)
    failure = tried(lambda: world.tier.put(world.new, SMALL))
    assert fault.hits == 1
    there = world.there(world.new, SMALL)
    assert there or isinstance(failure, TierUnavailable)
    assert failure is None or isinstance(failure, TierUnavailable)
    assert there == (kind != "reset_up" or failure is None)


@pytest.mark.parametrize("kind", ["status", "reset_up", "reset_down", "lost"])
def test_a_completion_without_an_answer_is_never_a_conflict_with_itself(world: World, kind: Kind) -> None:
    fault = world.hit(kind, "POST", COMPLETE, at=50)
    failure = tried(lambda: write(world.tier, world.new, LONG))
    assert fault.hits == 1
    assert failure is None or isinstance(failure, TierUnavailable)
    there = world.there(world.new, LONG)
    assert there or failure is not None
    if there:
        assert not uploads(world.server, f"{world.prefix}/{world.new}")


# Bytes that change on the way up


@pytest.mark.parametrize("at", [0, 777_777, SMALL.numel() - 1])
def test_a_byte_flipped_on_the_way_up_is_not_kept(world: World, at: int) -> None:
    """Ceph compares what came with the checksum that was sent along."""
    fault = world.hit("flip_up", "PUT", world.new, at=at)
    failure = tried(lambda: world.tier.put(world.new, SMALL))
    assert fault.hits == 1
    assert failure is None or isinstance(failure, (TierUnavailable, Damaged))
    assert world.there(world.new, SMALL) == (failure is None)


def test_a_byte_flipped_in_a_part_is_not_kept(world: World) -> None:
    fault = world.hit("flip_up", "PUT", PART, at=3_000_000)
    failure = tried(lambda: write(world.tier, world.new, LONG))
    assert fault.hits == 1
    assert failure is None or isinstance(failure, (TierUnavailable, Damaged))
    assert world.there(world.new, LONG) == (failure is None)


# What does not pass


NEVER = ["hang", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("status", "reset_up"))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.parametrize("name", ["get", "size", pytest.param("list", marks=pytest.mark.soak)])
def test_a_read_that_is_never_answered_ends_at_the_deadline(world: World, name: str, kind: Kind) -> None:
    fault = world.hit(kind, count=None)
    with pytest.raises(TierUnavailable):
        READS[name](world.impatient)
    assert fault.hits
    world.proxy.mend()
    world.ask_again()
    READS[name](world.impatient)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.parametrize("name", [pytest.param("put", marks=pytest.mark.soak), "write"])
def test_a_write_that_is_never_answered_ends_at_the_deadline(world: World, name: str, kind: Kind) -> None:
    """Nothing comes to be, and once the server answers again the key is free."""
    do, data = WRITES[name]
    fault = world.hit(kind, count=None)
    with pytest.raises(TierUnavailable):
        do(world.impatient, world.new)
    assert fault.hits
    world.proxy.mend()
    assert not world.there(world.new, data)
    world.ask_again()
    do(world.impatient, world.new)
    assert world.there(world.new, data)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [100, pytest.param(3_000_000, marks=pytest.mark.soak)])
def test_an_answer_that_stops_in_its_middle_ends_at_the_deadline(world: World, at: int) -> None:
    """The head was good, and so was a part of the body."""
    world.tier.put(world.new, LONG[: 4 << 20])
    fault = world.hit("stall_down", "GET", world.new, at=at, count=None)
    with pytest.raises(TierUnavailable):
        world.impatient.get(world.new)
    assert fault.hits
    world.proxy.mend()
    assert world.there(world.new, LONG[: 4 << 20])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", NEVER)
def test_leases_are_given_back_once_when_parts_get_stuck(world: World, kind: Kind) -> None:
    world.hit(kind, "PUT", f"{world.new}.*{PART}", count=None)
    leases = [Lease(LONG[at : at + (8 << 20)]) for at in range(0, LONG.numel(), 8 << 20)]
    writer = world.impatient.writer(world.new, LONG.numel())
    taken = 0

    def run() -> None:
        nonlocal taken
        for lease in leases:
            taken += 1
            writer.append(lease.buffer, lease.release)
        writer.close()

    with pytest.raises(TierUnavailable):
        run()
    writer.abort()
    assert [lease.releases for lease in leases[:taken]] == [1] * taken
    world.proxy.mend()
    assert not world.there(world.new, LONG)
