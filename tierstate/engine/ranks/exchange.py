"""Chunk exchange in a restore: chunks go from the rank that reads them to the ranks that want them, over TCP.

A message is a row (number of a chunk), the chunk's length, and its bytes. A chunk that the reader could not read has
the length `CHUNK_LOST` and no bytes. A connection begins with the receiver's token, which only the team knows, and the
sender's rank. The receiver verifies every chunk by its digest. If a connection fails, only the chunks that were still
to come over it are lost; the receiver finds them missing and they are planned again.

There is no deadlock: a reader waits for receivers, a receiver that forwards to ranks of its host waits for those, and
they wait for no rank. Chunks to forward and chunks to keep have separate buffers.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, view
from tierstate.tiers.address import own_address
from tierstate.tiers.memory.arena import map_pages

from .exchange_plan import ExchangePlan

log = logging.getLogger("tierstate")


TOKEN = 16
"""Bytes of a receiver's token."""


CHUNK_LOST = (1 << 64) - 1
"""The length that a message gives for a chunk that could not be read."""


HANDSHAKE = struct.Struct(f"<{TOKEN}sI")
"""Token of the receiver and rank of the sender."""


CHUNK_HEADER = struct.Struct("<QQ")
"""Row and length of a chunk."""


HANDSHAKE_TIMEOUT = 10.0
"""Timeout in seconds for making a connection, and for receiving its handshake."""


BUFFERS = 2
"""Chunks that are received at the same time: so many that are forwarded, and so many that are not."""


ReceiveChunk = Callable[[int, Buffer], bool]
"""Takes a row and its bytes, and stores them; returns whether they are what was saved."""


ChunkMemory = Callable[[int], "Buffer | None"]
"""Returns the memory into which a row may be received before it is verified; None if a buffer has to be used."""


class PeerListener:
    """The listening socket to which other ranks send chunks for this rank.

    Args:
        hosts: number of hosts of the team.

    Attributes:
        address: host, port and token as text, for `PeerConnection` on other ranks.
    """

    def __init__(self, hosts: int) -> None:
        self.socket = socket.create_server((own_address(hosts, strict=False), 0), backlog=1024)
        self.token = secrets.token_bytes(TOKEN)
        host, port = self.socket.getsockname()
        self.address = f"{host} {port} {self.token.hex()}"

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which ends a waiting `accept`
        self.socket.close()


class PeerConnection:
    """The connection to one rank, opened with the first chunk for it.

    Attributes:
        broken: whether it has failed or is closed; nothing more is sent then.
    """

    def __init__(self, me: int, rank: int, address: str, patience: float) -> None:
        self._me, self._rank, self._address, self._patience = me, rank, address, patience
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.broken = False

    def send(self, row: int, data: memoryview | None) -> None:
        """Send a chunk; None says that it is lost. Does nothing once the connection is broken."""
        with self._lock:
            if self.broken:
                return
            try:
                connection = self._connection = self._connection or self._connect()
                connection.sendall(CHUNK_HEADER.pack(row, CHUNK_LOST if data is None else len(data)))
                if data is not None:
                    connection.sendall(data)
            except OSError as error:
                self.broken = True
                log.warning("nothing more is passed on to rank %d: %s", self._rank, error)

    def _connect(self) -> socket.socket:
        host, port, token = self._address.split(" ")
        connection = socket.create_connection((host, int(port)), min(HANDSHAKE_TIMEOUT, self._patience))
        connection.settimeout(self._patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HANDSHAKE.pack(bytes.fromhex(token), self._me))
        return connection

    def close(self) -> None:
        """Send nothing more, and close the connection."""
        with self._lock:
            self.broken = True
            if self._connection is not None:
                self._connection.close()


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Receive exactly ``nbytes`` bytes; raises OSError if the connection ends before."""
    data = bytearray(nbytes)
    fill(connection, memoryview(data))
    return bytes(data)


def fill(connection: socket.socket, out: memoryview) -> None:
    """Receive until ``out`` is full; raises OSError if the connection ends before."""
    at = 0
    while at < len(out):
        got = connection.recv_into(out[at:])
        if not got:
            raise OSError("the connection was closed by the other side")
        at += got


class ChunkExchange:
    """Sends and receives the chunks of one exchange plan, while one version is restored.

    Args:
        me: this rank.
        exchange: its plan.
        listener: the listening socket of this rank.
        addresses: by rank, the address of its `PeerListener`.
        nbytes: ``(rows,)``: the length of each chunk.
        take: verifies a received chunk, and copies it into the state if this rank wants it.
        patience: timeout in seconds for sending to a rank, and for the chunks of the other ranks.
        spot: the memory into which a chunk may be received directly.
    """

    def __init__(
        self,
        me: int,
        exchange: ExchangePlan,
        listener: PeerListener,
        addresses: Sequence[str],
        nbytes: Array,
        take: ReceiveChunk,
        patience: float,
        spot: ChunkMemory = lambda _row: None,
    ) -> None:
        self._me, self._listener, self._nbytes, self._take, self._spot = me, listener, nbytes, take, spot
        self._patience = patience
        self._lines = {rank: PeerConnection(me, rank, addresses[rank], patience) for rank in exchange.sends}
        self._to = _by_row(exchange.sends)
        self._expected = dict(exchange.receives)
        longest = max((int(nbytes[rows].max()) for rows in self._expected.values() if len(rows)), default=0)
        self._memory = _Memory(longest), _Memory(longest)
        self._over = {rank: threading.Event() for rank in self._expected}
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="tierstate-accept", daemon=True)]
        if self._expected:
            self._threads[0].start()

    def on(self, rows: Array) -> Array:
        """Which of these rows this rank has to send, as bool."""
        numbers, _, _ = self._to
        return np.isin(rows, numbers)

    def give(self, row: int, raw: Buffer) -> None:
        """Send a chunk to the ranks that the plan names. Its memory may be reused afterwards."""
        for rank in self._receivers(row):
            self._lines[rank].send(row, view(raw))

    def lose(self, row: int) -> None:
        """Tell the ranks to which a chunk was to be sent that they will not get it."""
        for rank in self._receivers(row):
            self._lines[rank].send(row, None)

    def _receivers(self, row: int) -> list[int]:
        numbers, starts, ranks = self._to
        at = int(np.searchsorted(numbers, row))
        if at == len(numbers) or numbers[at] != row:
            return []
        found: list[int] = ranks[starts[at] : starts[at + 1]].tolist()
        return found

    @property
    def broken(self) -> list[int]:
        """Ranks to which the connection has failed."""
        return [rank for rank, line in self._lines.items() if line.broken]

    def wait(self, without: Collection[int]) -> Exception | None:
        """Wait for the chunks of other ranks; called when all ranks have finished reading.

        Args:
            without: ranks that are not waited for, since their connection to this rank has failed.

        Returns:
            The error of storing a received chunk into the state; None if there was none.
        """
        end = time.monotonic() + self._patience
        for rank, over in self._over.items():
            if rank not in without and not over.wait(max(0.0, end - time.monotonic())):
                log.warning("rank %d passes nothing on for %g s; the rest is read otherwise", rank, self._patience)
        return self._failure

    def close(self) -> None:
        """Close all connections and end the threads."""
        with self._lock:
            self._closed = True
            there = list(self._open)
        self._listener.close()
        for line in self._lines.values():
            line.close()
        for connection in there:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.socket.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("nothing more is let in that other ranks pass on: %s", error)
                return
            thread = threading.Thread(target=self._receive, args=(connection,), name="tierstate-passing", daemon=True)
            with self._lock:
                if self._closed:  # closed since `accept` returned: nobody would end this thread
                    connection.close()
                    return
                self._open.append(connection)
                self._threads.append(thread)
                thread.start()

    def _receive(self, connection: socket.socket) -> None:
        rank = None
        with connection:
            try:
                rank = self._check_handshake(connection)
                if rank is not None:
                    self._take_all(connection, rank)
            except OSError as error:
                log.log(logging.DEBUG if self._closed else logging.WARNING, "what is passed on ends early: %s", error)
            except Exception as error:  # a value of the state cannot take what was saved: `wait` returns it
                self._failure = error
            finally:
                if rank is not None:
                    self._over[rank].set()

    def _check_handshake(self, connection: socket.socket) -> int | None:
        """The rank that connects; None if its token is wrong or the plan has nothing from it to this rank."""
        connection.settimeout(HANDSHAKE_TIMEOUT)
        token, rank = HANDSHAKE.unpack(exactly(connection, HANDSHAKE.size))
        if not hmac.compare_digest(token, self._listener.token) or rank not in self._expected:
            log.warning("a connection of a process that is not of the team was refused")
            return None
        connection.settimeout(None)
        return int(rank)

    def _take_all(self, connection: socket.socket, rank: int) -> None:
        rows = self._expected[rank]
        again = self.on(rows)
        left = dict(zip(rows.tolist(), again.tolist(), strict=True))
        try:
            while left:
                row, nbytes = CHUNK_HEADER.unpack(exactly(connection, CHUNK_HEADER.size))
                if row not in left or nbytes not in (CHUNK_LOST, int(self._nbytes[row])):
                    raise OSError(f"rank {rank} sends {nbytes} bytes of chunk {row}, which were not to come from there")
                if nbytes == CHUNK_LOST:
                    self.lose(row)
                else:
                    self._take_one(connection, row, nbytes, left[row])
                del left[row]
        finally:
            for row in left:  # so that ranks to which they would be forwarded need not wait any longer
                self.lose(row)

    def _take_one(self, connection: socket.socket, row: int, nbytes: int, again: bool) -> None:
        with nullcontext(spot) if (spot := self._spot(row)) is not None else self._memory[again].lent() as memory:
            raw = memory[:nbytes]
            fill(connection, view(raw))
            if self._take(row, raw):
                self.give(row, raw)
            else:
                log.warning("chunk %d did not arrive as it was saved; it is read again", row)
                self.lose(row)


class _Memory:
    """`BUFFERS` buffers for received chunks, mapped when first needed."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(1, nbytes)
        self._room = threading.Semaphore(BUFFERS)
        self._free: list[Buffer] = []

    @contextmanager
    def lent(self) -> Iterator[Buffer]:
        """A buffer for one chunk; waits until one is free."""
        with self._room:
            memory = self._free.pop() if self._free else map_pages(self._nbytes)
            try:
                yield memory
            finally:
                self._free.append(memory)


def _by_row(sends: Mapping[int, Array]) -> tuple[Array, Array, Array]:
    """The receivers of each row that is sent: the rows, rising; where the receivers of each begin; all receivers."""
    rows = np.concatenate([np.zeros(0, "i8"), *sends.values()])
    ranks = np.repeat(np.array(list(sends), "i8"), [len(part) for part in sends.values()])
    order = np.argsort(rows, kind="stable")
    numbers, starts = np.unique(rows[order], return_index=True)
    return numbers, np.append(starts, len(rows)), ranks[order]
