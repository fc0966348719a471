"""Lossy providers: floating-point tensors saved as bfloat16 or as quantized int8, with a checked error bound.

The spec of such a leaf says that it is lossy, and a restore refuses it unless lossy leaves are allowed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.chunk import Buffer, Chunk, spans
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import LOSSY, STRIDES, Spec
from tierstate.providers.base import Provider

from .devices import CPU
from .dtypes import torch_dtype, torch_name
from .strided import Strided, overlaps_itself, row_major_strides
from .tensors import TensorProvider, check_shape, check_tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that can be saved with a lossy method."""


ELEMENTS_AT_ONCE = 1 << 18
"""Elements that are converted at a time, so that intermediate values fit the processor's cache."""


class LossyProvider(Provider):
    """A tensor that is saved with fewer bits. Each subclass is one lossy method.

    The spec's attributes have the method and its error bound under ``lossy``, and also dtype and shape of the original
    tensor, which a restore returns. A restore refuses such leaves unless they are allowed. The error bound is checked
    for every element during the capture.

    Args:
        value: a tensor with one of the dtypes `FLOATS`.
    """

    method: ClassVar[str]

    def __init__(self, value: torch.Tensor) -> None:
        self._tensor = TensorProvider(value)
        self._strided = Strided(value)
        self._gathered: Buffer | None = None

    @classmethod
    @abstractmethod
    def encoded(cls, shape: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
        """Dtype name, itemsize and shape of the encoded form of a tensor of this shape."""

    @classmethod
    @abstractmethod
    def promise(cls, dtype: torch.dtype) -> Mapping[str, Any]:
        """The error bound for a tensor of this dtype, as attributes of the spec."""

    def suits(self) -> bool:
        """Whether the error bound holds for these values; if not, the tensor is saved without loss."""
        n = self.value.numel()
        return all(
            self._suits(self.elements(at, min(at + ELEMENTS_AT_ONCE, n))) for at in range(0, n, ELEMENTS_AT_ONCE)
        )

    @classmethod
    @abstractmethod
    def _suits(cls, elements: torch.Tensor) -> bool: ...

    @abstractmethod
    def _encode(self, start: int, out: Buffer) -> None:
        """Write the encoded bytes from offset ``start`` on into ``out``, a host buffer."""

    @abstractmethod
    def _decode(self, data: Buffer, flat: torch.Tensor) -> None:
        """Decode all encoded bytes into ``flat``, the elements in the tensor's own dtype."""

    @property
    def spec(self) -> Spec:
        of = self._tensor.spec
        dtype, itemsize, shape = self.encoded(of.shape)
        shared = overlaps_itself(tuple(self.value.shape), self.value.stride())
        attrs = {
            **{key: value for key, value in of.attrs.items() if key != STRIDES or not shared},
            "of": of.dtype,
            "shape": list(of.shape),
            LOSSY: {"method": self.method, **self.promise(self.value.dtype)},
        }
        return Spec(self.kind, dtype, itemsize, shape, attrs)

    @property
    def tensor(self) -> TensorProvider:
        """The provider that would save the tensor without loss."""
        return self._tensor

    @property
    def value(self) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor.value

    def elements(self, first: int, last: int) -> torch.Tensor:
        """The elements ``first:last`` in row-major order, on the tensor's device."""
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
    def wrap(cls, inner: Provider, spec: Spec) -> Provider:
        if isinstance(inner, cls) or not (type(inner) is TensorProvider or isinstance(inner, LossyProvider)):
            return inner  # also for a shard: the encoded bytes are of the whole tensor
        return cls(inner.value) if inner.value.dtype in FLOATS else inner

    @classmethod
    def original(cls, spec: Spec) -> Spec:
        """The spec of the original tensor, from the spec of the lossy leaf, which may be untrusted.

        Raises:
            FormatError: the attributes are not those of a lossy leaf.
        """
        of, shape = spec.attrs.get("of"), spec.attrs.get("shape")
        if torch_dtype(of) not in FLOATS or not isinstance(shape, list):
            raise FormatError(f"a leaf of kind {spec.kind} says it was of type {of!r:.40} and shape {shape!r:.80}")
        size = torch_dtype(of).itemsize
        check_shape(tuple(shape), size)
        if (spec.dtype, spec.itemsize, spec.shape) != cls.encoded(tuple(shape)):
            raise FormatError(f"a leaf of kind {spec.kind} and shape {spec.shape} does not hold a tensor of {shape}")
        rest = {key: value for key, value in spec.attrs.items() if key in ("requires_grad", "parameter", STRIDES)}
        found = Spec(TensorProvider.kind, str(of), size, tuple(shape), rest)
        check_tensor(found)
        if overlaps_itself(found.shape, found.attrs.get(STRIDES, row_major_strides(found.shape))):
            raise FormatError(f"a leaf of kind {spec.kind} has elements that share memory")  # which may differ now
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
            # Concurrent workers must fill the same memory, and setdefault is atomic.
            self.__dict__.setdefault("_memory", torch.empty(self.spec.nbytes, dtype=torch.uint8, device=CPU))
            self._gathered = self.__dict__["_memory"]
        self._gathered[start : start + data.numel()].copy_(data)

    def done(self) -> torch.Tensor:
        data, self._gathered = self._gathered, None
        self.__dict__.pop("_memory", None)
        flat = torch.empty(self._tensor.value.numel(), dtype=self._tensor.value.dtype, device=CPU)
        if data is not None:
            self._decode(data, flat)
            self._tensor.load(0, flat.view(torch.uint8))
        return self._tensor.done()


def check_error_bound(method: str, exact: torch.Tensor, found: torch.Tensor, bound: torch.Tensor, floor: float) -> None:
    """Raises CaptureError unless every element is within the error bound."""
    error = (exact.double() - found.double()).abs_()
    alike = (exact == found) | (exact.isnan() & found.isnan())
    if not bool(((error <= bound.clamp(min=floor)) | alike).all()):
        raise CaptureError(f"saved as {method} an element would be further off than promised; did the state change?")


class CastProvider(LossyProvider):
    """A tensor saved as bfloat16, rounded to nearest even.

    The error is at most 2^-8 of the element, or 2^-133 where that is more. A tensor with a finite element that would
    round to infinity is saved without loss. NaN stays NaN, but its payload is lost.
    """

    kind: ClassVar[str] = "cast"
    method: ClassVar[str] = "bf16"
    bound: ClassVar[float] = 2.0**-8
    floor: ClassVar[float] = 2.0**-133

    @classmethod
    def encoded(cls, shape: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
        return torch_name(torch.bfloat16), 2, shape

    @classmethod
    def promise(cls, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"relative": cls.bound, "absolute": cls.floor}

    @classmethod
    def _suits(cls, elements: torch.Tensor) -> bool:
        if elements.dtype in (torch.float16, torch.bfloat16):
            return False  # as many bits as before: nothing is gained
        return bool((elements.to(torch.bfloat16).isfinite() == elements.isfinite()).all())

    def _encode(self, start: int, out: Buffer) -> None:
        words = out if out.data_ptr() % 2 == 0 else torch.empty_like(out)
        flat = words.view(torch.bfloat16)
        for at in range(0, flat.numel(), ELEMENTS_AT_ONCE):
            exact = self.elements(start // 2 + at, start // 2 + min(at + ELEMENTS_AT_ONCE, flat.numel()))
            rounded = exact.to(torch.bfloat16)
            check_error_bound(self.method, exact, rounded, exact.abs().double() * self.bound, self.floor)
            flat[at : at + exact.numel()].copy_(rounded)
        if words is not out:
            out.copy_(words)

    def _decode(self, data: Buffer, flat: torch.Tensor) -> None:
        flat.copy_(data.view(torch.bfloat16))


class QuantizedProvider(LossyProvider):
    """A tensor saved as one signed byte per element, and a float32 scale for each block of 256 elements.

    An element is ``code * scale``, and the scale is 1/127 of the block's largest magnitude. The error is at most 1/254
    of that magnitude plus half a unit in the last place of the tensor's dtype, or 1e-38 (6e-8 for float16) where that
    is more. A tensor with NaN, infinities, or values beyond float32 is saved without loss. (Block-wise absolute maxima
    are from Dettmers et al., arXiv 2110.02861; the codes here are linear.)
    """

    kind: ClassVar[str] = "quantized"
    method: ClassVar[str] = "int8"
    block: ClassVar[int] = 256
    bound: ClassVar[float] = (1 + 2.0**-12) / 254
    floor: ClassVar[float] = 1e-38

    @classmethod
    def encoded(cls, shape: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
        n = math.prod(shape)
        return "uint8", 1, (n + 4 * -(-n // cls.block),)

    @classmethod
    def promise(cls, dtype: torch.dtype) -> Mapping[str, Any]:
        # A restored element is rounded to the tensor's own dtype: by up to half a unit in the last place.
        bound = cls.bound + torch.finfo(dtype).eps / 2
        floor = max(cls.floor, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        return {"block": cls.block, "of_block_maximum": bound, "absolute": floor}

    @classmethod
    def _suits(cls, elements: torch.Tensor) -> bool:
        return bool(elements.abs().amax().double() <= torch.finfo(torch.float32).max)  # False also for NaN

    def _encode(self, start: int, out: Buffer) -> None:
        n = self._tensor.value.numel()
        stop = start + out.numel()
        if start < n:
            self._codes(start, out[: min(stop, n) - start])
        if stop > n:
            self._scales(max(start, n) - n, out[max(n - start, 0) :])

    def _codes(self, start: int, out: Buffer) -> None:
        block, n = self.block, self._tensor.value.numel()
        first = start // block * block
        for at in range(first, start + out.numel(), ELEMENTS_AT_ONCE):
            end = min(at + ELEMENTS_AT_ONCE, -(-(start + out.numel()) // block) * block, n)
            codes, _ = self._quantized(at, end)
            low, high = max(at, start), min(end, start + out.numel())
            out[low - start : high - start].copy_(codes[low - at : high - at].view(torch.uint8))

    def _scales(self, start: int, out: Buffer) -> None:
        """Write the bytes of the scales from offset ``start`` within the scales on into ``out``."""
        block, n, run = self.block, self._tensor.value.numel(), ELEMENTS_AT_ONCE // self.block
        first, last = start // 4, -(-(start + out.numel()) // 4)
        found = [
            self._quantized(at * block, min((at + run) * block, last * block, n), checked=False)[1]
            for at in range(first, last, run)
        ]
        scales = torch.cat(found).view(torch.uint8)
        out.copy_(scales[start - 4 * first :][: out.numel()])

    def _quantized(self, first: int, last: int, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of whole blocks, on the host; the last block may be shorter."""
        exact = self.elements(first, last).float()
        rows = torch.nn.functional.pad(exact, (0, -exact.numel() % self.block)).view(-1, self.block)
        most = rows.abs().amax(1, keepdim=True)
        scales = most / 127
        codes = torch.where(scales > 0, rows / scales, 0).round_().clamp_(-127, 127)
        if checked:
            promise, dtype = self.promise(self.value.dtype), self.value.dtype
            bound = most.double() * promise["of_block_maximum"]
            check_error_bound(self.method, rows, (codes * scales).to(dtype), bound, promise["absolute"])
        return codes.to(torch.int8).view(-1)[: exact.numel()].to(CPU), scales.view(-1).to(CPU)

    def _decode(self, data: Buffer, flat: torch.Tensor) -> None:
        n, block = flat.numel(), self.block
        scales = data[n:].clone().view(torch.float32)
        for at in range(0, n, ELEMENTS_AT_ONCE):
            codes = data[at : min(at + ELEMENTS_AT_ONCE, n)].view(torch.int8).float()
            padded = torch.nn.functional.pad(codes, (0, -codes.numel() % block)).view(-1, block)
            padded *= scales[at // block : at // block + len(padded), None]
            flat[at : at + codes.numel()].copy_(padded.view(-1)[: codes.numel()])


LOSSY_METHODS: Mapping[str, type[LossyProvider]] = {cls.method: cls for cls in (CastProvider, QuantizedProvider)}
"""The lossy methods by the name that policies and users write."""
