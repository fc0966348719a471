"""Trees of /proc, /sys and folders that look like machines of several kinds, below a folder of the tests."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


class Machine:
    """A tree under ``root``: mounts, drives, memory.

    Args:
        total: bytes of memory.
    """

    def __init__(self, root: Path, total: int = 256 * GIB) -> None:
        self.root = root
        self._mounts: list[str] = []
        self.file("proc/self/status", "CapEff:\t0000000000000000")
        self.file("proc/meminfo", f"MemTotal: {total >> 10} kB\nMemAvailable: {total >> 11} kB")
        self.mount("/", "ext4", "8:1")
        self.drive("8:1", "sda", partition="sda1", turning=True)

    def file(self, path: str, text: str) -> Path:
        """A file with a line of text."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def folder(self, path: str, mode: int = 0o755) -> Path:
        """A folder by its absolute path on the machine."""
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
        return folder

    def mount(self, point: str, kind: str, device: str = "0:77") -> None:
        """A mounted file system, with its folder."""
        if point != "/":
            self.folder(point)
        n = len(self._mounts)
        self._mounts.append(f"{n + 20} 1 {device} / {point} rw,relatime shared:1 - {kind} source rw")
        self.file("proc/self/mountinfo", "\n".join(self._mounts))

    def drive(
        self, device: str, name: str, *, partition: str = "", turning: bool = False, model: str = "", bus: str = "pci0"
    ) -> None:
        """A block device of /sys, or a partition of one."""
        drive = self.folder(f"/sys/devices/{bus}/block/{name}")
        self.file(f"sys/devices/{bus}/block/{name}/queue/rotational", "1" if turning else "0")
        if model:
            self.file(f"sys/devices/{bus}/block/{name}/device/model", model)
        if partition:
            drive = self.folder(f"/sys/devices/{bus}/block/{name}/{partition}")
            self.file(f"sys/devices/{bus}/block/{name}/{partition}/partition", "1")
        link = self.root / "sys/dev/block" / device
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(drive)
