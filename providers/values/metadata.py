"""The metadata of a save as JSON values: for people, for retention, and for readers in other languages."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
import re
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tierstate.manifest.arguments import short_repr
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf_path import MAX_INT_BITS

_MAX_DEPTH = 50


_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


_HINTS: tuple[tuple[Any, str], ...] = (
    ((set, frozenset), "sorted(value)"),
    ((bytes, bytearray), "value.hex()"),
    (datetime.timedelta, "value.total_seconds()"),
    (torch.Tensor, "value.tolist(), or float(value) for a single element"),
    (np.ndarray, "value.tolist()"),
    (object, "float(value) for a number, or str(value)"),
)
"""Type -> what the user is to write in place of such a value."""


def json_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metadata as values that JSON has.

    Scalars of NumPy and torch become Python's numbers; Enums their values; dataclasses and mappings objects; tuples and
    deques lists; paths, UUIDs, dtypes and devices text; dates and times text of ISO 8601.

    Raises:
        CaptureError: a value has no such form; the message names it, and what to write.
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise CaptureError(f"metadata: {short_repr(metadata):.60} is no mapping; write names and values, as in a dict")
    return _object(dict(metadata or {}).items(), "metadata", 0)


def _json(value: Any, at: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CaptureError(f"{at:.80}: metadata are nested deeper than {_MAX_DEPTH}, or hold themselves")
    if isinstance(value, enum.Enum):
        return _json(value.value, at, depth + 1)
    if isinstance(value, Mapping):
        return _object(tuple(value.items()), at, depth + 1)  # at one moment: another thread may change it meanwhile
    if isinstance(value, (list, tuple, deque)):
        return [_json(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(tuple(value))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return _object(fields, at, depth + 1)
    return _scalar(value, at)


def _object(items: Any, at: str, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in items:
        name = _key(key, at)
        if name in found:
            raise CaptureError(f"{at}: two keys are {name!r:.60} in JSON; give them different names")
        found[name] = _json(item, f"{at}[{short_repr(key):.60}]", depth)
    return found


def _key(key: Any, at: str) -> str:
    key = _scalar(key.value if isinstance(key, enum.Enum) else key, f"{at}: the key {short_repr(key):.60}")
    if isinstance(key, str):
        return key
    return {True: "true", False: "false"}[key] if isinstance(key, bool) else "null" if key is None else repr(key)


def _scalar(value: Any, at: str) -> Any:
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 and value.dtype.kind in "biufU":
        value = value.item()
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():
        value = value.item()
    _check_faithful(value, at)
    for kind in (bool, int, float, str):  # subclasses of these too, as the same number or text
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if value is None:
        return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (pathlib.PurePath, uuid.UUID, torch.dtype, torch.device, np.dtype)):
        return str(value)
    hint = next(hint for kind, hint in _HINTS if isinstance(value, kind))
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CaptureError(f"{at}: a {kind_name} is not a JSON value; write {hint}")


def _check_faithful(value: Any, at: str) -> None:
    """Refuse what JSON would not give back: too long ints, and two surrogates, of which it makes one character."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise CaptureError(f"{at}: an int of {value.bit_length()} bits is too long for JSON; write hex(value)")
    if isinstance(value, str) and _PAIR.search(value):
        raise CaptureError(f"{at}: JSON makes one character of two surrogates; write repr(value)")
