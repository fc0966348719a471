"""The Lustre tier: files on a parallel file system, striped over storage targets as the policy says."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import ClassVar, Literal

from tierstate.tiers.base import KeepingArena
from tierstate.tiers.units import Seconds, Size, format_size
from tierstate.tiers.wrappers.deadline import HANG_DEADLINE, Deadline

from .direct import IoMode
from .directory import Directory
from .mounts import filesystem_type
from .ownership import PRIVATE, FileMode, Group, Permissions

LUSTRE = 0x0BD00BD0
"""``f_type`` of a Lustre file system in statfs(2)."""


STRIPE_GRAIN = 64 * 1024
"""Stripe sizes are multiples of this many bytes."""


ALL_STRIPES = -1
"""Stripe count that means: all storage targets."""


_XATTR = "lustre.lov"


_MAGIC, _MAGIC_POOL = 0x0BD10BD0, 0x0BD30BD0


_MAGIC_COMPOSITE = 0x0BD60BD0


_HEAD = struct.Struct("<IIQQIHH")


_ANY = 0xFFFF


_MAX_POOL = 15


# Not allowed, not supported, or not valid (a pool that does not exist): saves work without striping.
_REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODATA})


class Striped(Directory):
    """A folder on Lustre. The tier sets the policy's striping on folders that it creates; files inherit it. Existing
    folders keep theirs. The striping is read back, and differences are reported in ``traits.notes``. On other file
    systems everything works the same, without striping.

    Args:
        path, capacity, io, permissions: as for `Directory`.
        stripe_count, stripe_size, pool: as for `Lustre`; 0 and an empty name mean the site's default.

    Raises:
        ValueError: a stripe count, size or pool that no Lustre takes.
    """

    shared: ClassVar[Literal["process", "host", "site"]] = "site"
    # A mount with 'localflock' hides the locks of other hosts: a free lock does not prove that the writer is dead.
    leftover_age: ClassVar[float] = 3600.0

    def __init__(
        self,
        path: Path,
        capacity: int | None,
        io: IoMode,
        *,
        stripe_count: int = 0,
        stripe_size: int = 0,
        pool: str = "",
        permissions: Permissions = PRIVATE,
    ) -> None:
        super().__init__(path, capacity, io, part=stripe_size, permissions=permissions)
        wished = bool(stripe_count or stripe_size or pool)
        self._layout = pack_layout(stripe_count, stripe_size, pool) if wished else b""

    def _failure_domain(self) -> str:
        return f"site:{self.path}"

    def _made(self, folder: Path) -> None:
        if not self._layout:
            return
        kind = filesystem_type(folder)
        if kind != LUSTRE:
            self._note(f"{self.path} is not on a Lustre file system (type {kind:#x}): striping left alone")
            return
        try:
            os.setxattr(folder, _XATTR, self._layout)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._note(f"{folder}: striping could not be set ({error.strerror}): the site's default holds")
            return
        self._compare(folder)

    def _met(self, folder: Path) -> None:
        # Created earlier, perhaps with another policy. The striping of the root and above is the site's choice.
        if self._layout and folder != self.path and filesystem_type(folder) == LUSTRE:
            self._compare(folder)

    def _compare(self, folder: Path) -> None:
        """Read the striping back: the file system may ignore it without an error."""
        try:
            found = os.getxattr(folder, _XATTR)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._note(f"{folder}: striping could not be read back ({error.strerror}): it cannot be checked")
            return
        if difference := compare_layouts(self._layout, found):
            self._note(f"{folder}: {difference}")


class Lustre(Deadline):
    """A folder on Lustre or another shared file system, seen by every host of the site, that may hang.

    See `Striped` for the striping, and `Deadline` for what happens when servers die. The bytes of the layout were
    compared with a real Lustre; the whole class was not tested on one yet.

    Args:
        path: the folder, as in ``/lustre/proj/ckpt``; the first save makes it.
        capacity: total bytes of its objects, as in ``50TiB``; without it, no limit but the quota. What other processes
            write is counted as for `nvme`.
        stripe_count: storage targets per file, as in ``8``; 0 for the site's default, -1 for all of them.
        stripe_size: length of one stripe, a multiple of 64 KiB, as in ``16MiB``; without it, the site's default.
        pool: the pool of targets to use, as in ``flash``; without it, the site's default.
        io: what moves objects of 1 MiB and more: ``uring`` (io_uring, past the page cache), ``threads`` (past it, too)
            or ``buffered`` (through it). ``auto`` takes the first of them that works there.
        mode: of files, as chmod takes it, whatever the umask is, as in ``"0640"``; folders have ``x`` as well wherever
            it has ``r``.
        group: of files and folders: a name or number, as in ``physics``; this user must be in it. Without it, the one
            that the system gives.
        deadline: a call from which nothing has come for so long, as when a server is dead, is given up, and the tier
            left out until it is back; as in ``5min``.

    Raises:
        ValueError: a stripe count, size or pool that no Lustre takes, or a mode or group that cannot be.
    """

    def __init__(
        self,
        *,
        path: Path,
        capacity: Size | None = None,
        stripe_count: int = 0,
        stripe_size: Size | None = None,
        pool: str | None = None,
        io: IoMode = "auto",
        mode: FileMode = PRIVATE.mode,
        group: Group | None = None,
        deadline: Seconds = HANG_DEADLINE,
        arena: KeepingArena | None = None,
    ) -> None:
        inner = Striped(
            path,
            capacity,
            io,
            stripe_count=stripe_count,
            stripe_size=stripe_size or 0,
            pool=pool or "",
            permissions=Permissions.of(mode, group),
        )
        super().__init__(inner, deadline, arena)


def pack_layout(stripe_count: int, stripe_size: int, pool: str = "") -> bytes:
    """The value of the attribute ``lustre.lov`` that gives a new file or a folder its striping.

    It is Lustre's ``lov_user_md``, version 1, or version 3 if a pool is named: magic, pattern RAID 0, object id and
    group (unused here), stripe size in bytes, stripe count, first target (any), and the pool's name in 16 bytes.

    Raises:
        ValueError: values that Lustre would reject or misread.
    """
    if not (stripe_count == ALL_STRIPES or 0 <= stripe_count < _ANY):
        raise ValueError(f"stripe_count: {stripe_count} is not a count; write 1 or more, 0 for the default, -1 for all")
    if stripe_size % STRIPE_GRAIN or not 0 <= stripe_size < 1 << 32:
        raise ValueError(
            f"stripe_size: {format_size(stripe_size)} is not a multiple of 64KiB below 4GiB; write one, as in '16MiB'"
        )
    name = pool.encode()
    if len(name) > _MAX_POOL or b"\0" in name:
        raise ValueError(f"pool: {pool!r} is not a pool's name; it has {_MAX_POOL} characters at most")
    head = _HEAD.pack(_MAGIC_POOL if pool else _MAGIC, 1, 0, 0, stripe_size, stripe_count & 0xFFFF, _ANY)
    return head + name.ljust(16, b"\0") if pool else head


def compare_layouts(wished: bytes, found: bytes) -> str:
    """A message about the differences between the striping that was set and the one read back; empty if none.

    A wished value of 0 or no pool matches anything. A layout that cannot be read counts as different.
    """
    magic = int.from_bytes(found[:4], "little")
    if len(found) >= 4 and magic not in (_MAGIC, _MAGIC_POOL):
        kind = "is composite" if magic == _MAGIC_COMPOSITE else f"has the magic number {magic:#010x}"
        return f"the striping that was read back {kind}: it cannot be checked"
    if len(found) < (length := len(wished) if magic == _MAGIC_POOL else _HEAD.size):
        return f"the striping that was read back has {len(found)} bytes, not {length}: it cannot be checked"
    (*_, size, count, _first), (*_, found_size, found_count, _) = _HEAD.unpack_from(wished), _HEAD.unpack_from(found)
    pool, found_pool = _pool(wished), _pool(found)
    texts = []
    if pool and pool != found_pool:
        texts.append(f"pool is {found_pool or 'none'}, not {pool}")
    if size and size != found_size:
        texts.append(f"stripe size is {format_size(found_size)}, not {format_size(size)}")
    if count and count != found_count:
        texts.append(f"stripe count is {_count(found_count)}, not {_count(count)}")
    return " and ".join(texts)


def _pool(layout: bytes) -> str:
    """The pool that a layout names; empty if none."""
    name = layout[_HEAD.size : _HEAD.size + 16] if layout[:4] == _MAGIC_POOL.to_bytes(4, "little") else b""
    return name.partition(b"\0")[0].decode(errors="replace")


def _count(count: int) -> str:
    return "all" if count == _ANY else str(count)
