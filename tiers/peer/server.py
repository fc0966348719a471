"""The server process of peer memory (the *keeper*): one per host. It serves the host's objects and outlives the jobs.

    python -m tierstate.tiers.peer.server --path /dev/shm/... --address 10.0.0.1 --port 0 --idle 3600 [--capacity N]

The command returns as soon as the keeper listens; the keeper goes on as a daemon. It ends when nobody has used the
memory for ``idle`` seconds, or on a `RequestKind.STOP` request, and then frees the memory. If it is killed, the memory
stays for the next keeper.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import FormatError, TierError, TierstateError
from tierstate.tiers.base import check_key, check_spans

from .local import (
    START_LOCK,
    USE_LOCK,
    LocalMemory,
    LocalWriter,
    lock_file,
    make_folder,
    remove_memory,
    removed_memories,
)
from .members import CARD, Member, read_member, write_membership
from .protocol import (
    LENGTH,
    MAX_BODY,
    MAX_READ,
    SECONDS,
    SETTINGS,
    SPAN,
    Connection,
    ProtocolError,
    Request,
    RequestKind,
    server_handshake,
    status_of,
)

log = logging.getLogger("tierstate")


LOG = "log"
"""Log file of the keeper, in the memory's folder: its standard output and error; usually empty."""


MOST = 1024
"""Connections at the same time, at most; further ones are closed at once."""


HANDSHAKE_TIMEOUT = 10.0
"""Timeout in seconds for the handshake."""


SILENCE = 30.0
"""Timeout in seconds for one whole message; a connection without a request for as long is closed."""


class SessionServer(Protocol):
    """What a session needs of its server; `PeerServer` is one.

    Attributes:
        kept: the objects of this host.
        root: the folder of the memory.
        begun, used: when the server was started and last used, as `time.monotonic`.
        idle: seconds without use after which it ends.
    """

    kept: LocalMemory
    root: Path
    begun: float
    used: float
    idle: float

    def stop(self) -> None: ...

    @property
    def connections(self) -> int: ...


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
        }

    def serve(self) -> None:
        """Respond to requests until the client closes the connection or sends none for long.

        Raises:
            ProtocolError, OSError: an invalid request, or the connection has failed; it has to be closed.
        """
        while (question := self._line.question(self._line.seconds)) is not None:
            if question.ask not in self._answers:
                raise ProtocolError(f"a question of unknown kind {question.ask}")
            try:
                body = self._answers[question.ask](question)
            except (TierstateError, ValueError, OSError, struct.error) as error:
                self._line.answer(str(error).encode()[:4096], status_of(error))
            else:
                self._line.answer(body)
                self._lend()
            self._house.used = time.monotonic()
            if question.ask == RequestKind.STOP:
                self._house.stop()
                return

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
        age = self._kept.age(question.key)
        return SECONDS.pack(-1.0 if age is None else age)

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
                        self._line.lend(part)

    # Writing

    def _delete(self, question: Request) -> bytes:
        self._kept.discard(check_key(key) for key in bytes(question.body).decode("ascii", "replace").split("\n"))
        return b""

    def _stage(self, question: Request) -> bytes:
        """Begin an object of known length, and reserve the room for it."""
        self.close()
        (self._length,) = LENGTH.unpack(question.body)
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
        writer.append(as_buffer(question.body))
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
        capacity, self._house.idle = SETTINGS.unpack(question.body)
        self._kept.capacity = capacity or None
        return b""

    def _stop(self, question: Request) -> bytes:
        return b""  # `serve` stops the keeper after this response


class PeerServer:
    """Serves one host's memory to clients that know its token.

    Args:
        root: the folder of the memory.
        listening: the listening socket.
        token: the secret.
        idle: seconds without use after which it ends.
        capacity: bytes of objects, at most; None for no limit.
    """

    def __init__(self, root: Path, listening: socket.socket, token: bytes, idle: float, capacity: int | None) -> None:
        self.root, self.idle = root, idle
        self.kept = LocalMemory(root, capacity)
        self.kept.name = "peer"
        self.begun = self.used = time.monotonic()
        self.stopping = threading.Event()
        self._listening, self._token, self._port = listening, token, listening.getsockname()[1]
        self._lines: set[Connection] = set()
        self._lock = threading.Lock()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._lines)

    def run(self) -> None:
        """Serve until the idle time is over or `stop` is called; then free the memory."""
        tick = min(1.0, self.idle / 4)
        self._listening.settimeout(tick)
        self._sweep()
        swept = time.monotonic()
        while not self._may_end():
            self._await()
            if time.monotonic() - swept > SILENCE:
                self._sweep()
                swept = time.monotonic()
        self._listening.close()

    def _sweep(self) -> None:
        try:
            self.kept.sweep()
        except TierstateError as error:  # such as no room for the lock file: a later sweep may succeed
            log.warning("what dead writers left could not be removed: %s", error)

    def _await(self) -> None:
        try:
            wire, _ = self._listening.accept()
        except TimeoutError:
            return
        except OSError:
            if not self.stopping.is_set():  # `stop` shuts the socket down, so that `accept` returns
                raise
            return
        self._welcome(wire)

    def stop(self) -> None:
        """Make `run` end."""
        self.stopping.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def _welcome(self, wire: socket.socket) -> None:
        line = Connection(wire, HANDSHAKE_TIMEOUT)
        with self._lock:
            if len(self._lines) >= MOST:
                line.close()
                return
            self._lines.add(line)
        threading.Thread(target=self._serve, args=(line,), daemon=True, name="tierstate-keeper").start()

    def _serve(self, line: Connection) -> None:
        """Serve one connection until it ends."""
        try:
            with line:
                if server_handshake(line, self._token):
                    line.seconds = SILENCE
                    with closing(ClientSession(self, line)) as desk:
                        desk.serve()
        except (OSError, ProtocolError) as error:
            log.info("a connection was given up: %s", error)
        finally:
            with self._lock:
                self._lines.discard(line)
            self.used = time.monotonic()

    def _may_end(self) -> bool:
        """Whether the keeper ends now; if so, the memory is already freed."""
        if self.stopping.is_set():
            return self._give_back(fcntl.LOCK_EX)
        if self._lines or time.monotonic() - self.used < self.idle:
            return False
        try:
            return self._give_back(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.used = time.monotonic()  # a process of this host uses the memory
            return False

    def _give_back(self, how: int) -> bool:
        # On a stop request the memory is freed even if processes of this host use it; when idle, only if none does.
        with suppress(FileNotFoundError, TierstateError), ExitStack() as held:
            held.enter_context(closing(lock_file(self.root / START_LOCK, how)))
            if how & fcntl.LOCK_NB:
                held.enter_context(closing(lock_file(self.root / USE_LOCK, how)))
            card = read_member(self.root)
            if card is not None and card.port == self._port:
                remove_memory(
                    self.root
                )  # with another port the memory belongs to a new keeper, which replaced this one as it did not answer
        return True


def listen(address: str, port: int, before: Member | None) -> socket.socket:
    """A listening socket at this address; with port 0 at the port of the keeper before, if that is free, or at any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for number in [before.port, 0] if before is not None and not port else [port]:
        wire = socket.socket(family, socket.SOCK_STREAM)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wire.bind((address, number))
            wire.listen(MOST)
        except OSError:
            wire.close()
            if number == port:
                raise
        else:
            return wire
    raise AssertionError("the last of them has succeeded or raised")


def start_server(args: argparse.Namespace) -> PeerServer:
    """Make a keeper that listens, and write its member file (`CARD`)."""
    root: Path = args.path
    make_folder(root, "peer")
    try:
        before = read_member(root)
    except FormatError:
        before = None
    for left in removed_memories(root):
        shutil.rmtree(left, ignore_errors=True)  # of a keeper that was killed while it freed its memory
    wire = listen(args.address, args.port, before)
    identity, token = (before.id, before.token) if before else (uuid.uuid4().hex, secrets.token_hex(32))
    write_membership(root, CARD, Member(identity, args.address, wire.getsockname()[1], token))
    return PeerServer(root, wire, bytes.fromhex(token), args.idle, args.capacity)


def arguments() -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m tierstate.tiers.peer.server")
    parser.add_argument("--path", type=Path, required=True, help="folder of the memory")
    parser.add_argument("--address", required=True, help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--idle", type=float, default=3600.0, help="seconds without use after which it ends")
    parser.add_argument("--capacity", type=int, default=None, help="bytes that the memory may have")
    return parser.parse_args()


def main() -> None:
    """Start a keeper and detach it as a daemon. Errors before that are printed to standard error; exit status 1."""
    args = arguments()
    try:
        keeper = start_server(args)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(1)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    told = os.open(keeper.root / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(told, descriptor)
    keeper.run()


if __name__ == "__main__":
    main()
