"""Wires: connections between the ranks of a job, by which chunks are passed on."""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from contextlib import suppress

from .addresses import own_address

log = logging.getLogger("tierstate")

TOKEN = 16
LOST = (1 << 64) - 1
HELLO = struct.Struct(f"<{TOKEN}sI")
HEAD = struct.Struct("<QQ")
GREETING = 10.0
"""Seconds in which a connection is made, and in which whoever makes it says who it is."""


class Door:
    """Where chunks for this rank arrive.

    Args:
        hosts: how many hosts the team is on.

    Attributes:
        address: host, port and token, as the others need it.
    """

    def __init__(self, hosts: int) -> None:
        self.listener = socket.create_server((own_address(hosts), 0), backlog=1024)
        self.token = secrets.token_bytes(TOKEN)
        host, port = self.listener.getsockname()
        self.address = f"{host} {port} {self.token.hex()}"

    def close(self) -> None:
        """Nobody is let in any more."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which wakes whoever waits there
        self.listener.close()


class Line:
    """The connection to one rank, opened with the first chunk for it.

    Attributes:
        broken: whether anything has failed; nothing more is sent then.
    """

    def __init__(self, me: int, rank: int, address: str, patience: float) -> None:
        self._me, self._rank, self._address, self._patience = me, rank, address, patience
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.broken = False

    def send(self, row: int, data: memoryview | None) -> None:
        """Send a chunk, or word that it is lost; nothing, once anything has failed."""
        with self._lock:
            if self.broken:
                return
            try:
                connection = self._connection = self._connection or self._connect()
                connection.sendall(HEAD.pack(row, LOST if data is None else len(data)))
                if data is not None:
                    connection.sendall(data)
            except OSError as error:
                self.broken = True
                log.warning("nothing more is passed on to rank %d: %s", self._rank, error)

    def _connect(self) -> socket.socket:
        host, port, token = self._address.split(" ")
        connection = socket.create_connection((host, int(port)), min(GREETING, self._patience))
        connection.settimeout(self._patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HELLO.pack(bytes.fromhex(token), self._me))
        return connection

    def close(self) -> None:
        """Say no more."""
        with self._lock:
            self.broken = True
            if self._connection is not None:
                self._connection.close()


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes of a connection; raises OSError if it ends before."""
    data = bytearray(nbytes)
    fill(connection, memoryview(data))
    return bytes(data)


def fill(connection: socket.socket, out: memoryview) -> None:
    """Receive all of these bytes; raises OSError if the connection ends before."""
    at = 0
    while at < len(out):
        got = connection.recv_into(out[at:])
        if not got:
            raise OSError("the connection was closed by the other side")
        at += got
