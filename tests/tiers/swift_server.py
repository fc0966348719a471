"""A real S3 server for tests: OpenStack Swift with its s3api, in four processes on the loopback interface.

Its Python is ``$TIERSTATE_SWIFT_PYTHON``, or ``.venv-swift/bin/python`` in the checkout, which is made (with
``pip install swift``) where it is missing. Swift answers ``If-None-Match: *`` with 412, but not atomically.
"""

import fcntl
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY, SECRET = "test:tester", "testing"
SERVERS = ("account", "container", "object", "proxy")
START_SECONDS = 60

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
    "s3api": "location = us-east-1\ns3_acl = false",
    "tempauth": f"user_{KEY.replace(':', '_')} = {SECRET} .admin",
    "bulk": "",
    "slo": "",
    "versioned_writes": "",
}


def find_python() -> Path:
    """A Python that has Swift; installs it where that was not done yet."""
    if given := os.environ.get("TIERSTATE_SWIFT_PYTHON"):
        return Path(given)
    venv = ROOT / ".venv-swift"
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


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Swift:
    """A server with one disk, which is a folder. Ended by `stop`, which kills its processes.

    Args:
        folder: where configuration, logs and data go.
        python: a Python that has Swift.
    """

    def __init__(self, folder: Path, python: Path) -> None:
        self._folder, self._bin = folder, python.parent
        self._ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._configure(python)

    @property
    def endpoint(self) -> str:
        """What S3 clients call ``endpoint_url``."""
        return f"http://127.0.0.1:{self._ports['proxy']}"

    def options(self) -> dict[str, Any]:
        """What s3fs wants to know."""
        return {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def _configure(self, python: Path) -> None:
        (self._folder / "disks" / "disk").mkdir(parents=True)
        (self._folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tierstate\n")
        for name in SERVERS:
            (self._folder / f"{name}.conf").write_text(self._config(name))
        rings = [f"{name}={self._ports[name]}" for name in SERVERS[:-1]]
        subprocess.run([python, "-c", _RINGS, self._folder, *rings], check=True)

    def _config(self, name: str) -> str:
        pipeline = [*_FILTERS, "proxy-server"] if name == "proxy" else [f"{name}-server"]
        lines = [
            "[DEFAULT]",
            "bind_ip = 127.0.0.1",
            f"bind_port = {self._ports[name]}",
            "workers = 0",
            f"user = {getpass.getuser()}",
            f"swift_dir = {self._folder}",
            f"devices = {self._folder / 'disks'}",
            "mount_check = false",
            "disable_fallocate = true",
            f"recon_cache_path = {self._folder}",
            f"log_address = {self._folder / 'nowhere'}",
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

    def start(self) -> None:
        """Start the processes, and wait until every one answers."""
        for name in SERVERS:
            with open(self._folder / f"{name}.out", "ab") as out:
                command = [self._bin / f"swift-{name}-server", self._folder / f"{name}.conf"]
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
                )
        deadline = time.monotonic() + START_SECONDS
        for name, process in zip(SERVERS, self._processes, strict=True):
            while not self._answers(name):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"Swift's {name} server does not answer: {(self._folder / f'{name}.out').read_text()}")
                time.sleep(0.05)

    def _answers(self, name: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._ports[name]), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """Kill the processes: what they were asked to keep is on disk."""
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()
