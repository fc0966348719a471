"""Simulated hosts: connected network namespaces of this machine; all processes of a host can be killed at once.

Needs root and the right to make namespaces; `reason()` says why not where it cannot be.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self


def reason() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (iproute2)"
    name = f"ts-{uuid.uuid4().hex[:8]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    _ip("netns", "delete", name)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Two hosts with one cable.

    Attributes:
        names: of the namespaces.
        addresses: of each host on the cable.
        interfaces: the end of the cable in each.
    """

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:6]
        self.names = [f"ts-{tag}-{i}" for i in range(2)]
        self.interfaces = [f"tv{tag}{i}" for i in range(2)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(2)]

    def __enter__(self) -> Self:
        with ExitStack() as undone:
            undone.push(self.__exit__)
            self._join()
            undone.pop_all()
        return self

    def _join(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def inside(self, host: int) -> list[str]:
        """What a command is begun with, to run on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def environment(self, host: int) -> dict[str, str]:
        """What its processes are to find in their environment."""
        return {
            "MASTER_ADDR": self.addresses[0],
            "GLOO_SOCKET_IFNAME": self.interfaces[host],
            "TIERSTATE_HOST": self.names[host],
            "TIERSTATE_ADDRESS": self.addresses[host],
        }

    def silence(self, host: int) -> None:
        """From now on nothing that a host sends arrives, not even that a connection is closed."""
        _ip("-n", self.names[host], "rule", "add", "blackhole", "priority", "1")

    def mend(self, host: int) -> None:
        """Let a host be heard again."""
        _ip("-n", self.names[host], "rule", "delete", "priority", "1")

    def lose(self, host: int) -> None:
        """SIGKILL everything that runs on a host, until nothing does."""
        while pids := self._pids(host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _pids(self, host: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, check=True, text=True)
        alive = []
        for pid in map(int, found.stdout.split()):
            try:
                with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
                    if stat.read().rpartition(")")[2].split()[0] != "Z":
                        alive.append(pid)
            except OSError:
                pass
        return alive

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True, text=True).stdout.split()
        for host, name in enumerate(self.names):
            if name in there:
                self.lose(host)
                _ip("netns", "delete", name)
