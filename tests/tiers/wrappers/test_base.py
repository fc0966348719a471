"""Every wrapper keeps the promises of the tier inside, around tiers that copy, that keep leases, and that are files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tierstate.tiers.base import Tier, layers
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Host, Memory
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.testing import Faulty, TierContract, random_bytes
from tierstate.tiers.wrappers.base import Wrapping
from tierstate.tiers.wrappers.limit import Limited
from tierstate.tiers.wrappers.measure import Measured
from tierstate.tiers.wrappers.retry import Retried

FAST = 4e9
"""Bytes and calls per second that are a limit, and no wait worth mentioning."""


def limited(tier: Tier) -> Tier:
    return Limited(tier, bandwidth=FAST, operations=FAST)


class Choppy(Limited):
    """Hands everything on in pieces of a few bytes."""

    piece = 999


def chopped(tier: Tier) -> Tier:
    return Choppy(tier, bandwidth=FAST)


def retried(tier: Tier) -> Tier:
    return Retried(tier, 2)


def stacked(tier: Tier) -> Tier:
    return retried(limited(Measured(Faulty(Wrapping(tier)))))


WRAPPERS: list[Callable[[Tier], Tier]] = [Wrapping, limited, chopped, retried, Measured, Faulty, stacked]


class Contract(TierContract):
    """The contract around one kind of tier, once for each wrapper."""

    examples = 2
    steps = 12

    @pytest.fixture(autouse=True, params=WRAPPERS, ids=lambda wrap: wrap.__name__)
    def _wrapper(self, request: pytest.FixtureRequest) -> None:
        self.wrap = request.param

    def inner(self, tmp_path: Path) -> Tier:
        raise NotImplementedError

    def make(self, tmp_path: Path) -> Tier:
        return self.wrap(self.inner(tmp_path))


class TestAroundMemory(Contract):
    def inner(self, tmp_path: Path) -> Tier:
        return Memory()


class TestAroundHost(Contract):
    def inner(self, tmp_path: Path) -> Tier:
        return Host()


class TestAroundFiles(Contract):
    def inner(self, tmp_path: Path) -> Tier:
        return Directory(tmp_path / "ckpt")

    def reopen(self, tier: Tier) -> Tier:
        *_, files = layers(tier)
        assert isinstance(files, Directory)
        return self.wrap(Directory(files.path))


@pytest.mark.parametrize("wrap", [wrap for wrap in WRAPPERS if wrap is not chopped])
def test_leases_reach_the_tier_that_keeps_them(wrap: Callable[[Tier], Tier]) -> None:
    arena = Arena(1 << 20, 1 << 16)
    tier = wrap(Host(arena=arena))
    slab = arena.acquire()
    slab.buffer.fill_(7)
    with tier.writer("a") as writer:
        slab.lease()
        writer.append(slab.buffer, slab.release)
    slab.release()
    assert (arena.in_flight, arena.kept) == (0, 1), "kept, not copied"
    assert torch.equal(tier.get("a"), torch.full((1 << 16,), 7, dtype=torch.uint8))
    tier.delete("a")
    assert arena.kept == 0
    tier.close()
    arena.close()


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_name_and_what_else_a_tier_has_pass_through(wrap: Callable[[Tier], Tier]) -> None:
    inner = Memory()
    tier = wrap(inner)
    tier.name = "ram"
    tier.put("a", random_bytes(10))
    assert (inner.name, tier.name, tier.used) == ("ram", "ram", 10)  # type: ignore[attr-defined]
    assert tier.traits.failure_domain == inner.traits.failure_domain
    assert list(layers(tier))[-1] is inner
    for absent in ("no_such_thing", "_objects"):
        with pytest.raises(AttributeError, match=absent):
            getattr(tier, absent)
    tier.close()
    assert inner.used == 0, "closing reaches it too"
