"""Storage for torch_checkpointing: a checkpoint folder that it renames into place becomes a version of a run.

    CheckpointManager.Config(storage_config=TierStorageConfig("policy.yaml", run="gpt"))

All ranks write their files into a temporary folder, and one rank renames it when all have: here that is the commit.
Until then the files lie on the disk, as they do with torch_checkpointing's own storage; then they are in the tiers, and
the folder is a name. What is on the disk under such a name is read from there, so that older checkpoints still load.
Written for torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX
from torch_checkpointing.storage.base_storage import ReadArgs, StorageConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig

import tierstate as ts
from tierstate.dcp.step import names_step, step_of
from tierstate.files.ranges import ChunkCache, LeafRange, RangeReader
from tierstate.manifest.chunk import empty_buffer, view
from tierstate.manifest.history.log import check_run
from tierstate.tiers.posix.files import exists, is_folder

__all__ = ["TierStorage", "TierStorageConfig", "close"]

METADATA = "torch_checkpointing"
"""Key in a version's metadata; under it is the name of the folder."""


PIECE = 64 << 20
"""Bytes that are read at once, and copied."""


@dataclass
class TierStorageConfig(StorageConfig):  # type: ignore[misc]
    """Where checkpoints go. All ranks, and the processes that save in the background, get the same.

    Args:
        policy: the tiers and the rules: a `Policy`, or the path of a policy file, which is read at once.
        run: name of the run: letters, digits, ``.``, ``_`` and ``-``.
        temp_dir_prefix: as that of ``CheckpointWriterConfig``: how names of temporary folders begin.

    Raises:
        PolicyError: the policy cannot be used.
    """

    policy: ts.Policy | str | os.PathLike[str]
    run: str
    temp_dir_prefix: str = DEFAULT_TEMP_DIR_PREFIX

    def __post_init__(self) -> None:
        if not isinstance(self.policy, ts.Policy):
            self.policy = ts.Policy.load(self.policy)
        self.run = check_run(self.run)

    def create_storage(self) -> TierStorage:
        """The storage; it opens the tiers when it needs them."""
        return TierStorage(self)


class TierStorage(LocalFileSystemStorage):  # type: ignore[misc]
    """Files in temporary folders on the disk, and folders that were renamed from these as versions in tiers.

    A path is a name, and is compared as it was given: relative ones are not made absolute, and load on a machine where
    the job runs elsewhere. Threads may share an instance.

    Args:
        config: see there.
    """

    def __init__(self, config: TierStorageConfig) -> None:
        super().__init__(LocalFileSystemStorageConfig(use_direct_io=False))
        assert isinstance(config.policy, ts.Policy)
        self._policy, self._run, self._prefix = config.policy, config.run, config.temp_dir_prefix
        self._seen: dict[Path, _VersionFiles] = {}

    @property
    def mmap_fill_workers(self) -> int:
        """One call reads a whole file, by several threads of ours."""
        return 1

    # ---- Temporary folders

    def stream_write(self, path: Path) -> Any:
        """A new file in a temporary folder.

        Raises:
            PermissionError: it is in none, so that no renaming would make it durable.
        """
        self._check_temporary(path)
        return super().stream_write(path)

    def write(self, path: Path, data: Any) -> None:
        """A new file in a temporary folder. Raises: as `stream_write`."""
        self._check_temporary(path)
        super().write(path, data)

    def _check_temporary(self, path: Path) -> None:
        if self._temporary(path) is None:
            raise PermissionError(
                f"{path} is in no temporary folder ({self._prefix}…), and only what such a folder holds when it is "
                "renamed gets into the tiers: leave write_to_temp_dir and barrier_config of CheckpointWriterConfig as "
                "they are, and give TierStorageConfig the same temp_dir_prefix"
            )

    def _temporary(self, path: Path) -> Path | None:
        """The temporary folder that a path lies in."""
        return next((folder for folder in path.parents if folder.name.startswith(self._prefix)), None)

    # ---- The commit

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit a temporary folder as a version, and delete it. Returns when the version is durable.

        The step is the number at the end of the name, or else one more than the newest. Within a temporary folder files
        and folders get other names.

        Raises:
            FileExistsError: there is a checkpoint of this name, in the tiers or on the disk.
            PermissionError: it is no temporary folder.
            TierstateError: it could not be saved; the temporary folder stays.
        """
        inside = self._temporary(src_path)
        if inside is not None and inside == self._temporary(dst_path):
            super().rename(src_path, dst_path, is_directory, background_cleanup)
            return
        if not src_path.name.startswith(self._prefix) or not is_folder(src_path):
            raise PermissionError(f"{src_path} is no temporary folder ({self._prefix}…), and only these are committed")
        on_disk = os.path.lexists(dst_path) and not (is_folder(dst_path) and not os.listdir(dst_path))
        if on_disk or str(dst_path) in self._folders():
            where = "on the disk" if on_disk else f"as a version of run {self._run!r}"
            raise FileExistsError(f"{dst_path} exists {where}, and a checkpoint is never overwritten: remove it first")
        self._commit(src_path, dst_path)
        shutil.rmtree(src_path)

    def _commit(self, folder: Path, name: Path) -> None:
        ckpt = self._checkpointer()
        newest = ckpt._pipeline.newest_step()
        step = step_of(name) if names_step(name) else 0 if newest is None else newest + 1
        files = {file.relative_to(folder).as_posix(): _mapped(file) for file in folder.rglob("*") if file.is_file()}
        save = ckpt.save(dict(sorted(files.items())), step, metadata={METADATA: str(name)})
        if save.skipped:
            raise ts.CaptureError(f"{name} was not saved: the arena is full, and the policy says on_full: skip")
        save.wait(self._policy.durable if self._policy.durable in save.tiers else save.tiers[0])

    # ---- What is in the tiers

    def _checkpointer(self) -> ts.Checkpointer:
        return _checkpointer_of(self._policy, self._run)

    def _folders(self) -> dict[str, ts.VersionInfo]:
        """The newest version of each folder."""
        versions = self._checkpointer().versions()
        return {folder: one for one in versions if (folder := one.metadata.get(METADATA)) is not None and one.id}

    def _find(self, path: Path) -> tuple[_VersionFiles, str] | None:
        """The version that a path lies in, and its name there; an empty one for the folder itself."""
        ckpt = self._checkpointer()
        folder = next((one for one in path.parents if one in self._seen and self._seen[one].ckpt is ckpt), None)
        if folder is None:
            found = self._folders()
            folder = next((one for one in (path, *path.parents) if str(one) in found), None)
            if folder is None:
                return None
            self._seen[folder] = _VersionFiles(ckpt, found[str(folder)].id)
        return self._seen[folder], "" if path == folder else path.relative_to(folder).as_posix()

    def _file(self, path: Path) -> tuple[_VersionFiles, int]:
        """The version, and the number of the leaf that a file is in it.

        Raises:
            FileNotFoundError: there is no such file.
        """
        files, name = self._find(path) or (None, "")
        if files is None or name not in files.leaves:
            raise FileNotFoundError(f"{path} is neither on the disk nor a file of a version of run {self._run!r}")
        return files, files.leaves[name]

    def _names_in(self, path: Path) -> set[str]:
        """What a folder has in the tiers."""
        if (found := self._find(path)) is not None:
            return _children(found[0].leaves, found[1])
        return _children(self._folders(), "" if path == Path() else str(path))

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> Any:
        """A file, from the nearest tier that has it whole. Every chunk is verified; reads and seeks get only what they
        need. By default all of it is read at once, as ``ReadArgs`` has it.

        Raises:
            FileNotFoundError: there is no such file, or retention has dropped it.
            TierstateError: as `Checkpointer.restore`.
        """
        if exists(path):
            return super().stream_read(path, read_args)
        stream = _LeafStream(*self._file(path))
        return io.BytesIO(stream.readall()) if (read_args or ReadArgs()).pre_read_full_file else stream

    def getsize(self, path: Path) -> int:
        """Bytes of a file. Raises FileNotFoundError: there is none."""
        if exists(path):
            return int(super().getsize(path))
        files, leaf = self._file(path)
        return files.size(leaf)

    def exists(self, path: Path) -> bool:
        """Whether there is such a file or folder. Raises where a tier cannot be asked."""
        if exists(path):
            return True
        found = self._find(path)
        return (found is not None and found[1] in found[0].leaves) or self.isdir(path)

    def isdir(self, path: Path) -> bool:
        """Whether it is a folder. Raises where a tier cannot be asked."""
        if exists(path):
            return is_folder(path)
        found = self._find(path)
        return (found is not None and not found[1]) or bool(self._names_in(path))

    def ls(self, path: Path) -> list[str]:
        """Names in a folder, on the disk and in the tiers.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        on_disk = exists(path)
        names = {*(super().ls(path) if on_disk else ()), *self._names_in(path)}
        if not (names or on_disk or self.isdir(path)):
            raise FileNotFoundError(f"{path} is no folder, neither on the disk nor in the tiers of run {self._run!r}")
        return sorted(names)

    def delete(self, path: Path) -> None:
        """Delete a file on the disk. Raises PermissionError: it is part of a version, which never changes."""
        if not os.path.lexists(path) and self._file(path):
            raise PermissionError(f"{path} is part of a version, which does not change; rmdir of its folder removes it")
        super().delete(path)

    def rmdir(self, path: Path) -> None:
        """Delete a folder on the disk, and the versions of this name, with what is in them.

        Raises:
            FileNotFoundError: there is no such folder.
            TierstateError: a version must stay, as the newest one of the run, or one with a tag.
        """
        on_disk, ckpt = os.path.lexists(path), self._checkpointer()
        versions = [one for one in ckpt.versions() if one.metadata.get(METADATA) == str(path)]
        if not (on_disk or versions):
            raise FileNotFoundError(f"{path} is no checkpoint, neither on the disk nor of run {self._run!r}")
        for one in versions:
            ckpt.remove(version=one.id)
        self._seen.pop(path, None)
        if on_disk:
            super().rmdir(path)


class _VersionFiles:
    """The files of one version.

    Args:
        ckpt: finds it.
        version: its id.

    Attributes:
        ckpt: as given.
        leaves: the number of each file's leaf, by the file's name.
    """

    def __init__(self, ckpt: ts.Checkpointer, version: str) -> None:
        self.ckpt = ckpt
        self.reader = RangeReader(lambda: ckpt._find(version=version), ckpt._arena, ChunkCache())
        found = enumerate(self.reader.entry.version.leaves)
        self.leaves = {str(leaf.path[0]): number for number, leaf in found if leaf.path}

    def size(self, leaf: int) -> int:
        """Bytes of a file."""
        return self.reader.entry.version.leaves[leaf].spec.nbytes


class _LeafStream(io.RawIOBase):
    """A file of a version, to read and seek in. Each thread opens its own."""

    def __init__(self, files: _VersionFiles, leaf: int) -> None:
        self._files, self._leaf, self._at, self._size = files, leaf, 0, files.size(leaf)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"position {at} is before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as room:
            count = max(0, min(len(room), self._size - self._at))
            for start in range(0, count, PIECE):
                stop = min(start + PIECE, count)
                room[start:stop] = self._read(self._at + start, stop - start)
        self._at += count
        return count

    def _read(self, at: int, nbytes: int) -> memoryview:
        """Some bytes in memory of ours. An error would hold the caller's memory, which torch_checkpointing then cannot
        close, and it would raise an error about that instead."""
        out = empty_buffer(nbytes)
        try:
            self._files.reader.read([LeafRange(self._leaf, at, out)])
        except ts.NotFound as error:
            raise FileNotFoundError(str(error)) from error
        return view(out)

    def readall(self) -> bytes:
        """All that is left. The method of the base class would read it in small pieces."""
        out = bytearray(max(0, self._size - self._at))
        self.readinto(out)
        return bytes(out)


def _mapped(file: Path) -> torch.Tensor:
    """The bytes of a file, of which only those are in memory that are being read."""
    nbytes = file.stat().st_size
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_file(str(file), shared=False, size=nbytes, dtype=torch.uint8)


def _children(names: Iterable[str], folder: str) -> set[str]:
    """The first parts of the names below a folder; an empty one stands for where relative paths begin."""
    if not folder:
        return {name.split("/")[0] for name in names if not name.startswith("/")}
    prefix = folder.rstrip("/") + "/"
    return {name.removeprefix(prefix).split("/")[0] for name in names if name.startswith(prefix)}


_OPEN: dict[tuple[int, str, bytes], ts.Checkpointer] = {}
_LOCK = threading.Lock()


def _checkpointer_of(policy: ts.Policy, run: str) -> ts.Checkpointer:
    """The one that all storages of this process share, since a manager makes one to write and one to read."""
    key = (os.getpid(), run, pickle.dumps(policy))
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = ts.Checkpointer(policy, run, preemption=False)
        return _OPEN[key]


def close() -> None:
    """Finish the copies to slower tiers of this process, close the tiers and free the memory.

    The next save or load opens them again. At the end of a process it is done by itself.

    Raises:
        TierstateError: a tier lacks what it should have.
    """
    with _LOCK:
        mine = [_OPEN.pop(key) for key in list(_OPEN) if key[0] == os.getpid()]
    for ckpt in mine:
        ckpt.close()
