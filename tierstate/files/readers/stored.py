"""Lazy values: tensors and arrays of a file, read only while a save captures them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.chunk import Buffer, Chunk, empty_buffer, spans
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import Provider
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.tensors import TensorProvider, check_shape, check_tensor
from tierstate.providers.tree.ties import copy_value

ReadBytes = Callable[[int, Buffer], None]
"""Fills a host buffer with the bytes from the given offset on."""


class FileValue:
    """A lazy value of a state: its bytes are in a file.

    Args:
        spec: the spec of the value.
        read: reads its bytes.
        place: a key that is equal for values with the same bytes in the file; None if not known.
        held: bytes of the value that the file really has, if these may be fewer; None for all.
    """

    def __init__(self, spec: Spec, read: ReadBytes, place: Hashable = None, held: int | None = None) -> None:
        self.spec, self.read, self.place, self.held = spec, read, place, held

    def like(self, spec: Spec) -> FileValue:
        """The same bytes with another spec of the same dtype and shape, for example that of a Parameter."""
        return FileValue(spec, self.read, self.place, self.held)

    def __state_provider__(self) -> Provider:
        return FileValueProvider(self)


class FileValueProvider(Provider):
    """Provides the bytes of a `FileValue`, read directly into the save's memory. It can be saved, not restored."""

    kind: ClassVar[str] = TensorProvider.kind

    def __init__(self, value: FileValue) -> None:
        self._value = value
        # The same bytes in a file may be different leaves: as an array and as a tensor, for example.
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
        """Not supported: a restore finds the provider of tensors or arrays by the leaf's kind."""
        raise NotImplementedError("a stored value is never made anew")

    def load(self, start: int, data: Buffer) -> None:
        raise NotImplementedError("a stored value is never restored into")

    def done(self) -> None:
        raise NotImplementedError("a stored value is never restored into")


def check_file_spec(spec: Spec) -> Spec:
    """The spec itself, if it is a tensor's or an array's.

    Raises:
        FormatError: it is not, or its shape is not valid.
    """
    check_shape(spec.shape, spec.itemsize)
    if spec.kind == ArrayProvider.kind:
        # Only to check the spec; with an axis of length 0, so that nothing is allocated.
        ArrayProvider.fresh(Spec(spec.kind, spec.dtype, spec.itemsize, (*spec.shape, 0), spec.attrs))
    elif spec.kind in (TensorProvider.kind, "storage"):
        check_tensor(spec)
    else:
        raise FormatError(f"a leaf of kind {spec.kind!r:.40} does not lie in files of other formats")
    return spec


def read_value(stored: FileValue) -> Any:
    """Read a whole tensor, or an array, into memory.

    Raises:
        FormatError: the file has fewer bytes than the value; this is checked before memory is allocated.
    """
    spec = stored.spec
    if stored.held is not None and stored.held < spec.nbytes:
        raise FormatError(f"a tensor of {spec.nbytes} bytes has {stored.held} in the file")
    sink = ArrayProvider.fresh(spec) if spec.kind == ArrayProvider.kind else TensorProvider.fresh(spec)
    copy_value(FileValueProvider(stored), sink)
    return sink.done()
