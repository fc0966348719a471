"""Exports: a version as one file, or a set of files, that other programs open."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.errors import Damaged, StateMismatch
from tierstate.manifest.leaf import TIED, Leaf, decode_path, format_path
from tierstate.providers.values import ValueProvider
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Fetch
from tierstate.tiers.formats import About, Format, Item, format_of
from tierstate.tiers.formatted import whole
from tierstate.tiers.hdf5_format import OWN
from tierstate.tiers.landing import Destination, Landing
from tierstate.tiers.naming import dotted, nested

from .checkpointer import Checkpointer
from .file_places import FilePlace
from .filling import WORKERS, check_whole
from .foreign import OUTLINE
from .info import VersionInfo
from .outline import Part, encode_outline
from .selection import NO_BYTES, Selected, Selection
from .shard_names import index_name, relatives, shard_names
from .wholefiles import WholeFiles

MAX_SHARD = 5 << 30
"""Bytes of tensors in one file, as Hugging Face has it."""

MAX_VALUES = 16 << 20
"""Bytes of plain values that fit beside the tensors: they go into a header that readers read whole."""

FORMATS = {".safetensors": "safetensors", ".h5": "hdf5", ".hdf5": "hdf5"}
"""Format of a file by how its name ends."""

RESERVED = "__metadata__"
"""What no tensor of a safetensors file may be called."""

_LISTED = 10


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        version: the version.
        files: the files; the index last, where there is one.
        nbytes: bytes of all files.
        tensors: how many there are.
        left_out: paths of leaves that were left out.
        tied: path of a leaf that has no tensor of its own -> path of the leaf whose bytes it shares.
    """

    version: VersionInfo
    files: tuple[Path, ...]
    nbytes: int
    tensors: int
    left_out: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)


class Tensor(NamedTuple):
    """A tensor of the file: its name there in parts, what it is, and the version's leaf whose bytes it has."""

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


def export(
    ckpt: Checkpointer,
    to: Path | str,
    *,
    step: int | None = None,
    version: str | None = None,
    tag: str | None = None,
    only: Sequence[str] | None = None,
    strip_prefix: str = "",
    max_shard: int | None = MAX_SHARD,
    skip_values: bool = False,
    force: bool = False,
    progress: Callable[[int], None] = lambda _nbytes: None,
) -> Exported:
    """Write a version to a file that other programs open, every chunk verified, without holding it in memory.

    The name's ending says which kind: ``.safetensors``, ``.h5`` or ``.hdf5``. A ``.safetensors`` file longer than
    ``max_shard`` becomes several with an index, as Hugging Face has it. Beside the tensors goes an outline, from which
    ``tierstate import`` makes the same state again: containers, plain values, and which tensors are tied.

    Args:
        step, version, tag: which version; by default the newest.
        only: globs of leaf paths.
        strip_prefix: what every tensor's name begins with, to be left off.
        max_shard: bytes of tensors in one file; None for no limit.
        skip_values: leave out what is no tensor of a type that the format knows, instead of refusing.
        force: replace files that are there, also those of an earlier export of that name that was cut otherwise.
        progress: called with the raw bytes read since the last call.

    Raises:
        AlreadyExists: a file is there, and ``force`` was not said.
        StateMismatch: nothing matches, or leaves that the format cannot express; the message lists them.
        Damaged: a chunk is whole in no tier. Nothing was written.
    """
    if max_shard is not None and max_shard <= 0:
        raise ValueError(f"{max_shard} bytes in one file are none; name more, or None for no limit")
    to = Path(to)
    form = _format(to)
    entry = ckpt._find(step, version, tag)
    selection = Selection(entry.version.leaves, only)
    left_out = _leave_out(selection, form, skip_values)
    chosen = selection.leaves()
    sources = [found.source for found in chosen if found.source != NO_BYTES]
    check_whole(entry.version, sources)
    job = _Job(entry, Fetch(entry.version, entry.holdings, ckpt._arena, workers=WORKERS), progress)
    job.check_there(sources)
    tensors = _tensors(chosen, form, strip_prefix)
    parts = _parts(chosen, tensors, job.values(chosen))
    outline = encode_outline(parts, _about(entry))
    shards = _shards(tensors, to, max_shard if form.name == "safetensors" else None)
    made = {*(path for path, _ in shards), *([index_name(to)] if len(shards) > 1 else [])}
    beside = [path for path in relatives(to) if path not in made] if form.name == "safetensors" else []
    with WholeFiles(force=force, beside=beside) as files:
        for path, shard in shards:
            job.lay_out(files, path, shard, form, {} if path != to else {OUTLINE: outline})
        job.write()
        if len(job.files) > 1:
            _write_index(files, to, job.files, outline)
        written = files.commit()
    tied = {p.leaf.name: format_path(decode_path(p.leaf.spec.attrs["to"])) for p in parts if p.leaf.spec.kind == TIED}
    nbytes = sum(path.stat().st_size for path in written)
    return Exported(VersionInfo.of(entry), written, nbytes, len(tensors), tuple(leaf.name for leaf in left_out), tied)


class _Job:
    """The writing of one version's tensors.

    Attributes:
        files: per file, its path and its tensors.
    """

    def __init__(self, entry: Entry, fetch: Fetch, progress: Callable[[int], None]) -> None:
        self._entry, self._fetch, self._progress = entry, fetch, progress
        self._unbroken = whole(entry.version)
        self.files: list[tuple[Path, Sequence[Tensor]]] = []
        self._places: list[Destination] = []

    def check_there(self, leaves: Sequence[int]) -> None:
        """Raises Damaged where a chunk is in no tier."""
        absent = self._entry.absent(self._entry.version.rows_of(leaves))
        if len(absent):
            name = self._entry.version.leaves[int(self._entry.version.chunk_leaf[absent[0]])].name
            raise Damaged(f"leaf {name} of step {self._entry.version.head.step} is in none of the tiers; name another")

    def values(self, chosen: Sequence[Selected]) -> dict[int, bytes]:
        """The encoded plain values, by index of the version's leaf."""
        version = self._entry.version
        sources = [f.source for f in chosen if f.source != NO_BYTES and f.leaf.spec.kind == ValueProvider.kind]
        total = sum(version.leaves[i].spec.nbytes for i in sources)
        if total > MAX_VALUES:
            raise StateMismatch(
                f"the plain values of the version have {total} bytes, and at most {MAX_VALUES} fit beside tensors; "
                "say --skip-values (skip_values=True), or choose leaves with --only"
            )
        found = {i: bytearray(version.leaves[i].spec.nbytes) for i in sources}

        def take(row: int, raw: Buffer, _slab: object) -> None:
            start = int(version.chunk_start[row])
            found[int(version.chunk_leaf[row])][start : start + raw.numel()] = to_bytes(raw)

        self._fetch.run(version.rows_of(sources).tolist(), take)
        return {i: bytes(data) for i, data in found.items()}

    def lay_out(
        self, files: WholeFiles, path: Path, tensors: Sequence[Tensor], form: Format, extra: Mapping[str, Any]
    ) -> None:
        """Make one file, with all but its tensors."""
        version, head = self._entry.version, self._entry.version.head
        # Digests are of chunks of what was saved in one piece, and say nothing of other cuts.
        rows = [version.rows_of([t.source] if self._unbroken[t.source] == 0 else []) for t in tensors]
        metadata = json.dumps({**head.metadata, **extra}, separators=(",", ":"))
        about = About(head.run, head.seq, head.step, head.time, metadata, head.chunk, head.digest)
        items = [Item(t.named, len(r)) for t, r in zip(tensors, rows, strict=True)]
        blueprint = form.lay_out(items, about)
        file = files.create(path, blueprint.size)
        file.write(0, as_buffer(blueprint.head))
        if blueprint.digests >= 0:
            file.write(blueprint.digests, as_buffer(b"".join(version.digests[r].tobytes() for r in rows)))
        for tensor, offset in zip(tensors, blueprint.offsets, strict=True):
            spec = version.leaves[tensor.source].spec
            place = FilePlace(file, offset, spec.shape, spec.itemsize)
            self._places.append(Destination(tensor.source, Box.whole(spec.shape), place))
        self.files.append((path, tensors))

    def write(self) -> None:
        """Write all tensors, each chunk as soon as it is verified."""
        landing = Landing(self._entry.version, self._places)

        def put(row: int, raw: Buffer, _slab: object) -> None:
            landing.give(row, raw)
            self._progress(raw.numel())

        self._fetch.run(landing.rows.tolist(), put)


def _about(entry: Entry) -> dict[str, Any]:
    head = entry.version.head
    return {"id": entry.version.id, "run": head.run, "step": head.step, "metadata": dict(head.metadata)}


def _format(to: Path) -> Format:
    name = FORMATS.get(to.suffix.lower())
    form = format_of(name) if name is not None else None
    if form is None:
        raise ValueError(
            f"{to}: the name of an exported file ends with {', '.join(FORMATS)}; to have it for torch.load, use restore"
        )
    return form


def _leave_out(selection: Selection, form: Format, skip_values: bool) -> list[Leaf]:
    """Drop what the format cannot hold, plain values among it if they are to be skipped.

    Raises:
        StateMismatch: there is such a leaf and nothing may be left out, or nothing would remain.
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


def _tensors(chosen: Sequence[Selected], form: Format, prefix: str) -> list[Tensor]:
    """What goes into the file, each under a name of its own."""
    found = [s for s in chosen if s.source != NO_BYTES and s.leaf.spec.kind != ValueProvider.kind]
    names = dotted((s.leaf.path for s in found), [RESERVED])
    others = [name for name in names if not name.startswith(prefix) or name == prefix]
    if prefix and others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        raise StateMismatch(
            f"these tensors have names that do not begin with {prefix!r}: {', '.join(others[:_LISTED])}{more}; "
            "choose those that do with --only"
        )
    paths = [tuple(name.removeprefix(prefix).split(".")) for name in names]
    if prefix:  # without it a name may be one that is reserved
        paths = [tuple(name.split(".")) for name in dotted(paths, [RESERVED])]
    if form.name == "hdf5":
        paths = nested(paths if prefix else (s.leaf.path for s in found), [OWN])
    return [Tensor(path, s.leaf, s.source) for path, s in zip(paths, found, strict=True)]


def _parts(chosen: Sequence[Selected], tensors: Sequence[Tensor], values: Mapping[int, bytes]) -> list[Part]:
    names = {t.source: list(t.path) for t in tensors}
    return [Part(s.leaf, names.get(s.source), values.get(s.source)) for s in chosen]


def _shards(tensors: Sequence[Tensor], to: Path, limit: int | None) -> list[tuple[Path, Sequence[Tensor]]]:
    """Tensors by file: one, or as many as it takes with names as Hugging Face has them."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.leaf.spec.nbytes
        if limit is not None and size > limit and shards[-1]:
            shards.append([])
            size = tensor.leaf.spec.nbytes
        shards[-1].append(tensor)
    return list(zip(shard_names(to, len(shards)), shards, strict=True))


def _write_index(
    files: WholeFiles, to: Path, made: Sequence[tuple[Path, Sequence[Tensor]]], outline: Mapping[str, Any]
) -> None:
    weights = {t.name: path.name for path, tensors in made for t in tensors}
    total = sum(t.leaf.spec.nbytes for _, tensors in made for t in tensors)
    index = {"metadata": {"total_size": total, OUTLINE: outline}, "weight_map": weights}
    data = json.dumps(index, indent=2).encode()
    files.create(index_name(to), len(data)).write(0, as_buffer(data))
