"""Leaves: the paths of a state, how they are printed, encoded and matched, and what lies at each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
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

_BARE = re.compile(r"[^\W\d][\w\-/:@+]*", re.UNICODE)
_WORDS = frozenset({"True", "False", "None", "nan", "inf"})


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
    """One key as text, so that no two different keys look alike: ``0`` is an int, ``"0"`` a string."""
    if isinstance(key, str):
        bare = _BARE.fullmatch(key) and key not in _WORDS
        return key if bare else json.dumps(key, ensure_ascii=False)
    return repr(key)


def format_path(path: Path) -> str:
    """The path with dots between its keys; ``.`` for the state itself."""
    return ".".join(map(format_key, path)) or "."


def encode_path(path: Path) -> str:
    """The path as canonical ASCII JSON: the same text for equal paths and for them only."""
    return json.dumps([_encode_key(k) for k in path], ensure_ascii=True, separators=(",", ":"))


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


def _encode_key(key: Any) -> Any:
    if key is None or type(key) in (str, bool, int):
        return key
    if type(key) is float:
        return {"float": key.hex()}
    if type(key) is bytes:
        return {"bytes": key.hex()}
    if type(key) is tuple:
        return {"tuple": [_encode_key(k) for k in key]}
    raise CaptureError(
        f"a key of type {type(key).__qualname__} ({key!r:.60}) cannot be saved; "
        "use str, int, bool, float, bytes, None or a tuple of these"
    )


def _decode_key(key: Any) -> Any:
    if key is None or isinstance(key, (str, bool, int)):
        return key
    if isinstance(key, dict) and len(key) == 1:
        ((kind, value),) = key.items()
        try:
            if kind == "float":
                return float.fromhex(value)
            if kind == "bytes":
                return bytes.fromhex(value)
            if kind == "tuple" and isinstance(value, list):
                return tuple(_decode_key(k) for k in value)
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"leaf key {key!r:.60} cannot be read") from error
    raise FormatError(f"leaf key {key!r:.60} is of no known kind")


_NO_GLOB = "{!r} is not a pattern of leaf paths; write keys with dots between, as in 'model.**'"
_SEGMENT = re.compile(r'"(?:[^"\\]|\\.)*"|[^."]+')


@lru_cache(maxsize=4096)
def _split(pattern: str) -> tuple[str, ...]:
    parts, at = [], 0
    while at < len(pattern):
        found = _SEGMENT.match(pattern, at)
        if not found or (found.end() < len(pattern) and pattern[found.end()] != "."):
            raise ValueError(_NO_GLOB.format(pattern))
        parts.append(found.group())
        at = found.end() + 1
    if not parts or pattern.endswith("."):
        if pattern == ".":
            return ()
        raise ValueError(_NO_GLOB.format(pattern))
    return tuple(parts)


def check_glob(pattern: str) -> str:
    """The pattern itself, if it is one.

    Raises:
        ValueError: an empty segment or an open quote.
    """
    _split(pattern)
    return pattern


def matches(pattern: str, path: Path) -> bool:
    """Whether a leaf path matches a glob.

    A pattern is written as paths are printed: segments with dots between. ``*``, ``?`` and ``[...]`` match within one
    key, ``**`` any number of keys, also none. A quoted segment (``"a.b"``) means that very string.
    """
    return _match(_split(pattern), tuple(path))


def matches_any(patterns: Iterable[str], path: Path) -> bool:
    """Whether any of the globs matches."""
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
    return fnmatchcase(str(key), part)
