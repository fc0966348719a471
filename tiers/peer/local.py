"""The objects in one host's memory: files on tmpfs that all processes of the host read and write, up to a capacity.

`PeerWriter` writes an object into this memory, sends it to the partners, and makes it visible on all hosts or on none.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, TierError, TierFull, TierstateError
from tierstate.tiers.base import AtomicWriter, Release
from tierstate.tiers.posix.directory import Directory, FileWriter
from tierstate.tiers.posix.files import BufferedFile, open_file, os_errors_translated, walk
from tierstate.tiers.posix.ownership import is_private
from tierstate.tiers.units import format_size

from .client import PeerHosts, RemoteStaging

USE_LOCK, START_LOCK = "door", "start"
"""Names of lock files. `USE_LOCK`: locked shared by each process that uses the memory. `START_LOCK`: locked exclusively
while a keeper is started or ends."""


NAMES = frozenset({USE_LOCK, START_LOCK, "fill", "objects", "card", "group", "log"})
"""The names in the folder of a host's memory, besides names that start with a dot."""


SENT = 1 << 20
"""Bytes of a piece that is sent at once: few enough to stay in the processor's cache for checksum and copy."""


def make_folder(path: Path, tier: str) -> None:
    """Make the folder of a host's memory, with access for this user alone.

    Raises:
        AccessDenied: the path exists and belongs to another user, is not a folder, is open to other users, or is used
            for something else.
    """
    with os_errors_translated("make", tier, "", path):
        with suppress(FileExistsError):
            os.makedirs(path, mode=0o700)
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or not is_private(found):
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


def removed_memories(root: Path) -> Iterator[Path]:
    """Folders of memories at this path that were freed but not removed completely."""
    return root.parent.glob(f".{root.name}.*")


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


class LocalWriter(FileWriter):
    """Writes an object into this host's memory. It can be read before it is published, and removed after."""

    _tier: LocalMemory

    @property
    def length(self) -> int:
        """Bytes that were appended so far."""
        return self._length

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self.reserve(self._length + buffer.numel())
        return super()._add(buffer, release)

    def reserve(self, nbytes: int) -> None:
        """Reserve room for ``nbytes`` bytes of this object in all.

        Raises:
            TierFull: that would exceed the capacity.
        """
        self._tier.reserve(self._file, nbytes, self._key)

    def settle(self) -> int:
        """Write all appended bytes to the file; returns their number. Nothing may be appended afterwards."""
        with os_errors_translated("write", self._tier.name, self._key, self._file.path):
            self._stream.finish()
        return self._length

    @contextmanager
    def seen(self) -> Iterator[memoryview]:
        """The bytes of the object after `settle`, memory-mapped."""
        with ExitStack() as held:
            with os_errors_translated("read", self._tier.name, self._key, self._file.path):
                data = held.enter_context(mapped(self._file))
            yield data

    def _publish(self) -> None:
        with os_errors_translated("write", self._tier.name, self._key, self._file.path):
            os.utime(self._file.descriptor)  # its age counts from now, not from before it was sent to other hosts
            self._made = self._file.status()
        super()._publish()

    def undo(self) -> None:
        """Remove the object again, after `close`, if it still exists and is the same file."""
        with os_errors_translated("delete", self._tier.name, self._key, self._path), suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), self._made):
                os.unlink(self._path)


class LocalMemory(Directory):
    """The objects in one host's memory: the host's own and copies of other hosts' objects.

    All processes of the host use the folder at once, so there is no counter of used bytes: the lengths of the files are
    summed. To reserve room, a writer extends its temporary file under a lock. If a writer dies, the count stays right.

    Args:
        root: the folder of the host's memory; objects are in a folder below it.
        capacity: bytes of all objects together, at most; None for as many as tmpfs has.
    """

    persistent: ClassVar[bool] = False
    file_writer = LocalWriter

    def __init__(self, root: Path, capacity: int | None = None) -> None:
        super().__init__(root / "objects", None, "buffered")
        self.root, self.capacity = root, capacity

    def writer(self, key: str, size_hint: int | None = None) -> LocalWriter:
        found = super().writer(key, size_hint)
        assert isinstance(found, LocalWriter)
        return found

    @contextmanager
    def seen(self, key: str) -> Iterator[memoryview]:
        """The bytes of an object, memory-mapped.

        Raises:
            NotFound: there is no such object.
        """
        path = self.file(key)
        self._check_folders(path)
        with ExitStack() as held:
            with os_errors_translated("read", self.name, key, path), closing(open_file(path)) as file:
                data = held.enter_context(mapped(file))
            yield data

    def _prepare(self) -> None:
        if not self._ready:
            make_folder(self.root, self.name)
        super()._prepare()

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

    def sweep(self) -> None:
        """Remove the temporary files of dead writers."""
        if self.path.is_dir():
            with os_errors_translated("sweep", self.name, "", self.path):
                self._sweep()

    def room(self) -> int | None:
        free = super().room()
        if self.capacity is None or free is None:
            return free
        return min(free, max(0, self.capacity - self.used()))

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
            held = lock_file(self.root / "fill", fcntl.LOCK_EX)
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, "the memory was given back meanwhile", str(self.root)) from error
        with closing(held):
            yield

    def clear(self) -> None:
        """Delete every object."""
        self.discard(list(self.list("")))


class PublishStep(NamedTuple):
    """One step of making an object visible: the host's place in the order, and how to do and undo it on that host."""

    order: int
    commit: Callable[[], None]
    undo: Callable[[], None]


class PeerWriter(AtomicWriter):
    """Copies appended bytes into this host's memory at once; `close` sends the object to the partners.

    Args:
        name: the tier's name.
        key: the object's key.
        local: the writer of the object in this host's memory.
        peers: the other hosts.
        pace: called with a number of bytes before they are sent; waits until the rate limit allows them.
        piece: bytes that are sent at once, at most.
    """

    def __init__(
        self, name: str, key: str, local: LocalWriter, peers: PeerHosts, pace: Callable[[int], None], piece: int = SENT
    ) -> None:
        super().__init__(f"{name}: {key}")
        self._name, self._key, self._local, self._peers = name, key, local, peers
        self._pace, self._piece = pace, min(piece, SENT)

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._local.append(buffer)
        return False

    def _publish(self) -> None:
        nbytes = self._local.settle()
        staged: list[RemoteStaging] = []
        try:
            if self._peers.taken_elsewhere(self._key):
                raise AlreadyExists(
                    f"{self._place}: another host has an object of that name, nothing was changed",
                    tier=self._name,
                    key=self._key,
                )
            staged.extend(far.stage(self._key, nbytes) for far in self._peers.partners)
            self._send(staged, nbytes)
            self._show(staged)
        finally:
            for one in staged:
                one.close()

    def _send(self, staged: Sequence[RemoteStaging], nbytes: int) -> None:
        if not staged:
            return
        with self._local.seen() as written:
            for start in range(0, nbytes, self._piece):
                with written[start : min(start + self._piece, nbytes)] as piece:
                    for one in staged:
                        self._pace(len(piece))
                        one.send(piece)

    def _show(self, staged: Sequence[RemoteStaging]) -> None:
        """Make the object visible on one host after the other; if one fails, undo it on those before.

        All writers take the hosts in the same order. So if two writers race for a name and have a host in common, one
        of them succeeds on all of its hosts.
        """
        steps = [PublishStep(self._peers.order(one.far), one.commit, one.undo) for one in staged]
        steps.append(PublishStep(self._peers.order(None), self._local.close, self._local.undo))
        done: list[PublishStep] = []
        for step in sorted(steps):
            try:
                step.commit()
            except BaseException as error:
                for before in reversed(done):
                    _undo(before, error)
                raise
            done.append(step)

    def _discard(self) -> None:
        self._local.abort()


def _undo(step: PublishStep, error: BaseException) -> None:
    try:
        step.undo()
    except (TierstateError, TierError) as second:
        error.add_note(f"and a copy may be left that could not be removed: {second}")
