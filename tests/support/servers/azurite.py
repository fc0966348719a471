"""Azurite, Microsoft's emulator of Azure's blob storage: one process of Node.js (``npm install --global azurite``)."""

from __future__ import annotations

import base64
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from support.ports import free_ports
from support.servers.daemons import Daemons

ACCOUNT, KEY = "tierstate", base64.b64encode(bytes(64)).decode()


class NoAzurite(RuntimeError):
    """A program or package is missing; the message says how to install it."""


class Azurite(Daemons):
    """A server that keeps its objects in memory. `create` starts it.

    Args:
        folder: where its log goes; must exist and be empty.

    Raises:
        NoAzurite
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if (found := shutil.which("azurite-blob")) is None:
            raise NoAzurite("needs azurite: npm install --global azurite")
        if importlib.util.find_spec("adlfs") is None:
            raise NoAzurite("needs adlfs: pip install adlfs")
        (self.port,) = free_ports(1)
        self.ports = {"azurite": self.port}
        listen = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        quiet = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        self.commands = {"azurite": ["env", f"AZURITE_ACCOUNTS={ACCOUNT}:{KEY}", found, *listen, *quiet]}

    def options(self) -> dict[str, Any]:
        """What adlfs wants to know."""
        where = f"BlobEndpoint=http://127.0.0.1:{self.port}/{ACCOUNT}"
        text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{where};"
        return {"connection_string": text}

    def create(self, container: str) -> None:
        """Start it, and make a container.

        Raises:
            DidNotStart
        """
        self.start()
        import fsspec

        fsspec.filesystem("abfs", skip_instance_cache=True, **self.options()).mkdir(container)
