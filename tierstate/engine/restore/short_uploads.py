"""Uploads short chunks from the host to CUDA tensors together: one transfer across the bus, then copies on the device.

To queue a copy takes longer than to copy 100 KB, and threads that queue one for each tensor hold each other up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from tierstate.manifest.chunk import Buffer, Event
from tierstate.providers.tensors.devices import upload
from tierstate.tiers.memory.device_room import STAGING, DeviceStaging

APART = 128 << 10
"""Bytes between two chunks that cross the bus with them: to queue a second transfer takes as long."""


class ShortChunk(NamedTuple):
    """A chunk in host memory that is to be copied to a device.

    Attributes:
        at: its byte offset in the memory.
        end: where it ends there.
        targets: contiguous memory of one device, as long as the chunk.
    """

    at: int
    end: int
    targets: Sequence[Buffer]


class ShortUploads:
    """Uploads short chunks that lie in one piece of host memory. Used by one thread.

    Args:
        memory: where the chunks lie; asynchronous if it is pinned.
        staging: memory of the devices, shared with other threads.
        pending: gets the event of each upload, to be waited for before the memory changes, also after an error.
    """

    def __init__(self, memory: Buffer, staging: DeviceStaging, pending: list[tuple[Event, Buffer]]) -> None:
        self._memory, self._staging, self._pending = memory, staging, pending
        self._runs: dict[torch.device, list[ShortChunk]] = {}

    def add(self, at: int, end: int, targets: Sequence[Buffer]) -> None:
        """Add a verified chunk, ``memory[at:end]``, in the order of memory; `flush` uploads it at the latest."""
        for device in {target.device for target in targets}:
            self._add(device, ShortChunk(at, end, [target for target in targets if target.device == device]))

    def flush(self) -> None:
        """Upload what was added."""
        for device, run in self._runs.items():
            self._upload(device, run)
        self._runs.clear()

    def _add(self, device: torch.device, chunk: ShortChunk) -> None:
        run = self._runs.setdefault(device, [])
        if run and not (0 <= chunk.at - run[-1].end <= APART and chunk.end - run[0].at <= STAGING):
            self._upload(device, run)
            run.clear()
        run.append(chunk)

    def _upload(self, device: torch.device, run: Sequence[ShortChunk]) -> None:
        # Threads share the staging and the stream: between the transfer and the copies from there nobody else may queue
        # another transfer.
        with self._staging.lock:
            self._pending.append((upload(device, lambda: self._queue(device, run)), self._memory))

    def _queue(self, device: torch.device, run: Sequence[ShortChunk]) -> None:
        start, end, targets = run[0].at, run[-1].end, [target for chunk in run for target in chunk.targets]
        staging = self._staging.on(device) if len(targets) > 1 and end - start <= STAGING else None
        if staging is None:
            for chunk in run:
                for target in chunk.targets:
                    target.copy_(self._memory[chunk.at : chunk.end], non_blocking=True)
            return
        there = staging[: end - start]
        there.copy_(self._memory[start:end], non_blocking=True)
        # In one call, with the gaps: a slice for each chunk would take several times as long.
        gaps = [0, *(two.at - one.end for one, two in pairwise(run))]
        sizes = [n for gap, chunk in zip(gaps, run, strict=True) for n in (gap, chunk.end - chunk.at)]
        parts = zip(there.split_with_sizes(sizes)[1::2], run, strict=True)
        torch._foreach_copy_(targets, [part for part, chunk in parts for _ in chunk.targets])
