"""A listening socket that strangers cannot break: it lets through those connections that prove the job's secret.

A connection that has not proven itself (a *stranger*) costs a file descriptor and about a hundred bytes, no thread. All
strangers are served by the one thread that calls `Listener.poll`. They have few seconds for the proof. There are at
most `Limits.total` of them, and `Limits.per_source` from one address; for one more, the oldest of the address with the
most is dropped. So silent connections, however many, keep nobody out: a client that is dropped before its proof was
read connects again (`tierstate.tiers.connections.channel.connect`).

If the process runs out of file descriptors, connections are accepted by means of one that is kept in reserve, and
closed at once; the listener itself goes on.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from .channel import HELLO, MAGIC, NONCE, REFUSED, Channel, check_hello
from .secret import JobSecret

log = logging.getLogger("tierstate")


BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted, at most."""


AT_ONCE = 64
"""Connections that are accepted in one turn, so that proofs are read in between."""


TELL = 60.0
"""Seconds between two lines in the log about refused connections, at least, so that strangers cannot fill it."""


PAUSE = 0.05
"""Seconds without accepting, if there is no file descriptor left at all."""


_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


_PASSING = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EINTR, errno.EAGAIN, errno.EPERM, errno.ENETDOWN})
"""Errors of one connection, which ``accept`` reports; the next one may succeed."""


class Limits(NamedTuple):
    """How much room strangers get.

    Attributes:
        total: connections that have not proven themselves, at most.
        per_source: of these from one address.
        seconds: time for the proof.
    """

    total: int = 64
    per_source: int = 32
    seconds: float = 5.0


STRANGERS = Limits()
"""The room that strangers get, unless said otherwise."""


class Stranger:
    """A connection that has not proven itself."""

    __slots__ = ("end", "hello", "nonce", "source", "wire")

    def __init__(self, wire: socket.socket, source: str, end: float) -> None:
        self.wire, self.source, self.end = wire, source, end
        self.nonce, self.hello = secrets.token_bytes(NONCE), b""


class Listener:
    """Accepts connections, and returns those of processes of the job.

    Args:
        address, port: where to listen, by IPv4 or IPv6; port 0 for any.
        secret: returns the job's secret, for each connection anew; None: nobody is let in now.
        service: what this server is, as clients name it.
        seconds: timeout for a record of the connections that are let in.
        limits: for strangers.

    Raises:
        OSError: the port is taken, or the address is none of this host.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: Callable[[], JobSecret | None],
        service: str,
        *,
        seconds: float,
        limits: Limits = STRANGERS,
    ) -> None:
        self._secret, self._service, self._seconds, self._limits = secret, service, seconds, limits
        self.socket = listen(address, port)
        self.address, self.port = self.socket.getsockname()[:2]
        self.socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.socket, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, Stranger] = {}
        self._from: Counter[str] = Counter()
        self._reserve: int | None = None
        self._take_reserve()
        self._closed = False
        self._told = float("-inf")
        self._untold = 0

    @property
    def strangers(self) -> int:
        """Number of connections that have not proven themselves."""
        return len(self._strangers)

    def poll(self, seconds: float) -> list[Channel]:
        """Wait for connections; returns those that have proven themselves, soon after they did.

        Args:
            seconds: returns after so long at most, or when `stop` is called.

        Raises:
            OSError: the listening socket has failed, and no connection will come.
        """
        soonest = min((one.end for one in self._strangers.values()), default=float("inf"))
        found = []
        for key, _ in self._selector.select(max(0.0, min(seconds, soonest - time.monotonic()))):
            if key.fileobj is self.socket:
                self._accept()
            elif (stranger := self._strangers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                found += self._hear(stranger)
        now = time.monotonic()
        for late in [one for one in self._strangers.values() if one.end <= now]:
            self._drop(late)
        return found

    def stop(self) -> None:
        """Make `poll` return, and let nobody in any more. May be called by another thread."""
        self._closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the listening socket and all strangers; `poll` is not called afterwards."""
        self._closed = True
        self.socket.close()
        self._selector.close()
        for stranger in self._strangers.values():
            stranger.wire.close()
        self._strangers.clear()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    # Accepting

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._closed:
                return
            try:
                wire, address = self.socket.accept()
            except OSError as error:
                if error.errno in _TOO_MANY:
                    self._refuse_one()
                elif error.errno not in _PASSING and not self._closed:
                    raise
                return
            self._welcome(wire, source_of(address))

    def _welcome(self, wire: socket.socket, source: str) -> None:
        self._make_room(source)
        wire.setblocking(False)
        stranger = Stranger(wire, source, time.monotonic() + self._limits.seconds)
        try:
            wire.sendall(MAGIC + stranger.nonce)
        except OSError:
            wire.close()
            return
        self._selector.register(wire, selectors.EVENT_READ)
        self._strangers[wire] = stranger
        self._from[source] += 1

    def _make_room(self, source: str) -> None:
        """Drop a stranger if this address, or all together, have as many as they may."""
        if self._from[source] >= self._limits.per_source:
            self._drop_oldest(source)
        elif len(self._strangers) >= self._limits.total:
            self._drop_oldest(self._from.most_common(1)[0][0])

    def _drop_oldest(self, source: str) -> None:
        # A dict has its keys in the order in which they came.
        self._drop(next(one for one in self._strangers.values() if one.source == source))

    def _drop(self, stranger: Stranger) -> None:
        self._leave(stranger)
        stranger.wire.close()

    def _leave(self, stranger: Stranger) -> None:
        del self._strangers[stranger.wire]
        self._selector.unregister(stranger.wire)
        self._from[stranger.source] -= 1
        if not self._from[stranger.source]:
            del self._from[stranger.source]

    def _refuse_one(self) -> None:
        """No file descriptor is left: close the oldest stranger, or else the next connection, by the one in reserve."""
        if self._strangers:
            self._drop(next(iter(self._strangers.values())))
        elif self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
            with suppress(OSError):
                self.socket.accept()[0].close()
            self._take_reserve()
        else:
            time.sleep(PAUSE)
            self._take_reserve()

    def _take_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    # Proofs

    def _hear(self, stranger: Stranger) -> list[Channel]:
        """Read more of a stranger's proof; the channel, if it is complete and right."""
        try:
            got = stranger.wire.recv(HELLO - len(stranger.hello))
        except BlockingIOError:
            return []
        except OSError:
            got = b""
        stranger.hello += got
        if got and len(stranger.hello) < HELLO:
            return []
        self._leave(stranger)
        channel = self._check(stranger) if got else None
        if channel is None:
            stranger.wire.close()
        return [channel] if channel is not None else []

    def _check(self, stranger: Stranger) -> Channel | None:
        secret = self._secret()
        with suppress(OSError):
            if secret is not None and (found := check_hello(stranger.hello, stranger.nonce, secret, self._service)):
                keys, claim = found
                stranger.wire.sendall(keys.server_proof)
                return Channel(stranger.wire, self._seconds, keys.from_server, keys.from_client, claim, secret)
            self._tell(stranger.source)
            stranger.wire.sendall(REFUSED)
        return None

    def _tell(self, source: str) -> None:
        self._untold += 1
        if time.monotonic() - self._told > TELL:
            log.warning(
                "%d connections were refused, as they do not know the secret of the job; the last was from %s",
                self._untold,
                source,
            )
            self._told, self._untold = time.monotonic(), 0


def listen(address: str, port: int) -> socket.socket:
    """A listening socket at an address of IPv4 or IPv6.

    Raises:
        OSError: the port is taken, or the address is none of this host.
    """
    wire = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wire.bind((address, port))
        wire.listen(BACKLOG)
    except BaseException:
        wire.close()
        raise
    return wire


def source_of(address: tuple[object, ...]) -> str:
    """What counts as one source: an IPv4 address, or the /64 network of an IPv6 address, all of which one host has."""
    host = str(address[0])
    if ":" not in host:
        return host
    return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8] + bytes(8))
