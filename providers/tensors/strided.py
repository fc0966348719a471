"""The bytes of a strided tensor in row-major order: gathered from and scattered to its memory, bit for bit.

Used by `TensorProvider`, for any strides, dtype and device, also for lazy conjugates and negatives.
Elements are copied as integers and without autograd, so that NaN payloads and -0.0 stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from tierstate.manifest.boxes import Box, row_major_runs
from tierstate.manifest.chunk import Buffer

from .devices import CPU, copies_beside

INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by width in bytes. A copy of integers is exact; a copy of floats may turn a signalling NaN quiet."""


class Strided:
    """A tensor's elements as one sequence of bytes in row-major order, for any strides, dtype and device.

    Nothing here goes through autograd: views are made of the storage, or of the detached tensor.

    Attributes:
        itemsize: bytes per element.
        on_host: the tensor is in host memory.
        dense: the tensor is contiguous, so that its memory is these bytes.
        direct: `write` can write any range in place. Otherwise the caller collects all bytes and calls `write_all`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # has this memory also when the caller's tensor is given another
        self.device, self.itemsize, self.nbytes = tensor.device, tensor.itemsize, tensor.nbytes
        self.on_host = tensor.is_cpu
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()
        self.dense = tensor.is_contiguous() and not (self._conj or self._neg)

    # Asked for only where a tensor is not dense: a state may have tens of thousands that are.

    @cached_property
    def direct(self) -> bool:
        return self.dense or not (self._conj or self._neg or overlaps_itself(self._shape, self._strides))

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return self._tensor.stride()

    @cached_property
    def _pairs(self) -> int:
        return 2 if self._tensor.is_complex() else 1

    @property
    def _unit(self) -> int:
        return self.itemsize // self._pairs

    @property
    def storage_address(self) -> int:
        """Where the tensor's storage begins; 0 for an empty one."""
        return self._tensor.untyped_storage().data_ptr()

    def read(self, start: int, out: Buffer) -> None:
        """Copy the bytes ``start : start + len(out)`` of whole elements into ``out``, on any device and at any address.

        From or to CUDA the copy is only queued on the current stream; ``out`` may be pinned.
        """
        wait_not = copies_beside(self.device)
        if self.dense:
            out.copy_(self.bytes()[start : start + out.numel()], non_blocking=wait_not)
            return
        first, last = start // self.itemsize, (start + out.numel()) // self.itemsize
        if _aligned(out, self._unit) and (out.device == self.device or not (self._conj or self._neg)):
            self._gather(first, last, out)
            return
        gathered = torch.empty(out.numel(), dtype=torch.uint8, device=self.device)
        self._gather(first, last, gathered)
        out.copy_(gathered, non_blocking=wait_not)

    def write(self, start: int, data: Buffer) -> None:
        """Copy ``data`` to the bytes from ``start`` on; any range. Only where `direct`.

        To CUDA the copy may be only queued on the current stream.
        """
        if self.dense:
            beside = copies_beside(self.device) and data.device == CPU
            self.bytes()[start : start + data.numel()].copy_(data, non_blocking=beside)
        else:
            size, stop = self.itemsize, start + data.numel()
            head, tail = min(-(-start // size) * size, stop), max(stop // size * size, start)
            if head > tail:  # the range is within one element
                self._scatter_bytes(start, data)
            else:
                self._scatter_bytes(start, data[: head - start])
                self._scatter(head // size, tail // size, data[head - start : tail - start])
                self._scatter_bytes(tail, data[tail - start :])

    def write_box(self, at: Box, data: Buffer, part: Box) -> None:
        """Copy a box of the elements. Only where `direct`; to CUDA the copy may be only queued on the current stream.

        Args:
            at: the box whose elements are in ``data``, in row-major order; it may reach beyond the tensor.
            part: the box of elements to copy, inside ``at`` and inside the tensor.
        """
        if self.device != data.device == CPU:
            # Since a copy between strides needs both on the device.
            data = data.to(self.device, non_blocking=copies_beside(self.device))
        copy_box(
            self._words(), at, (data if _aligned(data, self._unit) else data.clone()).view(INT_DTYPES[self._unit]), part
        )

    def as_elements(self, data: Buffer) -> torch.Tensor:
        """A buffer for `write_all`, viewed as elements, into which `copy_box` can copy."""
        return data.view(INT_DTYPES[self._unit]).view(self._shape + self._tail)

    def write_all(self, data: Buffer) -> bool:
        """Write all bytes at once through strides that overlap, or a lazy conjugate or negative.

        Returns:
            Whether the data agrees, bit for bit, wherever elements share memory; if not, nothing was written.
        """
        values = data.to(self.device).view(INT_DTYPES[self._unit])
        self._flip(values)
        if not overlaps_itself(self._shape, self._strides):
            self._words().copy_(values.view(self._shape + self._tail))
            return True
        index = torch.zeros(self._shape, dtype=torch.int64, device=self.device)
        for dim, (n, stride) in enumerate(zip(self._shape, self._strides, strict=True)):
            steps = torch.arange(n, device=self.device) * stride
            index += steps.view(-1, *(1 for _ in self._shape[dim + 1 :]))
        index = index.view(-1)
        if self._pairs == 2:
            index = torch.stack((2 * index, 2 * index + 1), -1).view(-1)
        memory = self._view(self._unit, (int(index.max()) + 1,), (1,))
        trial = memory.clone()
        trial[index] = values
        agrees = torch.equal(trial[index], values)
        if agrees:
            memory.copy_(trial)
        return agrees

    def as_stored(self, data: Buffer) -> Buffer:
        """All bytes in row-major order, as they are in memory: with the conjugate or negative that is pending here."""
        if not (self._conj or self._neg):
            return data
        values = data.to(self.device, copy=True).view(INT_DTYPES[self._unit])
        self._flip(values)
        return values.view(torch.uint8)

    @property
    def _tail(self) -> tuple[int, ...]:
        return (2,) if self._pairs == 2 else ()

    def _view(self, unit: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        offset = self._tensor.storage_offset() * self.itemsize
        with torch.inference_mode(False):  # threads that are in no such mode may write to it
            memory = torch.empty(0, dtype=INT_DTYPES[unit], device=self.device)
            return memory.set_(self._tensor.untyped_storage(), offset // unit, shape, strides)

    def bytes(self) -> Buffer:
        """All bytes as they lie in memory. Only where `dense`."""
        # A view of a single element has any stride, and one that is an inference tensor cannot be written to elsewhere.
        odd = self.nbytes <= self.itemsize or self._tensor.is_inference()
        if odd or torch.is_inference_mode_enabled():
            return self._view(1, (self.nbytes,), (1,))
        flat = self._tensor if self._tensor.dim() == 1 else self._tensor.view(-1)  # a view takes a microsecond
        return flat.view(torch.uint8)

    def _words(self) -> torch.Tensor:
        strides = tuple(s * self._pairs for s in self._strides)
        return self._view(self._unit, self._shape + self._tail, strides + ((1,) if self._tail else ()))

    def _gather(self, first: int, last: int, out: Buffer) -> None:
        flat, words = out.view(INT_DTYPES[self._unit]), self._words()
        for at, box in row_major_runs(self._shape, first, last):
            source = words[box.slices()]
            begin = (at - first) * self._pairs
            target = flat[begin : begin + source.numel()].view(source.shape)
            target.copy_(source, non_blocking=copies_beside(self.device))
        self._flip(flat)

    def _scatter(self, first: int, last: int, data: Buffer) -> None:
        flat = (data if _aligned(data, self._unit) else data.clone()).view(INT_DTYPES[self._unit])
        words = self._words()
        for at, box in row_major_runs(self._shape, first, last):
            target = words[box.slices()]
            begin = (at - first) * self._pairs
            target.copy_(flat[begin : begin + target.numel()].view(target.shape))

    def _scatter_bytes(self, start: int, data: Buffer) -> None:
        shape, strides = (*self._shape, self.itemsize), (*(s * self.itemsize for s in self._strides), 1)
        memory = self._view(1, shape, strides)
        for at, box in row_major_runs(shape, start, start + data.numel()):
            target = memory[box.slices()]
            target.copy_(data[at - start : at - start + target.numel()].view(target.shape))

    def _flip(self, flat: torch.Tensor) -> None:
        """Apply a pending conjugate or negative: signs are bits, so that NaN payloads stay."""
        if self._conj or self._neg:
            sign = torch.iinfo(flat.dtype).min
            if self._conj:
                flat.view(-1, 2)[:, 1].bitwise_xor_(sign)
            if self._neg:
                flat.bitwise_xor_(sign)


def copy_box(words: torch.Tensor, at: Box, data: torch.Tensor, part: Box) -> None:
    """Copy a box of elements that are viewed as integers, or as pairs of integers.

    Args:
        words: the target.
        at: the box whose elements are in ``data``, in indices of ``words``; it may reach beyond it.
        part: the box of elements to copy, inside both.
    """
    source = data.view(at.shape + words.shape[len(at.shape) :])
    words[part.slices()].copy_(source[part.slices(at.offset)])


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def storage_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last one of a tensor in memory, gaps included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements may share memory: exact for expanded and sliced tensors; may be True without need for
    unusual strides.
    """
    if 0 in shape:
        return False
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def _aligned(buffer: Buffer, unit: int) -> bool:
    return buffer.data_ptr() % unit == 0 and buffer.storage_offset() % unit == 0 and buffer.numel() % unit == 0
