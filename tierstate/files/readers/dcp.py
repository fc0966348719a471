"""Reads folders of ``torch.distributed.checkpoint`` tensor by tensor, with a restricted unpickler that runs no code."""

from __future__ import annotations

import io
import math
import pickle
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import is_dataclass
from enum import Enum, EnumType
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, empty_buffer, to_bytes
from tierstate.manifest.errors import FormatError, Unsafe, untrusted
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.tensors.dtypes import TORCH_DTYPES, torch_name
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.posix.files import open_file

from .reader import MAX_METADATA, ImportSource, Progress, errors_name, nest
from .stored import FileValue, check_file_spec

METADATA_FILE = ".metadata"


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Megatron-core also keeps the plans by which it was written.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *TORCH_DTYPES},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # their names where Python 3.13 wrote it
    "collections": {"OrderedDict"},
}  # fmt: skip
"""The only classes that the metadata of a DCP folder may contain."""


@contextmanager
def open_dcp(folder: Path, progress: Progress) -> Iterator[ImportSource]:
    """The state in a folder, nested as it was saved. The shards of a tensor are joined, one tensor in memory at a time.

    Keys are those that torch stored: it turns int keys of dicts into text.

    Raises:
        Unsafe: unpickling the metadata, or a value, would run code.
        FormatError: it is not a DCP folder, or is damaged.
    """
    with errors_name(str(folder)):
        found = _Folder(folder, progress).read()
    yield found


def _enum_member(kind: Any, name: Any) -> Enum:
    """In place of `getattr`, by which Python 3.11.0 to 3.11.3 pickles the member of an enum."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise Unsafe(f"the metadata asks for the attribute {name!r:.80} of {kind!r:.80}, which torch never wrote there")
    member: Enum = kind[name]
    return member


_load_build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]


class _Restricted(pickle._Unpickler):
    """An unpickler that creates only objects of the metadata's classes, and changes only objects that it created.

    It derives from the unpickler in Python: only there a single opcode can be overridden, and its memo cannot be made
    larger than the entries that were put into it.
    """

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    stack: list[Any]

    def _build(self) -> None:
        # Setting the state of a class, or of a singleton such as an enum member, would change it for the whole process.
        made = self.stack[-2]
        if isinstance(made, type) or not is_dataclass(made):
            raise Unsafe(f"the metadata sets attributes of {made!r:.80}, which torch never wrote there")
        _load_build(self)

    def _bytearray(self) -> None:
        raise FormatError("the metadata has a bytearray, which torch never wrote there")

    dispatch[pickle.BUILD[0]] = _build
    # Refused, since memory would be allocated before it is known whether the file has so many bytes.
    dispatch[pickle.BYTEARRAY8[0]] = _bytearray

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _CLASSES.get(module, ()):
            raise Unsafe(
                f"the metadata names {module}.{name}, which might run any code; if you trust the folder, turn it into "
                "a file with torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and import that"
            )
        # Only Python 3.13 has that module; the classes are the same.
        return super().find_class("pathlib" if module == "pathlib._local" else module, name)


class _Folder:
    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._metadata = self._load_metadata()
        self._sizes: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._held: tuple[str, Buffer] | None = None

    def read(self) -> ImportSource:
        with untrusted(f"{self._folder}: the metadata cannot be used", named=False):
            listed = dict(self._metadata.state_dict_metadata)
            paths = self._metadata.planner_data or {}
            # The metadata lists tensors rank by rank; the planner's paths are in the state's own order.
            place = {name: i for i, name in enumerate(paths)}
            names = sorted(listed, key=lambda name: place.get(name, len(place)))
            items = [(_path(paths, name), self._value(name, listed[name])) for name in names]
        return ImportSource(_with_lists(nest(items, str(self._folder))))

    def _load_metadata(self) -> Any:
        path = self._folder / METADATA_FILE
        with closing(open_file(path.resolve())) as file:
            size = file.status().st_size
            if size > MAX_METADATA:
                raise FormatError(f"{path} has {size} bytes; at most {MAX_METADATA} are read")
            data = empty_buffer(size)
            file.read(0, data)
        try:
            return _Restricted(io.BytesIO(to_bytes(data))).load()
        except Unsafe as error:
            raise Unsafe(f"{path}: {error}") from error
        except Exception as error:  # a forged pickle may raise anything
            raise FormatError(f"{path} is no metadata that torch {torch.__version__} reads: {error!r:.200}") from error

    def _value(self, name: str, found: Any) -> Any:
        if type(found).__name__ == "BytesStorageMetadata":
            return self._plain(name)
        properties, shape = found.properties, tuple(found.size)
        spec = check_file_spec(Spec("tensor", torch_name(properties.dtype), properties.dtype.itemsize, shape))
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
        places = [self._place(name, box.offset) for box in boxes]
        whole = all(box.within(shape) for box in boxes) and sum(box.volume for box in boxes) == math.prod(shape)
        if not whole or not _disjoint([box for box in boxes if box.volume]):
            raise FormatError(f"{self._folder}: the shards of {name!r:.80} are not the whole of {shape}")
        lengths = sum(length for _, _, length in places)
        if spec.nbytes > min(lengths, sum(self._sizes[path] for path in {path for path, _, _ in places})):
            raise FormatError(f"{self._folder}: {name!r:.80} of {spec.nbytes} bytes has fewer in its files")
        return FileValue(
            spec, partial(self._read, name, spec, list(zip(boxes, places, strict=True))), (str(self._folder), name)
        )

    def _place(self, name: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        """File, offset and length of one stored item."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        info = self._metadata.storage_data[MetadataIndex(name, offset)]
        if getattr(info, "transform_descriptors", None):
            raise FormatError(f"{self._folder}: {name!r:.80} was written through an extension; load it with torch")
        relative = PurePosixPath(info.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise FormatError(f"{self._folder}: {name!r:.80} lies outside of the folder, in {info.relative_path!r:.80}")
        path, at, length = self._folder / relative, int(info.offset), int(info.length)
        if path not in self._sizes:
            self._sizes[path] = path.stat().st_size
        _check_range(path, at, length, self._sizes[path])
        return path, at, length

    def _load(self, place: tuple[Path, int, int]) -> Any:
        path, offset, length = place
        with closing(open_file(path.resolve())) as file:
            _check_range(path, offset, length, file.status().st_size)
            data = empty_buffer(length)
            file.read(offset, data)
        try:
            return torch.load(io.BytesIO(to_bytes(data)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise Unsafe(f"{path} holds, at byte {offset}, what would run code to be loaded: {error!s:.200}") from error
        except Exception as error:  # whatever torch makes of bytes that it never wrote
            raise FormatError(f"{path} holds, at byte {offset}, nothing that torch loads: {error!r:.200}") from error

    def _plain(self, name: str) -> Any:
        return self._load(self._place(name, None))

    def _read(self, name: str, spec: Spec, shards: list[tuple[Box, Any]], start: int, out: Buffer) -> None:
        with self._lock:
            if self._held is None or self._held[0] != name:
                self._held = None
                self._held = (name, self._joined(name, spec, shards))
            out.copy_(self._held[1][start : start + out.numel()])
        self._progress(out.numel())

    def _joined(self, name: str, spec: Spec, shards: list[tuple[Box, Any]]) -> Buffer:
        whole = TensorProvider.fresh(spec)
        for box, place in shards:
            shard = self._load(place)
            if not isinstance(shard, torch.Tensor) or (shard.dtype, tuple(shard.shape)) != (
                whole.value.dtype,
                box.shape,
            ):
                raise FormatError(f"{self._folder}: a shard of {name!r:.80} is another than its metadata says")
            whole.value[box.slices()].copy_(shard.detach())
        memory = whole.memory()
        assert memory is not None  # fresh, on the host
        return memory


def _check_range(path: Path, offset: int, length: int, size: int) -> None:
    if not 0 <= offset <= offset + length <= size:
        raise FormatError(f"{path} is truncated: bytes {offset} to {offset + length} are not there")


def _disjoint(boxes: list[Box]) -> bool:
    """Whether no two boxes overlap; sorted along the axis with the most different offsets, to compare few pairs."""
    if len(boxes) < 2 or not boxes[0].shape:
        return len(boxes) < 2
    axis = max(range(len(boxes[0].shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offset[axis])
    starts = [box.offset[axis] for box in ordered]
    for i, one in enumerate(ordered):
        near = bisect_left(starts, one.offset[axis] + one.shape[axis], i + 1)
        if any(map(one.intersect, ordered[i + 1 : near])):
            return False
    return True


def _path(paths: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    path = tuple(paths.get(name, (name,)))
    if not all(type(key) in (str, int) for key in path):
        raise TypeError(f"{path!r:.80} is no path")
    return path


def _with_lists(value: Any) -> Any:
    """Turns dicts with the int keys 0, 1, 2 and so on back into lists: DCP stores lists in this way."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in range(len(items))]
    return items
