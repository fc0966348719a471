"""Plain Python values as bytes and back: a tagged, canonical binary encoding (serialization), without pickle.

Decoding is safe with untrusted bytes: every length is checked before anything is allocated, nothing is imported, and no
code is run. Values of the standard library's types (dates, paths, decimals ...) are encoded by `standard`.
"""

from __future__ import annotations

import enum
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.providers.tensors.dtypes import QUANTIZED_DTYPES, torch_dtype, torch_name

from .classes import check_attributes, enum_member, trust_class
from .standard import BUILDERS, PARTS

VALUE_FORMAT = 1


MAX_VALUE_DEPTH = 150


_PACKED = 8  # sequences of at least so many small ints are stored as one array: RNG states, permutations of samplers


_INT64 = range(-(1 << 63), 1 << 63)


_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?")


_SCALAR = re.compile(r"[<>|][biufcmMV]\d{1,5}(\[\d{0,9}(generic|[a-zA-Zμ]{1,2})\])?|[qQ]")


_PADDED = (np.longdouble, np.clongdouble) if np.finfo(np.longdouble).nmant == 63 else ()


class _Output(bytearray):
    """Encoded bytes.

    Attributes:
        classes: the classes of the user's that they name.
    """

    classes: set[str]


def encode_value(value: Any, classes: set[str] | None = None) -> bytes:
    """The value as bytes; equal values of equal types give equal bytes (the order of a dict is part of its value).

    Args:
        classes: gets the names of the user's classes (Enums) that the bytes name.

    Raises:
        CaptureError: the value, or one inside it, is of a type that cannot be encoded exactly, or nested too deeply.
    """
    out = _Output([VALUE_FORMAT])
    out.classes = set() if classes is None else classes
    _put(out, value, 0)
    return bytes(out)


def decode_value(data: bytes | memoryview) -> Any:
    """The inverse of `encode_value`, safe with untrusted bytes.

    Raises:
        FormatError: the bytes are not an encoded value.
        Unsafe: they name an Enum that is not known here (`tierstate.providers.values.classes`).
    """
    reader = _Reader(memoryview(data).cast("B"))
    try:
        if reader.take(1)[0] != VALUE_FORMAT:
            raise FormatError(f"an encoded value starts with {VALUE_FORMAT}, not {data[0]}")
        value = reader.value(0)
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, RecursionError, MemoryError) as error:
        raise FormatError(f"an encoded value cannot be read at byte {reader.at}: {error}") from error
    if reader.at != len(data):
        raise FormatError(f"an encoded value of {reader.at} bytes has {len(data)}")
    return value


def _put(out: _Output, value: Any, depth: int) -> None:
    writer = _WRITERS.get(type(value))
    if writer is None:
        writer = next((writer for base, writer in _BASE_WRITERS if isinstance(value, base)), None)
    if writer is None:
        raise CaptureError(f"a {type(value).__module__}.{type(value).__qualname__} is not a plain value")
    if depth > MAX_VALUE_DEPTH:
        raise CaptureError(f"plain values are nested deeper than {MAX_VALUE_DEPTH}")
    writer(out, value, depth)


def _put_count(out: bytearray, n: int) -> None:
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)


def _put_bytes(out: bytearray, tag: bytes, data: bytes) -> None:
    out += tag
    _put_count(out, len(data))
    out += data


def _put_int(out: bytearray, value: int, depth: int = 0) -> None:
    _put_bytes(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _put_text(tag: bytes) -> Callable[[_Output, Any, int], None]:
    return lambda out, value, depth: _put_bytes(out, tag, value.encode("utf-8", "surrogatepass"))


def _put_items(tag: bytes, packed: bytes = b"") -> Callable[[_Output, Any, int], None]:
    def put(out: _Output, value: Any, depth: int) -> None:
        value = tuple(value)  # another thread may change a list meanwhile: it is encoded as it is at one moment
        if packed and len(value) >= _PACKED and set(map(type, value)) == {int} and _fits(value):
            _put_bytes(out, packed, np.array(value, "<i8").tobytes())
            return
        out += tag
        _put_count(out, len(value))
        for item in value:
            _put(out, item, depth + 1)

    return put


def _fits(value: Iterable[int]) -> bool:
    return min(value) in _INT64 and max(value) in _INT64


def _put_set(tag: bytes) -> Callable[[_Output, Any, int], None]:
    def put(out: _Output, value: Any, depth: int) -> None:
        items = []
        for item in tuple(value):
            items.append(_Output())
            items[-1].classes = out.classes
            _put(items[-1], item, depth + 1)
        out += tag
        _put_count(out, len(items))
        for encoded in sorted(items):
            out += encoded

    return put


def _put_dict(tag: bytes) -> Callable[[_Output, Any, int], None]:
    def put(out: _Output, value: Any, depth: int) -> None:
        if tag != b"d":  # a dict itself can have no attributes
            check_attributes(value, ())
        items = tuple(value.items())
        out += tag
        _put_count(out, len(items))
        for key, item in items:
            _put(out, key, depth + 1)
            _put(out, item, depth + 1)

    return put


def _put_range(out: bytearray, value: range, depth: int) -> None:
    out += b"r"
    for number in (value.start, value.stop, value.step):
        _put_int(out, number)


def _put_scalar(out: bytearray, value: np.generic, depth: int) -> None:
    dtype, raw = value.dtype, bytearray(value.tobytes())
    name = dtype.str if np.dtype(dtype.str).type is type(value) else dtype.char
    if not raw or dtype.names is not None or not _SCALAR.fullmatch(name):
        raise CaptureError(f"a NumPy scalar of dtype {dtype} is not a plain value")
    if type(value) in _PADDED:
        for at in range(0, len(raw), 16):
            raw[at + 10 : at + 16] = bytes(6)  # only 80 bits are the value; the rest is undefined padding
    _put_bytes(out, b"n", name.encode())
    out += raw


def _put_torch_dtype(out: bytearray, value: torch.dtype, depth: int) -> None:
    _put_bytes(out, b"D", torch_name(value).encode())


def _put_parts(name: str, parts: Callable[[Any], tuple[Any, ...]]) -> Callable[[_Output, Any, int], None]:
    def put(out: _Output, value: Any, depth: int) -> None:
        _put_bytes(out, b"P", name.encode())
        for part in (found := parts(value)):
            _put(out, part, depth + 1)
        assert len(found) == BUILDERS[name].parts

    return put


def _put_enum(out: _Output, value: enum.Enum, depth: int) -> None:
    kind = type(value)
    member: Any = value.name if kind.__members__.get(value.name or "") is value else value.value
    if type(member) not in (str, int):
        raise CaptureError(f"{value!r:.60} is no member of its {kind.__module__}.{kind.__qualname__}")
    out.classes.add(trust_class(kind))
    _put_bytes(out, b"e", kind.__module__.encode() + b":" + kind.__qualname__.encode())
    _put(out, member, depth + 1)


_WRITERS: dict[type, Callable[[_Output, Any, int], None]] = {
    type(None): lambda out, value, depth: out.extend(b"N"),
    bool: lambda out, value, depth: out.extend(b"T" if value else b"F"),
    int: _put_int,
    float: lambda out, value, depth: out.extend(struct.pack("<cd", b"f", value)),
    complex: lambda out, value, depth: out.extend(struct.pack("<cdd", b"c", value.real, value.imag)),
    str: _put_text(b"s"),
    bytes: lambda out, value, depth: _put_bytes(out, b"b", value),
    bytearray: lambda out, value, depth: _put_bytes(out, b"y", bytes(value)),
    range: _put_range,
    list: _put_items(b"l", b"I"),
    tuple: _put_items(b"t", b"J"),
    set: _put_set(b"S"),
    frozenset: _put_set(b"Z"),
    dict: _put_dict(b"d"),
    OrderedDict: _put_dict(b"o"),
    Counter: _put_dict(b"C"),  # MultiStepLR keeps its milestones in one
    np.str_: _put_text(b"u"),  # str() of one drops trailing zeros
    np.bytes_: lambda out, value, depth: _put_bytes(out, b"a", bytes(value)),
    torch.dtype: _put_torch_dtype,
    torch.device: lambda out, value, depth: _put_bytes(out, b"V", str(value).encode()),
    torch.Size: _put_items(b"z"),
}


_WRITERS |= {kind: _put_parts(name, parts) for kind, (name, parts) in PARTS.items()}


_BASE_WRITERS: tuple[tuple[type, Callable[[_Output, Any, int], None]], ...] = (
    (np.generic, _put_scalar),
    (enum.Enum, _put_enum),
    (np.dtype, _WRITERS[np.dtype]),
)


PLAIN_TYPES: tuple[type, ...] = (*_WRITERS, *(base for base, _ in _BASE_WRITERS))
"""The types that are encoded as plain values, with the subclasses of the last three."""


class _Reader:
    """A read position in encoded bytes; every length is checked against the bytes that are left."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, n: int) -> memoryview:
        if n > len(self._data) - self.at:
            raise FormatError(f"an encoded value ends at byte {len(self._data)}, {n} more are needed at {self.at}")
        self.at += n
        return self._data[self.at - n : self.at]

    def count(self) -> int:
        """A number of items or bytes; at most the bytes left, since each item takes at least one byte."""
        n = shift = 0
        while True:
            byte = self.take(1)[0]
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 56:
                raise FormatError(f"an encoded length is too long at byte {self.at}")
        if n > len(self._data) - self.at:
            raise FormatError(f"an encoded value has {len(self._data) - self.at} bytes left at {self.at}, not {n}")
        return n

    def bytes(self) -> bytes:
        return bytes(self.take(self.count()))

    def text(self) -> str:
        return self.bytes().decode("utf-8", "surrogatepass")

    def value(self, depth: int) -> Any:
        if depth > MAX_VALUE_DEPTH:
            raise FormatError(f"encoded values are nested deeper than {MAX_VALUE_DEPTH}")
        tag = bytes(self.take(1))
        reader = _READERS.get(tag)
        if reader is None:
            raise FormatError(f"an encoded value of unknown kind {tag!r} at byte {self.at - 1}")
        return reader(self, depth + 1)

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self.count())]

    def unique(self, kind: type, depth: int) -> Any:
        items = self.items(depth)
        found = kind(items)
        if len(found) != len(items):
            raise FormatError(f"an encoded set has equal elements before byte {self.at}")
        return found

    def mapping(self, kind: type, depth: int) -> Any:
        found, n = kind(), self.count()
        for _ in range(n):
            key = self.value(depth)
            found[key] = self.value(depth)
        if len(found) != n:
            raise FormatError(f"an encoded dict has equal keys before byte {self.at}")
        return found

    def integer(self) -> int:
        return int.from_bytes(self.bytes(), "little", signed=True)

    def range(self) -> range:
        start, stop, step = (self.value(MAX_VALUE_DEPTH) for _ in range(3))
        return range(start, stop, step)

    def packed(self) -> list[int]:
        numbers: list[int] = np.frombuffer(self.bytes(), "<i8").tolist()
        return numbers

    def scalar(self) -> np.generic:
        name = str(self.bytes(), "ascii")
        if not _SCALAR.fullmatch(name):
            raise FormatError(f"{name!r:.40} is no dtype of a NumPy scalar")
        dtype = np.dtype(name)
        return np.frombuffer(bytes(self.take(dtype.itemsize)), dtype)[0]  # type: ignore[no-any-return]

    def standard(self, depth: int) -> Any:
        name = self.text()
        found = BUILDERS.get(name)
        if found is None:
            raise FormatError(f"an encoded value of unknown type {name!r:.40} before byte {self.at}")
        return found.build(*(self.value(depth) for _ in range(found.parts)))

    def enumerated(self, depth: int) -> enum.Enum:
        name, member = self.text(), self.value(depth)
        if type(member) not in (str, int):
            raise FormatError(f"an encoded Enum has no name or number before byte {self.at}")
        return enum_member(name, member)

    def device(self) -> torch.device:
        name = self.text()
        if not _DEVICE.fullmatch(name):
            raise FormatError(f"{name!r:.40} is no device")
        return torch.device(name)


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda r, depth: None,
    b"T": lambda r, depth: True,
    b"F": lambda r, depth: False,
    b"i": lambda r, depth: r.integer(),
    b"f": lambda r, depth: struct.unpack("<d", r.take(8))[0],
    b"c": lambda r, depth: complex(*struct.unpack("<dd", r.take(16))),
    b"s": lambda r, depth: r.text(),
    b"b": lambda r, depth: r.bytes(),
    b"y": lambda r, depth: bytearray(r.bytes()),
    b"r": lambda r, depth: r.range(),
    b"l": lambda r, depth: r.items(depth),
    b"t": lambda r, depth: tuple(r.items(depth)),
    b"I": lambda r, depth: r.packed(),
    b"J": lambda r, depth: tuple(r.packed()),
    b"S": lambda r, depth: r.unique(set, depth),
    b"Z": lambda r, depth: r.unique(frozenset, depth),
    b"d": lambda r, depth: r.mapping(dict, depth),
    b"o": lambda r, depth: r.mapping(OrderedDict, depth),
    b"C": lambda r, depth: r.mapping(Counter, depth),
    b"u": lambda r, depth: np.str_(r.text()),
    b"a": lambda r, depth: np.bytes_(r.bytes()),
    b"n": lambda r, depth: r.scalar(),
    b"D": lambda r, depth: QUANTIZED_DTYPES.get(name := r.text()) or torch_dtype(name),
    b"V": lambda r, depth: r.device(),
    b"z": lambda r, depth: torch.Size(r.items(depth)),
    b"P": lambda r, depth: r.standard(depth),
    b"e": lambda r, depth: r.enumerated(depth),
}
