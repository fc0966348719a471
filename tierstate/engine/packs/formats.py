"""File formats of packs: a tier with ``format: safetensors`` or ``hdf5`` writes files that other programs open.

A `FileFormat` computes the layout of a whole file before any data is known: its header, and the offset of each leaf.
The export uses the same layouts. This module has the interface, the names of leaves in such files (unique, and
convertible back to paths), and the safetensors format: a JSON header, then the bytes of every tensor without a gap.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

from tierstate.manifest.chunk import to_bytes
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import STORAGE, Leaf
from tierstate.manifest.format.leaf_path import Path, encode_path, format_key, format_path
from tierstate.tiers.base import Tier, read_range

from .slab_layout import BIG, BLOCK

NATIVE = "native"


_ROOMS = {"safetensors": ("formats", "Safetensors"), "hdf5": ("hdf5", "Hdf5")}


_ARRAYS = {
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128", "b1": "bool",
    **{f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)}, **{f"u{n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
}  # fmt: skip


ROOT_NAME = "value"
"""Name of the state itself, where it is a single leaf: its path is empty."""


_NO_NAMES = frozenset(["", ".", ".."])


PATHS_KEY = "tierstate.paths"
"""Metadata key of the paths that cannot be derived from the names: JSON, name to encoded path."""


DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16",
    "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Types that all readers know. A reader refuses the whole file if it has one type that the reader does not know."""


MAX_HEADER = 100_000_000
"""Readers accept headers of at most this many bytes."""


_LENGTH = 8


_METADATA = "__metadata__"


class FileInfo(NamedTuple):
    """What the header of a file says about the save.

    Attributes:
        run, seq, step, time: as in the version's head.
        metadata: the user's metadata, as JSON.
        chunk, digest: length of a chunk in bytes, and the name of the digest's algorithm; 0 and empty if the file has
            no table of digests.
    """

    run: str
    seq: int
    step: int
    time: float
    metadata: str = "{}"
    chunk: int = 0
    digest: str = ""


class FileLeaf(NamedTuple):
    """One leaf that goes into a file.

    Attributes:
        leaf: the leaf of the version.
        digests: number of its rows in the file's table of digests, if the format has one.
    """

    leaf: Leaf
    digests: int = 0


class FileLayout(NamedTuple):
    """The layout of a file that is not written yet.

    Attributes:
        size: length of the file in bytes.
        offsets: offset of each leaf; leaves follow each other in the given order and do not overlap.
        head: the first bytes of the file. All other bytes outside of the leaves are zeros.
        digests: offset of the table of digests, 16 bytes for each row of each leaf, after all leaves; -1 if the format
            has none.
    """

    size: int
    offsets: tuple[int, ...]
    head: bytes
    digests: int = -1


class FileFormat(ABC):
    """A file format that stores each leaf whole, as one contiguous range of raw bytes."""

    name: str
    suffix: str

    @abstractmethod
    def expresses(self, leaf: Leaf) -> bool:
        """Whether the format has an element type for the leaf, so that readers understand its raw bytes."""

    @abstractmethod
    def lay_out(self, items: Sequence[FileLeaf], about: FileInfo) -> FileLayout:
        """The layout of a file whose leaves follow each other in the given order."""

    @abstractmethod
    def spans(self, tier: Tier, key: str) -> list[tuple[int, int]]:
        """Offset and length in bytes of each leaf of a file in a tier, from the file's own header.

        Raises:
            FormatError: it is no such file, or damaged.
            TierError: the tier could not be read.
        """


def format_of(name: str) -> FileFormat | None:
    """The format of that name in a policy; None for native packs.

    Raises:
        KeyError: there is no such format.
    """
    if name == NATIVE:
        return None
    room, cls = _ROOMS[name]
    made: FileFormat = getattr(import_module(f"{__package__}.{room}"), cls)()
    return made


def format_of_key(key: str) -> FileFormat | None:
    """The format of a pack, from its key; None for native packs and for files of unknown kinds."""
    suffix = "." + key.rpartition("/")[2].partition(".")[2]
    return next((found for name in _ROOMS if (found := format_of(name)) and found.suffix == suffix), None)


def element_type(leaf: Leaf) -> str:
    """The leaf's element type as torch names it, with a ``>`` before it for big-endian bytes; empty for a leaf that is
    not a tensor or array of a plain type."""
    spec = leaf.spec
    if spec.kind in ("tensor", STORAGE):
        return spec.dtype
    if spec.kind != "array" or "fields" in spec.attrs:
        return ""
    order, name = spec.dtype[:1], _ARRAYS.get(spec.dtype[1:], "")
    return f">{name}" if order == ">" and name else name


def dotted_names(paths: Iterable[Path], reserved: Iterable[str] = ()) -> list[str]:
    """One name per path: its keys joined by dots, as ``state_dict`` names them; else as tierstate prints paths.

    Two paths may give the same name, as ``("a.b",)`` and ``("a", "b")`` do: the first one keeps it, the second is
    printed with quotes, or gets a number.

    Args:
        reserved: names that no leaf may have.
    """
    taken = set(reserved)
    return [_free(_dotted(path), taken) for path in paths]


def group_names(paths: Iterable[Path], reserved: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """One tuple of names per path, a name per key, for trees of groups (HDF5): no name is empty, ``.`` or ``..``, or
    has a ``/`` or a NUL. Different keys of one group have different names.

    Args:
        reserved: names that are not allowed at the root.
    """
    groups: dict[tuple[str, ...], _Siblings] = {(): _Siblings(dict.fromkeys(reserved), {})}
    return [_nest(path or (ROOT_NAME,), groups) for path in paths]


def is_plain(path: Path, names: Sequence[str]) -> bool:
    """Whether the path can be derived from the names: each name is a text key unchanged."""
    return len(path) == len(names) and all(
        type(key) is str and key == name for key, name in zip(path, names, strict=True)
    )


class _Siblings(NamedTuple):
    """The members of one group: the code of the key by name, and the name by code."""

    codes: dict[str, Any]
    names: dict[Any, str]


def _nest(path: Path, groups: dict[tuple[str, ...], _Siblings]) -> tuple[str, ...]:
    at: tuple[str, ...] = ()
    for depth, key in enumerate(path, 1):
        codes, names = groups.setdefault(at, _Siblings({}, {}))
        # True, 1 and 1.0 have three codes; a leaf and a group of the same key have two.
        code = (depth == len(path), key) if type(key) is str else (depth == len(path), encode_path((key,)), None)
        if code not in names:
            names[code] = next(name for name in _tried(_for_groups(key)) if name not in codes)
            codes[names[code]] = code
        at = (*at, names[code])
    return at


def _free(candidates: Iterator[str], taken: set[str]) -> str:
    name = next(name for name in candidates if name not in taken)
    taken.add(name)
    return name


def _dotted(path: Path) -> Iterator[str]:
    if not path:
        return _tried(iter([ROOT_NAME]))
    return _tried(text(path) for text in (_joined, format_path))


def _joined(path: Path) -> str:
    return ".".join(map(_text, path))


def _for_groups(key: Any) -> Iterator[str]:
    """Candidate names of a key in a group, the best one first."""
    text = _text(key)
    if text in _NO_NAMES:
        yield f"({text})"
    elif "/" in text or "\0" in text:
        yield text.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    else:
        yield text
        printed = format_key(key)
        if "/" not in printed:
            yield printed


def _tried(names: Iterator[str]) -> Iterator[str]:
    last = ""
    for last in names:
        yield last
    number = 1
    while True:
        number += 1
        yield f"{last}~{number}"


def _text(key: Any) -> str:
    """A key itself if it is text that can be encoded as UTF-8, else as tierstate prints it."""
    if type(key) is not str:
        return format_key(key)
    try:
        key.encode()
    except UnicodeEncodeError:
        return format_key(key)
    return key


class Safetensors(FileFormat):
    """The safetensors format, for ``safetensors.safe_open`` and Hugging Face loaders."""

    name = "safetensors"
    suffix = ".safetensors"

    def expresses(self, leaf: Leaf) -> bool:
        return element_type(leaf) in DTYPES

    def lay_out(self, items: Sequence[FileLeaf], about: FileInfo) -> FileLayout:
        """The first leaf of 1 MiB or more starts at a block (4 KiB), and so do the leaves of whole blocks after it."""
        leaves = [item.leaf for item in items]
        starts = list(accumulate((leaf.spec.nbytes for leaf in leaves), initial=0))
        header = json.dumps(_header(leaves, starts, about), ensure_ascii=False, separators=(",", ":")).encode()
        before = next((at for leaf, at in zip(leaves, starts, strict=False) if leaf.spec.nbytes >= BIG), 0)
        data = -(-(_LENGTH + len(header)) // 8) * 8
        data += -(data + before) % BLOCK
        if data > MAX_HEADER:
            raise FormatError(f"a header of {data} bytes is more than readers accept; at most {MAX_HEADER} are right")
        head = (data - _LENGTH).to_bytes(_LENGTH, "little") + header.ljust(data - _LENGTH)
        return FileLayout(data + starts[-1], tuple(data + at for at in starts[:-1]), head)

    def spans(self, tier: Tier, key: str) -> list[tuple[int, int]]:
        size = tier.size(key)
        if size < _LENGTH:
            raise FormatError(f"{tier.name}: {key}: {size} bytes are no safetensors file")
        length = int.from_bytes(to_bytes(read_range(tier, key, 0, _LENGTH)), "little")
        if length > min(size - _LENGTH, MAX_HEADER):
            raise FormatError(f"{tier.name}: {key}: a header of {length} bytes in a file of {size}")
        data = to_bytes(read_range(tier, key, _LENGTH, length))
        try:
            entries = [e["data_offsets"] for name, e in json.loads(data).items() if name != _METADATA]
            found = [(_LENGTH + length + int(at), int(end) - int(at)) for at, end in entries]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"{tier.name}: {key}: its header is not what was written: {error}") from error
        return [(at, nbytes) for at, nbytes in found if 0 < nbytes <= size - at]


def _header(leaves: Sequence[Leaf], starts: Sequence[int], about: FileInfo) -> dict[str, Any]:
    names = dotted_names((leaf.path for leaf in leaves), [_METADATA])
    pairs = list(zip(names, leaves, strict=True))
    paths = {name: encode_path(leaf.path) for name, leaf in pairs if not is_plain(leaf.path, name.split("."))}
    metadata = {
        "format": "pt", "run": about.run, "seq": str(about.seq), "step": str(about.step), "time": repr(about.time),
        "metadata": about.metadata, PATHS_KEY: json.dumps(paths, separators=(",", ":")),
    }  # fmt: skip
    entries = {
        name: {
            "dtype": DTYPES[element_type(leaf)],
            "shape": list(leaf.spec.shape),
            "data_offsets": [at, at + leaf.spec.nbytes],
        }
        for (name, leaf), at in zip(pairs, starts, strict=False)
    }
    return {_METADATA: metadata, **entries}
