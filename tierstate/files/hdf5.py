"""Reads HDF5 files - exports, packs, or those of other programs - as states whose datasets are read lazily."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tierstate.engine.packs.formats import element_type
from tierstate.engine.packs.hdf5 import DTYPE, OWN, PATH
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Leaf, Spec, decode_path
from tierstate.providers.hdf5 import ATTRIBUTES, DatasetProvider, GroupAttributes, group_member, group_members
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.dtypes import TORCH_DTYPES
from tierstate.providers.tensors.tensors import check_shape

from .reader import MAX_METADATA, ImportSource, Progress, errors_name, nest, source_from_outline, step_in_file
from .stored import FileValue, check_file_spec


@contextmanager
def open_hdf5(path: Path, progress: Progress, *, skip_values: bool = False) -> Iterator[ImportSource]:
    """The state in an HDF5 file.

    An export of tierstate gives the exported state, a pack its leaves by their paths. Any other file gives its groups
    as dicts, datasets as tensors if torch has the dtype and as arrays otherwise, text as text, and attributes under the
    key ``/attrs``.

    Args:
        skip_values: leave out text and attributes of a file from another program.

    Raises:
        FormatError: it is not an HDF5 file, or its outline does not fit.
        CaptureError: a dataset or attribute is of a type that cannot be saved; the message names it.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FormatError(f"{path} cannot be read as HDF5: {error}") from error
    with file:
        try:
            with errors_name(str(path)):
                found = _Reader(file, str(path), progress).read(skip_values)
        except (
            OSError,
            RuntimeError,
            KeyError,
            ValueError,
            TypeError,
        ) as error:  # the errors of h5py for damaged files
            raise FormatError(f"{path} cannot be read as HDF5: {error}") from error
        yield found


class _Reader:
    def __init__(self, file: h5py.File, what: str, progress: Progress) -> None:
        self._file, self._what, self._progress = file, what, progress
        self._open = {h5py.h5o.get_info(file.id).addr}

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
        provider = DatasetProvider(dataset, spec)
        return FileValue(spec, partial(self._read, provider), provider.alias, dataset.id.get_storage_size())

    def _read(self, provider: DatasetProvider, start: int, out: Buffer) -> None:
        provider.read(start, out)
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

    def _value(self, dataset: h5py.Dataset) -> Any:
        if _is_text(dataset):
            if dataset.size > MAX_METADATA // 16:  # each string takes 16 bytes in the file
                raise FormatError(f"{self._what}: dataset {dataset.name} has {dataset.size} texts, which are too many")
            text = dataset.asstr()[()]
            return text.tolist() if isinstance(text, np.ndarray) else text
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
    if dtype.names is not None or dtype.hasobject or dtype.subdtype is not None:
        return ""
    return element_type(Leaf((), Spec(ArrayProvider.kind, dtype.str, dtype.itemsize)))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
