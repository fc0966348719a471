"""A catalog: a version's leaves and what is asked of them as columns, which versions of the same leaves share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from . import columns as col
from .boxes import Boxes
from .digest import checksum
from .errors import FormatError
from .leaf import Leaf, Spec, decode_paths, encode_path

Array = col.Array
Names = dict[str, list[str]]
WHAT = "version"
MAX_ITEMSIZE = 0xFFFF
MAX_NDIM = 0xFF


@dataclass(frozen=True, eq=False)
class Catalog:
    """Leaves, in a state's own order.

    Attributes:
        leaves: one per value and container of the state.
        paths: the encoded path of each (see `encode_path`).
        itemsize: ``(leaves,)`` of int64: bytes of an element.
        has_bytes: ``(leaves,)`` of bool: which of them own chunks.
        wholes: all of each leaf, as a box.
        joined: the catalogs that this one is made of, which others may have in them too; empty where it is of none.
    """

    leaves: tuple[Leaf, ...]
    paths: tuple[str, ...]
    itemsize: Array
    has_bytes: Array
    wholes: Boxes
    joined: tuple[Catalog, ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Catalog:
        """The catalog of these leaves.

        Raises:
            FormatError: two have one path, or one has no room in the tables.
        """
        for leaf in leaves:
            if leaf.spec.itemsize > MAX_ITEMSIZE or len(leaf.spec.shape) > MAX_NDIM:
                raise FormatError(
                    f"{WHAT}: leaf {leaf.name} has elements of more than {MAX_ITEMSIZE} bytes, or too many axes"
                )
        count = len(leaves)
        paths = tuple(encode_path(leaf.path) for leaf in leaves)
        _refuse_twins(paths)
        return cls(
            tuple(leaves),
            paths,
            np.fromiter((leaf.spec.itemsize for leaf in leaves), "i8", count),
            np.fromiter((leaf.spec.has_bytes for leaf in leaves), bool, count),
            Boxes.wholes([leaf.spec.shape for leaf in leaves]),
        )

    @classmethod
    def join(cls, pieces: Sequence[Catalog]) -> Catalog:
        """One catalog of several, one after another.

        Raises:
            FormatError: two leaves have one path.
        """
        if len(pieces) == 1:
            return pieces[0]
        paths = tuple(chain.from_iterable(p.paths for p in pieces))
        _refuse_twins(paths)
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
        """Encoded path of each leaf to its number."""
        return {path: i for i, path in enumerate(self.paths)}

    @cached_property
    def digest(self) -> bytes:
        """What it is named by: equal for equal leaves in the same order, in whatever pieces."""
        names, columns = self.tables
        return checksum(col.encode(names, columns))

    @cached_property
    def tables(self) -> tuple[Names, col.Columns]:
        """What a version's bytes say of its leaves: lists of names for the head, and columns."""
        specs = [leaf.spec for leaf in self.leaves]
        kinds, dtypes = sorted({s.kind for s in specs}), sorted({s.dtype for s in specs})
        kind, dtype = ({name: i for i, name in enumerate(names)} for names in (kinds, dtypes))
        attrs = [json.dumps(dict(s.attrs), sort_keys=True, separators=(",", ":")) if s.attrs else "" for s in specs]
        return {"kinds": kinds, "dtypes": dtypes}, {
            **col.pool(list(self.paths), "leaf.path"),
            "leaf.kind": np.array([kind[s.kind] for s in specs], "<u2"),
            "leaf.dtype": np.array([dtype[s.dtype] for s in specs], "<u2"),
            "leaf.itemsize": self.itemsize.astype("<u2"),
            "leaf.ndim": self.wholes.ndim.astype("<u1"),
            "leaf.shape": self.wholes.shape,
            **col.pool(attrs, "leaf.attrs"),
        }

    @classmethod
    def decode(cls, head: Mapping[str, Any], columns: col.Columns) -> Catalog:
        """The inverse of `tables`.

        Raises:
            FormatError: a column is absent or does not fit, or two leaves have one path.
        """
        kinds, dtypes = col.names(head, "kinds", WHAT), col.names(head, "dtypes", WHAT)
        paths = col.texts(columns, "leaf.path", WHAT)
        count = len(paths)
        attrs = col.texts(columns, "leaf.attrs", WHAT, count)
        kind = _indices(columns, "leaf.kind", count, len(kinds))
        dtype = _indices(columns, "leaf.dtype", count, len(dtypes))
        itemsize = col.column(columns, "leaf.itemsize", "<u2", WHAT, count).tolist()
        shapes = _shapes(columns, col.column(columns, "leaf.ndim", "<u1", WHAT, count).tolist())
        return cls.of(
            [
                Leaf(p, Spec(kinds[k], dtypes[d], i, s, _decode_attrs(a)))
                for p, k, d, i, s, a in zip(decode_paths(paths), kind, dtype, itemsize, shapes, attrs, strict=True)
            ]
        )


def _refuse_twins(paths: Sequence[str]) -> None:
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
