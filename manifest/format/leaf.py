"""Leaves: the paths of the values of a state, what each value is (kind, dtype, shape), and the table of all leaves.

Paths are printed (``model."layers.0.weight"``), encoded as canonical JSON for manifests, and matched against the globs
of policies and of ``only=`` (``model.**``). `LeafTable` has the leaves of a version as objects and as columns; versions
with the same leaves share one table.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Boxes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import CaptureError, FormatError

from . import table as col

Path: TypeAlias = tuple[Any, ...]
"""Keys from the root to a leaf: str, int, bool, float, bytes, None, or tuples of these."""


CONTAINERS = frozenset({"dict", "odict", "list", "tuple", "namedtuple"})
"""Kinds of leaves that contain other leaves and have no bytes; a container comes before its items."""


STRIDES = "strides"
"""Attribute of tensors that do not lie in memory in row-major order: their strides, in elements. The bytes of the leaf
are in row-major order all the same. (Of a tied leaf with an offset: the strides of the view.)"""


TIED = "tied"
"""Kind of a leaf without its own bytes: a view of another leaf's bytes (attributes: to, and offset, strides)."""


STORAGE = "storage"
"""Kind of a leaf that only holds the bytes of tied leaves and is no value of the state itself."""


LOSSY = "lossy"
"""Attribute of leaves that were saved with a lossy encoding: its method and its error bound."""


METADATA = "metadata"
"""Attribute of an OrderedDict that is a module's state dict: what torch keeps in its ``_metadata``, by submodule."""


_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON would join two surrogates into one character


_BARE = re.compile(r"[^\W\d][\w\-/:@+]*", re.UNICODE)


_WORDS = frozenset({"True", "False", "None"})


_NAN = struct.pack(">d", float("nan"))
"""The bits of the usual NaN. Other NaNs are written as their bits: ``float.hex`` gives all of them the same text."""


MAX_INT_BITS = 14_000
"""Length of the longest int that is written as decimal digits, in keys and in metadata: Python refuses to read more
than 4,300 of them, so that a record with a longer one could not be read. An int that is a value of the state may be of
any length."""


MAX_NESTING = 16
"""Largest depth of nested tuples in one key."""


_NO_GLOB = "{!r} is not a pattern of leaf paths; write keys with dots between, as in 'model.**'"


_CANONICAL = re.compile(r'\["[ !#-\[\]-~]*"(?:,"[ !#-\[\]-~]*")*\]')
"""Encoded paths whose keys are strings that need no escape: nearly all are."""


_SEGMENT = re.compile(r'"(?:[^"\\]|\\.)*"|\([^"()]*\)(?=\.|\Z)|[^."]+')


Names = dict[str, list[str]]


WHAT = "version"


MAX_LEAF_ITEMSIZE = 0xFFFF


MAX_LEAF_NDIM = 0xFF


@dataclass(frozen=True, slots=True)
class Spec:
    """What a leaf is, apart from its path and its bytes.

    Attributes:
        kind: name of the provider that reads and writes it (``tensor``, ``array``, ``value``, ``object`` ...), or a
            container's kind.
        dtype: element type by the provider's name for it; ``uint8`` for encoded values.
        itemsize: bytes per element.
        shape: global shape, in elements.
        attrs: what else the provider needs to create the value again; JSON types only.
    """

    kind: str
    dtype: str = "uint8"
    itemsize: int = 1
    shape: tuple[int, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf: 0 for containers and tied leaves."""
        return math.prod(self.shape) * self.itemsize if self.has_bytes else 0

    @property
    def has_bytes(self) -> bool:
        """Whether the leaf has its own chunks."""
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


def decode_paths(texts: Sequence[str]) -> list[Path]:
    """Decode many paths as `decode_path` does, but several times faster.

    Raises:
        FormatError: one of them is not an encoded path.
    """
    try:
        found = json.loads(f"[{','.join(texts)}]")
    except (ValueError, RecursionError):
        found = []
    whole = all(text.startswith("[") and text.endswith("]") for text in texts)
    if not whole or len(found) != len(texts) or not all(type(keys) is list for keys in found):
        return [decode_path(text) for text in texts]  # to raise the detailed error
    return [tuple(k if type(k) is str else _decode_key(k) for k in keys) for keys in found]


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


def short_repr(value: object) -> str:
    """A value as Python writes it, shortened, for messages; also one with an int of more digits than Python writes."""
    try:
        return reprlib.repr(value)
    except ValueError:
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__qualname__}{bits}>"


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


@lru_cache(maxsize=4096)
def split_glob(pattern: str) -> tuple[str, ...]:
    """The segments of a glob; raises ValueError as `check_glob`."""
    if pattern == ".":
        return ()
    parts, at = [], 0
    while at <= len(
        pattern
    ):  # also at the end of an empty pattern or after a last dot: an empty segment, which is an error
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
    """Check that a pattern is a valid glob; returns it.

    Raises:
        ValueError: it has an empty segment, an open quote, or an escape that JSON does not have.
    """
    split_glob(pattern)
    return pattern


def check_globs(patterns: Iterable[str]) -> tuple[str, ...]:
    """Check that these are valid globs; returns them, also those of an iterator, which could be asked only once.

    Raises:
        TypeError: a single string was given instead of a list: its letters would be taken for globs. Or an item is no
            string.
        ValueError: as `check_glob`.
    """
    _check_no_glob(patterns)
    found = tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"{pattern!r:.60} is no pattern of leaf paths; write text, as in 'model.**'")
        check_glob(pattern)
    return found


def _check_no_glob(patterns: Iterable[str]) -> None:
    if isinstance(patterns, str):
        raise TypeError(f"{patterns!r} is one glob where a list of them is right, as in [{patterns!r}]")


def matches(pattern: str, path: Path) -> bool:
    """Whether a leaf path matches a glob.

    A pattern is written like a printed path: segments separated by dots. ``*``, ``?`` and ``[...]`` match within one
    key, ``**`` matches any number of keys, also none. A quoted segment (``"a.b"``) matches exactly this string. A
    segment without quotes is compared with the characters of a string key and with the printed form of any other key,
    so that ``0`` matches the int 0 and the string ``"0"``. A string key with dots, as in a module's ``state_dict``,
    matches as one key and also as the keys between its dots: ``model.layers.*.weight`` matches the leaf
    ``model."layers.0.weight"``.

    Raises:
        ValueError: the pattern is not valid (see `check_glob`).
    """
    parts = split_glob(pattern)
    return _match(parts, tuple(path)) or (_has_dots(path) and _match(parts, _at_dots(path)))


def _has_dots(path: Path) -> bool:
    return any(isinstance(key, str) and "." in key for key in path)


def _at_dots(path: Path) -> Path:
    """The path with its string keys split at their dots."""
    return tuple(part for key in path for part in (key.split(".") if isinstance(key, str) else (key,)))


def matches_any(patterns: Iterable[str], path: Path) -> bool:
    """Whether any of the globs matches.

    Raises:
        TypeError: a single string was given instead of a list: its letters would be taken for globs.
    """
    _check_no_glob(patterns)
    return any(matches(p, path) for p in patterns)


def _match(parts: tuple[str, ...], path: Path) -> bool:
    if not parts:
        return not path
    if parts[0] == "**":
        return any(_match(parts[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and match_key(parts[0], path[0]) and _match(parts[1:], path[1:])


def match_key(part: str, key: Any) -> bool:
    """Whether one segment of a glob matches a key."""
    if part.startswith('"'):
        return isinstance(key, str) and json.loads(part) == key
    return fnmatchcase(key if isinstance(key, str) else format_key(key), part)


def stored_lossy_methods(leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """The names of the lossy methods with which leaves were saved, sorted."""
    methods = (leaf.spec.attrs[LOSSY] for leaf in leaves if LOSSY in leaf.spec.attrs)
    return tuple(sorted({str(how.get("method", "")) if isinstance(how, dict) else str(how)[:40] for how in methods}))


@dataclass(frozen=True, eq=False)
class LeafTable:
    """The leaves of a version, in the state's own order.

    Attributes:
        leaves: one per value and container of the state.
        paths: the encoded path of each leaf (see `encode_path`).
        itemsize: ``(leaves,)`` of int64: bytes per element.
        has_bytes: ``(leaves,)`` of bool: which leaves have their own chunks.
        wholes: for each leaf the box that covers all of it.
        joined: the tables from which this one was concatenated, which other tables may share; often none.
    """

    leaves: tuple[Leaf, ...]
    paths: tuple[str, ...]
    itemsize: Array
    has_bytes: Array
    wholes: Boxes
    joined: tuple[LeafTable, ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Leaf], texts: Sequence[str] | None = None) -> LeafTable:
        """The table of these leaves.

        Args:
            texts: of each leaf the text from which its path was decoded, which need not be canonical.

        Raises:
            FormatError: two leaves have the same path, or numbers of a leaf do not fit the columns.
        """
        for leaf in leaves:
            if leaf.spec.itemsize > MAX_LEAF_ITEMSIZE or len(leaf.spec.shape) > MAX_LEAF_NDIM:
                raise FormatError(
                    f"{WHAT}: leaf {leaf.name} has elements of more than {MAX_LEAF_ITEMSIZE} bytes, or too many axes"
                )
        count = len(leaves)
        if texts is None:
            paths = tuple(encode_path(leaf.path) for leaf in leaves)
        else:
            told = zip(texts, leaves, strict=True)
            paths = tuple(text if _CANONICAL.fullmatch(text) else encode_path(leaf.path) for text, leaf in told)
        _check_unique(paths)
        return cls(
            tuple(leaves),
            paths,
            np.fromiter((leaf.spec.itemsize for leaf in leaves), "i8", count),
            np.fromiter((leaf.spec.has_bytes for leaf in leaves), bool, count),
            Boxes.wholes([leaf.spec.shape for leaf in leaves]),
        )

    @classmethod
    def concat(cls, pieces: Sequence[LeafTable]) -> LeafTable:
        """Several tables concatenated into one.

        Raises:
            FormatError: two leaves have the same path.
        """
        if len(pieces) == 1:
            return pieces[0]
        paths = tuple(chain.from_iterable(p.paths for p in pieces))
        _check_unique(paths)
        return cls(
            tuple(chain.from_iterable(p.leaves for p in pieces)),
            paths,
            np.concatenate([np.zeros(0, "i8"), *(p.itemsize for p in pieces)]),
            np.concatenate([np.zeros(0, bool), *(p.has_bytes for p in pieces)]),
            Boxes.concat([p.wholes for p in pieces]),
            tuple(pieces),
        )

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Encoded path of each leaf -> its index."""
        return {path: i for i, path in enumerate(self.paths)}

    @cached_property
    def digest(self) -> bytes:
        """A digest of the content: equal for equal leaves in the same order, however the table was concatenated."""
        names, columns = self.tables
        return checksum(col.encode_table(names, columns))

    @cached_property
    def tables(self) -> tuple[Names, col.Columns]:
        """The leaves in their stored form: lists of names for the head, and columns."""
        specs = [leaf.spec for leaf in self.leaves]
        kinds, dtypes = sorted({s.kind for s in specs}), sorted({s.dtype for s in specs})
        kind, dtype = ({name: i for i, name in enumerate(names)} for names in (kinds, dtypes))
        attrs = [json.dumps(dict(s.attrs), sort_keys=True, separators=(",", ":")) if s.attrs else "" for s in specs]
        return {"kinds": kinds, "dtypes": dtypes}, {
            **col.text_columns(list(self.paths), "leaf.path"),
            "leaf.kind": np.array([kind[s.kind] for s in specs], "<u2"),
            "leaf.dtype": np.array([dtype[s.dtype] for s in specs], "<u2"),
            "leaf.itemsize": self.itemsize.astype("<u2"),
            "leaf.ndim": self.wholes.ndim.astype("<u1"),
            "leaf.shape": self.wholes.shape,
            **col.text_columns(attrs, "leaf.attrs"),
        }

    @classmethod
    def decode(cls, head: Mapping[str, Any], columns: col.Columns) -> LeafTable:
        """The inverse of `tables`.

        Raises:
            FormatError: a column is absent or does not fit, or two leaves have the same path.
        """
        kinds, dtypes = col.string_list(head, "kinds", WHAT), col.string_list(head, "dtypes", WHAT)
        paths = col.column_texts(columns, "leaf.path", WHAT)
        count = len(paths)
        attrs = col.column_texts(columns, "leaf.attrs", WHAT, count)
        kind = _indices(columns, "leaf.kind", count, len(kinds))
        dtype = _indices(columns, "leaf.dtype", count, len(dtypes))
        itemsize = col.column(columns, "leaf.itemsize", "<u2", WHAT, count).tolist()
        shapes = _shapes(columns, col.column(columns, "leaf.ndim", "<u1", WHAT, count).tolist())
        return cls.of(
            [
                Leaf(p, Spec(kinds[k], dtypes[d], i, s, _decode_attrs(a)))
                for p, k, d, i, s, a in zip(decode_paths(paths), kind, dtype, itemsize, shapes, attrs, strict=True)
            ],
            paths,
        )


def _check_unique(paths: Sequence[str]) -> None:
    if twins := len(paths) - len(set(paths)):
        raise FormatError(f"{WHAT}: {twins} leaves have a path that another leaf has too")


def _decode_attrs(text: str) -> Mapping[str, Any]:
    try:
        attrs = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{WHAT}: attributes {text[:60]!r} are not JSON") from error
    if not isinstance(attrs, dict):
        raise FormatError(f"{WHAT}: attributes {text[:60]!r} are not an object")
    return attrs


def _shapes(columns: col.Columns, ndims: list[int]) -> list[tuple[int, ...]]:
    values = col.column(columns, "leaf.shape", "<i8", WHAT, sum(ndims)).tolist()
    if values and min(values) < 0:
        raise FormatError(f"{WHAT}: leaf.shape has a negative number")
    found, at = [], 0
    for ndim in ndims:
        found.append(tuple(values[at : at + ndim]))
        at += ndim
    return found


def _indices(columns: col.Columns, name: str, count: int, limit: int) -> list[int]:
    found = col.column(columns, name, "<u2", WHAT, count)
    if count and int(found.max()) >= limit:
        raise FormatError(f"{WHAT}: {name} points behind its list")
    return list(map(int, found.tolist()))
