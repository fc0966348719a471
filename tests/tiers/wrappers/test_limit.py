"""The tier around a tier that is kept to a pace."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import Damaged, TierError, TierUnavailable
from tierstate.tiers.base import Range
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty, Lease, random_bytes
from tierstate.tiers.wrappers.limit import BURST, Limited, TokenBucket

RATE = 1000.0


class Clock:
    """A clock that is set by hand."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


class Choppy(Limited):
    piece = 100


@given(asked=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 250)), min_size=1, max_size=40))
def test_no_time_has_more_than_its_share(asked: list[tuple[float, int]]) -> None:
    """Turns begin in the order in which they are asked for; in no stretch of time are there too many."""
    clock = Clock()
    pace = TokenBucket(RATE, clock)
    begun: list[tuple[float, int]] = []
    for pause, tokens in asked:
        clock.now += pause
        begun.append((clock.now + pace.turn(tokens), tokens))
    starts = [start for start, _ in begun]
    assert starts == sorted(starts)
    for i, first in enumerate(starts):
        for j in range(i, len(starts)):
            between = sum(tokens for _, tokens in begun[i:j])
            assert between <= RATE * (starts[j] - first + BURST) + 1e-6


def test_a_pace_that_is_used_up_is_met_exactly_and_rest_is_not_saved_up_for_long() -> None:
    clock = Clock()
    pace = TokenBucket(RATE, clock)
    waits = [pace.turn(100) for _ in range(21)]
    assert waits[:3] == [0.0, 0.0, 0.0]
    assert waits[-1] == pytest.approx(20 * 100 / RATE - BURST)
    clock.now += 3600
    waits = [pace.turn(100) for _ in range(21)]
    assert waits[-1] == pytest.approx(20 * 100 / RATE - BURST)


def paced(tier: Limited) -> list[float]:
    """Make a tier's waits take no time; what they would have been, as they come."""
    waits: list[float] = []
    tier._wait = waits.append  # type: ignore[method-assign,assignment]
    return waits


def test_bytes_are_paced_in_turns_and_handed_on_in_pieces() -> None:
    inner = Faulty(Memory())
    tier = Choppy(inner, bandwidth=400)  # turns of 100 bytes
    waits = paced(tier)
    data = random_bytes(950)
    lease = Lease(data)
    with tier.writer("a") as writer:
        writer.append(lease.buffer, lease.release)
        assert (inner.calls["append"], len(waits), lease.releases) == (10, 10, 1)
        writer.append(empty_buffer(0))
        assert (inner.calls["append"], len(waits)) == (11, 10)
    assert torch.equal(inner.inner.get("a"), data)
    waits.clear()
    slab = torch.zeros(1000, dtype=torch.uint8)
    tier.read("a", [Range(0, slab[:950]), Range(900, slab[950:1000]), Range(3, slab[7:7])])
    assert torch.equal(slab, torch.cat([data, data[900:]]))
    assert (inner.calls["read"], len(waits)) == (10, 10)
    waits.clear()
    tier.put("b", data)
    assert (inner.calls["put"], len(waits)) == (1, 10), "a put goes out in one"


def test_operations_are_counted_apart_from_bytes() -> None:
    tier = Limited(Memory(), operations=10)
    waits = paced(tier)
    tier.put("a", random_bytes(5000))
    tier.get("a")
    list(tier.list(""))
    tier.delete("a")
    with tier.writer("b") as writer:
        writer.append(random_bytes(10))
    assert len(waits) == 8, "put; size and read; list; delete; open, append and close"


def test_the_traits_tell_of_the_limit() -> None:
    assert Limited(Memory()).traits == Memory().traits
    both = Limited(Memory(), bandwidth=500 << 20, operations=100)
    assert both.traits.bandwidth == 500 << 20
    assert both.traits.notes == ("limited to 500 MiB/s and 100 operations/s",)
    twice = Limited(both, bandwidth=1 << 40)
    assert twice.traits.bandwidth == 500 << 20, "the narrower one counts"
    assert Limited(Memory(), operations=0.5).traits.notes == ("limited to 0.5 operations/s",)


@pytest.mark.slow
def test_threads_share_one_limit() -> None:
    tier = Limited(Memory(), bandwidth=8 << 20)
    each = random_bytes(2 << 20)
    start = time.monotonic()
    threads = [threading.Thread(target=tier.put, args=(f"{n}", each)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # 8 MiB at 8 MiB/s, less what was saved up and the last turn, which need not be waited for.
    assert time.monotonic() - start >= 1 - 2 * BURST - 0.01
    assert all(torch.equal(tier.inner.get(f"{n}"), each) for n in range(4))


def test_whoever_waits_is_woken_by_close() -> None:
    tier = Choppy(Memory(), bandwidth=1)
    tier.name = "slow"
    lease = Lease(random_bytes(200_000))
    writer, told = tier.writer("a"), []

    def append() -> None:
        try:
            writer.append(lease.buffer, lease.release)
        except TierError as error:
            told.append(str(error))

    thread = threading.Thread(target=append)
    thread.start()
    tier.close()
    thread.join(60)
    assert not thread.is_alive()
    assert told == ["slow: was closed while a call waited for its turn"]
    assert lease.releases == 1
    with pytest.raises(TierError, match="was closed"):
        writer.close()


@pytest.mark.parametrize("at", [1, 3, 10])
def test_a_piece_that_fails_releases_the_lease_once(at: int) -> None:
    tier = Choppy(Faulty(Memory(), Fault("append", at, TierUnavailable("down"))), bandwidth=1e9)
    lease = Lease(random_bytes(1000))
    with pytest.raises(TierUnavailable, match="down"), tier.writer("a") as writer:
        writer.append(lease.buffer, lease.release)
    assert lease.releases == 1
    assert list(tier.list("")) == []


def test_ranges_that_lie_outside_are_damaged_here_too() -> None:
    tier = Choppy(Memory(), bandwidth=1e9)
    tier.put("a", random_bytes(1000))
    for offset, nbytes in ((-1, 5), (900, 101), (0, 2000), (1001, 0)):
        with pytest.raises(Damaged):
            tier.read("a", [Range(offset, empty_buffer(nbytes))])
