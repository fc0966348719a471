"""Small real file systems that a test mounts, fills and makes fail. They need root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ADD_SEALS = 1033
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE: what is in the file can be read, and nothing can be written any more."""

_FREEZE, _THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW."""

MIB = 1 << 20


class Disk:
    """A mounted file system.

    Attributes:
        path: where.
    """

    def __init__(self, path: Path, image: int | None = None) -> None:
        self.path, self._image = path, image

    @property
    def free(self) -> int:
        """Bytes that can still be written."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_bsize

    def die(self) -> None:
        """From now on every write fails, as of a disk whose firmware has gone read-only; what is there can be read."""
        assert self._image is not None
        subprocess.run(["sync", "-f", self.path], check=True)
        fcntl.fcntl(self._image, _ADD_SEALS, _FUTURE_WRITE)

    def freeze(self) -> None:
        """From now on every write waits in the kernel, and nothing can interrupt it: what a dead server does."""
        self._control(_FREEZE)

    def thaw(self) -> None:
        """Let what waits go on."""
        self._control(_THAW)

    def _control(self, request: int) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, request, 0)
        finally:
            os.close(folder)

    def trim(self) -> None:
        """Give blocks that no file needs back to what lies below."""
        subprocess.run(["fstrim", self.path], check=True, capture_output=True)


_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
"""Where programs are; the ones for file systems are often not in a user's own path."""


def _run(name: str, *arguments: object) -> None:
    program = shutil.which(name, path=_PATH)
    if program is None:
        pytest.skip(f"needs {name}: install it (Debian: e2fsprogs, mount)")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mounts here: {' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def _mounted(path: Path, *options: object) -> Iterator[None]:
    path.mkdir(parents=True)
    _run("mount", *options, path)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def tmpfs(folder: Path, nbytes: int) -> Iterator[Disk]:
    """A file system in memory, of so many bytes."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs"):
        yield Disk(folder)


def _make_ext4(image: str) -> None:
    # Without a journal, so that the file system itself needs no writes while the disk is dead.
    _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=0,nodiscard", image)


@contextmanager
def ext4(folder: Path, nbytes: int) -> Iterator[Disk]:
    """A file system on a disk in memory that can `die`."""
    image = os.memfd_create("disk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(image, nbytes)
        path = f"/proc/{os.getpid()}/fd/{image}"
        _make_ext4(path)
        with _mounted(folder, "-o", "loop,errors=continue", path):
            yield Disk(folder, image)
    finally:
        os.close(image)


@contextmanager
def thin(folder: Path, nbytes: int, behind: int) -> Iterator[Disk]:
    """A file system that believes in more room than is behind it: what is buffered meets the end when it is synced."""
    with tmpfs(folder / "pool", behind) as pool:
        image = pool.path / "image"
        image.touch()
        os.truncate(image, nbytes)
        _make_ext4(str(image))
        with _mounted(folder / "thin", "-o", "loop,errors=continue", image):
            yield Disk(folder / "thin")
