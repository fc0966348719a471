"""A bucket: objects under a URL, in any store of fsspec, with conditional creates and parallel range reads.

Whether the store really creates an object only once is probed before the first write: several threads race to create
the same key, and one may win (`probe_conditional_create`). So is whether its files can be used to send long objects
while they are written (`StreamProbe`).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, ClassVar

import torch

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AccessDenied, AlreadyExists, NotFound, TierError, TierUnavailable
from tierstate.tiers.base import ObjectWriter, Place, Range, Tier, Traits, check_key, check_ranges, is_key
from tierstate.tiers.capacity import CapacityCounter
from tierstate.tiers.clock import RemoteClock
from tierstate.tiers.concurrency import WorkerPool
from tierstate.tiers.secrets import scrub, secrets_in

from .filesystem import (
    PARALLEL_READS,
    READ_PART,
    FsspecClient,
    MemoryClient,
    ObjectClient,
    open_store,
    store_errors_translated,
    unsafe_connections,
)
from .stream import SEEN_EARLY, StreamProbe, StreamWriter, UploadFile

PROBE_WRITERS = 8


EXTRA_ROUNDS, EXTRA_SECONDS = 8, 10.0
"""Most extra rounds of the probe, in place of rounds with lost answers; and seconds in which they may begin."""


BARRIER_TIMEOUT = 2.0
"""Seconds that the threads of the probe wait for each other."""


StartBarrier = Callable[[], None]


ConditionalCreate = Callable[[str, int, StartBarrier], None]
"""Creates an object of the given name if it does not exist, with bytes that differ for each racing thread;
calls the last argument, a barrier, where all threads should wait for each other."""


def probe_conditional_create(create: ConditionalCreate, delete: Callable[[str], None], rounds: int) -> bool:
    """Whether each round of several simultaneous conditional creates had exactly one winner.

    A store that ignores the condition lets all win; one that checks and then writes lets several win. True does not
    prove anything about later races. A create whose answer was lost may have won, so such a round does not count,
    unless it has several winners anyway.

    Raises:
        TierUnavailable: no create got an answer, or answers were lost in too many rounds.
        TierError: a create failed, for another reason than that the name was taken.
    """
    told, begun = 0, time.monotonic()
    outcomes: Sequence[TierError | None] = ()
    with WorkerPool(PROBE_WRITERS, "tierstate-probe") as pool:
        for n in range(rounds + EXTRA_ROUNDS):
            if n >= rounds and time.monotonic() - begun > EXTRA_SECONDS:
                break
            outcomes = _run(pool, create, delete)
            if outcomes.count(None) > 1:
                return False
            told += outcomes.count(None) == 1 and not any(isinstance(one, TierUnavailable) for one in outcomes)
            if told == rounds:
                return True
    raise _why(outcomes)


def _run(pool: WorkerPool, create: ConditionalCreate, delete: Callable[[str], None]) -> list[TierError | None]:
    """One round: the error of each create, None for one that succeeded."""
    name, start = f".probe-{uuid.uuid4().hex}", _start_barrier()

    def enter(racer: int) -> TierError | None:
        try:
            create(name, racer, start)
        except TierError as error:
            return error
        return None

    outcomes = pool.map(enter, range(PROBE_WRITERS))
    silent = all(isinstance(error, TierUnavailable) for error in outcomes)
    for error in outcomes:
        if error is not None and (silent or not isinstance(error, (AlreadyExists, TierUnavailable))):
            raise error
    delete(name)
    return outcomes


def _start_barrier() -> StartBarrier:
    """A barrier for all threads of the probe; a second call of the same thread does not wait."""
    barrier, gone = threading.Barrier(PROBE_WRITERS, timeout=BARRIER_TIMEOUT), threading.Event()

    def wait() -> None:
        with suppress(threading.BrokenBarrierError):
            if not gone.is_set():
                barrier.wait()
        gone.set()

    return wait


def _why(outcomes: Sequence[TierError | None]) -> TierError:
    """The error to raise after too many rounds without a result."""
    lost = next((error for error in outcomes if isinstance(error, TierUnavailable)), None)
    return lost or TierUnavailable("a race of creates had no winner, again and again")


class Bucket(Tier):
    """Objects under one URL. Listings are never cached; a create is never repeated without a check.

    After a create whose answer was lost (`TierUnavailable`) the object may exist or not.

    Args:
        url: protocol, bucket and prefix.
        options: arguments of fsspec's file system for that protocol.
        capacity: total bytes of the objects. What other processes write and delete meanwhile is counted when it
            seems to be used up.
        store: the client for that URL, if it is open already.

    Attributes:
        streams: long objects are sent while they are written; known after the first write. Otherwise they are gathered
            in memory.
    """

    persistent: ClassVar[bool] = True
    races: ClassVar[int] = 4
    """Rounds of the probe for conditional creates."""
    block: ClassVar[int] = 8 << 20
    """Bytes that a file of the store collects before it sends them. Shorter objects are created by one request."""

    def __init__(
        self, url: str, options: Mapping[str, Any], capacity: int | None = None, store: ObjectClient | None = None
    ) -> None:
        self._secrets = secrets_in(url, options)
        self._store = store or open_store(url, options)
        self._volatile = isinstance(self._store, MemoryClient)
        self.gauge = CapacityCounter(capacity, self._count)
        self._conditional: bool | None = True if self._volatile else None
        self._notes = unsafe_connections(options)
        self.streams = False
        self._ready = False
        self._readying = threading.Lock()
        self._clock = RemoteClock(self._time)

    @property
    def traits(self) -> Traits:
        store = self._store
        bucket = store.root.strip("/").partition("/")[0]
        return Traits(
            persistent=not self._volatile,
            shared="process" if self._volatile else "site",
            failure_domain=scrub(":".join(filter(None, (store.protocol, store.host, bucket))), self._secrets),
            part_size=READ_PART,
            parallelism=PARALLEL_READS,
            capacity=self.gauge.capacity,
            conditional_create=self._conditional,
            notes=self._notes,
        )

    def place(self) -> Place:
        """By endpoint, bucket and prefix: an endpoint of two names is not recognised as one."""
        store = self._store
        return Place(((store.protocol.replace("s3a", "s3"), store.host, *store.root.strip("/").split("/")),))

    def explained(self, doing: str, key: str) -> AbstractContextManager[None]:
        """Raise errors of the store in the block as tier errors, without secrets."""
        store = self._store
        place = f"{store.protocol}://{store.path(key).lstrip('/')}"
        place += f" at {store.endpoint}" if store.endpoint else ""
        return store_errors_translated(doing, self.name, key, place, self._secrets)

    # Reading

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.check_odd(key, ranges)
        with self.explained("read", key):
            self._store.fill(key, ranges)

    def check_odd(self, key: str, ranges: Sequence[Range]) -> None:
        """Check empty and negative ranges, for which no request is sent, so that the store cannot refuse them."""
        check_key(key)
        if not ranges or any(offset < 0 or not out.numel() for offset, out in ranges):
            check_ranges(f"{self.name}: {key}", self.size(key), ranges)

    def list(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return iter(())
        with self.explained("list", prefix):
            names = self._store.names(prefix)
        # Each once: rclone's server goes on listing what racing writers made, also after it has been deleted.
        return iter(sorted({name for name in names if is_key(name)}))

    def size(self, key: str) -> int:
        check_key(key)
        with self.explained("read", key):
            return self._store.size(key)

    def age(self, key: str) -> float | None:
        check_key(key)
        with self.explained("look at", key):
            created, now = self._store.times(key)
        if created is None:
            return None
        there = now.timestamp() if now is not None else self._clock.now()
        return None if there is None else max(0.0, there - created.timestamp())

    def _time(self) -> float | None:
        """The time of the store, from the creation time of a new object; None if not known."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self._send(name, torch.zeros(1, dtype=torch.uint8, device="cpu"))
            with self.explained("look at", name):
                created, _ = self._store.times(name)
            self._remove(name)
        except AccessDenied:
            return None
        return None if created is None else created.timestamp()

    def check_free(self, key: str) -> None:
        """Check that the object does not exist.

        Raises:
            AlreadyExists
        """
        try:
            self.size(key)
        except NotFound:
            return
        raise AlreadyExists(f"{self.name}: {key}: exists already, nothing was changed", tier=self.name, key=key)

    # Writing

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)
        self._prepare()
        self.gauge.take(data.numel(), self.name, key)
        try:
            self.create(key, data)
        except BaseException:
            self.gauge.give_up(data.numel())
            raise
        self.gauge.made(data.numel())

    def create(self, key: str, data: Buffer) -> None:
        """One conditional create. If the probe found several winners, it first checks that the key is free."""
        self.look_first(key)
        self._send(key, data)

    def look_first(self, key: str) -> None:
        """Call `check_free` if the store does not enforce that an object is created only once."""
        if self._conditional is False:
            self.check_free(key)

    def _send(self, name: str, data: Buffer) -> None:
        with self.explained("create", name):
            self._store.create(name, view(data))

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        check_key(key)
        self._prepare()
        self.check_free(key)
        return StreamWriter(self, key)

    def upload_file(self, key: str) -> UploadFile:
        """A new file of the store, to write an object piece by piece."""
        return self._file(key, self.block)

    def _file(self, name: str, block: int) -> UploadFile:
        store = self._store
        assert isinstance(store, FsspecClient)
        return UploadFile(partial(store.open_new, name, block), lambda doing: self.explained(doing, name))

    def delete(self, key: str) -> None:
        check_key(key)
        size = 0
        if self.gauge.capacity is not None:
            try:
                size = self.size(key)
            except NotFound:
                return
        self._remove(key)
        self.gauge.give_back(size)

    def discard(self, keys: Iterable[str]) -> None:
        if self.gauge.capacity is not None:
            super().discard(keys)  # which counts the bytes that each one frees
            return
        names = [check_key(key) for key in keys]
        with self.explained("delete", names[0] if names else ""):
            self._store.remove_all(names)

    def _remove(self, name: str) -> None:
        with self.explained("delete", name):
            self._store.remove(name)

    def _prepare(self) -> None:
        """Before the first write: probe conditional creates, and count the bytes in use if there is a capacity."""
        with self._readying:
            if self._ready:
                return
            if not self._volatile:
                self._notes += tuple(scrub(note, self._secrets) for note in self._findings())
            self.gauge.look()
            self._ready = True

    def _count(self) -> int:
        """Bytes of all objects, by a listing."""
        with self.explained("list", ""):
            return self._store.total()

    def _findings(self) -> Iterator[str]:
        """Probe what the store supports. Yields notes for users."""
        notes: list[str] = []

        def remove(name: str) -> None:
            try:
                self._remove(name)
            except AccessDenied as error:
                if not notes:
                    notes.append(f"scratch objects cannot be deleted: {error}")

        one_won = probe_conditional_create(self._enter, remove, self.races)
        found = f"several winners in a race of {PROBE_WRITERS}"
        if one_won:
            found = f"one winner in each of {self.races} races of {PROBE_WRITERS}"
        known = self._known_to_race()
        self._conditional = one_won and not known
        found += f"; {known}" if known else ""
        found += (
            "; that is no proof for others" if self._conditional else "; racing writers of one key may both succeed"
        )
        stream_fault = self._stream_fault(self._store, remove) if isinstance(self._store, FsspecClient) else None
        self.streams = stream_fault == ""
        yield from notes
        yield f"conditional create: {found}"
        if stream_fault:
            yield f"objects are gathered in memory before they are sent: {stream_fault}"

    def _stream_fault(self, store: FsspecClient, remove: Callable[[str], None]) -> str:
        """Why long objects cannot be sent while they are written; empty if they can.

        Raises:
            TierError: no object can be created that is not seen before it is complete.
        """
        name = f".probe-{uuid.uuid4().hex}"
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")

        def first_byte() -> int:
            with self.explained("read", name):
                store.fill(name, [Range(0, byte)])
            return int(byte[0])

        try:
            fault = StreamProbe(partial(self._file, name), first_byte).fault(bool(self._conditional))
        finally:
            remove(name)
        if fault == SEEN_EARLY and store.creates_by_files:
            raise TierError(
                f"{self.name}: nothing can be written to {store.protocol}://: {fault}, so that a writer that is "
                "killed leaves part of one; mount it, and write a tier of 'type: lustre' with the mounted folder as "
                "its 'path', or use another store",
                tier=self.name,
            )
        return fault

    def _known_to_race(self) -> str:
        """Why several writers may win here, whatever a probe saw; empty where nothing is known."""
        return ""

    def _enter(self, name: str, racer: int, start: StartBarrier) -> None:
        """Take part in the probe; no two threads send the same bytes."""
        start()
        self._send(name, torch.full((8,), racer, dtype=torch.uint8, device="cpu"))

    def room(self) -> int | None:
        return self.gauge.left

    def close(self) -> None:
        self._store.close()
