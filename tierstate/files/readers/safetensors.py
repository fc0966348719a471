"""Reads safetensors files, and sets of them with an index: checks the headers, and reads tensors lazily."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tierstate.engine.packs.formats import DTYPES, MAX_HEADER, PATHS_KEY, element_type
from tierstate.manifest.chunk import Buffer, empty_buffer, to_bytes
from tierstate.manifest.errors import FormatError, untrusted
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.leaf_path import decode_path
from tierstate.providers.tensors.dtypes import TORCH_DTYPES
from tierstate.providers.tensors.tensors import MAX_TENSOR_DIMS
from tierstate.tiers.posix.files import BufferedFile, open_file

from .reader import OUTLINE, ImportSource, Progress, errors_name, nest, source_from_outline, step_in_file
from .stored import FileValue, check_file_spec

MAX_INDEX_FILE = 1 << 28


_TORCH = {name: dtype for dtype, name in DTYPES.items()} | {"C64": "complex64", "F8_E8M0": "float8_e8m0fnu"}


class TensorEntry(NamedTuple):
    """A tensor as a header lists it.

    Attributes:
        file, path: the open file, and its path.
        dtype, shape: the dtype by its name in the format, and the shape.
        start, nbytes: its bytes in the file.
    """

    file: BufferedFile
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@contextmanager
def open_safetensors(path: Path, progress: Progress) -> Iterator[ImportSource]:
    """The state in a file, or in the files of an index.

    An export of tierstate gives the exported state, a pack its leaves by their paths. Any other file gives a flat dict
    of its tensors by name, as ``load_file`` does.

    Raises:
        FormatError: it is not a safetensors file, or is damaged.
    """
    with ExitStack() as stack:
        with errors_name(str(path)):
            found = _read_all(path, stack, progress)
        yield found


def _read_all(path: Path, stack: ExitStack, progress: Progress) -> ImportSource:
    if path.suffix == ".json":
        metadata, entries = _open_index(path, stack)
        outline = metadata.get(OUTLINE)  # a text; at first it was an object
        about = {OUTLINE: _loads(outline, f"{path}: outline") if isinstance(outline, str) else outline}
    else:
        metadata, entries = _open_one(path, stack)
        # In files of other programs this field means something else.
        about = _loads(str(metadata.get("metadata", "{}")), f"{path}: metadata") if PATHS_KEY in metadata else {}

    def find(name: Sequence[str], spec: Spec) -> FileValue:
        return _stored(_named(entries, ".".join(name), spec, path), spec, progress)

    found = source_from_outline(about, find, str(path))
    return found or ImportSource(_plain(metadata, entries, path, progress), step_in_file(metadata.get("step")), about)


def _plain(metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry], path: Path, progress: Progress) -> Any:
    values = {name: _stored(entry, _spec(name, entry), progress) for name, entry in entries.items()}
    if PATHS_KEY not in metadata:
        return values
    paths = _loads(str(metadata[PATHS_KEY]), f"{path}: {PATHS_KEY}")
    return nest(((_path(paths, name), value) for name, value in values.items()), str(path))


def _path(paths: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    return decode_path(str(paths[name])) if name in paths else tuple(name.split("."))


def _open_index(path: Path, stack: ExitStack) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    with closing(open_file(path.resolve())) as file:
        data = _head(file, 0, file.status().st_size, MAX_INDEX_FILE, path)
    index = _loads(data, str(path))
    weights, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weights, dict) or not isinstance(metadata, dict):
        raise FormatError(f"{path} is no index of safetensors files: it has no weight_map")
    files: dict[str, dict[str, TensorEntry]] = {}
    found = {}
    for name, shard in weights.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise FormatError(f"{path}: {shard!r:.80} is no name of a file beside the index")
        if shard not in files:
            with untrusted(f"{path}: {shard!r:.80} beside it", named=False):  # it may be absent, or no name of a file
                files[shard] = _open_one(path.with_name(shard), stack)[1]
        if name not in files[shard]:
            raise FormatError(f"{path}: {shard} has no tensor {name!r:.80}")
        found[name] = files[shard][name]
    return metadata, found


def _open_one(path: Path, stack: ExitStack) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    # Links are followed, since the model cache of Hugging Face consists of links.
    file = stack.enter_context(closing(open_file(path.resolve())))
    size = file.status().st_size
    length = int.from_bytes(_head(file, 0, 8, 8, path), "little") if size >= 8 else -1
    if not 2 <= length <= size - 8:
        raise FormatError(f"{path} is no safetensors file: a header of {length} bytes does not fit its {size} bytes")
    header = _loads(_head(file, 8, length, MAX_HEADER, path), str(path))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"{path}: its metadata is no JSON object")
    entries = {name: _entry(item, file, path, name, 8 + length, size) for name, item in header.items()}
    _check_order(entries, path, 8 + length, size)
    return metadata, entries


def _check_order(entries: Mapping[str, TensorEntry], path: Path, data: int, size: int) -> None:
    """Raises FormatError unless the tensors follow each other and fill the file, as the format demands: otherwise the
    header is not that of this data. Several names of all the same bytes are taken: they are tied."""
    end, last = data, (data, 0)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if (entry.start, entry.nbytes) == last:
            continue
        last = entry.start, entry.nbytes
        if entry.start != end:
            raise FormatError(
                f"{path}: tensor {name!r:.80} begins at byte {entry.start - data} of the data, and the one before it "
                f"ends at {end - data}; right are tensors that follow each other"
            )
        end += entry.nbytes
    if end != size:
        raise FormatError(f"{path}: its tensors end at byte {end - data} of the data, of which there are {size - data}")


def _entry(item: Any, file: BufferedFile, path: Path, name: str, data: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: tensor {name!r:.80} has no dtype, shape and two data_offsets") from error
    if not isinstance(dtype, str) or dtype not in _TORCH:
        known = ", ".join(sorted(_TORCH))
        raise FormatError(
            f"{path}: tensor {name!r:.80} is of dtype {dtype!r:.40}, which is not known; known are {known}"
        )
    # First the number of axes: the product of a million numbers takes minutes.
    sound = len(shape) <= MAX_TENSOR_DIMS and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    if not sound or stop - start != math.prod(shape) * TORCH_DTYPES[_TORCH[dtype]].itemsize:
        where = f"bytes {start!r:.40} to {stop!r:.40}"
        raise FormatError(f"{path}: tensor {name!r:.80}: {dtype} of shape {shape!s:.200} are not {where}")
    if data + stop > size:
        raise FormatError(f"{path} is truncated: tensor {name!r:.80} ends at byte {data + stop} of {size}")
    return TensorEntry(file, path, dtype, shape, data + start, stop - start)


def _spec(name: str, entry: TensorEntry) -> Spec:
    dtype = _TORCH[entry.dtype]
    try:
        return check_file_spec(Spec("tensor", dtype, TORCH_DTYPES[dtype].itemsize, entry.shape))
    except FormatError as error:
        raise FormatError(f"{entry.path}: tensor {name!r:.80}: {error}") from error


def _named(entries: Mapping[str, TensorEntry], name: str, spec: Spec, path: Path) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        raise FormatError(f"{path}: there is no tensor {name!r:.80}, of which its outline speaks")
    check_file_spec(spec)
    if (entry.dtype, entry.shape) != (DTYPES.get(element_type(Leaf((), spec))), spec.shape):
        raise FormatError(
            f"{path}: tensor {name!r:.80} is {entry.dtype} of shape {entry.shape}, "
            f"and {spec.dtype} of shape {spec.shape} in its outline"
        )
    return entry


def _stored(entry: TensorEntry, spec: Spec, progress: Progress) -> FileValue:
    return FileValue(spec, partial(_read, entry, progress), (str(entry.path), entry.start, entry.nbytes))


def _read(entry: TensorEntry, progress: Progress, start: int, out: Buffer) -> None:
    entry.file.read(entry.start + start, out)
    progress(out.numel())


def _head(file: BufferedFile, start: int, nbytes: int, limit: int, path: Path) -> bytes:
    if nbytes > limit:
        raise FormatError(f"{path}: a header of {nbytes} bytes is too long; at most {limit} are read")
    out = empty_buffer(nbytes)
    file.read(start, out)
    return to_bytes(out)


def _loads(data: bytes | str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is no JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are there once each: of two tensors with one name the first would go missing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {twice!r:.80} is there twice")
    return found
