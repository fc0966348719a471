"""Double-buffered staging for DCP's asynchronous saves: copies a state at memory speed into memory that is reused.

What only the steps of a guarded optimizer change may be copied while the next forward and backward pass runs.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from ctypes import memmove
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from tierstate.engine.capture.capture import COPY_WORKERS
from tierstate.engine.capture.guard import Guard
from tierstate.engine.capture.read_set import ReadSet
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf_path import Path, format_path
from tierstate.providers.tensors.devices import CPU, copies_beside
from tierstate.providers.tensors.tensors import (
    FLAT_PARAMETER,
    PLAIN_TENSORS,
    TensorProvider,
    is_flat_parameter,
    local_of,
)
from tierstate.providers.values.copies import with_values
from tierstate.tiers.concurrency import run_concurrently
from tierstate.tiers.latch import Completion
from tierstate.tiers.memory.arena import current_device
from tierstate.tiers.memory.cuda import CopyStream
from tierstate.tiers.memory.pages import fault_in, map_pages
from tierstate.tiers.memory.pinning import Pinning
from tierstate.tiers.units import rough_size

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
        guard: an optimizer, or what wraps one, as for `Checkpointer.guard`: its parameters and its state are copied
            after `stage` has returned, and its next step waits until they are. ``dcp.async_save`` then returns an
            ``AsyncSaveResponse``. If something else than a step changes them before, that save fails.

    Raises:
        TypeError: ``guard`` is no optimizer, and wraps none; or this torch takes no future of a staged state.
    """

    _synchronize_after_execute = False

    def __init__(self, *, shared: bool = False, guard: object = None) -> None:
        self._shared = shared
        self._guard = Guard()
        if guard is not None:
            if not hasattr(state_dict_saver, "AsyncSaveResponse"):
                raise TypeError(f"torch {torch.__version__} takes no future of a staged state; save without `guard`")
            self._guard.add(guard)
        self._turn = 0
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """A copy of the state: tensors and the local parts of DTensors in host memory, all else by ``copy.deepcopy``.
        With a guarded optimizer a future of it: all else is copied already.

        Raises:
            CaptureError: a tensor is more than its elements, or has none in its memory; or two earlier saves have not
                ended within `BLOCK_TIMEOUT` seconds.
        """
        state_dict = _mapped(state_dict, _kept)  # other threads may add to it while its tensors are copied
        with self._lock, torch.no_grad():
            tensors = _Tensors()
            for path, tensor in _walk(state_dict):
                tensors.add(tensor, path)
            block = self._block(tensors.nbytes)
            views = tensors.views(block.buffer)
            lazy = self._lazy(tensors)
            tensors.copy({key for key in views if key not in lazy}, views)
            staged = StagedState(_mapped(state_dict, lambda leaf: _staged(leaf, views)))
            block.user = weakref.ref(staged)
            if not self._guard.lazy:
                return staged
            copy = _LazyCopy(tensors, lazy, views, staged, self._read_set(tensors, lazy), self._guard.unstable)
            del staged  # the copy gives it away
            self._guard.watch(copy)
            return copy.begin()

    def _lazy(self, tensors: _Tensors) -> set[_Key]:
        """The tensors that only a guarded step changes, and that can be copied beside the training."""
        if not self._guard.lazy:
            return set()
        self._guard.wait()  # one at a time
        memory, unstable = self._guard.memory(), self._guard.unstable
        return {
            key
            for key, (tensor, _, path) in tensors.at.items()
            if (tensor.device == CPU or copies_beside(tensor.device))
            and (tensor.device, tensor.untyped_storage().data_ptr()) in memory
            and not tensor.is_inference()
            and path not in unstable
        }

    def _read_set(self, tensors: _Tensors, lazy: Collection[_Key]) -> ReadSet | None:
        """Proves that the lazy tensors are copied as they are now; None without any."""
        values = [tensors.at[key].tensor for key in lazy]
        guarded = self._guard.tensors()
        others = [*guarded, *(tensor.to_local() for tensor in guarded if isinstance(tensor, DTensor))]
        host = [i for i, v in enumerate(values) if v.device.type == "cpu" and v.is_contiguous() and v.numel()]
        columns = (
            np.array(host, "i8"),
            np.array([values[i].data_ptr() for i in host], "i8"),
            np.array([values[i].nbytes for i in host], "i8"),
        )
        addresses = [_local(tensor).data_ptr() for tensor in others]
        self._turn += 1
        leaves = np.arange(len(values))
        return ReadSet.of(leaves, values, others, addresses, columns, self._turn, set()) if values else None

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
        """Unpin the memory; it is freed when no save reads from it any more. Lets go of a guarded optimizer."""
        self._guard.close()
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
            self.buffer: Buffer = torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)
        else:
            self.buffer = map_pages(size)
            fault_in(self.buffer)
        self._device = current_device()
        self._pinning = Pinning(f"a staged state of {rough_size(size)}")
        self._pinned = self._pinning.add(self.buffer, self._device)
        self.user: Callable[[], Any] = _nobody

    def discard(self) -> None:
        """Unpin the memory; it is freed with its last view."""
        if self._pinned:
            self._pinning.remove(self.buffer, self._device)
        self._pinned = None


class StagingFailed:
    """Takes a place in a staged state that must not be saved: the plug-in raises ``error`` when it comes to it, within
    the save, so that all ranks learn of it."""

    def __init__(self, error: CaptureError) -> None:
        self.error = error


class _LazyCopy:
    """The copy of the guarded tensors of one staged state, in a thread of its own.

    Attributes:
        captured: done when they may change.
    """

    def __init__(
        self,
        tensors: _Tensors,
        lazy: Collection[_Key],
        views: dict[_Key, torch.Tensor],
        staged: StagedState,
        read_set: ReadSet | None,
        unstable: set[Path],
    ) -> None:
        self._tensors, self._lazy, self._views = tensors, list(lazy), views
        self._staged: StagedState | None = staged
        self._read_set, self._unstable = read_set, unstable
        devices = {tensors.at[key].tensor.device for key in lazy}
        self._lines = [CopyStream(device) for device in devices if copies_beside(device)]
        for line in self._lines:
            line.follow()
        self.captured = Completion()

    def begin(self) -> Future[dict[str, Any]]:
        """Begin to copy; returns the future of the staged state."""
        done: Future[dict[str, Any]] = Future()
        try:
            threading.Thread(target=self._run, args=(done,), name="tierstate-stage-later", daemon=True).start()
        except RuntimeError:  # there can be no more threads; a step must not wait for ever
            self._run(done)
        return done

    def release_state(self) -> None:
        """Wait until the tensors may change."""
        self.captured.exception()

    def _run(self, done: Future[dict[str, Any]]) -> None:
        staged, self._staged = self._staged, None
        assert staged is not None
        try:
            self._copy()
        except BaseException as error:
            refused = error if isinstance(error, CaptureError) else CaptureError(f"the staging failed: {error!r}")
            # A key of its own, so that this rank saves it. The save fails in the plug-in, and so on all ranks.
            staged[f"tierstate-staging-{uuid.uuid4()}"] = StagingFailed(refused)
        del self._tensors, self._views, self._read_set
        self.captured.set_result(None)
        done.set_result(staged)

    def _copy(self) -> None:
        if self._read_set is None:
            return
        if freed := self._read_set.freed():
            self._refuse(freed)
        with torch.no_grad(), ExitStack() as streams:
            for line in self._lines:
                streams.enter_context(line.taken())
            self._tensors.copy(self._lazy, self._views)
            settled = self._read_set.settle(lambda: False)
            changed = self._read_set.changed()
            if not changed and not settled:
                changed = {i for i, key in enumerate(self._lazy) if self._differs(key)} | self._read_set.changed()
        if changed:
            self._refuse(changed)

    def _differs(self, key: _Key) -> bool:
        live, view = self._tensors.at[key].tensor, self._views[key]
        here, there = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (live, view))
        return not torch.equal(here, there)

    def _refuse(self, which: Collection[int]) -> None:
        paths = [self._tensors.at[self._lazy[i]].path for i in sorted(which)]
        self._unstable.update(paths)
        raise CaptureError(
            f"{', '.join(map(format_path, paths[:8]))}: changed between the return of async_save and the end of its "
            "staging, by something else than the step of the guarded optimizer. This save is given up, and the next "
            "ones copy it before they return; to have it copied beside the training again, wait for "
            "staging_completion before the change"
        )


class _Spot(NamedTuple):
    """A tensor of a state, its offset in the block, and where it is in the state."""

    tensor: torch.Tensor
    offset: int
    path: Path


class _Tensors:
    """The tensors of a state with their offsets in the block; equal views of the same memory are copied once.

    Attributes:
        at: the tensors, by their keys.
    """

    def __init__(self) -> None:
        self.at: dict[_Key, _Spot] = {}
        self.nbytes = 0

    def add(self, tensor: torch.Tensor, path: Path) -> None:
        """Reserve a place in the block for a tensor."""
        if _key(tensor) not in self.at:
            nbytes = tensor.numel() * tensor.element_size()
            alignment = CACHE_LINE if nbytes < PAGE else PAGE
            at = -(-self.nbytes // alignment) * alignment
            self.at[_key(tensor)] = _Spot(tensor, at, path)
            self.nbytes = at + nbytes

    def views(self, block: Buffer) -> dict[_Key, torch.Tensor]:
        """The places of the copies, views of the block, by the tensors' keys."""
        found = {}
        for key, (tensor, at, _) in self.at.items():
            nbytes = tensor.numel() * tensor.element_size()
            found[key] = block[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
        return found

    def copy(self, keys: Collection[_Key], views: dict[_Key, torch.Tensor]) -> None:
        """Copy these tensors to their places."""
        moves, copied = [], 0
        devices = set()
        for key in keys:
            tensor, view = self.at[key].tensor, views[key]
            nbytes = tensor.numel() * tensor.element_size()
            copied += nbytes
            if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                moves += list(_pieces(view.data_ptr(), tensor.data_ptr(), nbytes))
            else:
                view.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        workers = min(COPY_WORKERS, max(1, copied // COPY_BYTES), torch.get_num_threads())
        run_concurrently(lambda move: memmove(*move), moves, workers, "tierstate-stage")
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            elif device.type != "cpu":
                torch.accelerator.synchronize(device)


def _pieces(to: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    for at in range(0, nbytes, COPY_BYTES):
        yield to + at, source + at, min(COPY_BYTES, nbytes - at)


_Key = tuple[Any, ...]


def _key(tensor: torch.Tensor) -> _Key:
    where = tensor.device, tensor.data_ptr() if tensor.numel() else 0
    return *where, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor).detach()


def _checked(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The local part of a tensor, which is copied by its address.

    Raises:
        CaptureError: its elements are not at its address, or are not all that it is. A tensor subclass that wraps other
            tensors (of torchao, or a jagged one) has the address 0, from which a copy would end the process.
    """
    if is_flat_parameter(tensor):
        raise CaptureError(f"{format_path(path)}: {FLAT_PARAMETER}")
    local = _local(tensor)
    plain = type(local) in PLAIN_TENSORS and local.layout is torch.strided
    if not plain or local.is_nested or local.is_quantized or local.is_meta:
        try:
            TensorProvider(local)  # says why
        except CaptureError as error:
            raise CaptureError(f"{format_path(path)}: {error}") from error
    return local


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The local parts of all tensors of a state, with their paths."""
    if isinstance(value, ShardedTensor):
        return
    if isinstance(value, torch.Tensor):
        yield path, _checked(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, (*path, i))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The state in new containers, each with the items that it has at one moment, and with changed leaves."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in tuple(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, dict):
        return with_values(value, lambda item: _mapped(item, change))
    return change(value)


def _kept(value: Any) -> Any:
    """A leaf as it is now, but for the bytes of a tensor."""
    return value if isinstance(value, (torch.Tensor, ShardedTensor)) else copy.deepcopy(value)


def _staged(value: Any, views: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    """The copy of a tensor; every other leaf is one already."""
    if isinstance(value, DTensor):
        return _with_local(value, views[_key(_local(value))])
    if isinstance(value, ShardedTensor):
        return copy.deepcopy(value)  # of FSDP1: torch copies its shards
    if isinstance(value, torch.Tensor):
        return views[_key(_local(value))]
    return value


def _with_local(value: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the same mesh, placements and global shape, with another local part, which may be in host memory.

    By the constructor, as torch's own operators make DTensors: `DTensor.from_local` would copy a host tensor to the
    mesh's device.
    """
    # When torch pickles a DTensor that was made from a local part with a storage offset, it takes the part for a tensor
    # with its own memory, and crashes. So the DTensor is made from a part without an offset, which is then replaced.
    first = torch.empty(1 if local.numel() else 0, dtype=local.dtype, device=CPU)
    first = first.as_strided(local.shape, (0,) * local.dim())
    made: DTensor = DTensor(first, value._spec, requires_grad=False)  # type: ignore[no-untyped-call, unused-ignore]
    made._local_tensor = local
    return made
