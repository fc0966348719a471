"""The objects in one host's memory: files on tmpfs that all processes of the host read and write, up to a capacity.

Used by the ranks of the host and by its keeper, which imports this without torch. An object is written to a temporary
file beside its place, and gets its name by ``link(2)``, which fails if the name is taken.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from tierstate.manifest.errors import AccessDenied, AlreadyExists, Damaged, TierError, TierFull
from tierstate.tiers.base import MAX_KEY, check_key, is_key
from tierstate.tiers.posix.files import (
    TEMP,
    BufferedFile,
    create_temp,
    exists,
    file_size,
    file_status,
    is_folder,
    object_keys,
    open_file,
    os_errors_translated,
    remove_leftover,
    walk,
)

USE_LOCK, START_LOCK, KEEPER_LOCK = "door", "start", "keeper"
"""Names of lock files. `USE_LOCK`: locked shared by each process that uses the memory. `START_LOCK`: locked exclusively
while a keeper is started or ends. `KEEPER_LOCK`: locked exclusively by the keeper as long as it lives."""


NAMES = frozenset({USE_LOCK, START_LOCK, KEEPER_LOCK, "fill", "objects", "card", "group", "log", "secret"})
"""The names in the folder of a host's memory, besides names that start with a dot."""


MAX_NAME = 255
"""Longest file name in bytes."""


def make_folder(path: Path, tier: str) -> None:
    """Make the folder of a host's memory, with access for this user alone.

    Raises: as `check_folder`.
    """
    with os_errors_translated("make", tier, "", path), suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    check_folder(path, tier)


def check_folder(path: Path, tier: str) -> None:
    """Check that a path is the folder of a memory of this user's alone.

    Raises:
        AccessDenied: it belongs to another user, is not a folder, is open to other users, or is used for something
            else.
        NotFound: it is not there.
    """
    with os_errors_translated("look at", tier, "", path):
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise AccessDenied(
            f"{tier}: {path} is not a folder of this user's alone; remove it, chmod it to 0700, or give another 'path'",
            tier=tier,
        )
    check_ours(path, tier)


def check_ours(path: Path, tier: str) -> None:
    """Check that a folder has nothing in it but the files of peer memory, so that it may be removed.

    Raises:
        AccessDenied: it has other files.
    """
    with suppress(FileNotFoundError):
        foreign = sorted(name for name in os.listdir(path) if name not in NAMES and not name.startswith("."))
        if foreign:
            raise AccessDenied(
                f"{tier}: {path} is used for something else ({foreign[0][:80]}); give peer memory a 'path' of its own",
                tier=tier,
            )


def lock_file(path: Path, how: int) -> BufferedFile:
    """Open and lock a lock file, whose folder may be removed at any moment by a process with the exclusive lock.

    Args:
        how: flags of `fcntl.flock`.

    Raises:
        FileNotFoundError: the folder is gone.
        BlockingIOError: another process has the lock, and ``how`` has ``LOCK_NB``.
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


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until this returns True; returns whether it did within ``seconds``."""
    end = time.monotonic() + seconds
    while not (found := done()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def removed_memories(root: Path) -> Iterator[Path]:
    """Folders of this user's memories at this path that were freed but not removed completely."""
    for path in root.parent.glob(f".{root.name}.*"):
        with suppress(FileNotFoundError):
            if os.lstat(path).st_uid == os.geteuid():
                yield path


def remove_memory(root: Path) -> None:
    """Free a host's memory: rename the folder and remove it, so that a partly removed one is never under its name.

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
    """The bytes of a file, memory-mapped. The file may be closed or removed meanwhile, but must not be truncated."""
    nbytes = file.status().st_size
    if not nbytes:
        yield memoryview(b"")
        return
    with mmap.mmap(file.descriptor, nbytes, prot=mmap.PROT_READ) as pages, memoryview(pages) as data:
        yield data


def keeper_lives(root: Path) -> bool:
    """Whether the memory's keeper runs, on this host, by the lock that it holds."""
    try:
        with closing(lock_file(root / KEEPER_LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB)):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


class LocalWriter:
    """Writes an object into this host's memory. It can be read before it is published, and removed after.

    Args:
        tier: the memory.
        key: the object's key.
        path: its file.
        file: the temporary file.
    """

    def __init__(self, tier: LocalMemory, key: str, path: Path, file: BufferedFile) -> None:
        self._tier, self._key, self._path, self._file = tier, key, path, file
        self._open = True
        self.length = 0
        """Bytes that were appended so far."""

    def append(self, data: memoryview) -> None:
        """Write more bytes.

        Raises:
            TierFull: there is no room; the object is given up.
        """
        self._check_open()
        try:
            self.reserve(self.length + len(data))
            with os_errors_translated("write", self._tier.name, self._key, self._file.path):
                while data:
                    n = os.pwrite(self._file.descriptor, data, self.length)
                    data, self.length = data[n:], self.length + n
        except BaseException:
            self.abort()
            raise

    def _check_open(self) -> None:
        if not self._open:
            raise TierError(f"{self._tier.name}: {self._key}: the writer is closed or was given up")

    def reserve(self, nbytes: int) -> None:
        """Reserve room for ``nbytes`` bytes of this object in all.

        Raises:
            TierFull: that would exceed the capacity.
        """
        self._tier.reserve(self._file, nbytes, self._key)

    @contextmanager
    def seen(self) -> Iterator[memoryview]:
        """The bytes that were appended, memory-mapped."""
        with ExitStack() as held:
            with os_errors_translated("read", self._tier.name, self._key, self._file.path):
                data = held.enter_context(mapped(self._file))
            yield data

    def close(self) -> None:
        """Make the object visible.

        Raises:
            AlreadyExists: there is one of that name.
        """
        self._check_open()
        try:
            with os_errors_translated("write", self._tier.name, self._key, self._file.path):
                os.utime(self._file.descriptor)  # its age counts from now, not from before it was sent to other hosts
                self._made = self._file.status()
                os.link(self._file.path, self._path, follow_symlinks=False)
        finally:
            self.abort()

    def abort(self) -> None:
        """Discard the object, if it was not published. Safe to call twice."""
        if self._open:
            self._open = False
            with suppress(OSError):
                os.unlink(self._file.path)
            self._file.close()

    def undo(self) -> None:
        """Remove the object again, after `close`, if it still exists and is the same file."""
        with os_errors_translated("delete", self._tier.name, self._key, self._path), suppress(FileNotFoundError):
            if hasattr(self, "_made") and os.path.samestat(os.lstat(self._path), self._made):
                os.unlink(self._path)


class LocalMemory:
    """The objects in one host's memory: the host's own and copies of other hosts' objects.

    All processes of the host use the folder at once, so there is no counter of used bytes: the lengths of the files are
    summed. To reserve room, a writer extends its temporary file under a lock. If a writer dies, the count stays right.
    Errors are those of a tier.

    Args:
        root: the folder of the host's memory; objects are in a folder below it.
        capacity: bytes of all objects together, at most; None for as many as tmpfs has.

    Attributes:
        name: of the tier, for messages.
        made: whether this process has made the folder.
    """

    def __init__(self, root: Path, capacity: int | None = None) -> None:
        self.root, self.path, self.capacity, self.name = root, root / "objects", capacity, "peer"
        self._ready = self.made = False

    def file(self, key: str) -> Path:
        """The path of an object's file.

        Raises:
            ValueError: the key is not valid, or a name in it is too long.
        """
        if any(len(name) > MAX_NAME for name in check_key(key).split("/")):
            raise ValueError(f"{key[:80]!r} is not a key for files: a name may have {MAX_NAME} characters at most")
        return self.path / key

    def _existing(self, key: str) -> Path:
        path = self.file(key)
        self._check_folders(path)
        return path

    def _check_folders(self, path: Path) -> None:
        """Check that no folder between the root and ``path`` is a symbolic link, which could lead out of the memory."""
        for folder in path.relative_to(self.path).parents:
            if folder.parts and os.path.islink(self.path / folder):
                raise AccessDenied(
                    f"{self.name}: {self.path / folder} is a link; the folders of a tier must be real", tier=self.name
                )

    # Reading

    def read(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory from its offset in the object.

        Raises:
            NotFound: there is no such object.
            Damaged: a range lies outside it.
        """
        path = self._existing(key)
        with os_errors_translated("read", self.name, key, path), closing(open_file(path)) as file:
            for offset, out in ranges:
                _read_at(file, offset, out, f"{self.name}: {key}")

    @contextmanager
    def seen(self, key: str) -> Iterator[memoryview]:
        """The bytes of an object, memory-mapped.

        Raises:
            NotFound: there is no such object.
        """
        path = self._existing(key)
        with ExitStack() as held:
            with os_errors_translated("read", self.name, key, path), closing(open_file(path)) as file:
                data = held.enter_context(mapped(file))
            yield data

    def list(self, prefix: str) -> Iterator[str]:
        """The keys with a prefix, rising."""
        folder = prefix.rpartition("/")[0]
        if not prefix.isascii() or len(prefix) > MAX_KEY or (folder and not is_key(folder)):
            return iter(())
        top = self.path / folder
        self._check_folders(top / "any")
        with os_errors_translated("list", self.name, prefix, top), suppress(NotADirectoryError):
            return iter(object_keys(self.path, prefix))
        return iter(())

    def size(self, key: str) -> int:
        """Bytes of an object. Raises NotFound if there is none."""
        path = self._existing(key)
        with os_errors_translated("read", self.name, key, path):
            return file_size(path)

    def age(self, key: str) -> float:
        """Seconds since an object was created. Raises NotFound if there is none."""
        path = self._existing(key)
        with os_errors_translated("look at", self.name, key, path):
            return max(0.0, time.time() - file_status(path).st_mtime)

    def used(self) -> int:
        """Bytes in use, by objects and by files that are being written."""
        total = 0
        for entry in walk(self.path):
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
        return total

    def count(self) -> int:
        """Number of objects."""
        return sum(1 for _ in self.list(""))

    def room(self) -> int:
        """Free bytes: of the capacity, or of tmpfs."""
        with os_errors_translated("look at", self.name, "", self.path):
            disk = os.statvfs(next(path for path in (self.path, *self.path.parents) if exists(path)))
        free = disk.f_bavail * disk.f_frsize
        return free if self.capacity is None else min(free, max(0, self.capacity - self.used()))

    # Writing

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object.

        Raises:
            AlreadyExists: there is one of that name.
            TierFull: there is no room.
        """
        writer = self.writer(key)
        try:
            writer.append(memoryview(data))
            writer.close()
        finally:
            writer.abort()

    def writer(self, key: str) -> LocalWriter:
        """Begin to write an object. Raises AlreadyExists if there is one of that name."""
        path = self.file(key)
        self._prepare()
        self._check_folders(path)
        with os_errors_translated("write", self.name, key, path):
            if os.path.lexists(path):
                raise AlreadyExists(f"{self.name}: {key}: {path} exists, nothing was changed", tier=self.name, key=key)
            path.parent.mkdir(parents=True, exist_ok=True)
            return LocalWriter(self, key, path, create_temp(path.parent))

    def _prepare(self) -> None:
        there = exists(self.root)
        if not self._ready or not there:  # it may have been freed since (`tierstate peer stop`)
            self.made = not there
            make_folder(self.root, self.name)
            with os_errors_translated("write", self.name, "", self.path):
                self.path.mkdir(exist_ok=True)
            self.sweep()
            self._ready = True

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        self.discard([key])

    def discard(self, keys: Iterable[str]) -> None:
        """Delete objects; keys without an object are ignored."""
        for key, path in {key: self.file(key) for key in keys}.items():
            self._check_folders(path)
            with (
                os_errors_translated("delete", self.name, key, path),
                suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            ):
                os.unlink(path)

    def sweep(self) -> None:
        """Remove the temporary files of dead writers."""
        if is_folder(self.path):
            with os_errors_translated("sweep", self.name, "", self.path):
                for entry in walk(self.path):
                    if entry.name.startswith(TEMP):
                        remove_leftover(Path(entry.path), time.time(), 0.0)

    def reserve(self, file: BufferedFile, nbytes: int, key: str) -> None:
        """Reserve room: extend a file that is being written to ``nbytes``. Does nothing without a capacity.

        Raises:
            TierFull: that would exceed the capacity, even after a sweep.
        """
        if self.capacity is None or not nbytes:
            return
        with os_errors_translated("write", self.name, key, file.path), self._counting():
            more = nbytes - file.status().st_size
            if self.used() + more > self.capacity:
                self.sweep()
                self._check_room(more, key)
            os.ftruncate(file.descriptor, nbytes)

    def _check_room(self, more: int, key: str) -> None:
        used = self.used()
        if self.capacity is not None and used + more > self.capacity:
            raise TierFull(
                f"{self.name}: {key}: no room for {_mebibytes(more)} more in the memory of this host: "
                f"{_mebibytes(used)} of the capacity of {_mebibytes(self.capacity)} are in use, copies of other "
                "hosts' objects among them; raise the tier's 'capacity' or keep fewer versions",
                tier=self.name,
                key=key,
            )

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            held = lock_file(self.root / "fill", fcntl.LOCK_EX)
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, "the memory was given back meanwhile", str(self.root)) from error
        with closing(held):
            yield

    def clear(self) -> None:
        """Delete every object."""
        self.discard(list(self.list("")))


def _read_at(file: BufferedFile, offset: int, out: memoryview, place: str) -> None:
    size = file.status().st_size
    if offset < 0 or offset + len(out) > size:
        raise Damaged(f"{place}: bytes {offset} to {offset + len(out)} are wanted, the object has {size}")
    while out:
        n = os.preadv(file.descriptor, [out], offset)
        if n == 0:
            raise Damaged(f"{file.path}: the file ends at {offset}, {len(out)} bytes before it should")
        out, offset = out[n:], offset + n


def _mebibytes(nbytes: int) -> str:
    # `format_size` would bring pydantic along, which the keeper does without.
    return f"{nbytes / 2**20:.3g} MiB"
