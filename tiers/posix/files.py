"""File operations of directory tiers: reads and writes at offsets, locked temporary files, fsync of folders.

Also translates an OSError, by its errno, into the error classes of a tier.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    Damaged,
    MediaError,
    NotFound,
    TierError,
    TierFull,
    TierUnavailable,
)
from tierstate.manifest.printable import escape_controls
from tierstate.tiers.base import is_key

TEMP = ".tmp-"
"""Prefix of the names of temporary files; no name in a key starts with a dot."""


PRIVATE_MODE = 0o600
"""The mode of a new file: nobody else can read it, until it gets the mode that it is to have."""


UNLOCKED_AGE = 3600.0
"""Seconds after which a temporary file counts as a leftover of a dead writer, if the file system has no locks."""


_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})


_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF})


_REMEDIES: dict[type[TierError], str] = {
    AlreadyExists: "nothing was changed",
    TierFull: "free some space, raise the quota, or keep fewer versions",
    MediaError: "check the disk, or the server behind it",
    AccessDenied: "check the owner and mode of the path, the options it is mounted with, and that no part is a link",
}


_TOO_LONG = "raise the limit of a file's length (`ulimit -f`), or use a file system that has none as low"


class BufferedFile:
    """One open file, read and written through the page cache.

    Owns the descriptor. All sizes and offsets are bytes.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        # A file object rather than a bare descriptor: if it is never closed, Python closes it with a warning.
        try:
            self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
        except BaseException:  # of a folder
            os.close(descriptor)
            raise
        self.path = path

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
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
        """Fill all of ``out`` from ``offset``, without a copy.

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
        """The result of fstat(2)."""
        return os.fstat(self._file.fileno())

    def sync(self) -> None:
        """Wait until the bytes and the length are on stable storage (fdatasync)."""
        os.fdatasync(self._file.fileno())

    def lock(self) -> bool:
        """Take the lock that marks a file as in use; False if the file system has no locks.

        Raises:
            BlockingIOError: another process has the lock.
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
        """Close the descriptor, which releases the lock.

        An error of close(2) is no news: the descriptor is gone all the same, and `sync` has told before whether the
        bytes arrived. NFS and quotas give one here; it would fail an object that is whole, or hide the real failure.
        """
        with suppress(OSError):
            self._file.close()


def open_file(path: Path, flags: int = 0) -> BufferedFile:
    """Open a regular file for reading; does not follow a symbolic link or block on a pipe.

    Args:
        flags: more flags for open(2).

    Raises:
        OSError: ENOENT if there is no regular file, ELOOP if it is a symbolic link.
    """
    file = BufferedFile(os.open(path, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), path)
    if not stat.S_ISREG(file.status().st_mode):
        file.close()
        raise OSError(errno.ENOENT, "not a regular file", str(path))
    return file


def create_locked(path: Path, mode: int = PRIVATE_MODE) -> BufferedFile | None:
    """Create a file, and lock it if the file system has locks. None if a sweep took it for a leftover first.

    Args:
        mode: of the file, less the umask.

    Raises:
        FileExistsError: the name is taken.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = BufferedFile(os.open(path, flags, mode), path)
    try:
        file.lock()
        if is_at(file, path):
            return file
    except BlockingIOError:
        pass  # a sweep has locked the file first and is about to remove it
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def is_at(file: BufferedFile, path: Path) -> bool:
    """Whether an open file still has a name.

    Its count of links does not tell: FUSE renames what is removed while open.
    """
    try:
        return os.path.samestat(os.lstat(path), file.status())
    except FileNotFoundError:
        return False


def create_temp(folder: Path, mode: int = PRIVATE_MODE) -> BufferedFile:
    """Create a file with a temporary name in ``folder``; as in `create_locked`."""
    while True:
        path = folder / f"{TEMP}{uuid.uuid4().hex}"
        try:
            if file := create_locked(path, mode):
                return file
        except OSError:
            with suppress(OSError):  # it was created, and could not be locked or looked at
                os.unlink(path)
            raise


def remove_leftover(path: Path, now: float, min_age: float) -> None:
    """Remove a temporary file if its writer is dead; holds the lock meanwhile, so that no writer starts to use it.

    Args:
        now: the file system's own time, in seconds.
        min_age: a file changed less than this many seconds ago is not removed, even if its lock is free.
    """
    # NFS emulates these locks by byte-range locks, which require that the file is open for writing.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(FileNotFoundError, BlockingIOError), closing(BufferedFile(os.open(path, flags), path)) as file:
        age = min_age if file.lock() else max(min_age, UNLOCKED_AGE)
        # Its name may be another file's by now: a lock file's is used again.
        if (not age or now - file.status().st_mtime >= age) and is_at(file, path):
            os.unlink(path)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to something. Raises an OSError where that cannot be known, as where a folder above is that
    of another user, or a server does not answer: `Path.exists` of Python 3.14 says then that nothing is there."""
    return _mode(path) is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a folder. Raises as `exists`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a file. Raises as `exists`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except ValueError:  # no path has a NUL in it
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def file_size(path: Path) -> int:
    """Length of a regular file in bytes.

    Raises:
        OSError: as for `open_file`.
    """
    return file_status(path).st_size


def file_status(path: Path) -> os.stat_result:
    """The result of lstat(2) for a regular file.

    Raises:
        OSError: as for `open_file`.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.ENOENT, "not a regular file", str(path))
    return status


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on stable storage (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk(folder: Path, stem: str = "") -> Iterator[os.DirEntry[str]]:
    """Every file below a folder, in no order; links are not followed; folders that are removed meanwhile are skipped.

    Args:
        stem: prefix of the names at the top level.
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


def object_keys(root: Path, prefix: str) -> list[str]:
    """The keys with a prefix of the objects below a tier's folder, rising."""
    folder, _, stem = prefix.rpartition("/")
    above = os.path.join(root, "")
    keys = (entry.path.removeprefix(above) for entry in walk(root / folder, stem))
    return sorted(key for key in keys if key.startswith(prefix) and is_key(key))


def _numbers(names: str) -> frozenset[int]:
    return frozenset(getattr(errno, name) for name in names.split() if hasattr(errno, name))


_KINDS: tuple[tuple[frozenset[int], type[TierError]], ...] = (
    (_numbers("EEXIST"), AlreadyExists),
    (_numbers("ENOENT EISDIR"), NotFound),
    (_numbers("ENOSPC EDQUOT EFBIG EMLINK"), TierFull),
    (_numbers("EACCES EPERM EROFS ELOOP ENOKEY EKEYEXPIRED EKEYREVOKED EKEYREJECTED"), AccessDenied),
    (
        _numbers(
            "EIO ESTALE ETIMEDOUT EAGAIN EBUSY EINTR ENXIO ENODEV ENOMEM EMFILE ENFILE ENOLCK EREMOTEIO EREMCHG "
            "EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ENETRESET ENOTCONN ENOLINK ECOMM EPROTO "
            "ECONNABORTED ECONNREFUSED ECONNRESET EPIPE ESHUTDOWN EREMOTE ENODATA ECANCELED "
            "ENOBUFS ETIME ENOMEDIUM EALREADY EINPROGRESS EADDRNOTAVAIL EUCLEAN EBADMSG"
        ),
        TierUnavailable,
    ),
)


_MEDIA = _numbers("EIO EUCLEAN EBADMSG")
"""Of a read: the medium does not give the bytes, or the file system's own checksums are wrong."""


def errno_class(number: int | None) -> type[TierError]:
    """The error class for an errno; `TierError` for those that say nothing about a tier."""
    return next((kind for numbers, kind in _KINDS if number in numbers), TierError)


def translate_os_error(error: OSError, doing: str, tier: str, key: str, path: Path) -> TierError:
    """An OSError as an error of the tier: what failed, where, with which errno, and what may help."""
    kind = errno_class(error.errno)
    if error.errno in _MEDIA and doing == "read":
        kind = MediaError
    if error.errno == errno.ENOTDIR:
        return _not_a_folder(error, doing, tier, key, path)
    name = errno.errorcode.get(error.errno or 0, "no errno")
    where = ": ".join(filter(None, (tier, key)))
    text = escape_controls(f"{where}: cannot {doing} {path}: {error.strerror or error} ({name})")
    remedy = _TOO_LONG if error.errno == errno.EFBIG else _REMEDIES.get(kind)
    return kind(f"{text}; {remedy}" if remedy else text, tier=tier, key=key)


def _not_a_folder(error: OSError, doing: str, tier: str, key: str, path: Path) -> TierError:
    """The error where a part of the path is a file. Within the key that is an object: for a reader the wanted object
    does not exist, for a writer the name is taken. Else the tier's folder is not there, which says nothing of objects.
    """
    where = ": ".join(filter(None, (tier, key)))
    file = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
    within = path.parents[len(Path(key).parts) - 1] if key and path.as_posix().endswith(f"/{key}") else path
    if file.is_relative_to(within) and file != within:
        kind = NotFound if doing == "read" else AlreadyExists
        return kind(f"{where}: {file} is an object, not a folder (ENOTDIR); nothing was changed", tier=tier, key=key)
    told = f"{where}: cannot {doing} {path}: {file} is not a folder (ENOTDIR); give a folder, or mount it again"
    return TierError(told, tier=tier, key=key)


@contextmanager
def os_errors_translated(doing: str, tier: str, key: str, path: Path) -> Iterator[None]:
    """Raise an OSError of the block as an error of the tier."""
    try:
        yield
    except OSError as error:
        raise translate_os_error(error, doing, tier, key, path) from error
