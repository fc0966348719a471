"""The HDF5 file format of packs and exports: groups follow the leaf paths; each leaf is one contiguous dataset.

h5py lays out the file on a `Recorder`, an in-memory file that keeps the metadata that HDF5 writes and drops the data.
A dataset gets its offset when one element of it is written; nothing else of the data is written. This takes 0.1 ms per
leaf, so it is done once for all saves of the same leaves: placeholders mark what differs between saves, and are then
replaced. No HDF5 structure with checksums is used, so that the replacement is valid.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import h5py
import numpy as np

from tierstate.manifest.chunk import empty_buffer, view
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.tiers.base import Range, Tier

from .formats import FileFormat, FileInfo, FileLayout, FileLeaf, element_type, group_names, is_plain
from .slab_layout import BIG, BLOCK

OWN = "__tierstate__"
"""The group for data that is not a leaf: ``metadata``, ``digests``."""


PATH = "path"
"""Attribute of a dataset: the encoded path of its leaf, if it cannot be derived from the names of the groups."""


DTYPE = "dtype"
"""Attribute of a dataset: the element type, if HDF5 has only a type of the same bits."""


DIGESTS = "digests"
"""Attribute of a dataset: first row and number of rows of its leaf in the table of digests."""


_FLOATS = {"bfloat16": ((15, 7, 8, 0, 7), 2, 127), "float8_e5m2": ((7, 2, 5, 0, 2), 1, 15)}
"""Types that can be defined in HDF5: bit fields (sign, exponent, mantissa, with lengths), bytes, bias."""


_BITS = {"float8_e4m3fn": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1", "float8_e8m0fnu": "u1"}
"""Types whose values are not IEEE numbers: stored as integers of the same bits."""


_PLAIN = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)]
)


MAX_NDIM = 32
"""The most axes that an HDF5 dataset may have."""


MAX_PATH = 32 << 10
"""The longest encoded path in bytes: attributes of the oldest HDF5 format have at most 64 KiB."""


METADATA = 4096
"""The user's metadata is padded with spaces to a multiple of this many bytes."""


# Placeholders. Not valid UTF-8, so that no name contains them; the third one is also a number.
_SEQ, _STEP, _TIME, _METADATA = (b"\xfe\xf5" + text + b"\xf5\xc0" for text in (b"-SEQ", b"STEP", b"TIME", b"METADATA"))


class Hdf5(FileFormat):
    """The HDF5 format, for h5py, h5dump and any other HDF5 reader from version 1.8 on."""

    name = "hdf5"
    suffix = ".h5"

    def expresses(self, leaf: Leaf) -> bool:
        name = element_type(leaf)
        known = name.removeprefix(">") in _PLAIN or name in _FLOATS or name in _BITS
        return known and len(leaf.spec.shape) <= MAX_NDIM and len(encode_path(leaf.path)) <= MAX_PATH

    def lay_out(self, items: Sequence[FileLeaf], about: FileInfo) -> FileLayout:
        """Leaves of 1 MiB or more start at blocks (4 KiB); the others follow each other without a gap."""
        metadata = about.metadata.encode()
        room = -(-max(1, len(metadata)) // METADATA) * METADATA
        mould = _mould(tuple(_entries(items)), about.run, about.chunk, about.digest, room)
        head = bytearray(mould.head)
        for mark, value in (
            (_SEQ, about.seq.to_bytes(8, "little", signed=True)),
            (_STEP, about.step.to_bytes(8, "little", signed=True)),
            (_TIME, struct.pack("<d", about.time)),
            (_METADATA, metadata.ljust(room)),
        ):
            at = head.index(mark)
            head[at : at + len(value)] = value
        return mould._replace(head=bytes(head))

    def spans(self, tier: Tier, key: str) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        def note(_name: str, member: Any) -> None:
            at = member.id.get_offset() if isinstance(member, h5py.Dataset) else None
            if at is not None:
                found.append((at, member.id.get_storage_size()))

        try:
            with h5py.File(_StoredFile(tier, key), "r") as file:
                file.visititems(note)
        except TierstateError:
            raise
        except Exception as error:  # h5py has an exception of almost any type for a damaged file
            raise FormatError(f"{tier.name}: {key}: cannot be read as HDF5: {error}") from error
        return found


class _SeekableFile(io.RawIOBase):
    """A file that can be read at any place, for h5py.

    Attributes:
        end: length of the file in bytes.
    """

    def __init__(self, end: int = 0) -> None:
        self.end, self._at = end, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.end}[whence]
        return self._at


class _StoredFile(_SeekableFile):
    """An object of a tier as a file."""

    def __init__(self, tier: Tier, key: str) -> None:
        super().__init__(tier.size(key))
        self._tier, self._key = tier, key

    def readinto(self, out: Any) -> int:
        into = memoryview(out).cast("B")
        data = empty_buffer(max(0, min(len(into), self.end - self._at)))
        if len(data):
            self._tier.read(self._key, [Range(self._at, data)])
        into[: len(data)] = view(data)
        self._at += len(data)
        return len(data)


class _Entry(NamedTuple):
    """One dataset.

    Attributes:
        names: names of the groups above it, then its own name.
        path: the encoded path of its leaf, if it cannot be derived from the names.
        element: its element type.
        shape: its shape.
        digests: number of its rows in the table of digests.
    """

    names: tuple[str, ...]
    path: str
    element: str
    shape: tuple[int, ...]
    digests: int


def _entries(items: Sequence[FileLeaf]) -> Iterator[_Entry]:
    for (leaf, digests), names in zip(items, group_names((item.leaf.path for item in items), [OWN]), strict=True):
        path = "" if is_plain(leaf.path, names) else encode_path(leaf.path)
        yield _Entry(names, path, element_type(leaf), leaf.spec.shape, digests)


@lru_cache(maxsize=16)
def _mould(entries: tuple[_Entry, ...], run: str, chunk: int, digest: str, room: int) -> FileLayout:
    """A file of these datasets, with placeholders for the number, step, time and metadata of the save."""
    return _Drawing().draw(entries, run, chunk, digest, room)


class _Drawing:
    """Computes the layout of one file."""

    def __init__(self) -> None:
        self._plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._plist.set_layout(h5py.h5d.CONTIGUOUS)
        self._plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._plist.set_obj_track_times(False)
        self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5py.h5t.CSET_UTF8)
        self._types: dict[str, Any] = {}

    def draw(self, entries: Sequence[_Entry], run: str, chunk: int, digest: str, room: int) -> FileLayout:
        """The layout; its head has placeholders."""
        recorder = Recorder()
        # The oldest version of every structure, so that every reader opens the file. HDF5 reuses no freed space, so
        # that datasets that are allocated later have larger offsets.
        with h5py.File(
            recorder, "w", libver=("earliest", "v110"), fs_strategy="none",
            alignment_threshold=BIG, alignment_interval=BLOCK,
        ) as file:  # fmt: skip
            seq, step = (int.from_bytes(mark, "little", signed=True) for mark in (_SEQ, _STEP))
            file.attrs.update(run=run, seq=seq, step=step, time=struct.unpack("<d", _TIME)[0])
            file.attrs.update(chunk=chunk, digest=digest)
            file.create_dataset(f"{OWN}/metadata", data=np.bytes_(_METADATA.ljust(room, b"-")))
            made = self._leaves(file.id, entries)
            table = self._dataset(file.id, (OWN, DIGESTS), "uint64", (sum(e.digests for e in entries), 2))
            file.flush()
            recorder.limit = file.id.get_filesize()
            offsets = [self._place(d, e.element) for d, e in zip(made, entries, strict=True)]
            digests = self._place(table, "uint64")
        return FileLayout(recorder.end, _rising(offsets), bytes(recorder.front), -1 if digests is None else digests)

    def _leaves(self, file: Any, entries: Sequence[_Entry]) -> list[Any]:
        made, row = [], 0
        for entry in entries:
            dataset = self._dataset(file, entry.names, entry.element, entry.shape)
            if entry.path:
                self._tell(dataset, PATH, np.bytes_(entry.path))
            if entry.element not in _PLAIN:
                self._tell(dataset, DTYPE, np.bytes_(entry.element))
            if entry.digests:
                self._tell(dataset, DIGESTS, np.array([row, entry.digests], "<i8"))
                row += entry.digests
            made.append(dataset)
        return made

    def _dataset(self, file: Any, names: Sequence[str], name: str, shape: Sequence[int]) -> Any:
        h5s, h5d = h5py.h5s, h5py.h5d
        space = h5s.create_simple(tuple(shape)) if shape else h5s.create(h5s.SCALAR)
        dataset = h5d.create(file, None, self._type(name), space, dcpl=self._plist)
        h5py.h5o.link(dataset, file, "/".join(names).encode(), lcpl=self._links)
        return dataset

    def _tell(self, dataset: Any, name: str, value: Any) -> None:
        h5s, data = h5py.h5s, np.asarray(value)
        kind = h5py.h5t.py_create(data.dtype)
        space = h5s.create_simple(data.shape) if data.shape else h5s.create(h5s.SCALAR)
        h5py.h5a.create(dataset, name.encode(), kind, space).write(data)

    def _place(self, dataset: Any, name: str) -> int | None:
        """Allocate a dataset by writing one element; its offset, or None if it has no elements."""
        space = dataset.get_space()
        if not space.get_simple_extent_npoints():
            return None
        if space.shape:
            space.select_elements([(0,) * len(space.shape)])
        kind, one = self._type(name), h5py.h5s.create_simple((1,))
        dataset.write(one, space, np.zeros(1, f"V{kind.get_size()}"), kind)
        found: int = dataset.get_offset()
        return found

    def _type(self, name: str) -> Any:
        if name not in self._types:
            self._types[name] = self._made_type(name)
        return self._types[name]

    def _made_type(self, name: str) -> Any:
        h5t = h5py.h5t
        if name not in _FLOATS:
            plain = name.removeprefix(">")
            dtype = np.dtype(_BITS.get(plain, plain))
            return h5t.py_create(dtype.newbyteorder(">") if name != plain else dtype, logical=True)
        (fields, nbytes, bias), made = _FLOATS[name], h5t.IEEE_F32LE.copy()
        made.set_fields(*fields)
        made.set_precision(8 * nbytes)
        made.set_size(nbytes)
        made.set_ebias(bias)
        return made


class Recorder(_SeekableFile):
    """An in-memory file that keeps only its beginning.

    Attributes:
        limit: bytes to keep; None keeps everything.
        front: the bytes that are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit: int | None = None
        self.front = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = len(data)
        if self.limit is None or self._at < self.limit:
            self.front.extend(bytes(max(0, self._at - len(self.front))))
            self.front[self._at : self._at + count] = data
        self._at += count
        self.end = max(self.end, self._at)
        return count

    def readinto(self, out: Any) -> int:
        found = self.front[self._at : self._at + len(out)]
        out[:] = bytes(found).ljust(len(out), b"\0")
        self._at += len(out)
        return len(out)

    def truncate(self, size: int | None = None) -> int:
        self.end = self._at if size is None else size
        return self.end


def _rising(offsets: Sequence[int | None]) -> tuple[int, ...]:
    """Offsets; an empty leaf gets the offset of the leaf before it."""
    found, last = [], 0
    for offset in offsets:
        last = last if offset is None else offset
        found.append(last)
    return tuple(found)
