"""One client of a keeper of peer memory: its connection, its requests and their answers."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from tierstate.manifest.errors import TierError, TierstateError
from tierstate.tiers.base import check_key, check_spans

from .local import LocalMemory, LocalWriter
from .protocol import (
    LENGTH,
    MAX_BODY,
    MAX_READ,
    NO_LIMIT,
    SECONDS,
    SETTINGS,
    SPAN,
    Connection,
    ProtocolError,
    Request,
    RequestKind,
    checked_capacity,
    checked_idle,
    checked_length,
    status_of,
)

CROWDED_SILENCE = 0.5
"""As `SILENCE`, while connections wait for a thread and none can be started."""


SILENCE = 30.0
"""Timeout in seconds for one whole message; a connection without a request for as long is closed."""


class SessionServer(Protocol):
    """What a session needs of its server; `PeerServer` is one.

    Attributes:
        kept: the objects of this host.
        used: when the server was last used, as `time.monotonic`.
        idle: seconds without use after which it ends.
        in_agent: whether it is part of an agent, and so no other keeper takes its place.
    """

    kept: LocalMemory
    used: float
    idle: float
    in_agent: bool

    def stop(self, *, keep: bool = False) -> None: ...

    def status(self) -> dict[str, Any]: ...

    @property
    def crowded(self) -> bool: ...


class Lent(NamedTuple):
    """Ranges of an object that are to be sent: its mapped bytes, offsets and lengths, and the mapping to close."""

    data: memoryview
    spans: Sequence[tuple[int, int]]
    held: ExitStack


class ClientSession:
    """Serves the requests of one connection. An object that is not committed when it ends is discarded.

    Args:
        house: the keeper.
        line: the connection, after its handshake.
    """

    def __init__(self, house: SessionServer, line: Connection) -> None:
        self._house, self._line, self._kept = house, line, house.kept
        self._lent: Lent | None = None
        self._writer: LocalWriter | None = None
        self._length = 0
        self._answers: dict[int, Callable[[Request], bytes]] = {
            RequestKind.STATUS: self._status,
            RequestKind.LIST: self._list,
            RequestKind.SIZE: self._size,
            RequestKind.AGE: self._age,
            RequestKind.READ: self._read,
            RequestKind.DELETE: self._delete,
            RequestKind.STAGE: self._stage,
            RequestKind.PIECE: self._piece,
            RequestKind.COMMIT: self._commit,
            RequestKind.UNDO: self._undo,
            RequestKind.TERMS: self._terms,
            RequestKind.STOP: self._stop,
            RequestKind.HAND_OVER: self._hand_over,
        }

    def serve(self) -> None:
        """Respond to requests until the client closes the connection or sends none for long.

        Raises:
            ProtocolError, OSError: an invalid request, or the connection has failed; it has to be closed.
        """
        while self._comes():
            question = self._line.question()
            if question.ask not in self._answers:
                raise ProtocolError(f"a question of unknown kind {question.ask}")
            try:
                body = self._answers[question.ask](question)
            except (TierstateError, ValueError, OSError, struct.error) as error:
                self._line.answer(str(error).encode()[:4096], status_of(error))
            else:
                self._line.answer(body)
                self._lend()
                if question.ask in (RequestKind.STOP, RequestKind.HAND_OVER):
                    self._house.stop(keep=question.ask == RequestKind.HAND_OVER)
                    return
            self._house.used = time.monotonic()

    def _comes(self) -> bool:
        """Wait for a request; False if the client has closed the connection, or sends none for long."""
        end = time.monotonic() + SILENCE
        while time.monotonic() < end:
            if self._line.channel.wait(CROWDED_SILENCE):
                return True
            if self._line.channel.ended or (self._house.crowded and self._writer is None):
                return False
        return False

    def close(self) -> None:
        """Discard an object that was not committed, and unmap one that was to be sent."""
        if self._lent is not None:
            self._lent.held.close()
            self._lent = None
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    # Reading

    def _status(self, question: Request) -> bytes:
        return json.dumps(self._house.status()).encode()

    def _list(self, question: Request) -> bytes:
        """One page of the keys with a prefix: those after the key in the body, as many as fit. ``+`` first if more
        follow, else ``.``."""
        after = bytes(question.body).decode("ascii", "replace")
        found: list[str] = []
        length = 1
        for key in self._kept.list(question.key):
            if key > after:
                length += len(key) + 1
                if length > MAX_BODY:
                    return b"+" + "\n".join(found).encode()
                found.append(key)
        return b"." + "\n".join(found).encode()

    def _size(self, question: Request) -> bytes:
        return LENGTH.pack(self._kept.size(question.key))

    def _age(self, question: Request) -> bytes:
        return SECONDS.pack(self._kept.age(question.key))

    def _read(self, question: Request) -> bytes:
        if len(question.body) % SPAN.size:
            raise ProtocolError("ranges that are none")
        spans = list(SPAN.iter_unpack(question.body))
        total = sum(length for _, length in spans)
        if total > MAX_READ:
            raise TierError(f"{question.key}: {total} bytes are wanted at once; {MAX_READ} are the most")
        with ExitStack() as held:
            data = held.enter_context(self._kept.seen(question.key))
            check_spans(f"{self._kept.name}: {question.key}", len(data), spans)
            self._lent = Lent(data, spans, held.pop_all())
        return LENGTH.pack(total)

    def _lend(self) -> None:
        """Send the bytes that the response has announced, directly from the mapping."""
        if self._lent is not None:
            (data, spans, held), self._lent = self._lent, None
            with held:
                for offset, length in spans:
                    with data[offset : offset + length] as part:
                        self._line.channel.send_long(part)

    # Writing

    def _delete(self, question: Request) -> bytes:
        self._kept.discard(check_key(key) for key in bytes(question.body).decode("ascii", "replace").split("\n"))
        return b""

    def _stage(self, question: Request) -> bytes:
        """Begin an object of known length, and reserve the room for it."""
        self.close()
        self._length = checked_length(*LENGTH.unpack(question.body))
        self._writer = self._kept.writer(question.key)
        self._writer.reserve(self._length)
        return b""

    def _staged(self) -> LocalWriter:
        if self._writer is None:
            raise TierError("nothing is being written over this connection")
        return self._writer

    def _piece(self, question: Request) -> bytes:
        writer = self._staged()
        if writer.length + len(question.body) > self._length:
            self.close()
            raise TierError(f"more than the {self._length} bytes that were announced")
        writer.append(question.body)
        return b""

    def _commit(self, question: Request) -> bytes:
        """Make the object visible."""
        writer = self._staged()
        if writer.length != self._length:
            self.close()
            raise TierError(f"{writer.length} bytes came where {self._length} were announced")
        writer.close()
        return b""

    def _undo(self, question: Request) -> bytes:
        """Remove the object that this connection has written, visible or not."""
        writer, self._writer = self._staged(), None
        writer.abort()
        writer.undo()
        return b""

    def _terms(self, question: Request) -> bytes:
        """Take over the settings of the policy of a process of this host."""
        said, idle = SETTINGS.unpack(question.body)
        capacity = checked_capacity(None if said == NO_LIMIT else said)
        self._house.idle, self._kept.capacity = checked_idle(idle), capacity
        return b""

    def _stop(self, question: Request) -> bytes:
        return b""  # `serve` stops the keeper after this response

    def _hand_over(self, question: Request) -> bytes:
        if self._house.in_agent:
            raise TierError("this keeper is a part of an agent")
        return b""  # as for `_stop`
