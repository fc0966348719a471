"""Stored values: tensors and arrays that lie in a file, given to a save as they are, and read as it captures them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import ClassVar, Self

import torch

from tierstate.manifest.chunk import Buffer, Chunk, empty_buffer, spans
from tierstate.manifest.errors import FormatError
from tierstate.manifest.leaf import Spec
from tierstate.providers.arrays import ArrayProvider
from tierstate.providers.base import Provider
from tierstate.providers.retie import pour
from tierstate.providers.tensors import TensorProvider, check_shape, check_tensor

Read = Callable[[int, Buffer], None]
"""Fills a buffer on the host with the bytes from an offset on."""


class Stored:
    """A value of a state that stands for bytes which lie in a file.

    Args:
        spec: what they are.
        read: reads them.
        place: equal for values that are the same bytes; None where nobody knows.
        held: how many bytes the file has of it, where those may be fewer than it has itself; None for all.
    """

    def __init__(self, spec: Spec, read: Read, place: Hashable = None, held: int | None = None) -> None:
        self.spec, self.read, self.place, self.held = spec, read, place, held

    def like(self, spec: Spec) -> Stored:
        """The same bytes as another leaf of the same element type and shape, which may be a Parameter, say."""
        return Stored(spec, self.read, self.place, self.held)

    def __state_provider__(self) -> Provider:
        return StoredProvider(self)


class StoredProvider(Provider):
    """What lies in a file, read straight to where it is wanted. It is only ever saved."""

    kind: ClassVar[str] = TensorProvider.kind

    def __init__(self, value: Stored) -> None:
        self._value = value
        # What a file calls the same bytes need not be the same to us: as arrays and as tensors, say.
        spec, known = value.spec, value.spec.nbytes and value.place is not None
        self.alias = (value.place, spec.kind, spec.dtype, spec.shape) if known else None

    @property
    def spec(self) -> Spec:
        return self._value.spec

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start, nbytes in spans(self.spec.nbytes, size):
            yield Chunk(start, nbytes, partial(self._fill, start))

    def _fill(self, start: int, out: Buffer) -> None:
        host = out if out.device.type == "cpu" else empty_buffer(out.numel())
        self._value.read(start, host)
        if host is not out:
            out.copy_(host)

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Self:
        """Not for what lies in files: by their kind, leaves are built anew as tensors or arrays."""
        raise NotImplementedError("a stored value is never made anew")

    def load(self, start: int, data: Buffer) -> None:
        raise NotImplementedError("a stored value is never restored into")

    def done(self) -> None:
        raise NotImplementedError("a stored value is never restored into")


def check_stored(spec: Spec) -> Spec:
    """The spec itself, if it is a tensor's or an array's.

    Raises:
        FormatError: it is not, or its shape is none that a tensor may have.
    """
    check_shape(spec.shape, spec.itemsize)
    if spec.kind == ArrayProvider.kind:
        # Only the spec is looked at: of an array without elements.
        ArrayProvider.fresh(Spec(spec.kind, spec.dtype, spec.itemsize, (*spec.shape, 0), spec.attrs))
    elif spec.kind in (TensorProvider.kind, "storage"):
        check_tensor(spec)
    else:
        raise FormatError(f"a leaf of kind {spec.kind!r:.40} does not lie in files of other formats")
    return spec


def read_tensor(stored: Stored) -> torch.Tensor:
    """All of a tensor, in memory.

    Raises:
        FormatError: the file has fewer bytes of it: nothing is taken up for what nobody wrote.
    """
    if stored.held is not None and stored.held < stored.spec.nbytes:
        raise FormatError(f"a tensor of {stored.spec.nbytes} bytes has {stored.held} in the file")
    sink = TensorProvider.fresh(stored.spec)
    pour(StoredProvider(stored), sink)
    return sink.done()
