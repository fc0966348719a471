"""The wire protocol of peer memory: requests and responses of bounded length over one authenticated connection.

The *keeper* is the server process of a host. A connection to it begins with the handshake of
`tierstate.tiers.connections.channel`, by which each side proves that it knows the job's secret; each message is a
record of that channel, so nothing is taken that another process has sent or changed. The client sends requests and the
keeper responds to each, in order (lengths in bytes)::

    request   operation (1), length of the key (2); key, body
    response  status (1); body

All numbers are big-endian. A key has at most `MAX_KEY` bytes and a body at most `MAX_BODY`; longer data go in several
messages. The bytes of objects that a client reads are not a body: they follow the response to `RequestKind.READ`, which
gives their number, `MAX_READ` at most, as records of the channel, and go directly from memory to memory. Nothing is
pickled, no memory is allocated for a length that was not checked, and every number of a request is checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Self

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
from tierstate.tiers.connections.channel import Channel

MAX_BODY = 4 << 20
"""Bytes of a message's body, at most."""


MAX_READ = 16 << 20
"""Bytes of objects that follow one response, at most."""


SPAN = struct.Struct("!qQ")
"""A range of an object: offset and length."""


LENGTH = struct.Struct("!Q")
"""A length in bytes."""


SETTINGS = struct.Struct("!Qd")
"""Capacity in bytes, `NO_LIMIT` for none, and seconds without use after which the keeper ends."""


NO_LIMIT = (1 << 64) - 1


MAX_OBJECT = 1 << 50
"""Bytes of an object, and of a capacity, at most."""


MAX_IDLE = 400 * 86400.0
"""Seconds without use after which a keeper ends, at most."""


SECONDS = struct.Struct("!d")
"""An age in seconds; negative for an unknown one."""


_QUESTION = struct.Struct("!BH")


_ANSWER = struct.Struct("!B")


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

    STATUS, LIST, SIZE, AGE, READ, DELETE, STAGE, PIECE, COMMIT, UNDO, TERMS, STOP, HAND_OVER = range(1, 14)


class ProtocolError(ValueError):
    """A message of the other side that is none of this protocol."""


class Request(NamedTuple):
    """A client's request: operation, key and body. The body is valid until the next message is received."""

    ask: int
    key: str
    body: memoryview


class Connection:
    """One end of a connection: sends and receives messages.

    Args:
        channel: the authenticated connection; `close` closes it.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # In the keeper

    def question(self) -> Request:
        """Receive the next request.

        Raises:
            ProtocolError: the message is not a request.
            OSError: the connection failed, or the request did not come as a whole in time.
        """
        message = self.channel.receive()
        if len(message) < _QUESTION.size:
            raise ProtocolError("a request that is too short for one")
        ask, length = _QUESTION.unpack(message[: _QUESTION.size])
        start = _QUESTION.size + length
        if length > MAX_KEY or not 0 <= len(message) - start <= MAX_BODY:
            raise ProtocolError("a request with a key or body of a length that none has")
        key = bytes(message[_QUESTION.size : start]).decode("ascii", "replace")
        return Request(ask, key, message[start:])

    def answer(self, body: bytes | memoryview = b"", status: int = 0) -> None:
        """Send the response to the last request."""
        self.channel.send(_ANSWER.pack(status), body)

    # In the client

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
            self.channel.receive_long(out)

    def post(self, ask: RequestKind, key: str, body: bytes | memoryview) -> None:
        """Send a request without waiting (pipelining). The responses come in order, by one `reply` for each request."""
        name = key.encode("ascii")
        self.channel.send(_QUESTION.pack(ask, len(name)), name, body)

    def reply(self) -> bytes:
        """Receive the next response, and return its body.

        Raises: as `ask`.
        """
        message = self.channel.receive()
        status = message[0] if len(message) else 255
        if status > len(ERROR_KINDS):
            raise ProtocolError("a response of a status that none has")
        found = bytes(message[_ANSWER.size :])
        if status:
            raise ERROR_KINDS[status - 1](found.decode(errors="replace"))
        return found


def checked_length(nbytes: int) -> int:
    """A length of an object, if it is one. Raises TierError else."""
    if not 0 <= nbytes <= MAX_OBJECT:
        raise TierError(f"an object of {nbytes} bytes; {MAX_OBJECT} are the most")
    return nbytes


def checked_capacity(nbytes: int | None) -> int | None:
    """A capacity in bytes, if it is one; None is no limit. Raises TierError else."""
    if nbytes is not None and not 0 < nbytes <= MAX_OBJECT:
        raise TierError(f"a capacity of {nbytes} bytes; right are 1 to {MAX_OBJECT}")
    return nbytes


def checked_idle(seconds: float) -> float:
    """Seconds without use, if they are a time. Raises TierError else."""
    if not math.isfinite(seconds) or not 0 < seconds <= MAX_IDLE:
        raise TierError(f"an idle time of {seconds} s; right is more than 0 and at most {MAX_IDLE:g}")
    return seconds


def status_of(error: BaseException) -> int:
    """The status of a response for an error; 1 (`TierError`) for classes that are not in `ERROR_KINDS`."""
    return next((n for n, kind in enumerate(ERROR_KINDS, 1) if type(error) is kind), 1)
