"""Encoding: a few threads that encode chunks beside the writes, and hand them on in the order in which they came."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from tierstate.manifest.bases import Base
from tierstate.manifest.chunk import Buffer

from .arena import Slab

T = TypeVar("T")

MOST = 8
"""Threads at most: eight encode as fast as the fastest tiers write, and each has a chunk in memory of its own."""


class Encoded(NamedTuple):
    """A chunk's stored form.

    Attributes:
        codec: by which it is read back.
        stored: the bytes.
        base: what it is a difference from, if it is one.
    """

    codec: str
    stored: Buffer
    base: Base | None = None


Work = Callable[[], Encoded]


class _Entry(NamedTuple, Generic[T]):
    what: T
    future: Future[Encoded]
    slab: Slab | None


class Encoding(Generic[T]):
    """Encodes chunks in threads of its own, which begin when there is something to do.

    For one thread at a time, in which results are handed on too. At most ``workers + 1`` chunks are under way, and none
    of them needs its slab any more once it is encoded: whoever hands chunks in may wait for slabs.

    Args:
        put: takes each chunk that was handed in, and its stored form.
        stirred: set by whoever else may end a wait of `behind`.
        workers: threads; None: half the cores.
    """

    def __init__(
        self, put: Callable[[T, Encoded], None], stirred: threading.Event | None = None, workers: int | None = None
    ) -> None:
        self._put, self._stirred = put, stirred or threading.Event()
        self.workers = workers or workers_here()
        self._entries: deque[_Entry[T]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def add(self, what: T, work: Work, slab: Slab | None = None) -> None:
        """Have a chunk encoded, once there is room for it.

        Args:
            what: of which chunk ``put`` is to be told.
            work: encodes it.
            slab: where its raw bytes lie; leased until they are encoded.

        Raises: what the work of an earlier chunk, or ``put``, raised.
        """
        self.hand_on()
        while self._full:
            self._next()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tierstate-encode-")
        if slab is not None:
            slab.lease()
        try:
            future = self._pool.submit(_encoded, work, slab)
        except BaseException:
            if slab is not None:
                slab.release()
            raise
        future.add_done_callback(lambda _: self._stirred.set())
        self._entries.append(_Entry(what, future, slab))

    @property
    def _full(self) -> bool:
        return len(self._entries) > self.workers

    def behind(self, idle: Callable[[], bool]) -> bool:
        """Wait until there is room for a chunk, or the tier has nothing to do; whether there is no room yet."""
        self.hand_on()
        while self._full and not self._entries[0].future.done():
            if idle():
                return True
            self._stirred.wait()
            self._stirred.clear()
        return False

    def hand_on(self) -> None:
        """Hand on what is encoded, and not behind what is not, without waiting."""
        while self._entries and self._entries[0].future.done():
            self._next()

    def _next(self) -> None:
        entry = self._entries.popleft()
        self._put(entry.what, entry.future.result())

    def finish(self) -> None:
        """Hand on everything, and end the threads.

        Raises: as `add`.
        """
        while self._entries:
            self._next()
        self.abort()

    def abort(self) -> None:
        """Forget what was not handed on, and end the threads; nothing holds a slab afterwards."""
        entries, self._entries = self._entries, deque()
        for entry in entries:
            if entry.future.cancel() and entry.slab is not None:
                entry.slab.release()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def workers_here() -> int:
    """Threads that encode, by the cores that this process may use: half of them, as training and writing need some."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores // 2))


def _encoded(work: Work, slab: Slab | None) -> Encoded:
    """What a chunk became, none of it in the slab."""
    try:
        found = work()
        if slab is not None and _within(found.stored, slab.buffer):
            return found._replace(stored=found.stored.clone())
        return found
    finally:
        if slab is not None:
            slab.release()


def _within(data: Buffer, memory: Buffer) -> bool:
    return data.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
