"""A version seen as files that exist nowhere: safetensors, raw arrays, JSON, a folder of DCP, made while they are read.

`VersionFiles` has the files of one version by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstate.engine.packs.formats import dotted_names, element_type
from tierstate.engine.store.catalog import VersionCopies
from tierstate.files.readers.outline import encode_plain
from tierstate.manifest.errors import FormatError, NotFound, StateMismatch
from tierstate.manifest.format.leaf import LOSSY, STORAGE, TIED, Leaf, Spec
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.manifest.printable import finite_json
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.dtypes import numpy_dtype, torch_dtype
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.values.values import ValueProvider

from .export import MAX_SHARD_FILE, MAX_VALUES, ExportFile, ExportPlan, index_file, plan_export, read_values
from .ranges import RangeReader, VirtualFile

MODEL = "model.safetensors"
"""Name of the safetensors file; also of its index and its parts, as in Hugging Face."""


VERSION = "version.json"


VALUES = "values.json"


LEAVES = "leaves"
"""Name of the folder with a file for each leaf."""


TOP_KEY = "model"
"""The key of a state under which its weights are by convention: only these are in the safetensors file then."""


DCP = "dcp"
"""Name of the folder that `torch.distributed.checkpoint` reads."""


FOLDERS = (LEAVES, DCP)


_UNSAFE = re.compile(r"""[%/\\*?\[\]{}:#"<>|\x00-\x20\x7f-\x9f\ud800-\udfff]""")
"""Characters of names that a URL, a pattern or some file system understands in another way."""


_FILES = (
    f"right are {VERSION}, {VALUES}, {MODEL} or its parts, {LEAVES}/NAME and {DCP}/NAME; list the folders to see which"
)


class NoModel(NotFound):
    """The version cannot be a safetensors file: the format has no type for some of its tensors."""


class VersionFiles:
    """The files of one version.

    Args:
        reader: reads the bytes of its leaves.
    """

    def __init__(self, reader: RangeReader) -> None:
        self.reader = reader

    @property
    def entry(self) -> VersionCopies:
        """The version and its copies."""
        return self.reader.entry

    def read(self, file: VirtualFile, start: int, stop: int) -> bytes:
        """Bytes of a file of this version. Raises: as `RangeReader.read`."""
        return file.read(self.reader, start, stop)

    def top(self) -> dict[str, VirtualFile]:
        """The files by name, without those of the `FOLDERS`.

        Raises:
            Damaged, Unreadable: a plain value cannot be read.
        """
        found = {VERSION: self.description}
        if self._values:
            found[VALUES] = self.values
        with suppress(NoModel):
            found |= self.safetensors
        return found

    def file(self, name: str) -> VirtualFile:
        """One file by its name.

        Raises:
            NotFound: there is no such file.
            Damaged, Unreadable: as `safetensors`.
        """
        folder, _, rest = name.rpartition("/")
        if name == VERSION:
            return self.description
        if name == VALUES and self._values:
            return self.values
        if folder in FOLDERS and rest in (files := self.folder(folder)):
            return files[rest]
        if folder == "" and rest.startswith(Path(MODEL).stem) and rest in self.safetensors:
            return self.safetensors[rest]
        raise NotFound(f"a version has no file {name!r:.120}; {_FILES}")

    @cached_property
    def safetensors(self) -> dict[str, VirtualFile]:
        """The safetensors files by name: as `export` would write them, byte for byte.

        Raises:
            NoModel: there is none, since the format has no type for some tensors; the message lists them.
            NotFound: the version was dropped meanwhile.
            Damaged, Unreadable: a plain value, which is in the header, cannot be read.
        """
        plan = self.reader.use(self._plan)
        files = {made.path.name: self._exported(made) for made in plan.files}
        if plan.index is not None:
            files[index_file(Path(MODEL)).name] = VirtualFile.of(plan.index)
        return files

    def _plan(self, entry: VersionCopies) -> ExportPlan:
        lay_out = partial(plan_export, entry, self.reader.arena, Path(MODEL), max_shard=MAX_SHARD_FILE)
        try:
            under = _plan_with_values(partial(lay_out, only=[f"{TOP_KEY}.**"], strip_prefix=f"{TOP_KEY}."))
            if any(made.tensors for made in under.files):
                return under
        except StateMismatch:
            pass  # no such key, or it is no container
        try:
            return _plan_with_values(lay_out)
        except StateMismatch as error:
            raise NoModel(f"the version has no {MODEL}, but a file for each leaf in {LEAVES}/: {error}") from error

    @staticmethod
    def _exported(made: ExportFile) -> VirtualFile:
        ends = pairwise([*made.layout.offsets, made.layout.size])
        leaves = [(tensor.source, end - start) for tensor, (start, end) in zip(made.tensors, ends, strict=True)]
        return VirtualFile.of(made.layout.head, *leaves)

    def folder(self, name: str) -> Mapping[str, VirtualFile]:
        """The files of one of the `FOLDERS` by name.

        Raises:
            NotFound: a state like this cannot be such a folder; the message says why.
            Damaged, Unreadable: a value that is in its files cannot be read.
        """
        return self.dcp if name == DCP else self.leaves

    @cached_property
    def dcp(self) -> dict[str, VirtualFile]:
        """The files of `DCP` by name.

        Raises: as `folder`.
        """
        from .dcp_folder import dcp_files  # it needs a second to import what torch compiles with

        try:
            return dcp_files(self.reader)
        except StateMismatch as error:
            raise NotFound(f"no folder {DCP}: {error}") from error

    @cached_property
    def leaves(self) -> dict[str, VirtualFile]:
        """The files of `LEAVES` by name: ``.npy`` where NumPy has the dtype, else the raw bytes as ``.bin``."""
        return dict(self._named_leaves.values())

    @cached_property
    def _named_leaves(self) -> dict[int, tuple[str, VirtualFile]]:
        found = {}
        leaves = enumerate(self.entry.version.leaves)
        given = [(i, leaf) for i, leaf in leaves if leaf.spec.has_bytes and i not in self._values]
        names = dotted_names(leaf.path for _, leaf in given)
        for (i, leaf), name in zip(given, names, strict=True):
            header = npy_header(leaf.spec)
            suffix = ".bin" if header is None else ".npy"
            file = VirtualFile.of(header or b"", (i, leaf.spec.nbytes))
            found[i] = (escape(name) + suffix, file)
        return found

    @cached_property
    def _values(self) -> frozenset[int]:
        """The leaves that are plain values; none if they are too long to be in one small file."""
        leaves = self.entry.version.leaves
        found = frozenset(i for i, leaf in enumerate(leaves) if leaf.spec.kind == ValueProvider.kind)
        return found if sum(leaves[i].spec.nbytes for i in found) <= MAX_VALUES else frozenset()

    @cached_property
    def values(self) -> VirtualFile:
        """The plain values by the printed paths of their leaves, as JSON; what JSON does not have, as encoded bytes.

        Raises:
            Damaged, Unreadable: one of them cannot be read.
        """
        found = self.reader.use(lambda entry: read_values(entry, self.reader.arena, sorted(self._values)))
        encoded = {self.entry.version.leaves[i].name: encode_plain(value) for i, value in found.items()}
        return _json_file({name: value.get("json", value) for name, value in encoded.items()})

    @cached_property
    def description(self) -> VirtualFile:
        """What the version is, as JSON: its head, and for each leaf what it is and which file has its bytes."""
        return _json_file(self._described())

    def _described(self) -> dict[str, Any]:
        version, head = self.entry.version, self.entry.version.head
        about = {
            "format": 1, "run": head.run, "seq": head.seq, "step": head.step, "id": version.id, "time": head.time,
            "parent": head.parent, "world": head.world, "nbytes": version.nbytes, "metadata": dict(head.metadata),
        }  # fmt: skip
        return {**about, "leaves": list(self._listed())}

    def _listed(self) -> Iterator[dict[str, Any]]:
        for i, leaf in enumerate(self.entry.version.leaves):
            spec = leaf.spec
            shown: dict[str, Any] = {"name": leaf.name, "path": encode_path(leaf.path), "kind": spec.kind}
            if spec.has_bytes:
                shown |= {"dtype": spec.dtype, "shape": list(spec.shape), "nbytes": spec.nbytes}
                shown["file"] = VALUES if i in self._values else f"{LEAVES}/{self._named_leaves[i][0]}"
            if spec.attrs:
                shown["attrs"] = dict(spec.attrs)
            yield shown


def _json_file(content: Mapping[str, Any]) -> VirtualFile:
    return VirtualFile.of(json.dumps(finite_json(content), indent=1).encode())


def _plan_with_values(lay_out: partial[ExportPlan]) -> ExportPlan:
    """The plan with the plain values in the header; without, where ``export`` would ask for ``--skip-values``.

    Raises:
        StateMismatch: also without, or tensors would be left out silently.
    """
    try:
        return lay_out()
    except StateMismatch as error:
        plan = lay_out(skip_values=True)
        specs = {leaf.name: leaf.spec for leaf in plan.entry.version.leaves}
        if any(_is_tensor(specs[name]) for name in plan.left_out):
            raise error
        return plan


def _is_tensor(spec: Spec) -> bool:
    return spec.kind in (TensorProvider.kind, ArrayProvider.kind, STORAGE, TIED) or LOSSY in spec.attrs


def escape(name: str) -> str:
    """A name as one component of a URL: characters that could be understood in another way as ``%`` and hex digits."""
    return _UNSAFE.sub(lambda found: "".join(f"%{b:02X}" for b in found[0].encode("utf-8", "surrogatepass")), name)


def npy_header(spec: Spec) -> bytes | None:
    """The beginning of an ``.npy`` file with the bytes of a leaf; None if NumPy has no such dtype."""
    try:
        dtype = _numpy_dtype(spec)
        if dtype is None or dtype.itemsize != spec.itemsize:
            return None
        described = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(described) != dtype:
            return None
        out = BytesIO()
        fields = {"descr": described, "fortran_order": False, "shape": spec.shape}
        np.lib.format.write_array_header_1_0(out, fields)
    except (FormatError, TypeError, ValueError):  # what a header of this format cannot say, too
        return None
    return out.getvalue()


def _numpy_dtype(spec: Spec) -> np.dtype[Any] | None:
    if spec.kind == ArrayProvider.kind:
        return numpy_dtype(spec.attrs.get("fields", spec.dtype))
    name = element_type(Leaf((), spec))
    return torch.empty(0, dtype=torch_dtype(name), device="cpu").numpy().dtype if name else None
