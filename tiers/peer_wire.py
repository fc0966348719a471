"""What two hosts say to each other about the objects in their memory: messages of bounded length over one connection.

A connection begins with each side proving that it knows the keeper's token, which itself is never sent::

    keeper  magic, nonce of 32 bytes
    client  nonce of 32 bytes, HMAC-SHA256(token, "client" + both nonces)
    keeper  HMAC-SHA256(token, "keeper" + both nonces)

Then the client asks and the keeper answers, one message at a time::

    question  magic (4), operation (1), length of the key (2), length of the body (4); key, body, xxh3-128 of all of it
    answer    magic (4), status (1), length of the body (4); body, xxh3-128 of all of it

All numbers are big-endian. No key is longer than a tier's, no body than `PIECE`; longer things go in several messages.
The bytes that a client reads are no body: they follow the answer to `Ask.READ`, which says how many they are, straight
from the memory, `LENT` at most. Whoever reads them has digests to check them by; a message has its checksum.
Before the proof nothing is taken in but its 64 bytes. There is no pickle, and nothing is allocated by a length that was
not checked.
"""

from __future__ import annotations

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

from .base import MAX_KEY

MAGIC = b"TSP2"
PIECE = 4 << 20
"""Bytes that one message carries at most."""

LENT = 16 << 20
"""Bytes of objects that follow one answer at most."""

NONCE = 32
"""Bytes of what each side draws at random, and of a proof."""

SPAN = struct.Struct("!qQ")
"""A range of an object: offset and length."""

LENGTH = struct.Struct("!Q")
TERMS = struct.Struct("!Qd")
"""Capacity in bytes, 0 for none, and seconds without use after which the keeper ends."""

SECONDS = struct.Struct("!d")

_QUESTION = struct.Struct("!4sBHI")
_ANSWER = struct.Struct("!4sBI")
_SUM = 16


class Ask(IntEnum):
    """What a client may ask for."""

    STATUS, LIST, SIZE, AGE, READ, DELETE, STAGE, PIECE, COMMIT, UNDO, TERMS, STOP = range(1, 13)


class Foreign(ValueError):
    """Bytes that are no message of ours, or that changed on their way."""


KINDS: tuple[type[TierstateError], ...] = (
    TierError,
    AlreadyExists,
    NotFound,
    TierFull,
    TierUnavailable,
    AccessDenied,
    Damaged,
)
"""What goes wrong at a keeper, by the status of its answer, from 1; 0 is all is well."""


class Question(NamedTuple):
    """What a client asks. The body is valid until the next message."""

    ask: int
    key: str
    body: memoryview


class Line:
    """One end of a connection.

    Args:
        wire: the socket; it belongs to the line.
        seconds: in which a message must have come or gone as a whole, before the other side is given up.
    """

    def __init__(self, wire: socket.socket, seconds: float) -> None:
        self.wire, self.seconds = wire, seconds
        # The kernel counts the time: so one call moves all that it is told to, with no turn of this process's between.
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
        """From now on counts the time that a message may take."""
        self._end = time.monotonic() + self.seconds

    @contextmanager
    def _waiting(self, option: int) -> Iterator[None]:
        """A call that waits as long as the message may still take."""
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
        """Receive exactly so many bytes, straight into their place."""
        at = 0
        while at < len(out):
            with self._waiting(socket.SO_RCVTIMEO):
                n = self.wire.recv_into(out[at:], 0, socket.MSG_WAITALL)
            if not n:
                raise ConnectionResetError("the other side has closed the connection")
            at += n

    def lend(self, data: memoryview) -> None:
        """Send bytes that follow an answer."""
        for at in range(0, len(data), PIECE):
            self.begin()
            self.send(data[at : at + PIECE])

    def borrow(self, out: memoryview) -> None:
        """Receive bytes that follow an answer, straight into their place."""
        for at in range(0, len(out), PIECE):
            self.begin()
            self.fill(out[at : at + PIECE])

    def take(self, nbytes: int) -> bytes:
        """Receive exactly so many bytes."""
        out = bytearray(nbytes)
        self.fill(memoryview(out))
        return bytes(out)

    def _check(self, *parts: bytes | memoryview) -> None:
        if self.take(_SUM) != checksum_of(*parts):
            raise Foreign("a message has changed on its way: its checksum is another")

    # Messages

    def question(self, idle: float) -> Question | None:
        """The next one; None where the other side has gone, or has asked nothing for so many seconds."""
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
        if magic != MAGIC or length > MAX_KEY or nbytes > PIECE:
            raise Foreign("no question of ours")
        key = self.take(length)
        if len(self._body) < nbytes:
            self._body = memoryview(bytearray(nbytes))
        body = self._body[:nbytes]
        self.fill(body)
        self._check(head, key, body)
        return Question(ask, key.decode("ascii", "replace"), body)

    def answer(self, body: bytes | memoryview = b"", status: int = 0) -> None:
        """Answer the last question."""
        self.begin()
        head = _ANSWER.pack(MAGIC, status, len(body))
        self.send(head, body, checksum_of(head, body))

    def ask(self, ask: Ask, key: str = "", body: bytes | memoryview = b"") -> bytes:
        """Ask, and have the body of the answer.

        Raises:
            TierstateError: what the keeper could not do.
            Foreign, OSError: there was no answer.
        """
        self.post(ask, key, body)
        return self.reply()

    def ask_into(self, ask: Ask, key: str, body: bytes, outs: Sequence[memoryview]) -> None:
        """Ask, and have the bytes that follow the answer written into these buffers, which they fill exactly.

        Raises: as `ask`.
        """
        said, wanted = self.ask(ask, key, body), sum(map(len, outs))
        if said != LENGTH.pack(wanted):
            raise Foreign(f"other bytes came than the {wanted} that were asked for")
        for out in outs:
            self.borrow(out)

    def post(self, ask: Ask, key: str, body: bytes | memoryview) -> None:
        """Ask, and go on; each question has its `reply`, in order."""
        self.begin()
        name = key.encode("ascii")
        head = _QUESTION.pack(MAGIC, ask, len(name), len(body))
        self.send(head, name, body, checksum_of(head, name, body))

    def reply(self) -> bytes:
        """The body of the next answer.

        Raises: as `ask`.
        """
        self.begin()
        head = self.take(_ANSWER.size)
        magic, status, nbytes = _ANSWER.unpack(head)
        if magic != MAGIC or nbytes > PIECE or status > len(KINDS):
            raise Foreign("no answer of ours")
        if status:
            text = self.take(nbytes)
            self._check(head, text)
            raise KINDS[status - 1](text.decode(errors="replace"))
        found = self.take(nbytes)
        self._check(head, found)
        return found


def _timeval(seconds: float) -> bytes:
    """Seconds, as the kernel has them; never 0, which is for ever."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", *divmod(micros, 1_000_000))


def status_of(error: BaseException) -> int:
    """The status that tells of an error."""
    return next((n for n, kind in enumerate(KINDS, 1) if type(error) is kind), 1)


def checksum_of(*parts: bytes | memoryview) -> bytes:
    """The xxh3-128 of some bytes."""
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part)
    return found.digest()
