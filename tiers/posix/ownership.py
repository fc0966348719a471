"""Owners and modes of files: which ones a directory tier gives to what it makes, and whose folders it trusts.

A path is trusted if no other user can change what it leads to: every folder and link on it belongs to this user or to
root, and nobody else can write to such a folder, or it is sticky. A policy can extend that to other users by ``mode``
and ``group``. POSIX ACLs need no look of their own: the group bits of a mode are the most that an ACL can give.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

from tierstate.manifest.errors import AccessDenied
from tierstate.tiers.private_file import open_private_file

from .mounts import keeps_modes

ROOT = 0


MAX_LINKS = 40
"""Links that are followed in one path, as by Linux."""


_FILE = 0o666


_CLASSES = (0o100, 0o010, 0o001)
"""Owner, group and others: a factor for the bits rwx of each."""


# EPERM is what vfat and FUSE say, and a server that maps all users to one; EROFS comes later, from the write itself.
_REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


_NOT_KEPT = "this file system does not keep modes and groups: who can read the files is up to its mount options"


def parse_mode(value: object) -> int:
    """The mode of files: text as chmod(1) takes it, or a number with that value (YAML 1.1 reads ``0640`` as 416).

    Raises:
        ValueError: it is none, or one that cannot be meant.
    """
    text = isinstance(value, str) and re.fullmatch(r"(?:0o)?[0-7]{3,5}", value.strip())
    mode = int(str(value), 8) if text else value
    if not isinstance(mode, int) or isinstance(mode, bool) or not _is_sane(mode):
        raise ValueError(
            f"{value!r} is not a mode of files; write '0600' (this user), '0640' (the group reads), '0660' (the group "
            "writes) or '0644' (all read), in quotes"
        )
    return mode


def _is_sane(mode: int) -> bool:
    """Whether the owner may read and write, writing implies reading, and either all that may read may execute or none.

    So no decimal number that looks like a mode (640) is one by its value.
    """
    classes = [mode // factor & 0o7 for factor in _CLASSES]
    execute = 0o111 & mode
    readers = sum(factor for factor, bits in zip(_CLASSES, classes, strict=True) if bits & 0o4)
    return (
        0 <= mode <= 0o3777
        and classes[0] & 0o6 == 0o6
        and all(bits & 0o4 or not bits & 0o2 for bits in classes)
        and execute in (0, readers)
    )


def find_group(value: object) -> int:
    """The number of a group by its name or number; this user must be a member.

    Raises:
        ValueError: there is no such group, or this user is not in it.
    """
    if isinstance(value, str) and not value.strip().isdecimal():
        try:
            gid = grp.getgrnam(value.strip()).gr_gid
        except KeyError:
            raise ValueError(f"{value!r} is no group on this machine; write a name that `getent group` knows") from None
    elif isinstance(value, (int, str)) and not isinstance(value, bool) and 0 <= int(value) < 1 << 32:
        gid = int(value)
    else:
        raise ValueError(f"{value!r} is no group; write its name or its number")
    if os.geteuid() != ROOT and gid not in (os.getegid(), *os.getgroups()):
        raise ValueError(f"this user is not in the group {value!r}; name one of those that `id` lists")
    return gid


FileMode: TypeAlias = Annotated[
    int,
    BeforeValidator(parse_mode),
    WithJsonSchema(
        {
            "description": "a mode of files as chmod takes it, as in '0640'",
            "anyOf": [
                {"type": "integer", "minimum": 0o600, "maximum": 0o3777},
                {"type": "string", "pattern": r"^\s*(?:0o)?[0-7]{3,5}\s*$|\$\{"},
            ],
        }
    ),
]
"""The mode of files in a tier. Folders have it too, with ``x`` wherever there is ``r``."""


Group: TypeAlias = Annotated[
    int,
    BeforeValidator(find_group),
    WithJsonSchema(
        {
            "description": "a group by name or number",
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}],
        }
    ),
]
"""A group that this user is a member of, as its number."""


class Trust(NamedTuple):
    """Whose files below a folder are trusted, and what users should know of its owner and mode."""

    owners: frozenset[int]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Permissions:
    """Mode and group of the files and folders that a tier makes, and so, which other users its policy trusts.

    Attributes:
        mode: of files; folders have ``x`` as well wherever it has ``r``. The bits setgid and sticky are for folders.
        gid: the group of both; None for the one that the system gives.
    """

    mode: int = 0o600
    gid: int | None = None

    @classmethod
    def of(cls, mode: object, group: object = None) -> Permissions:
        """Those of a policy's values.

        Raises:
            ValueError: as `parse_mode` and `find_group`.
        """
        return cls(parse_mode(mode), None if group is None else find_group(group))

    @property
    def file_mode(self) -> int:
        """The mode of files."""
        return self.mode & _FILE

    @property
    def folder_mode(self) -> int:
        """The mode of folders."""
        return self.mode | (self.mode & 0o444) >> 2

    def apply(self, descriptor: int) -> str:
        """Give an open file or folder, which was made with at most the owner's bits, its group and mode.

        The umask has no say. A folder that got setgid from the one above keeps it. The group comes first, and without
        it the mode stays, so that no other group ever gets access. Returns a note where the file system does not do it.
        """
        found = os.fstat(descriptor)
        folder = stat.S_ISDIR(found.st_mode)
        mode = self.folder_mode | found.st_mode & stat.S_ISGID if folder else self.file_mode
        change_group = self.gid is not None and found.st_gid != self.gid
        if not change_group and stat.S_IMODE(found.st_mode) == mode:
            return ""
        try:
            if change_group and self.gid is not None:
                os.fchown(descriptor, -1, self.gid)
            os.fchmod(descriptor, mode)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return _NOT_KEPT
        return "" if stat.S_IMODE(os.fstat(descriptor).st_mode) == mode else _NOT_KEPT

    def shares(self, found: os.stat_result) -> bool:
        """Whether the policy shares the tier with the owner of what is there."""
        return bool(self.mode & 0o004 or (self.mode & 0o040 and self._is_ours(found.st_gid)))

    def writers(self, found: os.stat_result) -> str:
        """Who can write to a folder and is not trusted, as text; empty if nobody."""
        mode = found.st_mode
        if mode & stat.S_ISVTX:
            return ""
        if mode & 0o002 and not self.mode & 0o002:
            return "every user"
        shared = self.mode & 0o020 and self._is_ours(found.st_gid)
        if mode & 0o020 and not (shared or self._is_trusted(found.st_gid) or self._is_owners_own(found)):
            return f"the group {group_name(found.st_gid)}"
        return ""

    def _is_ours(self, gid: int) -> bool:
        return self.gid in (None, gid)

    def _is_trusted(self, gid: int) -> bool:
        return gid in (ROOT, self.gid) or is_private_group(gid)

    def _is_owners_own(self, found: os.stat_result) -> bool:
        # The private group of a user whom root was led to has that user's number, and no name in a container.
        return os.geteuid() == ROOT and found.st_gid == found.st_uid


PRIVATE = Permissions()
"""Only this user reads and writes."""


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


def check_path(path: Path, permissions: Permissions = PRIVATE, tier: str = "") -> Trust:
    """Check that no user whom the policy does not trust can change what a path leads to.

    The path need not exist yet: then the folders above it are checked.

    Raises:
        AccessDenied: such a user owns, or can write to, a folder or a link on the way; the message says how to mend it.
        OSError: it cannot be looked at.
    """
    way = list(passed(path))
    last = way[-1]
    whole = os.path.lexists(path)
    owners = _trusted_owners()
    if whole and permissions.shares(last.status):
        owners |= {last.status.st_uid}
    notes: list[str] = []
    above = way[0].status
    for one in way:
        if one.status.st_uid not in owners and _root_was_led_here(one.status, above):
            owners |= {one.status.st_uid}
            notes.append(f"{one.path} belongs to {user_name(one.status.st_uid)}, who can change what root reads there")
        check_owner(one.path, one.status, owners, tier)
        if not one.is_link:
            notes += check_writers(one.path, one.status, permissions, tier)
            above = one.status
    if whole and stat.S_ISDIR(last.status.st_mode):
        notes += _wider(last, permissions)
    return Trust(owners, tuple(notes))


def check_owner(path: Path, found: os.stat_result, owners: frozenset[int], tier: str = "") -> None:
    """Check that something belongs to one of the owners.

    Raises:
        AccessDenied
    """
    if found.st_uid not in owners:
        what = "a link" if stat.S_ISLNK(found.st_mode) else "a folder" if stat.S_ISDIR(found.st_mode) else "a file"
        raise AccessDenied(
            f"{_where(tier)}{path} is {what} of {user_name(found.st_uid)}, who could lead this user to other data; use "
            "another path, or, to share a tier with a group, write 'mode' and 'group' as its owner does",
            tier=tier,
        )


def check_writers(path: Path, found: os.stat_result, permissions: Permissions, tier: str = "") -> tuple[str, ...]:
    """Check that no user whom the policy does not trust can write to a folder.

    Returns a note, in place of the error, where the file system only makes the modes up.

    Raises:
        AccessDenied
    """
    who = permissions.writers(found) if stat.S_ISDIR(found.st_mode) else ""
    if who and not keeps_modes(path):
        return (f"{path} seems open to {who}, but modes are made up here: mount options say who has access",)
    if who:
        mend = "chmod o-w or chmod +t it" if who == "every user" else "chmod g-w it"
        policy = f"'mode: \"{'0666' if who == 'every user' else '0660'}\"'"
        if who != "every user":
            policy = f"'group: {group_name(found.st_gid)}' if you trust its members, or {policy}"
        raise AccessDenied(
            f"{_where(tier)}{who} can write to {path} (mode {stat.S_IMODE(found.st_mode):04o}), and put other data in "
            f"the place of this user's; {mend}, or write {policy} in the tier's policy",
            tier=tier,
        )
    return ()


def _wider(one: Passed, permissions: Permissions) -> Iterator[str]:
    mode = stat.S_IMODE(one.status.st_mode) & 0o777
    if mode & ~permissions.folder_mode & 0o077 and keeps_modes(one.path):
        yield (
            f"{one.path} has the mode {mode:04o}: other users can see more there than the policy's mode "
            f"{permissions.mode:04o} says, by which what is new is made; chmod -R what is there"
        )


def check_private_file(path: Path) -> None:
    """Check that a file with a key is private, and that no other user can put another file in its place.

    Raises:
        AccessDenied: it is not there, is not private (`tierstate.tiers.private_file`), or another user can change what
            its path leads to; the message says how to mend it.
        OSError: a folder on the way cannot be looked at.
    """
    path = path.absolute()
    with open_private_file(path, "a key", AccessDenied):
        check_path(path)


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


def _trusted_owners() -> frozenset[int]:
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


def _where(tier: str) -> str:
    return f"{tier}: " if tier else ""
