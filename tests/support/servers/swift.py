"""A real S3 server for tests: OpenStack Swift with its s3api, in four processes on the loopback interface.

Its Python is ``$TIERSTATE_SWIFT_PYTHON``, or that of the environment ``$TIERSTATE_SWIFT_VENV``, by default
``.venv-swift`` in the checkout, which is made (with ``pip install swift``) where it is missing. Swift answers
``If-None-Match: *`` with 412, but not atomically.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.ports import free_ports
from support.servers.daemons import Daemons

ROOT = Path(__file__).resolve().parents[3]
KEY, SECRET, REGION = "test:tester", "testing", "us-east-1"
SERVERS = ("account", "container", "object", "proxy")

_RINGS = """
import sys
from swift.common.ring import RingBuilder
folder, *servers = sys.argv[1:]
for name, port in (server.split("=") for server in servers):
    builder = RingBuilder(4, 1, 1)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "disk", "weight": 1})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{name}.ring.gz")
"""

_FILTERS = {
    "catch_errors": "",
    "gatekeeper": "",
    "s3api": f"location = {REGION}\ns3_acl = false",
    "tempauth": f"user_{KEY.replace(':', '_')} = {SECRET} .admin",
    "bulk": "",
    "slo": "",
    "versioned_writes": "",
}


def find_python() -> Path:
    """A Python that has Swift; installs it where that was not done yet."""
    if given := os.environ.get("TIERSTATE_SWIFT_PYTHON"):
        return Path(given)
    venv = Path(os.environ.get("TIERSTATE_SWIFT_VENV") or ROOT / ".venv-swift")
    venv.mkdir(exist_ok=True)
    (venv / ".gitignore").write_text("*\n")
    with open(venv / "lock", "w") as lock:
        # Several test processes may start at once; the first one installs.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "bin" / "swift-proxy-server").exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            pins = ROOT / "constraints-swift.txt"
            subprocess.run([venv / "bin" / "pip", "install", "-q", "-r", pins], check=True, capture_output=True)
    return venv / "bin" / "python"


class Swift(Daemons):
    """A server with one disk, which is a folder. `create` makes it and starts it.

    The parts are ``account``, ``container``, ``object`` and ``proxy``.

    Args:
        folder: where configuration, logs and data go; must exist and be empty.
        python: a Python that has Swift.
    """

    front = SERVERS
    """The parts that a client's requests die with."""

    def __init__(self, folder: Path, python: Path) -> None:
        super().__init__(folder)
        self._python = python
        self.ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
        for name in SERVERS:
            self.commands[name] = [python.parent / f"swift-{name}-server", folder / f"{name}.conf"]

    @property
    def endpoint(self) -> str:
        """What S3 clients call ``endpoint_url``."""
        return f"http://127.0.0.1:{self.ports['proxy']}"

    def options(self) -> dict[str, Any]:
        """What s3fs wants to know."""
        return {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"region_name": REGION},
        }

    def create(self) -> None:
        """Write the configuration and start the parts.

        Raises:
            DidNotStart
            subprocess.CalledProcessError: a step failed.
        """
        (self.folder / "disks" / "disk").mkdir(parents=True)
        (self.folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tierstate\n")
        for name in SERVERS:
            (self.folder / f"{name}.conf").write_text(self._config(name))
        rings = [f"{name}={self.ports[name]}" for name in SERVERS[:-1]]
        subprocess.run([self._python, "-c", _RINGS, self.folder, *rings], check=True)
        self.start()

    def _config(self, name: str) -> str:
        pipeline = [*_FILTERS, "proxy-server"] if name == "proxy" else [f"{name}-server"]
        lines = [
            "[DEFAULT]",
            "bind_ip = 127.0.0.1",
            f"bind_port = {self.ports[name]}",
            "workers = 0",
            f"user = {getpass.getuser()}",
            f"swift_dir = {self.folder}",
            f"devices = {self.folder / 'disks'}",
            "mount_check = false",
            "disable_fallocate = true",
            f"recon_cache_path = {self.folder}",
            f"log_address = {self.folder / 'nowhere'}",
            "log_level = ERROR",
            "[pipeline:main]",
            f"pipeline = {' '.join(pipeline)}",
            f"[app:{name}-server]",
            f"use = egg:swift#{name}",
        ]
        if name == "proxy":
            lines += ["account_autocreate = true", "allow_account_management = true"]
            for filter_name, settings in _FILTERS.items():
                lines += [f"[filter:{filter_name}]", f"use = egg:swift#{filter_name}", settings]
        return "\n".join([*lines, "[container-updater]", ""])
