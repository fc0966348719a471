"""The contract of a state provider: how a value becomes a stream of chunks, and chunks become the value again.

For authors of custom providers, and for the engine that captures and restores:

* ``chunks(size)`` yields chunks lazily and in order. Together they are the value's bytes in row-major order, cut at
  multiples of ``size``. ``fill`` copies directly from the value's memory: no intermediate copy of a whole value.
* The engine does not let the value change between the yield of a chunk and its ``fill``; afterwards it may change.
* ``load(start, data)`` takes verified bytes back, in any order and any partition of the value's bytes.
* ``done()`` completes the load and returns the value to put into the state.
* ``memory()`` gives the bytes of a value that lies in host memory exactly as it is saved. The engine then copies from
  and reads into that memory, and calls neither ``chunks`` nor ``load``.
* A provider knows nothing of tiers. Providers compose by wrapping and by nesting.

`tierstate.providers.testing.ProviderContract` tests these promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, Chunk, Event
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import Spec


class Provider(ABC):
    """Turns one value into chunks and back. See the module for the contract.

    A custom provider is registered for a type with ``tierstate.register_provider(MyType, MyProvider)``, or named in
    the entry-point group ``tierstate.providers`` under its ``kind``, or returned by the value's own
    ``__state_provider__()``. It is constructed with the value alone.
    """

    kind: ClassVar[str]
    """Name of this class in the manifest; a restore finds the class by it."""

    unsafe: ClassVar[str] = ""
    """Why the user must allow that this kind is loaded; empty where any bytes are safe to load."""

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What the value is: kind, dtype, itemsize, global shape, attributes."""

    @property
    def box(self) -> Box:
        """The part of the global shape that this process holds; the whole by default."""
        return Box.whole(self.spec.shape)

    @abstractmethod
    def chunks(self, size: int) -> Iterator[Chunk]:
        """The value's bytes, in chunks of ``size`` bytes (a multiple of 16), the last one shorter."""

    @property
    def parts(self) -> Sequence[Provider]:
        """One provider for each box that this process holds of the value; by default the provider itself, for one box.
        Boxes do not overlap. An empty sequence means that this process holds nothing of the value.
        """
        return (self,)

    def scatter(self, at: Box, data: Buffer, part: Box) -> Event | None:
        """Take back verified bytes of a saved box that differs from this provider's box (a reshard).

        Args:
            at: the saved box, whose elements are in ``data`` in row-major order; in coordinates of the global shape.
            data: as for `load`.
            part: the box of elements to copy: inside ``at`` and inside this provider's box.

        Raises:
            StateMismatch: values of this kind cannot be loaded in parts.
        """
        raise StateMismatch(f"a {self.kind} cannot be restored in parts; it is saved and restored whole")

    def memory(self) -> Buffer | None:
        """The value's own memory, if it is contiguous host memory in row-major order; otherwise None.

        The engine copies out of them instead of calling ``chunks``, and reads into them instead of calling ``load``,
        from several threads at once. ``done`` is still called. A subclass that overrides ``chunks`` or ``load`` must
        override this too; otherwise the engine does not use it.
        """
        return None

    @classmethod
    @abstractmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Self:
        """A provider that builds a new value from a saved spec; tensors go to ``device`` (default: host)."""

    def mismatch(self, spec: Spec) -> str:
        """Why a saved leaf of this spec cannot be restored into this value; empty where it can."""
        mine = self.spec
        if spec.kind != mine.kind:
            return f"is {mine.kind} here, {spec.kind} in the version"
        if spec.dtype != mine.dtype:
            return f"has dtype {mine.dtype} here, {spec.dtype} in the version"
        if spec.shape != mine.shape:
            return f"has shape {mine.shape} here, {spec.shape} in the version"
        return ""

    @classmethod
    def wrap(cls, inner: Provider, spec: Spec) -> Provider:
        """A provider of this class around ``inner``, to restore a leaf that was saved by this class into a value that
        has another provider; ``inner`` itself where that is not possible.
        """
        return inner

    def receiver(self, spec: Spec) -> Provider:
        """The provider that receives a saved leaf of this spec in place of this value: itself, if it is mutable."""
        return self

    @abstractmethod
    def load(self, start: int, data: Buffer) -> Event | None:
        """Take back the bytes ``start : start + len(data)``, already verified. Called from worker threads.

        Returns:
            An event to wait for before ``data`` may be reused, if the copy runs on a device stream; otherwise None.
        """

    @abstractmethod
    def done(self) -> Any:
        """Complete the load and return the value to put into the state."""


def memory_of(provider: Provider, nbytes: int) -> Buffer | None:
    """The bytes that `Provider.memory` gives, checked once here: the engine copies without further bounds checks.

    Raises:
        ValueError: it is not contiguous host memory of ``nbytes`` bytes.
    """
    memory = provider.memory() if _memory_is_current(type(provider)) else None
    if memory is None:
        return None
    sound = memory.dtype == torch.uint8 and memory.is_cpu and memory.is_contiguous()
    if not sound or memory.numel() != nbytes:
        raise ValueError(
            f"{type(provider).__qualname__}.memory() gave {memory.numel()} elements of {memory.dtype} on "
            f"{memory.device}; right are {nbytes} bytes on the host, without gaps"
        )
    return memory


@cache
def _memory_is_current(kind: type[Provider]) -> bool:
    """Whether no subclass overrides ``chunks`` or ``load`` without overriding ``memory`` too."""

    def depth(name: str) -> int:
        return next(i for i, cls in enumerate(kind.__mro__) if name in cls.__dict__)

    return depth("memory") <= min(depth("chunks"), depth("load"))
