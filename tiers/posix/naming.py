"""How a finished temporary file gets an object's name, exactly once, on any file system.

``link(2)`` where there are hard links; else ``renameat2(2)`` with ``RENAME_NOREPLACE``; else a plain rename under a
lock file. All three fail if the name is taken, and leave the whole object or none after a crash at any moment.

The three are tried in this order for every object, so that all writers of one file system use the same one: a lock only
excludes writers that take it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import count
from pathlib import Path

from tierstate.tiers.backoff import Backoff
from tierstate.tiers.libc import libc

from .files import TEMP, UNLOCKED_AGE, BufferedFile, create_locked, remove_leftover
from .ownership import PRIVATE, Permissions

LOCK = f"{TEMP}lock-"
"""Prefix of the names of lock files. One that a dead writer left is removed like any temporary file."""


LOCK_WAIT = 30.0
"""Seconds to wait for another writer's lock, which is held for a rename only."""


_PAUSES = Backoff(first=0.001, longest=0.1, fixed=0.5)


_NOREPLACE = 1
"""RENAME_NOREPLACE."""


# EPERM is what Linux answers for file systems such as FAT; mergerfs answers EXDEV, and those that count names EMLINK.
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)


_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})


class Naming(Enum):
    """What gave an object its name; the value is a note for users, empty for what is usual."""

    LINK = ""
    RENAME = "there are no hard links here: objects get their names by renameat2(RENAME_NOREPLACE); one writer wins"
    LOCK = (
        "there are neither hard links nor renames that replace nothing here: objects get their names under lock files; "
        "one writer wins, as long as no other program creates the same names, each host sees at once what another one "
        f"created, and none stands still for {UNLOCKED_AGE / 60:.0f} min between lock and rename; where locks of dead "
        "writers cannot be told (no flock), their key is free again after that time"
    )


def give_name(file: BufferedFile, path: Path, min_age: float, permissions: Permissions = PRIVATE) -> Naming:
    """Give a temporary file its final name, in the same folder. It may keep its temporary name beside.

    Args:
        file: written and synced, open.
        min_age: seconds for which a free lock of another writer is left alone; 0 where locks are seen by all writers.
        permissions: of lock files, which other users of the tier must be able to remove.

    Raises:
        FileExistsError: the name is taken.
        OSError: ETIMEDOUT if another writer's lock stays.
    """
    for missing, way, name in ((_NO_LINKS, _link, Naming.LINK), (_NO_FLAGS, _rename_no_replace, Naming.RENAME)):
        try:
            way(file.path, path)
        except OSError as error:
            if error.errno not in missing:
                raise
        else:
            return name
    with _name_locked(file, path, min_age, permissions):
        _check_free(path)
        os.rename(file.path, path)
    return Naming.LOCK


def _link(old: Path, new: Path) -> None:
    os.link(old, new, follow_symlinks=False)


def _rename_no_replace(old: Path, new: Path) -> None:
    try:
        call = libc().renameat2
    except AttributeError:  # a C library without it
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(old), None, str(new)) from None
    here = ctypes.c_int(-100)  # AT_FDCWD
    if call(here, os.fsencode(old), here, os.fsencode(new), ctypes.c_uint(_NOREPLACE)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old), None, str(new))


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def lock_file(path: Path) -> Path:
    """The lock file of a name: the same one for names that differ only in case, which may be one name."""
    return path.with_name(LOCK + hashlib.sha256(path.name.lower().encode()).hexdigest()[:32])


@contextmanager
def _name_locked(file: BufferedFile, path: Path, min_age: float, permissions: Permissions) -> Iterator[None]:
    """Hold the lock of a name. The lock is a file that only one can create; it is itself locked while its owner lives.

    Raises:
        FileExistsError: the name was given meanwhile.
    """
    place = lock_file(path)
    held = _take_lock(file, path, place, min_age)
    try:
        permissions.apply(held.descriptor)
        yield
    finally:
        # Removed before it is closed: whoever finds it without a lock may take its owner for dead.
        with suppress(OSError):
            os.unlink(place)
        held.close()


def _take_lock(file: BufferedFile, path: Path, place: Path, min_age: float) -> BufferedFile:
    until = time.monotonic() + LOCK_WAIT
    for tries in count(1):
        with suppress(FileExistsError):
            if held := create_locked(place):
                return held
        _check_free(path)
        if time.monotonic() > until:
            break
        # The file system's own time, which ages are measured by.
        os.utime(file.descriptor)
        remove_leftover(place, file.status().st_mtime, min_age)
        time.sleep(_PAUSES.pause(tries))
    text = f"another writer's lock stays; if none is running, remove {place}"
    raise OSError(errno.ETIMEDOUT, text, str(path))
