"""Paths of leaves: the keys from the root of a state to one of its values, printed and encoded.

Paths are printed with dots (``model."layers.0.weight"``), and encoded as canonical JSON for manifests.
"""

from __future__ import annotations

import json
import re
import reprlib
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

from tierstate.manifest.arguments import short_repr
from tierstate.manifest.errors import CaptureError, FormatError

Path: TypeAlias = tuple[Any, ...]
"""Keys from the root to a leaf: str, int, bool, float, bytes, None, or tuples of these."""


_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON would join two surrogates into one character


_BARE = re.compile(r"[^\W\d][\w\-/:@+]*", re.UNICODE)


_WORDS = frozenset({"True", "False", "None"})


_KEY = r'(?:"[ !#-\[\]-~]*"|0|-?[1-9][0-9]{0,17}|true|false|null)'


_PLAIN = re.compile(rf"(?>\[(?:{_KEY}(?:,{_KEY})*+)?\]\n)*+")
"""Encoded paths, a line each, which are canonical and which JSON alone decodes: nearly all are."""


_BLOCK = 1024
"""Paths that are decoded together."""


_NAN = struct.pack(">d", float("nan"))
"""The bits of the usual NaN. Other NaNs are written as their bits: ``float.hex`` gives all of them the same text."""


MAX_NESTING = 16
"""Largest depth of nested tuples in one key."""


MAX_INT_BITS = 14_000
"""Length of the longest int that is written as decimal digits, in keys and in metadata: Python refuses to read more
than 4,300 of them, so that a record with a longer one could not be read. An int that is a value of the state may be of
any length."""


def format_key(key: Any) -> str:
    """One key as text, so that no two different keys look alike: ``0`` is an int, ``"0"`` a string, ``(0.5)`` a float.

    Unprintable characters are escaped; a string with lone surrogates is printed as its bytes.
    """
    if isinstance(key, str) and _SURROGATE.search(key):
        return f"({_surrogate_bytes(key)!r})"
    if isinstance(key, str):
        bare = _BARE.fullmatch(key) and key not in _WORDS
        return key if bare else json.dumps(key, ensure_ascii=not key.isprintable())
    # The dot in a float must not look like the dot between two keys.
    return f"({_text(key)})" if isinstance(key, float) else _text(key)


def _text(key: Any) -> str:
    """The key as Python writes it, but a NaN of another sign or payload than the usual one with its bits."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_text, key))}{',' * (len(key) == 1)})"
    odd = isinstance(key, float) and key != key and float_bits(key) != _NAN
    return f"nan 0x{float_bits(key).hex()}" if odd else repr(key)


def float_bits(number: float) -> bytes:
    """The eight bytes of a float, the highest first: equal only for the same float, also for NaN and zero."""
    return struct.pack(">d", number)


def path_key(key: Any) -> Any:
    """A key as it is in paths: each NaN is one object there, so that a path with it is equal to itself."""
    if type(key) is float and key != key:
        return _one_nan(float_bits(key))
    return tuple(map(path_key, key)) if type(key) is tuple else key


@cache
def _one_nan(bits: bytes) -> float:
    found: float = struct.unpack(">d", bits)[0]
    return found


def format_path(path: Path) -> str:
    """The path with dots between its keys; ``.`` for the state itself."""
    return ".".join(map(format_key, path)) or "."


def encode_path(path: Path) -> str:
    """The path as canonical ASCII JSON: two paths have the same text if and only if they are equal.

    Two keys are equal here if type and value are equal, floats bit for bit: ``True``, ``1`` and ``1.0`` are three keys,
    0.0 and -0.0 are two, and NaNs of different sign or payload too.

    Raises:
        CaptureError: a key is of a type that cannot be saved, or nested deeper than MAX_NESTING.
    """
    parts = []
    for key in path:
        if type(key) is str and key.isascii() and key.isprintable() and '"' not in key and "\\" not in key:
            parts.append(f'"{key}"')  # a fast path for the usual keys, of which there are thousands; same as json.dumps
        else:
            parts.append(json.dumps(_encode_key(key), ensure_ascii=True, separators=(",", ":")))
    return f"[{','.join(parts)}]"


def decode_path(text: str) -> Path:
    """The inverse of `encode_path`.

    Raises:
        FormatError: the text is not an encoded path.
    """
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"leaf path {text[:80]!r} is not JSON") from error
    if not isinstance(keys, list):
        raise FormatError(f"leaf path {text[:80]!r} is not a list of keys")
    return tuple(_decode_key(k) for k in keys)


def decode_paths(texts: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Decode many paths as `decode_path` does, but several times faster.

    Returns:
        the paths, and their canonical texts, which the given ones need not be.

    Raises:
        FormatError: one of them is not an encoded path.
    """
    # In blocks, so that one key that is no plain string does not slow down all others.
    blocks = [texts[at : at + _BLOCK] for at in range(0, len(texts), _BLOCK)]
    decoded = [_decode_block(block) for block in blocks]
    return [path for paths, _ in decoded for path in paths], [text for _, names in decoded for text in names]


def _decode_block(texts: Sequence[str]) -> tuple[Sequence[Path], Sequence[str]]:
    lines = "\n".join((*texts, ""))
    if _PLAIN.fullmatch(lines) and lines.count("\n") == len(texts):
        return [tuple(keys) for keys in json.loads(f"[{','.join(texts)}]")], texts
    paths = [decode_path(text) for text in texts]
    return paths, [encode_path(path) for path in paths]


def _encode_key(key: Any, depth: int = 0) -> Any:
    if type(key) is str:
        return {"text": _surrogate_bytes(key).hex()} if _SURROGATE.search(key) else key
    if key is None or type(key) is bool or (type(key) is int and key.bit_length() <= MAX_INT_BITS):
        return key
    if type(key) is float:
        odd = key != key and float_bits(key) != _NAN
        return {"nan": float_bits(key).hex()} if odd else {"float": key.hex()}
    if type(key) is bytes:
        return {"bytes": key.hex()}
    if type(key) is tuple and depth < MAX_NESTING:
        return {"tuple": [_encode_key(k, depth + 1) for k in key]}
    raise CaptureError(
        f"a key of type {type(key).__qualname__} ({short_repr(key)}) cannot be saved; "
        f"use str, int, bool, float, bytes, None or a tuple of these, at most {MAX_NESTING} deep"
    )


def _surrogate_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_key(key: Any, depth: int = 0) -> Any:
    if key is None or isinstance(key, (str, bool, int)):
        return key
    if isinstance(key, dict) and len(key) == 1:
        ((kind, value),) = key.items()
        try:
            if kind in _KEY_KINDS:
                return _KEY_KINDS[kind](value)
        except (ValueError, TypeError, OverflowError) as error:
            raise FormatError(f"leaf key {reprlib.repr(key)} cannot be read") from error
        if kind == "tuple" and isinstance(value, list) and depth < MAX_NESTING:
            return tuple(_decode_key(k, depth + 1) for k in value)
    raise FormatError(f"leaf key {reprlib.repr(key)} is of no known kind, or nested deeper than {MAX_NESTING}")


def _nan(bits: bytes) -> float:
    if len(bits) != 8 or (number := float(struct.unpack(">d", bits)[0])) == number:
        raise ValueError("no NaN")
    return number


_KEY_KINDS: dict[str, Callable[[str], Any]] = {
    "float": lambda text: path_key(float.fromhex(text)),
    "nan": lambda text: path_key(_nan(bytes.fromhex(text))),
    "bytes": bytes.fromhex,
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
}
"""Kind of a key that is no JSON value -> how it is read."""
