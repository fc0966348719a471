"""Element types by name: torch and NumPy dtypes as text or JSON in a manifest, and back.

A name may be untrusted: it is checked against a pattern or a table, and never evaluated.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import torch

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import MAX_LEAF_ITEMSIZE

_NAMED: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}


QUANTIZED_DTYPES = {name: dtype for name, dtype in _NAMED.items() if name.startswith(("qint", "quint"))}
"""Quantized dtypes, by name: a value of a state may be one, and no saved tensor has one."""


TORCH_DTYPES = {name: dtype for name, dtype in _NAMED.items() if name not in QUANTIZED_DTYPES}
"""Every other dtype of the running torch, by name. The bytes of quantized ones mean nothing without scales."""


_PLAIN = re.compile(r"[<>|][biufcmMSUV]\d{1,6}(\[\d{0,9}(generic|[a-zA-Zμ]{1,2})\])?")


_MAX_DEPTH = 32
"""How deep structured dtypes may be nested."""


@cache
def torch_name(dtype: torch.dtype) -> str:
    """The dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: object) -> torch.dtype:
    """The dtype of that name, of a tensor.

    Raises:
        FormatError: this torch has no such dtype, or tensors of it are not saved.
    """
    found = TORCH_DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError(f"dtype {name!r:.40} is not known to torch {torch.__version__}")
    return found


def numpy_name(dtype: np.dtype[Any]) -> Any:
    """The dtype as JSON: its ``str``; a dict of fields if it is structured; base and shape if it is a subarray.

    Raises:
        CaptureError: it holds objects, or it cannot be rebuilt exactly from its description.
    """
    described = _describe(dtype)
    if dtype.itemsize > MAX_LEAF_ITEMSIZE:
        raise CaptureError(f"elements of {dtype.itemsize} bytes are too long; at most {MAX_LEAF_ITEMSIZE} can be saved")
    try:
        again = numpy_dtype(described)
    except FormatError:
        again = None
    if again != dtype or (again.type is not dtype.type and dtype.char not in "qQ"):
        raise CaptureError(f"NumPy dtype {dtype} cannot be saved exactly; view it as a plain dtype of the same size")
    return described


def _describe(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        raise CaptureError(
            f"an array of dtype {dtype} has no elements of fixed length (they are Python objects, or text); "
            "convert it, as by astype()"
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.names is None or dtype.fields is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_describe(field[0]) for field in fields],
        "offsets": [int(field[1]) for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def numpy_dtype(described: Any) -> np.dtype[Any]:
    """The inverse of `numpy_name`, safe with JSON from an untrusted source.

    Raises:
        FormatError: it does not describe a dtype, or describes one that could hold objects.
    """
    try:
        return _parse(described, 0)
    except (ValueError, TypeError, OverflowError, KeyError, SyntaxError, MemoryError) as error:
        raise FormatError(f"{described!r:.80} is no NumPy dtype: {error}") from error


def _parse(described: Any, depth: int) -> np.dtype[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(described, str):
        if not _PLAIN.fullmatch(described):
            raise ValueError("no known kind of element")
        return np.dtype(described)
    if not isinstance(described, dict):
        raise TypeError("neither text nor an object")
    if "base" in described:
        shape = _numbers(described["shape"])
        return np.dtype((_parse(described["base"], depth + 1), tuple(shape)))
    names = described["names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("names are not texts")
    formats = [_parse(item, depth + 1) for item in described["formats"]]
    offsets, (itemsize,) = _numbers(described["offsets"]), _numbers([described["itemsize"]])
    aligned = described["aligned"] is True
    layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    return np.dtype(layout, align=aligned)  # type: ignore[call-overload,no-any-return]


def _numbers(items: Any) -> list[int]:
    if not isinstance(items, list) or not all(type(n) is int and 0 <= n <= MAX_LEAF_ITEMSIZE for n in items):
        raise ValueError(f"{items!r:.40} are not small numbers")
    return items
