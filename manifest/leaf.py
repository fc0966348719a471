"""Leaves: the paths of a state, how they are printed, encoded and matched, and what lies at each."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

from .errors import CaptureError, FormatError

Path: TypeAlias = tuple[Any, ...]
"""Keys from the root: str, int, bool, float, bytes, None, or tuples of these."""

CONTAINERS = frozenset({"dict", "odict", "list", "tuple", "namedtuple"})
"""Kinds of leaves that hold other leaves and no bytes; a container comes before what it holds."""

TIED = "tied"
"""Kind of a leaf that has no bytes of its own: a view of another leaf's (attrs: to, and offset, strides)."""

STORAGE = "storage"
"""Kind of a leaf that only backs tied leaves and is no value of the state itself."""

LOSSY = "lossy"
"""Attribute of leaves whose bytes are not all that was there: how they were made, and how far off they may be."""

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON would join two of them to another character
_BARE = re.compile(r"[^\W\d][\w\-/:@+]*", re.UNICODE)
_WORDS = frozenset({"True", "False", "None"})

MAX_NESTING = 16
"""Tuples within tuples that one key may be made of."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a leaf is, apart from its path and its bytes.

    Attributes:
        kind: name of the provider that reads and writes it (``tensor``, ``array``, ``value``, ``object`` ...), or a
            container's kind.
        dtype: element type by the provider's name for it; ``uint8`` for encoded values.
        itemsize: bytes per element.
        shape: global shape, in elements.
        attrs: whatever else the provider needs to build the value again; JSON types only.
    """

    kind: str
    dtype: str = "uint8"
    itemsize: int = 1
    shape: tuple[int, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf: none for containers and tied leaves."""
        return math.prod(self.shape) * self.itemsize if self.has_bytes else 0

    @property
    def has_bytes(self) -> bool:
        """Whether the leaf owns chunks."""
        return self.kind != TIED and self.kind not in CONTAINERS


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of the state under its path."""

    path: Path
    spec: Spec

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)


def format_key(key: Any) -> str:
    """One key as text, so that no two different keys look alike: ``0`` is an int, ``"0"`` a string, ``(0.5)`` a float.

    What a terminal would not print is escaped; a string that is no Unicode text (lone surrogates) shows its bytes.
    """
    if isinstance(key, str) and _SURROGATE.search(key):
        return f"({_surrogate_bytes(key)!r})"
    if isinstance(key, str):
        bare = _BARE.fullmatch(key) and key not in _WORDS
        return key if bare else json.dumps(key, ensure_ascii=not key.isprintable())
    # A float has a dot of its own, which must not look like the one between two keys.
    return f"({key!r})" if isinstance(key, float) else repr(key)


def format_path(path: Path) -> str:
    """The path with dots between its keys; ``.`` for the state itself."""
    return ".".join(map(format_key, path)) or "."


def encode_path(path: Path) -> str:
    """The path as canonical ASCII JSON: the same text for equal paths and for them only.

    Keys are equal here when value and type are: ``True``, ``1`` and ``1.0`` are three keys, and NaN is one.

    Raises:
        CaptureError: a key is of a type that cannot be saved, or nested deeper than MAX_NESTING.
    """
    parts = []
    for key in path:
        if type(key) is str and key.isascii() and key.isprintable() and '"' not in key and "\\" not in key:
            parts.append(f'"{key}"')  # as JSON would have it: nearly all keys are such, and there are thousands
        else:
            parts.append(json.dumps(_encode_key(key), ensure_ascii=True, separators=(",", ":")))
    return f"[{','.join(parts)}]"


def decode_path(text: str) -> Path:
    """The inverse of :func:`encode_path`.

    Raises:
        FormatError: the text is no such path.
    """
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"leaf path {text[:80]!r} is not JSON") from error
    if not isinstance(keys, list):
        raise FormatError(f"leaf path {text[:80]!r} is not a list of keys")
    return tuple(_decode_key(k) for k in keys)


def decode_paths(texts: Sequence[str]) -> list[Path]:
    """Each of many paths, as `decode_path` reads them, in a fraction of the time.

    Raises:
        FormatError: one of them is no such path.
    """
    try:
        found = json.loads(f"[{','.join(texts)}]")
    except (ValueError, RecursionError):
        found = []
    whole = all(text.startswith("[") and text.endswith("]") for text in texts)
    if not whole or len(found) != len(texts) or not all(type(keys) is list for keys in found):
        return [decode_path(text) for text in texts]  # which says what is wrong with it
    return [tuple(k if type(k) is str else _decode_key(k) for k in keys) for keys in found]


def _encode_key(key: Any, depth: int = 0) -> Any:
    if type(key) is str:
        return {"text": _surrogate_bytes(key).hex()} if _SURROGATE.search(key) else key
    if key is None or type(key) in (bool, int):
        return key
    if type(key) is float:
        return {"float": key.hex()}
    if type(key) is bytes:
        return {"bytes": key.hex()}
    if type(key) is tuple and depth < MAX_NESTING:
        return {"tuple": [_encode_key(k, depth + 1) for k in key]}
    raise CaptureError(
        f"a key of type {type(key).__qualname__} ({reprlib.repr(key)}) cannot be saved; "
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
            if kind == "float":
                return float.fromhex(value)
            if kind == "bytes":
                return bytes.fromhex(value)
            if kind == "text":
                return bytes.fromhex(value).decode("utf-8", "surrogatepass")
        except (ValueError, TypeError, OverflowError) as error:
            raise FormatError(f"leaf key {reprlib.repr(key)} cannot be read") from error
        if kind == "tuple" and isinstance(value, list) and depth < MAX_NESTING:
            return tuple(_decode_key(k, depth + 1) for k in value)
    raise FormatError(f"leaf key {reprlib.repr(key)} is of no known kind, or nested deeper than {MAX_NESTING}")


_NO_GLOB = "{!r} is not a pattern of leaf paths; write keys with dots between, as in 'model.**'"
_SEGMENT = re.compile(r'"(?:[^"\\]|\\.)*"|\([^"()]*\)(?=\.|\Z)|[^."]+')


@lru_cache(maxsize=4096)
def _split(pattern: str) -> tuple[str, ...]:
    if pattern == ".":
        return ()
    parts, at = [], 0
    while at <= len(pattern):  # at its very end where it is empty or ends with a dot: no segment starts there
        found = _SEGMENT.match(pattern, at)
        if not found or (found.end() < len(pattern) and pattern[found.end()] != "."):
            raise ValueError(_NO_GLOB.format(pattern))
        if found.group().startswith('"'):
            _unquote(found.group(), pattern)
        parts.append(found.group())
        at = found.end() + 1
    return tuple(parts)


def _unquote(part: str, pattern: str) -> Any:
    try:
        return json.loads(part)
    except ValueError as error:
        raise ValueError(_NO_GLOB.format(pattern)) from error


def check_glob(pattern: str) -> str:
    """The pattern itself, if it is one.

    Raises:
        ValueError: an empty segment, an open quote, or an escape that JSON does not know.
    """
    _split(pattern)
    return pattern


def matches(pattern: str, path: Path) -> bool:
    """Whether a leaf path matches a glob.

    A pattern is written as paths are printed: segments with dots between. ``*``, ``?`` and ``[...]`` match within one
    key, ``**`` any number of keys, also none. A quoted segment (``"a.b"``) means that very string. Without quotes a
    string matches by its own characters, any other key as it is printed, so that ``0`` is both the int and ``"0"``.
    Strings with dots, as a module's ``state_dict`` has them, match as one key and as the keys between their dots:
    ``model.layers.*.weight`` finds the leaf ``model."layers.0.weight"``.

    Raises:
        ValueError: the pattern is none (see `check_glob`).
    """
    parts = _split(pattern)
    return _match(parts, tuple(path)) or (_has_dots(path) and _match(parts, _at_dots(path)))


def _has_dots(path: Path) -> bool:
    return any(isinstance(key, str) and "." in key for key in path)


def _at_dots(path: Path) -> Path:
    """The path with its strings cut at their dots."""
    return tuple(part for key in path for part in (key.split(".") if isinstance(key, str) else (key,)))


def matches_any(patterns: Iterable[str], path: Path) -> bool:
    """Whether any of the globs matches.

    Raises:
        TypeError: one glob is given where a list of them is right: its letters would be taken for globs.
    """
    if isinstance(patterns, str):
        raise TypeError(f"{patterns!r} is one glob where a list of them is right, as in [{patterns!r}]")
    return any(matches(p, path) for p in patterns)


def _match(parts: tuple[str, ...], path: Path) -> bool:
    if not parts:
        return not path
    if parts[0] == "**":
        return any(_match(parts[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and _match_key(parts[0], path[0]) and _match(parts[1:], path[1:])


def _match_key(part: str, key: Any) -> bool:
    if part.startswith('"'):
        return isinstance(key, str) and json.loads(part) == key
    return fnmatchcase(key if isinstance(key, str) else format_key(key), part)


def lossy_methods(leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """How leaves were saved with fewer bits, as they say."""
    told = (leaf.spec.attrs[LOSSY] for leaf in leaves if LOSSY in leaf.spec.attrs)
    return tuple(sorted({str(how.get("method", "")) if isinstance(how, dict) else str(how)[:40] for how in told}))
