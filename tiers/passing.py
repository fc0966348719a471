"""Passing on: chunks go from the rank that reads them to those that want them, by connections of our own.

A message is a row and its length, then its bytes; a row that the reader could not get has no bytes and the length
`LOST`. A connection begins with the receiver's token, which only the team knows, and the sender's rank. Every chunk is
verified where it arrives. A connection that fails takes what was to come by it along, and nothing else: the receiver
finds out what it lacks.

Nobody waits in a circle. A reader waits for receivers, and a receiver that passes on to ranks of its host waits for
those, which wait for nobody; each kind has memory of its own.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import numpy as np

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.columns import Array

from .exchange import Exchange
from .pages import map_pages
from .wires import GREETING, HEAD, HELLO, LOST, Door, Line, exactly, fill

log = logging.getLogger("tierstate")

BUFFERS = 2
"""Chunks that arrive at once, of those that are passed on again and of those that are not."""

Take = Callable[[int, Buffer], bool]
"""Takes a row and its bytes; whether they are what was saved."""

Spot = Callable[[int], "Buffer | None"]
"""The memory into which a row may be received, before it is verified; None where it has to be taken from elsewhere."""


class Passing:
    """The chunks that go from rank to rank while one version is restored.

    Args:
        me: this rank.
        exchange: its plan.
        door: where others bring chunks.
        addresses: of each rank's door.
        nbytes: ``(rows,)``: the length of each chunk.
        take: verifies what arrives, and brings it to its place if this rank wants it.
        patience: seconds after which a rank that takes nothing is passed over.
        spot: where a chunk may be received.
    """

    def __init__(
        self,
        me: int,
        exchange: Exchange,
        door: Door,
        addresses: Sequence[str],
        nbytes: Array,
        take: Take,
        patience: float,
        spot: Spot = lambda _row: None,
    ) -> None:
        self._me, self._door, self._nbytes, self._take, self._spot = me, door, nbytes, take, spot
        self._patience = patience
        self._lines = {rank: Line(me, rank, addresses[rank], patience) for rank in exchange.sends}
        self._to = _by_row(exchange.sends)
        self._expected = dict(exchange.receives)
        longest = max((int(nbytes[rows].max()) for rows in self._expected.values() if len(rows)), default=0)
        self._memory = _Memory(longest), _Memory(longest)
        self._over = {rank: threading.Event() for rank in self._expected}
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._let_in, name="tierstate-door", daemon=True)]
        if self._expected:
            self._threads[0].start()

    def on(self, rows: Array) -> Array:
        """Which of these rows are to be passed on."""
        numbers, _, _ = self._to
        return np.isin(rows, numbers)

    def give(self, row: int, raw: Buffer) -> None:
        """Pass a chunk on to whom it is to go to; it may be changed afterwards."""
        for rank in self._receivers(row):
            self._lines[rank].send(row, view(raw))

    def lose(self, row: int) -> None:
        """Tell them that they will not get it."""
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
        """Ranks that could not be sent what they were to get."""
        return [rank for rank, line in self._lines.items() if line.broken]

    def wait(self, without: Collection[int]) -> Exception | None:
        """Wait for what is on its way, once all have read what they read.

        Args:
            without: ranks from which nothing more comes.

        Returns:
            why something that came could not be brought to its place, if so.
        """
        end = time.monotonic() + self._patience
        for rank, over in self._over.items():
            if rank not in without and not over.wait(max(0.0, end - time.monotonic())):
                log.warning("rank %d passes nothing on for %g s; the rest is read otherwise", rank, self._patience)
        return self._failure

    def close(self) -> None:
        """Let go of every connection, and of the threads."""
        with self._lock:
            self._closed = True
            there = list(self._open)
        self._door.close()
        for line in self._lines.values():
            line.close()
        for connection in there:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _let_in(self) -> None:
        while True:
            try:
                connection, _ = self._door.listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("nothing more is let in that other ranks pass on: %s", error)
                return
            thread = threading.Thread(target=self._receive, args=(connection,), name="tierstate-passing", daemon=True)
            with self._lock:
                if self._closed:  # since it came; nobody would end it any more
                    connection.close()
                    return
                self._open.append(connection)
                self._threads.append(thread)
                thread.start()

    def _receive(self, connection: socket.socket) -> None:
        rank = None
        with connection:
            try:
                rank = self._greeted(connection)
                if rank is not None:
                    self._take_all(connection, rank)
            except OSError as error:
                log.log(logging.DEBUG if self._closed else logging.WARNING, "what is passed on ends early: %s", error)
            except Exception as error:  # of a value that does not take what was saved: told by `wait`
                self._failure = error
            finally:
                if rank is not None:
                    self._over[rank].set()

    def _greeted(self, connection: socket.socket) -> int | None:
        """Who is there; None if it is nobody who should be."""
        connection.settimeout(GREETING)
        token, rank = HELLO.unpack(exactly(connection, HELLO.size))
        if not hmac.compare_digest(token, self._door.token) or rank not in self._expected:
            log.warning("somebody who is not of the team was turned away")
            return None
        connection.settimeout(None)
        return int(rank)

    def _take_all(self, connection: socket.socket, rank: int) -> None:
        rows = self._expected[rank]
        again = self.on(rows)
        left = dict(zip(rows.tolist(), again.tolist(), strict=True))
        try:
            while left:
                row, nbytes = HEAD.unpack(exactly(connection, HEAD.size))
                if row not in left or nbytes not in (LOST, int(self._nbytes[row])):
                    raise OSError(f"rank {rank} sends {nbytes} bytes of chunk {row}, which were not to come from there")
                if nbytes == LOST:
                    self.lose(row)
                else:
                    self._take_one(connection, row, nbytes, left[row])
                del left[row]
        finally:
            for row in left:  # whoever waits for them here need not wait any longer
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
    """Memory for the chunks that arrive: a few, mapped when first needed."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(1, nbytes)
        self._room = threading.Semaphore(BUFFERS)
        self._free: list[Buffer] = []

    @contextmanager
    def lent(self) -> Iterator[Buffer]:
        """Memory for one chunk."""
        with self._room:
            memory = self._free.pop() if self._free else map_pages(self._nbytes)
            try:
                yield memory
            finally:
                self._free.append(memory)


def _by_row(sends: Mapping[int, Array]) -> tuple[Array, Array, Array]:
    """Rows that are passed on, rising; where the ranks of each begin, and those ranks one after another."""
    rows = np.concatenate([np.zeros(0, "i8"), *sends.values()])
    ranks = np.repeat(np.array(list(sends), "i8"), [len(part) for part in sends.values()])
    order = np.argsort(rows, kind="stable")
    numbers, starts = np.unique(rows[order], return_index=True)
    return numbers, np.append(starts, len(rows)), ranks[order]
