"""NumPy arrays of any strides and any dtype without Python objects, saved from and restored into their own memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property, partial
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch

from tierstate.manifest.boxes import Box, row_major_runs
from tierstate.manifest.chunk import Buffer, Chunk, empty_buffer, spans
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import MAX_LEAF_ITEMSIZE, Spec
from tierstate.providers.base import Provider

from .dtypes import numpy_dtype, numpy_name
from .strided import overlaps_itself
from .tensors import check_shape

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


MAX_ARRAY_DIMS = 64 if int(np.__version__.split(".")[0]) >= 2 else 32
"""The most axes that an array of the running NumPy may have."""


class ArrayProvider(Provider):
    """An array, streamed out of and into its own memory in row-major order; byte order and padding stay as they are.

    Two arrays are saved once only if they are the same view of the same memory; views that only overlap are saved
    separately.

    Raises:
        CaptureError: the dtype has objects, or the value is of a subclass of ndarray other than memmap.
    """

    kind: ClassVar[str] = "array"

    def __init__(self, value: Array) -> None:
        if type(value) not in (np.ndarray, np.memmap):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CaptureError(f"a {kind} is more than its elements; save its parts as plain arrays, or np.asarray(it)")
        self._value = value
        self._described = numpy_name(value.dtype)

    @property
    def value(self) -> Array:
        """The array itself."""
        return self._value

    @cached_property
    def spec(self) -> Spec:
        value, attrs = self._value, {}
        check_shape(value.shape, value.dtype.itemsize)
        if not isinstance(self._described, str):
            attrs["fields"] = self._described
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            attrs["order"] = "F"
        return Spec(self.kind, value.dtype.str, value.dtype.itemsize, value.shape, attrs)

    @cached_property
    def alias(self) -> Hashable:
        """Equal for arrays that are the same view of the same memory; None for one without bytes."""
        value = self._value
        if value.nbytes == 0:
            return None
        strides = tuple(s if n > 1 else 0 for s, n in zip(value.strides, value.shape, strict=True))
        return (self.kind, value.ctypes.data, repr(self._described), value.shape, strides)

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start, nbytes in spans(self._value.nbytes, size):
            yield Chunk(start, nbytes, partial(self._fill, start))

    def _fill(self, start: int, out: Buffer) -> None:
        host = out if out.device.type == "cpu" else empty_buffer(out.numel())
        into = host.numpy()
        for at, memory in self._pieces(start, out.numel()):
            into[at : at + memory.nbytes].view(memory.dtype).reshape(memory.shape)[...] = memory
        if host is not out:
            out.copy_(host)

    def memory(self) -> Buffer | None:
        flags = self._value.flags
        # torch cannot view read-only memory; such arrays are copied by `chunks`.
        if not (flags.c_contiguous and flags.writeable and self._value.nbytes):
            return None
        return torch.from_numpy(self._value.reshape(-1).view(np.uint8))

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Self:
        described = spec.attrs.get("fields", spec.dtype)
        dtype, order = numpy_dtype(described), spec.attrs.get("order", "C")
        if dtype.str != spec.dtype or dtype.itemsize != spec.itemsize or dtype.itemsize > MAX_LEAF_ITEMSIZE:
            raise FormatError(
                f"{described!r:.80} has {dtype.itemsize} bytes per element and is {dtype.str}, "
                f"not {spec.itemsize!r:.20} and {spec.dtype!r:.20}"
            )
        check_shape(spec.shape, dtype.itemsize)
        if len(spec.shape) > MAX_ARRAY_DIMS or dtype.subdtype is not None or order not in ("C", "F"):
            raise FormatError(
                f"an array of {len(spec.shape)} dimensions, dtype {dtype}, order {order!r:.20} cannot be made here: "
                f"NumPy {np.__version__} has at most {MAX_ARRAY_DIMS} dimensions"
            )
        return cls(np.empty(spec.shape, dtype, order=order))

    def mismatch(self, spec: Spec) -> str:
        found = super().mismatch(spec)
        mine = self._described if not isinstance(self._described, str) else None
        if not found and spec.attrs.get("fields") != mine:
            return f"has fields {mine} here, {spec.attrs.get('fields')} in the version"
        if not found and not self._value.flags.writeable:
            return "is read-only here; give a copy of it, as by np.array(it)"
        if not found and overlaps_itself(self._value.shape, tuple(map(abs, self._value.strides))):
            return f"has elements that share memory here (strides {self._value.strides})"
        return found

    def load(self, start: int, data: Buffer) -> None:
        source = data.cpu().numpy()
        for at, memory in self._pieces(start, data.numel()):
            memory[...] = source[at : at + memory.nbytes].view(memory.dtype).reshape(memory.shape)

    def scatter(self, at: Box, data: Buffer, part: Box) -> None:
        cell = np.dtype((np.void, self._value.dtype.itemsize))
        source = data.cpu().numpy().view(cell).reshape(at.shape)
        np.asarray(self._value).view(cell)[part.slices(self.box.offset)] = source[part.slices(at.offset)]

    def done(self) -> Array:
        return self._value

    def _pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, Array]]:
        """Cut a byte range into views of bytes or whole elements; yields ``(offset from start, memory)``."""
        size, stop = self._value.dtype.itemsize, start + nbytes
        if self._value.flags.c_contiguous:
            yield 0, self._value.reshape(-1).view(np.uint8)[start:stop]
            return
        head, tail = min(-(-start // size) * size, stop), max(stop // size * size, start)
        if head > tail:  # within one element
            yield from self._some_bytes(start, stop, start)
            return
        yield from self._some_bytes(start, head, start)
        cells = np.asarray(self._value).view(np.dtype((np.void, size)))
        for at, box in row_major_runs(cells.shape, head // size, tail // size):
            yield at * size - start, cells[box.slices()]
        yield from self._some_bytes(tail, stop, start)

    def _some_bytes(self, start: int, stop: int, origin: int) -> Iterator[tuple[int, Array]]:
        value, size = np.asarray(self._value), self._value.dtype.itemsize
        shape = (*value.shape, size)
        if start < stop:
            first = value[..., np.newaxis].view(np.dtype((np.void, size))).view(np.uint8)
            for at, box in row_major_runs(shape, start, stop):
                yield at - origin, first[box.slices()]
