"""The measured speed of a tier: only the times when it was busy count."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.errors import TierError
from tierstate.tiers.base import ObjectWriter
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty
from tierstate.tiers.wrappers.base import Wrapping, WrappingWriter
from tierstate.tiers.wrappers.limit import Limited
from tierstate.tiers.wrappers.measure import TIMED_CLOSE_MIN, TRUSTED_AFTER, Throughput, Timed

MIB = 1 << 20


class Clock:
    """A clock that the test turns."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    rate=st.floats(1e6, 1e11),
    depth=st.integers(1, 12),
    sizes=st.lists(st.integers(MIB, 64 * MIB), min_size=30, max_size=60),
    pauses=st.lists(st.floats(0, 100), min_size=60, max_size=60),
)
def test_a_tier_of_some_rate_is_told_to_have_it_whatever_the_depth_and_the_pauses(
    rate: float, depth: int, sizes: list[int], pauses: list[float]
) -> None:
    """A tier that moves bytes at a rate, ``depth`` transfers at once, which end in their order; after every batch of a
    few whoever writes has nothing for a while."""
    clock = Clock()
    speed = Throughput(None, clock)
    for start in range(0, len(sizes), 10):
        batch, begun = sizes[start : start + 10], 0
        for number, nbytes in enumerate(batch):
            while begun < min(len(batch), number + depth):
                speed.begin()
                begun += 1
            clock.now += nbytes / rate
            speed.end(nbytes)
        assert speed.idle
        assert speed.idled.is_set()
        clock.now += pauses[start]
    known = sum(sizes) >= TRUSTED_AFTER
    assert speed.bandwidth == (pytest.approx(rate, rel=1e-3) if known else None)


@given(rate=st.floats(1e6, 1e11), depth=st.integers(1, 12), count=st.integers(16, 60))
def test_a_busy_time_without_end_is_judged_while_it_lasts(rate: float, depth: int, count: int) -> None:
    clock = Clock()
    speed = Throughput(None, clock)
    for _ in range(depth):
        speed.begin()
    for _ in range(count):
        speed.begin()
        clock.now += 8 * MIB / rate
        speed.end(8 * MIB)
    assert not speed.idle
    assert speed.bandwidth == pytest.approx(rate, rel=1e-3)


def test_what_the_tier_says_of_itself_counts_until_more_is_known() -> None:
    clock = Clock()
    speed = Throughput(200.0 * MIB, clock)
    assert speed.bandwidth == 200 * MIB
    for _ in range(1000):
        speed.begin()
        clock.now += 1.0
        speed.end(20 * MIB)
    assert speed.bandwidth == pytest.approx(20 * MIB, rel=0.2)
    assert Throughput(None, clock).bandwidth is None


def test_a_tier_that_takes_no_time_is_without_end() -> None:
    speed = Throughput(None, Clock())
    speed.begin()
    speed.end(TRUSTED_AFTER)
    assert speed.bandwidth == math.inf


class Later(Wrapping):
    """A tier that gives memory back when told to, as one that writes in the background does."""

    def __init__(self) -> None:
        super().__init__(Memory())
        self.waiting: list[Callable[[], None]] = []

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        tier = self

        class Writer(WrappingWriter):
            def append(self, buffer: torch.Tensor, release: Callable[[], None] | None = None) -> None:
                self.inner.append(buffer.clone())
                if release is not None:
                    tier.waiting.append(release)

        return Writer(self.inner.writer(key))


def test_a_transfer_ends_when_its_memory_is_given_back() -> None:
    tier = Timed(Later())
    given_back: list[int] = []
    with tier.writer("a/b") as writer:
        for number in range(3):
            writer.append(
                torch.zeros(TIMED_CLOSE_MIN, dtype=torch.uint8), lambda number=number: given_back.append(number)
            )
            assert not tier.speed.idle
        for release in tier.inner.waiting:
            release()
        assert tier.speed.idle
    assert given_back == [0, 1, 2]
    assert not tier.keeps
    assert tier.speed.idle


def test_a_tier_that_keeps_memory_is_not_taken_for_a_slow_one() -> None:
    tier = Timed(Later())
    for key in ("a/b", "a/c"):
        with tier.writer(key) as writer:
            writer.append(torch.zeros(TIMED_CLOSE_MIN, dtype=torch.uint8), lambda: None)
        assert tier.keeps
        assert tier.speed.idle
    for release in tier.inner.waiting:
        release()  # objects are dropped, long after
    assert tier.speed.idle


@pytest.mark.parametrize("operation", ["append", "close"])
def test_after_a_failure_nothing_is_under_way(operation: str) -> None:
    faulty = Faulty(Memory())
    tier, released = Timed(faulty), []
    faulty.add(Fault(operation, 0, TierError("no")))
    writer = tier.writer("a/b")
    with pytest.raises(TierError):  # noqa: PT012 - either call may be the one
        writer.append(torch.zeros(TIMED_CLOSE_MIN, dtype=torch.uint8), lambda: released.append(1))
        writer.close()
    writer.abort()
    assert tier.speed.idle
    assert released == [1]


def test_a_limit_is_known_before_anything_is_written() -> None:
    limited = Limited(Memory(), bandwidth=200.0 * MIB)
    assert Timed(limited).speed.bandwidth == 200 * MIB
    assert Timed(Memory()).speed.bandwidth is None
