"""How much memory this process may use and lock: RLIMIT_MEMLOCK, the container's memory limit (cgroup), free memory.

Told where memory is refused, and compared with the size of the arena before a job starts (`policy check --live`).
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierstate.tiers.units import rough_size

REMEDY = (
    "allow more locked memory (`ulimit -l unlimited`; `LimitMEMLOCK=infinity` in the systemd unit, also of slurmd; "
    "`docker run --ulimit memlock=-1`), give the container a memory limit well above the arena "
    "(Kubernetes: `resources.limits.memory`), or choose a smaller `arena: size`"
)
"""What to do if memory for the arena is refused or short."""


_IPC_LOCK = 1 << 14
"""CAP_IPC_LOCK among the effective capabilities: RLIMIT_MEMLOCK does not count."""


_ENDLESS = 1 << 60
"""What cgroup v1 shows without a limit: the longest length of an address space in whole pages."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits of a process, in bytes; None: there is none, or it is not known.

    Attributes:
        memlock: memory that may be locked (RLIMIT_MEMLOCK); None also if the process may lock whatever it wants.
        container: the smallest memory limit of the cgroup of the process and of those above it.
        used: memory that counts towards ``container`` now.
        free: memory of the machine that can be had without swapping.
        total: memory of the machine.
    """

    memlock: int | None
    container: int | None
    used: int | None
    free: int | None
    total: int | None = None

    @classmethod
    def of_process(cls, root: Path = Path("/")) -> MemoryLimits:
        """The limits of this process.

        Args:
            root: the folder where ``proc`` and ``sys`` are.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        capabilities = _fields(root / "proc/self/status").get("CapEff", "0")
        exempt = soft == resource.RLIM_INFINITY or bool(int(capabilities, 16) & _IPC_LOCK)
        container, used = min(_groups(root), key=lambda found: found[0], default=(None, None))
        memory = _fields(root / "proc/meminfo")
        free, total = _kilobytes(memory, "MemAvailable"), _kilobytes(memory, "MemTotal")
        return cls(None if exempt else soft, container, used, free, total)

    def told(self) -> str:
        """One sentence with all numbers."""
        memlock = "unlimited" if self.memlock is None else rough_size(self.memlock)
        container = "none" if self.container is None else rough_size(self.container)
        if self.used is not None:
            container += f", of which {rough_size(self.used)} are in use"
        free = "" if self.free is None else f"; free memory of the machine: {rough_size(self.free)}"
        return f"limit of locked memory: {memlock}; memory limit of the container (cgroup): {container}{free}"


def _fields(file: Path) -> dict[str, str]:
    """The lines ``name: value`` of a file of /proc."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _kilobytes(fields: Mapping[str, str], name: str) -> int | None:
    """Bytes of a field that is in kB; None if there is none."""
    text = fields.get(name, "").removesuffix(" kB")
    return int(text) << 10 if text.isdigit() else None


def _groups(root: Path) -> Iterator[tuple[int, int | None]]:
    """Limit and use of each cgroup, of version 1 and 2, that holds this process and has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops, limit, use = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            tops, limit, use = ["sys/fs/cgroup/memory"], "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, of which only the top is mounted: look at all above it.
        group = Path(path.lstrip("/"))
        for folder in (root / top / part for top in tops for part in (group, *group.parents)):
            most = _number(folder / limit)
            if most is not None and most < _ENDLESS:
                yield most, _number(folder / use)


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # ValueError: "max"
        return int(file.read_text())
    return None
