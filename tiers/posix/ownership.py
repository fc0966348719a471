"""Owners and modes of files: which ones a directory tier gives to what it makes, and whose folders it trusts.

Whose they are is the rule of `tierstate.tiers.trusted_path`, which a policy can extend to other users by ``mode`` and
``group``. POSIX ACLs need no look of their own: the group bits of a mode are the most that an ACL can give.
"""

from __future__ import annotations

import errno
import grp
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

from tierstate.manifest.errors import AccessDenied
from tierstate.tiers.trusted_path import (
    EVERY_USER,
    ROOT,
    Passed,
    group_name,
    how_to_close,
    passed,
    trusted_owners,
    user_name,
    with_owners,
    writers,
)

from .mounts import keeps_modes

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
        except (KeyError, ValueError):  # a character that no name has
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
            "title": "mode of files",
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
            "title": "name or number",
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
        shared = self.mode & 0o020 and self._is_ours(found.st_gid)
        return writers(found, found.st_gid if shared else self.gid, everyone=bool(self.mode & 0o002))

    def _is_ours(self, gid: int) -> bool:
        return self.gid in (None, gid)


PRIVATE = Permissions()
"""Only this user reads and writes."""


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
    owners = trusted_owners()
    if whole and permissions.shares(last.status):
        owners |= {last.status.st_uid}
    notes: list[str] = []
    for one, trusted in with_owners(way, owners):
        if trusted != owners:
            owners = trusted
            notes.append(f"{one.path} belongs to {user_name(one.status.st_uid)}, who can change what root reads there")
        check_owner(one.path, one.status, owners, tier)
        if not one.is_link:
            notes += check_writers(one.path, one.status, permissions, tier)
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
        policy = f"'mode: \"{'0666' if who == EVERY_USER else '0660'}\"'"
        if who != EVERY_USER:
            policy = f"'group: {group_name(found.st_gid)}' if you trust its members, or {policy}"
        raise AccessDenied(
            f"{_where(tier)}{who} can write to {path} (mode {stat.S_IMODE(found.st_mode):04o}), and put other data in "
            f"the place of this user's; {how_to_close(who)}, or write {policy} in the tier's policy",
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


def _where(tier: str) -> str:
    return f"{tier}: " if tier else ""
