"""The memory tier."""

from pathlib import Path

import pytest

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AlreadyExists, TierError, TierFull
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Lease, TierContract, random_bytes


class TestMemoryContract(TierContract):
    examples = 25

    def make(self, tmp_path: Path) -> Tier:
        return Memory()


class TestFullMemoryContract(TierContract):
    """A capacity that is never reached changes nothing, and everything deleted gives its room back."""

    def make(self, tmp_path: Path) -> Tier:
        return Memory(capacity=32 << 20)


def test_capacity_counts_what_is_held_and_what_is_being_written() -> None:
    tier = Memory(capacity=100)
    tier.name = "ram"
    tier.put("a", empty_buffer(60))
    writer = tier.writer("b")
    writer.append(empty_buffer(30))
    assert tier.used == 90
    with pytest.raises(TierFull, match=r"ram: c: no room for 11B more: 90B of the capacity of 100B are in use"):
        tier.put("c", empty_buffer(11))
    with pytest.raises(TierFull):
        writer.append(empty_buffer(11))
    assert tier.used == 60, "the writer that found the tier full gave its room back"
    tier.delete("a")
    assert tier.used == 0
    tier.put("c", empty_buffer(100))


def test_a_writer_that_failed_never_publishes() -> None:
    tier = Memory(capacity=100)
    lease, late = Lease(random_bytes(101)), Lease(random_bytes(1))
    writer = tier.writer("a")
    with pytest.raises(TierFull):
        writer.append(lease.buffer, lease.release)
    assert lease.releases == 1
    with pytest.raises(ValueError, match="was given up"):
        writer.append(late.buffer, late.release)
    assert late.releases == 1
    with pytest.raises(TierFull):
        writer.close()
    assert not list(tier.list(""))


def test_an_interrupted_writer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Memory()
    writer = tier.writer("a")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tier, "_hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append(empty_buffer(1))
    with pytest.raises(TierError, match="was given up when it was interrupted"):
        writer.close()
    assert not list(tier.list(""))


def test_closed_tier_takes_nothing_more() -> None:
    tier = Memory()
    tier.put("a", empty_buffer(1))
    writer = tier.writer("b")
    tier.close()
    assert tier.used == 0
    with pytest.raises(Exception, match="closed") as found:
        writer.close()
    assert not isinstance(found.value, AlreadyExists)


def test_traits() -> None:
    traits = Memory(capacity=7).traits
    assert (traits.persistent, traits.shared, traits.capacity, traits.conditional_create) == (False, "process", 7, True)
    assert Memory.persistent is False
