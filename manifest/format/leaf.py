"""Leaves: what each value of a state is (kind, dtype, shape), and the table of all leaves of a version.

`LeafTable` has the leaves of a version as objects and as columns; versions with the same leaves share one table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Boxes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError

from . import table as col
from .leaf_path import Path, decode_paths, encode_path, format_path

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


class Leaf(NamedTuple):
    """One value of the state under its path."""

    path: Path
    spec: Spec

    @property
    def name(self) -> str:
        """The path as printed."""
        return format_path(self.path)


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

    @property
    def pieces(self) -> tuple[LeafTable, ...]:
        """The tables of which this one is put together: itself, if it was not concatenated."""
        return self.joined or (self,)

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> LeafTable:
        """The table of these leaves.

        Raises:
            FormatError: two leaves have the same path, or numbers of a leaf do not fit the columns.
        """
        for leaf in leaves:
            if leaf.spec.itemsize > MAX_LEAF_ITEMSIZE or len(leaf.spec.shape) > MAX_LEAF_NDIM:
                raise FormatError(
                    f"{WHAT}: leaf {leaf.name} has elements of more than {MAX_LEAF_ITEMSIZE} bytes, or too many axes"
                )
        count = len(leaves)
        paths = tuple(encode_path(leaf.path) for leaf in leaves)
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
        texts = col.column_texts(columns, "leaf.path", WHAT)
        count = len(texts)
        attrs = col.column_texts(columns, "leaf.attrs", WHAT, count)
        kind = _indices(columns, "leaf.kind", count, len(kinds))
        dtype = _indices(columns, "leaf.dtype", count, len(dtypes))
        itemsize = col.column(columns, "leaf.itemsize", "<u2", WHAT, count)
        ndim = col.column(columns, "leaf.ndim", "<u1", WHAT, count)
        shape = col.column(columns, "leaf.shape", "<i8", WHAT, int(ndim.sum()))
        if len(shape) and int(shape.min()) < 0:
            raise FormatError(f"{WHAT}: leaf.shape has a negative number")
        paths, names = decode_paths(texts)
        _check_unique(names)
        known: dict[tuple[Any, ...], Spec] = {}  # most leaves are like some other one
        specs = []
        for key in zip(kind.tolist(), dtype.tolist(), itemsize.tolist(), _shapes(ndim, shape), attrs, strict=True):
            spec = known.get(key)
            if spec is None:
                k, d, i, s, a = key
                spec = known[key] = Spec(kinds[k], dtypes[d], i, s, _decode_attrs(a))
            specs.append(spec)
        has_bytes = np.array([Spec(name).has_bytes for name in kinds], bool)
        return cls(
            tuple(map(Leaf, paths, specs)),
            tuple(names),
            itemsize.astype("i8"),
            has_bytes[kind],
            Boxes(ndim, np.zeros_like(shape), shape.copy()),  # does not keep all columns alive
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


def _shapes(ndim: Array, shape: Array) -> Iterator[tuple[int, ...]]:
    axes = iter(shape.tolist())
    return (tuple(islice(axes, count)) for count in ndim.tolist())


def _indices(columns: col.Columns, name: str, count: int, limit: int) -> Array:
    found = col.column(columns, name, "<u2", WHAT, count)
    if count and int(found.max()) >= limit:
        raise FormatError(f"{WHAT}: {name} points behind its list")
    return found
