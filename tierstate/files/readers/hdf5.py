"""Reads HDF5 files - exports, packs, or those of other programs - as states whose datasets are read lazily."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from tierstate.engine.packs.formats import element_type
from tierstate.engine.packs.hdf5 import DTYPE, OWN, PATH
from tierstate.manifest.boxes import row_major_runs
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import FormatError, untrusted
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.leaf_path import decode_path
from tierstate.providers.hdf5 import (
    ATTRIBUTES,
    DatasetProvider,
    GroupAttributes,
    group_member,
    group_members,
    odd_numbers,
)
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.dtypes import TORCH_DTYPES
from tierstate.providers.tensors.tensors import check_shape

from .reader import MAX_METADATA, ImportSource, Progress, errors_name, nest, source_from_outline, step_in_file
from .stored import FileValue, check_file_spec

MAX_EXPANSION = 1100
"""How many bytes one stored byte may become: more than deflate can make of it (1032)."""


MAX_UNSTORED = 1 << 30
"""Bytes, of all datasets of a file together, that may be more than `MAX_EXPANSION` times what is stored: those that
were never written, and constants. Otherwise a file of a few kilobytes would be an import of petabytes."""


MAX_CHUNK_CACHE = 1 << 30
"""Most bytes of the HDF5 chunks that a run of elements in row-major order needs at once. They are kept decompressed."""


MAX_CHUNKS, CHUNK_ENTRY = 1 << 20, 16
"""More HDF5 chunks than this must be there: each has an entry of at least so many bytes in its file."""


_FILTERS = frozenset({*range(1, 7), h5py.h5z.FILTER_LZF})
"""Filters that HDF5 and h5py have built in. All others are plug-ins: libraries that HDF5 would load."""


def _filters_of(dataset: h5py.Dataset, what: str) -> list[int]:
    """Numbers of the filters through which a dataset is read.

    Raises:
        FormatError: one is not built in. HDF5 would load a library for it, from wherever the environment says.
    """
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    for number, _, _, name in filters:
        if number not in _FILTERS:
            raise FormatError(
                f"{what}: dataset {dataset.name} needs the HDF5 filter plug-in {number} "
                f"{name.decode(errors='replace')!r:.40}, and none is loaded for a file; write it anew with a filter "
                "that HDF5 has, as by: h5repack -f GZIP=1"
            )
    return [found[0] for found in filters]


class _Chunking(NamedTuple):
    """How a compressed dataset is read, so that each HDF5 chunk of it is decompressed once.

    Attributes:
        slots, nbytes: of its chunk cache.
    """

    slots: int
    nbytes: int

    @classmethod
    def of(cls, dataset: h5py.Dataset, what: str) -> _Chunking | None:
        """None if nothing is compressed, so that any part can be read by itself.

        Raises:
            FormatError: its filters are not built in, or its chunks are such that they cannot be read in bounded memory
                without decompressing them again and again.
        """
        filters = _filters_of(dataset, what)
        if not dataset.chunks or not filters:
            return None
        size = dataset.id.get_type().get_size()
        across = [-(-n // chunk) for n, chunk in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)]
        row = math.prod(across)
        nbytes = (row + 1) * math.prod(dataset.chunks) * size
        if nbytes > MAX_CHUNK_CACHE:
            raise FormatError(
                f"{what}: rows of dataset {dataset.name} lie in compressed chunks {dataset.chunks} that take {nbytes} "
                f"bytes together, and at most {MAX_CHUNK_CACHE} are kept; write it anew with chunks of fewer rows, as "
                "by: h5repack -l CHUNK=..."
            )
        return cls(2 * row + 101, nbytes)

    def open(self, file: h5py.File, name: str) -> h5py.Dataset:
        """The dataset with such a cache. It must not be open yet: HDF5 has one cache for all handles."""
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        access.set_chunk_cache(self.slots, self.nbytes, 1.0)  # 1: chunks that were read to their end go first
        return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))


@contextmanager
def open_hdf5(path: Path, progress: Progress, *, skip_values: bool = False) -> Iterator[ImportSource]:
    """The state in an HDF5 file.

    An export of tierstate gives the exported state, a pack its leaves by their paths. Any other file gives its groups
    as dicts, datasets as tensors if torch has the dtype and as arrays otherwise, text as text, and attributes under the
    key ``/attrs``.

    Args:
        skip_values: leave out text and attributes of a file from another program.

    Raises:
        FormatError: it is not an HDF5 file, its outline does not fit, or it says that it holds far more than it does.
        CaptureError: a dataset or attribute is of a type that cannot be saved; the message names it.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FormatError(f"{path} cannot be read as HDF5: {error}") from error
    with file:
        with untrusted(f"{path} cannot be read as HDF5", named=False), errors_name(str(path)):
            found = _Reader(file, str(path), progress).read(skip_values)
        yield found


class _Reader:
    def __init__(self, file: h5py.File, what: str, progress: Progress) -> None:
        self._file, self._what, self._progress = file, what, progress
        self._open = {h5py.h5o.get_info(file.id).addr}
        self._size = Path(what).stat().st_size
        self._counted: set[Hashable] = set()
        self._unstored = 0
        self._lock = threading.Lock()
        self._held: tuple[str, DatasetProvider] | None = None

    def read(self, skip_values: bool) -> ImportSource:
        if OWN not in self._file or not isinstance(group_member(self._file, OWN), h5py.Group):
            return ImportSource(self._tree(self._file, skip_values))
        metadata = self._metadata()
        step = self._file.attrs.get("step")
        return source_from_outline(metadata, self._find, self._what) or ImportSource(
            nest(self._pack(self._file, ()), self._what),
            step_in_file(int(step) if isinstance(step, np.integer) else None),
            metadata,
        )

    def _metadata(self) -> Mapping[str, Any]:
        own = group_member(self._file, OWN)
        found = group_member(own, "metadata") if "metadata" in own else None
        if not isinstance(found, h5py.Dataset) or found.dtype.kind != "S" or found.shape != ():
            return {}
        if found.dtype.itemsize > MAX_METADATA:
            raise FormatError(
                f"{self._what}: metadata of {found.dtype.itemsize} bytes; at most {MAX_METADATA} are read"
            )
        try:
            metadata = json.loads(bytes(found[()]))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self._what}: {OWN}/metadata is not JSON: {error}") from error
        return metadata if isinstance(metadata, dict) else {}

    def _find(self, name: Sequence[str], spec: Spec) -> FileValue:
        dataset: Any = self._file
        for part in name:
            known = (
                isinstance(dataset, h5py.Group) and "/" not in part and part not in ("", ".", "..") and part in dataset
            )
            dataset = group_member(dataset, part) if known else None
        if not isinstance(dataset, h5py.Dataset) or not name:
            raise FormatError(f"{self._what}: there is no dataset {'/'.join(name)!r:.80}, of which its outline speaks")
        found = (_type(dataset), dataset.shape)
        if found != (element_type(Leaf((), check_file_spec(spec))), spec.shape):
            raise FormatError(
                f"{self._what}: dataset {dataset.name} is {found[0]} of shape {found[1]}, "
                f"and {spec.dtype} of shape {spec.shape} in its outline"
            )
        return self._stored(dataset, spec)

    def _stored(self, dataset: h5py.Dataset, spec: Spec) -> FileValue:
        check_shape(spec.shape, spec.itemsize)
        provider, chunking = DatasetProvider(dataset, spec), _Chunking.of(dataset, self._what)
        self._check_stored(dataset, provider)
        read = partial(self._read, provider)
        if chunking is not None:  # and the dataset is closed, so that it gets its cache once it is read
            read = partial(self._read_chunked, dataset.name, spec, chunking)
        return FileValue(spec, read, provider.alias, dataset.id.get_storage_size())

    def _check_stored(self, dataset: h5py.Dataset, provider: DatasetProvider) -> None:
        """Raises FormatError if a dataset says that it holds much more than the file can."""
        nbytes, chunks = provider.spec.nbytes, 0
        if dataset.chunks:
            chunks = math.prod(-(-n // chunk) for n, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        if provider.alias not in self._counted:
            self._counted.add(provider.alias)
            self._unstored += max(0, nbytes - MAX_EXPANSION * dataset.id.get_storage_size())
        if self._unstored > MAX_UNSTORED or (chunks > MAX_CHUNKS and chunks * CHUNK_ENTRY > self._size):
            raise FormatError(
                f"{self._what}: dataset {dataset.name} of {nbytes} bytes has {dataset.id.get_storage_size()} in the "
                "file, which cannot be all of it; what was never written cannot be imported"
            )

    def _read(self, provider: DatasetProvider, start: int, out: Buffer) -> None:
        provider.read(start, out)
        self._progress(out.numel())

    def _read_chunked(self, name: str, spec: Spec, chunking: _Chunking, start: int, out: Buffer) -> None:
        """Read a part of a compressed dataset. One is open at a time, so that only its chunks are in memory."""
        with self._lock:
            if self._held is None or self._held[0] != name:
                self._held = None
                self._held = name, DatasetProvider(chunking.open(self._file, name), spec)
            self._held[1].read(start, out)
        self._progress(out.numel())

    @contextmanager
    def _within(self, group: h5py.Group) -> Iterator[None]:
        """Raises FormatError if a group contains itself, which links make possible."""
        place = h5py.h5o.get_info(group.id).addr
        if place in self._open:
            raise FormatError(f"{self._what}: group {group.name} lies in itself; remove the link that leads back")
        self._open.add(place)
        yield
        self._open.remove(place)

    def _pack(self, group: h5py.Group, names: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for name, found in group_members(group).items():
            here = (*names, name)
            if isinstance(found, h5py.Group) and here != (OWN,):
                with self._within(found):
                    yield from self._pack(found, here)
            elif isinstance(found, h5py.Dataset):
                code = found.attrs.get(PATH)
                yield decode_path(_text(code)) if code is not None else here, self._value(found)

    def _tree(self, group: h5py.Group, skip_values: bool) -> dict[str, Any]:
        found = {}
        for name, value in group_members(group).items():
            if isinstance(value, h5py.Group):
                with self._within(value):
                    found[name] = self._tree(value, skip_values)
            elif not (skip_values and _is_text(value)):
                found[name] = self._value(value)
        attributes = {} if skip_values else GroupAttributes(group).get()
        return {**found, ATTRIBUTES: attributes} if attributes else found

    def _text_of(self, dataset: h5py.Dataset) -> Any:
        """The text of a dataset, or nested lists of it. Many elements may be the same bytes of the file, so they are
        read a few at a time, and counted."""
        _filters_of(dataset, self._what)
        if not dataset.shape:
            return dataset.asstr()[()]
        found: list[str] = []
        step, left = max(1, MAX_METADATA // self._size), MAX_METADATA
        for begin in range(0, dataset.size, step):
            for _, box in row_major_runs(dataset.shape, begin, min(begin + step, dataset.size)):
                found += dataset.asstr()[box.slices()].reshape(-1).tolist()
            left -= sum(map(len, found[begin:]))
            if left < 0:
                raise FormatError(f"{self._what}: dataset {dataset.name} has more than {MAX_METADATA} letters of text")
        return np.array(found, object).reshape(dataset.shape).tolist()

    def _value(self, dataset: h5py.Dataset) -> Any:
        if _is_text(dataset):
            if dataset.size > MAX_METADATA // 16:  # each string takes 16 bytes in the file
                raise FormatError(f"{self._what}: dataset {dataset.name} has {dataset.size} texts, which are too many")
            return self._text_of(dataset)
        name = _type(dataset)
        if (
            name in TORCH_DTYPES
            and dataset.shape is not None
            and TORCH_DTYPES[name].itemsize == dataset.id.get_type().get_size()
        ):
            return self._stored(dataset, Spec("tensor", name, TORCH_DTYPES[name].itemsize, dataset.shape))
        return self._stored(dataset, DatasetProvider(dataset).spec)


def _is_text(dataset: h5py.Dataset) -> bool:
    text = h5py.check_string_dtype(dataset.dtype)
    return text is not None and text.length is None and dataset.shape is not None


def _type(dataset: h5py.Dataset) -> str:
    """The dtype's name as `element_type` gives it; empty if it has none."""
    if DTYPE in dataset.attrs:
        return _text(dataset.attrs[DTYPE])
    dtype = dataset.dtype
    if dtype.names is not None or dtype.hasobject or dtype.subdtype is not None or odd_numbers(dataset.id.get_type()):
        return ""
    return element_type(Leaf((), Spec(ArrayProvider.kind, dtype.str, dtype.itemsize)))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
