"""Files with a secret: opened, checked to be of this user alone, and read; for keys of policies and secrets of jobs.

A file is private if it is a regular file and no link, belongs to the user of this process, and gives no other user or
group any access (mode 0600 or narrower); and nobody else can put another file in its place, as `trusted_path` says of
the folders and links on the way. A file of root's that this user may read is not: who hands out secrets in such
files can hand them out in a variable, or copy them.

This module needs the standard library only, since the keeper of a host's memory uses it, which is a small process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .trusted_path import how_to_close, passed, trusted_owners, user_name, with_owners, writers

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def open_private_file(path: Path, what: str, error: type[Exception]) -> Iterator[int]:
    """Open a private file for reading, and give its descriptor.

    It is opened first and checked then, so that the file that was checked is the one that is read.

    Args:
        path: of the file. Links are followed in its folders only, and have to be trusted as those are.
        what: the secret that is in it, for messages, as in ``a key``.
        error: the class of the error.

    Raises:
        error: there is no such file, or it is not private; the message says what was found, what is right, and how to
            mend it.
    """
    try:
        # Without O_NONBLOCK the open of a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        mend = "give a file that is there, that this user can read, and that is not a link"
        raise error(_refusal(path, what, f"it cannot be opened ({problem.strerror})", mend)) from problem
    try:
        # Who could change the way after this check could have done so before.
        if fault := _fault(path, os.fstat(descriptor)) or _way_fault(path.absolute()):
            raise error(_refusal(path, what, *fault))
        yield descriptor
    finally:
        os.close(descriptor)


def read_private_file(path: Path, limit: int, what: str, error: type[Exception]) -> bytes:
    """The bytes of a private file.

    Args:
        path, what, error: as in `open_private_file`.
        limit: bytes of the file, at most.

    Raises:
        error: as in `open_private_file`; or the file is longer, or it cannot be read.
    """
    data = b""
    with open_private_file(path, what, error) as descriptor:
        try:
            # One read may give less than there is, as in a file system of a network.
            while len(data) <= limit and (part := os.read(descriptor, limit + 1 - len(data))):
                data += part
        except OSError as problem:
            raise error(f"{path}: {what} cannot be read from it: {problem.strerror}") from problem
    if len(data) > limit:
        raise error(f"{path}: is longer than {limit} bytes, the most that {what} has; give a file with nothing else")
    return data


def _fault(path: Path, found: os.stat_result) -> tuple[str, str] | None:
    """What is wrong with a file, and how to mend it; None if it is private."""
    if not stat.S_ISREG(found.st_mode):
        return f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no file')}", "give the path of a file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}", "copy it to a file of your own"
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        return (
            f"others have access to it (mode {mode:04o})",
            f"chmod 600 {path}, and if others may know it, make a new one",
        )
    return None


def _way_fault(path: Path) -> tuple[str, str] | None:
    """What is wrong with a folder or link on the way to a file, and how to mend it; None if others cannot change it."""
    try:
        way = list(passed(path))
    except OSError as problem:
        return f"the way to it cannot be looked at ({problem.strerror})", "give a path that this user can search"
    for one, owners in with_owners(way, trusted_owners()):
        if one.status.st_uid not in owners:
            owner = user_name(one.status.st_uid)
            return f"{one.path} belongs to {owner}, who could lead to another file", "use another path"
        who = writers(one.status) if stat.S_ISDIR(one.status.st_mode) else ""
        if who:
            mode = stat.S_IMODE(one.status.st_mode)
            found = f"{who} can write to {one.path} (mode {mode:04o}), and put another file in its place"
            return found, f"{how_to_close(who)}, or use another folder"
    return None


def _refusal(path: Path, what: str, found: str, mend: str) -> str:
    right = f"{what} is read from a regular file of user {os.geteuid()} with mode 0600"
    return f"{path}: {found}; {right}: {mend}"
