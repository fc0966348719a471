"""Values of the standard library's types, and dtypes, as parts that are plain values, and back again.

The parts may come from an untrusted source: each is checked before a value is made of it. Nothing is imported, but for
the data of a time zone by the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import pathlib
import re
import types
import uuid
import zoneinfo
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.providers.tensors.dtypes import numpy_dtype, numpy_name

from .classes import FACTORIES, factory_name

_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,3}")


_MAX_FRACTION_BITS = 1 << 14
"""The most bits of a fraction's numerator and denominator: to reduce a fraction takes the square of their number."""


class Builder(NamedTuple):
    """How a value is made again: of so many parts, by this function."""

    parts: int
    build: Callable[..., Any]


Parts: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""A value -> its parts."""


def _needs(right: bool, what: str) -> None:
    if not right:
        raise FormatError(f"an encoded {what} has parts that it cannot have")


def _time(hour: int, minute: int, second: int, microsecond: int, fold: int, zone: Any) -> datetime.time:
    _needs({*map(type, (hour, minute, second, microsecond, fold))} == {int}, "time")
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


def _datetime(date: Any, time: Any) -> datetime.datetime:
    _needs((type(date), type(time)) == (datetime.date, datetime.time), "datetime")
    return datetime.datetime.combine(date, time)


def _date(year: int, month: int, day: int) -> datetime.date:
    _needs({type(year), type(month), type(day)} == {int}, "date")
    return datetime.date(year, month, day)


def _timedelta(days: int, seconds: int, microseconds: int) -> datetime.timedelta:
    _needs({type(days), type(seconds), type(microseconds)} == {int}, "timedelta")
    return datetime.timedelta(days, seconds, microseconds)


def _timezone(offset: Any, name: Any) -> datetime.timezone:
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _parts_of_timezone(zone: datetime.timezone) -> tuple[Any, ...]:
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return offset, name[0] if name else None


def _zone_info(key: Any) -> zoneinfo.ZoneInfo:
    _needs(isinstance(key, str) and bool(_ZONE.fullmatch(key)), "time zone")
    return zoneinfo.ZoneInfo(key)


def _parts_of_zone_info(zone: zoneinfo.ZoneInfo) -> tuple[Any, ...]:
    key: Any = zone.key
    if not isinstance(key, str) or not _ZONE.fullmatch(key):
        raise CaptureError("a ZoneInfo that was read from a file has no name; use one from zoneinfo.ZoneInfo(name)")
    return (key,)


_EXACT = decimal.Context(capitals=1)
"""What writes a decimal in one way only: `str` writes the exponent as the context of the thread says."""


def _decimal(text: Any) -> decimal.Decimal:
    _needs(type(text) is str, "decimal")
    found = decimal.Decimal(text)
    _needs(_EXACT.to_sci_string(found) == text, "decimal")
    return found


def _fraction(numerator: Any, denominator: Any) -> fractions.Fraction:
    _needs(type(numerator) is int and type(denominator) is int, "fraction")
    _needs(max(numerator.bit_length(), denominator.bit_length()) <= _MAX_FRACTION_BITS, "fraction")
    return fractions.Fraction(numerator, denominator)


def _parts_of_fraction(value: fractions.Fraction) -> tuple[int, int]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_FRACTION_BITS:
        raise CaptureError(f"a fraction of more than {_MAX_FRACTION_BITS} bits cannot be saved; save its two numbers")
    return value.numerator, value.denominator


def _uuid(data: Any, safe: Any) -> uuid.UUID:
    _needs(type(data) is bytes, "UUID")
    return uuid.UUID(bytes=data, is_safe=uuid.SafeUUID(safe))


def _path(kind: type[pathlib.PurePath]) -> Callable[[Any], pathlib.PurePath]:
    def make(text: Any) -> pathlib.PurePath:
        _needs(type(text) is str, "path")
        return kind(text)

    return make


def _deque(items: Any, maxlen: Any) -> deque[Any]:
    _needs(type(items) is list and (maxlen is None or (type(maxlen) is int and len(items) <= maxlen)), "deque")
    return deque(items, maxlen)


def _defaultdict(name: Any, items: Any) -> defaultdict[Any, Any]:
    _needs(type(items) is dict and (name is None or (isinstance(name, str) and name in FACTORIES)), "defaultdict")
    return defaultdict(None if name is None else FACTORIES[name], items)


def _namespace(kind: type) -> Callable[[Any], Any]:
    def make(attributes: Any) -> Any:
        _needs(type(attributes) is dict and all(type(name) is str for name in attributes), "namespace")
        made = kind()
        vars(made).update(attributes)
        return made

    return make


def _dtype(described: Any) -> np.dtype[Any]:
    return np.dtype(described) if described in ("q", "Q") else numpy_dtype(described)


def _parts_of_dtype(dtype: np.dtype[Any]) -> tuple[Any]:
    if dtype.metadata is not None:
        raise CaptureError(f"the NumPy dtype {dtype} has metadata, which cannot be saved")
    return (dtype.char if dtype.char in "qQ" else numpy_name(dtype),)


def _named(kind: type) -> dict[str, Any]:
    """The objects of torch of this type, which exist once each, by name."""
    return {name: found for name, found in vars(torch).items() if type(found) is kind and str(found) == f"torch.{name}"}


def _constant(found: dict[str, Any]) -> Callable[[Any], Any]:
    def find(name: Any) -> Any:
        _needs(isinstance(name, str) and name in found, "torch constant")
        return found[name]

    return find


def _parts_of_constant(value: object) -> tuple[str]:
    return (str(value).removeprefix("torch."),)


_TYPES: dict[str, tuple[type, Parts, Builder]] = {
    "date": (datetime.date, lambda v: (v.year, v.month, v.day), Builder(3, _date)),
    "time": (
        datetime.time,
        lambda v: (v.hour, v.minute, v.second, v.microsecond, v.fold, v.tzinfo),
        Builder(6, _time),
    ),
    "datetime": (datetime.datetime, lambda v: (v.date(), v.timetz()), Builder(2, _datetime)),
    "timedelta": (datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds), Builder(3, _timedelta)),
    "timezone": (datetime.timezone, _parts_of_timezone, Builder(2, _timezone)),
    "zone": (zoneinfo.ZoneInfo, _parts_of_zone_info, Builder(1, _zone_info)),
    "decimal": (decimal.Decimal, lambda v: (_EXACT.to_sci_string(v),), Builder(1, _decimal)),
    "fraction": (fractions.Fraction, _parts_of_fraction, Builder(2, _fraction)),
    "uuid": (uuid.UUID, lambda v: (v.bytes, v.is_safe.value), Builder(2, _uuid)),
    "slice": (slice, lambda v: (v.start, v.stop, v.step), Builder(3, slice)),
    "ellipsis": (type(...), lambda v: (), Builder(0, lambda: ...)),
    "deque": (deque, lambda v: (list(v), v.maxlen), Builder(2, _deque)),
    "defaultdict": (defaultdict, lambda v: (factory_name(v.default_factory), dict(v)), Builder(2, _defaultdict)),
    "argparse.Namespace": (argparse.Namespace, lambda v: (dict(vars(v)),), Builder(1, _namespace(argparse.Namespace))),
    "SimpleNamespace": (
        types.SimpleNamespace,
        lambda v: (dict(vars(v)),),
        Builder(1, _namespace(types.SimpleNamespace)),
    ),
    "numpy.dtype": (np.dtype, _parts_of_dtype, Builder(1, _dtype)),
    "torch.layout": (torch.layout, _parts_of_constant, Builder(1, _constant(_named(torch.layout)))),
    "torch.memory_format": (
        torch.memory_format,
        _parts_of_constant,
        Builder(1, _constant(_named(torch.memory_format))),
    ),
} | {
    kind.__name__: (kind, lambda v: (str(v),), Builder(1, _path(kind)))
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath)
}


PARTS: dict[type, tuple[str, Parts]] = {kind: (name, parts) for name, (kind, parts, _) in _TYPES.items()}
"""Type -> its name in an encoded value, and how a value of it is taken apart."""


BUILDERS: dict[str, Builder] = {name: builder for name, (_, _, builder) in _TYPES.items()}
"""Name of a type -> how a value of it is made again."""
