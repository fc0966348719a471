"""The memory of one host that peers keep objects in: files on tmpfs, read and written by every process of the host."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AccessDenied, TierFull

from .base import Release
from .directory import Directory
from .file_writer import FileWriter
from .files import BufferedFile, open_file, walk
from .posix import explained
from .units import format_size

DOOR, START = "door", "start"
"""Lock files: shared by all processes that use the memory, and had by who makes a keeper or ends it."""

NAMES = frozenset({DOOR, START, "fill", "objects", "card", "group", "log"})
"""All that lies in the folder of a host's memory, but for names that start with a dot."""


def make_folder(path: Path, tier: str) -> None:
    """Make the folder of a host's memory, for this user alone.

    Raises:
        AccessDenied: what is there is another user's, or no folder, or open to others.
    """
    with explained("make", tier, "", path):
        with suppress(FileExistsError):
            os.makedirs(path, mode=0o700)
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise AccessDenied(
            f"{tier}: {path} is not a folder of this user's alone; remove it, chmod it to 0700, or give another 'path'",
            tier=tier,
        )
    check_ours(path, tier)


def check_ours(path: Path, tier: str) -> None:
    """Nothing, if a folder has nothing in it but what belongs to peer memory, so that it may be removed.

    Raises:
        AccessDenied: it is used for something else.
    """
    with suppress(FileNotFoundError):
        foreign = sorted(name for name in os.listdir(path) if name not in NAMES and not name.startswith("."))
        if foreign:
            raise AccessDenied(
                f"{tier}: {path} is used for something else ({foreign[0][:80]}); give peer memory a 'path' of its own",
                tier=tier,
            )


def lock(path: Path, how: int) -> BufferedFile:
    """A lock file in a folder that may be removed at any moment by whoever has it to himself.

    Args:
        how: of `fcntl.flock`.

    Raises:
        FileNotFoundError: the folder is gone.
        BlockingIOError: another has it, and we are not to wait.
    """
    while True:
        file = BufferedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), path)
        try:
            fcntl.flock(file.descriptor, how)
            if file.status().st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # removed with its folder while we waited


def leaving(root: Path) -> Iterator[Path]:
    """What is there still of memories in this place that were given back."""
    return root.parent.glob(f".{root.name}.*")


def remove(root: Path) -> None:
    """Give a host's memory back. At once under its name, so that no half of it is ever found there.

    Raises:
        AccessDenied: the folder is used for something else.
    """
    check_ours(root, "peer")
    away = root.with_name(f".{root.name}.{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        os.rename(root, away)
        shutil.rmtree(away, ignore_errors=True)


@contextmanager
def mapped(file: BufferedFile) -> Iterator[memoryview]:
    """A file's bytes where they lie. It may be closed meanwhile, and removed; nobody may cut it."""
    nbytes = file.status().st_size
    if not nbytes:
        yield memoryview(b"")
        return
    with mmap.mmap(file.descriptor, nbytes, prot=mmap.PROT_READ) as pages, memoryview(pages) as data:
        yield data


class KeptWriter(FileWriter):
    """Writes an object into the memory, and can be read, sent on and taken back before anybody relies on it."""

    _tier: Kept

    @property
    def length(self) -> int:
        """Bytes so far."""
        return self._length

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self.reserve(self._length + buffer.numel())
        return super()._add(buffer, release)

    def reserve(self, nbytes: int) -> None:
        """Have room for so many bytes in all.

        Raises:
            TierFull: there is not so much.
        """
        self._tier.reserve(self._file, nbytes, self._key)

    def settle(self) -> int:
        """Have all bytes in the file, which gets no more of them; how many."""
        with explained("write", self._tier.name, self._key, self._file.path):
            self._stream.finish()
        return self._length

    @contextmanager
    def seen(self) -> Iterator[memoryview]:
        """What was written, once it is settled, where it lies."""
        with ExitStack() as held:
            with explained("read", self._tier.name, self._key, self._file.path):
                data = held.enter_context(mapped(self._file))
            yield data

    def _publish(self) -> None:
        with explained("write", self._tier.name, self._key, self._file.path):
            os.utime(self._file.descriptor)  # its age counts from now, however long it was on its way to others
            self._made = self._file.status()
        super()._publish()

    def undo(self) -> None:
        """Remove the object again, after `close`, if it is there still."""
        with explained("delete", self._tier.name, self._key, self._path), suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), self._made):
                os.unlink(self._path)


class Kept(Directory):
    """The objects that lie in one host's memory, the host's own and copies of others'.

    All processes of the host use the folder at once, so the capacity is counted where it is used up: what may be
    written is fixed, under a lock, as the length of the temporary file, and so nothing is counted that is not there,
    whenever a writer dies.

    Args:
        root: the folder of the host's memory; objects lie below it.
        capacity: bytes that all of them may have together; None for as many as there is memory.
    """

    persistent: ClassVar[bool] = False
    file_writer = KeptWriter

    def __init__(self, root: Path, capacity: int | None = None) -> None:
        super().__init__(root / "objects", None, "buffered")
        self.root, self.capacity = root, capacity

    def writer(self, key: str, size_hint: int | None = None) -> KeptWriter:
        found = super().writer(key, size_hint)
        assert isinstance(found, KeptWriter)
        return found

    @contextmanager
    def seen(self, key: str) -> Iterator[memoryview]:
        """An object's bytes, where they lie.

        Raises:
            NotFound: there is no such object.
        """
        path = self.file(key)
        self._check_folders(path)
        with ExitStack() as held:
            with explained("read", self.name, key, path), closing(open_file(path)) as file:
                data = held.enter_context(mapped(file))
            yield data

    def _prepare(self) -> None:
        if not self._ready:
            make_folder(self.root, self.name)
        super()._prepare()

    def used(self) -> int:
        """Bytes that are taken now, by objects and by what is being written."""
        total = 0
        for entry in walk(self.path):
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
        return total

    def count(self) -> int:
        """How many objects there are."""
        return sum(1 for _ in self.list(""))

    def sweep(self) -> None:
        """Remove what dead writers left."""
        if self.path.is_dir():
            with explained("sweep", self.name, "", self.path):
                self._sweep()

    def room(self) -> int | None:
        free = super().room()
        if self.capacity is None or free is None:
            return free
        return min(free, max(0, self.capacity - self.used()))

    def reserve(self, file: BufferedFile, nbytes: int, key: str) -> None:
        """Let a file that is being written have so many bytes.

        Raises:
            TierFull: that would be more than the capacity.
        """
        if self.capacity is None or not nbytes:
            return
        with explained("write", self.name, key, file.path), self._counting():
            more = nbytes - file.status().st_size
            if self.used() + more > self.capacity:
                self._sweep()
                self._check_room(more, key)
            os.ftruncate(file.descriptor, nbytes)

    def _check_room(self, more: int, key: str) -> None:
        used = self.used()
        if self.capacity is not None and used + more > self.capacity:
            raise TierFull(
                f"{self.name}: {key}: no room for {format_size(more)} more in the memory of this host: "
                f"{format_size(used)} of the capacity of {format_size(self.capacity)} are in use, copies of other "
                "hosts' objects among them; raise the tier's 'capacity' or keep fewer versions",
                tier=self.name,
                key=key,
            )

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            held = lock(self.root / "fill", fcntl.LOCK_EX)
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, "the memory was given back meanwhile", str(self.root)) from error
        with closing(held):
            yield

    def clear(self) -> None:
        """Remove every object."""
        self.discard(list(self.list("")))
