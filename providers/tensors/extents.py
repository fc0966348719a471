"""Where values lie in memory, and which of them share bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .strided import overlaps_itself

MAX_EXACT = 256
"""Largest group of values whose pairs are compared; in a larger one all values whose extents overlap count as sharing
bytes."""


_MAX_WORK = 10_000
"""Steps of NumPy's overlap solver, after which two values count as overlapping. Taking values for overlapping that are
not is never wrong; it only costs more bytes."""


class Extent(NamedTuple):
    """Where a value's elements are: addresses and strides in bytes, without dimensions of one element."""

    lo: int
    hi: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    item: Any

    @classmethod
    def of_tensor(cls, value: torch.Tensor, item: Any) -> Extent:
        """The extent of a strided tensor that has elements; ``item`` is whatever it is the extent of."""
        size, first = value.element_size(), value.data_ptr()
        if value.is_contiguous():
            nbytes = value.numel() * size
            return cls(first, first + nbytes, first, (nbytes // size,), (size,), size, item)
        dims = [(n, stride * size) for n, stride in zip(value.shape, value.stride(), strict=True) if n > 1]
        hi = first + sum((n - 1) * stride for n, stride in dims) + size
        return cls(first, hi, first, tuple(n for n, _ in dims), tuple(stride for _, stride in dims), size, item)

    @classmethod
    def of_array(cls, value: np.ndarray[Any, Any], item: Any) -> Extent:
        """The extent of an array that has bytes."""
        size, first = value.itemsize, value.ctypes.data
        dims = [(n, stride) for n, stride in zip(value.shape, value.strides, strict=True) if n > 1]
        lo = first + sum((n - 1) * stride for n, stride in dims if stride < 0)
        hi = first + sum((n - 1) * stride for n, stride in dims if stride > 0) + size
        return cls(lo, hi, first, tuple(n for n, _ in dims), tuple(stride for _, stride in dims), size, item)

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share memory."""
        return overlaps_itself((*self.shape, self.itemsize), (*map(abs, self.strides), 1))

    def elements(self, memory: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
        """The value's bytes ``(*shape, itemsize)``, as a view of memory whose first byte has the address ``start``."""
        shape, strides = (*self.shape, self.itemsize), (*self.strides, 1)
        return np.ndarray(shape, np.uint8, memory, self.first - start, strides)

    def shares_memory(self, other: Extent) -> bool:
        """Whether the two share bytes; True also where this takes too long to find out."""
        if self.lo >= other.hi or other.lo >= self.hi:
            return False
        try:
            memories = np.asarray(_Address(self)), np.asarray(_Address(other))
            return np.shares_memory(*memories, max_work=_MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


class _Address:
    """Memory in the form that NumPy's overlap solver needs. It is never read, so a device's address works too."""

    def __init__(self, extent: Extent) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (extent.first, False),
            "typestr": f"|V{extent.itemsize}",
            "shape": extent.shape,
            "strides": extent.strides,
        }


def overlapping_runs(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Groups of values whose extents overlap, directly or through others, in order of their first byte."""
    run: list[Extent] = []
    end = 0
    for extent in sorted(extents, key=lambda extent: extent.lo):
        if run and extent.lo >= end:
            yield run
            run = []
        run.append(extent)
        end = max(end, extent.hi)
    if run:
        yield run


def sharing_groups(run: list[Extent]) -> list[list[Extent]]:
    """The subsets of a run that really share bytes: columns of a matrix do not, though their extents overlap."""
    if len(run) > MAX_EXACT:
        return [run]
    groups: list[list[Extent]] = []
    for extent in run:
        apart, merged = [], [extent]
        for group in groups:
            if any(extent.shares_memory(other) for other in group):
                merged += group
            else:
                apart.append(group)
        groups = [*apart, merged]
    return groups
