"""Ways to save a tensor with fewer bits: as bfloat16, or a byte for each element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tierstate.manifest.chunk import Buffer

from .dtypes import torch_name
from .lossy import RUN, LossyProvider, check
from .tensors import CPU


class CastProvider(LossyProvider):
    """A tensor saved as bfloat16, rounded to nearest even.

    The error is at most 2^-8 of the element, or 2^-133 where that is more. A tensor with a finite element that would
    round to infinity is saved as it is; NaN stays NaN, though not its payload.
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
            return False  # as many bits: nothing would be won
        return bool((elements.to(torch.bfloat16).isfinite() == elements.isfinite()).all())

    def _encode(self, start: int, out: Buffer) -> None:
        words = out if out.data_ptr() % 2 == 0 else torch.empty_like(out)
        flat = words.view(torch.bfloat16)
        for at in range(0, flat.numel(), RUN):
            exact = self.elements(start // 2 + at, start // 2 + min(at + RUN, flat.numel()))
            rounded = exact.to(torch.bfloat16)
            check(self.method, exact, rounded, exact.abs().double() * self.bound, self.floor)
            flat[at : at + exact.numel()].copy_(rounded)
        if words is not out:
            out.copy_(words)

    def _decode(self, data: Buffer, flat: torch.Tensor) -> None:
        flat.copy_(data.view(torch.bfloat16))


class QuantizedProvider(LossyProvider):
    """A tensor saved as a byte for each element, and a scale of four bytes for each block of 256.

    An element is ``code * scale``, with the scale a 127th of the block's largest magnitude: the error is at most a
    254th of that and half of the last place of the tensor's own type, or 1e-38 (6e-8 for float16) where that is more.
    A tensor with NaN, infinities, or more than float32 holds is saved as it is. (Block-wise absolute maxima are from
    Dettmers et al., arXiv 2110.02861; the codes here are linear.)
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
        # What comes back is rounded to the tensor's own type: by half of its last place.
        bound = cls.bound + torch.finfo(dtype).eps / 2
        floor = max(cls.floor, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        return {"block": cls.block, "of_block_maximum": bound, "absolute": floor}

    @classmethod
    def _suits(cls, elements: torch.Tensor) -> bool:
        return bool(elements.abs().amax().double() <= torch.finfo(torch.float32).max)  # false for NaN, too

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
        for at in range(first, start + out.numel(), RUN):
            end = min(at + RUN, -(-(start + out.numel()) // block) * block, n)
            codes, _ = self._quantized(at, end)
            low, high = max(at, start), min(end, start + out.numel())
            out[low - start : high - start].copy_(codes[low - at : high - at].view(torch.uint8))

    def _scales(self, start: int, out: Buffer) -> None:
        """Scales from byte ``start`` of them on."""
        block, n, run = self.block, self._tensor.value.numel(), RUN // self.block
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
            check(self.method, rows, (codes * scales).to(dtype), bound, promise["absolute"])
        return codes.to(torch.int8).view(-1)[: exact.numel()].to(CPU), scales.view(-1).to(CPU)

    def _decode(self, data: Buffer, flat: torch.Tensor) -> None:
        n, block = flat.numel(), self.block
        scales = data[n:].clone().view(torch.float32)
        for at in range(0, n, RUN):
            codes = data[at : min(at + RUN, n)].view(torch.int8).float()
            padded = torch.nn.functional.pad(codes, (0, -codes.numel() % block)).view(-1, block)
            padded *= scales[at // block : at // block + len(padded), None]
            flat[at : at + codes.numel()].copy_(padded.view(-1)[: codes.numel()])


METHODS: Mapping[str, type[LossyProvider]] = {cls.method: cls for cls in (CastProvider, QuantizedProvider)}
"""Ways to save a tensor with fewer bits, by the name that policies and users say."""
