"""A tier asks for room before it allocates, so that training keeps its cache; by a model of torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.manifest.errors import TierFull
from tierstate.tiers.memory.device_room import SLACK, SMALL, DeviceRoom
from tierstate.tiers.memory.gpu import Gpu

MIB = 1 << 20

TRAINING, TIER = "training", "tier"
"""Streams."""


class Allocator:
    """What torch's caching allocator does with one device: a cache for each stream, freed as a whole when CUDA refuses.

    Attributes:
        flushes: how often an allocation has freed the cache.
        emptied: how often the cache was freed by request.
    """

    def __init__(self, total: int, fraction: float = 1.0) -> None:
        self.total, self.share, self.fraction = total, int(total * fraction), fraction
        self.cached: list[tuple[str, int]] = []
        self.live: list[tuple[str, int]] = []
        self.flushes = self.emptied = self.ooms = self._freed = 0

    @property
    def reserved(self) -> int:
        return sum(nbytes for _, nbytes in self.cached + self.live)

    def allocate(self, stream: str, nbytes: int) -> None:
        if (stream, nbytes) in self.cached:
            self.cached.remove((stream, nbytes))
        elif self.reserved + nbytes > self.share:
            self.flushes += 1
            self._free_cache()
            if self.reserved + nbytes > self.share:
                self.ooms += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
        self.live.append((stream, nbytes))

    def blocks(self, stream: str) -> list[tuple[str, int]]:
        return [block for block in self.live if block[0] == stream]

    def free(self, stream: str, nbytes: int) -> None:
        self.live.remove((stream, nbytes))
        self.cached.append((stream, nbytes))

    def _free_cache(self) -> None:
        self._freed += len(self.cached)
        self.cached = []

    def empty_cache(self) -> None:
        self.emptied += 1
        self._free_cache()

    def info(self, _: Any) -> tuple[int, int]:
        return self.total - self.reserved, self.total

    def stats(self, _: Any) -> dict[str, Any]:
        return {
            "reserved_bytes": {"all": {"current": self.reserved}},
            "allocated_bytes": {"all": {"current": sum(nbytes for _, nbytes in self.live)}},
            "num_alloc_retries": self.flushes,
            "num_ooms": self.ooms,
            "num_device_free": self._freed,
        }

    @contextmanager
    def in_use(self) -> Iterator[DeviceRoom]:
        with (
            mock.patch.object(torch.cuda, "mem_get_info", self.info),
            mock.patch.object(torch.cuda, "memory_stats_as_nested_dict", self.stats),
            mock.patch.object(torch.cuda, "empty_cache", self.empty_cache),
            mock.patch.object(torch._C, "_cuda_getMemoryFraction", return_value=self.fraction, create=True),
        ):
            yield DeviceRoom(torch.device("cuda", 0))


def save(allocator: Allocator, room: DeviceRoom, size: int) -> None:
    """A save of the tier, which has memory if that is in its stream's cache, or free."""
    fits = (TIER, size) in allocator.cached or allocator.reserved + size + SLACK <= allocator.share
    before = allocator.flushes, allocator.emptied
    assert (room.lack(size) == "") is fits
    if fits:
        allocator.allocate(TIER, size)
    assert (allocator.flushes, allocator.emptied) == before


def drop(allocator: Allocator, room: DeviceRoom, size: int) -> None:
    """The tier gives a block of its own back."""
    allocator.free(TIER, size)
    room.give_back(size)


def train(allocator: Allocator, what: str, nbytes: int) -> None:
    """Something that training does: it asks for memory, frees some, or empties the cache."""
    theirs = allocator.blocks(TRAINING)
    if what == "allocate":
        with suppress(torch.OutOfMemoryError):
            allocator.allocate(TRAINING, nbytes)
    elif what == "free" and theirs:
        allocator.free(*theirs[0])
    elif what == "empty":
        allocator.empty_cache()


SIZES = st.integers(2, 60).map(lambda n: n * MIB)

STEPS = st.lists(st.tuples(st.sampled_from(["save", "drop", "allocate", "free", "empty"]), SIZES), max_size=40)


@given(STEPS, SIZES, st.sampled_from([1.0, 0.7]))
@example([("save", 0), ("drop", 0), *[("allocate", 60 * MIB)] * 3, ("save", 0)], 60 * MIB, 1.0).via("freed by training")
@example([("save", 0), ("drop", 0), ("allocate", 60 * MIB), ("save", 0)], 80 * MIB, 1.0).via("still in the cache")
def test_a_tier_never_takes_training_s_cache_and_is_refused_only_where_it_would(
    steps: list[tuple[str, int]], size: int, fraction: float
) -> None:
    allocator = Allocator(200 * MIB, fraction)
    with allocator.in_use() as room:
        for what, nbytes in steps:
            if what == "save":
                save(allocator, room, size)
            elif what == "drop":
                for block in allocator.blocks(TIER)[:1]:
                    drop(allocator, room, block[1])
            else:
                train(allocator, what, nbytes)


def test_a_state_of_another_size_gets_what_the_old_one_left_by_freeing_the_cache_once() -> None:
    allocator = Allocator(200 * MIB)
    with allocator.in_use() as room:
        allocator.allocate(TRAINING, 60 * MIB)
        save(allocator, room, 80 * MIB)
        drop(allocator, room, 80 * MIB)
        for _ in range(3):
            assert room.lack(100 * MIB) == ""
            allocator.allocate(TIER, 100 * MIB)
            drop(allocator, room, 100 * MIB)
        assert (allocator.emptied, allocator.flushes) == (1, 0)


def test_what_there_is_and_what_torch_keeps_are_named() -> None:
    allocator = Allocator(100 * MIB)
    with allocator.in_use() as room:
        allocator.allocate(TRAINING, 60 * MIB - 7)
        allocator.allocate(TRAINING, 20 * MIB)
        allocator.free(TRAINING, 20 * MIB)
        assert room.lack(30 * MIB + 5) == "20MiB are free, and 20MiB in torch's cache are kept for training"
        assert room.lack(SMALL) == "", "short memory may use what is left free of longer blocks"
        allocator.allocate(TRAINING, 18 * MIB)
        assert room.lack(SMALL) != ""


def test_training_is_short_after_a_flush_and_until_a_save_later() -> None:
    allocator = Allocator(100 * MIB)
    with allocator.in_use() as room:
        room.begin_save()
        assert not room.short
        allocator.allocate(TRAINING, 60 * MIB)
        allocator.free(TRAINING, 60 * MIB)
        allocator.allocate(TRAINING, 70 * MIB)
        assert allocator.flushes == 1
        assert room.short
        room.begin_save()
        assert room.short, "what is dropped while this save is under way"
        room.begin_save()
        assert not room.short
        with pytest.raises(torch.OutOfMemoryError):
            allocator.allocate(TRAINING, 70 * MIB)
        assert room.short


def test_an_allocator_that_tells_nothing_is_asked_for_the_memory_itself() -> None:
    def unknown(_: Any) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    with (
        Allocator(200 * MIB).in_use(),
        mock.patch.object(torch.cuda, "memory_stats_as_nested_dict", unknown),
    ):
        room = DeviceRoom(torch.device("cuda", 0))
        room.begin_save()
        assert not room.short
        assert room.lack(100 * MIB) == ""
        assert room.lack(300 * MIB) != ""


def test_on_the_host_nothing_is_asked() -> None:
    room = DeviceRoom(torch.device("cpu"))
    room.begin_save()
    assert (room.lack(1 << 60), room.short) == ("", False)


def test_a_tier_without_room_is_full_and_has_asked_for_no_memory() -> None:
    tier = Gpu(device="cpu")
    tier.name = "gpu"
    tier.give_back(tier.reserve(2 * MIB, "a"))
    lacking = mock.patch.object(DeviceRoom, "lack", return_value="1MiB are free")
    with lacking as lack, mock.patch.object(torch, "empty", side_effect=AssertionError("it was asked for")):
        with pytest.raises(TierFull, match=r"gpu: b: cpu has no room for 3MiB more; .* \(1MiB are free\)"):
            tier.reserve(3 * MIB, "b")
        assert lack.call_args.args == (3 * MIB,)
    assert tier.used == 0


@pytest.mark.parametrize("short", [False, True])
def test_memory_of_a_dropped_version_is_kept_unless_training_is_short(short: bool) -> None:
    tier = Gpu(device="cpu")
    memory = tier.reserve(2 * MIB, "a")
    with mock.patch.object(DeviceRoom, "short", short):
        tier.give_back(memory)
    assert (tier.used, len(tier._spare)) == ((0, 0) if short else (2 * MIB, 1))
    tier.close()
    assert tier.used == 0
