"""What lies under a path: how much it is, made durable, made cold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CACHES = Path("/proc/sys/vm/drop_caches")


def files_below(path: Path) -> Iterator[Path]:
    """All regular files of a tree, or the file itself."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder) / name for name in names)


def census(path: Path) -> tuple[int, int]:
    """How many files there are, and their bytes."""
    sizes = [file.stat().st_size for file in files_below(path)]
    return len(sizes), sum(sizes)


def sync_tree(path: Path) -> None:
    """Make files and folders durable, and the name of the path itself. What is removed meanwhile needs no sync."""
    for file in files_below(path):
        with suppress(FileNotFoundError):
            _sync(file)
    for folder, _, _ in os.walk(path):
        with suppress(FileNotFoundError):
            _sync(Path(folder))
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_cold(path: Path) -> str:
    """Have nothing of a tree in the page cache; returns how that was done."""
    os.sync()
    if os.access(_CACHES, os.W_OK):
        _CACHES.write_text("3")
        return "page cache dropped (drop_caches)"
    for file in files_below(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return "posix_fadvise(DONTNEED) on each file"
