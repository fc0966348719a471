"""Chunk exchange in a restore: chunks go from the rank that reads them to the ranks that want them, over TCP.

A message is a row (number of a chunk) and the chunk's length, followed by its bytes. A chunk that the reader could not
read has the length `CHUNK_LOST` and no bytes. Connections are authenticated by the job's secret
(`tierstate.tiers.connections.channel`), and each is for one receiver and one restore; the sender claims its rank. The
receiver verifies every chunk by its digest. If a connection fails, only the chunks that were still to come over it are
lost; the receiver finds them missing and they are planned again.

A rank that waits for a straggler may drop it: it closes the connection, so that nothing more arrives from there, and
tells the straggler by a connection of which the claim says so (`RELIEF`).

There is no deadlock: a reader waits for receivers; a receiver that forwards to other hosts waits for ranks there that
forward to ranks of their own host at most (`HostGrid`), and those wait for no rank. Chunks to forward to other hosts,
chunks to forward within the host and chunks to keep have separate buffers.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from socket import SHUT_RDWR

import numpy as np

from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, view
from tierstate.tiers.address import own_address
from tierstate.tiers.connections.channel import Channel, connect
from tierstate.tiers.connections.listener import Listener
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.pages import map_pages

from .exchange_plan import ExchangePlan
from .stragglers import Passed

log = logging.getLogger("tierstate")


CHUNK_LOST = (1 << 64) - 1
"""The length that a message gives for a chunk that could not be read."""


CLAIM = struct.Struct("<Q")
"""Rank of the sender."""


RELIEF = 1 << 63
"""Added to the rank of a claim: that rank waits no longer for this one, and sends nothing."""


DROP_WAIT = 2.0
"""Seconds until a connection that is dropped must have ended."""


CHUNK_HEADER = struct.Struct("<QQ")
"""Row and length of a chunk."""


HANDSHAKE_TIMEOUT = 10.0
"""Timeout in seconds for making a connection, handshake included."""


CONNECT_TIMEOUT, SEND_TIMEOUT = 5.0, 10.0
"""Timeouts in seconds for the connection to a rank, and for sending a message to it. A rank that is stopped holds up
the others for no longer; what it does not get in time, it reads itself later."""


MESSAGE_TIMEOUT = 60.0
"""Timeout in seconds for receiving a message, once its first bytes have come."""


TICK = 3600.0
"""Seconds between two looks of a listener for nothing; `Listener.stop` wakes it."""


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
        secret: the secret of the job.

    Attributes:
        address: host, port and name of the service as text, for `PeerConnection` on other ranks. It is no secret.
    """

    def __init__(self, hosts: int, secret: JobSecret) -> None:
        service = f"exchange/{uuid.uuid4().hex}"
        self._listener = Listener(own_address(hosts, strict=False), 0, lambda: secret, service, seconds=MESSAGE_TIMEOUT)
        self.address = f"{self._listener.address} {self._listener.port} {service}"
        self._admitted: SimpleQueue[Channel | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierstate-accept", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no more threads (`ulimit -u`)
            self._listener.close()
            raise

    def _run(self) -> None:
        try:
            while not self._closed:
                for channel in self._listener.poll(TICK):
                    self._admitted.put(channel)
        except OSError as error:
            if not self._closed:
                log.warning("nothing more is let in that other ranks pass on: %s", error)
        self._admitted.put(None)

    def accept(self) -> Channel | None:
        """Wait for the next connection of a rank of the job; None once this is closed."""
        return self._admitted.get()

    def close(self) -> None:
        """Accept no more connections. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._listener.stop()
        self._thread.join()
        self._listener.close()
        with suppress(Empty):
            while True:
                if (channel := self._admitted.get_nowait()) is not None:
                    channel.close()
        self._admitted.put(None)  # for a thread that waits in `accept`


class PeerConnection:
    """The connection to one rank, opened with the first chunk for it.

    Attributes:
        broken: whether it has failed or is closed; nothing more is sent then.
        seconds: for how long it has sent.
    """

    def __init__(self, me: int, rank: int, address: str, secret: JobSecret, patience: float) -> None:
        self._me, self._rank, self._address, self._secret, self._patience = me, rank, address, secret, patience
        self._lock = threading.Lock()
        self._connection: Channel | None = None
        self.broken, self.seconds = False, 0.0

    def send(self, row: int, data: memoryview | None) -> None:
        """Send a chunk; None says that it is lost. Does nothing once the connection is broken."""
        with self._lock:
            if self.broken:
                return
            began = time.monotonic()
            try:
                connection = self._connection = self._connection or self._connect()
                connection.send(CHUNK_HEADER.pack(row, CHUNK_LOST if data is None else len(data)))
                if data is not None:
                    connection.send_long(data)
            except OSError as error:
                self.broken = True
                if self._connection is not None:
                    self._connection.close()  # so that a rank that was stopped sees that nothing more comes
                log.warning("nothing more is passed on to rank %d: %s", self._rank, error)
            finally:
                self.seconds += time.monotonic() - began

    def _connect(self) -> Channel:
        host, port, service = self._address.split(" ")
        seconds, claim = min(CONNECT_TIMEOUT, self._patience), CLAIM.pack(self._me)
        found = connect(host, int(port), self._secret, service, seconds=seconds, claim=claim)
        found.seconds = min(SEND_TIMEOUT, self._patience)
        return found

    def close(self) -> None:
        """Send nothing more, and close the connection."""
        with self._lock:
            self.broken = True
            if self._connection is not None:
                self._connection.close()


class ChunkExchange:
    """Sends and receives the chunks of one exchange plan, while one version is restored.

    Args:
        me: this rank.
        exchange: its plan.
        listener: the listening socket of this rank.
        secret: the secret of the job.
        addresses: by rank, the address of its `PeerListener`.
        nbytes: ``(rows,)``: the length of each chunk.
        take: verifies a received chunk, and copies it into the state if this rank wants it.
        patience: timeout in seconds for sending to a rank, and for the chunks of the other ranks.
        spot: the memory into which a chunk may be received directly.
        hosts: by rank, the number of its host; by default all are on one.

    Attributes:
        relieved: set when a rank waits no longer for what this one was to send to it.
    """

    def __init__(
        self,
        me: int,
        exchange: ExchangePlan,
        listener: PeerListener,
        secret: JobSecret,
        addresses: Sequence[str],
        nbytes: Array,
        take: ReceiveChunk,
        patience: float,
        spot: ChunkMemory = lambda _row: None,
        hosts: Sequence[int] = (),
    ) -> None:
        self._me, self._listener, self._nbytes, self._take, self._spot = me, listener, nbytes, take, spot
        self._patience, self._secret, self._addresses = patience, secret, addresses
        self._lines = {rank: PeerConnection(me, rank, addresses[rank], secret, patience) for rank in exchange.sends}
        self._to = _by_row(exchange.sends)
        self._expected = dict(exchange.receives)
        longest = max((int(nbytes[rows].max()) for rows in self._expected.values() if len(rows)), default=0)
        self._memory = _Memory(longest), _Memory(longest), _Memory(longest)
        far = [rows for rank, rows in exchange.sends.items() if hosts and hosts[rank] != hosts[me]]
        across = np.unique(np.concatenate([np.zeros(0, "i8"), *far]))
        self._left = {
            rank: dict(zip(rows.tolist(), (self.on(rows) + np.isin(rows, across).astype("i8")).tolist(), strict=True))
            for rank, rows in self._expected.items()
        }
        """By rank and row that is to come from it: 0 if it is kept, 1 if it is forwarded on this host, 2 to others."""
        self._arrived = dict.fromkeys(self._expected, 0)
        self._dropped: set[int] = set()
        self._of: dict[int, Channel] = {}
        self.relieved = Latch()
        self._over = {rank: threading.Event() for rank in self._expected}
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._open: list[Channel] = []
        self._threads = [threading.Thread(target=self._accept, name="tierstate-exchange", daemon=True)]
        if self._expected or self._lines:
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

    @property
    def held(self) -> float:
        """Seconds for which the rank that takes the least quickly has held up this one."""
        return max((line.seconds for line in self._lines.values()), default=0.0)

    def awaited(self) -> list[int]:
        """The ranks from which chunks are still to come."""
        return [rank for rank, over in self._over.items() if not over.is_set()]

    def pause(self, rank: int, seconds: float) -> None:
        """Wait until all chunks of a rank have come, for so many seconds at most."""
        self._over[rank].wait(seconds)

    def left(self, rank: int) -> list[int]:
        """The rows that are still to come from a rank."""
        return list(self._left[rank])

    def passed(self, rank: int) -> Passed:
        """Bytes that have come from a rank, and that are to come."""
        return Passed(self._arrived[rank], int(self._nbytes[self.left(rank)].sum()))

    def drop(self, rank: int) -> list[int]:
        """Wait for a rank no longer: nothing more comes from it, and it is told so.

        Returns:
            The rows that have not come from it. They are this rank's to read, and to send to the ranks behind.
        """
        with self._lock:
            self._dropped.add(rank)
            connection = self._of.get(rank)
        if connection is not None:
            with suppress(OSError):
                connection.wire.shutdown(SHUT_RDWR)
            if not self._over[rank].wait(DROP_WAIT):  # it is held up by a rank to which a chunk is forwarded
                return []
        self._over[rank].set()
        with suppress(RuntimeError):  # no more threads (`ulimit -u`)
            threading.Thread(target=self._tell, args=(rank,), name="tierstate-relief", daemon=True).start()
        return self.left(rank)

    def _tell(self, rank: int) -> None:
        host, port, service = self._addresses[rank].split(" ")
        seconds, claim = min(HANDSHAKE_TIMEOUT, self._patience), CLAIM.pack(self._me | RELIEF)
        try:
            connect(host, int(port), self._secret, service, seconds=seconds, claim=claim).close()
        except OSError as error:
            log.info("rank %d could not be told that it is not waited for: %s", rank, error)

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
                connection.wire.shutdown(SHUT_RDWR)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            thread = threading.Thread(target=self._receive, args=(connection,), name="tierstate-passing", daemon=True)
            with self._lock:
                if self._closed:  # closed since `accept` returned: nobody would end this thread
                    connection.close()
                    return
                self._open.append(connection)
                with suppress(RuntimeError):  # no more threads (`ulimit -u`)
                    thread.start()
                    self._threads.append(thread)
            if thread.ident is None:
                self._receive(connection)  # so connections are served one after the other

    def _rank_of(self, connection: Channel) -> int | None:
        """The rank that connects; None if the plan has nothing from it to this rank, or it was dropped."""
        (rank,) = CLAIM.unpack(connection.claim)
        with self._lock:
            if rank not in self._expected or rank in self._dropped:
                return None
            self._of[rank] = connection
        return int(rank)

    def _is_relief(self, connection: Channel) -> bool:
        (number,) = CLAIM.unpack(connection.claim)
        if not number & RELIEF:
            return False
        if (line := self._lines.get(number ^ RELIEF)) is not None:
            line.broken = True
            self.relieved.set()
        connection.close()
        return True

    def _receive(self, connection: Channel) -> None:
        if self._is_relief(connection):
            return
        rank = self._rank_of(connection)
        if rank is None:
            dropped = CLAIM.unpack(connection.claim)[0] in self._dropped
            level = logging.INFO if dropped else logging.WARNING
            log.log(level, "a connection of a rank that was to send nothing was refused: %s", connection.peer)
            connection.close()
            return
        with connection:
            try:
                self._take_all(connection, rank)
            except OSError as error:
                quiet = self._closed or rank in self._dropped
                log.log(logging.DEBUG if quiet else logging.WARNING, "what is passed on ends early: %s", error)
            except Exception as error:  # a value of the state cannot take what was saved: `wait` returns it
                self._failure = error
            finally:
                self._over[rank].set()

    def _take_all(self, connection: Channel, rank: int) -> None:
        left = self._left[rank]
        try:
            while left:
                if not connection.wait(None):
                    raise OSError(f"{connection.peer}: rank {rank} has closed the connection")
                row, nbytes = CHUNK_HEADER.unpack(connection.receive_exactly(CHUNK_HEADER.size))
                if row not in left or nbytes not in (CHUNK_LOST, int(self._nbytes[row])):
                    raise OSError(f"rank {rank} sends {nbytes} bytes of chunk {row}, which were not to come from there")
                if nbytes == CHUNK_LOST:
                    self.lose(row)
                else:
                    self._take_one(connection, row, nbytes, left[row])
                    self._arrived[rank] += nbytes
                del left[row]
        finally:
            # So that ranks to which they would be forwarded need not wait any longer; unless they are read here.
            for row in [] if rank in self._dropped else list(left):
                self.lose(row)

    def _take_one(self, connection: Channel, row: int, nbytes: int, kind: int) -> None:
        with nullcontext(spot) if (spot := self._spot(row)) is not None else self._memory[kind].lent() as memory:
            raw = memory[:nbytes]
            connection.receive_long(view(raw))
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
