"""Exact equality of two states: bit for bit, with types, order and shared memory."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import struct
import types
import zoneinfo
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit: types, order, dtypes, shapes, NaN payloads, -0.0 and shared memory."""
    return difference(one, other) == ""


def difference(one: Any, other: Any) -> str:
    """What tells two states apart; empty where nothing does."""
    found: tuple[list[Any], list[Any]] = ([], [])
    found_here = _difference(one, other, "state", found)
    if found_here:
        return found_here
    apart = [not any(both) for both in zip(*map(_near, found), strict=True)]
    together = [pair for pair, alone in zip(zip(*found, strict=True), apart, strict=True) if not alone]
    pairs = [pair for pair in together if not any(map(_repeats, pair))]
    alike = _sharing([a for a, _ in pairs]) == _sharing([b for _, b in pairs])
    return "" if alike else "other leaves share memory"


def _difference(one: Any, other: Any, at: str, found: tuple[list[Any], list[Any]]) -> str:
    if type(one) is not type(other):
        return f"{at}: {type(one)} and {type(other)}"
    if isinstance(one, (torch.Tensor, np.ndarray)):
        found[0].append(one)
        found[1].append(other)
        alike = _tensor(one) == _tensor(other) if isinstance(one, torch.Tensor) else _array(one) == _array(other)
        return "" if alike else f"{at}: {one} and {other}"
    if _own(one) != _own(other):
        return f"{at}: {one!r} and {other!r}"
    pairs = _items(one), _items(other)
    if pairs[0] is None or pairs[1] is None:
        return "" if _exact(one) == _exact(other) else f"{at}: {one!r} and {other!r}"
    if [_exact(k) for k, _ in pairs[0]] != [_exact(k) for k, _ in pairs[1]]:
        return f"{at}: keys {[k for k, _ in pairs[0]]} and {[k for k, _ in pairs[1]]}"
    together = zip(*pairs, strict=True)
    return next(filter(None, (_difference(a, b, f"{at}.{key}", found) for (key, a), (_, b) in together)), "")


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a container, each with its key; None for what is none."""
    if isinstance(value, dict):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return list(enumerate(value)) if isinstance(value, (list, tuple, deque)) else None


def leaves(value: Any) -> Iterator[Any]:
    """What is in the containers of a value, and in those in them."""
    items = _items(value)
    if items is None:
        yield value
    for _, item in items or ():
        yield from leaves(item)


def _own(value: Any) -> Any:
    """What a container has beside its items."""
    return getattr(value, "maxlen", None), getattr(value, "default_factory", None)


def _tensor(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.dtype, t.shape, t.requires_grad, bits(t))


def _array(a: np.ndarray) -> tuple[Any, ...]:
    cells = a.view(np.dtype((np.void, a.itemsize)))  # as a structure, NumPy would not copy the padding
    return (a.dtype, a.dtype.isalignedstruct, a.shape, cells.tobytes())


def _exact(value: Any) -> Any:
    """What two equal values have in common, type and bits."""
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(repr(_exact(item)) for item in value))
    if type(value) is tuple:
        return (tuple, *map(_exact, value))
    return (type(value), _content(value))


def _content(value: Any) -> Any:
    if isinstance(value, (decimal.Decimal, datetime.datetime, datetime.time, datetime.timezone, zoneinfo.ZoneInfo)):
        return repr(value)  # equal values may have other zones, signs, or payloads of a NaN
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return {name: _exact(item) for name, item in vars(value).items()}
    if isinstance(value, slice):
        return tuple(map(_exact, (value.start, value.stop, value.step)))
    if type(value) in (float, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, (str, np.bytes_)):  # NumPy's own == takes "a" for "a\0"
        return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()[: 10 if isinstance(value, np.longdouble) else None]
    return value


def _repeats(leaf: Any) -> bool:
    """Whether elements share memory: alone, such a tensor is saved with memory for each element."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_contiguous():
        return False
    return len(np.unique(positions(leaf))) < leaf.numel() * leaf.element_size()


def _near(found: list[Any]) -> list[bool]:
    """Of each leaf, whether the addresses from its first to its last byte reach into those of another one."""
    ranges = sorted((*_range(leaf), i) for i, leaf in enumerate(found))
    near, end, last = [False] * len(found), 0, 0
    for low, high, i in ranges:
        if low < end and low < high:
            near[i] = near[last] = True
        if high > end:
            end, last = high, i
    return near


def _range(leaf: Any) -> tuple[int, int]:
    """The addresses of a leaf's first byte and behind its last one; equal if it is empty."""
    if 0 in leaf.shape:
        return 0, 0
    if isinstance(leaf, np.ndarray):
        low, size, strides = leaf.__array_interface__["data"][0], leaf.itemsize, leaf.strides
    else:
        low, size = leaf.data_ptr(), leaf.element_size()
        strides = tuple(stride * size for stride in leaf.stride())
    reach = [(n - 1) * stride for n, stride in zip(leaf.shape, strides, strict=True)]
    return low + sum(min(0, n) for n in reach), low + sum(max(0, n) for n in reach) + size


def _sharing(found: list[Any]) -> list[int]:
    """For each byte of all leaves, the first byte that lies at the same address."""
    addresses: list[np.ndarray] = [np.zeros(0, np.int64)]
    for leaf in found:
        if isinstance(leaf, torch.Tensor):
            addresses.append(positions(leaf) + leaf.untyped_storage().data_ptr())
        elif leaf.nbytes:
            addresses.append(leaf.__array_interface__["data"][0] + np.arange(leaf.nbytes))
    _, first, inverse = np.unique(np.concatenate(addresses), return_index=True, return_inverse=True)
    return first[inverse].tolist()


def raw(storage: torch.UntypedStorage) -> np.ndarray:
    """The bytes of a storage, without a copy."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def positions(tensor: torch.Tensor) -> np.ndarray:
    """``(numel * itemsize,)``: where each byte of the row-major order lies in the tensor's storage."""
    size = tensor.element_size()
    index = np.full((), tensor.storage_offset() * size, dtype=np.int64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index[..., None] + np.arange(n) * stride * size
    return (index[..., None] + np.arange(size)).reshape(-1)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order, with lazy conjugates and negatives applied to the sign bits."""
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    whole = slice(start, start + tensor.numel() * size) if tensor.is_contiguous() else positions(tensor)
    found = raw(tensor.untyped_storage())[whole].copy()
    part = tensor.element_size() // (2 if tensor.is_complex() else 1)
    signs = found.reshape(-1, part)[:, -1]
    if tensor.is_conj():
        signs[1::2] ^= 0x80
    if tensor.is_neg():
        signs ^= 0x80
    return found.tobytes()
