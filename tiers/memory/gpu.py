"""The gpu tier: keeps the newest objects in the memory of the training GPU, for a rollback without any I/O.

Data is copied within the device on a stream of its own; block checksums on the device find memory that has changed.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, TypeAlias, TypeVar

import torch
from pydantic import AfterValidator

from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierError, TierFull, TierstateError, TierUnavailable
from tierstate.tiers.base import Range, Release, check_key, check_ranges
from tierstate.tiers.units import Size, format_size

from .arena import current_device
from .block_sums import block_sums, sums_on_host
from .cuda import CopyStream
from .device_room import DeviceRoom
from .host import HeldBuffer, InMemoryObject, InMemoryTier

T = TypeVar("T")


_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


def _checked(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{device!r} is no device; write 'cuda', a certain one as in 'cuda:1', or 'cpu'")
    return device


Device: TypeAlias = Annotated[str, AfterValidator(_checked)]


class DeviceObject(InMemoryObject):
    """An object whose data was copied within the device, with a footer behind it.

    Attributes:
        memory: the data, in device memory.
        sums: block checksums of that memory after the copy (`block_sums`).
    """

    def __init__(self, data: HeldBuffer, footer: HeldBuffer, sums: Array) -> None:
        super().__init__([data, footer])
        self.memory, self.sums = data.buffer, sums


class Gpu(InMemoryTier):
    """Keeps objects in a device's memory; a save that fits is copied within the device (snapshot).

    Only a snapshot waits for the work on the caller's streams; nothing else does. All work of the tier runs on one
    stream of its own, and has ended before memory is returned or reused.

    Args:
        capacity: memory of the device that it may use, per process, as in ``40GiB``; without it, no limit. A save is a
            whole copy of the state, and while it is written the previous one still exists.
        device: ``cuda`` is the current device of the thread that saves first; or a certain one, as in ``cuda:1``.
            ``cpu`` runs the same code in host memory, to try a policy out.
    """

    def __init__(self, *, capacity: Size | None = None, device: Device = "cuda") -> None:
        super().__init__(capacity)
        number = current_device() if _checked(device) == "cuda" else None
        self._asked = device if number is None else f"cuda:{number}"
        self._line: CopyStream | None = None
        self._room = DeviceRoom(torch.device("cpu"))
        self._opening, self._pool = threading.Lock(), threading.Lock()
        self._spare: list[Buffer] = []
        self._traits = dataclasses.replace(self._traits, scarce=True, notes=(f"memory of {self._asked}",))

    @property
    def line(self) -> CopyStream:
        """The tier's stream, with its device; the first call chooses the device.

        Raises:
            TierError: there is no such device, or it has failed.
        """
        with self._opening:
            if self._line is None:
                with self.failing():
                    line = CopyStream(self._found())
                    self._room = DeviceRoom(line.device)
                self._line = line
            return self._line

    @contextmanager
    def failing(self, key: str = "") -> Iterator[None]:
        """Errors of the device in the block become errors of the tier, so that callers go on to another tier.

        Raises:
            TierUnavailable: the device has failed, or has no memory for what was to be computed.
        """
        try:
            yield
        except TierstateError:
            raise
        except (RuntimeError, MemoryError) as error:  # also torch.OutOfMemoryError and torch.AcceleratorError
            place = f"{self.name}: {key}" if key else self.name
            raise TierUnavailable(f"{place}: {self._asked} has failed: {error}", tier=self.name, key=key) from error

    def _found(self) -> torch.device:
        device = torch.device(self._asked)
        if device.type == "cpu":
            return device
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            text = f"{self.name}: there is no device {self._asked} here, of {count} CUDA devices; "
            raise TierError(text + "name one that is there, write 'device: cpu', or leave the tier out", tier=self.name)
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> HeldBuffer:
        line, nbytes = self.line, buffer.numel()
        memory = self._allocate(nbytes, key)
        try:
            with self.failing(key):
                with line.taken():
                    memory.copy_(buffer, non_blocking=True)
                line.settle()
        except BaseException:
            self._free(nbytes)
            raise
        return HeldBuffer(memory, partial(self._free, nbytes), leased=False)

    def _free(self, nbytes: int) -> None:
        """Count a block no longer, which torch's allocator gets now."""
        self._gauge.give_back(nbytes)
        self._room.give_back(nbytes)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """As in `Tier`; the destination may also be device memory, without a copy through the host.

        Device memory is written after all work queued so far on the current stream.
        """
        line = self.line
        with self.reading(key) as held, self.failing(key):
            check_ranges(f"{self.name}: {key}", held.nbytes, ranges)
            if any(out.is_cuda for _, out in ranges):
                line.follow()
            try:
                with line.taken():
                    for offset, out in ranges:
                        held.copy(offset, out)
            finally:
                # Also after an error: nothing writes into the caller's memory once this has returned.
                line.settle()

    def reserve(self, nbytes: int, key: str) -> Buffer:
        """Memory for a snapshot: reused from a deleted object of the same size, or new. Counted until `give_back`.

        Raises:
            TierFull: the capacity or the device memory does not suffice.
            TierError: there is no such device.
        """
        memory = self._reuse(nbytes)
        if memory is None:
            while self._drop_spare():  # the size of the state has changed
                pass
            memory = self._allocate(nbytes, key)
        self._room.begin_save()
        return memory

    def _reuse(self, nbytes: int) -> Buffer | None:
        with self._pool:
            same = [i for i, memory in enumerate(self._spare) if memory.numel() == nbytes]
            return self._spare.pop(same[0]) if same else None

    def give_back(self, memory: Buffer) -> None:
        """Return memory from `reserve` that is no longer used. It is kept for the next save, which needs as much.

        If training has been short of memory lately, torch's allocator gets it: that keeps it for this tier too, but
        frees it as soon as training asks for more than there is.
        """
        short = self._room.short
        with self._pool:
            if not self._closed and not short:
                self._spare.append(memory)
                return
        self._free(memory.numel())

    def _drop_spare(self) -> bool:
        """Free one block of memory that was kept for the next save. Returns whether there was any."""
        with self._pool:
            if not self._spare:
                return False
            nbytes = self._spare.pop().numel()
        self._free(nbytes)
        return True

    def _allocate(self, nbytes: int, key: str) -> Buffer:
        self._dropping_spare(lambda: self._gauge.take(nbytes, self.name, key))
        try:
            return self._dropping_spare(lambda: self._new(nbytes, key))
        except BaseException:
            self._gauge.give_back(nbytes)
            raise

    def _dropping_spare(self, take: Callable[[], T]) -> T:
        """Call until it succeeds; each time that it does not, free a block that was kept for the next save."""
        while True:
            try:
                return take()
            except (TierFull, TierUnavailable):
                if not self._drop_spare():
                    raise

    def _new(self, nbytes: int, key: str) -> Buffer:
        """Memory of the device that is counted already."""
        line = self.line
        try:
            if lack := self._room.lack(nbytes):
                raise self._full(nbytes, key, f" ({lack})")
            with line.taken():
                return torch.empty(nbytes, dtype=torch.uint8, device=line.device)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, torch.OutOfMemoryError) or line.device.type == "cpu":
                raise self._full(nbytes, key) from error
            text = f"{self.name}: {key}: {line.device} gave no memory: {error}"
            raise TierUnavailable(text, tier=self.name, key=key) from error

    def _full(self, nbytes: int, key: str, why: str = "") -> TierFull:
        text = f"{self.line.device} has no room for {format_size(nbytes)} more; keep fewer versions there{why}"
        return TierFull(f"{self.name}: {key}: {text}", tier=self.name, key=key)

    def adopt(self, key: str, memory: Buffer, sums: Array, footer: Buffer) -> None:
        """Create an object from memory of `reserve`, followed by a footer. On an error the caller keeps the memory.

        Raises:
            AlreadyExists, TierFull, TierError
        """
        tail = self._hold(check_key(key), footer, None)
        try:
            self._add_object(key, DeviceObject(HeldBuffer(memory, partial(self.give_back, memory), False), tail, sums))
        except BaseException:
            tail.free()
            raise

    @contextmanager
    def lent(self, key: str) -> Iterator[tuple[DeviceObject, Array] | None]:
        """An object that was copied within the device, with its present checksums; it is not freed within the block.

        None for an object that was written from host memory.

        Raises:
            NotFound: there is no such object.
            TierUnavailable: the device has failed, or has no memory for the checksums.
        """
        with self.reading(key) as held:
            if not isinstance(held, DeviceObject):
                yield None
                return
            with self.failing(key), self.line.taken():
                now = sums_on_host(block_sums(held.memory))
            yield held, now

    def close(self) -> None:
        super().close()
        while self._drop_spare():
            pass
