"""A file system of its own process that lacks what many lack: hard links, renames that replace nothing, exact names.

    python fuse_server.py FOLDER MOUNT LACKS...

Serves a folder at another place by FUSE, until it is unmounted. ``LACKS`` are of `links`, `noreplace`, `case`, `locks`,
`closes` (close(2) answers EDQUOT). Run by `support.filesystems.fuse`.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import mfusepy

NOREPLACE = 1

NOW = (1 << 30) - 1
"""UTIME_NOW, in the place of the nanoseconds."""


class Lacking(mfusepy.Operations):
    """The files of a folder.

    Args:
        root: the folder.
        lacks: what it refuses.
    """

    use_ns = True

    def __init__(self, root: str, lacks: set[str]) -> None:
        self._root, self._lacks = root, lacks
        if "locks" in lacks:
            self.flock = self._no_locks

    def _no_locks(self, *_: object) -> int:
        raise mfusepy.FuseOSError(errno.ENOLCK)

    def _path(self, path: str) -> str:
        found = self._root
        for part in path.split("/")[1:]:
            if "case" in self._lacks and part and os.path.isdir(found):
                part = next((name for name in os.listdir(found) if name.lower() == part.lower()), part)
            found = os.path.join(found, part) if part else found
        return found

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.fstat(fh) if fh is not None else os.lstat(self._path(path))
        found = {f"st_{name}": getattr(status, f"st_{name}") for name in ("mode", "nlink", "size", "uid", "gid")}
        return found | {f"st_{name}": getattr(status, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._path(path))

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._path(target))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._path(path))

    def mknod(self, path: str, mode: int, dev: int) -> None:
        os.mknod(self._path(path), mode, dev)

    def link(self, target: str, source: str) -> None:
        if "links" in self._lacks:
            raise mfusepy.FuseOSError(errno.EPERM)
        os.link(self._path(source), self._path(target))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags & os.O_ACCMODE)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._path(path) if fh is None else fh, length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def flush(self, path: str, fh: int) -> None:
        if "closes" in self._lacks:
            raise mfusepy.FuseOSError(errno.EDQUOT)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def utimens(self, path: str, times: Any = None) -> None:
        now = times is None or NOW in times
        os.utime(self._path(path), **({} if now else {"ns": times}), follow_symlinks=False)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._path(path), mode)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._path(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}


class Server(mfusepy.FUSE):
    """Looks at the flags of a rename, which mfusepy drops."""

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        operations = self.operations
        if flags & ~NOREPLACE or (flags and "noreplace" in operations._lacks):
            return -errno.EINVAL
        if flags & NOREPLACE and os.path.lexists(operations._path(new.decode())):
            return -errno.EEXIST
        return super().rename_fuse_3(old, new, flags) or 0


if __name__ == "__main__":
    Server(Lacking(sys.argv[1], set(sys.argv[3:])), sys.argv[2], foreground=True, attr_timeout=0, entry_timeout=0)
