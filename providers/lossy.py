"""Lossy providers: floating-point tensors saved with fewer bits, marked as what they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.chunk import Buffer, Chunk, spans
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.leaf import LOSSY, Spec

from .base import Provider
from .dtypes import torch_dtype
from .strided import Strided
from .tensors import TensorProvider, check_shape, check_tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of elements that can be saved with fewer bits."""

RUN = 1 << 18
"""Elements that are converted at a time: what is in between stays in the processor's cache."""


class LossyProvider(Provider):
    """A tensor that is saved with fewer bits. Subclasses say how.

    What is saved is not what was there: the spec's attributes say so under ``lossy``, and a restore refuses such leaves
    unless it is allowed. They also say the type and shape of the tensor, which a restore gives back. The error that the
    attributes promise is checked for every element while it is captured.

    Args:
        value: a tensor of `FLOATS`.
    """

    method: ClassVar[str]

    def __init__(self, value: torch.Tensor) -> None:
        self._tensor = TensorProvider(value)
        self._strided = Strided(value)
        self._gathered: Buffer | None = None

    @classmethod
    @abstractmethod
    def encoded(cls, shape: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
        """Type of element, bytes of it, and shape, of what is saved of a tensor of this shape."""

    @classmethod
    @abstractmethod
    def promise(cls, dtype: torch.dtype) -> Mapping[str, Any]:
        """What the attributes say of the error, of a tensor of this type."""

    def suits(self) -> bool:
        """Whether the promise can be kept for these values; if not, they are saved as they are."""
        n = self.value.numel()
        return all(self._suits(self.elements(at, min(at + RUN, n))) for at in range(0, n, RUN))

    @classmethod
    @abstractmethod
    def _suits(cls, elements: torch.Tensor) -> bool: ...

    @abstractmethod
    def _encode(self, start: int, out: Buffer) -> None:
        """The bytes of what is saved from ``start`` on, into host memory."""

    @abstractmethod
    def _decode(self, data: Buffer, flat: torch.Tensor) -> None:
        """All that was saved back into elements, of the tensor's own type."""

    @property
    def spec(self) -> Spec:
        of = self._tensor.spec
        dtype, itemsize, shape = self.encoded(of.shape)
        attrs = {
            **of.attrs,
            "of": of.dtype,
            "shape": list(of.shape),
            LOSSY: {"method": self.method, **self.promise(self.value.dtype)},
        }
        return Spec(self.kind, dtype, itemsize, shape, attrs)

    @property
    def tensor(self) -> TensorProvider:
        """The tensor as it would be saved without loss."""
        return self._tensor

    @property
    def value(self) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor.value

    def elements(self, first: int, last: int) -> torch.Tensor:
        """Some of the elements in row-major order, where the tensor lies."""
        size = self._strided.itemsize
        if self._strided.dense:
            memory = self._strided.bytes()[first * size : last * size]
        else:
            memory = torch.empty((last - first) * size, dtype=torch.uint8, device=self._strided.device)
            self._strided.read(first * size, memory)
        return memory.view(self._tensor.value.dtype)

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start, nbytes in spans(self.spec.nbytes, size):
            yield Chunk(start, nbytes, partial(self._encode, start))

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Self:
        return cls(TensorProvider.fresh(cls.original(spec), device).done())

    @classmethod
    def over(cls, inner: Provider, spec: Spec) -> Provider:
        if isinstance(inner, cls) or not (type(inner) is TensorProvider or isinstance(inner, LossyProvider)):
            return inner  # a part of a tensor, too: what was saved is of the whole
        return cls(inner.value) if inner.value.dtype in FLOATS else inner

    @classmethod
    def original(cls, spec: Spec) -> Spec:
        """The spec of the tensor that was saved with fewer bits; both may come from anybody.

        Raises:
            FormatError: the attributes are not such a leaf's.
        """
        of, shape = spec.attrs.get("of"), spec.attrs.get("shape")
        if torch_dtype(of) not in FLOATS or not isinstance(shape, list):
            raise FormatError(f"a leaf of kind {spec.kind} says it was of type {of!r:.40} and shape {shape!r:.80}")
        size = torch_dtype(of).itemsize
        check_shape(tuple(shape), size)
        if (spec.dtype, spec.itemsize, spec.shape) != cls.encoded(tuple(shape)):
            raise FormatError(f"a leaf of kind {spec.kind} and shape {spec.shape} does not hold a tensor of {shape}")
        rest = {key: value for key, value in spec.attrs.items() if key in ("requires_grad", "parameter")}
        found = Spec(TensorProvider.kind, str(of), size, tuple(shape), rest)
        check_tensor(found)
        return found

    def mismatch(self, spec: Spec) -> str:
        if spec.kind != self.kind:
            return super().mismatch(spec)
        return self._tensor.mismatch(self.original(spec))

    def receiver(self, spec: Spec) -> Provider:
        self._tensor.receiver(self.original(spec))
        return self

    def load(self, start: int, data: Buffer) -> None:
        if self._gathered is None:
            # Racing workers must fill one memory, and setdefault is one step.
            self.__dict__.setdefault("_memory", torch.empty(self.spec.nbytes, dtype=torch.uint8))
            self._gathered = self.__dict__["_memory"]
        self._gathered[start : start + data.numel()].copy_(data)

    def done(self) -> torch.Tensor:
        data, self._gathered = self._gathered, None
        self.__dict__.pop("_memory", None)
        flat = torch.empty(self._tensor.value.numel(), dtype=self._tensor.value.dtype)
        if data is not None:
            self._decode(data, flat)
            self._tensor.load(0, flat.view(torch.uint8))
        return self._tensor.done()


def check(method: str, exact: torch.Tensor, found: torch.Tensor, bound: torch.Tensor, floor: float) -> None:
    """Raises CaptureError unless every element is as near as was promised."""
    error = (exact.double() - found.double()).abs_()
    alike = (exact == found) | (exact.isnan() & found.isnan())
    if not bool(((error <= bound.clamp(min=floor)) | alike).all()):
        raise CaptureError(f"saved as {method} an element would be further off than promised; did the state change?")
