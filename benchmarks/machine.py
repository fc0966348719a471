"""The machine and the software that the figures belong to."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from tierstate.tiers.memory.pages import fault_in, map_pages

_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def facts(path: Path) -> dict[str, str]:
    """What a reader has to know, by name, in words.

    Args:
        path: a folder of the disk that is measured.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": " ".join([platform.system(), ".".join(platform.release().split(".")[:2])]),
        "huge pages": f"{_chosen('enabled')}; of shared memory: {_chosen('shmem_enabled')}",
        "file system": _file_system(path),
        "Python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }


def facts_line(path: Path) -> str:
    """The same in one line."""
    return ", ".join(f"{name}: {what}" for name, what in facts(path).items())


def touch_memory() -> float:
    """Touch most of the free memory once, and give it back; seconds that it took.

    A virtual machine's memory may have none behind it before its first touch, which then waits for the host: ten times
    and more what the kernel's own work costs. Who happens to be the first would pay for that.
    """
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    start = time.monotonic()
    pieces = []
    for _ in range(int(free.split()[1]) * 1024 * 8 // 10 >> 30):
        pieces.append(map_pages(1 << 30))
        fault_in(pieces[-1])
    return time.monotonic() - start


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _chosen(name: str) -> str:
    try:
        words = (_HUGE / name).read_text().split()
    except OSError:
        return "none"
    return next(word[1:-1] for word in words if word.startswith("["))


def _file_system(path: Path) -> str:
    """Type of the mount that holds the path: of all mount points above it the last and longest."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(place), kind) for place, kind in mounts if path.resolve().is_relative_to(place)]
    return max(enumerate(above), key=lambda found: (found[1][0], found[0]))[1][1]
