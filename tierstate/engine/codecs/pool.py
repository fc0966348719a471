"""Encoder pool: a few threads that compress chunks while others are written; results keep the order of input."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.format.layout import DeltaBase
from tierstate.tiers.concurrency import Task, WorkerPool, usable_cores
from tierstate.tiers.memory.arena import LeasedSlab
from tierstate.tiers.trace import span

T = TypeVar("T")


MAX_WORKERS = 8
"""Most threads: eight encode as fast as the fastest tiers write, and each needs memory for a chunk."""


class Encoded(NamedTuple):
    """An encoded chunk.

    Attributes:
        codec: the codec that decodes it.
        stored: the encoded bytes.
        base: its delta base, if it is a delta.
    """

    codec: str
    stored: Buffer
    base: DeltaBase | None = None


EncodeCall = Callable[[], Encoded]


class _Entry(NamedTuple, Generic[T]):
    what: T
    task: Task[Encoded]
    slab: LeasedSlab | None


class EncoderPool(Generic[T]):
    """Encodes chunks in its own threads, which start with the first chunk.

    Not thread-safe: one thread at a time calls it, and ``put`` is called in that thread. At most ``workers + 1`` chunks
    are in progress. The slab of a chunk is released once it is encoded, so the caller may wait for free slabs.

    Args:
        put: called with each chunk that was added, and its encoded form.
        stirred: an event that ends a wait of `behind`; other threads may set it too.
        workers: threads; None: half the cores.
    """

    def __init__(
        self, put: Callable[[T, Encoded], None], stirred: threading.Event | None = None, workers: int | None = None
    ) -> None:
        self._put, self._stirred = put, stirred or threading.Event()
        self.workers = workers or workers_here()
        self._entries: deque[_Entry[T]] = deque()
        self._pool: WorkerPool | None = None

    def add(self, what: T, work: EncodeCall, slab: LeasedSlab | None = None) -> None:
        """Encode a chunk in a thread; waits until there is room for it.

        Args:
            what: the chunk, as it is passed to ``put``.
            work: called in a thread to encode it.
            slab: the slab of its raw bytes; leased until they are encoded.

        Raises: any error of the ``work`` of an earlier chunk, or of ``put``.
        """
        self.hand_on()
        while self._full:
            self._next()
        if self._pool is None:
            self._pool = WorkerPool(self.workers, "tierstate-encode")
        if slab is not None:
            slab.lease()
        try:
            task = self._pool.submit(partial(_encoded, work, slab), lambda _task: self._stirred.set())
        except BaseException:
            if slab is not None:
                slab.release()
            raise
        self._entries.append(_Entry(what, task, slab))

    @property
    def _full(self) -> bool:
        return len(self._entries) > self.workers

    def behind(self, idle: Callable[[], bool]) -> bool:
        """Wait until there is room for a chunk or the tier is idle; returns whether there is still no room."""
        self.hand_on()
        while self._full and not self._entries[0].task.done():
            if idle():
                return True
            self._stirred.wait()
            self._stirred.clear()
        return False

    def hand_on(self) -> None:
        """Pass encoded chunks to ``put``, up to the first that is not encoded yet; does not wait."""
        while self._entries and self._entries[0].task.done():
            self._next()

    def _next(self) -> None:
        encoded = self._entries[0].task.result()  # one that was not begun has its slab until `abort`
        self._put(self._entries.popleft().what, encoded)

    def finish(self) -> None:
        """Pass all chunks to ``put``, and end the threads.

        Raises: as `add`.
        """
        while self._entries:
            self._next()
        self.abort()

    def abort(self) -> None:
        """Discard the remaining chunks, and end the threads; no slab is leased afterwards."""
        entries, self._entries = self._entries, deque()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        for entry in entries:
            if not entry.task.begun and entry.slab is not None:
                entry.slab.release()


def workers_here() -> int:
    """Default number of threads: half of the cores of this process, as training and writing need the others."""
    cores = usable_cores()
    return max(1, min(MAX_WORKERS, cores // 2))


def _encoded(work: EncodeCall, slab: LeasedSlab | None) -> Encoded:
    """Encode a chunk; the result is copied out of the slab if needed, so that the slab can be released."""
    try:
        with span("encode") as traced:
            found = work()
            traced.also(codec=found.codec, bytes=len(found.stored))
        if slab is not None and _within(found.stored, slab.buffer):
            return found._replace(stored=found.stored.clone())
        return found
    finally:
        if slab is not None:
            slab.release()


def _within(data: Buffer, memory: Buffer) -> bool:
    return data.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
