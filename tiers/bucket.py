"""A bucket: objects in a store that fsspec reaches."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AccessDenied, AlreadyExists, NotFound, TierUnavailable

from .base import ObjectWriter, Range, Tier, Traits, check_key, is_key
from .clocks import DistantClock
from .gauge import Gauge
from .object_errors import explained, scrub, secrets_in
from .race import RACERS, Start, one_winner
from .ranges import check_ranges
from .stores import MemoryStore, Store, open_store

READ_PART = 16 << 20
PARALLEL = 8


class Bucket(Tier):
    """Objects under one URL. Listings are never cached; creates are never repeated blindly.

    After a create whose answer was lost (`TierUnavailable`) the object may be there or not.

    Args:
        url: protocol, bucket and prefix.
        options: what fsspec's file system for that protocol takes.
        capacity: bytes that the objects may have together. What others write meanwhile is not noticed.
        store: the store of that URL, if it is open already.
    """

    persistent: ClassVar[bool] = True
    races: ClassVar[int] = 4
    """How often creates are raced to see what the store does."""

    def __init__(
        self, url: str, options: Mapping[str, Any], capacity: int | None = None, store: Store | None = None
    ) -> None:
        self._secrets = secrets_in(url, options)
        self._store = store or open_store(url, options)
        self._volatile = isinstance(self._store, MemoryStore)
        self.gauge = Gauge(capacity)
        self._conditional: bool | None = True if self._volatile else None
        self._notes: tuple[str, ...] = ()
        self._ready = False
        self._readying = threading.Lock()
        self._clock = DistantClock(self._time)

    @property
    def traits(self) -> Traits:
        store = self._store
        bucket = store.root.strip("/").partition("/")[0]
        return Traits(
            persistent=not self._volatile,
            shared="process" if self._volatile else "site",
            failure_domain=scrub(":".join(filter(None, (store.protocol, store.host, bucket))), self._secrets),
            part_size=READ_PART,
            parallelism=PARALLEL,
            capacity=self.gauge.capacity,
            conditional_create=self._conditional,
            notes=self._notes,
        )

    def explained(self, doing: str, key: str) -> AbstractContextManager[None]:
        """Errors of the store in the block become ours, without secrets."""
        place = f"{self._store.protocol}://{self._store.path(key).lstrip('/')}"
        return explained(doing, self.name, key, place, self._secrets)

    # Reading

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.check_odd(key, ranges)
        pieces = [piece for wanted in ranges for piece in _split(wanted)]
        for i in range(0, len(pieces), PARALLEL):
            self._fill(key, pieces[i : i + PARALLEL])

    def check_odd(self, key: str, ranges: Sequence[Range]) -> None:
        """Nothing, unless a range is wrong of which the store would not say so, since it is not asked for it."""
        check_key(key)
        if not ranges or any(offset < 0 or not out.numel() for offset, out in ranges):
            check_ranges(f"{self.name}: {key}", self.size(key), ranges)

    def _fill(self, key: str, pieces: Sequence[Range]) -> None:
        with self.explained("read", key):
            starts, ends = zip(*((offset, offset + out.numel()) for offset, out in pieces), strict=True)
            answers = self._store.fetch(key, starts, ends)
        for (offset, out), data in zip(pieces, answers, strict=True):
            if len(data) != out.numel():
                check_ranges(f"{self.name}: {key}", self.size(key), pieces)
                text = f"the store sent {len(data)} bytes from {offset}, {out.numel()} were asked for"
                raise TierUnavailable(f"{self.name}: {key}: {text}", tier=self.name, key=key)
            # NumPy lets other threads run meanwhile; assigning to a memoryview does not.
            np.copyto(out.numpy(), np.frombuffer(data, np.uint8))

    def list(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return iter(())
        with self.explained("list", prefix):
            names = self._store.names(prefix)
        return iter(sorted(name for name in names if is_key(name)))

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
        """The time at the store, by what it says of an object that was just made; None where it cannot be told."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self._send(name, torch.zeros(1, dtype=torch.uint8))
            with self.explained("look at", name):
                created, _ = self._store.times(name)
            self._remove(name)
        except AccessDenied:
            return None
        return None if created is None else created.timestamp()

    def check_free(self, key: str) -> None:
        """Nothing, unless the object exists.

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
            self.gauge.give_back(data.numel())
            raise

    def create(self, key: str, data: Buffer) -> None:
        """One conditional create. Where races have been seen to go wrong, it looks first."""
        self.look_first(key)
        self._send(key, data)

    def look_first(self, key: str) -> None:
        """`check_free`, where the store alone does not see to it that an object is created once."""
        if self._conditional is False:
            self.check_free(key)

    def _send(self, name: str, data: Buffer) -> None:
        with self.explained("create", name):
            self._store.create(name, view(data))

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        check_key(key)
        self._prepare()
        self.check_free(key)
        return super().writer(key, size_hint)

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
            super().discard(keys)  # which looks how much room each of them makes
            return
        names = [check_key(key) for key in keys]
        with self.explained("delete", names[0] if names else ""):
            self._store.remove_all(names)

    def _remove(self, name: str) -> None:
        with self.explained("delete", name):
            self._store.remove(name)

    def _prepare(self) -> None:
        """Before the first write: whether creates are conditional is found out, and the fill if it matters."""
        with self._readying:
            if self._ready:
                return
            if self._conditional is None:
                self._notes = tuple(scrub(note, self._secrets) for note in self._findings())
            if self.gauge.capacity is not None:
                self.gauge.used = sum(self.size(key) for key in self.list(""))
            self._ready = True

    def _findings(self) -> Iterator[str]:
        """Look what the store does with what is going to be asked of it, and say what was found."""
        notes: list[str] = []

        def remove(name: str) -> None:
            try:
                self._remove(name)
            except AccessDenied as error:
                notes.append(f"a scratch object could not be deleted: {error}")

        self._conditional = one_winner(self._enter, remove, self.races)
        found = (
            f"one winner in each of {self.races} races of {RACERS}; that is no proof for others"
            if self._conditional
            else f"several winners in a race of {RACERS}; racing writers of one key may both succeed"
        )
        yield from notes
        yield f"conditional create: {found}"

    def _enter(self, name: str, racer: int, start: Start) -> None:
        """Take part in a race of creates; no two racers send the same."""
        start()
        self._send(name, torch.full((8,), racer, dtype=torch.uint8))

    def room(self) -> int | None:
        return self.gauge.left

    def close(self) -> None:
        self._store.close()


def _split(wanted: Range) -> Iterator[Range]:
    for at in range(0, wanted.out.numel(), READ_PART):
        yield Range(wanted.offset + at, wanted.out[at : at + READ_PART])
