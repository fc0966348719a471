"""A gauge of this process: seconds, CPU seconds, peak memory, bytes to and from storage."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

_STATUS, _IO, _RESET = Path("/proc/self/status"), Path("/proc/self/io"), Path("/proc/self/clear_refs")


class Gauge:
    """Measures a block of code.

    Attributes:
        seconds: how long it took.
        cpu: CPU seconds of all threads and ended children.
        written, read: bytes that storage was given or asked for on behalf of this process.
    """

    seconds = cpu = 0.0
    written = read = 0

    def __enter__(self) -> Self:
        io = _table(_IO)
        self.written, self.read = -io["write_bytes"], -io["read_bytes"]
        self.cpu = -_cpu()
        self._start = time.monotonic()
        return self

    def elapsed(self) -> float:
        """Seconds since the block began, with all that a device was asked for by now."""
        settle()
        return time.monotonic() - self._start

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = self.elapsed()
        self.cpu += _cpu()
        io = _table(_IO)
        self.written += io["write_bytes"]
        self.read += io["read_bytes"]


class Peak:
    """Most memory this process has had since this was made, beyond what it had then."""

    def __init__(self) -> None:
        _RESET.write_text("5")
        self._before = _table(_STATUS)["VmRSS"]

    def extra(self) -> int:
        """Bytes; pages of mapped files count while they are mapped."""
        return (_table(_STATUS)["VmHWM"] - self._before) * 1024


def settle() -> None:
    """Wait for devices, where there are some in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file of ``name: number unit`` lines."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
