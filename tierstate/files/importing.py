"""Imports files of other programs as a new version of a run; the kind of a file is found by name and first bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tierstate.checkpointer import Checkpointer
from tierstate.engine.info import VersionInfo
from tierstate.engine.progress import Progress, no_progress
from tierstate.files.readers.deepspeed_folder import is_deepspeed, open_deepspeed
from tierstate.files.readers.reader import ImportSource
from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.manifest.errors import FormatError, NotFound, TierFull
from tierstate.tiers.posix.files import exists, is_folder, open_file

_HDF5 = b"\x89HDF\r\n\x1a\n"


_KINDS = (
    "a .safetensors file or its .index.json, an HDF5 file, a file of torch.save, or a folder of DCP, of Megatron-core, "
    "or of DeepSpeed (with the files of a tag)"
)


_URI = "tierstate:"
"""How the address of a version begins, as fsspec has it."""


@contextmanager
def open_source(
    path: Path | str, *, skip_values: bool = False, progress: Progress = no_progress
) -> Iterator[ImportSource]:
    """A context manager with the state in a file or folder. Tensors are read from the file while they are saved, so the
    save must happen inside the block.

    Args:
        path: a ``.safetensors`` file, the ``.index.json`` of several (or the folder they lie in), an HDF5 file, a file
            of ``torch.save``, or a folder of ``torch.distributed.checkpoint``, of Megatron-core or of DeepSpeed's ZeRO.
            No code in them is run. ``tierstate://POLICY.yaml/RUN@VERSION`` is a version that ZeRO has saved.
        skip_values: leave out text and attributes of HDF5 files from other programs, and Megatron's common state.
        progress: called with the bytes read since the last call; not for files of ``torch.save``.

    Raises:
        FormatError: it is none of these, or damaged.
        Unsafe: loading it would run code.
    """
    if str(path).startswith(_URI):
        with _open_version(str(path), progress) as found:
            yield found
        return
    path = _inside(Path(path))
    with _open(path, _kind(path), skip_values, progress) as found:
        yield found


def import_version(
    ckpt: Checkpointer,
    path: Path | str,
    *,
    step: int | None = None,
    under: str = "",
    skip_values: bool = False,
    progress: Progress = no_progress,
) -> VersionInfo:
    """Save the state in a file or folder as a new version of a run.

    Args:
        step: the version's step; by default the step in the file, or 0.
        under: the key, or keys separated by dots, under which the state is saved: ``model`` for a state that will be
            restored with ``ckpt.restore({"model": model})``.
        path, skip_values, progress: as for `open_source`.

    Returns:
        The version, once it is durable.

    Raises: as `open_source` and `Checkpointer.save`.
    """
    with open_source(path, skip_values=skip_values, progress=progress) as found:
        state: Any = found.state
        for key in reversed(under.split(".") if under else []):
            state = {key: state}
        chosen = step if step is not None else found.step or 0
        save = ckpt.save(state, chosen, found.metadata)
        save.wait_captured()
    if save.skipped:
        raise TierFull("nothing was imported: the arena was full, and the policy says on_full: skip")
    save.wait()
    return ckpt.info(version=save.version)


def _inside(path: Path) -> Path:
    """The file to read if the path is a folder of safetensors files; otherwise the path itself."""
    if not exists(path):
        raise NotFound(f"{path} does not exist")
    if not is_folder(path) or exists(path / ".metadata") or is_deepspeed(path):
        return path
    found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise FormatError(f"{path} is a folder with {len(found)} files to choose from; name {_KINDS}")
    return found[0]


def _kind(path: Path) -> str:
    if is_folder(path):
        from tierstate.files.readers.torch_dist import is_torch_dist

        return "torch_dist" if is_torch_dist(path) else "deepspeed" if is_deepspeed(path) else "dcp"
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    with closing(open_file(path.resolve())) as file:  # `open_file` does not block on a pipe
        start = empty_buffer(min(len(_HDF5), file.status().st_size))
        file.read(0, start)
    head = to_bytes(start)
    if head == _HDF5:
        return "hdf5"
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return "torch"
    raise FormatError(f"{path} is of no kind that can be imported; name {_KINDS}")


def _open(path: Path, kind: str, skip_values: bool, progress: Progress) -> Any:
    # Each reader module is imported on use, since it imports an optional library.
    if kind == "dcp":
        from tierstate.files.readers.dcp import open_dcp

        return open_dcp(path, progress)
    if kind == "torch_dist":
        from tierstate.files.readers.torch_dist import open_torch_dist

        return open_torch_dist(path, progress, skip_values=skip_values)
    if kind == "deepspeed":
        return open_deepspeed(path, progress)
    if kind == "hdf5":
        from tierstate.files.readers.hdf5 import open_hdf5

        return open_hdf5(path, progress, skip_values=skip_values)
    if kind == "torch":
        from tierstate.files.readers.torch import open_torch

        return open_torch(path)
    from tierstate.files.readers.safetensors import open_safetensors

    return open_safetensors(path, progress)


@contextmanager
def _open_version(uri: str, progress: Progress) -> Iterator[ImportSource]:
    from .filesystem import Address, TierstateFileSystem  # they import fsspec
    from .lazy_version import open_zero_version

    address = Address.parse(TierstateFileSystem._strip_protocol(uri))
    if address.name or not address.run:
        raise NotFound(f"{uri} names no version: write tierstate://POLICY.yaml/RUN, or RUN@step-100")
    with open_zero_version(address.policy, address.run, progress=progress, **address.wanted()) as found:
        yield found
