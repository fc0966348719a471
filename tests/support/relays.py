"""A relay between two processes that records, changes, cuts or sends back what passes through it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Edit = Callable[[int, bytes], bytes]
"""Takes where bytes begin in what one side sends, and the bytes; returns what is passed on."""


def unchanged(_at: int, data: bytes) -> bytes:
    """The bytes as they came."""
    return data


class Relay:
    """Listens, and passes everything on to a server.

    Args:
        port: of the server, on the loopback interface.
        to_server, to_client: what is done to the bytes on their way.

    Attributes:
        port: where it listens.
        from_client, from_server: all bytes that came.
    """

    def __init__(self, port: int, to_server: Edit = unchanged, to_client: Edit = unchanged) -> None:
        self._server = port
        self._edits = to_server, to_client
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.from_client, self.from_server = bytearray(), bytearray()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._sockets += [client, server]
                ways = [
                    (client, server, self._edits[0], self.from_client),
                    (server, client, self._edits[1], self.from_server),
                ]
                for way in ways:
                    thread = threading.Thread(target=self._pass_on, args=way, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, edit: Edit, record: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                at = len(record)
                record += data
                sink.sendall(edit(at, data))
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections and threads."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def flipped_at(position: int, bit: int) -> Edit:
    """Turns one bit of the byte at a position."""

    def edit(at: int, data: bytes) -> bytes:
        n = position - at
        if not 0 <= n < len(data):
            return data
        return data[:n] + bytes([data[n] ^ 1 << bit]) + data[n + 1 :]

    return edit
