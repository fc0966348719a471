"""Differences: by how much the elements of two runs of bytes differ, as their type has it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.columns import Array
from tierstate.manifest.diff import Numbers
from tierstate.manifest.leaf import Spec

_BLOCK = 1 << 16
"""Elements that are looked at together: what is computed of them stays in the cache."""

_NATIVE = {
    **{f"int{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)},
    "bool": "|b1", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
_BY_TORCH = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""Types that NumPy does not have, each of whose values float32 has too."""

_ARRAYS = {"f": (2, 4, 8), "c": (8, 16), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "b": (1,)}

Values = Callable[[Array], Array]
"""Elements as numbers, of their bytes."""


def values_of(spec: Spec) -> Values | None:
    """How a leaf's bytes are read as float64, complex128, or integers as they are; None where they are no numbers."""
    if spec.kind == "array":
        return _of_numpy(spec.dtype) if isinstance(spec.dtype, str) and "fields" not in spec.attrs else None
    if spec.kind != "tensor":
        return None
    if spec.dtype in _NATIVE:
        return _of_numpy(_NATIVE[spec.dtype])
    if spec.dtype == "complex32":
        return lambda raw: raw.view("<f2").astype("f8").view("c16")
    if spec.dtype in _BY_TORCH and hasattr(torch, spec.dtype):
        dtype = getattr(torch, spec.dtype)
        return lambda raw: torch.from_numpy(raw).view(dtype).to(torch.float32).numpy().astype("f8")
    return None


def _of_numpy(name: str) -> Values | None:
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    if dtype.itemsize not in _ARRAYS.get(dtype.kind, ()):
        return None
    wide: Any = {"f": "f8", "c": "c16"}.get(dtype.kind)
    if dtype.kind == "b":
        return lambda raw: (raw != 0).view("u1")  # any byte but 0 is true
    if wide is None:
        return lambda raw: raw.view(dtype).astype(dtype.newbyteorder("="))
    return lambda raw: raw.view(dtype).astype(wide)


class _Part(NamedTuple):
    """What some elements come to: those that changed, and of their differences the largest and the scaled squares."""

    changed: int
    largest: int | float = 0
    squares: float = 0.0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)


class Tally:
    """The differences of one leaf, part by part, from several threads at once.

    Args:
        spec: what the leaf is, in both versions.
    """

    def __init__(self, spec: Spec) -> None:
        self._values = values_of(spec)
        self._itemsize = spec.itemsize if self._values else 1
        self._elements = spec.nbytes // self._itemsize
        self._lock = threading.Lock()
        self._all = _Part(0)

    def add(self, old: Buffer, new: Buffer) -> None:
        """Compare the same elements in both versions."""
        one, other = (np.frombuffer(view(b), np.uint8).reshape(-1, self._itemsize) for b in (old, new))
        for at in range(0, len(one), _BLOCK):
            part = self._compare(one[at : at + _BLOCK], other[at : at + _BLOCK])
            with self._lock:
                self._all = _joined(part, self._all)  # in this order, so that zero is of the type's own kind

    def numbers(self) -> Numbers:
        """What all of it comes to; elements that were not added count as the same."""
        found = self._all
        if self._values is None:
            return Numbers(self._elements, found.changed)
        mean = found.squares / self._elements if self._elements else 0.0
        rms = float(found.largest) * math.sqrt(mean) if found.largest else 0.0
        return Numbers(self._elements, found.changed, found.largest, rms, found.nan, found.inf)

    def _compare(self, one: Array, other: Array) -> _Part:
        x, y = _units(one), _units(other)
        hit = x != y if x.ndim == 1 else (x != y).any(axis=1)
        count = int(np.count_nonzero(hit))
        if not count or self._values is None:
            return _Part(count)
        if count < len(hit):
            x, y = x[hit], y[hit]
        with np.errstate(all="ignore"):  # a NaN's conversion, and the difference of huge numbers, are not amiss here
            return _differences(*(self._values(v.reshape(-1).view(np.uint8)) for v in (x, y)))


def _units(raw: Array) -> Array:
    """Elements as unsigned integers, in two columns where they are longer than any."""
    size = raw.shape[1]
    return raw.view(f"<u{size}").reshape(-1) if size <= 8 else raw.view("<u8")


def _differences(x: Array, y: Array) -> _Part:
    if x.dtype.kind in "iu":
        # In unsigned arithmetic the difference of the larger and the smaller is exact for every pair.
        exact = np.maximum(x, y).astype("u8") - np.minimum(x, y).astype("u8")
        return _Part(len(x), int(exact.max()), _squares(exact.astype("f8")))
    both = np.isfinite(x) & np.isfinite(y)
    if both.all():
        apart = _modulus(x - y)
        return _Part(len(x), float(apart.max()), _squares(apart))
    apart = _modulus(x[both] - y[both])
    nan, inf = (tuple(int(np.count_nonzero(is_so(v))) for v in (x, y)) for is_so in (np.isnan, np.isinf))
    largest = float(apart.max()) if len(apart) else 0.0
    return _Part(len(x), largest, _squares(apart), (nan[0], nan[1]), (inf[0], inf[1]))


def _modulus(found: Array) -> Array:
    # NumPy's own, of complex numbers, is off by more than rounding.
    return np.hypot(found.real, found.imag) if found.dtype.kind == "c" else np.abs(found)


def _squares(apart: Array) -> float:
    """The sum of squares in units of the largest one's: huge ones do not overflow, tiny ones do not vanish."""
    top = apart.max() if len(apart) else 0.0
    return float(np.square(apart / top).sum()) if 0 < top < math.inf else float(top > 0)


def _joined(one: _Part, other: _Part) -> _Part:
    largest = max(one.largest, other.largest)
    squares = sum(p.squares * _share(p.largest, largest) ** 2 for p in (one, other))
    nan, inf = ((a[0] + b[0], a[1] + b[1]) for a, b in ((one.nan, other.nan), (one.inf, other.inf)))
    return _Part(one.changed + other.changed, largest, squares, nan, inf)


def _share(part: float, whole: float) -> float:
    if part == whole:
        return 1.0
    return 0.0 if math.isinf(whole) else part / whole
