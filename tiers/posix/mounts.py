"""Where a directory lies: its device and path in that file system, seen through symbolic links and bind mounts.

Also what kind of file system that is.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from tierstate.tiers.base import Place
from tierstate.tiers.libc import libc

MOUNTS = "/proc/self/mountinfo"
"""Linux's list of mounts; see proc_pid_mountinfo(5)."""


_FUSE = 0x65735546


# vfat, exFAT, NTFS (two drivers), SMB (three dialects), 9p
_NO_MODES = frozenset({0x4D44, 0x2011BAB0, 0x5346544E, 0x7366746E, 0x517B, 0xFF534D42, 0xFE534D42, 0x01021997})
"""``f_type`` of file systems whose modes are made up of mount options."""


class Mount(NamedTuple):
    """One mounted file system, or a part of one (a bind mount).

    Attributes:
        device: its number, as in ``8:1``.
        root: the path in the file system that is mounted.
        point: where it is mounted.
        kind: of file system, as in ``ext4``.
        options: of the file system, separated by commas.
    """

    device: str
    root: str
    point: str
    kind: str = ""
    options: str = ""


def read_mounts(text: str) -> list[Mount]:
    """The mounts of the text of ``/proc/self/mountinfo``."""
    rows = (line.split(" ") for line in text.splitlines())
    return [Mount(row[2], _plain(row[3]), _plain(row[4]), row[-3], row[-1]) for row in rows if len(row) > 6]


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount in which a path lies, which has no links in it; of mounts at the same point the last one covers the
    others. None if there is none."""
    found = None
    for mount in mounts:
        if is_within(path, mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def place_of(path: Path) -> Place:
    """The place of a directory, which need not exist yet.

    Raises:
        OSError: it could not be looked at.
    """
    real = os.path.realpath(path)
    paths = [("path", *_names(real))]
    mount = mount_of(real, _mounts())
    if mount is not None:
        inner = os.path.join(mount.root, os.path.relpath(real, mount.point))
        paths.append(("device", mount.device, *_names(os.path.normpath(inner))))
    return Place(tuple(paths), _state(real), mount.point if mount is not None else "")


def keeps_modes(path: Path) -> bool:
    """Whether modes of a file system say who has access: not where they are made up of mount options. With FUSE that is
    so for disks (``fuseblk``: exFAT, NTFS), and where the kernel does not go by the modes.

    Raises:
        OSError: the path cannot be looked at.
    """
    kind = filesystem_type(path)
    if kind != _FUSE:
        return kind not in _NO_MODES
    mount = mount_of(os.path.realpath(path), _mounts())
    return mount is not None and mount.kind != "fuseblk" and "default_permissions" in mount.options.split(",")


def filesystem_type(path: Path) -> int:
    """``f_type`` of the file system that holds ``path``, from statfs(2): Python's `os.statvfs` does not have it.

    Raises:
        OSError: the call failed.
    """
    result = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes on 64-bit Linux and f_type first
    if libc().statfs(os.fsencode(path), result) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_ulong.from_buffer(result).value & 0xFFFFFFFF


def _mounts() -> list[Mount]:
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return read_mounts(file.read())
    except FileNotFoundError:  # not Linux: then only links are seen through
        return []


def _state(path: str) -> str:
    """Another one if the directory is another one: it was moved away, or a file system was mounted or unmounted."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return "missing"
    return f"{found.st_dev}:{found.st_ino}" if stat.S_ISDIR(found.st_mode) else "no directory"


def is_within(path: str, folder: str) -> bool:
    """Whether an absolute path is that of a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _plain(text: str) -> str:
    """A path as it is: blanks and backslashes come as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
