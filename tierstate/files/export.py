"""Exports a version to a safetensors or HDF5 file, or to sharded safetensors files with an index, as Hugging Face does.

Every chunk is verified, and tensors are not held in memory: each chunk is written to its offset in a file as soon as it
arrives. The files appear together, or not at all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tierstate.checkpointer import Checkpointer
from tierstate.engine.info import VersionInfo
from tierstate.engine.packs.formats import (
    FileFormat,
    FileInfo,
    FileLayout,
    FileLeaf,
    dotted_names,
    format_of,
    group_names,
)
from tierstate.engine.packs.hdf5 import OWN
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.restore.restore import READ_WORKERS, check_leaves_whole, reading, restarting
from tierstate.engine.restore.scatter import Destination, ScatterTargets
from tierstate.engine.store.catalog import VersionCopies
from tierstate.files.readers.outline import NO_BYTES, OutlineLeaf, SelectedLeaf, Selection, encode_outline
from tierstate.files.readers.reader import OUTLINE
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, as_buffer
from tierstate.manifest.errors import Damaged, StateMismatch
from tierstate.manifest.format.leaf import TIED, Leaf
from tierstate.manifest.format.leaf_path import decode_path, format_path
from tierstate.manifest.format.version import Version, copy_stages
from tierstate.providers.tree.rename import Rename
from tierstate.providers.values.values import ValueProvider
from tierstate.tiers.memory.arena import Arena

from .atomic_files import AtomicFiles, check_folder

INDEX_SUFFIX = ".index.json"
"""Suffix of the index file of a set of files."""


MAX_SHARD_FILE = 5 << 30
"""Default limit for the bytes of tensors in one file, as in Hugging Face."""


MAX_VALUES = 16 << 20
"""Largest size of all plain values of an export, in bytes: they are in a header that readers read as a whole."""


FORMAT_OF_SUFFIX = {".safetensors": "safetensors", ".h5": "hdf5", ".hdf5": "hdf5"}
"""Suffix of a file -> its format."""


RESERVED_NAME = "__metadata__"
"""The name that no tensor of a safetensors file may have."""


_LISTED = 10


class FilePlace:
    """The part of a file that a tensor's bytes are written to, in row-major order.

    Args:
        write: writes bytes at an offset in the file.
        offset: where in the file the tensor begins.
        shape, itemsize: of the tensor.
    """

    def __init__(
        self, write: Callable[[int, Buffer], object], offset: int, shape: tuple[int, ...], itemsize: int
    ) -> None:
        self._write, self._offset = write, offset
        self._shape, self._itemsize = shape, itemsize

    def load(self, start: int, data: Buffer) -> None:
        """Write consecutive bytes of the tensor."""
        self._write(self._offset + start, data)

    def scatter(self, at: Box, data: Buffer, part: Box) -> None:
        """Write a box of the elements, row by row."""
        axis = len(self._shape)
        while axis > 0 and part.shape[axis:] == self._shape[axis:]:
            axis -= 1  # axes that the part has completely are contiguous with the axis before
        cells = data.view(*at.shape, self._itemsize)[part.slices(at.offset)]
        rows = cells.reshape(math.prod(part.shape[:axis]), -1)
        index = np.indices(part.shape[:axis]).reshape(axis, len(rows)).T + part.offset[:axis]
        steps = [self._itemsize * math.prod(self._shape[d + 1 :]) for d in range(len(self._shape))]
        first = self._offset + sum(o * s for o, s in zip(part.offset[axis:], steps[axis:], strict=True))
        for place, row in zip((index @ np.array(steps[:axis], "i8")).tolist(), rows, strict=True):
            self._write(first + place, row)


def shard_files(to: Path, count: int) -> list[Path]:
    """The files of an export named ``to``, without the index."""
    if count == 1:
        return [to]
    return [to.with_name(f"{to.stem}-{i:05}-of-{count:05}{to.suffix}") for i in range(1, count + 1)]


def index_file(to: Path) -> Path:
    """The index file of an export of several files."""
    return to.with_name(f"{to.name}{INDEX_SUFFIX}")


def existing_files(to: Path) -> list[Path]:
    """The existing files of any export of that name, the index first."""
    shard = re.compile(rf"{re.escape(to.stem)}-[0-9]{{5,}}-of-[0-9]{{5,}}{re.escape(to.suffix)}")
    check_folder(to)
    there = {path.name: path for path in to.parent.iterdir()}
    names = [index_file(to).name, to.name, *sorted(name for name in there if shard.fullmatch(name))]
    return [there[name] for name in names if name in there]


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        version: the version.
        files: the files; the index last, where there is one.
        nbytes: bytes of all files.
        tensors: how many there are.
        left_out: paths of leaves that were left out.
        tied: path of a leaf without its own tensor -> path of the leaf whose bytes it shares.
    """

    version: VersionInfo
    files: tuple[Path, ...]
    nbytes: int
    tensors: int
    left_out: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)


class ExportTensor(NamedTuple):
    """A tensor of the file: the parts of its name, its leaf, and the index of the version's leaf that has its bytes."""

    path: tuple[str, ...]
    leaf: Leaf
    source: int

    @property
    def name(self) -> str:
        """The name, with dots."""
        return ".".join(self.path)

    @property
    def named(self) -> Leaf:
        """The leaf under that name."""
        return Leaf(self.path, self.leaf.spec)


class ExportFile(NamedTuple):
    """One file of an export, before it is written.

    Attributes:
        path: its path.
        layout: its first bytes, and the offsets of the tensors.
        tensors: in the order of these offsets.
        digests: the table of digests, if the format has one.
    """

    path: Path
    layout: FileLayout
    tensors: Sequence[ExportTensor]
    digests: bytes


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes.

    Attributes:
        entry: the version.
        files: the files, without the index.
        index: the content of the index file; None for a single file.
        left_out, tied: as in `ExportResult`.
    """

    entry: VersionCopies
    files: tuple[ExportFile, ...]
    index: bytes | None
    left_out: tuple[str, ...]
    tied: Mapping[str, str]


def export(
    ckpt: Checkpointer,
    to: Path | str,
    *,
    step: int | None = None,
    version: str | None = None,
    tag: str | None = None,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    strip_prefix: str = "",
    max_shard: int | None = MAX_SHARD_FILE,
    skip_values: bool = False,
    force: bool = False,
    progress: Progress = no_progress,
) -> ExportResult:
    """Write a version to a file that other programs can open; every chunk is verified, and tensors are streamed.

    The suffix of the name chooses the format: ``.safetensors``, ``.h5`` or ``.hdf5``. A ``.safetensors`` file larger
    than ``max_shard`` is split into several with an index, as in Hugging Face. Beside the tensors an outline is
    written, from which ``tierstate import`` creates the same state again: containers, plain values and tied tensors.

    Args:
        step, version, tag: which version; by default the newest.
        only: globs of leaf paths.
        rename: other names for leaves, as in `Checkpointer.restore`; ``only`` and ``strip_prefix`` see the new names.
        strip_prefix: a prefix that every tensor's name has, and that is removed.
        max_shard: bytes of tensors in one file; None for no limit.
        skip_values: leave out values that are not tensors of a dtype that the format has, instead of raising.
        force: replace existing files, also the other files of an earlier export with this name.
        progress: called with the raw bytes read since the last call.

    Raises:
        AlreadyExists: a file exists, and ``force`` is not set.
        StateMismatch: no leaf matches, two leaves have one name after renaming, or the format cannot store some leaves;
            the message lists them.
        Damaged: no tier has a good copy of a chunk. Nothing was written.
    """
    to = Path(to)

    def made() -> ExportResult:
        entry = ckpt._find(step, version, tag)
        with reading(entry):
            plan = plan_export(
                entry,
                ckpt._arena,
                to,
                only=only,
                rename=rename,
                strip_prefix=strip_prefix,
                max_shard=max_shard,
                skip_values=skip_values,
            )
            return _export(plan, ckpt._arena, to, progress, force=force)

    return restarting(made, newest=(step, version, tag) == (None, None, None))


def _export(plan: ExportPlan, arena: Arena, to: Path, progress: Progress, *, force: bool) -> ExportResult:
    """Write the files of a plan."""
    _check_there(plan.entry, [tensor.source for file in plan.files for tensor in file.tensors])
    made = {*(file.path for file in plan.files), *([index_file(to)] if plan.index is not None else [])}
    beside = [path for path in existing_files(to) if path not in made] if _format(to).name == "safetensors" else []
    with AtomicFiles(force=force, beside=beside) as files:
        places = [place for file in plan.files for place in _create(files, file, plan.entry.version)]
        _write(plan.entry, arena, places, progress)
        if plan.index is not None:
            files.create(index_file(to), len(plan.index)).write(0, as_buffer(plan.index))
        written = files.commit()
    nbytes = sum(path.stat().st_size for path in written)
    tensors = sum(len(file.tensors) for file in plan.files)
    return ExportResult(VersionInfo.of(plan.entry), written, nbytes, tensors, plan.left_out, plan.tied)


def plan_export(
    entry: VersionCopies,
    arena: Arena,
    to: Path,
    *,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    strip_prefix: str = "",
    max_shard: int | None = MAX_SHARD_FILE,
    skip_values: bool = False,
) -> ExportPlan:
    """Lay out the files of an export. Reads no tensors; reads the plain values, since they are part of a file's header.

    Args:
        entry: the version.
        arena: host memory for the reads.
        to: the file; nothing is written.
        only, rename, strip_prefix, max_shard, skip_values: as in `export`.

    Raises:
        ValueError, StateMismatch, Damaged: as `export`.
    """
    if max_shard is not None and max_shard <= 0:
        raise ValueError(f"{max_shard} bytes in one file are none; name more, or None for no limit")
    form, version = _format(to), entry.version
    selection = Selection(version.leaves, only, rename)
    left_out = _leave_out(selection, form, skip_values)
    chosen = selection.leaves()
    sources = [found.source for found in chosen if found.source != NO_BYTES]
    check_leaves_whole(version, sources)
    tensors = _tensors(chosen, form, strip_prefix)
    parts = _outline_leaves(chosen, tensors, read_values(entry, arena, sources))
    outline = encode_outline(parts, _about(entry))
    shards = _shards(tensors, to, max_shard if form.name == "safetensors" else None)
    unbroken = copy_stages(version)
    files = tuple(
        _lay_out(version, path, shard, form, {} if path != to else {OUTLINE: outline}, unbroken)
        for path, shard in shards
    )
    tied = {p.leaf.name: format_path(decode_path(p.leaf.spec.attrs["to"])) for p in parts if p.leaf.spec.kind == TIED}
    return ExportPlan(
        entry,
        files,
        _index(files, outline) if len(files) > 1 else None,
        tuple(leaf.name for leaf in left_out),
        tied,
    )


def _check_there(entry: VersionCopies, leaves: Sequence[int]) -> None:
    """Raises Damaged if a chunk of these leaves is in no tier."""
    absent = entry.absent(entry.version.rows_of(leaves))
    if len(absent):
        name = entry.version.leaves[int(entry.version.chunk_leaf[absent[0]])].name
        raise Damaged(f"leaf {name} of step {entry.version.head.step} is in none of the tiers; {entry.remedy}")


def read_values(entry: VersionCopies, arena: Arena, leaves: Sequence[int]) -> dict[int, bytes]:
    """Read the encoded plain values among these leaves of a version; returns them by index of the leaf.

    Raises:
        StateMismatch: they have more than `MAX_VALUES` bytes.
        Damaged, Unreadable: as `Fetch.leaves`.
    """
    version = entry.version
    sources = [i for i in leaves if version.leaves[i].spec.kind == ValueProvider.kind]
    total = sum(version.leaves[i].spec.nbytes for i in sources)
    if total > MAX_VALUES:
        raise StateMismatch(
            f"the plain values of the version have {total} bytes, and at most {MAX_VALUES} fit beside tensors; "
            "say --skip-values (skip_values=True), or choose leaves with --only"
        )
    return Fetch(version, entry.holdings, arena, workers=READ_WORKERS).leaves(sources)


def _lay_out(
    version: Version,
    path: Path,
    tensors: Sequence[ExportTensor],
    form: FileFormat,
    extra: Mapping[str, Any],
    unbroken: Array,
) -> ExportFile:
    """The layout of one file, with everything except the bytes of its tensors."""
    head = version.head
    # Digests can be copied only for leaves saved as one shard: other shards have other chunk boundaries.
    rows = [version.rows_of([t.source] if unbroken[t.source] == 0 else []) for t in tensors]
    metadata = json.dumps({**head.metadata, **extra}, separators=(",", ":"))
    about = FileInfo(head.run, head.seq, head.step, head.time, metadata, head.chunk, head.digest)
    layout = form.lay_out([FileLeaf(t.named, len(r)) for t, r in zip(tensors, rows, strict=True)], about)
    digests = b"".join(version.digests[r].tobytes() for r in rows) if layout.digests >= 0 else b""
    return ExportFile(path, layout, tensors, digests)


def _create(files: AtomicFiles, made: ExportFile, version: Version) -> Iterator[Destination]:
    """Create one file with everything except the bytes of its tensors; yields where these go."""
    layout = made.layout
    file = files.create(made.path, layout.size)
    file.write(0, as_buffer(layout.head))
    if layout.digests >= 0:
        file.write(layout.digests, as_buffer(made.digests))
    for tensor, offset in zip(made.tensors, layout.offsets, strict=True):
        spec = version.leaves[tensor.source].spec
        yield Destination(
            tensor.source, Box.whole(spec.shape), FilePlace(file.write, offset, spec.shape, spec.itemsize)
        )


def _write(entry: VersionCopies, arena: Arena, places: Sequence[Destination], progress: Progress) -> None:
    """Write all tensors, each chunk as soon as it is verified."""
    targets = ScatterTargets(entry.version, places)
    fetch = Fetch(entry.version, entry.holdings, arena, workers=READ_WORKERS, progress=progress)
    fetch.fill(targets.rows, targets)


def _about(entry: VersionCopies) -> dict[str, Any]:
    head = entry.version.head
    return {"id": entry.version.id, "run": head.run, "step": head.step, "metadata": dict(head.metadata)}


def _format(to: Path) -> FileFormat:
    name = FORMAT_OF_SUFFIX.get(to.suffix.lower())
    form = format_of(name) if name is not None else None
    if form is None:
        raise ValueError(
            f"{to}: the name of an exported file ends with {', '.join(FORMAT_OF_SUFFIX)}; for a file that torch.load "
            "reads, use restore"
        )
    return form


def _leave_out(selection: Selection, form: FileFormat, skip_values: bool) -> list[Leaf]:
    """Remove the leaves that the format cannot store, and plain values too if ``skip_values`` is set.

    Raises:
        StateMismatch: there are such leaves and ``skip_values`` is not set, or no leaf would remain.
    """
    odd = [leaf for leaf in selection.values() if leaf.spec.kind != ValueProvider.kind and not form.expresses(leaf)]
    if not skip_values and odd:
        lines = [f"  {leaf.name}: {leaf.spec.kind} of {leaf.spec.dtype}" for leaf in odd[:_LISTED]]
        lines += [f"  and {len(odd) - _LISTED} more"] if len(odd) > _LISTED else []
        raise StateMismatch(
            f"{form.name} has no type for {len(odd)} leaves; say --skip-values (skip_values=True) to leave them out, "
            "with all plain values, or choose others with --only:\n" + "\n".join(lines)
        )
    return selection.drop(lambda leaf: not form.expresses(leaf)) if skip_values else []


def _tensors(chosen: Sequence[SelectedLeaf], form: FileFormat, prefix: str) -> list[ExportTensor]:
    """The tensors of the file, each with a unique name."""
    found = [s for s in chosen if s.source != NO_BYTES and s.leaf.spec.kind != ValueProvider.kind]
    names = dotted_names((s.leaf.path for s in found), [RESERVED_NAME])
    others = [name for name in names if not name.startswith(prefix) or name == prefix]
    if prefix and others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        raise StateMismatch(
            f"these tensors have names that do not begin with {prefix!r}: {', '.join(others[:_LISTED])}{more}; "
            "choose those that do with --only"
        )
    paths = [tuple(name.removeprefix(prefix).split(".")) for name in names]
    if prefix:  # without its prefix a name may become a reserved one
        paths = [tuple(name.split(".")) for name in dotted_names(paths, [RESERVED_NAME])]
    if form.name == "hdf5":
        paths = group_names(paths if prefix else (s.leaf.path for s in found), [OWN])
    return [ExportTensor(path, s.leaf, s.source) for path, s in zip(paths, found, strict=True)]


def _outline_leaves(
    chosen: Sequence[SelectedLeaf], tensors: Sequence[ExportTensor], values: Mapping[int, bytes]
) -> list[OutlineLeaf]:
    names = {t.source: list(t.path) for t in tensors}
    return [OutlineLeaf(s.leaf, names.get(s.source), values.get(s.source)) for s in chosen]


def _shards(tensors: Sequence[ExportTensor], to: Path, limit: int | None) -> list[tuple[Path, Sequence[ExportTensor]]]:
    """Distributes the tensors over files: one file, or several with names as in Hugging Face."""
    shards: list[list[ExportTensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.leaf.spec.nbytes
        if limit is not None and size > limit and shards[-1]:
            shards.append([])
            size = tensor.leaf.spec.nbytes
        shards[-1].append(tensor)
    return list(zip(shard_files(to, len(shards)), shards, strict=True))


def _index(made: Sequence[ExportFile], outline: Mapping[str, Any]) -> bytes:
    """The content of the index of a set of files, as Hugging Face has it, with the outline."""
    weights = {t.name: file.path.name for file in made for t in file.tensors}
    total = sum(t.leaf.spec.nbytes for file in made for t in file.tensors)
    # As a text: the metadata of a version may have NaN, for which JSON has no number, and strict readers refuse all of
    # a document in which it stands.
    index = {"metadata": {"total_size": total, OUTLINE: json.dumps(outline)}, "weight_map": weights}
    return json.dumps(index, indent=2).encode()
