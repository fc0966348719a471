"""The directory tier: files under one folder, each created whole and once."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, Literal

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, TierError

from .base import PART, Range, Tier, Traits, check_key, is_key
from .clocks import FolderClock
from .direct import DirectIo, Io
from .file_writer import FileWriter
from .files import TEMP, create_temp, file_size, file_status, open_file, remove_leftover, sync_folder, walk
from .gauge import Gauge
from .pages import PAGE
from .posix import explained
from .ranges import check_ranges
from .stream import Stream

MAX_NAME = 255
"""Bytes of one name that file systems allow."""

SCRATCH = "scratch/"
"""How the keys begin of what is only tried; of these no folder stays."""


class Directory(Tier):
    """Files under a folder, by a recipe that holds on every POSIX file system, also between hosts.

    Bytes go to a temporary file in the object's own folder; it is synced, then linked to its name (``link(2)`` has
    one winner, and fails where the name is taken), then the folder is synced, then the temporary name removed.
    Temporary files are locked while their writer lives; what dead writers left is removed before the first write.

    A folder that does not exist is made by the first write, and holds nothing for readers. Since an object is a file,
    a key can not be the beginning of another up to a ``/``: the second one is refused with `AlreadyExists`.

    Args:
        path: the folder; a relative one is taken from where the process is now.
        capacity: bytes that the objects may have together. What others write meanwhile is not noticed.
        io: how long objects are moved: past the page cache by io_uring or by threads, or through it.
        part: bytes at whose multiples long transfers are cut, a multiple of a page; 0 where it does not matter.
    """

    persistent: ClassVar[bool] = True
    shared: ClassVar[Literal["process", "host", "site"]] = "host"
    leftover_age: ClassVar[float] = 0.0
    """Seconds for which a temporary file is left alone even if its lock is free."""
    file_writer: ClassVar[type[FileWriter]] = FileWriter
    """What writes its files."""

    def __init__(self, path: Path, capacity: int | None = None, io: Io = "auto", *, part: int = 0) -> None:
        self._io = DirectIo(io)
        self._part = part
        self.path = Path(path).expanduser().absolute()
        self.gauge = Gauge(capacity)
        self._notes: tuple[str, ...] = ()
        self._ready = False
        self._readying = threading.Lock()
        self._synced: set[Path] = set()
        self._clock = FolderClock(self.path)

    @property
    def traits(self) -> Traits:
        return Traits(
            persistent=True,
            shared=self.shared,
            failure_domain=self._failure_domain(),
            alignment=PAGE,
            memory_alignment=self._io.memory_alignment,
            part_size=self._part or PART,
            capacity=self.gauge.capacity,
            conditional_create=True,
            io=self._io.note,
            notes=self._notes,
        )

    def _failure_domain(self) -> str:
        return f"host:{socket.gethostname()}"

    def file(self, key: str) -> Path:
        """The path of an object's file.

        Raises:
            ValueError: the key is not a key, or a name in it is too long for a file system.
        """
        for name in check_key(key).split("/"):
            if len(name) > MAX_NAME:
                raise ValueError(f"{key[:80]!r} is not a key for files: a name may have {MAX_NAME} characters at most")
        return self.path / key

    def _check_folders(self, path: Path) -> None:
        """Nothing, unless a folder between the root and ``path`` is a link, which could lead anywhere."""
        for folder in path.relative_to(self.path).parents:
            if folder.parts and os.path.islink(self.path / folder):
                raise AccessDenied(
                    f"{self.name}: {self.path / folder} is a link; the folders of a tier must be real", tier=self.name
                )

    def _check_root(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise TierError(
                f"{self.name}: {self.path} is not a folder; give a folder, or a path where one can be made",
                tier=self.name,
            )

    # Reading

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        path = self.file(key)
        self._check_folders(path)
        with explained("read", self.name, key, path), closing(open_file(path)) as file:
            check_ranges(f"{self.name}: {key}", file.status().st_size, ranges)
            self._io.read(path, file, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        folder, _, stem = prefix.rpartition("/")
        if folder and not is_key(folder):
            return iter(())
        top = self.path / folder
        self._check_folders(top / "any")
        with explained("list", self.name, prefix, top), suppress(NotADirectoryError):
            self._check_root()
            root = os.path.join(self.path, "")
            keys = (entry.path.removeprefix(root) for entry in walk(top, stem))
            return iter(sorted(key for key in keys if key.startswith(prefix) and is_key(key)))
        return iter(())

    def size(self, key: str) -> int:
        path = self.file(key)
        self._check_folders(path)
        with explained("read", self.name, key, path):
            return file_size(path)

    def age(self, key: str) -> float | None:
        path = self.file(key)
        self._check_folders(path)
        with explained("look at", self.name, key, path):
            written = file_status(path).st_mtime
            now = self._clock.now()
        return None if now is None else max(0.0, now - written)

    def room(self) -> int | None:
        with explained("look at", self.name, "", self.path):
            disk = os.statvfs(next(path for path in (self.path, *self.path.parents) if path.exists()))
        free, left = disk.f_bavail * disk.f_frsize, self.gauge.left
        return free if left is None else min(free, left)

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
        if os.path.lexists(path):
            raise AlreadyExists(f"{self.name}: {key}: {path} exists, nothing was changed", tier=self.name, key=key)
        with explained("write", self.name, key, path):
            try:
                self._make_folder(path.parent)
                file = create_temp(path.parent)
            except FileNotFoundError:
                # Somebody removed a folder that this process had made or seen: make it once more.
                self._synced.clear()
                self._make_folder(path.parent)
                file = create_temp(path.parent)
        stream = Stream(file, lambda: self._io.engine(file.descriptor), self._part)
        return self.file_writer(self, key, path, file, stream)

    def delete(self, key: str) -> None:
        self.discard([key])

    def discard(self, keys: Iterable[str]) -> None:
        paths = {key: self.file(key) for key in keys}
        folders: set[Path] = set()
        try:
            for key, path in paths.items():
                if self._unlink(key, path):
                    folders.add(path.parent)
        finally:
            # A record must not come back after a crash when what it names is gone for good.
            for folder in folders:
                with explained("delete", self.name, "", folder), suppress(FileNotFoundError):
                    sync_folder(folder)
        for key, path in paths.items():
            if key.startswith(SCRATCH):
                self._tidy(path.parent)

    def _unlink(self, key: str, path: Path) -> bool:
        """Remove an object's file; whether there was one."""
        self._check_folders(path)
        with explained("delete", self.name, key, path), suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(path)
                self.gauge.give_back(status.st_size)
                return True
        return False

    def _tidy(self, folder: Path) -> None:
        """Remove folders in which nothing is any more. A writer that made one meanwhile makes it again."""
        with suppress(OSError):  # not empty, or gone
            while folder != self.path:
                os.rmdir(folder)
                folder = folder.parent

    def _prepare(self) -> None:
        """Before the first write: the root is there, dead writers' files are not, and the fill is known."""
        with self._readying:
            if self._ready:
                return
            with explained("write", self.name, "", self.path):
                self._check_root()
                self._make_root()
                self._sweep()
                if self.gauge.capacity is not None:
                    self.gauge.used = sum(entry.stat(follow_symlinks=False).st_size for entry in walk(self.path))
            self._ready = True

    def _sweep(self) -> None:
        # The file system's own clock says what is old: hosts disagree.
        with closing(create_temp(self.path)) as clock:
            now = clock.status().st_mtime
            os.unlink(clock.path)
        for entry in walk(self.path):
            if entry.name.startswith(TEMP):
                try:
                    remove_leftover(Path(entry.path), now, self.leftover_age)
                except PermissionError as error:
                    self._notes += (f"a dead writer's file could not be removed: {error}",)

    def _make_root(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        for path in reversed(missing):
            self._make_and_sync(path)
        self._synced.add(self.path)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder under the root, and those above it. Each is synced once, whoever made it."""
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
            os.mkdir(folder)
        except FileExistsError:
            self._met(folder)
        else:
            self._made(folder)
        sync_folder(folder.parent)

    def _made(self, folder: Path) -> None:
        """Called for each new folder, before anything is in it."""

    def _met(self, folder: Path) -> None:
        """Called for each folder that was there already, before this tier first writes into it."""
