"""A tier around a tier whose calls may hang: none holds up its caller for much longer than a deadline."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tierstate.manifest.chunk import Buffer

from .base import ObjectWriter, Range, Release, Tier, Traits
from .bounce import Bounce
from .calls import Call, Effort, Hung
from .host import KeepingArena
from .watch import Watch
from .wrapping import Wrapping

log = logging.getLogger("tierstate")

DISCARD = 32
"""Objects that are deleted in one call."""


class Deadline(Wrapping):
    """Another tier, each call of which is made in a thread that is given up when nothing has come of it for too long.

    A system call on a network file system whose server is dead does not return, and nothing can interrupt it. Then the
    caller gets `TierUnavailable`, and so does every later call, at once, until the call that was given up has come
    back; from then on the tier is used as before. What was given up does no harm when it comes back: a writer is
    aborted, a result is thrown away, and what was put may or may not have come to be, as when an answer is lost.

    Reads go through memory of this tier's own, and are copied from there: one that was given up may still fill its
    memory when the caller has long used his for something else. Buffers with a lease are released when the transfer
    has really ended; until then, they leave the arena's budget of what is in flight.

    It is not for tiers that keep leases for as long as an object lives, nor for ones whose ``traits`` wait.

    Args:
        inner: the tier.
        seconds: without progress of a call, or of a writer, after which it is given up.
        arena: the engine's arena, whose slabs a writer may be given.
    """

    def __init__(self, inner: Tier, seconds: float, arena: KeepingArena | None = None) -> None:
        super().__init__(inner)
        self._watch = Watch(seconds, arena, lambda: inner.name)
        self._bounce = Bounce(self._watch)
        # For whoever drops a tier without closing it: the threads hold the watch, but not us.
        weakref.finalize(self, self._watch.end).atexit = False

    @property
    def traits(self) -> Traits:
        """Those of the tier inside; reads may have any destination, and what it hangs at is among the notes."""
        traits = self.inner.traits
        trouble = self._watch.trouble
        return replace(traits, memory_alignment=1, notes=(*traits.notes, trouble) if trouble else traits.notes)

    def put(self, key: str, data: Buffer) -> None:
        # A copy, since a put that was given up may go on when the caller has changed the buffer.
        self._watch.run(f"put of {key}", partial(self.inner.put, key, data.clone()))

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self._bounce.read(f"read of {key}", partial(self.inner.read, key), ranges)

    def get(self, key: str) -> Buffer:
        return self._watch.run(f"read of {key}", partial(self.inner.get, key))

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self._watch.run(f"list of {prefix!r}", lambda: [*self.inner.list(prefix)]))

    def size(self, key: str) -> int:
        return self._watch.run(f"size of {key}", partial(self.inner.size, key))

    def delete(self, key: str) -> None:
        self._watch.run(f"delete of {key}", partial(self.inner.delete, key))

    def discard(self, keys: Iterable[str]) -> None:
        # Few enough at once that a healthy tier is done with them before the deadline.
        every = list(keys)
        for at in range(0, len(every), DISCARD):
            some = every[at : at + DISCARD]
            self._watch.run(f"delete of {len(some)} objects", partial(self.inner.discard, some))

    def age(self, key: str) -> float | None:
        return self._watch.run(f"age of {key}", partial(self.inner.age, key))

    def room(self) -> int | None:
        return self._watch.run("look at the room", self.inner.room)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        make = partial(self.inner.writer, key, size_hint)
        inner = self._watch.run(f"beginning of {key}", make, late=lambda writer: writer.abort())
        return DeadlineWriter(self, key, inner)

    def close(self) -> None:
        """Close the tier inside; if it hangs, that is done when it comes back."""
        self._watch.close(self.inner.close)


class DeadlineWriter(ObjectWriter):
    """Another writer, all steps of which are watched as one effort."""

    def __init__(self, tier: Deadline, key: str, inner: ObjectWriter) -> None:
        self._tier, self._key, self._inner = tier, key, inner
        self._watch, self._what = tier._watch, f"writing of {key}"
        self._effort = Effort()
        self._failure: BaseException | None = None
        self._closing: Call[None] | None = None
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
            # From here on the lease is the inner writer's to release, however late. And what it writes late may be
            # torn, where there was no lease and the caller changes the buffer: this object must never be published.
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
            log.info("%s", error)  # it goes on by itself

    def _undo(self) -> None:
        """Abort; and remove what a close that was given up has published after all."""
        self._inner.abort()
        if self._closing is not None and self._closing.succeeded:
            self._tier.inner.delete(self._key)
