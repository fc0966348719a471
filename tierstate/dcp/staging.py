"""Double-buffered staging for DCP's asynchronous saves: copies a state at memory speed into memory that is reused."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import memmove
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from tierstate.engine.save.capture import COPY_WORKERS
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import CaptureError
from tierstate.tiers.concurrency import run_concurrently
from tierstate.tiers.memory.arena import current_device, fault_in, map_pages, pin_memory, unpin_memory

BLOCKS = 2
"""Staged states at the same time, at most: one that is being saved, and the next one (double buffering)."""


BLOCK_TIMEOUT = 1800.0
"""Timeout in seconds for a free block; the save before the last one may still read from it."""


PAGE, CACHE_LINE = 4096, 64
"""Bytes: a tensor starts at a multiple of a page, or of a cache line if it is shorter than a page."""


COPY_BYTES = 64 << 20
"""Bytes that one thread copies at a time."""


class StagedState(dict[str, Any]):
    """A staged state. Its block of memory is in use as long as this object exists."""


class TierStager(AsyncStager):
    """Stages states for ``dcp.async_save(..., async_stager=TierStager())``, which then blocks for one copy in memory.

    Later saves reuse the memory, so it is faulted in, shared and pinned only once. A block is free again when the save
    that reads from it has ended. There are `BLOCKS` of them, so a third save waits for the first.

    Args:
        shared: whether to stage in shared memory, for ``AsyncCheckpointerType.PROCESS``; such a save otherwise copies
            the state once more.
    """

    _synchronize_after_execute = False

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state: tensors and the local parts of DTensors in host memory, all else by ``copy.deepcopy``.

        Raises:
            CaptureError: two earlier saves have not ended within `BLOCK_TIMEOUT` seconds.
        """
        with self._lock, torch.no_grad():
            tensors = _Tensors()
            for tensor in _walk(state_dict):
                tensors.add(tensor)
            block = self._block(tensors.nbytes)
            views = tensors.copy_to(block.buffer)
            staged = StagedState(_rebuilt(state_dict, views))
            block.user = weakref.ref(staged)
            return staged

    def _block(self, nbytes: int) -> _Block:
        end = time.monotonic() + BLOCK_TIMEOUT
        while True:
            free = [block for block in self._blocks if block.user() is None]
            fits = [block for block in free if block.buffer.numel() >= nbytes]
            if fits:
                return min(fits, key=lambda block: block.buffer.numel())
            if free or len(self._blocks) < BLOCKS:
                for block in free:
                    self._blocks.remove(block)
                    block.discard()
                self._blocks.append(_Block(nbytes, self._shared))
                return self._blocks[-1]
            if time.monotonic() > end:
                raise CaptureError(
                    f"{BLOCKS} staged states are still in use after {BLOCK_TIMEOUT:.0f} s; wait for the futures of "
                    "earlier saves, and let go of failed ones"
                )
            time.sleep(0.005)

    def close(self) -> None:
        """Unpin the memory; it is freed when no save reads from it any more."""
        for block in self._blocks:
            block.discard()
        self._blocks = []


def _nobody() -> None:
    return None


class _Block:
    """Memory for one staged state.

    Attributes:
        user: weak reference to the staged state in the block; returns None when the block is free.
    """

    def __init__(self, nbytes: int, shared: bool) -> None:
        size = max(nbytes, PAGE)
        if shared:
            storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
            self.buffer: Buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
        else:
            self.buffer = map_pages(size)
            fault_in(self.buffer)
        self._device = current_device()
        self._pinned = pin_memory(self.buffer, self._device)
        self.user: Callable[[], Any] = _nobody

    def discard(self) -> None:
        """Unpin the memory; it is freed with its last view."""
        if self._pinned:
            unpin_memory(self.buffer, self._device)
        self._pinned = None


class _Tensors:
    """The tensors of a state with their offsets in the block; equal views of the same memory are copied once."""

    def __init__(self) -> None:
        self._at: dict[tuple[Any, ...], tuple[torch.Tensor, int]] = {}
        self.nbytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Reserve a place in the block for a tensor."""
        if _key(tensor) not in self._at:
            nbytes = tensor.numel() * tensor.element_size()
            alignment = CACHE_LINE if nbytes < PAGE else PAGE
            at = -(-self.nbytes // alignment) * alignment
            self._at[_key(tensor)] = tensor, at
            self.nbytes = at + nbytes

    def copy_to(self, block: Buffer) -> dict[tuple[Any, ...], torch.Tensor]:
        """Copy all tensors into the block; returns the copies, views of the block, by the tensors' keys."""
        views, moves = {}, []
        devices = set()
        for key, (tensor, at) in self._at.items():
            nbytes = tensor.numel() * tensor.element_size()
            view = block[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
            views[key] = view
            if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                moves += list(_pieces(view.data_ptr(), tensor.data_ptr(), nbytes))
            else:
                view.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        workers = min(COPY_WORKERS, max(1, self.nbytes // COPY_BYTES), torch.get_num_threads())
        run_concurrently(lambda move: memmove(*move), moves, workers, "tierstate-stage")
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return views


def _pieces(to: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    for at in range(0, nbytes, COPY_BYTES):
        yield to + at, source + at, min(COPY_BYTES, nbytes - at)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = tensor.device, tensor.data_ptr() if tensor.numel() else 0
    return *where, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _walk(value: Any) -> Iterator[torch.Tensor]:
    """The local parts of all tensors of a state."""
    if isinstance(value, torch.Tensor):
        yield _local(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)


def _rebuilt(value: Any, views: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    """The state with the copies in place of its tensors."""
    if isinstance(value, DTensor):
        return _with_local(value, views[_key(_local(value))])
    if isinstance(value, torch.Tensor):
        return views[_key(_local(value))]
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, views) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuilt(item, views) for item in value))
    if isinstance(value, dict):
        return type(value)((key, _rebuilt(item, views)) for key, item in value.items())
    return copy.deepcopy(value)


def _with_local(value: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the same mesh, placements and global shape, with another local part, which may be in host memory.

    By the constructor, as torch's own operators make DTensors: `DTensor.from_local` would copy a host tensor to the
    mesh's device.
    """
    # When torch pickles a DTensor that was made from a local part with a storage offset, it takes the part for a tensor
    # with its own memory, and crashes. So the DTensor is made from a part without an offset, which is then replaced.
    first = torch.empty(1 if local.numel() else 0, dtype=local.dtype).as_strided(local.shape, (0,) * local.dim())
    made: DTensor = DTensor(first, value._spec, requires_grad=False)  # type: ignore[no-untyped-call, unused-ignore]
    made._local_tensor = local
    return made
