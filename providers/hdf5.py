"""HDF5 files as state: open h5py datasets as arrays that stay in the file, and groups as dicts with their attributes.

Datasets are saved and restored by hyperslabs, chunk by chunk, without a copy of a whole dataset in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

import h5py
import numpy as np

from tierstate.manifest.boxes import row_major_runs
from tierstate.manifest.chunk import Buffer, Chunk, empty_buffer, spans
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.tensors.arrays import Array, ArrayProvider
from tierstate.providers.tensors.dtypes import numpy_name
from tierstate.providers.values.stateful import Stateful, register_stateful

from .base import Provider

ATTRIBUTES = "/attrs"
"""Key of a group's attributes and those of its datasets, where there are any; no member of a group has such a name."""


ITSELF = "."
"""Key of the group's own attributes among them."""


_EXACT_FILTERS = frozenset(
    {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SZIP}
    | {h5py.h5z.FILTER_LZF, 305, 307, 32001, 32003, 32004, 32008, 32015}
)
"""Filters that give back every bit: HDF5's own, LZF, LZO, bzip2, Blosc, Snappy, LZ4, bitshuffle and Zstandard. Others
may round (scale-offset, ZFP, SZ, bit rounding)."""


_INTEGERS_IN_FULL = (h5py.h5z.SO_INT, h5py.h5z.SO_INT_MINBITS_DEFAULT)
"""Options of the scale-offset filter with which it gives back every bit: it finds by itself how many bits it needs."""


class DatasetProvider(Provider):
    """A dataset, read from and written to its file by hyperslabs in row-major order; none of it is kept in memory.

    Its leaf is of the same kind as a NumPy array's: without a given dataset it is loaded as a NumPy array, and a saved
    array can be restored into a dataset. The bytes are those in the file, without any type conversion by HDF5.

    Args:
        value: the dataset; contiguous, chunked or compressed.
        spec: the spec of its bytes, if its HDF5 type does not say it.

    Raises:
        CaptureError: it is closed, empty, has its bytes in external files, or its elements have no fixed size, or are
            numbers that NumPy would read as others; the message says what to do.
    """

    kind: ClassVar[str] = ArrayProvider.kind

    def __init__(self, value: h5py.Dataset, spec: Spec | None = None) -> None:
        if not value:
            raise CaptureError("an HDF5 dataset of a file that was closed; keep the file open while it is saved")
        _check_own(value)
        self._value, self._type = value, value.id.get_type()
        self._size: int = self._type.get_size()
        self._spec = spec if spec is not None else _describe(value, self._size)
        self._lock = threading.Lock()

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def alias(self) -> Hashable:
        """Equal for links to the same dataset; None for one without bytes."""
        if not self._spec.nbytes:
            return None
        found = h5py.h5o.get_info(self._value.id)
        return ("hdf5", found.fileno, found.addr)

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start, nbytes in spans(self._spec.nbytes, size):
            yield Chunk(start, nbytes, partial(self.read, start))

    def read(self, start: int, out: Buffer) -> None:
        """Fill a buffer with the bytes from offset ``start`` on."""
        host = out if out.device.type == "cpu" else empty_buffer(out.numel())
        memory = host.numpy()
        for begin, end in _at_elements(start, start + out.numel(), self._size):
            part = memory[begin - start : end - start]
            if begin % self._size or end % self._size:
                part[:] = self._element(begin)[begin % self._size :][: len(part)]
            else:
                self._move(self._value.id.read, begin, part)
        if host is not out:
            out.copy_(host)

    @classmethod
    def fresh(cls, spec: Spec, device: object = None) -> Self:
        """Not supported: a leaf has the kind of an array, so `ArrayProvider` creates it where no dataset is given."""
        raise NotImplementedError("a dataset is never made anew: give one to restore into")

    def mismatch(self, spec: Spec) -> str:
        found = super().mismatch(spec)
        if not found and spec.attrs.get("fields") != self._spec.attrs.get("fields"):
            return f"has fields {self._spec.attrs.get('fields')} here, {spec.attrs.get('fields')} in the version"
        if not found and self._value.file.mode == "r":
            return f"lies in {self._value.file.filename}, which is open for reading only; open it with mode 'r+'"
        if not found and (rounds := _inexact_filter(self._value)):
            return (
                f"is kept through the HDF5 filter {rounds!r}, which may round what is written; restore into a dataset "
                "without it, or load it as an array and write that"
            )
        return found

    def load(self, start: int, data: Buffer) -> None:
        memory = data.cpu().numpy()
        for begin, end in _at_elements(start, start + data.numel(), self._size):
            part = memory[begin - start : end - start]
            if begin % self._size or end % self._size:
                with self._lock:  # another thread may write the rest of the same element
                    element = self._element(begin)
                    element[begin % self._size :][: len(part)] = part
                    self._move(self._value.id.write, begin - begin % self._size, element)
            else:
                self._move(self._value.id.write, begin, part)

    def done(self) -> h5py.Dataset:
        return self._value

    def _element(self, at: int) -> Array:
        """A copy of the bytes of the element that contains byte ``at``."""
        element = np.empty(self._size, np.uint8)
        self._move(self._value.id.read, at - at % self._size, element)
        return element

    def _move(self, call: Callable[..., None], start: int, memory: Array) -> None:
        """Read or write whole elements, from byte ``start`` on."""
        first, count = start // self._size, len(memory) // self._size
        for at, box in row_major_runs(self._value.shape, first, first + count):
            space, begin = self._value.id.get_space(), (at - first) * self._size
            if box.shape:
                space.select_hyperslab(box.offset, box.shape)
            # The memory has the box's shape: HDF5 copies this faster than one dimension of as many elements.
            room = h5py.h5s.create_simple(box.shape or (1,))
            # In the file's own type, so that HDF5 copies bytes as they are.
            call(room, space, memory[begin : begin + box.volume * self._size], self._type)


class GroupAttributes:
    """The attributes of a group and of its datasets.

    Args:
        group: the group.
    """

    def __init__(self, group: h5py.Group) -> None:
        self._owners: dict[str, Any] = {ITSELF: group}
        self._owners |= {name: found for name, found in group_members(group).items() if isinstance(found, h5py.Dataset)}

    def __bool__(self) -> bool:
        return any(len(owner.attrs) for owner in self._owners.values())

    def get(self) -> dict[str, dict[str, Any]]:
        """Name of a member, or `ITSELF` -> name of an attribute -> its value, where there are any.

        Raises:
            CaptureError: an attribute is of a type that cannot be saved; the message names it.
        """
        return {
            name: {key: _attribute(owner, key) for key in owner.attrs}
            for name, owner in self._owners.items()
            if len(owner.attrs)
        }

    def put(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set these attributes and delete all others; types in the file are kept where the new values fit."""
        gone = sorted(set(state) - set(self._owners))
        if gone:
            raise ValueError(f"there is no dataset {', '.join(gone)} that could have attributes")
        for name, owner in self._owners.items():
            wanted = state.get(name, {})
            for key in set(owner.attrs) - set(wanted):
                del owner.attrs[key]
            for key, value in wanted.items():
                if key in owner.attrs and _fits(_attribute(owner, key), value):
                    owner.attrs.modify(key, value)
                else:
                    owner.attrs[key] = value


def group_members(group: h5py.Group) -> dict[str, Any]:
    """The members of a group, by name.

    Raises:
        CaptureError: a link leads into another file or to nothing, or a dataset has its bytes in external files.
    """
    return {name: group_member(group, name) for name in group}


def group_member(group: h5py.Group, name: str) -> Any:
    """The member of a group with this name. Raises as `group_members`."""
    if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
        raise _far(group, name)
    try:
        found = group[name]
    except KeyError as error:
        where = f"{group.name.rstrip('/')}/{name} in {group.file.filename}"
        raise CaptureError(f"{where} is a link to nothing; remove it") from error
    # A soft link may lead through a link into another file.
    if h5py.h5o.get_info(found.id).fileno != h5py.h5o.get_info(group.id).fileno:
        raise _far(group, name)
    if isinstance(found, h5py.Dataset):
        _check_own(found)
    return found


def _far(group: h5py.Group, name: str) -> CaptureError:
    where = f"{group.name.rstrip('/')}/{name} in {group.file.filename}"
    return CaptureError(f"{where} is a link into another file; save what it points to by itself, and remove it")


def _check_own(value: h5py.Dataset) -> None:
    """Raises CaptureError if a dataset has its bytes in external files: the file's author chose their names, and so
    could make us read, and on a restore overwrite, any file."""
    if value.is_virtual or value.id.get_create_plist().get_external_count():
        where = f"dataset {value.name} in {value.file.filename}"
        raise CaptureError(f"{where} keeps its bytes in other files; save those by themselves, or copy them into it")


def _inexact_filter(value: h5py.Dataset) -> str:
    """The name of a filter of a dataset that may not give back the bits that are written; empty if there is none."""
    plist = value.id.get_create_plist()
    for number, _, options, name in map(plist.get_filter, range(plist.get_nfilters())):
        whole = number == h5py.h5z.FILTER_SCALEOFFSET and options[:2] == _INTEGERS_IN_FULL
        if number not in _EXACT_FILTERS and not whole:
            return name.decode(errors="replace")[:40] or str(number)
    return ""


def _tree(group: h5py.Group) -> dict[str, Any]:
    found, attributes = group_members(group), GroupAttributes(group)
    return {**found, ATTRIBUTES: attributes} if attributes else found


def _describe(value: h5py.Dataset, size: int) -> Spec:
    dtype, where = value.dtype, f"dataset {value.name} in {value.file.filename}"
    if value.shape is None:
        raise CaptureError(f"{where} is empty (it has no dataspace); give it a shape, or leave it out")
    if dtype.hasobject:
        raise CaptureError(f"{where} holds {_what(dtype)}, whose elements have no fixed size; {_remedy(dtype)}")
    if dtype.itemsize != size:
        raise CaptureError(
            f"{where} has elements of {size} bytes, of a type that NumPy knows only as {dtype}; store it as {dtype}, "
            "or its bytes as unsigned integers"
        )
    if odd := odd_numbers(value.id.get_type()):
        raise CaptureError(
            f"{where} holds {odd}, whose bytes would be other numbers to NumPy; write it anew as {dtype}"
        )
    try:
        described = numpy_name(dtype.base)
    except CaptureError as error:
        raise CaptureError(f"{where}: {error}") from error
    attrs = {} if isinstance(described, str) else {"fields": described}
    shape = (*value.shape, *dtype.shape)  # as in NumPy, elements that are arrays add their axes
    return Spec(DatasetProvider.kind, dtype.base.str, dtype.base.itemsize, shape, attrs)


def odd_numbers(type: h5py.h5t.TypeID) -> str:
    """What of an HDF5 type HDF5 converts when NumPy reads it, though it has as many bytes; empty if there is nothing.
    Bytes are taken as they are in the file, so they would be other numbers."""
    if isinstance(type, h5py.h5t.TypeIntegerID):
        bits, size = type.get_precision(), type.get_size()
        return "" if (bits, type.get_offset()) == (8 * size, 0) else f"integers of {bits} bits in {size} bytes"
    if isinstance(type, h5py.h5t.TypeFloatID):
        return "" if _form(type) == _form(h5py.h5t.py_create(type.dtype)) else "floats of a form of their own"
    if isinstance(type, (h5py.h5t.TypeEnumID, h5py.h5t.TypeArrayID)):
        return odd_numbers(type.get_super())
    if not isinstance(type, h5py.h5t.TypeCompoundID):
        return ""
    if type.dtype.kind == "c" and type.get_member_offset(0) > type.get_member_offset(1):
        return "complex numbers whose imaginary part comes first"
    return next(filter(None, map(odd_numbers, map(type.get_member_type, range(type.get_nmembers())))), "")


def _form(type: h5py.h5t.TypeFloatID) -> tuple[Any, ...]:
    """Where the parts of a float are among its bits, and what they mean."""
    return type.get_fields(), type.get_ebias(), type.get_norm()


def _what(dtype: np.dtype[Any]) -> str:
    if h5py.check_string_dtype(dtype) is not None:
        return "text of any length"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    return "sequences of any length" if h5py.check_vlen_dtype(dtype) is not None else f"elements of type {dtype}"


def _remedy(dtype: np.dtype[Any]) -> str:
    if h5py.check_string_dtype(dtype) is not None:
        return "store it as text of fixed length (dtype 'S<n>'), or save dataset.asstr()[...].tolist() as a plain value"
    return "store them as arrays of fixed size, or leave it out"


def _attribute(owner: Any, key: str) -> Any:
    """An attribute as text, a NumPy scalar or array, or a list of text."""
    kind = owner.attrs.get_id(key).dtype
    value = owner.attrs[key]
    text = h5py.check_string_dtype(kind)
    if isinstance(value, h5py.Empty) or (kind.hasobject and text is None):
        what = "empty" if isinstance(value, h5py.Empty) else f"made of {_what(kind)}"
        raise CaptureError(
            f"attribute {key!r} of {owner.name} in {owner.file.filename} is {what}, which cannot be saved; remove it, "
            "or save the datasets by themselves and not the group"
        )
    if text is not None and text.length is None:
        return value.tolist() if isinstance(value, np.ndarray) else value
    return np.asarray(value) if isinstance(value, np.void) and kind.names else value


def _fits(old: Any, new: Any) -> bool:
    """Whether a new value can be written over the old one without a conversion."""
    if isinstance(old, str) or isinstance(new, str):
        return isinstance(old, str) and isinstance(new, str)
    one, other = np.asarray(old), np.asarray(new)
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def _at_elements(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a byte range into whole elements, and before and after them parts of one element."""
    head, tail = min(-(-start // size) * size, stop), max(stop // size * size, start)
    return pairwise(sorted({start, head, tail, stop}))


PROVIDERS: dict[type, type[Provider]] = {h5py.Dataset: DatasetProvider}
"""Providers by the type of a value."""


# A group's datasets are filled in place, and its attributes are set separately.
register_stateful(h5py.Group, Stateful(_tree, lambda _group, _tree: None, strict=True, transparent=True))


register_stateful(GroupAttributes, Stateful(GroupAttributes.get, GroupAttributes.put))
