"""The gpu tier: the newest versions, in the memory of the device that trains."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, TypeAlias

import torch
from pydantic import AfterValidator

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierError, TierFull, TierUnavailable
from tierstate.manifest.index import Array

from .base import Range, Release, Tier, check_key
from .devices import Line
from .held import HeldObject, HeldTier, Piece
from .pages import current_device
from .ranges import check_ranges
from .sums import on_host, summed
from .units import Size, format_size
from .wrapping import layers

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


def _checked(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{device!r} is no device; write 'cuda', a certain one as in 'cuda:1', or 'cpu'")
    return device


Device: TypeAlias = Annotated[str, AfterValidator(_checked)]


class DeviceObject(HeldObject):
    """An object whose chunks were copied within the device, with a footer.

    Attributes:
        memory: where the chunks lie.
        sums: of that memory when they were copied, as `tierstate.tiers.sums` has them.
    """

    def __init__(self, chunks: Piece, footer: Piece, sums: Array) -> None:
        super().__init__([chunks, footer])
        self.memory, self.sums = chunks.buffer, sums


class Gpu(HeldTier):
    """Keeps objects in a device's memory: those of a save that fits are copied there within the device.

    Nothing it does waits for what the caller's streams compute, but for a snapshot, which has to.
    All of its work goes on one stream of its own, and is waited for before memory changes hands.

    Args:
        capacity: bytes of the device's memory that it may hold; None for as many as there are. A version is a whole
            copy of the state, and while one is being saved the one before is still there.
        device: ``cuda`` is the current device of the thread that saves first, ``cuda:1`` a certain one. ``cpu`` runs
            the same code in host memory, for tests and for trying a policy out.
    """

    def __init__(self, *, capacity: Size | None = None, device: Device = "cuda") -> None:
        super().__init__(capacity)
        number = current_device() if _checked(device) == "cuda" else None
        self._asked = device if number is None else f"cuda:{number}"
        self._line: Line | None = None
        self._opening, self._pool = threading.Lock(), threading.Lock()
        self._spare: list[Buffer] = []
        self._traits = dataclasses.replace(self._traits, scarce=True, notes=(f"memory of {self._asked}",))

    @property
    def line(self) -> Line:
        """The stream on which the tier works, and with it the device; the first call settles which one that is.

        Raises:
            TierError: there is no such device.
        """
        with self._opening:
            if self._line is None:
                self._line = Line(self._found())
            return self._line

    def _found(self) -> torch.device:
        device = torch.device(self._asked)
        if device.type == "cpu":
            return device
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            text = f"{self.name}: there is no device {self._asked} here, of {count} CUDA devices; "
            raise TierError(text + "name one that is there, write 'device: cpu', or leave the tier out", tier=self.name)
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def _hold(self, key: str, buffer: Buffer, release: Release | None) -> Piece:
        line, nbytes = self.line, buffer.numel()
        memory = self._allocate(nbytes, key)
        try:
            with line.taken():
                memory.copy_(buffer, non_blocking=True)
            line.settle()
        except BaseException:
            self._gauge.give_back(nbytes)
            raise
        return Piece(memory, partial(self._gauge.give_back, nbytes), leased=False)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """As in `Tier`; what a range is read into may also be memory of the device, and then the host sees none of it.

        Such memory is written when all that the current stream was given so far is done.
        """
        line = self.line
        with self._reading(key) as held:
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
        """Memory for a snapshot: what a version of the same size has left, or new. Counted until it is given back.

        Raises:
            TierFull: there is no room under the capacity, or on the device.
            TierError: there is no such device.
        """
        with self._pool:
            same = [i for i, memory in enumerate(self._spare) if memory.numel() == nbytes]
            if same:
                return self._spare.pop(same[0])
        while self._drop_spare():  # the state has another size now
            pass
        return self._allocate(nbytes, key)

    def give_back(self, memory: Buffer) -> None:
        """Memory from `reserve` that nobody uses any more: the next version will need as much."""
        with self._pool:
            if not self._closed:
                self._spare.append(memory)
                return
        self._gauge.give_back(memory.numel())

    def _drop_spare(self) -> bool:
        """Let go of memory that waits for the next version; whether there was any."""
        with self._pool:
            if not self._spare:
                return False
            nbytes = self._spare.pop().numel()
        self._gauge.give_back(nbytes)
        return True

    def _allocate(self, nbytes: int, key: str) -> Buffer:
        line = self.line
        while True:
            try:
                self._gauge.take(nbytes, self.name, key)
                break
            except TierFull:
                if not self._drop_spare():
                    raise
        while True:
            try:
                with line.taken():
                    return torch.empty(nbytes, dtype=torch.uint8, device=line.device)
            except (RuntimeError, MemoryError) as error:
                if not self._drop_spare():
                    self._gauge.give_back(nbytes)
                    raise self._refused(nbytes, key, error) from error

    def _refused(self, nbytes: int, key: str, error: Exception) -> TierError:
        place = f"{self.name}: {key}"
        if isinstance(error, torch.OutOfMemoryError) or self.line.device.type == "cpu":
            text = f"{place}: {self.line.device} has no room for {format_size(nbytes)} more; keep fewer versions there"
            return TierFull(text, tier=self.name, key=key)
        return TierUnavailable(f"{place}: {self.line.device} gave no memory: {error}", tier=self.name, key=key)

    def adopt(self, key: str, memory: Buffer, sums: Array, footer: Buffer) -> None:
        """Make memory from `reserve` an object, with a footer behind it. On an error it stays the caller's.

        Raises:
            AlreadyExists, TierFull, TierError
        """
        tail = self._hold(check_key(key), footer, None)
        try:
            self._add_object(key, DeviceObject(Piece(memory, partial(self.give_back, memory), False), tail, sums))
        except BaseException:
            tail.free()
            raise

    @contextmanager
    def lent(self, key: str) -> Iterator[tuple[DeviceObject, Array] | None]:
        """An object that was copied within the device, with its sums as they are now; not freed within the block.

        None for an object that came through the host.

        Raises:
            NotFound: there is no such object.
        """
        with self._reading(key) as held:
            if not isinstance(held, DeviceObject):
                yield None
                return
            with self.line.taken():
                now = on_host(summed(held.memory))
            yield held, now

    def close(self) -> None:
        super().close()
        while self._drop_spare():
            pass


def gpu_in(tier: Tier) -> Gpu | None:
    """The gpu tier that a tier is, or has inside its wrappers, which have no part in what is done within the device."""
    return next((layer for layer in layers(tier) if isinstance(layer, Gpu)), None)
