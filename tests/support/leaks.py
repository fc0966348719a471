"""Checks what a Checkpointer must not leave behind: threads, open files, leased slabs, and temporary files."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.checkpointer_worlds import arena_of

import tierstate as ts
from tierstate.manifest.format.marker import MARKER_KEY
from tierstate.tiers.libc import libc


def open_files() -> Counter[str]:
    """What this process's descriptors lead to."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
        except FileNotFoundError:
            continue  # the listing's own
    return found


def resident() -> int:
    """Bytes of memory that this process has, by the kernel's own count.

    Without those of programs and libraries, which the kernel takes away at any moment where memory is short, and
    without freed memory that glibc keeps for the next `malloc`: how much it keeps depends on the longest block that any
    earlier test has freed (`M_MMAP_THRESHOLD` of mallopt(3)).
    """
    gc.collect()
    if (trim := getattr(libc(), "malloc_trim", None)) is not None:  # musl keeps nothing of big blocks
        trim(0)
    counts = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(counts[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """The block leaves no thread, no open file and no temporary file below ``folder``; rings are files too."""
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and t.name.startswith("tierstate")]
    assert left == []
    gc.collect()
    assert dict(open_files() - files) == {}
    assert temporary(folder) == []


def temporary(folder: Path) -> list[str]:
    """Files that were being written."""
    return [path.name for path in folder.rglob(".tmp*")]


def objects(folder: Path) -> list[str]:
    """All files below a folder, but the tier's marker."""
    return [name for name in files(folder) if name != MARKER_KEY]


def files(folder: Path) -> list[str]:
    """Everything below a folder but folders: temporary files and links, too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def at_rest(ckpt: ts.Checkpointer) -> bool:
    """Whether the Checkpointer has no slab on loan; to be asked when nothing is under way."""
    return arena_of(ckpt).in_flight == 0


def idle(queue: Any) -> bool:
    """Whether a tier queue does nothing, and will not before the next save."""
    with queue._changed:
        busy = queue._busy or queue._direct_jobs or queue._backlog._waiting  # busy with retention, too
        return not busy and (not queue._backlog.owed or queue._retry_timer.left > 0)
