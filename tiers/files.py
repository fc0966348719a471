"""Files: bytes at offsets, temporary names that die with their writer, folders that are synced."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import Damaged

TEMP = ".tmp-"
"""How the names of files begin that are being written; no key has a name that starts with a dot."""

UNLOCKED_AGE = 3600.0
"""Seconds after which a temporary file is taken for a dead writer's where locks cannot tell."""

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF})


class BufferedFile:
    """One open file, through the page cache.

    Owns the descriptor. All sizes and offsets are bytes.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        # A file object rather than a bare number: one that is forgotten is closed, with a warning.
        self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
        self.path = path

    @property
    def descriptor(self) -> int:
        """The open file's number."""
        return self._file.fileno()

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``, however many calls that takes."""
        rest = view(data)
        while rest:
            n = os.pwrite(self._file.fileno(), rest, offset)
            if n == 0:
                raise OSError(errno.EIO, "a write of nothing", str(self.path))
            rest, offset = rest[n:], offset + n

    def read(self, offset: int, out: Buffer) -> None:
        """Fill all of ``out`` from ``offset``, straight into its memory.

        Raises:
            Damaged: the file ends before that.
        """
        rest = view(out)
        while rest:
            n = os.preadv(self._file.fileno(), [rest], offset)
            if n == 0:
                raise Damaged(f"{self.path}: the file ends at {offset}, {len(rest)} bytes before it should")
            rest, offset = rest[n:], offset + n

    def status(self) -> os.stat_result:
        """What the file system says about the file."""
        return os.fstat(self._file.fileno())

    def sync(self) -> None:
        """Return once the bytes and the length are on the medium."""
        os.fdatasync(self._file.fileno())

    def lock(self) -> bool:
        """Take the lock that shows a living writer; False where the file system has no locks.

        Raises:
            BlockingIOError: another holds it.
        """
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the descriptor, and so let go of the lock."""
        self._file.close()


def open_file(path: Path, flags: int = 0) -> BufferedFile:
    """A regular file for reading; a link is not followed, a pipe not waited for.

    Args:
        flags: more flags to open it with.

    Raises:
        OSError: ENOENT where there is no regular file, ELOOP where there is a link.
    """
    file = BufferedFile(os.open(path, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), path)
    if not stat.S_ISREG(file.status().st_mode):
        file.close()
        raise OSError(errno.ENOENT, "not a regular file", str(path))
    return file


def create_temp(folder: Path) -> BufferedFile:
    """A new file of a temporary name in ``folder``, locked where the file system has locks."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = folder / f"{TEMP}{uuid.uuid4().hex}"
        file = BufferedFile(os.open(path, flags, 0o666), path)
        try:
            file.lock()
            if file.status().st_nlink:
                return file
        except BlockingIOError:
            pass  # a sweep was quicker than our lock, and is about to remove the file: take another
        except BaseException:
            file.close()
            raise
        file.close()


def remove_leftover(path: Path, now: float, min_age: float) -> None:
    """Remove a temporary file if its writer is dead; the lock is held meanwhile, so that nobody begins to use it.

    Args:
        now: the file system's own time, in seconds.
        min_age: seconds since its last change without which it counts as alive, lock or no lock.
    """
    # NFS emulates these locks by ones that want the file open for writing.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(FileNotFoundError, BlockingIOError), closing(BufferedFile(os.open(path, flags), path)) as file:
        age = min_age if file.lock() else max(min_age, UNLOCKED_AGE)
        if not age or now - file.status().st_mtime >= age:
            os.unlink(path)


def file_size(path: Path) -> int:
    """Length of a regular file in bytes.

    Raises:
        OSError: as for `open_file`.
    """
    return file_status(path).st_size


def file_status(path: Path) -> os.stat_result:
    """What the file system says about a regular file.

    Raises:
        OSError: as for `open_file`.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.ENOENT, "not a regular file", str(path))
    return status


def sync_folder(path: Path) -> None:
    """Return once the names in a folder are on the medium."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk(folder: Path, stem: str = "") -> Iterator[os.DirEntry[str]]:
    """Every file below a folder, in no order; links are not followed, and folders that vanish meanwhile are empty.

    Args:
        stem: how the names at the top must begin.
    """
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if not entry.name.startswith(stem):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith("."):
                    yield from walk(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield entry
