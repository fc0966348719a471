"""Formats: packs that are files of another kind, laid out whole before the first byte of data is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from tierstate.manifest.leaf import STORAGE, Leaf

NATIVE = "native"
_ROOMS = {"safetensors": ("safetensors_format", "Safetensors"), "hdf5": ("hdf5_format", "Hdf5")}


class About(NamedTuple):
    """What a file says of the save it belongs to.

    Attributes:
        run, seq, step, time: as in the version's head.
        metadata: the user's own, as JSON.
        chunk, digest: length of a chunk in bytes, and the name of the digest's algorithm; 0 and empty where the file
            has no table of digests.
    """

    run: str
    seq: int
    step: int
    time: float
    metadata: str = "{}"
    chunk: int = 0
    digest: str = ""


class Item(NamedTuple):
    """One leaf that goes into a file.

    Attributes:
        leaf: what it is.
        digests: rows it has in the file's table of digests, where the format has one.
    """

    leaf: Leaf
    digests: int = 0


class Blueprint(NamedTuple):
    """Where everything lies in a file that is not written yet.

    Attributes:
        size: length of the file.
        offsets: per leaf, its first byte; leaves follow each other in the order given, and do not overlap.
        head: what the file begins with. All else that the leaves do not cover is zeros.
        digests: where the table of digests lies, 16 bytes for each row of each leaf, after all leaves; -1 where the
            format has none.
    """

    size: int
    offsets: tuple[int, ...]
    head: bytes
    digests: int = -1


class Format(ABC):
    """One kind of file that holds whole leaves, each as its raw bytes in one run."""

    name: str
    suffix: str

    @abstractmethod
    def expresses(self, leaf: Leaf) -> bool:
        """Whether a file of this kind has a type for the leaf, so that its bytes mean the same there."""

    @abstractmethod
    def lay_out(self, items: Sequence[Item], about: About) -> Blueprint:
        """Lay a file out whose leaves follow each other in the order given."""


def format_of(name: str) -> Format | None:
    """The format of that name in a policy; None for native packs.

    Raises:
        KeyError: there is none.
    """
    if name == NATIVE:
        return None
    room, cls = _ROOMS[name]
    made: Format = getattr(import_module(f"{__package__}.{room}"), cls)()
    return made


_ARRAYS = {
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128", "b1": "bool",
    **{f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)}, **{f"u{n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
}  # fmt: skip


def element(leaf: Leaf) -> str:
    """The leaf's element type as torch names it, ``>`` before it where bytes are in big-endian order; empty for what
    is no tensor or array of a plain type."""
    spec = leaf.spec
    if spec.kind in ("tensor", STORAGE):
        return spec.dtype
    if spec.kind != "array" or "fields" in spec.attrs:
        return ""
    order, name = spec.dtype[:1], _ARRAYS.get(spec.dtype[1:], "")
    return f">{name}" if order == ">" and name else name
