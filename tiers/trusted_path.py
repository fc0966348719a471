"""Paths that nobody else can change: who owns the folders and links on them, and who can write there.

A path is trusted if no other user can change what it leads to: every folder and link on it belongs to this user or to
root, and nobody else can write to such a folder, or it is sticky.

This module needs the standard library only, since the keeper of a host's memory uses it, which is a small process.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = 0


MAX_LINKS = 40
"""Links that are followed in one path, as by Linux."""


EVERY_USER = "every user"
"""Who can write, as text, where the mode says so of all others."""


class Passed(NamedTuple):
    """A folder, a file or a link that a path leads through, by its real path."""

    path: Path
    status: os.stat_result

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return stat.S_ISLNK(self.status.st_mode)


def passed(path: Path) -> Iterator[Passed]:
    """All that a path leads through, from the root of the file system on; ends before what does not exist.

    Raises:
        OSError: a folder cannot be searched, or there are too many links.
    """
    place, left, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield Passed(place, os.lstat(place))
    while left:
        name = left.pop()
        if name == "..":
            place = place.parent
            continue
        try:
            found = Passed(place / name, os.lstat(place / name))
        except (FileNotFoundError, NotADirectoryError):
            return
        yield found
        if not found.is_link:
            place = found.path
            continue
        if (links := links + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(found.path))
        place = Path("/") if target.is_absolute() else place
        left += reversed([part for part in target.parts if part != "/"])


def with_owners(way: Iterable[Passed], owners: frozenset[int]) -> Iterator[tuple[Passed, frozenset[int]]]:
    """What a path leads through, each with the users who may own it; these become more where root was led to a volume.

    Args:
        way: as from `passed`.
        owners: who may own it at the root of the file system.
    """
    above: os.stat_result | None = None
    for one in way:
        if one.status.st_uid not in owners and _root_was_led_here(one.status, above or one.status):
            owners |= {one.status.st_uid}
        yield one, owners
        if not one.is_link:
            above = one.status


def writers(found: os.stat_result, gid: int | None = None, *, everyone: bool = False) -> str:
    """Who can write to a folder and is not trusted, as text; empty if nobody.

    Args:
        gid: a group that is trusted.
        everyone: whether every user is.
    """
    mode = found.st_mode
    if mode & stat.S_ISVTX:
        return ""
    if mode & 0o002 and not everyone:
        return EVERY_USER
    trusted = _is_trusted(found.st_gid, gid) or _is_owners_own(found)
    return f"the group {group_name(found.st_gid)}" if mode & 0o020 and not trusted else ""


def how_to_close(who: str) -> str:
    """What to do with a folder that these `writers` can write to."""
    return "chmod o-w or chmod +t it" if who == EVERY_USER else "chmod g-w it"


def _is_trusted(gid: int, named: int | None) -> bool:
    return gid in (ROOT, named) or is_private_group(gid)


def _is_owners_own(found: os.stat_result) -> bool:
    # The private group of a user whom root was led to has that user's number, and no name in a container.
    return os.geteuid() == ROOT and found.st_gid == found.st_uid


@lru_cache(maxsize=64)
def is_private_group(gid: int) -> bool:
    """Whether a group is the one that a system made for this user alone, as Debian and Red Hat do."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def user_name(uid: int) -> str:
    """A user for a message."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user {uid}"


def group_name(gid: int) -> str:
    """The name of a group; its number, if it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def trusted_owners() -> frozenset[int]:
    euid = os.geteuid()
    # In a user namespace files of root outside seem to be nobody's; of root itself a server makes nobody (root_squash).
    nobody = {_nobody()} if euid == ROOT or _in_user_namespace() else set()
    return frozenset({ROOT, euid, *nobody})


def _root_was_led_here(found: os.stat_result, above: os.stat_result) -> bool:
    """Whether this is root, and only root or the owner can have put it here: as a volume of a user in a container."""
    led = above.st_uid in (ROOT, found.st_uid) and not above.st_mode & 0o022
    return os.geteuid() == ROOT and led


@lru_cache(maxsize=1)
def _nobody() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _in_user_namespace() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except OSError:
        return False
