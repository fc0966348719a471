"""The deadline wrapper: no call of a tier that may hang (a dead NFS or Lustre server) blocks its caller for long.

Each call runs in a thread under a `Watchdog`, which gives it up after a deadline without progress. Reads go through
bounce buffers (`BounceReader`, double buffering), so that a late read never writes into the caller's memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.tiers.base import KeepingArena, ObjectWriter, Place, Range, Release, Tier, Traits
from tierstate.tiers.memory.memcpy import memcpy
from tierstate.tiers.memory.pages import PAGE, map_pages

from .base import Wrapping
from .breaker import Hung
from .watchdog import Activity, Watchdog, WatchedCall

HANG_DEADLINE = 60.0
"""Seconds after which a call counts as hung: far longer than a healthy disk or server needs."""


BOUNCE_PIECE = 16 << 20
"""Bytes of one bounce buffer."""


READS_AHEAD = 2
"""Pieces of one read in flight: while one is copied, the next one is read (double buffering)."""


SPARE_PIECES = 4
"""Bounce buffers that are kept when no read runs: faulting in new memory may cost more than reading into it."""


PAGED_MIN = 1 << 20
"""Pieces of at least this many bytes get page-aligned memory, so that direct I/O can be used."""


log = logging.getLogger("tierstate")


DELETE_BATCH = 32
"""Objects that are deleted in one call: few enough that a healthy tier finishes before the deadline."""


class _Piece(NamedTuple):
    """One piece of a running read: the wanted ranges, the ranges in bounce memory, and that memory."""

    call: WatchedCall[None]
    wanted: Sequence[Range]
    mine: Sequence[Range]
    memory: Buffer


class BounceReader:
    """Reads through bounce buffers, so that a read can be given up.

    Args:
        watch: runs the reads and gives them up.
    """

    def __init__(self, watch: Watchdog) -> None:
        self._watch, self._memory = watch, _Memory()

    def read(self, what: str, read: Callable[[Sequence[Range]], None], ranges: Sequence[Range]) -> None:
        """Fill every range by way of bounce buffers.

        Args:
            what: what it is, for messages.
            read: reads some ranges.

        Raises:
            Hung: the read was given up, or not started.
        """
        under_way: deque[_Piece] = deque()
        try:
            for wanted in split_ranges(ranges):
                if len(under_way) == READS_AHEAD:
                    self._land(under_way.popleft())
                under_way.append(self._begin(what, read, wanted))
            while under_way:
                self._land(under_way.popleft())
        except BaseException:
            for _ in under_way:
                self._memory.lose()
            raise

    def _begin(self, what: str, read: Callable[[Sequence[Range]], None], wanted: Sequence[Range]) -> _Piece:
        starts, nbytes = [], 0
        for _, out in wanted:
            starts.append(nbytes)
            nbytes += _paged(out.numel())
        memory = self._memory.take(nbytes)
        try:
            mine = [Range(r.offset, memory[at : at + r.out.numel()]) for r, at in zip(wanted, starts, strict=True)]
            return _Piece(self._watch.begin(what, partial(read, mine)), wanted, mine, memory)
        except BaseException:
            self._memory.lose()
            raise

    def _land(self, piece: _Piece) -> None:
        try:
            piece.call.result()
        except BaseException:
            # It may still be written to: it is freed when the call that holds it returns.
            self._memory.lose()
            raise
        for (_, out), (_, found) in zip(piece.wanted, piece.mine, strict=True):
            if out.numel():
                memcpy(out.data_ptr(), found.data_ptr(), out.numel())
        self._memory.give_back(piece.memory)


def split_ranges(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Ranges in groups of at most `BOUNCE_PIECE` bytes, long ones split; one empty group if there are none."""
    group: list[Range] = []
    room = BOUNCE_PIECE
    for offset, out in ranges:
        at = 0
        while True:
            if not room:
                yield group
                group, room = [], BOUNCE_PIECE
            part = out[at : at + room]
            group.append(Range(offset + at, part))
            at, room = at + part.numel(), max(0, room - _paged(part.numel()))
            if at >= out.numel():
                break
    yield group


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class _Memory:
    """A pool of bounce buffers: all are kept while any read runs, `SPARE_PIECES` for the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._taken = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes; the caller then calls `give_back` or `lose`."""
        with self._lock:
            self._taken += 1
            if nbytes >= PAGED_MIN and self._free:
                return self._free.pop()
        return map_pages(BOUNCE_PIECE) if nbytes >= PAGED_MIN else empty_buffer(nbytes)

    def give_back(self, memory: Buffer) -> None:
        """Return a buffer to the pool."""
        if memory.numel() == BOUNCE_PIECE:
            with self._lock:
                self._free.append(memory)
        self.lose()

    def lose(self) -> None:
        """Count a buffer that is not returned, since a late call may still use it."""
        with self._lock:
            self._taken -= 1
            if not self._taken:
                del self._free[SPARE_PIECES:]


class Deadline(Wrapping):
    """Another tier, each call of which runs in a thread that is given up after too long without progress.

    A system call on a network file system whose server is dead does not return, and nothing can interrupt it. Then the
    caller gets `TierUnavailable`, and every later call gets it at once, until the hung call has returned; from then on
    the tier is used as before. A late return does no harm: a writer is aborted, and a result is discarded. The object
    of a ``put`` may or may not exist, as when the answer of a server is lost.

    Reads go through bounce buffers of this tier, since a read that was given up may still write into its memory when
    the caller has reused the destination. Leased buffers are released when the transfer has really ended; until then
    they do not count against the arena's in-flight budget.

    Not for tiers that keep leases for as long as an object exists, nor for tiers whose ``traits`` may block.

    Args:
        inner: the tier.
        seconds: a call, or a writer, is given up after this many seconds without progress.
        arena: the engine's arena, from which the buffers for writers come.
    """

    def __init__(self, inner: Tier, seconds: float, arena: KeepingArena | None = None) -> None:
        super().__init__(inner)
        self._watch = Watchdog(seconds, arena, lambda: inner.name)
        self._bounce = BounceReader(self._watch)
        # For a tier that is dropped without being closed: the threads hold a reference to the watchdog, not to this
        # object.
        weakref.finalize(self, self._watch.end).atexit = False

    @property
    def traits(self) -> Traits:
        """Those of the inner tier, but reads may have any destination; a hung call is added to the notes."""
        traits = self.inner.traits
        trouble = self._watch.trouble
        return replace(traits, memory_alignment=1, notes=(*traits.notes, trouble) if trouble else traits.notes)

    @property
    def trouble(self) -> str:
        return self._watch.trouble or self.inner.trouble

    def put(self, key: str, data: Buffer) -> None:
        # A copy, since a put that was given up may still run when the caller changes the buffer.
        self._watch.run(f"put of {key}", partial(self.inner.put, key, data.clone()))

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self._bounce.read(f"read of {key}", partial(self.inner.read, key), ranges)

    def get(self, key: str) -> Buffer:
        return self._watch.run(f"read of {key}", partial(self.inner.get, key))

    def get_within(self, key: str, most: int, what: str) -> Buffer:
        return self._watch.run(f"read of {key}", partial(self.inner.get_within, key, most, what))

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self._watch.run(f"list of {prefix!r}", lambda: [*self.inner.list(prefix)]))

    def size(self, key: str) -> int:
        return self._watch.run(f"size of {key}", partial(self.inner.size, key))

    def delete(self, key: str) -> None:
        self._watch.run(f"delete of {key}", partial(self.inner.delete, key))

    def discard(self, keys: Iterable[str]) -> None:
        every = list(keys)
        for at in range(0, len(every), DELETE_BATCH):
            some = every[at : at + DELETE_BATCH]
            self._watch.run(f"delete of {len(some)} objects", partial(self.inner.discard, some))

    def age(self, key: str) -> float | None:
        return self._watch.run(f"age of {key}", partial(self.inner.age, key))

    def room(self) -> int | None:
        return self._watch.run("look at the room", self.inner.room)

    def place(self) -> Place | None:
        return self._watch.run("look at the place", self.inner.place)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        make = partial(self.inner.writer, key, size_hint)
        inner = self._watch.run(f"beginning of {key}", make, late=lambda writer: writer.abort())
        return DeadlineWriter(self, key, inner)

    def close(self) -> None:
        """Close the inner tier; if a call hangs, only after it has returned."""
        self._watch.close(self.inner.close)


class DeadlineWriter(ObjectWriter):
    """Another writer; progress of any of its calls or leased buffers counts as progress of all of them."""

    def __init__(self, tier: Deadline, key: str, inner: ObjectWriter) -> None:
        self._tier, self._key, self._inner = tier, key, inner
        self._watch, self._what = tier._watch, f"writing of {key}"
        self._effort = Activity()
        self._failure: BaseException | None = None
        self._closing: WatchedCall[None] | None = None
        self._over = False

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        try:
            self._check()
            if release is not None:
                release = self._watch.lend(self._what, self._effort, buffer, release)
            call = self._watch.begin(self._what, partial(self._inner.append, buffer, release), self._effort)
        except BaseException as error:
            if release is not None:
                release()
            self._fail(error)
            raise
        try:
            call.result()
        except BaseException as error:
            # From here on the inner writer releases the lease, however late. Without a lease the caller may change the
            # buffer during a late write and so corrupt the data: this object must never be published.
            self._fail(error)
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        if isinstance(error, Hung) or not isinstance(error, Exception):
            self.abort()

    def close(self) -> None:
        self._check()
        try:
            self._closing = self._watch.begin(self._what, self._inner.close, self._effort)
            self._closing.result()
        except BaseException as error:
            self._failure = error
            raise
        self._over = True

    def abort(self) -> None:
        if self._over:
            return
        self._over = True
        try:
            undoing = self._watch.begin(f"abort of {self._key}", self._undo)
        except Hung:
            self._watch.afterwards(self._undo)
            return
        try:
            undoing.result()
        except Hung as error:
            log.info("%s", error)  # it goes on in its own thread

    def _undo(self) -> None:
        """Abort; and delete the object if a close that was given up has published it after all."""
        self._inner.abort()
        if self._closing is not None and self._closing.succeeded:
            self._tier.inner.delete(self._key)
