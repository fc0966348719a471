"""Whole files: several files that come to be together once all of them are written, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tierstate.manifest.errors import AlreadyExists
from tierstate.tiers.files import BufferedFile, create_temp, sync_folder

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class WholeFiles:
    """Files that are written under temporary names.

    Args:
        force: replace files that are there.
        beside: files that would speak of other bytes than the new ones; they must not be there in the end.

    Raises:
        AlreadyExists: one of these is there, and is not to be removed.
    """

    def __init__(self, *, force: bool = False, beside: Iterable[Path] = ()) -> None:
        self._force = force
        self._beside = tuple(beside)
        for path in self._beside:
            self._check(path)
        self._files: list[tuple[Path, BufferedFile]] = []

    def create(self, path: Path, size: int) -> BufferedFile:
        """A file of this length, to be known as ``path`` in the end; its disk space is taken now where it can be.

        Raises:
            AlreadyExists: there is a file of that name, and it is not to be replaced.
            OSError: no such folder, no room.
        """
        self._check(path)
        file = create_temp(path.parent)
        self._files.append((path, file))
        try:
            os.posix_fallocate(file.descriptor, 0, max(size, 1))
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
        os.ftruncate(file.descriptor, size)
        return file

    def commit(self) -> tuple[Path, ...]:
        """Sync all files and give them their names, in the order in which they were created.

        Raises:
            AlreadyExists: somebody else has made one meanwhile.
        """
        for path, file in self._files:
            os.fsync(file.descriptor)
            self._check(path)
        last, _ = self._files[-1]
        # The old index, first of all, must not speak of new files.
        for path in (*([last] if len(self._files) > 1 else []), *self._beside):
            path.unlink(missing_ok=True)
        for path, file in self._files:
            os.replace(file.path, path)
        for folder in {path.parent for path, _ in self._files}:
            sync_folder(folder)
        return tuple(path for path, _ in self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, file in self._files:
            with suppress(FileNotFoundError):  # it has its name
                file.path.unlink()
            file.close()

    def _check(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            raise AlreadyExists(f"{path} is a folder; name another file, or move it away")
        if path.exists() and not self._force:
            raise AlreadyExists(f"{path} exists; name another file, or say --force (force=True) to replace it")
