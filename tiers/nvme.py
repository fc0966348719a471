"""The NVMe tier: files on a disk of this host."""

from __future__ import annotations

from pathlib import Path

from .direct import Io
from .directory import Directory
from .units import Size


class Nvme(Directory):
    """A folder on a local disk: survives the process, and is lost with the host.

    Args:
        path: the folder.
        capacity: bytes that its objects may have together; None for as many as the disk takes.
        io: what moves long objects: `auto`, `uring` (io_uring), `threads`, or `buffered` (through the page cache).
    """

    def __init__(self, *, path: Path, capacity: Size | None = None, io: Io = "auto") -> None:
        super().__init__(path, capacity, io)
