"""The retry wrapper: a tier around a tier that repeats calls after transient errors (the policy key ``retries``).

Creating an object is not idempotent: when the answer to a create is lost, the object is read back and compared, so that
a ``put`` or a commit never conflicts with itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tierstate.manifest.chunk import Buffer, empty_buffer, spans, view
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import AlreadyExists, NotFound, TierstateError
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier
from tierstate.tiers.latch import Latch
from tierstate.tiers.trace import span

from .base import Wrapping, WrappingWriter
from .breaker import Hung

log = logging.getLogger("tierstate")


CALL_BACKOFF = Backoff(first=0.2, longest=20.0)
"""Pauses between two attempts of one call."""


COMPARE_PIECE = 16 << 20
"""Bytes of one read when an object is read back to compare it."""


T = TypeVar("T")


class Retried(Wrapping):
    """Another tier, whose calls are repeated after transient errors (``error.transient``), with back-off.

    * ``read``, ``list``, ``size``, ``age``, ``delete``, ``discard`` and opening a writer are idempotent, so they are
      repeated.
    * A ``put`` that failed may still have created the object. Before it is repeated, the object is read: if it has the
      same bytes, the put succeeds; if it has other bytes, the put raises `AlreadyExists`; if it does not exist, the
      bytes are sent again. So a put never conflicts with itself.
    * ``append`` is not repeated: a writer aborts its object at the first failure, and the earlier bytes are lost.
    * A writer's ``close`` is not repeated either. After a failure the object is read: if it exists with all appended
      bytes, the close succeeds; otherwise it raises its error.

    Other errors are raised at once, and so is `Hung`: the tier was waited for until its deadline. Closing the tier ends
    the waits between attempts.

    Args:
        inner: the tier.
        retries: most repetitions of one call.
    """

    def __init__(self, inner: Tier, retries: int) -> None:
        super().__init__(inner)
        self.retries = retries
        self._closed = Latch()

    def put(self, key: str, data: Buffer) -> None:
        uncertain = False

        def done() -> bool:
            return uncertain and self.holds(key, data.numel(), checksum(view(data)))

        def send() -> None:
            nonlocal uncertain
            if done():
                return
            try:
                self.inner.put(key, data)
            except AlreadyExists:
                if not done():  # an earlier request may have taken effect only now
                    raise
            except TierstateError as error:
                uncertain = uncertain or error.transient
                raise

        self.again(send, f"put {key}")

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.again(lambda: self.inner.read(key, ranges), f"read {key}")

    def list(self, prefix: str) -> Iterator[str]:
        # Read completely here, since a tier may fail in the middle of a listing.
        return iter(self.again(lambda: [*self.inner.list(prefix)], f"list {prefix}"))

    def size(self, key: str) -> int:
        return self.again(lambda: self.inner.size(key), f"size {key}")

    def delete(self, key: str) -> None:
        self.again(lambda: self.inner.delete(key), f"delete {key}")

    def discard(self, keys: Iterable[str]) -> None:
        some = list(keys)
        self.again(lambda: self.inner.discard(some), f"delete {len(some)} objects")

    def age(self, key: str) -> float | None:
        return self.again(lambda: self.inner.age(key), f"age of {key}")

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return RetriedWriter(self, key, self.again(lambda: self.inner.writer(key, size_hint), f"write {key}"))

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    def again(self, call: Callable[[], T], what: str) -> T:
        """Call until it succeeds or has failed too often; returns its result.

        Raises:
            TierError: the last failure, or one that is not transient.
        """
        for attempt in range(1, self.retries + 1):
            try:
                return call()
            except TierstateError as error:
                if not error.transient or isinstance(error, Hung):
                    raise
                pause = CALL_BACKOFF.pause(attempt)
                log.info("%s: %s: retry %d of %d in %.2f s: %s", self.name, what, attempt, self.retries, pause, error)
                with span("wait for a retry", tier=self.name, call=what):
                    over = self._closed.wait(pause)
                if over:
                    raise
        return call()

    def holds(self, key: str, nbytes: int, digest: bytes) -> bool:
        """Whether a create whose answer was lost took effect: read back, and compared by length and xxh3-128.

        Raises:
            AlreadyExists: the key has an object of other bytes.
        """
        import xxhash

        found = xxhash.xxh3_128()
        try:
            same = self.inner.size(key) == nbytes
            for start, length in spans(nbytes if same else 0, COMPARE_PIECE):
                piece = empty_buffer(length)
                self.inner.read(key, [Range(start, piece)])
                found.update(view(piece))
        except NotFound:
            return False
        if not same or found.digest() != digest:
            raise AlreadyExists(
                f"{self.name}: {key}: exists already with other bytes, nothing was changed", tier=self.name, key=key
            )
        return True


class RetriedWriter(WrappingWriter):
    """Another writer, which checks after a failed close whether the object was created."""

    def __init__(self, tier: Retried, key: str, inner: ObjectWriter) -> None:
        import xxhash

        super().__init__(inner)
        self._tier, self._key = tier, key
        self._digest = xxhash.xxh3_128()
        self._nbytes = 0
        self._done = False

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        # Before the append: once released, the buffer may be overwritten.
        self._digest.update(view(buffer))
        self._nbytes += buffer.numel()
        self.inner.append(buffer, release)

    def close(self) -> None:
        if self._done:
            return
        try:
            self.inner.close()
        except TierstateError as error:
            if not (error.transient and self._took_effect(error)):
                raise
        self._done = True

    def abort(self) -> None:
        if not self._done:
            self.inner.abort()

    def _took_effect(self, error: TierstateError) -> bool:
        def look() -> bool:
            return self._tier.holds(self._key, self._nbytes, self._digest.digest())

        try:
            return self._tier.again(look, f"look for {self._key}")
        except AlreadyExists:
            raise
        except TierstateError as second:
            error.add_note(f"and whether it took effect could not be found out: {second}")
            return False
