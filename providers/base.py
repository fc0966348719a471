"""The contract of a state provider.

A provider is given a value; it says what the value is, streams it out as chunks, and takes chunks back:

* ``chunks(size)`` yields chunks lazily, in order, that together are the value's bytes in row-major order, cut at
  multiples of ``size``. ``fill`` copies straight from where the bytes are: no intermediate copy of a whole value.
* What has been yielded and not filled may not change meanwhile; once filled it may.
* ``load(start, data)`` takes verified bytes back, in any order and any partition of the value's bytes.
* ``done()`` completes the load and returns the value to put into the state.
* ``memory()`` is for values that lie in host memory just as they are saved: then ``chunks`` and ``load`` are passed by.
* A provider knows nothing of tiers. Providers compose by wrapping and by nesting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer, Chunk, Event
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.leaf import Spec


class Provider(ABC):
    """Turns one value into chunks and back. See the module for the contract.

    A custom provider is registered for a type with ``tierstate.register_provider(MyType, MyProvider)``, or named in
    the entry-point group ``tierstate.providers`` under its ``kind``, or returned by the value's own
    ``__state_provider__()``. It is constructed with the value alone.
    """

    kind: ClassVar[str]
    """Name under which the manifest finds this class again."""

    unsafe: ClassVar[str] = ""
    """Why loading this kind needs the user's leave; empty where it is safe with bytes from anybody."""

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
        """The boxes that this process holds of the value, each as a provider of its own; itself by default, where it
        holds one. Boxes do not overlap; none is a value of which it holds nothing.
        """
        return (self,)

    def scatter(self, at: Box, data: Buffer, part: Box) -> Event | None:
        """Take back verified bytes of a box that was saved, where it is another than this one's.

        Args:
            at: the box whose elements ``data`` is, in row-major order; in the coordinates of the global shape.
            data: as for `load`.
            part: the elements that are wanted: inside ``at`` and inside this provider's box.

        Raises:
            StateMismatch: values of this kind cannot be taken in parts.
        """
        raise StateMismatch(f"a {self.kind} cannot be restored in parts; it is saved and restored whole")

    def memory(self) -> Buffer | None:
        """The value's own bytes, where they lie in host memory in row-major order; None where they do not.

        The engine copies out of them instead of calling ``chunks``, and reads into them instead of calling ``load``,
        from several threads at once. ``done`` is called all the same. A subclass that overrides ``chunks`` or ``load``
        overrides this too, or it is not asked.
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
    def over(cls, inner: Provider, spec: Spec) -> Provider:
        """The provider through which a saved leaf of this class comes back into a value of another: ``inner`` where
        that cannot be.
        """
        return inner

    def receiver(self, spec: Spec) -> Provider:
        """The provider that takes a saved leaf of this spec in place of this value: itself, where it is mutable."""
        return self

    @abstractmethod
    def load(self, start: int, data: Buffer) -> Event | None:
        """Take back the bytes ``start : start + len(data)``, already verified. Called from worker threads.

        Returns:
            An event to wait for before ``data`` may be reused, where the copy runs on a device stream.
        """

    @abstractmethod
    def done(self) -> Any:
        """Complete the load and return the value to put into the state."""


def memory_of(provider: Provider, nbytes: int) -> Buffer | None:
    """What `Provider.memory` gives, held to its contract: nobody checks bounds again.

    Raises:
        ValueError: it is not host memory of so many bytes, one after the other.
    """
    memory = provider.memory() if _speaks_for(type(provider)) else None
    if memory is None:
        return None
    sound = memory.dtype == torch.uint8 and memory.device.type == "cpu" and memory.is_contiguous()
    if not sound or memory.numel() != nbytes:
        raise ValueError(
            f"{type(provider).__qualname__}.memory() gave {memory.numel()} elements of {memory.dtype} on "
            f"{memory.device}; right are {nbytes} bytes on the host, without gaps"
        )
    return memory


@cache
def _speaks_for(kind: type[Provider]) -> bool:
    """Whether ``memory`` was written by one who knew of ``chunks`` and ``load`` as they are."""

    def depth(name: str) -> int:
        return next(i for i, cls in enumerate(kind.__mro__) if name in cls.__dict__)

    return depth("memory") <= min(depth("chunks"), depth("load"))
