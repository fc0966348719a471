"""Directory tiers: each object is one file below a folder, created atomically and once (`Directory`, and `Nvme` on it).

`FileWriter` works in these steps: write a temporary file, fdatasync it, ``link(2)`` it to the object's name (which
fails if the name exists; `tierstate.tiers.posix.naming` has what is done where there are no hard links), fsync the
folder, and unlink the temporary name.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, NotFound, TierError
from tierstate.tiers.base import (
    DEFAULT_PART_SIZE,
    AtomicWriter,
    KeepingArena,
    Place,
    Range,
    Release,
    Tier,
    Traits,
    check_key,
    check_ranges,
    is_key,
)
from tierstate.tiers.capacity import CapacityCounter
from tierstate.tiers.clock import RemoteClock
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.units import Seconds, Size
from tierstate.tiers.wrappers.deadline import HANG_DEADLINE, Deadline

from .direct import AppendStream, DirectIo, IoMode
from .files import (
    TEMP,
    BufferedFile,
    create_temp,
    exists,
    file_size,
    file_status,
    is_at,
    is_folder,
    object_keys,
    open_file,
    os_errors_translated,
    remove_leftover,
    sync_folder,
    translate_os_error,
    walk,
)
from .letter_case import LetterCase
from .mounts import place_of
from .naming import Naming, give_name
from .ownership import PRIVATE, FileMode, Group, Permissions, Trust, check_owner, check_path, check_writers

MAX_NAME = 255
"""Longest file name in bytes that file systems allow."""


SCRATCH_PREFIX = "scratch/"
"""Prefix of keys for short-lived test objects; their empty folders are removed."""


_IGNORES_CASE = "names do not tell upper from lower case here: a key that differs only so from another one is refused"


_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FolderClock(RemoteClock):
    """The clock of a file system, read from the modification time of a new file. None if no file can be created.

    Args:
        folder: a folder that exists when the clock is read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(self._touch)
        self._folder = folder

    def _touch(self) -> float | None:
        try:
            with closing(create_temp(self._folder)) as made:
                os.unlink(made.path)
                return made.status().st_mtime
        except OSError as error:
            if error.errno in _FULL:  # garbage collection needs the clock when the disk is full: this needs no space
                os.utime(self._folder)
                return os.stat(self._folder).st_mtime
            if error.errno in _READ_ONLY:
                return None
            raise


class Folder(Protocol):
    """The part of a directory tier that its writers use."""

    name: str
    leftover_age: ClassVar[float]
    naming: Naming
    permissions: Permissions

    @property
    def gauge(self) -> CapacityCounter: ...

    def take_back(self, path: Path, made: os.stat_result) -> None: ...


class FileWriter(AtomicWriter):
    """Writes a temporary file, and gives it the object's name when closed."""

    def __init__(self, tier: Folder, key: str, path: Path, file: BufferedFile, stream: AppendStream) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key, self._path, self._file, self._stream = tier, key, path, file, stream
        self._length = 0

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        nbytes = buffer.numel()
        self._tier.gauge.take(nbytes, self._tier.name, self._key)
        self._length += nbytes
        with os_errors_translated("write", self._tier.name, self._key, self._file.path):
            return self._stream.append(buffer, release)

    def _publish(self) -> None:
        with os_errors_translated("write", self._tier.name, self._key, self._path):
            self._stream.finish()
            self._file.sync()
            made = self._file.status()
            try:
                self._name()
                sync_folder(self._path.parent)
            except BaseException:
                self._tier.take_back(self._path, made)
                raise
        self._tier.gauge.made(self._length)
        self._clear()

    def _name(self) -> None:
        try:
            self._tier.naming = give_name(self._file, self._path, self._tier.leftover_age, self._tier.permissions)
        except OSError as error:
            # On a network file system the answer may be lost, and the repeated call then finds what the first one did.
            # If the name was taken all the same and is free again, whoever took it has undone that since.
            if is_at(self._file, self._path):
                return
            doing = "create" if isinstance(error, FileExistsError | FileNotFoundError) else "write"
            raise translate_os_error(error, doing, self._tier.name, self._key, self._path) from error

    def _discard(self) -> None:
        self._stream.give_up()
        self._tier.gauge.give_up(self._length)
        self._clear()

    def _clear(self) -> None:
        # A file that cannot be removed now is removed as a leftover when the tier is opened next.
        with suppress(OSError):
            os.unlink(self._file.path)
        self._file.close()


class Directory(Tier):
    """Files under a folder, in a way that is correct on every POSIX file system, also between hosts.

    Bytes go to a temporary file in the object's own folder. It is synced, then linked to its name (``link(2)`` fails if
    the name exists, so one writer wins), then the folder is synced, then the temporary name is removed. Where there are
    no hard links it is renamed (`tierstate.tiers.posix.naming`). Temporary files are locked while their writer runs;
    leftovers of dead writers are removed before the first write.

    Where names do not tell upper from lower case, a key that differs only so from an existing one is refused.

    A folder that does not exist is created by the first write; for readers it is empty. Since an object is a file, a
    key cannot also be a folder of another key (``a`` and ``a/b``): creating the second one raises `AlreadyExists`.

    Files and folders get the mode of ``permissions``, whatever the umask is. A folder that a user whom the policy does
    not trust owns, or can write to, is refused (`tierstate.tiers.posix.ownership`).

    Args:
        path: the folder; a relative one is resolved against the present working directory.
        capacity: total bytes of the objects. What other processes write and delete meanwhile is counted when it
            seems to be used up.
        io: how long objects are moved: by direct I/O with io_uring or threads, or through the page cache.
        part: stripe size in bytes, a multiple of a page, at which long transfers are split; 0 for none.
        permissions: mode and group of files and folders.
    """

    persistent: ClassVar[bool] = True
    shared: ClassVar[Literal["process", "host", "site"]] = "host"
    leftover_age: ClassVar[float] = 0.0
    """Seconds for which a temporary file is left alone even if its lock is free."""
    file_writer: ClassVar[type[FileWriter]] = FileWriter
    """The class of its writers."""

    def __init__(
        self,
        path: Path,
        capacity: int | None = None,
        io: IoMode = "auto",
        *,
        part: int = 0,
        permissions: Permissions = PRIVATE,
    ) -> None:
        self.permissions = permissions
        self._trust: Trust | None = None
        self._io = DirectIo(io)
        self._part = part
        self.path = Path(path).expanduser().absolute()
        self.gauge = CapacityCounter(capacity, self._count)
        self._notes: tuple[str, ...] = ()
        self._ready = False
        self._readying = threading.Lock()
        self._synced: set[Path] = set()
        self._doubtful: dict[Path, os.stat_result] = {}
        self._clock = FolderClock(self.path)
        self._case = LetterCase(self.path)
        self.naming = Naming.LINK
        """What gave the newest object its name."""

    @property
    def traits(self) -> Traits:
        return Traits(
            persistent=True,
            shared=self.shared,
            failure_domain=self._failure_domain(),
            alignment=PAGE,
            memory_alignment=self._io.memory_alignment,
            part_size=self._part or DEFAULT_PART_SIZE,
            capacity=self.gauge.capacity,
            conditional_create=True,
            io=self._io.note,
            notes=self._notes + tuple(filter(None, (self.naming.value, _IGNORES_CASE if self._case.ignored else ""))),
        )

    def _failure_domain(self) -> str:
        return f"host:{socket.gethostname()}"

    def file(self, key: str) -> Path:
        """The path of an object's file.

        Raises:
            ValueError: the key is not valid, or a name in it is too long for a file system.
        """
        for name in check_key(key).split("/"):
            if len(name) > MAX_NAME:
                raise ValueError(f"{key[:80]!r} is not a key for files: a name may have {MAX_NAME} characters at most")
        return self.path / key

    def _check_folders(self, path: Path) -> None:
        """Check that no folder between the root and ``path`` is a symbolic link, which could lead out of the tier, and
        that no user who is not trusted owns one or can write to it."""
        trust = self._check_path()
        place = self.path
        for name in path.relative_to(self.path).parts[:-1]:
            place /= name
            with os_errors_translated("look at", self.name, "", place):
                try:
                    found = os.lstat(place)
                except (FileNotFoundError, NotADirectoryError):
                    return
            if stat.S_ISLNK(found.st_mode):
                raise AccessDenied(
                    f"{self.name}: {place} is a link; the folders of a tier must be real", tier=self.name
                )
            self._check_owner(place, found, trust)
            self._note(*check_writers(place, found, self.permissions, self.name))

    def _check_path(self) -> Trust:
        """Check, until the tier's folder is there, that only trusted users can change what its path leads to."""
        if self._trust is not None:
            return self._trust
        with os_errors_translated("look at", self.name, "", self.path):
            there = is_folder(self.path)
            trust = check_path(self.path, self.permissions, self.name)
        self._note(*trust.notes)
        if there:
            self._trust = trust
        return trust

    def _check_owner(self, path: Path, found: os.stat_result, trust: Trust) -> None:
        if not self.permissions.shares(found):
            check_owner(path, found, trust.owners, self.name)

    def _note(self, *texts: str) -> None:
        self._notes += tuple(text for text in texts if text and text not in self._notes)

    def _existing(self, key: str) -> Path:
        """The path of an object's file, if there is one, for a reader."""
        path = self.file(key)
        self._check_folders(path)
        with os_errors_translated("read", self.name, key, path):
            self._remove_doubtful(path)
            if (other := self._case.spelled_otherwise(path)) is not None:
                raise NotFound(f"{self.name}: {key}: there is {other}, spelled otherwise", tier=self.name, key=key)
        return path

    def _check_spelling(self, key: str, path: Path) -> None:
        """Check that no file or folder is there whose name differs from the key's only in case."""
        other = self._case.spelled_otherwise(path)
        if other is None and self._case.ignored and any(name.endswith(".") for name in key.split("/")):
            other = path  # FAT would drop the dot
        if other is not None:
            raise TierError(
                f"{self.name}: {key} cannot be told from {other}: this file system ignores case, and dots at the end "
                "of a name; use another name for the run or tag",
                tier=self.name,
                key=key,
            )

    def _check_root(self) -> None:
        """Raise a TierError if the tier's folder, or one above it, is something else: then nothing can be said about
        what the tier has."""
        found = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
        if not is_folder(found):
            raise TierError(
                f"{self.name}: {found} is not a folder; give a folder, or a path where one can be made",
                tier=self.name,
            )

    # Reading

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        path = self._existing(key)
        with os_errors_translated("read", self.name, key, path), closing(open_file(path)) as file:
            status = file.status()
            self._check_owner(path, status, self._check_path())
            check_ranges(f"{self.name}: {key}", status.st_size, ranges)
            self._io.read(path, file, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return iter(())
        top = self.path / folder
        self._check_folders(top / "any")
        with os_errors_translated("list", self.name, prefix, top), suppress(NotADirectoryError):
            self._check_root()
            if folder and self._case.spelled_otherwise(top) is not None:
                return iter(())
            return iter(object_keys(self.path, prefix))
        return iter(())

    def size(self, key: str) -> int:
        path = self._existing(key)
        with os_errors_translated("read", self.name, key, path):
            return file_size(path)

    def age(self, key: str) -> float | None:
        path = self._existing(key)
        with os_errors_translated("look at", self.name, key, path):
            written = file_status(path).st_mtime
            now = self._clock.now()
        return None if now is None else max(0.0, now - written)

    def room(self) -> int | None:
        with os_errors_translated("look at", self.name, "", self.path):
            disk = os.statvfs(next(path for path in (self.path, *self.path.parents) if exists(path)))
        free, left = disk.f_bavail * disk.f_frsize, self.gauge.left
        return free if left is None else min(free, left)

    def place(self) -> Place:
        with os_errors_translated("look at", self.name, "", self.path):
            return place_of(self.path)

    def close(self) -> None:
        self._io.close()

    # Writing

    def put(self, key: str, data: Buffer) -> None:
        with self.writer(key, data.numel()) as writer:
            writer.append(data)

    def writer(self, key: str, size_hint: int | None = None) -> FileWriter:
        path = self.file(key)
        self._prepare()
        self._check_folders(path)
        with os_errors_translated("write", self.name, key, path):
            self._check_spelling(key, path)
            self._remove_doubtful(path)
            if os.path.lexists(path):
                raise AlreadyExists(f"{self.name}: {key}: {path} exists, nothing was changed", tier=self.name, key=key)
            try:
                self._make_folder(path.parent)
                self._check_spelling(key, path)  # again: another process may have made the folder meanwhile
                file = self._create_temp(path.parent)
            except FileNotFoundError:
                # Another process removed a folder that this one had created or seen: create it again.
                self._synced.clear()
                self._make_folder(path.parent)
                file = self._create_temp(path.parent)
        stream = AppendStream(file, lambda: self._io.engine(file.descriptor), self._part)
        return self.file_writer(self, key, path, file, stream)

    def take_back(self, path: Path, made: os.stat_result) -> None:
        """Remove a name that a file may have got while its folder could not be synced: it is visible, and a crash could
        lose it. If that fails too, it is done before this tier next reads or writes the object, since who reads an
        object back after an error takes it for durable.

        Args:
            made: of the file, so that no other one is removed.
        """
        self._doubtful[path] = made
        with suppress(OSError):
            self._remove_doubtful(path)

    def _remove_doubtful(self, path: Path) -> None:
        if (made := self._doubtful.get(path)) is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), made):
                os.unlink(path)
        self._doubtful.pop(path, None)

    def _create_temp(self, folder: Path) -> BufferedFile:
        file = create_temp(folder)
        try:
            self._note(self.permissions.apply(file.descriptor))
        except BaseException:
            with suppress(OSError):
                os.unlink(file.path)
            file.close()
            raise
        return file

    def delete(self, key: str) -> None:
        self.discard([key])

    def discard(self, keys: Iterable[str]) -> None:
        paths = {key: self.file(key) for key in keys}
        folders: set[Path] = set()
        try:
            for key, path in paths.items():
                self._unlink(key, path)
                folders.add(path.parent)
        finally:
            # A deleted object must not come back after a crash, when objects that it refers to are already gone. So
            # the folder is synced also if the object was gone: an earlier try may have removed it and failed to sync.
            for folder in folders:
                gone = suppress(FileNotFoundError, NotADirectoryError)
                with os_errors_translated("delete", self.name, "", folder), gone:
                    sync_folder(folder)
        for key, path in paths.items():
            if key.startswith(SCRATCH_PREFIX):
                self._tidy(path.parent)

    def _unlink(self, key: str, path: Path) -> None:
        """Remove an object's file, if there is one."""
        self._check_folders(path)
        with os_errors_translated("delete", self.name, key, path), suppress(FileNotFoundError):
            if self._case.spelled_otherwise(path) is not None:
                return
            try:
                status = os.lstat(path)
                if not stat.S_ISDIR(status.st_mode):
                    os.unlink(path)
                    self.gauge.give_back(status.st_size)
            except NotADirectoryError:
                self._check_root()

    def _tidy(self, folder: Path) -> None:
        """Remove empty folders. A writer that needs one creates it again."""
        with suppress(OSError):  # not empty, or already removed
            while folder != self.path:
                os.rmdir(folder)
                folder = folder.parent

    def _prepare(self) -> None:
        """Before the first write: create the root, remove leftovers of dead writers, and count the bytes in use."""
        with self._readying:
            if self._ready:
                return
            with os_errors_translated("write", self.name, "", self.path):
                self._check_root()
                self._check_path()
                self._make_root()
                self._sweep()
            self.gauge.look()
            self._ready = True

    def _count(self) -> int:
        """Bytes of all objects. What is being written is counted by its writer."""
        total = 0
        with os_errors_translated("look at", self.name, "", self.path):
            for entry in walk(self.path):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    total += 0 if entry.name.startswith(TEMP) else entry.stat(follow_symlinks=False).st_size
        return total

    def _sweep(self) -> None:
        # Ages are measured with the file system's clock, since the clocks of hosts differ.
        with closing(create_temp(self.path)) as clock:
            now = clock.status().st_mtime
            self._case.look(clock.path)
            os.unlink(clock.path)
        for entry in walk(self.path):
            if entry.name.startswith(TEMP):
                try:
                    remove_leftover(Path(entry.path), now, self.leftover_age)
                except PermissionError as error:
                    self._note(f"a dead writer's file could not be removed: {error}")

    def _make_root(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not exists(path)]
        for path in reversed(missing):
            self._make_and_sync(path)
        self._synced.add(self.path)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder under the root, with its parents. Each is synced once, also if another process created it."""
        if folder in self._synced:
            return
        if folder == self.path:
            self._make_root()
            return
        self._make_folder(folder.parent)
        self._make_and_sync(folder)
        self._synced.add(folder)

    def _make_and_sync(self, folder: Path) -> None:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            self._met(folder)
        else:
            self._give_permissions(folder)
            self._made(folder)
        sync_folder(folder.parent)

    def _give_permissions(self, folder: Path) -> None:
        # By a descriptor, since another user of a shared tier could have put a link in its place meanwhile.
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:  # the umask took the owner's own bits
            os.chmod(folder, 0o700)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._note(self.permissions.apply(descriptor))
        finally:
            os.close(descriptor)

    def _made(self, folder: Path) -> None:
        """Called for each new folder, before anything is in it."""

    def _met(self, folder: Path) -> None:
        """Called for each existing folder, before this tier first writes into it."""


class Nvme(Deadline):
    """A folder on a local disk: it survives the process, and is lost with the host.

    See `Directory` for what it does, and `Deadline` for what happens when the disk hangs.

    Args:
        path: the folder, as in ``/local/ckpt``; the first save makes it.
        capacity: total bytes of its objects, as in ``1TiB``; without it, no limit but the disk. What other processes
            write is counted when it seems to be used up, so ranks that fill it at the same time can each add the room
            that there was.
        io: what moves objects of 1 MiB and more: ``uring`` (io_uring, past the page cache), ``threads`` (past it, too)
            or ``buffered`` (through it). ``auto`` takes the first of them that works there.
        mode: of files, as chmod takes it, whatever the umask is, as in ``"0640"``; folders have ``x`` as well wherever
            it has ``r``.
        group: of files and folders: a name or number, as in ``physics``; this user must be in it. Without it, the one
            that the system gives.
        deadline: a call from which nothing has come for so long is given up, and the tier left out until it is back;
            as in ``5min``.

    Raises:
        ValueError: a mode that cannot be meant, or a group that this user is not in.
    """

    def __init__(
        self,
        *,
        path: Path,
        capacity: Size | None = None,
        io: IoMode = "auto",
        mode: FileMode = PRIVATE.mode,
        group: Group | None = None,
        deadline: Seconds = HANG_DEADLINE,
        arena: KeepingArena | None = None,
    ) -> None:
        inner = Directory(path, capacity, io, permissions=Permissions.of(mode, group))
        super().__init__(inner, deadline, arena)
