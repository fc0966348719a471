"""Small real file systems that a test mounts, fills and makes fail. They need root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
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
    _output(name, *arguments)


def _output(name: str, *arguments: object) -> str:
    program = shutil.which(name, path=_PATH)
    if program is None:
        pytest.skip(f"needs {name}: install it (Debian: e2fsprogs, dosfstools, exfatprogs, exfat-fuse, mount)")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mounts here: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


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


def _image(folder: Path, nbytes: int) -> Path:
    image = folder / "image"
    image.touch()
    os.truncate(image, nbytes)
    return image


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
        image = _image(pool.path, nbytes)
        _make_ext4(str(image))
        with _mounted(folder / "thin", "-o", "loop,errors=continue", image):
            yield Disk(folder / "thin")


@contextmanager
def fuse(folder: Path, *lacks: str) -> Iterator[Disk]:
    """A file system in a process of its own that lacks something: see `support.fuse_server`."""
    library = find_library("fuse3")
    if library is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs FUSE: the kernel's /dev/fuse, and libfuse 3 (Debian: libfuse3-3)")
    below, mount = folder / "below", folder / "mount"
    below.mkdir(parents=True)
    mount.mkdir()
    script = Path(__file__).with_name("fuse_server.py")
    environment = {**os.environ, "FUSE_LIBRARY_PATH": library}
    server = subprocess.Popen([sys.executable, script, below, mount, *lacks], env=environment)
    try:
        while not os.path.ismount(mount):
            assert server.poll() is None, "the server did not start"
            time.sleep(0.01)
        yield Disk(mount)
    finally:
        subprocess.run(["umount", mount], check=True)
        server.wait()


@contextmanager
def vfat(folder: Path, nbytes: int) -> Iterator[Disk]:
    """FAT as the kernel has it: no hard links, names that ignore case, times of two seconds."""
    image = _image(folder, nbytes)
    _run("mkfs.vfat", image)
    with _mounted(folder / "vfat", "-t", "vfat", "-o", "loop", image):
        yield Disk(folder / "vfat")


@contextmanager
def exfat(folder: Path, nbytes: int) -> Iterator[Disk]:
    """exFAT by FUSE: neither hard links nor renames that replace nothing, names that ignore case."""
    image = _image(folder, nbytes)
    _run("mkfs.exfat", image)
    # The program takes no file, and the option `loop` is not known to it.
    device = _output("losetup", "--find", "--show", image)
    try:
        (folder / "exfat").mkdir()
        _run("mount.exfat-fuse", device, folder / "exfat")
        try:
            yield Disk(folder / "exfat")
        finally:
            subprocess.run(["umount", folder / "exfat"], check=True)
    finally:
        _run("losetup", "--detach", device)
