"""CephFS: a Ceph with a metadata server, with any number of mounts, each with its own client."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.servers.ceph import Ceph, _section, install
from support.servers.daemons import DidNotStart
from support.servers.packages import NotInstallable

PACKAGES = ("ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse")
FUSE = Path("/dev/fuse")
_READY_SECONDS = 60

_METADATA = """
mds tick interval = .1
mds cache memory limit = 134217728
mds session timeout = 300
mds session autoclose = 3000
"""
"""A client that was stopped or cut off for a while is not thrown out: tests want servers to die, and not clients."""


def install_all() -> None:
    """Make sure that a CephFS can be made and mounted here.

    Raises:
        NotInstallable: it cannot; the message says why.
    """
    if os.geteuid() != 0:
        raise NotInstallable("needs root, to mount CephFS: run the tests as root")
    if not FUSE.exists():
        raise NotInstallable(f"there is no {FUSE}, by which CephFS is mounted")
    install(*PACKAGES)


class CephFs(Ceph):
    """A cluster with one metadata server, ``mds``, and no S3 gateway. `stop` unmounts it everywhere.

    Args:
        folder: where everything of it goes; must exist and be empty.
    """

    front = ("mds", "osd")
    """The parts without which nothing can be written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        del self.commands["rgw"]
        self.commands["mds"] = ["ceph-mds", "-c", self.conf, "-i", "a", "-f"]
        self._mounts: dict[Path, str] = {}

    def config(self) -> str:
        """The text of the configuration."""
        return super().config() + _section("mds", f"mds data = {self.folder}/mds\n" + _METADATA.strip())

    def create(self) -> None:
        """Make the cluster, start its parts, and make a file system in it.

        Raises:
            DidNotStart
            subprocess.CalledProcessError: a step failed.
        """
        self.conf.write_text(self.config())
        for name in ("osd", "mds"):
            (self.folder / name).mkdir()
        self._make_monitor()
        self.start("mon")
        self._make_storage()
        self.start("osd", "mds")
        for pool in ("meta", "data"):
            self.ceph("osd", "pool", "create", pool, "8")
        self.ceph("fs", "new", "cephfs", "meta", "data")
        self.wait_active()

    def wait_active(self) -> None:
        """Wait until the metadata server serves.

        Raises:
            DidNotStart
        """
        self._until(lambda: "up:active" in self.ceph("mds", "stat"), "the metadata server is not active")

    def mount(self, path: Path) -> Path:
        """Mount it at a folder, which is made, by a client that is a process of its own. Returns the folder."""
        path.mkdir(parents=True)
        name = f"client{len(self._mounts)}"
        self.commands[name] = ["ceph-fuse", "-c", self.conf, "-f", path]
        self._mounts[path] = name
        self.start(name)
        self._until(lambda: os.path.ismount(path) or not self.alive(name), f"{path} is not mounted")
        if not self.alive(name):
            raise DidNotStart(f"{path}: {(self.folder / f'{name}.out').read_text(errors='replace')[-2000:]}")
        return path

    def unmount(self, path: Path) -> None:
        """Unmount it there, and end its client; what still waits in the kernel then fails."""
        name = self._mounts.pop(path)
        subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)
        self.kill(name)
        del self.commands[name]

    def stop(self) -> None:
        """End all of it, mounts first."""
        for path in list(self._mounts):
            self.unmount(path)
        super().stop()

    @staticmethod
    def _until(holds: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + _READY_SECONDS
        while not holds():
            if time.monotonic() > end:
                raise DidNotStart(otherwise)
            time.sleep(0.05)
