"""How much memory of a CUDA device a tier can have without taking it from training; staging memory within that.

torch's allocator keeps freed memory in a cache, for each stream its own. When CUDA refuses it more memory, it frees the
whole cache of the device and asks once more (``release_cached_blocks`` in its ``CUDACachingAllocator.cpp``); training
then pays for all its memory anew. So a tier asks here first, and says that it is full without having tried.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.units import format_size

SLACK = 32 << 20
"""Bytes that are left free on a device: CUDA takes memory of its own too, and does not give the last of it."""


STAGING = 16 << 20
"""Bytes of a device's memory in which short tensors are gathered."""


SMALL, SMALL_SLACK = 1 << 20, 2 << 20
"""Up to so many bytes torch takes from segments of 2 MiB that it shares out, so this much may have to be free for them.
They may use what longer ones have to leave, so that a snapshot that has found room gets its footer and record too."""


class DeviceRoom:
    """Asks a CUDA device and torch's allocator for room; on the host there always is some.

    Args:
        device: a CUDA device with its index, or the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._blocks: Counter[int] = Counter()  # by size: those that the tier has given back, and torch has kept
        self._freed: tuple[int, ...] = ()
        self._failed: tuple[int, ...] = ()
        self._short = False
        self.begin_save()

    def begin_save(self) -> None:
        """Note how often torch has run out of memory so far; called when a save has got its memory. See `short`."""
        failed = self._count("num_alloc_retries", "num_ooms")
        self._short, self._failed = failed != self._failed and self._failed != (), failed

    @property
    def short(self) -> bool:
        """Whether torch has run out of memory on the device since the save before the last one got its memory.

        torch then freed its cache and tried again, or raised OutOfMemoryError.
        """
        return self._short or self._count("num_alloc_retries", "num_ooms") != self._failed

    def lack(self, nbytes: int) -> str:
        """Why there is no room for ``nbytes`` more, in words for a message; empty if there is room.

        There is room in what CUDA has free, and in a block of this size that the tier has given back, as torch keeps
        that for the tier's stream. If all such blocks would suffice, torch's whole cache is freed, once: that happens
        where the size of the state has changed. What torch keeps for other streams does not count.
        """
        if self._device.type != "cuda":
            return ""
        need = nbytes + (SLACK if nbytes > SMALL else SMALL_SLACK)
        with self._lock:
            if self._take_block(nbytes):
                return ""
            free = self._free()
            if free < need <= free + sum(size * count for size, count in self._blocks.items()):
                torch.cuda.empty_cache()
                self._blocks.clear()
                free = self._free()
            if free >= need:
                return ""
            return f"{_mib(free)} are free, and {_mib(self._cached())} in torch's cache are kept for training"

    def give_back(self, nbytes: int) -> None:
        """Note that the tier has given a block back to torch."""
        if self._device.type == "cuda":
            with self._lock:
                self._forget_freed()
                self._blocks[nbytes] += 1

    def _take_block(self, nbytes: int) -> bool:
        self._forget_freed()
        found = self._blocks[nbytes] > 0
        self._blocks[nbytes] -= found
        return found

    def _forget_freed(self) -> None:
        """Forget all blocks if torch has freed memory: those were probably among it."""
        freed = self._count("num_alloc_retries", "num_ooms", "num_device_free")
        if freed != self._freed:
            self._freed = freed
            self._blocks.clear()

    def _free(self) -> int:
        """Bytes that torch would get from CUDA now: what is free, within the share that the process may have."""
        free, total = torch.cuda.mem_get_info(self._device)
        # What is beyond `torch.cuda.set_per_process_memory_fraction`, torch's allocator refuses as CUDA does.
        fraction = getattr(torch._C, "_cuda_getMemoryFraction", None)  # not in every build
        share = total if fraction is None else int(fraction(self._device.index) * total)
        return min(free, share - _bytes(self._stats(), "reserved_bytes"))

    def _cached(self) -> int:
        stats = self._stats()
        return max(_bytes(stats, "reserved_bytes") - _bytes(stats, "allocated_bytes"), 0)

    def _count(self, *names: str) -> tuple[int, ...]:
        """Counters of torch's allocator; those that it does not have are 0."""
        if self._device.type != "cuda":
            return ()
        stats = self._stats()
        return tuple(stats.get(name, 0) for name in names)

    def _stats(self) -> dict[str, Any]:
        try:
            return torch.cuda.memory_stats_as_nested_dict(self._device)  # type: ignore[no-any-return, unused-ignore]
        except RuntimeError:  # an allocator that was plugged in may have none
            return {}


class DeviceStaging:
    """Memory of devices through which short tensors pass together: `STAGING` bytes of each, kept once they are taken.

    Attributes:
        lock: held by a thread while it queues what goes through a buffer, where several threads do so. All of them use
            one stream of a device, on which one use of the buffer then follows the other.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffers: dict[torch.device, Buffer] = {}

    def on(self, device: torch.device) -> Buffer | None:
        """The buffer on a CUDA device, of the current stream; None if training would have to give up memory for it."""
        if device not in self._buffers:
            if DeviceRoom(device).lack(STAGING):
                return None
            try:
                self._buffers[device] = torch.empty(STAGING, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:  # it was taken since
                return None
        return self._buffers[device]


def _mib(nbytes: int) -> str:
    return format_size(max(nbytes, 0) >> 20 << 20)


def _bytes(stats: dict[str, Any], name: str) -> int:
    """Bytes of a kind that torch's allocator has now; 0 if it does not tell."""
    found: int = stats.get(name, {}).get("all", {}).get("current", 0)
    return found
