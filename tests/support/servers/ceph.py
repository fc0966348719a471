"""A real Ceph on the loopback interface: one monitor, one object storage daemon, and its S3 gateway.

Needs the packages ``ceph-mon ceph-osd radosgw``, which `install` installs where that is possible. The gateway lets
exactly one of several racing ``If-None-Match: *`` win on a plain PUT, and ignores the condition when an upload in
parts is completed.
"""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path
from typing import Any

from support.ports import free_ports
from support.servers import packages
from support.servers.daemons import Daemons

KEY, SECRET, REGION = "tierstate-key", "tierstate-secret", "us-east-1"
PACKAGES = ("ceph-mon", "ceph-osd", "radosgw")
"""Debian's packages; each is also the name of the program in it."""

_CALL_SECONDS = 60

_GLOBAL = """
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon max pg per osd = 1000
mon osd nearfull ratio = .97
mon osd backfillfull ratio = .975
mon osd full ratio = .98
osd failsafe full ratio = .99
mon data avail warn = 2
mon data avail crit = 1
mon tick interval = 1
paxos propose interval = .01
paxos min wait = .005
pid file =
admin socket =
"""
"""No keys between the parts, one copy of everything, a nearly full disk of the host is fine, and quick decisions."""

_STORAGE = """
osd objectstore = bluestore
bluestore block size = 20000000000
bluestore block create = true
bluestore cache size = 134217728
bluestore cache autotune = false
osd memory target = 939524096
osd class update on start = false
"""
"""The block device is a sparse file, so the disk gives only what is written."""

_GATEWAY = """
ms mon client mode = crc
auth client required = none
rgw thread pool size = 64
rgw enable usage log = false
rgw run sync thread = false
rgw gc obj min wait = 2
rgw gc processor period = 5
"""


def install(*names: str) -> None:
    """Make sure that the programs of these packages are there.

    Args:
        names: packages whose program has the same name; none means `PACKAGES`.

    Raises:
        NotInstallable
    """
    packages.install("Ceph", {name: name for name in names or PACKAGES})


def _section(name: str, lines: str) -> str:
    return f"[{name}]\n{lines.strip()}\n\n"


class Ceph(Daemons):
    """A cluster in a folder. `create` makes it and starts it; `kill` and `start` take names of its parts.

    The parts are ``mon``, ``osd`` and ``rgw``. To add one: extend ``commands`` (and ``ports``) after the constructor,
    give `config` another section, and `start` it.

    Args:
        folder: where everything of it goes; must exist and be empty.

    Attributes:
        conf: the configuration's path, for ``-c`` of Ceph's programs.
        keyring: the path of its keys.
    """

    front = ("rgw",)
    """The parts that a client's requests die with."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.conf, self.keyring = folder / "ceph.conf", folder / "keyring"
        v2, v1, rgw = free_ports(3)
        self.monitor = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        self.fsid = str(uuid.uuid4())
        self.ports = {"mon": v2, "rgw": rgw}
        self.commands = {
            "mon": ["ceph-mon", "-c", self.conf, "-i", "a", "-f", "--public-addr", self.monitor],
            "osd": ["ceph-osd", "-c", self.conf, "-i", "0", "-f"],
            "rgw": ["radosgw", "-c", self.conf, "-n", "client.rgw", "-f"],
        }

    @property
    def endpoint(self) -> str:
        """What S3 clients call ``endpoint_url``."""
        return f"http://127.0.0.1:{self.ports['rgw']}"

    def options(self) -> dict[str, Any]:
        """What s3fs wants to know."""
        return {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"region_name": REGION},
        }

    def config(self) -> str:
        """The text of the configuration."""
        folder = self.folder
        return "".join(
            (
                _section(
                    "global",
                    f"fsid = {self.fsid}\nmon host = {self.monitor}\nkeyring = {self.keyring}\n"
                    f"run dir = {folder}\nlog file = {folder}/$name.log\n" + _GLOBAL.strip(),
                ),
                _section("mon", f"mon data = {folder}/mon"),
                _section("osd", f"osd data = {folder}/osd\n" + _STORAGE.strip()),
                _section(
                    "client.rgw",
                    f"rgw data = {folder}/rgw\n"
                    f"rgw frontends = beast endpoint=127.0.0.1:{self.ports['rgw']}\n" + _GATEWAY.strip(),
                ),
            )
        )

    def create(self) -> None:
        """Make the cluster and start its parts; the gateway has one user.

        Raises:
            DidNotStart
            subprocess.CalledProcessError: a step failed.
        """
        self.conf.write_text(self.config())
        for name in ("osd", "rgw"):
            (self.folder / name).mkdir()
        self._make_monitor()
        self.start("mon")
        self._make_storage()
        self.start("osd", "rgw")
        user = ["user", "create", "--uid", "tierstate", "--display-name", "tierstate"]
        self.call("radosgw-admin", "-c", self.conf, *user, "--access-key", KEY, "--secret", SECRET)

    def _make_monitor(self) -> None:
        key: list[str | Path] = ["--create-keyring", self.keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"]
        self.call("ceph-authtool", *key)
        table = self.folder / "monmap"
        self.call("monmaptool", "--create", "--clobber", "--fsid", self.fsid, "--addv", "a", self.monitor, table)
        self.call("ceph-mon", "-c", self.conf, "--mkfs", "-i", "a", "--monmap", table, "--keyring", self.keyring)

    def _make_storage(self) -> None:
        name = str(uuid.uuid4())
        self.ceph("osd", "new", name)
        self.call("ceph-osd", "-c", self.conf, "-i", "0", "--mkfs", "--osd-uuid", name)

    def ceph(self, *arguments: str | Path) -> str:
        """Run ``ceph`` on this cluster; what it printed.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        return self.call("ceph", "-c", self.conf, "--connect-timeout", "20", *arguments)

    def call(self, *command: str | Path) -> str:
        """Run one of Ceph's programs; what it printed."""
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_CALL_SECONDS)
        return done.stdout
