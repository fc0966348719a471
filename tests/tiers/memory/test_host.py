"""The host tier."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import NotFound, TierFull
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Host
from tierstate.tiers.testing import Lease, TierContract, random_bytes

SLAB = 4096


class TestHostContract(TierContract):
    examples = 25

    def make(self, tmp_path: Path) -> Tier:
        return Host()


class TestHostWithArenaContract(TierContract):
    """Foreign buffers, as all of the contract's are, work beside an arena too."""

    def make(self, tmp_path: Path) -> Tier:
        return Host(arena=Arena(1 << 20, SLAB))


def lay(tier: Host, arena: Arena, key: str, *sizes: int) -> None:
    with tier.writer(key) as writer:
        for nbytes in sizes:
            slab = arena.acquire()
            writer.append(slab.buffer[:nbytes], slab.release)


def test_buffers_are_kept_not_copied() -> None:
    tier, lease = Host(), Lease(random_bytes(1000))
    with tier.writer("a") as writer:
        writer.append(lease.buffer, lease.release)
    lease.buffer[5] = 77
    assert tier.get("a")[5] == 77
    assert lease.releases == 0
    tier.close()
    assert lease.releases == 1


def test_slabs_leave_the_arenas_budget_and_come_back() -> None:
    arena = Arena(2 * SLAB, SLAB)
    tier = Host(arena=arena)
    lay(tier, arena, "a", SLAB, SLAB - 1, SLAB // 2)
    assert (arena.in_flight, arena.kept, tier.used) == (0, 3, 3 * SLAB)
    tier.delete("a")
    assert (arena.in_flight, arena.kept, tier.used) == (0, 0, 0)


def test_a_small_buffer_does_not_hold_on_to_a_slab() -> None:
    arena = Arena(2 * SLAB, SLAB)
    tier = Host(arena=arena)
    lay(tier, arena, "a", SLAB // 2 - 1, 1)
    assert (arena.in_flight, arena.kept, tier.used) == (0, 0, SLAB // 2)
    whole = torch.zeros(1000, dtype=torch.uint8)
    lone, released = Host(), []
    with lone.writer("a") as writer:
        writer.append(whole[:499], lambda: released.append(1))
        assert released == [1]
        writer.append(whole[:500], lambda: released.append(2))
        assert released == [1]
    lone.close()
    assert released == [1, 2]


def test_a_slab_counts_once_however_many_pieces_of_it_are_kept() -> None:
    arena = Arena(2 * SLAB, SLAB)
    tier = Host(arena=arena)
    slab = arena.acquire()
    slab.lease()
    for key, part in (("a", slab.buffer[: SLAB // 2]), ("b", slab.buffer[SLAB // 2 :])):
        with tier.writer(key) as writer:
            writer.append(part, slab.release)
    assert (arena.kept, tier.used) == (1, SLAB)
    tier.delete("a")
    assert (arena.kept, tier.used) == (1, SLAB)
    tier.delete("b")
    assert (arena.kept, tier.used) == (0, 0)


def test_a_full_tier_keeps_no_slab() -> None:
    arena = Arena(2 * SLAB, SLAB)
    tier = Host(capacity=2 * SLAB, arena=arena)
    tier.name = "host"
    lay(tier, arena, "a", SLAB)
    lay(tier, arena, "b", SLAB // 2)
    with pytest.raises(TierFull, match=r"host: c: no room for .* 8KiB of the capacity of 8KiB are in use"):
        lay(tier, arena, "c", SLAB)
    assert (arena.in_flight, arena.kept, tier.used) == (0, 2, 2 * SLAB)
    tier.delete("a")
    lay(tier, arena, "c", SLAB)


def test_capacity_that_a_slab_exceeds_and_its_buffer_does_not() -> None:
    arena = Arena(2 * SLAB, SLAB)
    tier = Host(capacity=SLAB - 1, arena=arena)
    with pytest.raises(TierFull):
        lay(tier, arena, "a", SLAB // 2)
    assert (arena.in_flight, arena.kept, tier.used) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, SLAB), max_size=3)), max_size=12))
def test_everything_is_given_back(steps: list[tuple[int, list[int]]]) -> None:
    """Whatever is written, refused and deleted: nothing is pinned, counted or on loan in the end."""
    arena = Arena(4 * SLAB, SLAB)
    tier = Host(capacity=3 * SLAB, arena=arena)
    for name, sizes in steps:
        key = f"k{name}"
        tier.delete(key)
        try:
            lay(tier, arena, key, *sizes)
            assert tier.size(key) == sum(sizes)
        except TierFull:
            assert key not in tier.list("")
        assert arena.in_flight == 0
        assert arena.kept * SLAB <= tier.used <= 3 * SLAB
    tier.close()
    assert (arena.in_flight, arena.kept, tier.used) == (0, 0, 0)


class _Gate(torch.Tensor):
    """A buffer whose slices wait at a gate before they are given: a reader stopped in the middle of its copy."""

    reached: threading.Event
    opened: threading.Event

    def __getitem__(self, index: object) -> Buffer:  # type: ignore[override]
        self.reached.set()
        assert self.opened.wait(60)
        return self.as_subclass(torch.Tensor)[index]  # type: ignore[index]


def test_a_lease_is_not_released_while_somebody_reads() -> None:
    tier, data = Host(), random_bytes(1000)
    lease = Lease(data)
    gate = lease.buffer.as_subclass(_Gate)
    gate.reached, gate.opened = threading.Event(), threading.Event()
    with tier.writer("a") as writer:
        writer.append(gate, lease.release)
    out = empty_buffer(1000)
    reader = threading.Thread(target=tier.read, args=("a", [Range(0, out)]))
    reader.start()
    assert gate.reached.wait(60)
    tier.delete("a")
    with pytest.raises(NotFound):
        tier.size("a")
    assert (lease.releases, tier.used) == (0, 1000)
    gate.opened.set()
    reader.join()
    assert torch.equal(out, data)
    assert (lease.releases, tier.used) == (1, 0)
