"""The wire protocol of peer memory: handshake, requests and responses of bounded length over one TCP connection.

The *keeper* is the server process of a host. In the handshake each side proves that it knows the keeper's token (a
challenge-response by HMAC); the token itself is never sent::

    keeper  magic, nonce of 32 bytes
    client  nonce of 32 bytes, HMAC-SHA256(token, "client" + both nonces)
    keeper  HMAC-SHA256(token, "keeper" + both nonces)

Then the client sends requests and the keeper responds to each, in order (lengths in bytes)::

    request   magic (4), operation (1), length of the key (2), length of the body (4); key, body, xxh3-128 of all of it
    response  magic (4), status (1), length of the body (4); body, xxh3-128 of all of it

All numbers are big-endian. A key has at most `MAX_KEY` bytes and a body at most `MAX_BODY`; longer data go in several
messages. The bytes of objects that a client reads are not a body: they follow the response to `RequestKind.READ`, which
gives their number, `MAX_READ` at most. They are sent directly from the memory and without a checksum, since their
reader compares chunk digests. All other messages have a checksum. Before the handshake is done a keeper reads its 64
bytes and no more. Nothing is pickled, and no memory is allocated for a length that was not checked.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Self

import xxhash

from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    Damaged,
    NotFound,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
)
from tierstate.tiers.base import MAX_KEY

MAGIC = b"TSP2"
"""Begins every message; the digit is the protocol's version."""


MAX_BODY = 4 << 20
"""Bytes of a message's body, at most."""


MAX_READ = 16 << 20
"""Bytes of objects that follow one response, at most."""


NONCE = 32
"""Bytes of the random number of each side, and of a proof (HMAC-SHA256)."""


SPAN = struct.Struct("!qQ")
"""A range of an object: offset and length."""


LENGTH = struct.Struct("!Q")
"""A length in bytes."""


SETTINGS = struct.Struct("!Qd")
"""Capacity in bytes, 0 for no limit, and seconds without use after which the keeper ends."""


SECONDS = struct.Struct("!d")
"""An age in seconds; negative for an unknown one."""


_QUESTION = struct.Struct("!4sBHI")


_ANSWER = struct.Struct("!4sBI")


_SUM = 16


ERROR_KINDS: tuple[type[TierstateError], ...] = (
    TierError,
    AlreadyExists,
    NotFound,
    TierFull,
    TierUnavailable,
    AccessDenied,
    Damaged,
)
"""The error classes by the status of a response, from 1 on; status 0 is success."""


class RequestKind(IntEnum):
    """The operations that a client may request."""

    STATUS, LIST, SIZE, AGE, READ, DELETE, STAGE, PIECE, COMMIT, UNDO, TERMS, STOP = range(1, 13)


class ProtocolError(ValueError):
    """Bytes that are not a message of this protocol, or whose checksum differs."""


class Request(NamedTuple):
    """A client's request: operation, key and body. The body is valid until the next message is received."""

    ask: int
    key: str
    body: memoryview


class Connection:
    """One end of a connection: sends and receives messages.

    Args:
        wire: the connected socket; `close` closes it.
        seconds: timeout for sending or receiving one whole message.
    """

    def __init__(self, wire: socket.socket, seconds: float) -> None:
        self.wire, self.seconds = wire, seconds
        # The kernel keeps the timeouts (SO_RCVTIMEO, SO_SNDTIMEO), so one system call on a blocking socket moves all
        # bytes; with a timeout of Python's the socket would not block, and each part would need a call of its own.
        wire.settimeout(None)
        self._end = 0.0
        self._body = memoryview(b"")
        if wire.family != socket.AF_UNIX:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Bytes

    def begin(self) -> None:
        """Start the timeout of a message."""
        self._end = time.monotonic() + self.seconds

    @contextmanager
    def _waiting(self, option: int) -> Iterator[None]:
        """The block makes one call to the socket, with what is left of the message's timeout."""
        left = self._end - time.monotonic()
        try:
            if left <= 0:
                raise BlockingIOError
            self.wire.setsockopt(socket.SOL_SOCKET, option, _timeval(left))
            yield
        except BlockingIOError:
            raise TimeoutError(f"no whole message in {self.seconds:g} s") from None

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all these bytes."""
        rest = [memoryview(part) for part in parts if len(part)]
        while rest:
            with self._waiting(socket.SO_SNDTIMEO):
                sent = self.wire.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def fill(self, out: memoryview) -> None:
        """Receive exactly ``len(out)`` bytes, directly into ``out``."""
        at = 0
        while at < len(out):
            with self._waiting(socket.SO_RCVTIMEO):
                n = self.wire.recv_into(out[at:], 0, socket.MSG_WAITALL)
            if not n:
                raise ConnectionResetError("the other side has closed the connection")
            at += n

    def lend(self, data: memoryview) -> None:
        """Send the bytes of an object that follow a response."""
        for at in range(0, len(data), MAX_BODY):
            self.begin()
            self.send(data[at : at + MAX_BODY])

    def borrow(self, out: memoryview) -> None:
        """Receive the bytes of an object that follow a response, directly into ``out``."""
        for at in range(0, len(out), MAX_BODY):
            self.begin()
            self.fill(out[at : at + MAX_BODY])

    def take(self, nbytes: int) -> bytes:
        """Receive exactly ``nbytes`` bytes."""
        out = bytearray(nbytes)
        self.fill(memoryview(out))
        return bytes(out)

    def _check(self, *parts: bytes | memoryview) -> None:
        if self.take(_SUM) != checksum_of(*parts):
            raise ProtocolError("a message has changed on its way: its checksum is another")

    # Messages

    def question(self, idle: float) -> Request | None:
        """Receive the next request, in the keeper.

        Returns:
            The request; None if the client has closed the connection, or sent nothing for ``idle`` seconds.

        Raises:
            ProtocolError: the bytes are not a request.
            OSError: the connection failed, or the request did not come as a whole in time.
        """
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(idle))
        try:
            first = self.wire.recv(1)
        except BlockingIOError:
            return None
        if not first:
            return None
        self.begin()
        head = first + self.take(_QUESTION.size - 1)
        magic, ask, length, nbytes = _QUESTION.unpack(head)
        if magic != MAGIC or length > MAX_KEY or nbytes > MAX_BODY:
            raise ProtocolError("no question of ours")
        key = self.take(length)
        if len(self._body) < nbytes:
            self._body = memoryview(bytearray(nbytes))
        body = self._body[:nbytes]
        self.fill(body)
        self._check(head, key, body)
        return Request(ask, key.decode("ascii", "replace"), body)

    def answer(self, body: bytes | memoryview = b"", status: int = 0) -> None:
        """Send the response to the last request, in the keeper."""
        self.begin()
        head = _ANSWER.pack(MAGIC, status, len(body))
        self.send(head, body, checksum_of(head, body))

    def ask(self, ask: RequestKind, key: str = "", body: bytes | memoryview = b"") -> bytes:
        """Send a request, and return the body of the response.

        Raises:
            TierstateError: the keeper responded with this error.
            ProtocolError, OSError: there was no valid response.
        """
        self.post(ask, key, body)
        return self.reply()

    def ask_into(self, ask: RequestKind, key: str, body: bytes, outs: Sequence[memoryview]) -> None:
        """Send a request, and receive the bytes that follow the response into these buffers, which they fill exactly.

        Raises: as `ask`.
        """
        said, wanted = self.ask(ask, key, body), sum(map(len, outs))
        if said != LENGTH.pack(wanted):
            raise ProtocolError(f"other bytes came than the {wanted} that were asked for")
        for out in outs:
            self.borrow(out)

    def post(self, ask: RequestKind, key: str, body: bytes | memoryview) -> None:
        """Send a request without waiting (pipelining). The responses come in order, by one `reply` for each request."""
        self.begin()
        name = key.encode("ascii")
        head = _QUESTION.pack(MAGIC, ask, len(name), len(body))
        self.send(head, name, body, checksum_of(head, name, body))

    def reply(self) -> bytes:
        """Receive the next response, and return its body.

        Raises: as `ask`.
        """
        self.begin()
        head = self.take(_ANSWER.size)
        magic, status, nbytes = _ANSWER.unpack(head)
        if magic != MAGIC or nbytes > MAX_BODY or status > len(ERROR_KINDS):
            raise ProtocolError("no answer of ours")
        if status:
            text = self.take(nbytes)
            self._check(head, text)
            raise ERROR_KINDS[status - 1](text.decode(errors="replace"))
        found = self.take(nbytes)
        self._check(head, found)
        return found


def _timeval(seconds: float) -> bytes:
    """Seconds as the kernel's ``struct timeval``; never 0, which would mean no timeout."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", *divmod(micros, 1_000_000))


def status_of(error: BaseException) -> int:
    """The status of a response for an error; 1 (`TierError`) for classes that are not in `ERROR_KINDS`."""
    return next((n for n, kind in enumerate(ERROR_KINDS, 1) if type(error) is kind), 1)


def checksum_of(*parts: bytes | memoryview) -> bytes:
    """The xxh3-128 checksum of all parts together, 16 bytes."""
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part)
    return found.digest()


def server_handshake(line: Connection, token: bytes) -> bool:
    """The keeper's side of the handshake; returns whether the client knows the token."""
    line.begin()
    mine = secrets.token_bytes(NONCE)
    line.send(MAGIC, mine)
    theirs, proof = line.take(NONCE), line.take(NONCE)
    if not hmac.compare_digest(proof, _proof(token, b"client", mine, theirs)):
        return False
    line.send(_proof(token, b"keeper", mine, theirs))
    return True


def client_handshake(line: Connection, token: bytes) -> None:
    """The client's side of the handshake.

    Raises:
        ProtocolError: the server is not a keeper, or does not know the token.
        OSError: there was no response, or the keeper closed the connection, as it does if our token is wrong.
    """
    line.begin()
    if line.take(len(MAGIC)) != MAGIC:
        raise ProtocolError("what listens there is no keeper, or one of another version of this program")
    theirs, mine = line.take(NONCE), secrets.token_bytes(NONCE)
    line.send(mine, _proof(token, b"client", theirs, mine))
    if not hmac.compare_digest(line.take(NONCE), _proof(token, b"keeper", theirs, mine)):
        raise ProtocolError("what listens there does not know the token")


def _proof(token: bytes, who: bytes, keepers: bytes, clients: bytes) -> bytes:
    return hmac.digest(token, who + keepers + clients, "sha256")
