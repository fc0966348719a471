"""Atomic files: several files are written under temporary names, then synced and renamed together, or removed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tierstate.manifest.errors import AlreadyExists
from tierstate.tiers.posix.files import UNLOCKED_AGE, BufferedFile, create_temp, exists, is_folder, sync_folder
from tierstate.tiers.posix.naming import give_name

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class AtomicFiles:
    """A set of files that get their final names together in `commit`.

    Args:
        force: replace existing files.
        beside: other files of an earlier set, which do not fit the new ones; `commit` deletes them.

    Raises:
        AlreadyExists: one of ``beside`` exists, and ``force`` is not set.
    """

    def __init__(self, *, force: bool = False, beside: Iterable[Path] = ()) -> None:
        self._force = force
        self._beside = tuple(beside)
        for path in self._beside:
            self.check(path)
        self._files: list[tuple[Path, BufferedFile]] = []

    def create(self, path: Path, size: int) -> BufferedFile:
        """Create a file of this length that `commit` will name ``path``; its disk space is reserved now, if possible.

        Raises:
            AlreadyExists: a file of that name exists, and ``force`` is not set.
            OSError: no such folder, or no space left.
        """
        self.check(path)
        file = create_temp(path.parent, 0o666)
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
            AlreadyExists: another process has created one of them meanwhile.
        """
        for path, file in self._files:
            os.fsync(file.descriptor)
            self.check(path)
        if self._force:
            self._replace()
        else:
            self._name()
        for folder in {path.parent for path, _ in self._files}:
            sync_folder(folder)
        return tuple(path for path, _ in self._files)

    def _replace(self) -> None:
        last, _ = self._files[-1]
        # First delete the old index, so that it never lists new files.
        for path in (*([last] if len(self._files) > 1 else []), *self._beside):
            path.unlink(missing_ok=True)
        for path, file in self._files:
            os.replace(file.path, path)

    def _name(self) -> None:
        """Give the files their names, as long as all of them are free; if one is not, none of the files stays."""
        with ExitStack() as undo:
            for path, file in self._files:
                try:
                    give_name(file, path, UNLOCKED_AGE)
                except FileExistsError as error:
                    raise _taken(path) from error
                undo.callback(path.unlink, missing_ok=True)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, file in self._files:
            with suppress(FileNotFoundError):  # already renamed to its final name
                file.path.unlink()
            file.close()

    def check(self, path: Path) -> None:
        """Raises:
        AlreadyExists: a file of that name must not be created.
        FileNotFoundError: its folder is missing.
        """
        check_folder(path)
        if _is_special(path):
            raise AlreadyExists(f"{path} is a device, a pipe, a socket or a standard stream; name a file")
        if is_folder(path) and not path.is_symlink():
            raise AlreadyExists(f"{path} is a folder; name another file, or move it away")
        if exists(path) and not self._force:
            raise _taken(path)


def _taken(path: Path) -> AlreadyExists:
    return AlreadyExists(f"{path} exists; name another file, or say --force (force=True) to replace it")


def check_folder(path: Path) -> None:
    """Raises FileNotFoundError, which says what to do, if the folder of a file that is to be written is missing."""
    if not is_folder(path.parent):
        text = f"{path.name} has no folder to be in; make it first"
        raise FileNotFoundError(errno.ENOENT, text, str(path.parent))


def _is_special(path: Path) -> bool:
    """Whether a rename would put a file in the place of what is none, as root in that of ``/dev/null``."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)) or any(
        _is_open_as(descriptor, found) for descriptor in (0, 1, 2)
    )


def _is_open_as(descriptor: int, found: os.stat_result) -> bool:
    # /dev/stdout leads to a file where the output goes to one; the rename would still replace the link in /dev.
    try:
        return os.path.samestat(os.fstat(descriptor), found)
    except OSError:  # it is closed
        return False
