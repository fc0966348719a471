"""The desk of a keeper: one client's questions about the objects of a host's memory, answered one by one."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import TierError, TierstateError

from .base import check_key
from .peer_memory import Kept, KeptWriter
from .peer_wire import LENGTH, LENT, PIECE, SECONDS, SPAN, TERMS, Ask, Foreign, Line, Question, status_of
from .ranges import check_spans


class House(Protocol):
    """What a desk needs of its keeper."""

    kept: Kept
    root: Path
    begun: float
    used: float
    idle: float

    def stop(self) -> None: ...

    @property
    def connections(self) -> int: ...


class Lent(NamedTuple):
    """Parts of an object that are to be sent: where it lies, offsets and lengths, and what holds it there."""

    data: memoryview
    spans: Sequence[tuple[int, int]]
    held: ExitStack


class Desk:
    """Answers one connection. What it was writing when the client went is not there.

    Args:
        house: the keeper.
        line: the connection, over which the client has proved that it may.
    """

    def __init__(self, house: House, line: Line) -> None:
        self._house, self._line, self._kept = house, line, house.kept
        self._lent: Lent | None = None
        self._writer: KeptWriter | None = None
        self._length = 0
        self._answers: dict[int, Callable[[Question], bytes]] = {
            Ask.STATUS: self._status,
            Ask.LIST: self._list,
            Ask.SIZE: self._size,
            Ask.AGE: self._age,
            Ask.READ: self._read,
            Ask.DELETE: self._delete,
            Ask.STAGE: self._stage,
            Ask.PIECE: self._piece,
            Ask.COMMIT: self._commit,
            Ask.UNDO: self._undo,
            Ask.TERMS: self._terms,
            Ask.STOP: self._stop,
        }

    def serve(self) -> None:
        """Answer until the client goes, or says what cannot be understood.

        Raises:
            Foreign, OSError: the connection is of no use any more.
        """
        while (question := self._line.question(self._line.seconds)) is not None:
            if question.ask not in self._answers:
                raise Foreign(f"a question of unknown kind {question.ask}")
            try:
                body = self._answers[question.ask](question)
            except (TierstateError, ValueError, OSError, struct.error) as error:
                self._line.answer(str(error).encode()[:4096], status_of(error))
            else:
                self._line.answer(body)
                self._lend()
            self._house.used = time.monotonic()
            if question.ask == Ask.STOP:
                self._house.stop()
                return

    def close(self) -> None:
        """Forget what was not made visible, and let go of what was not sent."""
        if self._lent is not None:
            self._lent.held.close()
            self._lent = None
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    # Reading

    def _status(self, question: Question) -> bytes:
        kept, house = self._kept, self._house
        told = {
            "pid": os.getpid(),
            "path": str(house.root),
            "capacity": kept.capacity,
            "used": kept.used(),
            "objects": kept.count(),
            "connections": house.connections,
            "seconds": time.monotonic() - house.begun,
        }
        return json.dumps(told).encode()

    def _list(self, question: Question) -> bytes:
        """The keys with a prefix that come after the one in the body, as many as fit; ``+`` first where more follow."""
        after = bytes(question.body).decode("ascii", "replace")
        found: list[str] = []
        length = 1
        for key in self._kept.list(question.key):
            if key > after:
                length += len(key) + 1
                if length > PIECE:
                    return b"+" + "\n".join(found).encode()
                found.append(key)
        return b"." + "\n".join(found).encode()

    def _size(self, question: Question) -> bytes:
        return LENGTH.pack(self._kept.size(question.key))

    def _age(self, question: Question) -> bytes:
        age = self._kept.age(question.key)
        return SECONDS.pack(-1.0 if age is None else age)

    def _read(self, question: Question) -> bytes:
        if len(question.body) % SPAN.size:
            raise Foreign("ranges that are none")
        spans = list(SPAN.iter_unpack(question.body))
        total = sum(length for _, length in spans)
        if total > LENT:
            raise TierError(f"{question.key}: {total} bytes are wanted at once; {LENT} are the most")
        with ExitStack() as held:
            data = held.enter_context(self._kept.seen(question.key))
            check_spans(f"{self._kept.name}: {question.key}", len(data), spans)
            self._lent = Lent(data, spans, held.pop_all())
        return LENGTH.pack(total)

    def _lend(self) -> None:
        """Send the bytes that the answer has announced, from where they lie."""
        if self._lent is not None:
            (data, spans, held), self._lent = self._lent, None
            with held:
                for offset, length in spans:
                    with data[offset : offset + length] as part:
                        self._line.lend(part)

    # Writing

    def _delete(self, question: Question) -> bytes:
        self._kept.discard(check_key(key) for key in bytes(question.body).decode("ascii", "replace").split("\n"))
        return b""

    def _stage(self, question: Question) -> bytes:
        """Begin an object of known length, for which there is room."""
        self.close()
        (self._length,) = LENGTH.unpack(question.body)
        self._writer = self._kept.writer(question.key)
        self._writer.reserve(self._length)
        return b""

    def _staged(self) -> KeptWriter:
        if self._writer is None:
            raise TierError("nothing is being written over this connection")
        return self._writer

    def _piece(self, question: Question) -> bytes:
        writer = self._staged()
        if writer.length + len(question.body) > self._length:
            self.close()
            raise TierError(f"more than the {self._length} bytes that were announced")
        writer.append(as_buffer(question.body))
        return b""

    def _commit(self, question: Question) -> bytes:
        """Make the object visible."""
        writer = self._staged()
        if writer.length != self._length:
            self.close()
            raise TierError(f"{writer.length} bytes came where {self._length} were announced")
        writer.close()
        return b""

    def _undo(self, question: Question) -> bytes:
        """Take back what this connection has made, visible or not."""
        writer, self._writer = self._staged(), None
        writer.abort()
        writer.undo()
        return b""

    def _terms(self, question: Question) -> bytes:
        """Hear from a process of this host what its policy says now."""
        capacity, self._house.idle = TERMS.unpack(question.body)
        self._kept.capacity = capacity or None
        return b""

    def _stop(self, question: Question) -> bytes:
        return b""  # done once this is said
