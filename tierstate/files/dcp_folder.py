"""A version as the files of a folder of `torch.distributed.checkpoint`, for its fsspec reader.

`dcp_files` makes the metadata, a pickle of torch's own classes, and one file in which each tensor is a file of
`torch.save`. torch writes these around tensors without memory ("fake" ones); the bytes are read from the tiers when
somebody asks for them.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import skip_data

from tierstate.dcp.metadata import DcpView, dcp_view, resolve, unread_leaves, value_leaves
from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import LOSSY, STORAGE, Spec
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.dtypes import torch_dtype
from tierstate.providers.tensors.tensors import TensorProvider

from .export import MAX_VALUES
from .ranges import LeafRange, RangeReader, VirtualFile

log = logging.getLogger("tierstate")


UNSAVABLE = (KeyError, RuntimeError, TypeError, AttributeError, pickle.PicklingError)
"""What `torch.save` raises for a dtype it does not know, one memory as several dtypes, or classes without a name."""


METADATA, DATA = ".metadata", "__0_0.distcp"
"""Names of the files, as DCP gives them."""


def dcp_files(reader: RangeReader) -> dict[str, VirtualFile]:
    """The files of the folder, by name.

    Not in them are pickled objects, tensors that were saved with fewer bits, what `torch.save` cannot write, and what
    is more than `MAX_VALUES` and no tensor: DCP's load of one of these keys says that it is missing.

    Args:
        reader: reads the bytes of the version's leaves.

    Raises:
        StateMismatch: the state is no dict, has paths that are one key to DCP, or plain values of more than
            `MAX_VALUES`.
        Damaged, Unreadable: a value cannot be read.
    """
    folder = _Folder(reader)
    return {METADATA: VirtualFile.of(folder.metadata()), DATA: VirtualFile.of(*folder.pieces)}


class _Folder:
    """The pieces of `DATA`, and where each key is among them."""

    def __init__(self, reader: RangeReader) -> None:
        version = reader.entry.version
        self._reader, self._leaves = reader, version.leaves
        plain = value_leaves(version)
        if sum(self._leaves[i].spec.nbytes for i in plain) > MAX_VALUES:
            raise StateMismatch(f"the version has more than {MAX_VALUES} bytes of plain values")
        self._view: DcpView = dcp_view(version, self._read(plain))
        self.pieces: list[bytes | tuple[int, int]] = []
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._at = 0
        for key, leaf in self._view.tensors.items():
            if (archive := self._archive(leaf)) is not None:
                self._add(MetadataIndex(key, torch.Size([0] * self._dimensions(key))), *archive)
        for key, value in self._view.values.items():
            if self._is_given(value) and (saved := _saved(resolve(value, self._values()))) is not None:
                self._add(MetadataIndex(key), saved)

    def metadata(self) -> bytes:
        """The content of `METADATA`."""
        view, given = self._view.metadata, {index.fqn for index in self._places}
        described = {key: about for key, about in view.state_dict_metadata.items() if key in given}
        paths = {key: path for key, path in view.planner_data.items() if key in given}
        return pickle.dumps(Metadata(described, planner_data=paths, storage_data=self._places))

    def _add(self, index: MetadataIndex, *pieces: bytes | tuple[int, int]) -> None:
        nbytes = sum(piece[1] if isinstance(piece, tuple) else len(piece) for piece in pieces)
        self._places[index] = _StorageInfo(DATA, self._at, nbytes)
        self.pieces += pieces
        self._at += nbytes

    def _dimensions(self, key: str) -> int:
        about = self._view.metadata.state_dict_metadata[key]
        assert isinstance(about, TensorStorageMetadata)
        return len(about.size)

    def _archive(self, leaf: int) -> tuple[bytes, tuple[int, int], bytes] | None:
        """A file of `torch.save` with a tensor: what is before the bytes, the leaf that has them, what is after."""
        tie = self._view.ties.get(leaf)
        root = leaf if tie is None else tie.root
        spec, nbytes = self._leaves[leaf].spec if tie is None else tie.spec, self._leaves[root].spec.nbytes
        view = _View() if tie is None or tie.offset is None else _View(tie.offset, tie.strides, tie.conj, tie.neg)
        around = _around(torch_dtype(spec.dtype), spec.shape, view, nbytes)
        return None if around is None else (around[0], (root, nbytes), around[1])

    def _is_given(self, value: Any) -> bool:
        """Whether a value can be loaded without a pickle, to the last bit, and is small."""
        ties = self._view.ties
        specs = [self._leaves[ties[i].root if i in ties else i].spec for i in unread_leaves(value)]
        fine = all(LOSSY not in s.attrs and (s.kind == STORAGE or not REGISTRY.by_kind(s.kind).unsafe) for s in specs)
        return fine and sum(spec.nbytes for spec in specs) <= MAX_VALUES

    def _values(self) -> Callable[[int], Any]:
        """Gives the values of leaves by index. Each is read once, so that those which are tied share memory."""
        read = cache(lambda leaf: self._read([leaf])[leaf])

        def value(leaf: int) -> Any:
            if (tie := self._view.ties.get(leaf)) is None:
                return read(leaf)
            return read(tie.root) if tie.offset is None else tie.view(read(tie.root))

        return value

    def _read(self, leaves: Sequence[int]) -> dict[int, Any]:
        """The values of leaves that have bytes of their own, by leaf."""
        raw = {i: empty_buffer(self._leaves[i].spec.nbytes) for i in leaves}
        self._reader.read([LeafRange(i, 0, data) for i, data in raw.items() if data.numel()])
        return {i: _value_of(self._leaves[i].spec, data) for i, data in raw.items()}


def _value_of(spec: Spec, raw: Buffer) -> Any:
    cls = TensorProvider if spec.kind == STORAGE else REGISTRY.by_kind(spec.kind)
    provider = cls.fresh(spec)
    if raw.numel():
        provider.load(0, raw)
    return provider.done()


def _saved(value: Any) -> bytes | None:
    """The file of `torch.save` with a value; None if that cannot write it."""
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except UNSAVABLE as error:
        log.info("not in the folder dcp: %s", error)
        return None
    return out.getvalue()


class _View(NamedTuple):
    """How a tensor lies in its bytes, as in `TiedLeaf`; by default it is all of them, in row-major order."""

    offset: int = 0
    strides: tuple[int, ...] | None = None
    conj: bool = False
    neg: bool = False


class _Archive(io.BytesIO):
    """Takes what `torch.save` writes.

    Attributes:
        room: offset at which it has left room for a storage.
    """

    room = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Called by torch to leave room."""
        self.room = self.tell()
        return self.room


@lru_cache(maxsize=4096)
def _around(dtype: torch.dtype, shape: tuple[int, ...], view: _View, nbytes: int) -> tuple[bytes, bytes] | None:
    """What `torch.save` writes before and after the storage of a tensor, which has so many bytes; None if it cannot
    save this dtype (those of less than a byte)."""
    with FakeTensorMode():
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if view.strides is not None:
            size = dtype.itemsize
            memory = torch.empty(nbytes // size * size, dtype=torch.uint8, device="cpu").view(dtype)
            tensor = memory.as_strided(shape, view.strides, view.offset // size)
        tensor = tensor.conj() if view.conj else tensor
        tensor = torch._neg_view(tensor) if view.neg else tensor
    out = _Archive()
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(tensor, out)
    except KeyError:
        return None
    return out.getvalue()[: out.room], out.getvalue()[out.room :]
